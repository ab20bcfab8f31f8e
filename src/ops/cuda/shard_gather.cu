#include "ops/cuda/shard_gather.hpp"

#include <cuda_runtime.h>

#include <algorithm>

// One kernel per gather: a rank stores its part into the memory of all ranks, tells each of them, and waits until all have told it. What a
// kernel waits for was enqueued on the other device before anything that could wait for this one, so that no two of them wait for each
// other.

namespace prl::ops::cuda {
namespace {

constexpr int kThreads = 512;
constexpr std::uint64_t kDeadlineNs = 30'000'000'000ULL;

__device__ __forceinline__ void tell(std::uint32_t* flag, std::uint32_t number) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(number) : "memory");
}
__device__ __forceinline__ std::uint32_t heard(const std::uint32_t* flag) {
  std::uint32_t number = 0;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(number) : "l"(flag) : "memory");
  return number;
}
__device__ __forceinline__ std::uint64_t now_ns() {
  std::uint64_t ns = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

/// A block waits for the same block of the other ranks, which all are launched alike.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(GatherPeers peers, GatherPart part, int rank, int size, GatherState* state, ::prl::cuda::FaultWord* fault) {
  const std::int64_t count = part.rows * part.vectors, width = part.vectors * size;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const std::int64_t row = i / part.vectors, at = i - row * part.vectors;
    const GatherVector value = part.data[row * part.row_stride + at];
    for (int to = 0; to < size; ++to) peers.out[to][row * width + rank * part.vectors + at] = value;
  }
  __threadfence_system();
  __syncthreads();
  const std::uint32_t number = state->numbers[blockIdx.x] + 1;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < size) {
    tell(peers.told[peer] + rank * kMaxGatherBlocks + blockIdx.x, number);
    const std::uint32_t* own = peers.told[rank] + peer * kMaxGatherBlocks + blockIdx.x;
    const std::uint64_t start = now_ns();
    // Numbers wrap around: what counts is their distance.
    for (int polls = 0; static_cast<std::int32_t>(heard(own) - number) < 0; ++polls) {
      if (polls % 1024 != 1023) continue;
      const bool has_given_up = heard(&state->has_given_up) != 0;
      if (!has_given_up && now_ns() - start < kDeadlineNs) continue;
      if (!has_given_up) ::prl::cuda::report(fault, ::prl::cuda::Fault::kMissingPeer, static_cast<std::uint32_t>(peer));
      tell(&state->has_given_up, 1);
      break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) state->numbers[blockIdx.x] = number;
}

}  // namespace

void launch_gather(const OpContext& ctx, const GatherPeers& peers, const GatherPart& part, int rank, int size, GatherState* own) {
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(part.rows * part.vectors, kThreads), 1, kMaxGatherBlocks));
  gather_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(peers, part, rank, size, own, fault_word_of(ctx));
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
