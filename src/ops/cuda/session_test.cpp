#include "device/cuda/check.hpp"
#include "device/cuda/cuda_runtime.hpp"
#include "ops/cuda/test_session.hpp"
#include "ops/cuda_table.hpp"

namespace prl::ops::testing {
namespace {

class VisibleRuntime final : public ::prl::cuda::CudaRuntime {
 public:
  VisibleRuntime() : CudaRuntime(0) {}
  void* allocate(std::size_t bytes) override {
    activate();
    void* pointer = nullptr;
    PRL_CUDA_CHECK(cudaHostAlloc(&pointer, bytes == 0 ? 1 : bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    in_use_ += bytes;
    return pointer;
  }
  std::size_t bytes_in_use() const noexcept override { return in_use_; }
  /// Bodies that wait cannot be recorded.
  std::unique_ptr<RecordedWork> record(const std::function<void()>& /*work*/) override { return nullptr; }
  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    in_use_ -= bytes;
    (void)cudaDeviceSynchronize();
    (void)cudaFreeHost(pointer);
  }
  void copy_from_host(void* destination, const void* host, std::size_t bytes) override {
    CudaRuntime::copy_from_host(destination, host, bytes);
    synchronize();
  }
  void copy_within(void* destination, const void* source, std::size_t bytes) override {
    CudaRuntime::copy_within(destination, source, bytes);
    synchronize();
  }
  void zero(void* destination, std::size_t bytes) override {
    CudaRuntime::zero(destination, bytes);
    synchronize();
  }

 private:
  std::atomic<std::size_t> in_use_{0};
};

/// body, then a wait.
template <auto kEntry>
struct Waiting;
template <typename Result, typename... Args, Result (*OpTable::*kEntry)(OpContext&, Args...)>
struct Waiting<kEntry> {
  static Result run(OpContext& ctx, Args... args) {
    const auto body = cuda_op_table()->*kEntry;
    if constexpr (std::is_void_v<Result>) {
      body(ctx, args...);
      ctx.runtime->synchronize();
    } else {
      Result result = body(ctx, args...);
      ctx.runtime->synchronize();
      return result;
    }
  }
};

OpTable make_waiting_table() {
  OpTable t = *cuda_op_table();
  const auto wait = [&]<auto kEntry>() {
    if (t.*kEntry != nullptr) t.*kEntry = Waiting<kEntry>::run;
  };
#define PRL_OP(name) wait.operator()<&OpTable::name>();
  PRL_FOR_EACH_OP(PRL_OP)
  PRL_FOR_EACH_OPTIONAL_OP(PRL_OP)
#undef PRL_OP
  wait.operator()<&OpTable::sum_squares>();
  wait.operator()<&OpTable::norm_rope>();
  wait.operator()<&OpTable::norm_rope_backward>();
  return t;
}

}  // namespace

std::shared_ptr<DeviceRuntime> make_visible_cuda_runtime() { return std::make_shared<VisibleRuntime>(); }

const OpTable& waiting_cuda_table() {
  static const OpTable table = make_waiting_table();
  return table;
}

}  // namespace prl::ops::testing
