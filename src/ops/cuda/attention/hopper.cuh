#pragma once

#include <cstdint>

#include "ops/cuda/attention/hopper.hpp"
#include "ops/cuda/attention/rows.cuh"
#include "ops/cuda/attention/unit.hpp"
#include "ops/cuda/hopper.cuh"

// What the attention kernels of compute capability 9.0 share: the ring of tiles, scores and sums of a warpgroup, rows of a lane.

namespace prl::ops::cuda::hopper {

/// Rows a lane holds of its warpgroup's 64, and what they are.
struct LaneRows {
  int token[2];  ///< within the unit
  int head[2];   ///< within the unit's heads
  bool valid[2];
};
__device__ __forceinline__ LaneRows lane_rows(const RowPacking& packing, int warpgroup, int num_tokens, int num_heads) {
  LaneRows r;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = static_cast<int>(threadIdx.x % 128) / 32 * 16 + static_cast<int>(threadIdx.x % 32) / 4 + 8 * i;
    r.token[i] = warpgroup * packing.tokens + row / packing.heads;
    r.head[i] = row % packing.heads;
    r.valid[i] = row < packing.tokens * packing.heads && r.token[i] < num_tokens && r.head[i] < num_heads;
  }
  return r;
}

/// The item a block computes in round `round`: the list goes to the blocks back and forth, so that with the longest first
/// all get about the same.
__device__ __forceinline__ int item_of_round(int round) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

__device__ __forceinline__ int kv_head_of(const RowPacking& packing, int group) { return group / packing.groups_per_kv_head; }
/// First query head of a group of heads, and how many it has.
__device__ __forceinline__ int first_head_of(const RowPacking& packing, int group) {
  return kv_head_of(packing, group) * packing.group + group % packing.groups_per_kv_head * packing.heads;
}
__device__ __forceinline__ int num_heads_of(const RowPacking& packing, int group) {
  return min(packing.heads, packing.group - group % packing.groups_per_kv_head * packing.heads);
}

/// Past the first-level cache, which may hold what lay there before the plan was made.
__device__ __forceinline__ AttentionUnit read_unit(const AttentionUnit* unit) {
  static_assert(sizeof(AttentionUnit) == 2 * sizeof(int4));
  const int4 a = __ldcg(reinterpret_cast<const int4*>(unit)), b = __ldcg(reinterpret_cast<const int4*>(unit) + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
template <typename Unit>
__device__ __forceinline__ Unit read_unit(const Unit* unit) {
  return *unit;
}
__device__ __forceinline__ int num_units_of(const ForwardParams& p) {
  return p.num_units_at != nullptr ? __ldcg(p.num_units_at) : p.num_units;
}

/// Calls work(unit, head) for each pair this block computes. The grid is no larger than the list has room for: the first unit is read
/// before it is known whether it exists, so that the two reads wait side by side.
template <typename Unit, typename Work>
__device__ __forceinline__ void for_each_item(const Unit* units, int num_units, int num_heads, const Work& work) {
  Unit unit = read_unit(units + item_of_round(0) / num_heads);
  const int total = num_units * num_heads;
  for (int round = 0; round * static_cast<int>(gridDim.x) < total; ++round) {
    const int item = item_of_round(round);
    if (item >= total) break;
    if (round > 0) unit = read_unit(units + item / num_heads);
    work(unit, item % num_heads);
  }
}

#if PRL_HOPPER

/// d = A B^T over kD columns. A: 64 rows in blocks `a_block` bytes apart; B: rows in blocks `b_block` bytes apart.
template <int kD, int kCount>
__device__ __forceinline__ void multiply_rows(float (&d)[kCount], std::uint32_t a, int a_block, std::uint32_t b, int b_block) {
  const std::uint64_t da = along_rows(a), db = along_rows(b);
#pragma unroll
  for (int step = 0; step < kD / 16; ++step)
    product<0>(d, da + ((step / 4 * a_block + step % 4 * 32) >> 4), db + ((step / 4 * b_block + step % 4 * 32) >> 4), step > 0);
}

/// d (+)= A B with A from registers, kSteps steps of 16 down the rows of B.
template <int kSteps, int kCount>
__device__ __forceinline__ void multiply_down(float (&d)[kCount], const std::uint32_t (&a)[4 * kSteps], std::uint32_t b, int b_block,
                                              int accumulate) {
  const std::uint64_t db = down_rows(b, static_cast<std::uint32_t>(b_block));
#pragma unroll
  for (int step = 0; step < kSteps; ++step) product<1>(d, a + 4 * step, db + (step * 2048 >> 4), step > 0 ? 1 : accumulate);
}

/// Accumulators become the left operand of the next product.
template <int kScores>
__device__ __forceinline__ void pack_rows(std::uint32_t (&a)[kScores / 2], const float (&s)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) a[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda::hopper
