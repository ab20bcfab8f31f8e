#include "device/host_link.hpp"

#include "device/cuda_host_link.hpp"

namespace prl {

HostLink::Ticket HostLink::to_host(std::span<const HostCopy> pieces) {
  Ticket last = 0;
  for (const HostCopy& piece : pieces) last = to_host(piece.to, piece.from, piece.bytes);
  return last;
}
HostLink::Ticket HostLink::to_device(std::span<const HostCopy> pieces, Ticket after) {
  Ticket last = 0;
  for (const HostCopy& piece : pieces) last = to_device(piece.to, piece.from, piece.bytes, after);
  return last;
}

namespace {

class CpuHostLink final : public HostLink {
 public:
  using HostLink::to_device, HostLink::to_host;
  explicit CpuHostLink(std::shared_ptr<DeviceRuntime> runtime) : runtime_(std::move(runtime)) {}
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    return {runtime_->allocate(bytes), [runtime = runtime_, bytes](void* memory) { runtime->deallocate(memory, bytes); }};
  }
  Ticket to_host(void* host, const void* source, std::size_t bytes) override {
    runtime_->copy_to_host(host, source, bytes);
    return 0;
  }
  Ticket to_device(void* destination, const void* host, std::size_t bytes, Ticket /*after*/) override {
    runtime_->copy_from_host(destination, host, bytes);
    return 0;
  }
  void hold_work(Ticket /*ticket*/) override {}
  void wait(Ticket /*ticket*/) override {}

 private:
  std::shared_ptr<DeviceRuntime> runtime_;
};

}  // namespace

std::shared_ptr<HostLink> make_host_link(const std::shared_ptr<DeviceRuntime>& runtime, bool page_locked) {
  if (runtime->device().kind == DeviceKind::kCuda) return make_cuda_host_link(runtime, page_locked);
  return std::make_shared<CpuHostLink>(runtime);
}

}  // namespace prl
