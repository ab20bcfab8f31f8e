#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <span>

#include "device/cuda/check.hpp"
#include "device/cuda/fault.hpp"
#include "ops/context.hpp"

// What every CUDA body needs around its launches. Kernels are compiled without contraction (-fmad=false), so that the same
// expression rounds alike wherever it is inlined: write fmaf() where a fused multiply-add is meant. Every header here is compiled three
// times for each .cu file, so what a few of them need of the runtime is declared and no more.

namespace prl::ops::cuda {

inline cudaStream_t stream_of(const OpContext& ctx) { return static_cast<cudaStream_t>(ctx.stream); }
const cudaDeviceProp& properties_of(const OpContext& ctx);
int num_multiprocessors(const OpContext& ctx);
::prl::cuda::FaultWord* fault_word_of(const OpContext& ctx);

/// Device copy of a host array for the work this op queues; see CudaRuntime::stage. Costs no copy when an equal array was staged
/// just before, as by the previous layer. nullptr for an empty span.
const void* staged_bytes(const OpContext& ctx, const void* host, std::size_t bytes);
template <typename T>
const T* staged(const OpContext& ctx, std::span<const T> host) {
  return static_cast<const T*>(staged_bytes(ctx, host.data(), host.size_bytes()));
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t round_up(std::int64_t a, std::int64_t unit) { return ceil_div(a, unit) * unit; }
inline bool is_aligned(const void* pointer, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0; }

/// Carves typed pieces out of memory that starts 256-byte aligned, each piece so aligned too. With no memory it only counts:
/// carve once with nullptr for the size, then with ctx.workspace->require(size).
class Carver {
 public:
  explicit Carver(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(std::int64_t count) {
    char* p = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof(T)), 256));
    return reinterpret_cast<T*>(p);
  }
  std::size_t used() const { return used_; }

 private:
  char* memory_;
  std::size_t used_ = 0;
};

}  // namespace prl::ops::cuda
