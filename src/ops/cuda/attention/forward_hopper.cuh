#pragma once

#include <algorithm>

#include "device/cuda/check.hpp"
#include "ops/cuda/attention/hopper.cuh"
#include "ops/cuda/attention/hopper.hpp"
#include "ops/cuda/chain.cuh"

// Forward attention with warpgroup products. One warp copies, one or two warpgroups compute, 64 rows each:
//
//   copies    Q | K0  K1  V0  K2  V1 ... Kn-1  Vn-2  Vn-1     into a ring of slots, in the order of their use
//   compute   S0 = Q K0; then per tile: issue S(t+1) and O += P(t) V(t), weigh S(t+1) while the second runs
//
// With two warpgroups, named barriers make them take turns: while one weighs, the other's products run.
// Totals of earlier chunks wait in shared memory; they are touched once per kChunkKeys keys.

namespace prl::ops::cuda::hopper {

/// kDeep: the ring takes a processor's shared memory, for calls with too few units to give each processor two.
template <int kD_, int kWarpgroups_, bool kPaged_, bool kSplit_, bool kDeep = false>
struct ForwardShape {
  static constexpr int kD = kD_, kWarpgroups = kWarpgroups_;
  static constexpr bool kPaged = kPaged_, kSplit = kSplit_;
  static constexpr int kTile = forward_tile(kD), kBlocks = kD / 64;
  static constexpr int kTilesPerChunk = kChunkKeys / kTile;
  static constexpr int kSlotBlock = kTile * 128, kSlotBytes = kBlocks * kSlotBlock;
  static constexpr int kQBlock = 64 * 128, kQGroup = kBlocks * kQBlock, kQBytes = kWarpgroups * kQGroup;
  static constexpr int kTotalsBytes = kSplit ? 0 : kWarpgroups * 64 * kD * 4;
  static constexpr int kSlots = kD == 64 ? (kDeep ? 12 : 6) : kD == 128 && kSplit ? (kDeep ? 6 : 3) : 4;
  static constexpr int kBarriersAt = kQBytes + kSlots * kSlotBytes + kTotalsBytes;
  static constexpr int kSharedBytes = kBarriersAt + (2 * kSlots + 2) * 8;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kBlocksPerProcessor = kSplit && kD <= 128 && !kDeep ? 2 : 1;
  /// Registers of a copying and of a computing thread, where a fair share would be too few for the latter.
  static constexpr int kCopyRegisters = 40;
  static constexpr int kRegisters = kWarpgroups == 2 ? 232 : kBlocksPerProcessor == 2 ? 256 - kCopyRegisters : 0;
};

#if PRL_HOPPER

template <typename F>
struct ForwardMemory {
  unsigned char *q, *ring;
  float4* totals;
  std::uint64_t *full, *empty, *q_full, *q_empty;
  __device__ explicit ForwardMemory(unsigned char* p)
      : q(p),
        ring(p + F::kQBytes),
        totals(reinterpret_cast<float4*>(ring + F::kSlots * F::kSlotBytes)),
        full(reinterpret_cast<std::uint64_t*>(p + F::kBarriersAt)),
        empty(full + F::kSlots),
        q_full(empty + F::kSlots),
        q_empty(q_full + 1) {}
};

/// The copies of a unit's tiles by one warp. Paged keys come in boxes of rows that lie together, one lane per box; where they are
/// is looked up a tile ahead.
template <typename F>
struct TileCopies {
  const ForwardParams& p;
  const ForwardMemory<F>& m;
  const AttentionUnit& u;
  const int kv_head, lane = static_cast<int>(threadIdx.x) % 32;

  /// Keys and values, in the order of their use.
  __device__ __forceinline__ void all(RingPlace<F::kSlots>& place) const {
    const auto next_slot = [&](const CUtensorMap* map, int tile, int first_block) { fill_slot(place, map, tile, first_block); };
    int block = look_up(u.tile_begin), next = look_up(u.tile_begin + 1);
    next_slot(&p.k, u.tile_begin, block);
    for (int t = u.tile_begin + 1; t < u.tile_end; ++t) {
      const int after = look_up(t + 1);
      next_slot(&p.k, t, next);
      next_slot(&p.v, t - 1, block);
      block = next;
      next = after;
    }
    next_slot(&p.v, u.tile_end - 1, block);
  }
  /// Keys alone.
  __device__ __forceinline__ void keys(RingPlace<F::kSlots>& place) const {
    int block = look_up(u.tile_begin);
    for (int t = u.tile_begin; t < u.tile_end; ++t) {
      const int next = look_up(t + 1);
      fill_slot(place, &p.k, t, block);
      block = next;
    }
  }

 private:
  __device__ __forceinline__ void fill_slot(RingPlace<F::kSlots>& place, const CUtensorMap* map, int tile, int first_block) const {
    barrier_wait(m.empty + place.slot, place.phase ^ 1);
    copy(map, m.ring + place.slot * F::kSlotBytes, m.full + place.slot, tile, first_block);
    place.advance();
  }
  __device__ __forceinline__ int block_of(int key) const { return __ldcg(p.block_table + u.keys + key / p.block_size); }
  /// Block of the lane's first box of a tile.
  __device__ __forceinline__ int look_up(int tile) const {
    const int key = tile * F::kTile + lane / F::kBlocks * p.box_rows;
    return F::kPaged && tile < u.tile_end && key < min(u.num_keys, (tile + 1) * F::kTile) ? block_of(key) : 0;
  }
  __device__ __forceinline__ void copy(const CUtensorMap* map, unsigned char* slot, std::uint64_t* full, int tile, int first_block) const {
    const int first = tile * F::kTile;
    if constexpr (!F::kPaged) {
      if (lane == 0) {
        barrier_arrive_expect(full, F::kSlotBytes);
#pragma unroll
        for (int b = 0; b < F::kBlocks; ++b) copy_box(slot + b * F::kSlotBlock, map, full, b * 64, u.keys + first, kv_head);
      }
    } else {
      const int rows = p.box_rows, boxes = (min(F::kTile, u.num_keys - first) + rows - 1) / rows;
      if (lane == 0) barrier_arrive_expect(full, static_cast<std::uint32_t>(boxes * rows * F::kBlocks * 128));
      __syncwarp();
      for (int i = lane; i < boxes * F::kBlocks; i += 32) {
        const int box = i / F::kBlocks, b = i % F::kBlocks, key = first + box * rows;
        const int block = i < 32 ? first_block : block_of(key), head = block * p.num_kv_heads + kv_head;
        copy_box(slot + b * F::kSlotBlock + box * rows * 128, map, full, b * 64, key % p.block_size, head);
      }
    }
    __syncwarp();
  }
};

template <typename F>
__device__ __forceinline__ void copy_queries(const ForwardParams& p, const ForwardMemory<F>& m, const AttentionUnit& u, int group) {
  barrier_arrive_expect(m.q_full, static_cast<std::uint32_t>(F::kWarpgroups * F::kBlocks * p.packing.heads * p.packing.tokens * 128));
#pragma unroll
  for (int w = 0; w < F::kWarpgroups; ++w)
#pragma unroll
    for (int b = 0; b < F::kBlocks; ++b)
      copy_box(m.q + w * F::kQGroup + b * F::kQBlock, &p.q, m.q_full, b * 64, first_head_of(p.packing, group),
               u.token + w * p.packing.tokens);
}

template <typename F>
__device__ __forceinline__ void forward_copies(const ForwardParams& p, const ForwardMemory<F>& m) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPlace<F::kSlots> place;
  std::uint32_t q_phase = 0;
  if (lane == 0) {
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
  }
  for_each_item(p.units, num_units_of(p), p.packing.num_groups, [&](const AttentionUnit& u, int group) {
    barrier_wait(m.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    if (lane == 0) copy_queries<F>(p, m, u, group);
    TileCopies<F>{p, m, u, kv_head_of(p.packing, group)}.all(place);
  });
}

template <typename F>
struct ForwardWarpgroup {
  /// A product is at most 128 wide; wider heads keep their columns in two parts.
  static constexpr int kParts = F::kD <= 128 ? 1 : 2, kWidth = F::kD / kParts, kOut = kWidth / 2;

  const ForwardParams& p;
  const ForwardMemory<F>& m;
  const int warpgroup, lane;
  RingPlace<F::kSlots> place;
  std::uint32_t q_phase = 0;
  float out[kParts][kOut];
  float scores[F::kTile / 2];
  std::uint32_t weights[F::kTile / 4];
  RowPair rows, total;

  __device__ __forceinline__ ForwardWarpgroup(const ForwardParams& params, const ForwardMemory<F>& memory)
      : p(params), m(memory), warpgroup(static_cast<int>(threadIdx.x) / 128), lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ std::uint32_t slot_address() const { return shared_address(m.ring + place.slot * F::kSlotBytes); }
  __device__ __forceinline__ void wait_slot() { barrier_wait(m.full + place.slot, place.phase); }
  __device__ __forceinline__ void release(int slot) { arrive_once_per_warp(m.empty + slot); }
  __device__ __forceinline__ void pin_all() {
    pin(scores);
    pin(weights);
#pragma unroll
    for (int i = 0; i < kParts; ++i) pin(out[i]);
  }
  __device__ __forceinline__ void issue_scores() {
    products_begin();
    multiply_rows<F::kD>(scores, shared_address(m.q + warpgroup * F::kQGroup), F::kQBlock, slot_address(), F::kSlotBlock);
    products_commit();
  }
  __device__ __forceinline__ void issue_sums(int accumulate) {
    products_begin();
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      multiply_down<F::kTile / 16>(out[i], weights, slot_address() + static_cast<std::uint32_t>(i * (kWidth / 64) * F::kSlotBlock),
                                   F::kSlotBlock, accumulate);
    products_commit();
  }
  __device__ __forceinline__ void take_turn() {
    if constexpr (F::kWarpgroups == 2) named_sync<256>(1 + warpgroup);
  }
  __device__ __forceinline__ void give_turn() {
    if constexpr (F::kWarpgroups == 2) named_arrive<256>(2 - warpgroup);
  }
  /// Weights of the tile in `scores`. True if `out` need not be rescaled. A split unit often has a few rows only: the others
  /// are left out, which shortens the wait of a lone sequence.
  __device__ __forceinline__ bool weigh(const AttentionUnit& u, int tile, const int (&position)[2], int warp_position, int num_rows,
                                        float (&rescale)[2]) {
    if (F::kSplit && num_rows <= 0) return true;
    const int first = tile * F::kTile;
    if (first + F::kTile - 1 > warp_position) ban_after(scores, position[0] - first, position[1] - first);
    if (first < u.position + u.num_tokens - p.window)
      ban_before(scores, position[0] - p.window + 1 - first, position[1] - p.window + 1 - first);
    return weigh_tile(scores, rows, rescale, p.scale_log2, F::kSplit ? num_rows : 2);
  }
  __device__ __forceinline__ float4* totals_at(int part, int i) const {
    return m.totals + (warpgroup * (F::kD / 8) + part * (kOut / 4) + i) * 128 + threadIdx.x % 128;
  }
  /// The chunk in `out` joins the total: into shared memory, or into `out` if it is the last one.
  __device__ __forceinline__ void join_total(RowPair chunk, bool is_first, bool is_last) {
    chunk.sum[0] = quad_sum(chunk.sum[0]);
    chunk.sum[1] = quad_sum(chunk.sum[1]);
    if (is_first) {
      total = chunk;
      if (is_last) return;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int i = 0; i < kOut / 4; ++i)
          *totals_at(part, i) = make_float4(out[part][4 * i], out[part][4 * i + 1], out[part][4 * i + 2], out[part][4 * i + 3]);
      return;
    }
    const ChunkWeights w0 = merge_rows<__nv_bfloat16>(total.top[0], total.sum[0], chunk.top[0], chunk.sum[0]);
    const ChunkWeights w1 = merge_rows<__nv_bfloat16>(total.top[1], total.sum[1], chunk.top[1], chunk.sum[1]);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < kOut / 4; ++i) {
        float(&o)[kOut] = out[part];
        float4 t = *totals_at(part, i);
        t.x = merge_out(t.x, o[4 * i], w0);
        t.y = merge_out(t.y, o[4 * i + 1], w0);
        t.z = merge_out(t.z, o[4 * i + 2], w1);
        t.w = merge_out(t.w, o[4 * i + 3], w1);
        if (is_last) {
          o[4 * i] = t.x;
          o[4 * i + 1] = t.y;
          o[4 * i + 2] = t.z;
          o[4 * i + 3] = t.w;
        } else {
          *totals_at(part, i) = t;
        }
      }
  }
  /// Rows of v that belong to no key weigh nothing, but 0 times NaN is NaN: they become zero.
  __device__ __forceinline__ void clear_rest(int valid) {
    if (valid >= F::kTile) return;
    unsigned char* slot = m.ring + place.slot * F::kSlotBytes;
    for (int b = 0; b < F::kBlocks; ++b)
      for (int i = valid * 8 + static_cast<int>(threadIdx.x % 128); i < F::kTile * 8; i += 128)
        *reinterpret_cast<uint4*>(slot + b * F::kSlotBlock + i * 16) = make_uint4(0, 0, 0, 0);
    async_fence();
    named_sync<128>(3 + warpgroup);
  }

  __device__ __forceinline__ void compute(const AttentionUnit& u, int group) {
    const int num_heads = num_heads_of(p.packing, group);
    const LaneRows mine = lane_rows(p.packing, warpgroup, u.num_tokens, num_heads);
    const int position[2] = {u.position + mine.token[0], u.position + mine.token[1]};
    const int warp_position = u.position + warpgroup * p.packing.tokens + static_cast<int>(threadIdx.x % 128) / 32 * 16 / p.packing.heads;
    const int num_rows = (u.num_tokens * p.packing.heads - static_cast<int>(threadIdx.x % 128) / 32 * 16 + 7) / 8;  // of this lane's two
    float rescale[2];
    rows.clear();

    barrier_wait(m.q_full, q_phase);
    q_phase ^= 1;
    wait_slot();
    pin(scores);
    issue_scores();
    products_wait<0>();
    pin(scores);
    release(place.slot);
    place.advance();
    weigh(u, u.tile_begin, position, warp_position, num_rows, rescale);
    pack_rows(weights, scores);

    int accumulate = 0;
    for (int t = u.tile_begin + 1; t < u.tile_end; ++t) {
      wait_slot();
      take_turn();
      pin_all();
      issue_scores();
      const int k_slot = place.slot;
      place.advance();
      wait_slot();
      issue_sums(accumulate);
      give_turn();
      products_wait<1>();
      pin(scores);
      release(k_slot);
      RowPair chunk;
      const bool new_chunk = !F::kSplit && t % F::kTilesPerChunk == 0;
      if (new_chunk) {
        chunk = rows;
        rows.clear();
      }
      const bool same = weigh(u, t, position, warp_position, num_rows, rescale);
      known_before_waits(rows.sum[0], rows.sum[1]);
      products_wait<0>();
      pin_all();
      release(place.slot);
      place.advance();
      accumulate = 1;
      if (new_chunk) {
        join_total(chunk, t / F::kTilesPerChunk == u.tile_begin / F::kTilesPerChunk + 1, false);
        accumulate = 0;
      } else if (!same) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
          for (int i = 0; i < kOut; ++i) out[part][i] *= rescale[(i & 2) / 2];
      }
      pack_rows(weights, scores);
    }
    arrive_once_per_warp(m.q_empty);
    wait_slot();
    clear_rest(u.num_keys - (u.tile_end - 1) * F::kTile);
    pin_all();
    issue_sums(accumulate);
    products_wait<0>();
    pin_all();
    release(place.slot);
    place.advance();

    if (F::kSplit && u.state >= 0) {
      store_state(u, group, mine);
    } else {
      join_total(rows, F::kSplit || (u.tile_end - 1) / F::kTilesPerChunk == u.tile_begin / F::kTilesPerChunk, true);
      store(u, group, mine);
    }
  }
  __device__ __forceinline__ void store(const AttentionUnit& u, int group, const LaneRows& mine) {
    const int first_head = first_head_of(p.packing, group);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!mine.valid[r]) continue;
      const std::int64_t row = static_cast<std::int64_t>(u.token + mine.token[r]) * p.num_q_heads + first_head + mine.head[r];
      const RowEnd end = end_row<__nv_bfloat16>(total.top[r], total.sum[r], p.sinks, first_head + mine.head[r]);
      __nv_bfloat16* to = p.out + row * p.head_dim + 2 * (lane % 4);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int i = 2 * r; i < kOut; i += 4) {
          const int column = part * kWidth + 2 * (i - 2 * r);
          if (column < p.head_dim)
            *reinterpret_cast<std::uint32_t*>(to + column) =
                pack_bf16(finish_out(out[part][i], end.scale), finish_out(out[part][i + 1], end.scale));
        }
      if (p.lse != nullptr && lane % 4 == 0) p.lse[row] = log_sum(end.top, end.sum);
    }
  }
  __device__ __forceinline__ void store_state(const AttentionUnit& u, int group, const LaneRows& mine) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(rows.sum[r]);
      if (!mine.valid[r]) continue;
      const std::int64_t row = (static_cast<std::int64_t>(u.state) * p.packing.num_groups + group) * p.state_rows +
                               mine.token[r] * p.packing.heads + mine.head[r];
      float* to = p.state_out + row * p.head_dim + 2 * (lane % 4);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int i = 2 * r; i < kOut; i += 4) {
          const int column = part * kWidth + 2 * (i - 2 * r);
          if (column < p.head_dim) *reinterpret_cast<float2*>(to + column) = make_float2(out[part][i], out[part][i + 1]);
        }
      if (lane % 4 == 0) p.state_sums[row] = make_float2(rows.top[r], sum);
    }
  }
};

#endif  // PRL_HOPPER

template <typename F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocksPerProcessor) forward_kernel(const __grid_constant__ ForwardParams p) {
#if PRL_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardMemory<F> m(shared);
  if (threadIdx.x == 0) {
    if (shared_address(shared) % 1024 != 0) __trap();
    for (int i = 0; i < F::kSlots; ++i) {
      barrier_init(m.full + i, 1);
      barrier_init(m.empty + i, 4 * F::kWarpgroups);
    }
    barrier_init(m.q_full, 1);
    barrier_init(m.q_empty, 4 * F::kWarpgroups);
    barrier_init_fence();
  }
  __syncthreads();
  let_next_begin();
  wait_for_previous();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= 4 * F::kWarpgroups) {
    if constexpr (F::kRegisters != 0) registers_down<F::kCopyRegisters>();
    if (warp == 4 * F::kWarpgroups) forward_copies<F>(p, m);
  } else {
    if constexpr (F::kRegisters != 0) registers_up<F::kRegisters>();
    ForwardWarpgroup<F> group(p, m);
    if (F::kWarpgroups == 2 && group.warpgroup == 1) named_arrive<256>(1);
    for_each_item(p.units, num_units_of(p), p.packing.num_groups, [&](const AttentionUnit& u, int g) { group.compute(u, g); });
  }
#endif
}

template <typename F>
void launch_shape(const ForwardParams& p, int num_items, int num_multiprocessors, cudaStream_t stream) {
  static_assert(F::kSharedBytes <= 227 * 1024 && F::kBlocksPerProcessor * (F::kSharedBytes + 1024) <= 228 * 1024);
  PRL_CUDA_CHECK(cudaFuncSetAttribute(forward_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, F::kSharedBytes));
  const int blocks = std::min(num_items, num_multiprocessors * F::kBlocksPerProcessor);
  launch_chained(stream, forward_kernel<F>, dim3(static_cast<unsigned>(blocks)), dim3(F::kThreads), F::kSharedBytes, p);
}

template <int kD>
void launch_forward(const ForwardParams& p, bool paged, bool split, int num_items, int num_multiprocessors, cudaStream_t stream) {
  constexpr int kWarpgroups = forward_row_blocks(kD);
  if (!paged)
    launch_shape<ForwardShape<kD, kWarpgroups, false, false>>(p, num_items, num_multiprocessors, stream);
  else if (!split)
    launch_shape<ForwardShape<kD, kWarpgroups, true, false>>(p, num_items, num_multiprocessors, stream);
  else if (kD <= 128 && num_items <= num_multiprocessors)
    launch_shape<ForwardShape<kD, 1, true, true, kD <= 128>>(p, num_items, num_multiprocessors, stream);
  else
    launch_shape<ForwardShape<kD, 1, true, true>>(p, num_items, num_multiprocessors, stream);
}

}  // namespace prl::ops::cuda::hopper
