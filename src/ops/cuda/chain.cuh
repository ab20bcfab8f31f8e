#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "ops/cuda/launch.hpp"

// Kernels of recorded work that begin before the one before them has ended (programmatic dependent launch, compute capability 9.0).
//
// A kernel launched with `launch_chained` may have blocks on the device while earlier kernels still run. Until `wait_for_previous` it
// touches nothing that recorded work writes: weights may be read, which no recorded work writes. (The embedding alone reads and writes
// before it waits: recorded work begins with it, or with a plan of attention.) Every such kernel waits, so what one kernel finds done all
// later ones find done. Outside recorded work kernels run one after another as ever.
//
// A kernel may also run beside the one before it, P, whose results it does not need: P signals once it has waited itself, and the kernel
// waits for the signal before its work, and for P at its end, so that whoever finds it done finds P done. Blocks of P that have not begun
// keep those of the kernel from beginning, so none of them holds up the signal that it waits for. A third kernel takes the signal back.

namespace prl::ops::cuda {

/// Lets blocks of the next kernel begin as soon as all blocks of this one have begun.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Until all earlier kernels have ended and what they wrote is seen.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Says that what kernels before this one wrote is there. By one thread, after wait_for_previous.
__device__ __forceinline__ void signal(std::int32_t* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }
/// Until the kernel before this one has signalled. By all threads of a warp.
__device__ __forceinline__ void wait_for_signal(const std::int32_t* flag) {
  constexpr int kMostPolls = 1 << 24;  // seconds: a bug then
  if (threadIdx.x % 32 == 0) {
    std::int32_t value = 0;
    for (int i = 0; value == 0; ++i) {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
      if (i == kMostPolls) __trap();
    }
  }
  __syncwarp();
}

/// Prefetches a weight into the second-level cache. Allowed before `wait_for_previous`.
__device__ __forceinline__ void prefetch_weight(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

inline bool is_recording(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
}
/// Queues a kernel that calls `wait_for_previous`. `is_early`: it may have blocks on the device before the kernel queued before it has
/// ended, as it may behind one that was not itself queued so, or waits in turn.
template <typename... Parameters, typename... Arguments>
void launch_waiting(bool is_early, cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
                    Arguments&&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = is_early ? 1 : 0;
  PRL_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}
/// As recorded work has all of its kernels: early there, and one after another elsewhere.
template <typename... Parameters, typename... Arguments>
void launch_chained(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
                    Arguments&&... arguments) {
  launch_waiting(is_recording(stream), stream, kernel, grid, block, shared_bytes, std::forward<Arguments>(arguments)...);
}

}  // namespace prl::ops::cuda
