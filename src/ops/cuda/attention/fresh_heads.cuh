#pragma once

#include "ops/cuda/attention/hopper.cuh"
#include "ops/cuda/attention/hopper.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/head.cuh"

// The new token of a decoding step, on the way from its projections to attention: what norm_rope.cu does to it, done by three warps of
// the block that attends, a unit ahead of those that compute. Its key and value go into the cache for later steps, and into the tile in
// shared memory for this one.

namespace prl::ops::cuda::hopper {

/// A unit and its group of heads, as warps of a block hand it to each other. One without tokens is the end.
struct Work {
  AttentionUnit unit;
  int group;
};
constexpr int kWorkBytes = 48;
static_assert(sizeof(Work) <= kWorkBytes);

/// What the three kinds of warps share. Copying warp -> `next` -> preparing warps -> q, k, v and `work` -> computing warps.
struct FreshMemory {
  Work *next, *work;
  std::uint64_t *next_full, *next_empty;
  unsigned char* rows;  ///< [unit of the block, even or odd][k, v][D] of the new token
  static constexpr int bytes(int head_dim) { return 2 * kWorkBytes + 16 + 4 * head_dim * 2; }
  __device__ explicit FreshMemory(unsigned char* p)
      : next(reinterpret_cast<Work*>(p)),
        work(reinterpret_cast<Work*>(p + kWorkBytes)),
        next_full(reinterpret_cast<std::uint64_t*>(p + 2 * kWorkBytes)),
        next_empty(next_full + 1),
        rows(p + 2 * kWorkBytes + 16) {}
};

#if PRL_HOPPER

/// True if the unit's last tile holds the new token.
template <typename F>
__device__ __forceinline__ bool has_newest(const AttentionUnit& u) {
  return u.tile_end * F::kTile >= u.num_keys;
}

/// 8 elements from `column` on of a row in a tile of groups of 8 rows `group_bytes` apart, whose blocks of 64 columns are `block_bytes`
/// apart.
__device__ __forceinline__ uint4* place_in_tile(unsigned char* tile, int row, int column, int group_bytes, int block_bytes) {
  return reinterpret_cast<uint4*>(tile + row / 8 * group_bytes + column / 64 * block_bytes + row % 8 * 128 +
                                  (column / 8 % 8 ^ row % 8) * 16);
}

/// 8 elements of the new k (which = 0) or v (1) of a block's unit `round`.
template <typename F>
__device__ __forceinline__ uint4* new_row(const FreshMemory& m, std::uint32_t round, int which, int column) {
  return reinterpret_cast<uint4*>(m.rows + (static_cast<int>(round % 2) * 2 + which) * F::kD * 2 + column * 2);
}
/// The new row into its place in the last slot of the unit's last tile, by the first threads of a warpgroup, of which this is number
/// `thread`. The caller fences and synchronises.
template <typename F>
__device__ __forceinline__ void new_row_into(unsigned char* slot, const FreshMemory& m, const AttentionUnit& u, std::uint32_t round,
                                             int which, int thread) {
  const int column = thread * kVec;
  if (column < F::kD)
    *place_in_tile(slot, (u.num_keys - 1) % F::kSlotRows, column, F::kGroupBytes, F::kColumnBlock) = *new_row<F>(m, round, which, column);
}

/// The preparing warps. The heads of a unit are dealt to them in this order: k, v, then those of q.
template <typename F>
struct FreshWarps {
  static constexpr int kWarps = 3, kThreads = kWarps * kWarp, kLanes = F::kD / kVec, kHeadsPerWarp = kWarp / kLanes,
                       kHeadsAtOnce = kWarps * kHeadsPerWarp;
  const ForwardParams& p;
  const FreshMemory m;
  unsigned char* const q;
  std::uint64_t *const q_full, *const q_empty;
  const int warp;  ///< of them
  const int lane = static_cast<int>(threadIdx.x) % kWarp, which = lane / kLanes, column = lane % kLanes * kVec;

  __device__ __forceinline__ void run() const {
    for (std::uint32_t round = 0;; ++round) {
      barrier_wait(m.next_full, round % 2);
      const Work next = *m.next;
      barrier_arrive(m.next_empty);
      const bool is_end = next.unit.num_tokens == 0;
      CacheRow row;
      if (is_end)
        barrier_wait(q_empty, round % 2 ^ 1);
      else
        row = prepare(next.unit, next.group, round);
      if (warp == 0 && lane == 0) *m.work = next;
      async_fence();
      barrier_arrive(q_full);
      if (is_end) return;
      // Not before: the fence would wait for it, and those that compute for the fence.
      if (row.to != nullptr) *row.to = row.values;
    }
  }

 private:
  /// What a lane has for the cache.
  struct CacheRow {
    uint4* to = nullptr;
    uint4 values;
  };
  /// Heads of q into their tile as soon as the unit before has formed its scores, k and v beside it.
  __device__ __forceinline__ CacheRow prepare(const AttentionUnit& u, int group, std::uint32_t round) const {
    const FreshHeads& f = p.fresh;
    const int num_heads = num_heads_of(p.packing, group), first_head = first_head_of(p.packing, group);
    const int kv_head = kv_head_of(p.packing, group);
    const bool is_newest = has_newest<F>(u), is_first_half = column < f.num_pairs, turns = column < 2 * f.num_pairs;
    int position = __ldcg(f.positions + u.token);
    const int slot = __ldcg(f.slots + u.token);
    if (position < 0 || position >= f.num_positions) {
      ::prl::cuda::report(f.fault, ::prl::cuda::Fault::kRopePosition, static_cast<std::uint32_t>(u.token));
      position = 0;
    }
    const std::int64_t at = static_cast<std::int64_t>(position) * f.num_pairs + (is_first_half ? column : column - f.num_pairs);
    float cosine[kVec] = {}, sine[kVec] = {};
    if (turns) {
      load<true>(cosine, f.cosines + at, kVec);
      load<true>(sine, f.sines + at, kVec);
    }
    sign_sines(sine, is_first_half);
    CacheRow row;
    if (const int i = warp * kHeadsPerWarp + which; i < 2 && is_newest && slot >= 0 && group % p.packing.groups_per_kv_head == 0) {
      const std::int64_t at_row =
          (static_cast<std::int64_t>(slot / p.block_size) * p.num_kv_heads + kv_head) * p.block_size + slot % p.block_size;
      row.to = reinterpret_cast<uint4*>((i == 0 ? f.k_cache : f.v_cache) + at_row * F::kD + column);
    }
    for (int base = 0; base < num_heads + 2; base += kHeadsAtOnce) {
      const int i = base + warp * kHeadsPerWarp + which;
      const bool is_value = i == 1, is_live = i < 2 ? is_newest : i < num_heads + 2;
      const int head = i == 0 ? p.num_q_heads + kv_head : is_value ? p.num_q_heads + p.num_kv_heads + kv_head : first_head + i - 2;
      uint4 stored;
      {
        float w[kVec] = {}, v[kVec] = {}, other[kVec];
        if (f.q_norm != nullptr && is_live && !is_value) load<true>(w, (i == 0 ? f.k_norm : f.q_norm) + column, kVec);
        const std::int64_t from = known_here(u.token * f.qkv_stride + head * F::kD + column);
        if (base == 0) wait_for_previous();
        if (is_live) load<true>(v, f.qkv + from, kVec);
        if (f.q_norm != nullptr) {
          float normed[kVec];
#pragma unroll
          for (int e = 0; e < kVec; ++e) normed[e] = v[e];
          norm_head<__nv_bfloat16, kLanes>(normed, w, 1.0f / F::kD, f.eps);
#pragma unroll
          for (int e = 0; e < kVec; ++e) v[e] = is_value ? v[e] : normed[e];
        }
        partners_of<__nv_bfloat16, kLanes>(other, v, 2 * f.num_pairs);
        if (!is_value && turns) rotate_head(v, other, cosine, sine);
        store<true>(reinterpret_cast<__nv_bfloat16*>(&stored), v, kVec);
      }
      if (base == 0) barrier_wait(q_empty, round % 2 ^ 1);
      if (!is_live) continue;
      if (i >= 2) {
        *place_in_tile(q, i - 2, column, 1024, F::kQBlock) = stored;
        continue;
      }
      *new_row<F>(m, round, i, column) = stored;
      row.values = stored;
    }
    return row;
  }
};

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda::hopper
