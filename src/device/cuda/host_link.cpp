#include "device/host_link.hpp"

#include <array>
#include <cstdlib>

#include "base/error.hpp"
#include "device/cuda/check.hpp"
#include "device/cuda/cuda_runtime.hpp"
#include "device/cuda/page_locked.hpp"
#include "device/cuda_host_link.hpp"

namespace prl::cuda {
namespace {

constexpr std::size_t kAlignment = 64;

/// Copies of one direction: a stream, and an event behind each of the last copies.
class Lane {
 public:
  void open() {
    PRL_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    PRL_CUDA_CHECK(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming));
    for (cudaEvent_t& event : done_) PRL_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  void close() noexcept {
    if (stream_ != nullptr) (void)cudaStreamSynchronize(stream_);
    for (const cudaEvent_t event : done_)
      if (event != nullptr) (void)cudaEventDestroy(event);
    if (begin_ != nullptr) (void)cudaEventDestroy(begin_);
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  /// Behind the work of `work` and behind `after`, if that is not null.
  std::uint64_t copy(std::span<const HostCopy> pieces, cudaStream_t work, cudaEvent_t after) {
    PRL_CUDA_CHECK(cudaEventRecord(begin_, work));
    PRL_CUDA_CHECK(cudaStreamWaitEvent(stream_, begin_, 0));
    if (after != nullptr) PRL_CUDA_CHECK(cudaStreamWaitEvent(stream_, after, 0));
    for (const auto& [to, from, bytes] : pieces)
      if (bytes != 0) PRL_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
    ++count_;
    PRL_CUDA_CHECK(cudaEventRecord(done_[count_ % done_.size()], stream_));
    return count_;
  }
  /// Behind the copy of that number; behind a later one of this lane if the event has been used again.
  cudaEvent_t event_of(std::uint64_t number) const { return done_[number % done_.size()]; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  std::array<cudaEvent_t, 64> done_{};
  std::uint64_t count_ = 0;
};

class CudaHostLink final : public HostLink {
 public:
  CudaHostLink(std::shared_ptr<DeviceRuntime> runtime, bool page_locked)
      : runtime_(std::move(runtime)), cuda_(runtime_of(*runtime_)), page_locked_(page_locked) {
    cuda_.activate();
    for (Lane& lane : lanes_) lane.open();
  }
  ~CudaHostLink() override {
    if (cudaSetDevice(cuda_.device().index) != cudaSuccess) return;  // the process ends and the driver is gone
    for (Lane& lane : lanes_) lane.close();
  }
  CudaHostLink(const CudaHostLink&) = delete;
  CudaHostLink& operator=(const CudaHostLink&) = delete;

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    cuda_.activate();
    const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    // What the system does not have it would hand out all the same, and end the process where it is touched.
    if (const std::size_t available = make_cpu_runtime()->bytes_available(); size > available)
      fail(ErrorCode::kOutOfMemory,
           "[host memory] wanted {} bytes beside {}, {} bytes of host memory are available: keep less there (offloading, copies for "
           "healing)",
           bytes, to_string(cuda_.device()), available);
    if (!page_locked_) {
      void* memory = std::aligned_alloc(kAlignment, size);
      if (memory == nullptr) fail(ErrorCode::kOutOfMemory, "[host memory] wanted {} bytes beside {}", bytes, to_string(cuda_.device()));
      return {memory, [](void* p) { std::free(p); }};
    }
    const char* why = "";
    std::shared_ptr<void> memory = allocate_page_locked(size, why);
    if (memory == nullptr)
      fail(ErrorCode::kOutOfMemory,
           "[host memory] wanted {} bytes of page-locked memory beside {}: {}; offload less, or switch pin_memory off", bytes,
           to_string(cuda_.device()), why);
    return memory;
  }
  Ticket to_host(void* host, const void* source, std::size_t bytes) override {
    const HostCopy piece{host, source, bytes};
    return to_host({&piece, 1});
  }
  Ticket to_device(void* destination, const void* host, std::size_t bytes, Ticket after) override {
    const HostCopy piece{destination, host, bytes};
    return to_device({&piece, 1}, after);
  }
  Ticket to_host(std::span<const HostCopy> pieces) override {
    if (pieces.empty()) return 0;
    cuda_.activate();
    return 2 * lanes_[0].copy(pieces, work(), nullptr);
  }
  Ticket to_device(std::span<const HostCopy> pieces, Ticket after) override {
    if (pieces.empty()) return 0;
    cuda_.activate();
    return 2 * lanes_[1].copy(pieces, work(), after == 0 ? nullptr : event_of(after)) + 1;
  }
  void hold_work(Ticket ticket) override {
    if (ticket == 0) return;
    cuda_.activate();
    PRL_CUDA_CHECK(cudaStreamWaitEvent(work(), event_of(ticket), 0));
  }
  void wait(Ticket ticket) override {
    if (ticket == 0) return;
    cuda_.activate();
    PRL_CUDA_CHECK(cudaEventSynchronize(event_of(ticket)));
    cuda_.throw_fault();
  }

 private:
  cudaStream_t work() const { return static_cast<cudaStream_t>(cuda_.stream()); }
  /// A ticket is twice the number of the copy in its lane, plus the lane.
  cudaEvent_t event_of(Ticket ticket) const { return lanes_[ticket % 2].event_of(ticket / 2); }

  std::shared_ptr<DeviceRuntime> runtime_;
  CudaRuntime& cuda_;
  bool page_locked_;
  std::array<Lane, 2> lanes_;  ///< to the host, to the device
};

}  // namespace
}  // namespace prl::cuda

namespace prl {

std::shared_ptr<HostLink> make_cuda_host_link(const std::shared_ptr<DeviceRuntime>& runtime, bool page_locked) {
  return std::make_shared<cuda::CudaHostLink>(runtime, page_locked);
}

}  // namespace prl
