#pragma once

#include "ops/cuda/few_rows_args.cuh"
#include "ops/cuda/lora_entry.cuh"
#include "ops/cuda/mma.cuh"

// The adapter of a product of few rows, whose named rows all have the same one. A block copies A of the parts that its columns lie in
// behind its columns of the weight, so that A x is formed by the instructions that form the product, for every block anew: that is more
// copying from the second-level cache, all of it before the rows are there, in place of two kernels and the waits between them. What B adds
// follows where the results are. Nothing that the products wait for depends on what is read from memory: recorded work knows the parts and
// where the map of A lies.

namespace prl::ops::cuda {

constexpr int kAdapterPitch = kSpan + 8;  ///< of A x and B in shared memory: eight rows start in different banks
/// In shared memory.
template <int kRows>
struct AdapterOfBlock {
  __nv_bfloat16 h[kRows][kAdapterPitch];  ///< A x by row and rank of the block
  __nv_bfloat16 b[kSpan][kAdapterPitch];  ///< B by column and rank of the block
  std::uint32_t named_rows[4];            ///< of the tile, a bit each
  float scale[kMaxLoraParts];
};
constexpr int adapter_bytes(int rows) { return static_cast<int>(sizeof(AdapterOfBlock<8>)) + (rows - 8) * kAdapterPitch * 2; }

/// Whether the columns of block `block` lie in part `p`.
__host__ __device__ __forceinline__ bool is_in_part(const LoraParts& parts, int p, int block, int columns, int N, bool swiglu) {
  const int own = columns / (swiglu ? 2 : 1), begin = block * own, end = begin + own < N ? begin + own : N;
  const int from = parts.first_output[p], to = from + parts.num_outputs[p];
  return p < parts.num_parts && ((begin < to && from < end) || (swiglu && N + begin < to && from < N + end));
}

#if PRL_HOPPER

/// use(part, first): the parts of the adapter that the block's columns lie in, and the first of their ranks here. Returns the number of
/// ranks here.
template <bool kSwiglu, typename Use>
__device__ __forceinline__ int for_parts_of_block(const FewRowsArgs& a, Use&& use) {
  int rank = 0;
#pragma unroll
  for (int p = 0; p < kMaxLoraParts; ++p) {
    if (!is_in_part(a.parts, p, static_cast<int>(blockIdx.x), a.columns, a.N, kSwiglu)) continue;
    use(p, rank);
    rank += padded_rank(a.parts.rank[p]);
  }
  return rank;
}
/// Of the weight that the adapter adds to: the output of a tile's column, or -1.
template <bool kSwiglu>
__device__ __forceinline__ int output_of(const FewRowsArgs& a, int column) {
  const int n = static_cast<int>(blockIdx.x) * (a.columns / (kSwiglu ? 2 : 1)) + (kSwiglu ? column / 16 * 8 + column % 8 : column);
  if (column >= a.columns || n >= a.N) return -1;
  return kSwiglu && column / 8 % 2 != 0 ? a.N + n : n;
}

/// By one warp: A, beside copy_steps. Each lane issues copies of its own rows and block of K, for one thread's instructions between copies
/// would take longer than the copies.
template <int kRows, bool kSwiglu, bool kIsApart>
__device__ __forceinline__ void copy_adapter_steps(const FewRowsArgs& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty) {
  using namespace hopper;
  constexpr int kBlocks = blocks_per_slot(kRows), kMostBoxes = kSpan / kLoraMapRows;
  static_assert(kBlocks * kMostBoxes <= kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, block = lane % kBlocks, box = lane / kBlocks;
  int boxes = 0, row = -1, at = 0;  // row: of A; at: among the block's ranks
  for_parts_of_block<kSwiglu>(a, [&](int p, int first) {
    const int here = (a.parts.rank[p] + kLoraMapRows - 1) / kLoraMapRows, own = box - boxes;
    if (own >= 0 && own < here) {
      row = a.parts.first_rank[p] + own * kLoraMapRows;
      at = first + own * kLoraMapRows;
    }
    boxes += here;
  });
  // Of shared memory: from block to block of K.
  const int pitch = (kIsApart ? a.ranks : a.columns + a.ranks) * kRowBytes;
  unsigned char* const begin = shared + (kIsApart ? a.ranks_at : a.columns * kRowBytes) + block * pitch + at * kRowBytes;
  const auto bytes = static_cast<std::uint32_t>(kBlocks * boxes * kLoraMapRows * kRowBytes);
  acquire_map(&a.adapter->a_map);
  unsigned char* to = begin;
  int slot = 0, from = block;
  std::uint32_t phase = 1;
  for (int step = 0; step < a.num_steps; ++step) {
    if (step >= a.slots) barrier_wait(empty + slot, phase);
    if (lane == 0) barrier_arrive_expect(full + slot, bytes);
    if (row >= 0) copy_box(to, &a.adapter->a_map, full + slot, 0, row, from);
    from += kBlocks;
    to += kBlocks * pitch;
    if (++slot == a.slots) {
      slot = 0;
      to = begin;
      phase ^= 1;
    }
  }
}

/// Barrier of those that compute and the warp that reads what the adapter adds with.
constexpr int kAdapterBarrier = 3;

/// By one warp: everything of `to` but A x, which it fills with zeros.
template <int kRows, bool kSwiglu>
__device__ __forceinline__ void read_adapter(const FewRowsArgs& a, AdapterOfBlock<kRows>& to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, top = static_cast<int>(blockIdx.y) * kRows;
  const LoraEntry& entry = a.adapter->entry;
  // What depends on no other read is on its way before anything is waited for.
  const __nv_bfloat16* of_part[kMaxLoraParts];
#pragma unroll
  for (int p = 0; p < kMaxLoraParts; ++p) of_part[p] = entry.b[p];
  const float scale = lane < kMaxLoraParts ? entry.scale[lane] : 0.0f;
  constexpr int kTogether = 4;
  const int num_words = a.num_tiles * static_cast<int>(kLoraTileRows);
  std::uint32_t named[4] = {};
  const auto read_rows = [&](int from, int(&rows)[kTogether]) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = from + i * kWarp + lane;
      const std::int32_t* tile = a.tiles + at / kLoraTileRows * kLoraTileWords;
      rows[i] = at < num_words && tile[0] >= 0 ? tile[1 + at % kLoraTileRows] - top : -1;
    }
  };
  const auto name_rows = [&](const int(&rows)[kTogether]) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w)
        if (rows[i] >= 0 && rows[i] / 32 == w) named[w] |= 1u << rows[i] % 32;
  };
  int first_rows[kTogether];
  read_rows(0, first_rows);
  const int num_ranks = for_parts_of_block<kSwiglu>(a, [](int, int) {}), fours = (num_ranks + 15) / 16 * 4;
  for (int f = lane % 4; f < fours; f += 4) {
    const __nv_bfloat16* b = nullptr;
    int first_output = 0, num_outputs = 0, rank = 0, r = 0;
    for_parts_of_block<kSwiglu>(a, [&](int p, int first) {
      if (4 * f < first || 4 * f >= first + a.parts.rank[p]) return;
      b = of_part[p];
      first_output = a.parts.first_output[p];
      num_outputs = a.parts.num_outputs[p];
      rank = a.parts.rank[p];
      r = 4 * f - first;
    });
    uint2 values[kSpan / 8];
#pragma unroll
    for (int i = 0; i < kSpan / 8; ++i) {
      const int n = output_of<kSwiglu>(a, 8 * i + lane / 4), of = n - first_output;
      values[i] = b != nullptr && n >= 0 && of >= 0 && of < num_outputs
                      ? load_4(b + static_cast<std::int64_t>(of) * rank, r, rank, rank % 4 == 0)
                      : uint2{};
    }
#pragma unroll
    for (int i = 0; i < kSpan / 8; ++i) *reinterpret_cast<uint2*>(&to.b[8 * i + lane / 4][4 * f]) = values[i];
  }
  if (lane < kMaxLoraParts) to.scale[lane] = scale;
  name_rows(first_rows);
  for (int from = kTogether * kWarp; from < num_words; from += kTogether * kWarp) {
    int rows[kTogether];
    read_rows(from, rows);
    name_rows(rows);
  }
  for (int i = lane; i < kRows * kAdapterPitch / 8; i += kWarp) reinterpret_cast<uint4*>(to.h)[i] = uint4{};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    named[w] = __reduce_or_sync(0xffffffffu, named[w]);
    if (lane == 0) to.named_rows[w] = named[w];
  }
  hopper::named_arrive<computing_threads(kRows) + kWarp>(kAdapterBarrier);
}

/// How a thread that computes adds the adapter to its results.
template <typename Tile, bool kSwiglu, bool kIsApart>
struct AdapterOfThread {
  static constexpr int kColumns = Tile::kHasRowsLeft ? kSpan / 8 : 2;      ///< of a lane: the first ones of pairs, or all
  static constexpr int kApart = Tile::kHasRowsLeft ? 16 : Tile::kResults;  ///< results of a product of A alone
  const int lane = static_cast<int>(threadIdx.x) % kWarp, group = lane / 4, quad = lane % 4;
  const int in_group = static_cast<int>(threadIdx.x) % kGroup / kWarp * 16;  ///< of the warpgroup's result, the warp's first row
  const int first_row = static_cast<int>(threadIdx.x) / kGroup * Tile::kEach;
  AdapterOfBlock<Tile::kRows>& of;
  float2 bias[kColumns];
  int part[kColumns];           ///< of the columns; -1 for none
  int num_ranks, before;        ///< of the block; columns before them in the sums
  std::uint32_t own_ranks = 0;  ///< whether store_ranks stores the results of (j, e), or of half, a bit each

  /// The column of results d[4 j + 2 half] (j where rows stand on the left, else half).
  __device__ __forceinline__ int column(int i) const { return Tile::kHasRowsLeft ? 8 * i + 2 * quad : in_group + 8 * i + group; }

  __device__ __forceinline__ AdapterOfThread(const FewRowsArgs& a, unsigned char* memory)
      : of(*reinterpret_cast<AdapterOfBlock<Tile::kRows>*>(memory)) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      part[i] = -1;
      bias[i] = float2{};
      const int n = output_of<kSwiglu>(a, column(i));
#pragma unroll
      for (int p = 0; p < kMaxLoraParts; ++p) {
        const int at = n - a.parts.first_output[p];
        if (p < a.parts.num_parts && n >= 0 && at >= 0 && at < a.parts.num_outputs[p]) part[i] = p;
      }
      if (a.adapted_bias != nullptr && n >= 0) bias[i] = {a.adapted_bias[n], a.adapted_bias[n + (Tile::kHasRowsLeft ? 1 : 0)]};
    }
    before = kIsApart ? 0 : a.columns;
    constexpr int kOwn = Tile::kHasRowsLeft ? (kIsApart ? kApart : Tile::kResults) / 2 : 2;
    num_ranks = for_parts_of_block<kSwiglu>(a, [&](int p, int first) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (rank_of(i) >= first && rank_of(i) < first + a.parts.rank[p]) own_ranks |= 1u << i;
    });
  }
  __device__ __forceinline__ bool is_named(int row) const { return (of.named_rows[row / 32] >> row % 32 & 1u) != 0; }
  /// Of results (j, e), or of half.
  __device__ __forceinline__ int rank_of(int i) const {
    return Tile::kHasRowsLeft ? 8 * (i / 2) + 2 * quad + i % 2 - before : in_group + 8 * i + group - before;
  }

  /// A x, rounded, of the rows that the lane holds in `sums`.
  template <int kCount>
  __device__ __forceinline__ void store_ranks(const float (&sums)[kCount]) const {
    hopper::named_sync<computing_threads(Tile::kRows) + kWarp>(kAdapterBarrier);
    if constexpr (Tile::kHasRowsLeft) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((own_ranks >> (2 * j + e) & 1u) == 0) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            of.h[first_row + in_group + 8 * half + group][rank_of(2 * j + e)] = __float2bfloat16_rn(sums[4 * j + 2 * half + e]);
        }
      __syncwarp();
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((own_ranks >> half & 1u) == 0) continue;
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) of.h[8 * j + 2 * quad + e][rank_of(half)] = __float2bfloat16_rn(sums[4 * j + 2 * half + e]);
      }
      hopper::named_sync<kGroup>(1);
    }
  }
  /// Four neighbouring ranks of a row of A x, or of a column's B.
  __device__ __forceinline__ uint2 four(const __nv_bfloat16 (&row)[kAdapterPitch], int k) const {
    return *reinterpret_cast<const uint2*>(row + 16 * k + 4 * quad);
  }
  /// d + bias, rounded as it would be stored, + scale * B (A x).
  __device__ __forceinline__ void add(float (&d)[Tile::kResults]) const {
    float sums[Tile::kResults] = {}, scale[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) scale[i] = part[i] >= 0 ? of.scale[part[i]] : 0.0f;
    for (int k = 0; 16 * k < num_ranks; ++k) {
      if constexpr (Tile::kHasRowsLeft) {
        const uint2 top = four(of.h[first_row + in_group + group], k), bottom = four(of.h[first_row + in_group + 8 + group], k);
        const std::uint32_t left[4] = {top.x, bottom.x, top.y, bottom.y};
#pragma unroll
        for (int j = 0; j < kSpan / 8; ++j) {
          const uint2 right = four(of.b[8 * j + group], k);
          multiply_add(sums + 4 * j, left, right.x, right.y);
        }
      } else {
        const uint2 top = four(of.b[in_group + group], k), bottom = four(of.b[in_group + 8 + group], k);
        const std::uint32_t left[4] = {top.x, bottom.x, top.y, bottom.y};
#pragma unroll
        for (int j = 0; j < Tile::kResults / 4; ++j) {
          const uint2 right = four(of.h[8 * j + group], k);
          multiply_add(sums + 4 * j, left, right.x, right.y);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < Tile::kResults / 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = Tile::kHasRowsLeft ? j : half, at = 4 * j + 2 * half + e;
          const int row = Tile::kHasRowsLeft ? first_row + in_group + 8 * half + group : 8 * j + 2 * quad + e;
          d[at] = __bfloat162float(__float2bfloat16_rn(d[at] + (Tile::kHasRowsLeft && e == 1 ? bias[i].y : bias[i].x)));
          if (scale[i] != 0.0f && is_named(row)) d[at] = d[at] + sums[at] * scale[i];
        }
  }
};

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda
