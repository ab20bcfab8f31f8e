#include "ops/cuda/shard_gather.hpp"

#include <cuda_runtime.h>

#include <algorithm>

#include "ops/cuda/chain.cuh"

// One kernel per gather: a rank stores its part into the memory of all ranks and waits until the parts of all are in its own. A large part
// is followed by a flag; a small one comes in words that carry the number of their gather, which saves the way there and back that a fence
// between values and flag takes.

namespace prl::ops::cuda {
namespace {

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

/// Calls `has_come` until it says so; gives up after the deadline, or at once where an earlier gather has.
template <typename HasCome>
__device__ __forceinline__ void wait_until(const HasCome& has_come, int peer, GatherState* state, ::prl::cuda::FaultWord* fault) {
  std::uint64_t start = 0;
  for (int polls = 0; !has_come(); ++polls) {
    if (polls % 1024 != 1023) continue;
    if (start == 0) start = now_ns();
    const bool has_given_up = heard(&state->has_given_up) != 0;
    if (!has_given_up && now_ns() - start < kDeadlineNs) continue;
    if (!has_given_up) ::prl::cuda::report(fault, ::prl::cuda::Fault::kMissingPeer, static_cast<std::uint32_t>(peer));
    tell(&state->has_given_up, 1);
    return;
  }
}

__device__ __forceinline__ void store_marked(uint4* to, uint2 value, std::uint32_t number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(value.x), "r"(number), "r"(value.y) : "memory");
}
__device__ __forceinline__ uint4 load_marked(const uint4* from) {
  uint4 word;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from)
               : "memory");
  return word;
}

/// One word a thread. Stores of 16 bytes may be seen in halves of 8, so that each half has its mark.
__global__ void __launch_bounds__(kGatherThreads)
    gather_marked_kernel(GatherPeers peers, GatherPart part, int rank, int size, GatherState* state, ::prl::cuda::FaultWord* fault,
                         bool may_start_early) {
  if (may_start_early) let_next_begin();
  wait_for_previous();
  const int words = static_cast<int>(part.vectors) * 2, width = words * size, count = static_cast<int>(part.rows) * words;
  const int i = static_cast<int>(blockIdx.x) * kGatherThreads + static_cast<int>(threadIdx.x);
  const std::uint32_t number = state->numbers[blockIdx.x] + 1;
  if (i < count) {
    const int row = i / words, at = i - row * words;
    auto* const out = reinterpret_cast<uint2*>(peers.out[rank]) + static_cast<std::int64_t>(row) * width + at;
    const uint2 value = reinterpret_cast<const uint2*>(part.data + row * part.row_stride)[at];
    for (int k = 1; k < size; ++k) {
      const int to = rank + k < size ? rank + k : rank + k - size;
      store_marked(peers.marked[to] + rank * kMaxMarkedWords + i, value, number);
    }
    out[rank * words] = value;
    for (int k = 1; k < size; ++k) {
      const int from = rank + k < size ? rank + k : rank + k - size;
      uint4 word;
      wait_until(
          [&] {
            word = load_marked(peers.marked[rank] + from * kMaxMarkedWords + i);
            return word.y == number && word.w == number;
          },
          from, state, fault);
      out[from * words] = {word.x, word.z};
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) state->numbers[blockIdx.x] = number;
}

/// A block waits for the same block of the other ranks, which all are launched alike.
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(GatherPeers peers, GatherPart part, int rank, int size, GatherState* state, ::prl::cuda::FaultWord* fault) {
  const std::int64_t count = part.rows * part.vectors, width = part.vectors * size;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kGatherThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kGatherThreads) {
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
    // Numbers wrap around: what counts is their distance.
    wait_until([&] { return static_cast<std::int32_t>(heard(own) - number) >= 0; }, peer, state, fault);
  }
  __syncthreads();
  if (threadIdx.x == 0) state->numbers[blockIdx.x] = number;
}

}  // namespace

void launch_gather(const OpContext& ctx, const GatherPeers& peers, const GatherPart& part, int rank, int size, GatherState* own,
                   bool may_start_early) {
  const std::int64_t words = 2 * part.rows * part.vectors;
  if (words <= kMaxMarkedWords) {
    launch_waiting(may_start_early && is_recording(stream_of(ctx)), stream_of(ctx), gather_marked_kernel,
                   dim3(static_cast<unsigned>(std::max<std::int64_t>(1, ceil_div(words, kGatherThreads)))), dim3(kGatherThreads), 0, peers,
                   part, rank, size, own, fault_word_of(ctx), may_start_early);
    return;
  }
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(words / 2, kGatherThreads), 1, kMaxGatherBlocks));
  gather_kernel<<<grid, kGatherThreads, 0, stream_of(ctx)>>>(peers, part, rank, size, own, fault_word_of(ctx));
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
