#include "ops/cuda/attention/merge.hpp"

#include "device/cuda/check.hpp"
#include "ops/cuda/attention/rows.cuh"
#include "ops/cuda/chain.cuh"

namespace prl::ops::cuda {
namespace {

constexpr int kMergeThreads = 128;

/// A block per unit and group of heads; a warp per row, its lanes over columns.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ MergeParams p) {
  let_next_begin();
  wait_for_previous();
  const int groups = p.packing.num_groups, lane = static_cast<int>(threadIdx.x) % 32;
  const int total = (p.num_units_at != nullptr ? *p.num_units_at : p.num_units) * groups;
  for (int item = static_cast<int>(blockIdx.x); item < total; item += static_cast<int>(gridDim.x)) {
    const MergeUnit u = p.units[item / groups];
    const int group = item % groups, part = group % p.packing.groups_per_kv_head;
    const int first_head = group / p.packing.groups_per_kv_head * p.packing.group + part * p.packing.heads;
    const int num_heads = min(p.packing.heads, p.packing.group - part * p.packing.heads);
    for (int row = static_cast<int>(threadIdx.x) / 32; row < u.num_tokens * num_heads; row += kMergeThreads / 32) {
      const int token = row / num_heads, head = row % num_heads;
      const std::int64_t step = static_cast<std::int64_t>(groups) * p.state_rows;  // from a state to the next
      const std::int64_t first = u.state * step + static_cast<std::int64_t>(group) * p.state_rows + token * p.packing.heads + head;
      T* to = static_cast<T*>(p.out) + (static_cast<std::int64_t>(u.token + token) * p.num_q_heads + first_head + head) * p.head_dim;
      for (int d = 2 * lane; d < p.head_dim; d += 64) {
        float2 state = p.state_sums[first];
        float2 out = *reinterpret_cast<const float2*>(p.state_out + first * p.head_dim + d);
        for (int c = 1; c < u.num_states; ++c) {
          const std::int64_t at = first + c * step;
          const float2 next_state = p.state_sums[at];
          const float2 next = *reinterpret_cast<const float2*>(p.state_out + at * p.head_dim + d);
          const ChunkWeights w = merge_rows<T>(state.x, state.y, next_state.x, next_state.y);
          out.x = merge_out(out.x, next.x, w);
          out.y = merge_out(out.y, next.y, w);
        }
        const float scale = end_row<T>(state.x, state.y, p.sinks, first_head + head).scale;
        const float x = finish_out(out.x, scale), y = finish_out(out.y, scale);
        if constexpr (std::is_same_v<T, float>)
          *reinterpret_cast<float2*>(to + d) = make_float2(x, y);
        else
          *reinterpret_cast<std::uint32_t*>(to + d) = pack_bf16(x, y);
      }
    }
  }
}

}  // namespace

template <typename T>
void launch_merge(const MergeParams& p, int num_blocks, cudaStream_t stream) {
  launch_chained(stream, merge_kernel<T>, dim3(static_cast<unsigned>(num_blocks)), dim3(kMergeThreads), 0, p);
}
template void launch_merge<float>(const MergeParams&, int, cudaStream_t);
template void launch_merge<__nv_bfloat16>(const MergeParams&, int, cudaStream_t);

}  // namespace prl::ops::cuda
