#pragma once

#include <algorithm>

#include "device/cuda/check.hpp"
#include "ops/cuda/attention/hopper.cuh"
#include "ops/cuda/attention/hopper.hpp"

// Backward attention with warpgroup products, recomputing the weights from the log-sums (Dao 2023, FlashAttention-2).
//
// Two passes, each of which owns what it sums, so nothing is added across blocks and every run gives the same bits:
//   keys     a block holds 128 keys and walks the queries that see them, of all heads of the group: dk, dv
//   queries  a block holds 128 rows of queries and walks the keys they see: dq
// The first leaves the gradients of the scores in memory for the second, which then is one product and reads as fast as memory
// gives (launch_backward_kept). Where there is no room for them, both form the scores: 7 products in place of 5.
// The pass over keys forms transposed scores, so that weights go from accumulators to the next product's left operand without
// leaving registers.

namespace prl::ops::cuda::hopper {

template <int kD_>
struct KeysShape {
  static constexpr int kD = kD_, kBlocks = kD / 64, kQueries = 64;
  static constexpr int kKeyBlock = kKeyRows * 128, kKeyBytes = kBlocks * kKeyBlock;
  static constexpr int kQueryBlock = kQueries * 128, kQueryBytes = kBlocks * kQueryBlock;
  static constexpr int kStatsBytes = kQueries * 8;
  static constexpr int kSlotBytes = 2 * kQueryBytes + 1024;  ///< q, dout, statistics
  static constexpr int kSlots = kD == 64 ? 6 : 4;
  static constexpr int kBarriersAt = 2 * kKeyBytes + kSlots * kSlotBytes;
  static constexpr int kSharedBytes = kBarriersAt + (2 * kSlots + 2) * 8;
};

template <int kD_>
struct QueriesShape {
  static constexpr int kD = kD_, kBlocks = kD / 64, kTile = kKeyRows;
  static constexpr int kRowBlock = 64 * 128, kRowGroup = kBlocks * kRowBlock, kRowBytes = 2 * kRowGroup;
  static constexpr int kSlotBlock = kTile * 128, kSlotBytes = kBlocks * kSlotBlock;
  static constexpr int kSlots = kD == 64 ? 6 : 4;
  static constexpr int kBarriersAt = 2 * kRowBytes + kSlots * kSlotBytes;
  static constexpr int kSharedBytes = kBarriersAt + (2 * kSlots + 2) * 8;
};

template <int kD_>
struct SumsShape {
  static constexpr int kD = kD_, kBlocks = kD / 64;
  static constexpr int kKeyBlock = kKeyRows * 128, kKeyBytes = kBlocks * kKeyBlock;
  static constexpr int kSlotBytes = kKeyBytes + 2 * kScoreTileBytes;
  static constexpr int kSlots = kD == 64 ? 4 : 3;
  static constexpr int kBarriersAt = kSlots * kSlotBytes;
  static constexpr int kSharedBytes = kBarriersAt + (2 * kSlots + 2) * 8;
};

constexpr int kBackwardThreads = 384;
constexpr int kBackwardCopyRegisters = 24, kBackwardRegisters = 240;

#if PRL_HOPPER

/// What both passes keep in shared memory: two matrices that stay for an item, a ring, barriers.
template <typename B>
struct BackwardMemory {
  unsigned char *base, *ring;
  std::uint64_t *full, *empty, *held_full, *held_empty;
  __device__ BackwardMemory(unsigned char* p, int held_bytes)
      : base(p),
        ring(p + held_bytes),
        full(reinterpret_cast<std::uint64_t*>(p + B::kBarriersAt)),
        empty(full + B::kSlots),
        held_full(empty + B::kSlots),
        held_empty(held_full + 1) {}
  __device__ void init() const {
    if (threadIdx.x == 0) {
      if (shared_address(base) % 1024 != 0) __trap();
      for (int i = 0; i < B::kSlots; ++i) {
        barrier_init(full + i, 1);
        barrier_init(empty + i, 8);
      }
      barrier_init(held_full, 1);
      barrier_init(held_empty, 8);
      barrier_init_fence();
    }
    __syncthreads();
  }
};

/// Writes accumulators times `factor`; `row[r]` is nullptr for a row that does not exist.
template <int kCount>
__device__ __forceinline__ void store_rows(const float (&d)[kCount], __nv_bfloat16* const (&row)[2], int head_dim, float factor) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row[r] == nullptr) continue;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) {
      const int column = 2 * (i - 2 * r) + 2 * static_cast<int>(threadIdx.x % 4);
      if (column < head_dim) *reinterpret_cast<std::uint32_t*>(row[r] + column) = pack_bf16(d[i] * factor, d[i + 1] * factor);
    }
  }
}

// Keys ----------------------------------------------------------------------------------------------------------------------------

/// The end of the queries that are walked for the keys of a unit: all that see one, and the rest of the last unit of queries, which
/// reads the score gradients of whole units.
__device__ __forceinline__ int end_of_queries(const KeyUnit& u, int window) {
  return min(u.length, ((u.first + kKeyRows + window - 2) / kKeyRows + 1) * kKeyRows);
}
/// Calls visit(query head, first query) in the order of summation.
template <typename Visit>
__device__ __forceinline__ void for_each_query_block(const KeyUnit& u, int window, int kv_head, int group, const Visit& visit) {
  const int end = end_of_queries(u, window);
  for (int h = kv_head * group; h < (kv_head + 1) * group; ++h)
    for (int q = u.first; q < end; q += 64) visit(h, q);
}
/// The first tile of keys that one of the queries from `first` on sees.
__device__ __forceinline__ int first_tile_of(int first, int window) { return max(0, first - window + 1) / kKeyRows; }

template <typename B>
__device__ __forceinline__ void keys_copies(const BackwardParams& p, const BackwardMemory<B>& m) {
  RingPlace<B::kSlots> place;
  std::uint32_t phase = 0;
  for_each_item(p.key_units, p.num_key_units, p.num_round_kv_heads, [&](const KeyUnit& u, int round_head) {
    const int kv_head = p.first_kv_head + round_head;
    barrier_wait(m.held_empty, phase ^ 1);
    phase ^= 1;
    barrier_arrive_expect(m.held_full, 2 * B::kKeyBytes);
#pragma unroll
    for (int b = 0; b < B::kBlocks; ++b) {
      copy_box(m.base + b * B::kKeyBlock, &p.k, m.held_full, b * 64, u.token + u.first, kv_head);
      copy_box(m.base + B::kKeyBytes + b * B::kKeyBlock, &p.v, m.held_full, b * 64, u.token + u.first, kv_head);
    }
    for_each_query_block(u, p.window, kv_head, p.packing.group, [&](int head, int q) {
      barrier_wait(m.empty + place.slot, place.phase ^ 1);
      unsigned char* slot = m.ring + place.slot * B::kSlotBytes;
      std::uint64_t* full = m.full + place.slot;
      barrier_arrive_expect(full, 2 * B::kQueryBytes + B::kStatsBytes);
#pragma unroll
      for (int b = 0; b < B::kBlocks; ++b) {
        copy_box(slot + b * B::kQueryBlock, &p.q, full, b * 64, head, u.token + q);
        copy_box(slot + B::kQueryBytes + b * B::kQueryBlock, &p.dout, full, b * 64, head, u.token + q);
      }
      copy_box(slot + 2 * B::kQueryBytes, &p.stats_rows_map, full, 0, static_cast<int>(head * p.stats_rows + u.stats + q) / kStatsPerRow,
               0);
      place.advance();
    });
  });
}

__device__ __forceinline__ std::uint32_t transposed(std::uint32_t matrix) {
  std::uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(matrix));
  return r;
}
/// A warp's 16 keys x 64 queries of score gradients go to memory as left operands with queries as rows.
__device__ __forceinline__ void keep_scores(uint4* tile, const std::uint32_t (&d)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    __stcs(tile + (i * 8 + threadIdx.x / 32) * 32 + threadIdx.x % 32,
           make_uint4(transposed(d[4 * i]), transposed(d[4 * i + 2]), transposed(d[4 * i + 1]), transposed(d[4 * i + 3])));
}

template <typename B, bool kKeep>
__device__ __forceinline__ void keys_compute(const BackwardParams& p, const BackwardMemory<B>& m) {
  constexpr int kD = B::kD;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;  // of the block's keys; the other one is 8 further
  const std::uint32_t k = shared_address(m.base + warpgroup * 64 * 128), v = k + B::kKeyBytes;
  RingPlace<B::kSlots> place;
  std::uint32_t phase = 0;
  for_each_item(p.key_units, p.num_key_units, p.num_round_kv_heads, [&](const KeyUnit& u, int round_head) {
    const int kv_head = p.first_kv_head + round_head;
    uint4* dscores = p.dscores + (round_head * p.packing.group * p.dscore_tiles + u.tiles + u.first / kKeyRows) * (kScoreTileBytes / 16);
    float dk[kD / 2], dv[kD / 2], scores[32], dweights[32];
    std::uint32_t weights_bf16[16], dscores_bf16[16];
    const auto slot_address = [&] { return shared_address(m.ring + place.slot * B::kSlotBytes); };
    const auto issue_scores = [&] {
      barrier_wait(m.full + place.slot, place.phase);
      pin(scores);
      products_begin();
      multiply_rows<kD>(scores, k, B::kKeyBlock, slot_address(), B::kQueryBlock);
      products_commit();
    };
    const auto issue_dweights = [&] {
      pin(dweights);
      products_begin();
      multiply_rows<kD>(dweights, v, B::kKeyBlock, slot_address() + B::kQueryBytes, B::kQueryBlock);
      products_commit();
    };
    barrier_wait(m.held_full, phase);
    phase ^= 1;
    issue_scores();
    issue_dweights();
    const int end = end_of_queries(u, p.window), num_blocks = (end - u.first + 63) / 64;
    int q = u.first, left = num_blocks * p.packing.group;
    int accumulate = 0;
    for (;;) {
      products_wait<1>();
      pin(scores);
      const float4* stats = reinterpret_cast<const float4*>(m.ring + place.slot * B::kSlotBytes + 2 * B::kQueryBytes) + lane % 4;
      if (q < u.first + kKeyRows) {  // queries before a key do not see it
        const int limit = u.first + row - q;
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (8 * (i / 4) + 2 * (lane % 4) + i % 2 < limit + ((i & 2) != 0 ? 8 : 0)) scores[i] = kMinusInfinity;
      }
      if (q + 63 >= u.first + p.window) {  // nor do those that have it before their window
        const int limit = u.first + p.window + row - q;
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (8 * (i / 4) + 2 * (lane % 4) + i % 2 >= limit + ((i & 2) != 0 ? 8 : 0)) scores[i] = kMinusInfinity;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 s = stats[4 * j];
        scores[4 * j] = power_of_two(fmaf(scores[4 * j], p.scale_log2, -s.x));
        scores[4 * j + 1] = power_of_two(fmaf(scores[4 * j + 1], p.scale_log2, -s.z));
        scores[4 * j + 2] = power_of_two(fmaf(scores[4 * j + 2], p.scale_log2, -s.x));
        scores[4 * j + 3] = power_of_two(fmaf(scores[4 * j + 3], p.scale_log2, -s.z));
      }
      pack_rows(weights_bf16, scores);
      pin(weights_bf16);
      pin(dv);
      products_begin();
      multiply_down<4>(dv, weights_bf16, slot_address() + B::kQueryBytes, B::kQueryBlock, accumulate);
      products_commit();
      products_wait<1>();
      pin(dweights);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 s = stats[4 * j];
        scores[4 * j] *= dweights[4 * j] - s.y;
        scores[4 * j + 1] *= dweights[4 * j + 1] - s.w;
        scores[4 * j + 2] *= dweights[4 * j + 2] - s.y;
        scores[4 * j + 3] *= dweights[4 * j + 3] - s.w;
      }
      pack_rows(dscores_bf16, scores);
      pin(dscores_bf16);
      pin(dk);
      products_begin();
      multiply_down<4>(dk, dscores_bf16, slot_address(), B::kQueryBlock, accumulate);
      products_commit();
      if constexpr (kKeep) keep_scores(dscores + score_tiles_before(q / 64) * (kScoreTileBytes / 16), dscores_bf16);
      accumulate = 1;
      const int slot = place.slot;
      place.advance();
      if (--left == 0) {
        products_wait<0>();
        pin(dk);
        pin(dv);
        arrive_once_per_warp(m.empty + slot);
        break;
      }
      issue_scores();
      products_wait<1>();
      pin(dk);
      pin(dv);
      pin(weights_bf16);
      pin(dscores_bf16);
      arrive_once_per_warp(m.empty + slot);
      issue_dweights();
      q += 64;
      if (q >= end) {
        q = u.first;
        dscores += p.dscore_tiles * (kScoreTileBytes / 16);
      }
    }
    arrive_once_per_warp(m.held_empty);
    __nv_bfloat16 *dk_row[2], *dv_row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = u.first + row + 8 * r;
      const std::int64_t token = u.token + key;
      dk_row[r] = key < u.length ? p.dk + token * p.dk_stride + kv_head * p.head_dim : nullptr;
      dv_row[r] = key < u.length ? p.dv + token * p.dv_stride + kv_head * p.head_dim : nullptr;
    }
    store_rows(dv, dv_row, p.head_dim, 1.0f);
    store_rows(dk, dk_row, p.head_dim, p.scale);
  });
}

// Queries -------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int num_tiles_of(const QueryUnit& u) { return (u.first + u.num_tokens + kKeyRows - 1) / kKeyRows; }

template <typename B>
__device__ __forceinline__ void queries_copies(const BackwardParams& p, const BackwardMemory<B>& m) {
  RingPlace<B::kSlots> place;
  std::uint32_t phase = 0;
  for_each_item(p.query_units, p.num_query_units, p.packing.num_groups, [&](const QueryUnit& u, int group) {
    const int kv_head = kv_head_of(p.packing, group), first_head = first_head_of(p.packing, group);
    barrier_wait(m.held_empty, phase ^ 1);
    phase ^= 1;
    barrier_arrive_expect(m.held_full, static_cast<std::uint32_t>(4 * B::kBlocks * p.packing.heads * p.packing.tokens * 128));
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int b = 0; b < B::kBlocks; ++b) {
        unsigned char* to = m.base + w * B::kRowGroup + b * B::kRowBlock;
        const int token = u.token + u.first + w * p.packing.tokens;
        copy_box(to, &p.q_packed, m.held_full, b * 64, first_head, token);
        copy_box(to + B::kRowBytes, &p.dout_packed, m.held_full, b * 64, first_head, token);
      }
    const auto copy = [&](const CUtensorMap* map, int tile) {
      barrier_wait(m.empty + place.slot, place.phase ^ 1);
      std::uint64_t* full = m.full + place.slot;
      barrier_arrive_expect(full, B::kSlotBytes);
#pragma unroll
      for (int b = 0; b < B::kBlocks; ++b)
        copy_box(m.ring + place.slot * B::kSlotBytes + b * B::kSlotBlock, map, full, b * 64, u.token + tile * B::kTile, kv_head);
      place.advance();
    };
    for (int t = first_tile_of(u.first, p.window); t < num_tiles_of(u); ++t) {
      copy(&p.k, t);
      copy(&p.v, t);
    }
  });
}

template <typename B>
__device__ __forceinline__ void queries_compute(const BackwardParams& p, const BackwardMemory<B>& m) {
  constexpr int kD = B::kD;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const std::uint32_t q = shared_address(m.base + warpgroup * B::kRowGroup), dout = q + B::kRowBytes;
  RingPlace<B::kSlots> place;
  std::uint32_t phase = 0;
  for_each_item(p.query_units, p.num_query_units, p.packing.num_groups, [&](const QueryUnit& u, int group) {
    const LaneRows mine = lane_rows(p.packing, warpgroup, u.num_tokens, num_heads_of(p.packing, group));
    const int first_head = first_head_of(p.packing, group);
    float2 stats[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      stats[r] = mine.valid[r] ? p.stats[(first_head + mine.head[r]) * p.stats_rows + u.stats + u.first + mine.token[r]]
                               : make_float2(-kMinusInfinity, 0.0f);
    float dq[kD / 2], scores[B::kTile / 2], dweights[B::kTile / 2];
    std::uint32_t dscores_bf16[B::kTile / 4];
    const auto slot_address = [&] { return shared_address(m.ring + place.slot * B::kSlotBytes); };
    const auto issue_scores = [&] {
      barrier_wait(m.full + place.slot, place.phase);
      pin(scores);
      products_begin();
      multiply_rows<kD>(scores, q, B::kRowBlock, slot_address(), B::kSlotBlock);
      products_commit();
    };
    const auto issue_dweights = [&] {
      barrier_wait(m.full + place.slot, place.phase);
      pin(dweights);
      products_begin();
      multiply_rows<kD>(dweights, dout, B::kRowBlock, slot_address(), B::kSlotBlock);
      products_commit();
    };
    barrier_wait(m.held_full, phase);
    phase ^= 1;
    issue_scores();
    std::uint32_t k_address = slot_address();
    int k_slot = place.slot;
    place.advance();
    issue_dweights();
    const int tiles = num_tiles_of(u), first_tile = first_tile_of(u.first, p.window);
    for (int t = first_tile;; ++t) {
      products_wait<1>();
      pin(scores);
      const int limit0 = u.first + mine.token[0] - t * B::kTile, limit1 = u.first + mine.token[1] - t * B::kTile;
      if (t + 1 >= tiles - 1) ban_after(scores, limit0, limit1);  // rows of a unit end in its last two tiles
      if (t * B::kTile < u.first + u.num_tokens - p.window) ban_before(scores, limit0 - p.window + 1, limit1 - p.window + 1);
#pragma unroll
      for (int i = 0; i < B::kTile / 2; ++i) scores[i] = power_of_two(fmaf(scores[i], p.scale_log2, -stats[(i & 2) / 2].x));
      products_wait<0>();
      pin(dweights);
      arrive_once_per_warp(m.empty + place.slot);
      place.advance();
#pragma unroll
      for (int i = 0; i < B::kTile / 2; ++i) scores[i] *= dweights[i] - stats[(i & 2) / 2].y;
      pack_rows(dscores_bf16, scores);
      pin(dscores_bf16);
      pin(dq);
      products_begin();
      multiply_down<B::kTile / 16>(dq, dscores_bf16, k_address, B::kSlotBlock, t > first_tile);
      products_commit();
      if (t + 1 == tiles) {
        products_wait<0>();
        pin(dq);
        arrive_once_per_warp(m.empty + k_slot);
        break;
      }
      issue_scores();
      products_wait<1>();
      pin(dq);
      pin(dscores_bf16);
      arrive_once_per_warp(m.empty + k_slot);
      k_address = slot_address();
      k_slot = place.slot;
      place.advance();
      issue_dweights();
    }
    arrive_once_per_warp(m.held_empty);
    __nv_bfloat16* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t token = u.token + u.first + mine.token[r];
      row[r] = mine.valid[r] ? p.dq + token * p.dq_stride + (first_head + mine.head[r]) * p.head_dim : nullptr;
    }
    store_rows(dq, row, p.head_dim, p.scale);
  });
}

// Queries from kept score gradients -----------------------------------------------------------------------------------------------

template <typename B>
__device__ __forceinline__ void sums_copies(const BackwardParams& p, const BackwardMemory<B>& m) {
  const CachePolicy once = read_once();
  RingPlace<B::kSlots> place;
  for_each_item(p.query_units, p.num_query_units, p.num_round_kv_heads * p.packing.group, [&](const QueryUnit& u, int round_head) {
    const int kv_head = p.first_kv_head + round_head / p.packing.group, groups = u.num_tokens > 64 ? 2 : 1;
    const auto first_tile = static_cast<int>(round_head * p.dscore_tiles + u.tiles + score_tiles_before(u.first / 64));
    const int tiles = u.first / kKeyRows + 1;
    for (int t = first_tile_of(u.first, p.window); t < tiles; ++t) {
      barrier_wait(m.empty + place.slot, place.phase ^ 1);
      unsigned char* slot = m.ring + place.slot * B::kSlotBytes;
      std::uint64_t* full = m.full + place.slot;
      barrier_arrive_expect(full, static_cast<std::uint32_t>(B::kKeyBytes + groups * kScoreTileBytes));
      for (int w = 0; w < groups; ++w)  // both have as many tiles
        copy_box(slot + B::kKeyBytes + w * kScoreTileBytes, &p.dscore_rows_map, full, once, 0,
                 (first_tile + w * tiles + t) * kScoreTileRows, 0);
#pragma unroll
      for (int b = 0; b < B::kBlocks; ++b) copy_box(slot + b * B::kKeyBlock, &p.k, full, b * 64, u.token + t * kKeyRows, kv_head);
      place.advance();
    }
  });
}

template <typename B>
__device__ __forceinline__ void sums_compute(const BackwardParams& p, const BackwardMemory<B>& m) {
  const int warpgroup = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  RingPlace<B::kSlots> place;
  for_each_item(p.query_units, p.num_query_units, p.num_round_kv_heads * p.packing.group, [&](const QueryUnit& u, int round_head) {
    float dq[B::kD / 2];
    std::uint32_t dscores[32];
    const int tiles = u.first / kKeyRows + 1, first_tile = first_tile_of(u.first, p.window);
    for (int t = first_tile; t < tiles; ++t) {
      barrier_wait(m.full + place.slot, place.phase);
      const unsigned char* slot = m.ring + place.slot * B::kSlotBytes;
      const auto* from =
          reinterpret_cast<const uint4*>(slot + B::kKeyBytes + warpgroup * kScoreTileBytes) + threadIdx.x % 128 / 32 * 256 + lane;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint4 x = from[32 * i];
        dscores[4 * i] = x.x;
        dscores[4 * i + 1] = x.y;
        dscores[4 * i + 2] = x.z;
        dscores[4 * i + 3] = x.w;
      }
      pin(dscores);
      pin(dq);
      products_begin();
      multiply_down<8>(dq, dscores, shared_address(slot), B::kKeyBlock, t > first_tile);
      products_commit();
      products_wait<0>();
      pin(dq);
      arrive_once_per_warp(m.empty + place.slot);
      place.advance();
    }
    __nv_bfloat16* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + 8 * r;
      row[r] = token < u.num_tokens ? p.dq + static_cast<std::int64_t>(u.token + u.first + token) * p.dq_stride +
                                          (p.first_kv_head * p.packing.group + round_head) * p.head_dim
                                    : nullptr;
    }
    store_rows(dq, row, p.head_dim, p.scale);
  });
}

#endif  // PRL_HOPPER

template <int kD, bool kKeep>
__global__ void __launch_bounds__(kBackwardThreads, 1) keys_kernel(const __grid_constant__ BackwardParams p) {
#if PRL_HOPPER
  using B = KeysShape<kD>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardMemory<B> m(shared, 2 * B::kKeyBytes);
  m.init();
  if (threadIdx.x >= 256) {
    registers_down<kBackwardCopyRegisters>();
    if (threadIdx.x == 256) keys_copies<B>(p, m);
  } else {
    registers_up<kBackwardRegisters>();
    keys_compute<B, kKeep>(p, m);
  }
#endif
}

template <int kD>
__global__ void __launch_bounds__(kBackwardThreads, 1) queries_kernel(const __grid_constant__ BackwardParams p) {
#if PRL_HOPPER
  using B = QueriesShape<kD>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardMemory<B> m(shared, 2 * B::kRowBytes);
  m.init();
  if (threadIdx.x >= 256) {
    registers_down<kBackwardCopyRegisters>();
    if (threadIdx.x == 256) queries_copies<B>(p, m);
  } else {
    registers_up<kBackwardRegisters>();
    queries_compute<B>(p, m);
  }
#endif
}

template <int kD>
__global__ void __launch_bounds__(kBackwardThreads, 1) sums_kernel(const __grid_constant__ BackwardParams p) {
#if PRL_HOPPER
  using B = SumsShape<kD>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardMemory<B> m(shared, 0);
  m.init();
  if (threadIdx.x >= 256) {
    if (threadIdx.x == 256) sums_copies<B>(p, m);
  } else {
    sums_compute<B>(p, m);
  }
#endif
}

template <typename Kernel>
void launch_pass(Kernel* kernel, const BackwardParams& p, int shared_bytes, int num_items, int num_multiprocessors, cudaStream_t stream) {
  PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<std::min(num_items, num_multiprocessors), kBackwardThreads, shared_bytes, stream>>>(p);
  PRL_CUDA_CHECK(cudaGetLastError());
}

template <int kD>
void launch_backward(const BackwardParams& p, int num_multiprocessors, cudaStream_t stream) {
  static_assert(KeysShape<kD>::kSharedBytes <= 227 * 1024 && QueriesShape<kD>::kSharedBytes <= 227 * 1024);
  launch_pass(keys_kernel<kD, false>, p, KeysShape<kD>::kSharedBytes, p.num_key_units * p.num_round_kv_heads, num_multiprocessors, stream);
  launch_pass(queries_kernel<kD>, p, QueriesShape<kD>::kSharedBytes, p.num_query_units * p.packing.num_groups, num_multiprocessors, stream);
}

template <int kD>
void launch_backward_kept(const BackwardParams& p, int num_multiprocessors, cudaStream_t stream) {
  static_assert(SumsShape<kD>::kSharedBytes <= 227 * 1024);
  launch_pass(keys_kernel<kD, true>, p, KeysShape<kD>::kSharedBytes, p.num_key_units * p.num_round_kv_heads, num_multiprocessors, stream);
  launch_pass(sums_kernel<kD>, p, SumsShape<kD>::kSharedBytes, p.num_query_units * p.num_round_kv_heads * p.packing.group,
              num_multiprocessors, stream);
}

}  // namespace prl::ops::cuda::hopper
