#pragma once

#include <algorithm>

#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/few_rows.hpp"
#include "ops/cuda/lora_entry.cuh"
#include "ops/cuda/mma.cuh"

// The kernels of lora_bf16.hpp.

namespace prl::ops::cuda::lora {

using Bf16 = __nv_bfloat16;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kStep = 32;       ///< inputs that two matrix instructions take
constexpr int kSplitSteps = 4;  ///< steps of a split: sums over inputs are formed by splits, each in order, which are then added in order
constexpr int kRankBlock = 16;  ///< ranks that one matrix instruction sums, and that a block forms A x of
constexpr int kRankTiles = kRankBlock / 8;
constexpr unsigned kMaxGrid = 65535;

/// The rows of an input, by their place in a tile; -1 where the tile has none.
struct Rows {
  const Bf16* x;
  std::int64_t stride;
  const int* index;  ///< shared memory, [16 * kM]
  bool is_vector;
};
/// kRankBlock rows of A [., K] from `first` on, those from `end` on as zeros.
struct Ranks {
  const Bf16* a;
  int K, first, end;
  bool is_vector;
};

struct Lane {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = lane / 4, quad = lane % 4;
};

/// A lane's weights of one split: eight neighbouring k a step.
struct SplitWeights {
  uint4 w[kSplitSteps][kRankTiles];
  __device__ __forceinline__ void load(const Ranks& ranks, int split) {
    const Lane me;
#pragma unroll
    for (int step = 0; step < kSplitSteps; ++step)
#pragma unroll
      for (int n = 0; n < kRankTiles; ++n) {
        const int rank = ranks.first + 8 * n + me.group, k = (split * kSplitSteps + step) * kStep + me.quad * 8;
        w[step][n] = rank < ranks.end ? load_8(ranks.a + static_cast<std::int64_t>(rank) * ranks.K, k, ranks.K, ranks.is_vector) : uint4{};
      }
  }
};

/// acc += one split of sum_k x[row, k] a[rank, k] for 16 kM rows. A lane reads eight neighbouring k of both operands, which is another
/// order of k within the 32 of two instructions than theirs, and the same for all rows.
template <int kM>
__device__ __forceinline__ void sum_split(float (&acc)[kM][kRankTiles][4], const Rows& rows, const SplitWeights& weights, int K,
                                          int split) {
  const Lane me;
  const Bf16* x_rows[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.index[16 * m + 8 * half + me.group];
      x_rows[m][half] = row >= 0 ? rows.x + row * rows.stride : nullptr;
    }
  constexpr int kTogether = kM == 1 ? kSplitSteps : 2;  ///< steps whose loads are in flight together
#pragma unroll
  for (int first = 0; first < kSplitSteps; first += kTogether) {
    uint4 x[kTogether][kM][2];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          x[i][m][half] = x_rows[m][half] != nullptr
                              ? load_8(x_rows[m][half], (split * kSplitSteps + first + i) * kStep + me.quad * 8, K, rows.is_vector)
                              : uint4{};
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const uint4 &top = x[i][m][0], &bottom = x[i][m][1];
        const std::uint32_t low[4] = {top.x, bottom.x, top.y, bottom.y}, high[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
        for (int n = 0; n < kRankTiles; ++n) {
          const uint4& w = weights.w[first + i][n];
          multiply_add(acc[m][n], low, w.x, w.y);
          multiply_add(acc[m][n], high, w.z, w.w);
        }
      }
  }
}

/// sum_k x[row, k] a[rank, k] of 16 kM rows and kRankBlock ranks: store(row in tile, rank - first, sum). Warps take splits in turn. `sums`:
/// shared memory, [kWarps][16 kM][kRankBlock].
template <int kM, typename Store>
__device__ __forceinline__ void shrink(const Rows& rows, const Ranks& ranks, float* sums, Store&& store) {
  constexpr int kSums = 16 * kM * kRankBlock, kOwn = kSums / kThreads;
  const Lane me;
  const int splits = (ranks.K + kStep * kSplitSteps - 1) / (kStep * kSplitSteps);
  float total[kOwn] = {};
  for (int round = 0; round < splits; round += kWarps) {
    const int split = round + me.warp;
    if (round > 0) __syncthreads();  // the sums before have been read
    if (split < splits) {
      SplitWeights weights;
      weights.load(ranks, split);
      float acc[kM][kRankTiles][4] = {};
      sum_split<kM>(acc, rows, weights, ranks.K, split);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kRankTiles; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float2*>(sums + me.warp * kSums + (16 * m + 8 * half + me.group) * kRankBlock + 8 * n + 2 * me.quad) = {
                acc[m][n][2 * half], acc[m][n][2 * half + 1]};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      for (int s = 0; s < min(kWarps, splits - round); ++s) total[i] += sums[s * kSums + i * kThreads + static_cast<int>(threadIdx.x)];
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    store(at / kRankBlock, at % kRankBlock, total[i]);
  }
}

/// One warp after another: the one whose turn ends and the next one, whose barrier it is, wait for each other. That the first only arrives
/// would do, but the sanitizer takes what it leaves there for a race; waiting costs nothing that was found.
__device__ __forceinline__ void hand_turn_to(int warp) { asm volatile("bar.sync %0, 64;" ::"r"(1 + warp) : "memory"); }

/// The same for 16 rows, summed over k in order by 16 at a time: as the library sums products and as few_rows.cu does, so that the bits are
/// theirs. Warps hold parts of k and add them in turn, the weights of the first ones before `wait`, which says that x is there. `handed`:
/// shared memory.
struct HandedSums {
  float4 of[kRankTiles][kWarp];
};
template <typename Wait, typename Store>
__device__ __forceinline__ void shrink_in_order(const Rows& rows, const Ranks& ranks, HandedSums& handed, Wait&& wait, Store&& store) {
  constexpr int kParts = kStep * kSplitSteps / 16;
  const Lane me;
  const int splits = (ranks.K + 16 * kParts - 1) / (16 * kParts);
  const auto k_of = [&](int split, int part) { return (split * kParts + part) * 16 + me.quad * 4; };
  uint2 w[kParts][kRankTiles];
  const auto load_weights = [&](int split) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int n = 0; n < kRankTiles; ++n) {
        const int rank = ranks.first + 8 * n + me.group;
        w[part][n] = rank < ranks.end
                         ? load_4(ranks.a + static_cast<std::int64_t>(rank) * ranks.K, k_of(split, part), ranks.K, ranks.is_vector)
                         : uint2{};
      }
  };
  if (me.warp < splits) load_weights(me.warp);
  wait();
  const Bf16* x_rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.index[8 * half + me.group];
    x_rows[half] = row >= 0 ? rows.x + row * rows.stride : nullptr;
  }
  for (int split = me.warp; split < splits; split += kWarps) {
    if (split != me.warp) load_weights(split);
    uint2 x[kParts][2];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[part][half] = x_rows[half] != nullptr ? load_4(x_rows[half], k_of(split, part), ranks.K, rows.is_vector) : uint2{};
    float acc[kRankTiles][4] = {};
    if (split > 0) {
      hand_turn_to(me.warp);
#pragma unroll
      for (int n = 0; n < kRankTiles; ++n) *reinterpret_cast<float4*>(acc[n]) = handed.of[n][me.lane];
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::uint32_t left[4] = {x[part][0].x, x[part][1].x, x[part][0].y, x[part][1].y};
#pragma unroll
      for (int n = 0; n < kRankTiles; ++n) multiply_add(acc[n], left, w[part][n].x, w[part][n].y);
    }
    if (split + 1 < splits) {
#pragma unroll
      for (int n = 0; n < kRankTiles; ++n) handed.of[n][me.lane] = *reinterpret_cast<const float4*>(acc[n]);
      hand_turn_to((me.warp + 1) % kWarps);
      continue;
    }
#pragma unroll
    for (int n = 0; n < kRankTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) store(8 * (e / 2) + me.group, 8 * n + 2 * me.quad + e % 2, acc[n][e]);
  }
}

/// Columns of B that a warp works on at a time.
constexpr int kColumnTiles = 2, kWarpColumns = 8 * kColumnTiles, kBlockColumns = kWarps * kWarpColumns;

/// A lane's results of both tiles are four neighbouring columns, those of four lanes fill a sector: column 4 (j / 2) + 2 n + j % 2 of the
/// warp's is column j of tile n.
constexpr int kLaneColumns = 2 * kColumnTiles;

/// A lane's B [., rank] of ranks [r, r + kRankBlock) and the warp's columns from `column` on.
struct ColumnWeights {
  uint2 w[kColumnTiles];
  __device__ __forceinline__ void load(const Bf16* b, int rank, int r, int column, int end) {
    const Lane me;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int c = column + me.group / 2 * kLaneColumns + 2 * n + me.group % 2;
      w[n] = c < end ? load_4(b + static_cast<std::int64_t>(c) * rank, r + me.quad * 4, rank, rank % 4 == 0) : uint2{};
    }
  }
};

/// acc = sum_r h[row, r] b[column, r] of 16 kM rows and the warp's columns. get_h(row in tile, rank): four neighbouring h, zero beyond
/// their rank. `weights`: those of the first ranks.
template <int kM, typename GetH>
__device__ __forceinline__ void expand(float (&acc)[kM][kColumnTiles][4], const Bf16* b, int rank, int column, int end,
                                       ColumnWeights weights, GetH&& get_h) {
  const Lane me;
  for (int r = 0; r < rank; r += kRankBlock) {
    if (r > 0) weights.load(b, rank, r, column, end);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const uint2 top = get_h(16 * m + me.group, r + me.quad * 4), bottom = get_h(16 * m + 8 + me.group, r + me.quad * 4);
      const std::uint32_t left[4] = {top.x, bottom.x, top.y, bottom.y};
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) multiply_add(acc[m][n], left, weights.w[n].x, weights.w[n].y);
    }
  }
}

/// Four neighbouring values of a row of bf16, of which those before `end` exist. `is_whole`: they lie in 8 aligned bytes.
struct FourColumns {
  Bf16* at;
  int count;
  bool is_whole;

  __device__ __forceinline__ FourColumns(Bf16* row, int column, int end, bool is_aligned)
      : at(row + column), count(end - column), is_whole(is_aligned && count >= kLaneColumns) {}
  __device__ __forceinline__ uint2 read() const {
    if (is_whole) return *reinterpret_cast<const uint2*>(at);
    return load_4(at, 0, count, false);
  }
  __device__ __forceinline__ void write(const float (&v)[kLaneColumns]) const {
    if (is_whole) {
      *reinterpret_cast<uint2*>(at) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
      return;
    }
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      if (i < count) at[i] = __float2bfloat16_rn(v[i]);
  }
};
/// before + scale * a lane's sums of one row, `half` of its tiles.
__device__ __forceinline__ void add_scaled(float (&out)[kLaneColumns], uint2 before, const float (&acc)[kColumnTiles][4], int half,
                                           float scale) {
  const std::uint32_t words[2] = {before.x, before.y};
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) out[i] = unpacked<Bf16>(words, i) + acc[i / 2][2 * half + i % 2] * scale;
}

/// A batch whose rows name adapters by tiles of up to 16. Two kernels: A x of each tile, and what B adds.
struct TileArgs {
  const Bf16* x;
  Bf16 *y, *h;  ///< h: [tiles][16][h_pitch], the ranks of part p from p * h_pitch / kMaxLoraParts on
  std::int64_t x_stride, y_stride;
  int num_rows, K, N, h_pitch, columns;  ///< columns: of y, of a block of expand_tiles_kernel
  bool x_is_vector, y_is_vector;
  std::int32_t* x_is_there;  ///< signal of the product that writes y and is queued just before, or null
  LoraEntry one;             ///< without tiles: of all rows
  const char* entries;       ///< [slots], entry_stride bytes apart
  std::int64_t entry_stride;
  const std::int32_t* tiles;  ///< [gridDim.y][kLoraTileWords] or null
};

/// What a block knows of its tile before it waits for anything.
struct TileOfBlock {
  int rows[kLoraTileRows];
  LoraEntry entry;

  /// By all threads. False if the tile has nothing to do.
  __device__ __forceinline__ bool read(const TileArgs& args) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int32_t* tile = args.tiles != nullptr ? args.tiles + static_cast<std::int64_t>(blockIdx.y) * kLoraTileWords : nullptr;
    const int slot = tile != nullptr ? tile[0] : 0;
    if (slot < 0) return false;
    if (thread < kLoraTileRows) {
      const int row = static_cast<int>(blockIdx.y) * static_cast<int>(kLoraTileRows) + thread;
      rows[thread] = tile != nullptr ? tile[1 + thread] : row < args.num_rows ? row : -1;
    }
    const auto* from =
        reinterpret_cast<const int*>(tile != nullptr ? args.entries + slot * args.entry_stride : reinterpret_cast<const char*>(&args.one));
    if (thread < static_cast<int>(sizeof(LoraEntry) / 4)) reinterpret_cast<int*>(&entry)[thread] = from[thread];
    __syncthreads();
    return entry.a != nullptr;
  }
};

/// A block owns a tile and kRankBlock ranks of a part: blockIdx.x / (gridDim.x / kMaxLoraParts) says which.
__global__ void __launch_bounds__(kThreads) shrink_tiles_kernel(const __grid_constant__ TileArgs args) {
  __shared__ HandedSums sums;
  __shared__ TileOfBlock tile;
  let_next_begin();
  const int blocks_per_part = static_cast<int>(gridDim.x) / kMaxLoraParts, part = static_cast<int>(blockIdx.x) / blocks_per_part,
            first = static_cast<int>(blockIdx.x) % blocks_per_part * kRankBlock;
  if (!tile.read(args) || part >= tile.entry.num_parts || first >= tile.entry.rank[part]) return wait_for_previous();
  const LoraEntry& e = tile.entry;
  // What the next kernel reads of this adapter, by the first of the blocks that know it.
  if (first == 0) {
    constexpr int kLine = 128;
    const std::int64_t bytes = static_cast<std::int64_t>(e.num_outputs[part]) * e.rank[part] * 2;
    for (std::int64_t at = static_cast<std::int64_t>(threadIdx.x) * kLine; at < bytes; at += kThreads * kLine)
      prefetch_weight(reinterpret_cast<const char*>(e.b[part]) + at);
  }
  const Ranks ranks{e.a + static_cast<std::int64_t>(e.first_rank[part]) * args.K, args.K, first, e.rank[part], args.K % 8 == 0};
  Bf16* h = args.h + static_cast<std::int64_t>(blockIdx.y) * kLoraTileRows * args.h_pitch + part * (args.h_pitch / kMaxLoraParts) + first;
  shrink_in_order(
      {args.x, args.x_stride, tile.rows, args.x_is_vector}, ranks, sums,
      [&] { args.x_is_there != nullptr ? wait_for_signal(args.x_is_there) : wait_for_previous(); },
      [&](int row, int j, float sum) { h[row * args.h_pitch + j] = __float2bfloat16_rn(sum); });  // zero beyond the rank
  if (args.x_is_there != nullptr) wait_for_previous();
}

/// A block owns a tile and `columns` of y.
__global__ void __launch_bounds__(kThreads) expand_tiles_kernel(const __grid_constant__ TileArgs args) {
  __shared__ TileOfBlock tile;
  let_next_begin();
  const auto wait = [&] {
    wait_for_previous();
    if (args.x_is_there != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *args.x_is_there = 0;
  };
  if (!tile.read(args)) return wait();
  const LoraEntry& e = tile.entry;
  const Lane me;
  const int first_column = static_cast<int>(blockIdx.x) * args.columns, end_column = min(args.N, first_column + args.columns);
  bool has_waited = false;
  for (int p = 0; p < e.num_parts; ++p) {
    const int base = e.first_output[p], first = max(first_column, base) - base, end = min(end_column, base + e.num_outputs[p]) - base;
    if (first >= end) continue;
    const int rank = e.rank[p];
    const Bf16* h = args.h + static_cast<std::int64_t>(blockIdx.y) * kLoraTileRows * args.h_pitch + p * (args.h_pitch / kMaxLoraParts);
    ColumnWeights next;
    next.load(e.b[p], rank, 0, first + me.warp * kWarpColumns, end);
    if (!has_waited) wait();
    has_waited = true;
    for (int column = first + me.warp * kWarpColumns; column < end; column += kBlockColumns) {
      const ColumnWeights weights = next;
      if (column + kBlockColumns < end) next.load(e.b[p], rank, 0, column + kBlockColumns, end);
      const auto place = [&](int half) {
        return FourColumns(args.y + tile.rows[8 * half + me.group] * args.y_stride + base, column + kLaneColumns * me.quad, end,
                           args.y_is_vector && base % kLaneColumns == 0);
      };
      // On their way while h is.
      uint2 before[2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (tile.rows[8 * half + me.group] >= 0) before[half] = place(half).read();
      float acc[1][kColumnTiles][4] = {};
      expand<1>(acc, e.b[p], rank, column, end, weights,
                [&](int row, int r) { return *reinterpret_cast<const uint2*>(h + row * args.h_pitch + r); });
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum[kLaneColumns];
        add_scaled(sum, before[half], acc[0], half, e.scale[p]);
        if (tile.rows[8 * half + me.group] >= 0) place(half).write(sum);
      }
    }
  }
  if (!has_waited) wait();
}

/// Rows of groups that lie together, each group with matrices of its own; all rows, and one matrix, without tiles.
struct GroupedRows {
  const RowTile* tiles = nullptr;         ///< of up to kManyRows rows of one group, by blockIdx.y
  const Bf16* const* matrices = nullptr;  ///< of each group
};
/// The rows of a block, and the matrix that they are multiplied with, `one` without groups.
struct BlockOfRows {
  int first, end;
  const Bf16* matrix;
  __device__ __forceinline__ BlockOfRows(const GroupedRows& groups, const Bf16* one, int rows_of_block, int num_rows) {
    if (groups.tiles == nullptr) {
      first = static_cast<int>(blockIdx.y) * rows_of_block;
      end = num_rows;
      matrix = one;
    } else {
      const RowTile tile = groups.tiles[blockIdx.y];
      first = tile.first;
      end = tile.first + tile.count;
      matrix = groups.matrices[tile.expert];
    }
  }
};

/// h[t, r] = round(scale * sum_k x[t, k] a[r, k]). A block owns kManyRows rows and kRankBlock ranks.
constexpr int kManyM = 4, kManyRows = 16 * kManyM;
struct ShrinkArgs {
  const Bf16 *x, *a;
  GroupedRows groups;
  Bf16* h;
  std::int64_t x_stride, h_stride;
  int num_rows, K, num_ranks;
  bool x_is_vector;
  float scale;
};
__global__ void __launch_bounds__(kThreads) shrink_kernel(const __grid_constant__ ShrinkArgs args) {
  __shared__ float sums[kWarps * kManyRows * kRankBlock];
  __shared__ int rows[kManyRows];
  const BlockOfRows block(args.groups, args.a, kManyRows, args.num_rows);
  const int first_rank = static_cast<int>(blockIdx.x) * kRankBlock;
  if (static_cast<int>(threadIdx.x) < kManyRows) {
    const int row = block.first + static_cast<int>(threadIdx.x);
    rows[threadIdx.x] = row < block.end ? row : -1;
  }
  __syncthreads();
  shrink<kManyM>({args.x, args.x_stride, rows, args.x_is_vector}, {block.matrix, args.K, first_rank, args.num_ranks, args.K % 8 == 0}, sums,
                 [&](int row, int j, float sum) {
                   if (rows[row] >= 0 && first_rank + j < args.num_ranks)
                     args.h[rows[row] * args.h_stride + first_rank + j] = __float2bfloat16_rn(sum * args.scale);
                 });
}

/// out[t, n] (+)= scale * sum_r h[t, r] w[n, r]. A block owns kManyRows rows and `columns`.
struct ExpandArgs {
  const Bf16 *h, *w;
  GroupedRows groups;
  Bf16* out;
  std::int64_t h_stride, out_stride;
  int num_rows, N, num_ranks, columns;
  bool accumulate, h_is_vector, out_is_vector;
  float scale;
};
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ ExpandArgs args) {
  const Lane me;
  const BlockOfRows block(args.groups, args.w, kManyRows, args.num_rows);
  const int first = static_cast<int>(blockIdx.x) * args.columns, end = min(args.N, first + args.columns);
  for (int column = first + me.warp * kWarpColumns; column < end; column += kBlockColumns) {
    ColumnWeights weights;
    weights.load(block.matrix, args.num_ranks, 0, column, end);
    float acc[kManyM][kColumnTiles][4] = {};
    expand<kManyM>(acc, block.matrix, args.num_ranks, column, end, weights, [&](int row, int r) {
      const int t = block.first + row;
      return t < block.end ? load_4(args.h + t * args.h_stride, r, args.num_ranks, args.h_is_vector) : uint2{};
    });
#pragma unroll
    for (int m = 0; m < kManyM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = block.first + 16 * m + 8 * half + me.group;
        if (t >= block.end) continue;
        const FourColumns to(args.out + t * args.out_stride, column + kLaneColumns * me.quad, end, args.out_is_vector);
        float sum[kLaneColumns];
        add_scaled(sum, args.accumulate ? to.read() : uint2{}, acc[m], half, args.scale);
        to.write(sum);
      }
  }
}

/// sum over tokens of narrow[t, m] * wide[t, n], in steps of 16 tokens of a chunk; chunks are added in order. A block owns 16 kM m and 128
/// n; a warp 16 kM by 32.
constexpr int kGradientThreads = 128, kGradientColumns = 128, kGradientTokens = 32;
constexpr std::int64_t kChunkTokens = 512;
struct GradientArgs {
  const Bf16 *narrow, *wide;
  std::int64_t narrow_stride, wide_stride;
  int T, M, N;
  bool narrow_is_vector, wide_is_vector, is_transposed;
  float* partial;
};
constexpr int kWideN = 32;
/// acc += the sum over tokens [begin, end).
template <int kM>
__device__ __forceinline__ void sum_chunk(float (&acc)[kM][kWideN / 8][4], const GradientArgs& args, int begin, int end) {
  __shared__ __align__(16) Bf16 narrow_data[kGradientTokens * PaddedMatrix<16 * kM>::kPitch];
  __shared__ __align__(16) Bf16 wide_data[kGradientTokens * PaddedMatrix<kGradientColumns>::kPitch];
  const PaddedMatrix<16 * kM> narrow{narrow_data};
  const PaddedMatrix<kGradientColumns> wide{wide_data};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int n0 = static_cast<int>(blockIdx.x) * kGradientColumns, m0 = static_cast<int>(blockIdx.y) * 16 * kM;
  for (int t0 = begin; t0 < end; t0 += kGradientTokens) {
    __syncthreads();
    for (int i = thread; i < kGradientTokens * kGradientColumns / 8; i += kGradientThreads) {
      const int t = i / (kGradientColumns / 8), c = i % (kGradientColumns / 8) * 8;
      const uint4 v = t0 + t < end ? load_8(args.wide + (t0 + t) * args.wide_stride, n0 + c, args.N, args.wide_is_vector) : uint4{};
      *reinterpret_cast<uint4*>(wide.at(t, c)) = v;
    }
    for (int i = thread; i < kGradientTokens * 2 * kM; i += kGradientThreads) {
      const int t = i / (2 * kM), c = i % (2 * kM) * 8;
      const uint4 v = t0 + t < end ? load_8(args.narrow + (t0 + t) * args.narrow_stride, m0 + c, args.M, args.narrow_is_vector) : uint4{};
      *reinterpret_cast<uint4*>(narrow.at(t, c)) = v;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kGradientTokens; k += 16) {
      std::uint32_t right[kWideN / 16][4];
#pragma unroll
      for (int n = 0; n < kWideN / 16; ++n) wide.right_columns(right[n], k, warp * kWideN + 16 * n);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        std::uint32_t left[4];  // rows are columns of `narrow`
        load_matrices_transposed(left, narrow.at(k + lane % 8 + lane / 16 * 8, 16 * m + lane / 8 % 2 * 8));
#pragma unroll
        for (int n = 0; n < kWideN / 8; ++n) multiply_add(acc[m][n], left, right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}
/// use(where in the result, what of acc is for it): [m, n], or [n, m] if `is_transposed`.
template <int kM, typename Use>
__device__ __forceinline__ void for_each_sum(float (&acc)[kM][kWideN / 8][4], const GradientArgs& args, Use&& use) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int n0 = static_cast<int>(blockIdx.x) * kGradientColumns, m0 = static_cast<int>(blockIdx.y) * 16 * kM;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kWideN / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = m0 + 16 * m + lane / 4 + e / 2 * 8, column = n0 + warp * kWideN + 8 * n + lane % 4 * 2 + e % 2;
        if (row < args.M && column < args.N)
          use(args.is_transposed ? static_cast<std::int64_t>(column) * args.M + row : static_cast<std::int64_t>(row) * args.N + column,
              acc[m][n][e]);
      }
}
/// partial[chunk]: the sum over a chunk, blockIdx.z.
template <int kM>
__global__ void __launch_bounds__(kGradientThreads) gradient_kernel(const GradientArgs args) {
  const int begin = static_cast<int>(blockIdx.z * kChunkTokens), end = min(args.T, begin + static_cast<int>(kChunkTokens));
  float acc[kM][kWideN / 8][4] = {};
  sum_chunk<kM>(acc, args, begin, end);
  float* const out = args.partial + static_cast<std::int64_t>(blockIdx.z) * args.M * args.N;
  for_each_sum<kM>(acc, args, [&](std::int64_t at, float sum) { out[at] = sum; });
}
/// The sums of each group's rows [begin[g], begin[g + 1]) into outs[g], or added to them: the bits of gradient_kernel and
/// add_gradient_chunks_kernel. blockIdx.z is the group.
template <int kM>
__global__ void __launch_bounds__(kGradientThreads)
    grouped_gradient_kernel(const GradientArgs args, float* const* outs, const std::int32_t* begin, bool accumulate) {
  const int first = begin[blockIdx.z], end = begin[blockIdx.z + 1];
  float* const out = outs[blockIdx.z];
  float total[kM][kWideN / 8][4] = {};
  if (accumulate) for_each_sum<kM>(total, args, [&](std::int64_t at, float& sum) { sum = out[at]; });
  for (int chunk = first; chunk < end; chunk += static_cast<int>(kChunkTokens)) {
    float acc[kM][kWideN / 8][4] = {};
    sum_chunk<kM>(acc, args, chunk, min(end, chunk + static_cast<int>(kChunkTokens)));
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kWideN / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) total[m][n][e] += acc[m][n][e];
  }
  for_each_sum<kM>(total, args, [&](std::int64_t at, float& sum) { out[at] = sum; });
}
/// out (+)= the chunks in order, as add_chunks_kernel of lora.cu does for fp32.
__global__ void __launch_bounds__(kThreads)
    add_gradient_chunks_kernel(float* out, const float* partial, std::int64_t chunks, std::int64_t count, bool accumulate) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  float sum = accumulate ? out[i] : 0.0f;
  for (std::int64_t c = 0; c < chunks; ++c) sum += partial[c * count + i];
  out[i] = sum;
}

/// out[c, r] = in[r, c], or of ins[blockIdx.z], whose results lie one behind another. A block owns 32 by 32.
__global__ void __launch_bounds__(kThreads) transpose_kernel(Bf16* out, const Bf16* in, const Bf16* const* ins, int rows, int columns) {
  if (ins != nullptr) in = ins[blockIdx.z];
  out += static_cast<std::int64_t>(blockIdx.z) * rows * columns;
  __shared__ Bf16 tile[32][34];
  const int c = static_cast<int>(blockIdx.x) * 32 + static_cast<int>(threadIdx.x) % 32, r0 = static_cast<int>(blockIdx.y) * 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < 32; i += kWarps)
    if (r0 + i < rows && c < columns) tile[i][threadIdx.x % 32] = in[static_cast<std::int64_t>(r0 + i) * columns + c];
  __syncthreads();
  const int r = r0 + static_cast<int>(threadIdx.x) % 32, c0 = static_cast<int>(blockIdx.x) * 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < 32; i += kWarps)
    if (c0 + i < columns && r < rows) out[static_cast<std::int64_t>(c0 + i) * rows + r] = tile[threadIdx.x % 32][i];
}

}  // namespace prl::ops::cuda::lora
