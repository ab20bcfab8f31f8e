#pragma once

#include <algorithm>

#include "device/cuda/check.hpp"
#include "ops/cuda/attention/fresh_heads.cuh"
#include "ops/cuda/attention/hopper.cuh"
#include "ops/cuda/attention/hopper.hpp"
#include "ops/cuda/chain.cuh"

// Attention of a decoding step: one new token per sequence, its few query heads against many keys. Blocks take units as they get done;
// one warp copies, three prepare the new heads (fresh_heads.cuh), a warpgroup computes.
//
// Keys are the left operand, 64 at a time, and heads the right: a step of 8 heads costs an eighth of what it would with heads as 64 rows,
// the four warps share the keys of a tile, and few registers hold a unit, so that three blocks share a processor. The sums are those of
// forward_hopper.cuh, each in the same order: products step through the same 16 columns or keys at a time, whichever side they are on,
// and weights are added by chains that take the keys its lanes would.
//
//   copies    K V of tile 0, K V of tile 1, ... in pieces of 64 keys, into a ring of slots
//   compute   per tile: scores; their maximum over the warps; weights to shared memory; sums of values, and beside them of weights
//
// A block that has a processor to itself has a second warpgroup: one forms scores and weights, the other sums, a tile behind.

namespace prl::ops::cuda::hopper {

/// kHeads: query heads that a unit has room for. kBlocksPerProcessor: the fewer, the deeper their rings.
template <int kD_, int kHeads_, int kBlocksPerProcessor_>
struct DecodeShape {
  static constexpr int kD = kD_, kHeads = kHeads_, kBlocks = kD / 64;
  static constexpr int kTile = forward_tile(kD), kSlotRows = kDecodeSlotRows, kPieces = kTile / kSlotRows;
  static constexpr int kBlocksPerProcessor = kBlocksPerProcessor_;
  static constexpr bool kHasSummers = kBlocksPerProcessor == 1;
  static constexpr int kThreads = kHasSummers ? 384 : 256, kStages = kHasSummers ? 2 : 1;  ///< kStages: tiles whose weights are in memory
  /// From 8 keys of a slot to the next, and from its 64 columns to the next: one copy loads rows that are contiguous in the cache.
  static constexpr int kGroupBytes = kBlocks * 1024, kColumnBlock = 1024, kSlotBytes = kSlotRows * kD * 2;
  static constexpr int kSlots = (kHeads <= 8 ? 12 / kBlocksPerProcessor : kBlocksPerProcessor == 1 ? 10 : 4) * (128 / kD);
  static constexpr int kQBlock = kHeads * 128, kQBytes = kBlocks * kQBlock;
  static constexpr int kWeightBlock = kHeads * 128, kWeightBytes = kPieces * kWeightBlock;
  /// Floats of a head's weights before they are rounded. The heads of a warp's chains lie in banks of their own.
  static constexpr int kSumStride = kTile + 8, kSumBytes = kHeads * kSumStride * 4;
  static constexpr int kQAt = kSlots * kSlotBytes, kWeightsAt = kQAt + kQBytes, kSumsAt = kWeightsAt + kStages * kWeightBytes;
  static constexpr int kHeadsAt = kSumsAt + kStages * kSumBytes;  ///< [stage][4 warps, rescale, top][kHeads] floats, then [2][kHeads]
  static constexpr int kBarriersAt = kHeadsAt + (6 * kStages + 2) * kHeads * 4;
  static constexpr int kWorkAt = kBarriersAt + (2 * kSlots + 2 + 2 * kStages) * 8;
  static constexpr int kSharedBytes = kWorkAt + FreshMemory::bytes(kD);
  static_assert(kPieces == 2 && kBlocksPerProcessor * (kSharedBytes + 1024) <= 228 * 1024);
};

#if PRL_HOPPER

template <typename F>
struct DecodeMemory {
  unsigned char *ring, *q, *weights;
  float *unrounded, *heads, *totals;
  std::uint64_t *full, *empty, *q_full, *q_empty, *weighed, *summed;  ///< the last two of a stage
  FreshMemory fresh;
  __device__ explicit DecodeMemory(unsigned char* p)
      : ring(p),
        q(p + F::kQAt),
        weights(p + F::kWeightsAt),
        unrounded(reinterpret_cast<float*>(p + F::kSumsAt)),
        heads(reinterpret_cast<float*>(p + F::kHeadsAt)),
        totals(heads + F::kStages * 6 * F::kHeads),
        full(reinterpret_cast<std::uint64_t*>(p + F::kBarriersAt)),
        empty(full + F::kSlots),
        q_full(empty + F::kSlots),
        q_empty(q_full + 1),
        weighed(q_empty + 1),
        summed(weighed + F::kStages),
        fresh(p + F::kWorkAt) {}
  __device__ __forceinline__ float* maxima(int stage, int warp) const { return heads + (stage * 6 + warp) * F::kHeads; }
  __device__ __forceinline__ float* rescales(int stage) const { return heads + (stage * 6 + 4) * F::kHeads; }
  __device__ __forceinline__ float* tops(int stage) const { return heads + (stage * 6 + 5) * F::kHeads; }
  /// Of a unit: some may read the last one's while others have theirs of this one.
  __device__ __forceinline__ float* totals_of(std::uint32_t round) const { return totals + round % 2 * F::kHeads; }
  __device__ __forceinline__ unsigned char* weights_of(int stage) const { return weights + stage * F::kWeightBytes; }
  __device__ __forceinline__ float* unrounded_of(int stage) const { return unrounded + stage * (F::kSumBytes / 4); }
};

/// Slots that the keys of a tile take.
template <typename F>
__device__ __forceinline__ int num_pieces(const AttentionUnit& u, int tile) {
  return min(F::kPieces, (u.num_keys - tile * F::kTile + F::kSlotRows - 1) / F::kSlotRows);
}

/// The copying warp. What it reads before the wait no recorded work writes but the plan, long before. While the first tile of a unit is
/// copied it learns which unit is next.
template <typename F>
struct DecodeCopies {
  const ForwardParams& p;
  const DecodeMemory<F>& m;
  const int lane = static_cast<int>(threadIdx.x) % 32, groups = p.packing.num_groups;
  const int blocks = static_cast<int>(gridDim.x);
  const CachePolicy once = read_once();
  RingPlace<F::kSlots> place;
  std::uint32_t phase = 0;

  /// Blocks of the cache in which a lane's box of the first tile and of the second lie. At most 16 boxes of 8 rows or more are a tile.
  struct Boxes {
    int first = 0, second = 0;
  };
  __device__ __forceinline__ int look_up(const AttentionUnit& u, int tile) const {
    const int key = tile * F::kTile + lane * p.box_rows;
    return tile < u.tile_end && key < min(u.num_keys, (tile + 1) * F::kTile) ? __ldcg(p.block_table + u.keys + key / p.block_size) : 0;
  }
  __device__ __forceinline__ Boxes first_boxes(const AttentionUnit& u) const {
    return {look_up(u, u.tile_begin), look_up(u, u.tile_begin + 1)};
  }
  /// What lies in the cache of a tile: whole boxes, and of the last one only groups of 8 rows in use. The new token is not copied.
  __device__ __forceinline__ void copy_tile(const CUtensorMap* map, const CUtensorMap* rest_map, const AttentionUnit& u, int tile,
                                            int block, int kv_head) {
    const int pieces = num_pieces<F>(u, tile), rows = p.box_rows;
#pragma unroll 1
    for (int i = 0; i < pieces; ++i) {
      const int first = tile * F::kTile + i * F::kSlotRows, count = min(F::kSlotRows, u.num_keys - 1 - first);
      const int boxes = count / rows, rest = (count % rows + 7) / 8, first_box = i * F::kSlotRows / rows;
      const int last_block = __shfl_sync(0xffffffffu, block, first_box + boxes);
      unsigned char* slot = m.ring + place.slot * F::kSlotBytes;
      std::uint64_t* full = m.full + place.slot;
      barrier_wait(m.empty + place.slot, place.phase ^ 1);
      if (lane == 0) barrier_arrive_expect(full, static_cast<std::uint32_t>((boxes * rows + rest * 8) * F::kBlocks * 128));
      __syncwarp();
      const auto copy = [&](const CUtensorMap* from, int row, int from_block) {
        copy_box(slot + row / 8 * F::kGroupBytes, from, full, once, 0, 0, 0, (first + row) % p.block_size / 8,
                 from_block * p.num_kv_heads + kv_head);
      };
      if (const int box = lane - first_box; box >= 0 && box < boxes) copy(map, box * rows, block);
      if (lane < rest) copy(rest_map, boxes * rows + lane * 8, last_block);
      __syncwarp();
      place.advance();
    }
  }
  __device__ __forceinline__ void hand_over(const AttentionUnit& u, int group) {
    barrier_wait(m.fresh.next_empty, phase ^ 1);
    phase ^= 1;
    if (lane == 0) {
      *m.fresh.next = {u, group};
      barrier_arrive(m.fresh.next_full);
    }
    __syncwarp();
  }
  __device__ __forceinline__ AttentionUnit unit_of(int item, int total) const {
    return item < total ? read_unit(p.units + item / groups) : AttentionUnit{};
  }
  /// Every block has two items by its number; who begins its second or a later one takes the next of the list, no sooner: at the end of
  /// the list no block holds two items while others have none. Lane 0 gets the item's number, which is not asked for again once it is the
  /// end.
  __device__ __forceinline__ int claim(int total) const {
    return lane == 0 && total > 2 * blocks ? 2 * blocks + atomicAdd(p.next_item, 1) : total;
  }
  /// The last block sets the counter back.
  __device__ __forceinline__ void finish(int total) const {
    wait_for_previous();
    if (total <= 2 * blocks || lane != 0) return;
    auto* done = reinterpret_cast<unsigned*>(p.next_item + 1);
    if (atomicInc(done, gridDim.x - 1) == gridDim.x - 1) *p.next_item = 0;
  }

  __device__ __forceinline__ void run() {
    if (lane == 0) {
      prefetch_map(&p.k);
      prefetch_map(&p.v);
    }
    int item = static_cast<int>(blockIdx.x), next_item = item + blocks;
    AttentionUnit u = read_unit(p.units + item / groups);
    const int total = num_units_of(p) * groups;
    if (item >= total) u = {};
    Boxes boxes = first_boxes(u);
    AttentionUnit next = unit_of(next_item, total);
    hand_over(u, item % groups);
#pragma unroll 1
    for (bool is_first = true; item < total; is_first = false) {
      const int claimed = is_first ? next_item : claim(total);
      const int kv_head = kv_head_of(p.packing, item % groups);
      Boxes next_boxes;
#pragma unroll 1
      for (int t = u.tile_begin; t < u.tile_end; ++t) {
        const int ahead = look_up(u, t + 2);
        copy_tile(&p.k, &p.k_rest, u, t, boxes.first, kv_head);
        if (t == u.tile_begin && !is_first) {
          next_item = __shfl_sync(0xffffffffu, claimed, 0);
          next = unit_of(next_item, total);
        }
        copy_tile(&p.v, &p.v_rest, u, t, boxes.first, kv_head);
        if (t == u.tile_begin) {
          hand_over(next, next_item % groups);
          next_boxes = first_boxes(next);
        }
        boxes = {boxes.second, ahead};
      }
      if (is_first) wait_for_previous();
      item = next_item;
      u = next;
      boxes = next_boxes;
    }
    finish(total);
  }
};

/// The computing warps. Lane l of warp w has, of each piece of a tile, keys 16 w + l / 4 and 8 more, of heads 8 j + 2 (l % 4) and 1 more;
/// of a sum of values the same places, dimensions in place of keys.
template <typename F>
struct DecodeWarpgroup {
  static constexpr int kFragment = F::kHeads / 2, kMine = F::kHeads / 4;  ///< values of a product; heads of a lane
  static constexpr int kChains = F::kHeads * 8, kChainsEach = (kChains + 127) / 128;

  const ForwardParams& p;
  const DecodeMemory<F>& m;
  const int thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  RingPlace<F::kSlots> place;
  RingPlace<F::kStages> stage;  ///< stays where it is if there is one
  std::uint32_t round = 0;      ///< of the block's units
  float scores[F::kPieces][kFragment], out[F::kBlocks][kFragment];
  float top[kMine], rescale[kMine];
  float sum[kChainsEach];  ///< of the weights of head c / 8 for keys c % 8 / 2 * 2, + 1, + 8, + 9 ... of all tiles, c = thread + 128 i

  /// Where the lane's results go: pairs of columns of one of its first two heads, and of every eighth from there on.
  struct OutPlace {
    __nv_bfloat16* at;
    int num_heads;  ///< from that head on
  };
  /// The i-th of the lane's heads.
  __device__ __forceinline__ int head_of(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
  /// Of a fragment: its value of the lane's i-th head and of key (or dimension) 16 w + l / 4 + 8 h.
  __device__ __forceinline__ static constexpr int at(int i, int h) { return i / 2 * 4 + 2 * h + i % 2; }
  __device__ __forceinline__ unsigned char* slot_of(int piece) const { return m.ring + place.ahead(piece).slot * F::kSlotBytes; }
  /// The last piece stands in for those that a tile lacks: their keys are banned.
  __device__ __forceinline__ std::uint32_t piece_address(int i, int pieces) const {
    return same_in_warp(shared_address(slot_of(min(i, pieces - 1))));
  }
  __device__ __forceinline__ void wait_slots(int pieces) const {
    barrier_wait(m.full + place.slot, place.phase);
    if (pieces == 2) barrier_wait(m.full + place.ahead(1).slot, place.ahead(1).phase);
  }
  __device__ __forceinline__ void give_back(int pieces) {
    __syncwarp();
    if (lane < pieces) barrier_arrive(m.empty + place.ahead(lane).slot);
    place = place.ahead(pieces);
  }
  __device__ __forceinline__ void pin_all() {
#pragma unroll
    for (int i = 0; i < F::kPieces; ++i) pin(scores[i]);
#pragma unroll
    for (int i = 0; i < F::kBlocks; ++i) pin(out[i]);
  }

  __device__ __forceinline__ void form_scores(int pieces) {
    const std::uint64_t q = along_rows(same_in_warp(shared_address(m.q)));
    const std::uint64_t keys[2] = {along_rows(piece_address(0, pieces), F::kGroupBytes),
                                   along_rows(piece_address(1, pieces), F::kGroupBytes)};
    pin_all();
    products_begin();
#pragma unroll
    for (int step = 0; step < F::kD / 16; ++step)
#pragma unroll
      for (int i = 0; i < F::kPieces; ++i)
        product<0>(scores[i], keys[i] + ((step / 4 * F::kColumnBlock + step % 4 * 32) >> 4),
                   q + ((step / 4 * F::kQBlock + step % 4 * 32) >> 4), step > 0);
    products_commit();
    products_wait<0>();
    pin_all();
  }
  /// Scores become weights, and go to shared memory. `limit`: the last key that counts; before the window none does.
  __device__ __forceinline__ void weigh(int limit) {
    float best[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      best[i] = kMinusInfinity;
#pragma unroll
      for (int piece = 0; piece < F::kPieces; ++piece)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& s = scores[piece][at(i, h)];
          const int key = piece * F::kSlotRows + warp * 16 + lane / 4 + 8 * h;
          if (key > limit || key <= limit - p.window) s = kMinusInfinity;
          best[i] = fmaxf(best[i], s);
        }
#pragma unroll
      for (int step = 4; step < 32; step *= 2) best[i] = fmaxf(best[i], __shfl_xor_sync(0xffffffffu, best[i], step));
      if (lane < 4) m.maxima(stage.slot, warp)[head_of(i)] = best[i];
    }
    named_sync<128>(1);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int head = head_of(i);
      float most = m.maxima(stage.slot, 0)[head];
#pragma unroll
      for (int w = 1; w < 4; ++w) most = fmaxf(most, m.maxima(stage.slot, w)[head]);
      // As weigh_tile in rows.cuh.
      const float tile_top = most * p.scale_log2, before = top[i];
      const float now = tile_top - before > kSlack ? tile_top : before;
      rescale[i] = now == before ? 1.0f : power_of_two(before - now);
      top[i] = now;
      if (warp == 0 && lane < 4) {
        m.rescales(stage.slot)[head] = rescale[i];
        m.tops(stage.slot)[head] = now;
      }
      const float minus_top = now == kMinusInfinity ? 0.0f : -now;
#pragma unroll
      for (int piece = 0; piece < F::kPieces; ++piece)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float weight = power_of_two(fmaf(scores[piece][at(i, h)], p.scale_log2, minus_top));
          const int key = warp * 16 + lane / 4 + 8 * h;
          m.unrounded_of(stage.slot)[head * F::kSumStride + piece * F::kSlotRows + key] = weight;
          *reinterpret_cast<__nv_bfloat16*>(m.weights_of(stage.slot) + piece * F::kWeightBlock + head * 128 + (key / 8 ^ head % 8) * 16 +
                                            key % 8 * 2) = __float2bfloat16_rn(weight);
        }
    }
  }
  /// The key of the new token, which the copies did not load, is written into its slot.
  __device__ __forceinline__ void complete_keys(const AttentionUnit& u, int pieces) {
    new_row_into<F>(slot_of(pieces - 1), m.fresh, u, round, 0, thread);
    async_fence();
    named_sync<128>(1);
  }
  /// Rows of v that belong to no key weigh nothing, but 0 times NaN is NaN: they become zero. The new token's v joins its slot.
  __device__ __forceinline__ void complete_values(const AttentionUnit& u, int pieces) {
    unsigned char* slot = slot_of(pieces - 1);
    const int valid = (u.num_keys - 1) % F::kSlotRows + 1;
#pragma unroll 1
    for (int i = valid * 8 + thread; i < F::kSlotRows * 8; i += 128)
#pragma unroll
      for (int b = 0; b < F::kBlocks; ++b)
        *reinterpret_cast<uint4*>(slot + b * F::kColumnBlock + i / 64 * F::kGroupBytes + i % 64 * 16) = make_uint4(0, 0, 0, 0);
    new_row_into<F>(slot, m.fresh, u, round, 1, thread);
  }
  __device__ __forceinline__ void issue_sums(int pieces, int accumulate) {
    const std::uint64_t weights = along_rows(same_in_warp(shared_address(m.weights_of(stage.slot))));
    const std::uint32_t values[2] = {piece_address(0, pieces), piece_address(1, pieces)};
    pin_all();
    products_begin();
#pragma unroll
    for (int step = 0; step < F::kTile / 16; ++step)
#pragma unroll
      for (int b = 0; b < F::kBlocks; ++b)
        product<0, 1>(out[b],
                      down_rows(values[step / 4] + static_cast<std::uint32_t>(b * F::kColumnBlock), F::kColumnBlock, F::kGroupBytes) +
                          (step % 4 * 2 * F::kGroupBytes >> 4),
                      weights + ((step / 4 * F::kWeightBlock + step % 4 * 32) >> 4), step > 0 ? 1 : accumulate);
    products_commit();
  }
  /// What weigh_tile adds up, by the lanes and in the order that it has.
  __device__ __forceinline__ void add_weights() {
#pragma unroll
    for (int i = 0; i < kChainsEach; ++i) {
      const int chain = thread + 128 * i;
      if (chain >= kChains) break;
      const float* from = m.unrounded_of(stage.slot) + chain / 8 * F::kSumStride + chain % 8;
      float x = 0.0f;
#pragma unroll
      for (int j = 0; j < F::kTile / 8; ++j) x += from[8 * j];
      sum[i] = fmaf(sum[i], m.rescales(stage.slot)[chain / 8], x + __shfl_xor_sync(0xffffffffu, x, 1));
    }
  }

  __device__ __forceinline__ void rescale_sums() {
#pragma unroll
    for (int b = 0; b < F::kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kFragment; ++i) out[b][i] *= rescale[i / 4 * 2 + i % 2];
  }
  __device__ __forceinline__ void begin_weights() {
#pragma unroll
    for (int i = 0; i < kMine; ++i) top[i] = kMinusInfinity;
  }
  __device__ __forceinline__ void begin_sums() {
#pragma unroll
    for (int i = 0; i < kChainsEach; ++i) sum[i] = 0.0f;
  }
  __device__ __forceinline__ void finish(const AttentionUnit& u, int group, const OutPlace& to) {
#pragma unroll
    for (int i = 0; i < kChainsEach; ++i) {
      const int chain = thread + 128 * i;
      if (chain >= kChains) break;
      float x = sum[i];
      x += __shfl_xor_sync(0xffffffffu, x, 2);
      x += __shfl_xor_sync(0xffffffffu, x, 4);
      if (chain % 8 == 0) m.totals_of(round)[chain / 8] = x;
    }
    named_sync<128>(2);
    u.state >= 0 ? store_state(u, group) : store(to, group);
  }

  /// All of a unit by one warpgroup.
  __device__ __forceinline__ void compute(const AttentionUnit& u, int group) {
    const OutPlace place_of_out = out_place(u, group);
    begin_weights();
    begin_sums();
#pragma unroll 1
    for (int t = u.tile_begin; t < u.tile_end; ++t) {
      const int pieces = num_pieces<F>(u, t);
      const bool is_last = t + 1 == u.tile_end, has_new = is_last && has_newest<F>(u);
      wait_slots(pieces);
      if (has_new) complete_keys(u, pieces);
      form_scores(pieces);
      give_back(pieces);
      if (is_last) barrier_arrive(m.q_empty);
      weigh(u.position - t * F::kTile);
      wait_slots(pieces);
      if (has_new) complete_values(u, pieces);
      rescale_sums();
      async_fence();
      named_sync<128>(2);
      issue_sums(pieces, t > u.tile_begin);
      add_weights();
      products_wait<0>();
      pin_all();
      give_back(pieces);
    }
    finish(u, group, place_of_out);
  }
  /// Scores and weights of a unit, and its sums, by a warpgroup each.
  __device__ __forceinline__ void compute_weights(const AttentionUnit& u) {
    begin_weights();
#pragma unroll 1
    for (int t = u.tile_begin; t < u.tile_end; ++t) {
      const int pieces = num_pieces<F>(u, t);
      const bool is_last = t + 1 == u.tile_end;
      wait_slots(pieces);
      if (is_last && has_newest<F>(u)) complete_keys(u, pieces);
      form_scores(pieces);
      give_back(pieces);
      place = place.ahead(pieces);  // values, which the others give back
      if (is_last) barrier_arrive(m.q_empty);
      barrier_wait(m.summed + stage.slot, stage.phase ^ 1);
      weigh(u.position - t * F::kTile);
      async_fence();
      barrier_arrive(m.weighed + stage.slot);
      stage.advance();
    }
  }
  __device__ __forceinline__ void compute_sums(const AttentionUnit& u, int group) {
    const OutPlace place_of_out = out_place(u, group);
    begin_sums();
#pragma unroll 1
    for (int t = u.tile_begin; t < u.tile_end; ++t) {
      const int pieces = num_pieces<F>(u, t);
      place = place.ahead(pieces);  // keys
      wait_slots(pieces);
      if (t + 1 == u.tile_end && has_newest<F>(u)) {
        complete_values(u, pieces);
        async_fence();
        named_sync<128>(2);
      }
      barrier_wait(m.weighed + stage.slot, stage.phase);
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        rescale[i] = m.rescales(stage.slot)[head_of(i)];
        top[i] = m.tops(stage.slot)[head_of(i)];
      }
      rescale_sums();
      issue_sums(pieces, t > u.tile_begin);
      add_weights();
      products_wait<0>();
      pin_all();
      give_back(pieces);
      barrier_arrive(m.summed + stage.slot);
      stage.advance();
    }
    finish(u, group, place_of_out);
  }
  __device__ __forceinline__ OutPlace out_place(const AttentionUnit& u, int group) const {
    const int head = head_of(lane / 4 % 2), column = warp * 16 + lane / 8 * 2;
    const std::int64_t row = static_cast<std::int64_t>(u.token) * p.num_q_heads + first_head_of(p.packing, group) + head;
    return {p.out + row * F::kD + column, num_heads_of(p.packing, group) - head};
  }
  __device__ __forceinline__ void store(const OutPlace& to, int group) {
    const bool is_odd = lane / 4 % 2 != 0;
    const int first_head = first_head_of(p.packing, group), last_head = first_head + num_heads_of(p.packing, group) - 1;
#pragma unroll
    for (int i = 0; i < kMine; i += 2) {
      float scale[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int head = head_of(i + e);  // of those that are not there nothing is stored
        scale[e] = end_row<__nv_bfloat16>(top[i + e], m.totals_of(round)[head], p.sinks, min(first_head + head, last_head)).scale;
      }
      std::uint32_t pairs[F::kBlocks][2];
#pragma unroll
      for (int b = 0; b < F::kBlocks; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          pairs[b][h] = pair_of(finish_out(out[b][at(i, h)], scale[0]), finish_out(out[b][at(i + 1, h)], scale[1]), is_odd);
      if (i / 2 * 8 >= to.num_heads) continue;
#pragma unroll
      for (int b = 0; b < F::kBlocks; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) *reinterpret_cast<std::uint32_t*>(to.at + i / 2 * 8 * F::kD + b * 64 + 8 * h) = pairs[b][h];
    }
  }
  __device__ __forceinline__ void store_state(const AttentionUnit& u, int group) {
    const int num_heads = num_heads_of(p.packing, group);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int head = head_of(i);
      if (head >= num_heads) continue;
      const std::int64_t row = (static_cast<std::int64_t>(u.state) * p.packing.num_groups + group) * p.state_rows + head;
#pragma unroll
      for (int b = 0; b < F::kBlocks; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) p.state_out[row * F::kD + b * 64 + warp * 16 + lane / 4 + 8 * h] = out[b][at(i, h)];
      if (warp == 0 && lane < 4) p.state_sums[row] = make_float2(top[i], m.totals_of(round)[head]);
    }
  }
};

#endif  // PRL_HOPPER

template <typename F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocksPerProcessor) decode_kernel(const __grid_constant__ ForwardParams p) {
#if PRL_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  const DecodeMemory<F> m(shared);
  if (threadIdx.x == 0) {
    if (shared_address(shared) % 1024 != 0) __trap();
#pragma unroll 1
    for (int i = 0; i < F::kSlots; ++i) {
      barrier_init(m.full + i, 1);
      barrier_init(m.empty + i, 4);
    }
    // Where warps hand each other what they wrote or read by ordinary instructions every lane arrives for itself: the compiler leaves
    // __syncwarp() out where a warp cannot have diverged, and a race checker does not see then what one lane arrives for. It costs nothing.
    barrier_init(m.q_full, FreshWarps<F>::kThreads);
    barrier_init(m.q_empty, F::kHasSummers ? 256 : 128);
#pragma unroll
    for (int i = 0; i < F::kStages; ++i) {
      barrier_init(m.weighed + i, 128);
      barrier_init(m.summed + i, 128);
    }
    barrier_init(m.fresh.next_full, 1);
    barrier_init(m.fresh.next_empty, FreshWarps<F>::kThreads);
    barrier_init_fence();
  }
  __syncthreads();
  let_next_begin();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    DecodeWarpgroup<F> group{p, m};
    for (;; ++group.round) {
      barrier_wait(m.q_full, group.round % 2);
      const Work work = *m.fresh.work;
      if (work.unit.num_tokens == 0) break;
      if constexpr (F::kHasSummers)
        group.compute_weights(work.unit);
      else
        group.compute(work.unit, work.group);
    }
  } else if (F::kHasSummers && warp >= 8) {
    DecodeWarpgroup<F> group{p, m};
    for (;; ++group.round) {
      barrier_wait(m.q_full, group.round % 2);
      const Work work = *m.fresh.work;
      if (work.unit.num_tokens == 0) break;
      barrier_arrive(m.q_empty);
      group.compute_sums(work.unit, work.group);
    }
  } else if (warp == 4) {
    DecodeCopies<F>{p, m}.run();
  } else {
    FreshWarps<F>{p, m.fresh, m.q, m.q_full, m.q_empty, warp - 5}.run();
  }
#endif
}

template <typename F>
void launch_decode_shape(const ForwardParams& p, int num_items, int num_multiprocessors, cudaStream_t stream) {
  PRL_CUDA_CHECK(cudaFuncSetAttribute(decode_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, F::kSharedBytes));
  const int blocks = std::min(num_items, num_multiprocessors * F::kBlocksPerProcessor);
  launch_chained(stream, decode_kernel<F>, dim3(static_cast<unsigned>(blocks)), dim3(F::kThreads), F::kSharedBytes, p);
}

template <int kD>
void launch_decoding(const ForwardParams& p, int num_items, int num_multiprocessors, cudaStream_t stream) {
  const bool is_single = num_items <= num_multiprocessors;
  if (p.packing.heads > 8)
    is_single ? launch_decode_shape<DecodeShape<kD, kMaxFreshHeads, 1>>(p, num_items, num_multiprocessors, stream)
              : launch_decode_shape<DecodeShape<kD, kMaxFreshHeads, 2>>(p, num_items, num_multiprocessors, stream);
  else if (is_single)
    launch_decode_shape<DecodeShape<kD, 8, 1>>(p, num_items, num_multiprocessors, stream);
  else if (num_items <= 4 * num_multiprocessors)
    launch_decode_shape<DecodeShape<kD, 8, 2>>(p, num_items, num_multiprocessors, stream);
  else
    launch_decode_shape<DecodeShape<kD, 8, 3>>(p, num_items, num_multiprocessors, stream);
}

}  // namespace prl::ops::cuda::hopper
