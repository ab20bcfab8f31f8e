#pragma once

#include "ops/cuda/attention/hopper.cuh"
#include "ops/cuda/attention/hopper.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/head.cuh"

// The new token of a decoding step, on the way from its projections to attention: what norm_rope.cu does to it, done by the blocks that
// attend. Its key and value go into the cache for later steps, and into the tile in shared memory for this one.

namespace prl::ops::cuda::hopper {

#if PRL_HOPPER

/// True if the unit's last tile holds the new token.
template <typename F>
__device__ __forceinline__ bool has_newest(const AttentionUnit& u) {
  return u.tile_end * F::kTile >= u.num_keys;
}

/// One warpgroup. The heads of a unit are dealt to its threads in this order: k, v, then those of q; so warp 0 keeps k and v.
template <typename F>
struct FreshToken {
  static constexpr int kLanes = F::kD / kVec, kHeadsPerWarp = kWarp / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) % 128 / kWarp;
  const int which = lane / kLanes, column = lane % kLanes * kVec;
  uint4 kept{};  ///< 8 elements of k or v
  bool has_waited = false;

  /// 8 elements from `column` on of a row in a tile of groups of 8 rows `group_bytes` apart, whose blocks of 64 columns are `block_bytes`
  /// apart.
  __device__ __forceinline__ uint4* place(unsigned char* tile, int row, int group_bytes, int block_bytes) const {
    return reinterpret_cast<uint4*>(tile + row / 8 * group_bytes + column / 64 * block_bytes + row % 8 * 128 +
                                    (column / 8 % 8 ^ row % 8) * 16);
  }

  /// Heads of q into `q`, k and v into the cache. The first call of a block waits for the kernel that wrote the projections.
  __device__ __forceinline__ void prepare(const ForwardParams& p, const AttentionUnit& u, int group, unsigned char* q) {
    const FreshHeads& f = p.fresh;
    const int num_heads = num_heads_of(p.packing, group), first_head = first_head_of(p.packing, group);
    const int kv_head = kv_head_of(p.packing, group);
    const bool is_newest = has_newest<F>(u), is_first_half = column < F::kD / 2;
    int position = __ldcg(f.positions + u.token);
    if (position < 0 || position >= f.num_positions) {
      ::prl::cuda::report(f.fault, ::prl::cuda::Fault::kRopePosition, static_cast<std::uint32_t>(u.token));
      position = 0;
    }
    float cosine[kVec], sine[kVec];
    const std::int64_t at = static_cast<std::int64_t>(position) * (F::kD / 2) + column % (F::kD / 2);
    load<true>(cosine, f.cosines + at, kVec);
    load<true>(sine, f.sines + at, kVec);
    for (int base = 0; base < num_heads + 2; base += 4 * kHeadsPerWarp) {
      const int i = base + warp * kHeadsPerWarp + which;
      const bool is_value = i == 1, is_live = i < 2 ? is_newest : i < num_heads + 2;
      const int head = i == 0 ? p.num_q_heads + kv_head : is_value ? p.num_q_heads + p.num_kv_heads + kv_head : first_head + i - 2;
      float w[kVec] = {}, v[kVec] = {}, normed[kVec], other[kVec];
      if (f.q_norm != nullptr && is_live && !is_value) load<true>(w, (i == 0 ? f.k_norm : f.q_norm) + column, kVec);
      wait();
      if (is_live) load<true>(v, f.qkv + u.token * f.qkv_stride + head * F::kD + column, kVec);
      if (f.q_norm != nullptr) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) normed[e] = v[e];
        norm_head<__nv_bfloat16, kLanes>(normed, w, F::kD, f.eps);
#pragma unroll
        for (int e = 0; e < kVec; ++e) v[e] = is_value ? v[e] : normed[e];
      }
      partners_of<kLanes>(other, v, F::kD);
      if (!is_value) rotate_head(v, other, cosine, sine, is_first_half);
      uint4 stored;
      store<true>(reinterpret_cast<__nv_bfloat16*>(&stored), v, kVec);
      if (base == 0) named_sync<128>(3);  // all warps have formed the scores of the unit before
      if (i < 2)
        kept = stored;
      else if (is_live)
        *place(q, i - 2, 1024, F::kQBlock) = stored;
    }
    if (is_newest && group % p.packing.groups_per_kv_head == 0) into_cache(p, u, kv_head);
    async_fence();
    named_sync<128>(3);
  }
  __device__ __forceinline__ void wait() {
    if (!has_waited) wait_for_previous();
    has_waited = true;
  }
  /// Into the unit's last tile: k (which = 0) or v (1). The caller fences and synchronises.
  __device__ __forceinline__ void into_tile(const AttentionUnit& u, unsigned char* tile, int wanted) const {
    if (warp == 0 && which == wanted) *place(tile, u.num_keys - 1 - (u.tile_end - 1) * F::kTile, F::kGroupBytes, F::kColumnBlock) = kept;
  }

 private:
  __device__ __forceinline__ void into_cache(const ForwardParams& p, const AttentionUnit& u, int kv_head) const {
    const FreshHeads& f = p.fresh;
    const int slot = __ldcg(f.slots + u.token);
    if (warp != 0 || which > 1 || slot < 0) return;
    const std::int64_t row =
        (static_cast<std::int64_t>(slot / p.block_size) * p.num_kv_heads + kv_head) * p.block_size + slot % p.block_size;
    *reinterpret_cast<uint4*>((which == 0 ? f.k_cache : f.v_cache) + row * F::kD + column) = kept;
  }
};

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda::hopper
