#include "ops/cuda/attention/decode_plan.hpp"

#include "device/cuda/check.hpp"
#include "ops/cuda/chain.cuh"

namespace prl::ops::cuda {
namespace {

constexpr int kPlanThreads = 256;

/// Sum of the values of the threads before this one; `total` gets that of all. Every thread of the block calls it.
__device__ int sum_before(int value, int& total) {
  __shared__ int sums[kPlanThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int x = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int y = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += y;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  return before + x - value;
}

/// One block. Two walks over the sequences: the first counts full chunks, behind which the second puts the partial ones.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(DecodePlan plan, const std::int32_t* context_len, int num_sequences, int max_blocks, int tile, std::int32_t window) {
  let_next_begin();  // the embedding, which waits for the plan before it lets others begin
  const int tid = static_cast<int>(threadIdx.x);
  // Chunks before the window are left out; one that it begins in counts as full if it is not the last.
  const auto first_chunk = [&](int length) { return max(0, length - window) / kChunkKeys; };
  int all_full = 0;
  for (int base = 0; base < num_sequences; base += kPlanThreads) {
    int total;
    const int length = base + tid < num_sequences ? context_len[base + tid] : 0;
    sum_before(length / kChunkKeys - min(first_chunk(length), length / kChunkKeys), total);
    all_full += total;
  }
  int num_full = 0, num_partial = 0, num_states = 0, num_merges = 0;
  for (int base = 0; base < num_sequences; base += kPlanThreads) {
    const int s = base + tid, length = s < num_sequences ? context_len[s] : 0;
    const int first = min(first_chunk(length), length / kChunkKeys);
    const int full = length / kChunkKeys - first, partial = length % kChunkKeys != 0 ? 1 : 0, chunks = full + partial;
    int totals[4];
    const int full_at = num_full + sum_before(full, totals[0]);
    const int partial_at = all_full + num_partial + sum_before(partial, totals[1]);
    const int state_at = num_states + sum_before(chunks > 1 ? chunks : 0, totals[2]);
    const int merge_at = num_merges + sum_before(chunks > 1 ? 1 : 0, totals[3]);
    num_full += totals[0];
    num_partial += totals[1];
    num_states += totals[2];
    num_merges += totals[3];
    AttentionUnit u{};
    u.token = s;
    u.num_tokens = 1;
    u.position = length - 1;
    u.num_keys = length;
    u.keys = s * max_blocks;
    for (int c = 0; c < chunks; ++c) {
      u.tile_begin = max((first + c) * (kChunkKeys / tile), max(0, length - window) / tile);
      u.tile_end = min((length + tile - 1) / tile, (first + c + 1) * (kChunkKeys / tile));
      u.state = chunks > 1 ? state_at + c : -1;
      plan.units[c < full ? full_at + c : partial_at] = u;
    }
    if (chunks > 1) plan.merges[merge_at] = {s, 1, state_at, chunks};
  }
  if (tid == 0) {
    plan.counts[0] = num_full + num_partial;
    plan.counts[1] = num_merges;
    plan.counts[2] = plan.counts[3] = 0;
  }
}

}  // namespace

void launch_decode_plan(const DecodePlan& plan, const std::int32_t* context_len, int num_sequences, int max_blocks, int tile,
                        std::int32_t window, cudaStream_t stream) {
  plan_kernel<<<1, kPlanThreads, 0, stream>>>(plan, context_len, num_sequences, max_blocks, tile, window);
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
