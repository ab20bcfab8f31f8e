#include "ops/cuda/lora_bf16.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/few_rows.hpp"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/lora_entry.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kStep = 32;       ///< inputs that two matrix instructions take
constexpr int kSplitSteps = 4;  ///< steps of a split: sums over inputs are formed by splits, each in order, which are then added in order
constexpr int kRankBlock = 16;  ///< ranks that one matrix instruction sums, and that a block forms A x of
constexpr int kRankTiles = kRankBlock / 8;
constexpr unsigned kMaxGrid = 65535;

LoraEntry entry_of(const OpContext& ctx, const LoraWeight& w) {
  LoraEntry e{};
  e.a = dense(ctx, *w.a).w_NK.as<Bf16>();
  e.num_parts = static_cast<int>(w.parts.size());
  for (std::size_t i = 0; i < w.parts.size(); ++i) {
    const LoraPart& part = w.parts[i];
    e.b[i] = dense(ctx, *part.b).w_NK.as<Bf16>();
    e.first_output[i] = static_cast<int>(part.first_output);
    e.num_outputs[i] = static_cast<int>(part.num_outputs);
    e.first_rank[i] = static_cast<int>(part.first_rank);
    e.rank[i] = static_cast<int>(part.rank);
    e.scale[i] = part.scale;
  }
  return e;
}

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

/// h[t, r] = round(scale * sum_k x[t, k] a[r, k]). A block owns kManyRows rows and kRankBlock ranks.
constexpr int kManyM = 4, kManyRows = 16 * kManyM;
struct ShrinkArgs {
  const Bf16 *x, *a;
  Bf16* h;
  std::int64_t x_stride, h_stride;
  int num_rows, K, num_ranks;
  bool x_is_vector;
  float scale;
};
__global__ void __launch_bounds__(kThreads) shrink_kernel(const __grid_constant__ ShrinkArgs args) {
  __shared__ float sums[kWarps * kManyRows * kRankBlock];
  __shared__ int rows[kManyRows];
  const int first_row = static_cast<int>(blockIdx.y) * kManyRows, first_rank = static_cast<int>(blockIdx.x) * kRankBlock;
  if (static_cast<int>(threadIdx.x) < kManyRows) {
    const int row = first_row + static_cast<int>(threadIdx.x);
    rows[threadIdx.x] = row < args.num_rows ? row : -1;
  }
  __syncthreads();
  shrink<kManyM>({args.x, args.x_stride, rows, args.x_is_vector}, {args.a, args.K, first_rank, args.num_ranks, args.K % 8 == 0}, sums,
                 [&](int row, int j, float sum) {
                   if (rows[row] >= 0 && first_rank + j < args.num_ranks)
                     args.h[rows[row] * args.h_stride + first_rank + j] = __float2bfloat16_rn(sum * args.scale);
                 });
}

/// out[t, n] (+)= scale * sum_r h[t, r] w[n, r]. A block owns kManyRows rows and `columns`.
struct ExpandArgs {
  const Bf16 *h, *w;
  Bf16* out;
  std::int64_t h_stride, out_stride;
  int num_rows, N, num_ranks, columns;
  bool accumulate, h_is_vector, out_is_vector;
  float scale;
};
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ ExpandArgs args) {
  const Lane me;
  const int first_row = static_cast<int>(blockIdx.y) * kManyRows, first = static_cast<int>(blockIdx.x) * args.columns,
            end = min(args.N, first + args.columns);
  for (int column = first + me.warp * kWarpColumns; column < end; column += kBlockColumns) {
    ColumnWeights weights;
    weights.load(args.w, args.num_ranks, 0, column, end);
    float acc[kManyM][kColumnTiles][4] = {};
    expand<kManyM>(acc, args.w, args.num_ranks, column, end, weights, [&](int row, int r) {
      const int t = first_row + row;
      return t < args.num_rows ? load_4(args.h + t * args.h_stride, r, args.num_ranks, args.h_is_vector) : uint2{};
    });
#pragma unroll
    for (int m = 0; m < kManyM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = first_row + 16 * m + 8 * half + me.group;
        if (t >= args.num_rows) continue;
        const FourColumns to(args.out + t * args.out_stride, column + kLaneColumns * me.quad, end, args.out_is_vector);
        float sum[kLaneColumns];
        add_scaled(sum, args.accumulate ? to.read() : uint2{}, acc[m], half, args.scale);
        to.write(sum);
      }
  }
}

/// partial[chunk][m, n] = sum over the tokens of a chunk of narrow[t, m] * wide[t, n], in steps of 16 tokens; with kTransposed stored as
/// [n, m]. A block owns 16 kM m, 128 n and a chunk; a warp 16 kM by 32.
constexpr int kGradientThreads = 128, kGradientColumns = 128, kGradientTokens = 32;
constexpr std::int64_t kChunkTokens = 512;
struct GradientArgs {
  const Bf16 *narrow, *wide;
  std::int64_t narrow_stride, wide_stride;
  int T, M, N;
  bool narrow_is_vector, wide_is_vector, is_transposed;
  float* partial;
};
template <int kM>
__global__ void __launch_bounds__(kGradientThreads) gradient_kernel(const GradientArgs args) {
  constexpr int kWideN = 32;
  __shared__ __align__(16) Bf16 narrow_data[kGradientTokens * PaddedMatrix<16 * kM>::kPitch];
  __shared__ __align__(16) Bf16 wide_data[kGradientTokens * PaddedMatrix<kGradientColumns>::kPitch];
  const PaddedMatrix<16 * kM> narrow{narrow_data};
  const PaddedMatrix<kGradientColumns> wide{wide_data};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int n0 = static_cast<int>(blockIdx.x) * kGradientColumns, m0 = static_cast<int>(blockIdx.y) * 16 * kM;
  const int begin = static_cast<int>(blockIdx.z * kChunkTokens), end = min(args.T, begin + static_cast<int>(kChunkTokens));
  float acc[kM][kWideN / 8][4] = {};
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
  float* out = args.partial + static_cast<std::int64_t>(blockIdx.z) * args.M * args.N;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kWideN / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = m0 + 16 * m + lane / 4 + e / 2 * 8, column = n0 + warp * kWideN + 8 * n + lane % 4 * 2 + e % 2;
        if (row < args.M && column < args.N)
          out[args.is_transposed ? static_cast<std::int64_t>(column) * args.M + row : static_cast<std::int64_t>(row) * args.N + column] =
              acc[m][n][e];
      }
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

/// out[c, r] = in[r, c]. A block owns 32 by 32.
__global__ void __launch_bounds__(kThreads) transpose_kernel(Bf16* out, const Bf16* in, int rows, int columns) {
  __shared__ Bf16 tile[32][34];
  const int c = static_cast<int>(blockIdx.x) * 32 + static_cast<int>(threadIdx.x) % 32, r0 = static_cast<int>(blockIdx.y) * 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < 32; i += kWarps)
    if (r0 + i < rows && c < columns) tile[i][threadIdx.x % 32] = in[static_cast<std::int64_t>(r0 + i) * columns + c];
  __syncthreads();
  const int r = r0 + static_cast<int>(threadIdx.x) % 32, c0 = static_cast<int>(blockIdx.x) * 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < 32; i += kWarps)
    if (c0 + i < columns && r < rows) out[static_cast<std::int64_t>(c0 + i) * rows + r] = tile[threadIdx.x % 32][i];
}

bool has_vector_rows(const ConstTensorView& x) { return x.row_stride % 8 == 0 && is_aligned(x.data, 16); }
bool has_rows_of_four(const TensorView& y) { return y.row_stride % 4 == 0 && is_aligned(y.data, 8); }

/// Two kernels over `num_tiles` tiles of adapters with parts of up to `max_rank`.
void launch_tiles(OpContext& ctx, TileArgs& args, std::int64_t num_tiles, std::int64_t max_rank) {
  PRL_CHECK(num_tiles <= kMaxGrid, "{} tiles of adapters in one launch", num_tiles);
  const std::int64_t rank_blocks = kMaxLoraParts * ceil_div(max_rank, kRankBlock);
  args.h_pitch = static_cast<int>(rank_blocks * kRankBlock);
  args.h = static_cast<Bf16*>(ctx.workspace->require(static_cast<std::size_t>(num_tiles * kLoraTileRows * args.h_pitch) * sizeof(Bf16)));
  const auto tiles = static_cast<unsigned>(num_tiles);
  launch_chained(stream_of(ctx), shrink_tiles_kernel, dim3(static_cast<unsigned>(rank_blocks), tiles), dim3(kThreads), 0, args);
  // Blocks that fit at once; where many tiles are empty fewer than that have work, so that no block has more than some passes.
  constexpr std::int64_t kBlocksAtOnce = 4, kMostPasses = 8;
  const std::int64_t pieces = std::max<std::int64_t>(1, kBlocksAtOnce * num_multiprocessors(ctx) / num_tiles);
  args.columns = static_cast<int>(std::min(round_up(ceil_div(args.N, pieces), kBlockColumns), kMostPasses * kBlockColumns));
  launch_chained(stream_of(ctx), expand_tiles_kernel, dim3(static_cast<unsigned>(ceil_div(args.N, args.columns)), tiles), dim3(kThreads), 0,
                 args);
}

TileArgs tile_args(TensorView y_TN, ConstTensorView x_TK) {
  TileArgs args{};
  args.x = x_TK.as<Bf16>();
  args.y = y_TN.as<Bf16>();
  args.x_stride = x_TK.row_stride;
  args.y_stride = y_TN.row_stride;
  args.num_rows = static_cast<int>(x_TK.shape.num_rows());
  args.K = static_cast<int>(x_TK.shape.num_cols());
  args.N = static_cast<int>(y_TN.shape.num_cols());
  args.x_is_vector = args.K % 8 == 0 && has_vector_rows(x_TK);
  args.y_is_vector = has_rows_of_four(y_TN);
  return args;
}

TileArgs tile_args(TensorView y_TN, ConstTensorView x_TK, const LoraIndex& index) {
  TileArgs args = tile_args(y_TN, x_TK);
  args.entries = index.entries.as<char>();
  args.entry_stride = index.entries.row_stride;
  args.tiles = index.tiles.as<std::int32_t>();
  return args;
}

std::int64_t max_rank_of(const LoraWeight& w) {
  std::int64_t most = 1;
  for (const LoraPart& part : w.parts) most = std::max(most, part.rank);
  return most;
}

void run_shrink(const OpContext& ctx, Bf16* h, std::int64_t h_stride, ConstTensorView x, const Bf16* a, std::int64_t num_ranks,
                float scale) {
  const ShrinkArgs args{x.as<Bf16>(),
                        a,
                        h,
                        x.row_stride,
                        h_stride,
                        static_cast<int>(x.shape.num_rows()),
                        static_cast<int>(x.shape.num_cols()),
                        static_cast<int>(num_ranks),
                        x.shape.num_cols() % 8 == 0 && has_vector_rows(x),
                        scale};
  const std::int64_t tiles = ceil_div(args.num_rows, kManyRows);
  PRL_CHECK(tiles <= kMaxGrid, "{} tokens in one launch", args.num_rows);
  shrink_kernel<<<dim3(static_cast<unsigned>(ceil_div(num_ranks, kRankBlock)), static_cast<unsigned>(tiles)), kThreads, 0,
                  stream_of(ctx)>>>(args);
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// h [T, num_ranks] at `h_stride`.
void run_expand(const OpContext& ctx, TensorView out, const Bf16* h, std::int64_t h_stride, const Bf16* w, std::int64_t num_ranks,
                float scale, bool accumulate) {
  constexpr int kColumns = 4 * kBlockColumns;
  const ExpandArgs args{h,
                        w,
                        out.as<Bf16>(),
                        h_stride,
                        out.row_stride,
                        static_cast<int>(out.shape.num_rows()),
                        static_cast<int>(out.shape.num_cols()),
                        static_cast<int>(num_ranks),
                        kColumns,
                        accumulate,
                        num_ranks % 4 == 0 && h_stride % 4 == 0 && is_aligned(h, 8),
                        has_rows_of_four(out),
                        scale};
  expand_kernel<<<dim3(static_cast<unsigned>(ceil_div(args.N, kColumns)), static_cast<unsigned>(ceil_div(args.num_rows, kManyRows))),
                  kThreads, 0, stream_of(ctx)>>>(args);
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// Rows of one adapter that lie together.
void add_to_all(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LoraWeight& w) {
  const std::int64_t T = x_TK.shape.num_rows(), R = w.num_ranks(), h_stride = round_up(R, 8);
  const TensorView h_shape{nullptr, {T, R}, DType::kBF16, y_TN.device, h_stride};
  Product a_x = linear_product(dense(ctx, *w.a), h_shape, x_TK);
  if (T < kManyRows || !has_librarys_bits(ctx, a_x)) {
    TileArgs args = tile_args(y_TN, x_TK);
    args.one = entry_of(ctx, w);
    return launch_tiles(ctx, args, ceil_div(T, kLoraTileRows), max_rank_of(w));
  }
  auto* h = static_cast<Bf16*>(ctx.workspace->require(static_cast<std::size_t>(T * h_stride) * sizeof(Bf16)));
  a_x.out = h;
  blas_of(ctx).run(ctx, a_x);
  for (const LoraPart& part : w.parts)
    run_expand(ctx, y_TN.columns(part.first_output, part.num_outputs), h + part.first_rank, h_stride, dense(ctx, *part.b).w_NK.as<Bf16>(),
               part.rank, part.scale, true);
}

/// out[m, n], or [n, m] if `is_transposed`, (+)= sum_t narrow[t, m] wide[t, n].
void run_gradient(const OpContext& ctx, TensorView out, ConstTensorView narrow, ConstTensorView wide, bool is_transposed, bool accumulate,
                  float* partial) {
  GradientArgs args{narrow.as<Bf16>(),
                    wide.as<Bf16>(),
                    narrow.row_stride,
                    wide.row_stride,
                    static_cast<int>(wide.shape.num_rows()),
                    static_cast<int>(narrow.shape.num_cols()),
                    static_cast<int>(wide.shape.num_cols()),
                    false,
                    false,
                    is_transposed,
                    partial};
  args.narrow_is_vector = args.M % 8 == 0 && has_vector_rows(narrow);
  args.wide_is_vector = args.N % 8 == 0 && has_vector_rows(wide);
  const std::int64_t chunks = ceil_div(args.T, kChunkTokens), count = static_cast<std::int64_t>(args.M) * args.N;
  PRL_CHECK(chunks <= kMaxGrid, "a gradient over {} tokens in one launch", args.T);
  const auto run = [&]<int kM>() {
    const dim3 grid(static_cast<unsigned>(ceil_div(args.N, kGradientColumns)), static_cast<unsigned>(ceil_div(args.M, 16 * kM)),
                    static_cast<unsigned>(chunks));
    gradient_kernel<kM><<<grid, kGradientThreads, 0, stream_of(ctx)>>>(args);
  };
  args.M <= 16 ? run.template operator()<1>() : args.M <= 32 ? run.template operator()<2>() : run.template operator()<4>();
  PRL_CUDA_CHECK(cudaGetLastError());
  add_gradient_chunks_kernel<<<static_cast<unsigned>(ceil_div(count, kThreads)), kThreads, 0, stream_of(ctx)>>>(out.as<float>(), partial,
                                                                                                                chunks, count, accumulate);
  PRL_CUDA_CHECK(cudaGetLastError());
}

void run_transpose(const OpContext& ctx, Bf16* out, const Bf16* in, std::int64_t rows, std::int64_t columns) {
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, 32)), static_cast<unsigned>(ceil_div(rows, 32)));
  transpose_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(out, in, static_cast<int>(rows), static_cast<int>(columns));
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

bool is_bf16_lora(const OpContext& ctx, const LoraWeight& w, DType dtype) {
  return dtype == DType::kBF16 && w.dtype() == DType::kBF16 && w.parts.size() <= kMaxLoraParts && properties_of(ctx).major >= 8;
}

bool write_lora_entry(OpContext& ctx, std::span<std::byte> entry, const LoraWeight* weight, DType dtype) {
  PRL_CHECK(entry.size() >= sizeof(LoraEntryMemory), "an adapter's entry of {} bytes", entry.size());
  if (weight != nullptr && !is_bf16_lora(ctx, *weight, dtype)) return false;
  LoraEntryMemory memory{};
  if (weight != nullptr) {
    memory.entry = entry_of(ctx, *weight);
    const std::int64_t K = weight->a->num_inputs();
    if (K % 64 == 0 && properties_of(ctx).major == 9) memory.a_map = rows_map(memory.entry.a, weight->num_ranks(), K, K, kLoraMapRows, 1);
  }
  std::memcpy(entry.data(), &memory, sizeof memory);
  return true;
}

void add_lora_indexed(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LoraIndex& index) {
  TileArgs args = tile_args(y_TN, x_TK, index);
  launch_tiles(ctx, args, index.tiles.shape.num_rows(), index.max_rank);
}

bool linear_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& weight, const LoraIndex& index) {
  auto* x_is_there = index.signal.as<std::int32_t>();
  if (weight.rounds_inputs()) return false;
  if (x_is_there == nullptr || !run_few_rows(ctx, linear_product(dense(ctx, weight), y_TN, x_TK), {.rows_are_there = x_is_there}))
    return false;
  TileArgs args = tile_args(y_TN, x_TK, index);
  args.x_is_there = x_is_there;
  launch_tiles(ctx, args, index.tiles.shape.num_rows(), index.max_rank);
  return true;
}

void add_bf16_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, std::span<const LoraRows> groups) {
  const std::int64_t T = x_TK.shape.num_rows();
  std::vector<std::int32_t> tiles;
  std::vector<std::byte> entries;
  std::int64_t max_rank = 1;
  for (const LoraRows& group : groups) {
    const std::int64_t count = group.count(T);
    if (count == 0) continue;
    if (group.lie_together()) {
      add_to_all(ctx, y_TN.rows(group.first(), count), x_TK.rows(group.first(), count), *group.weight);
      continue;
    }
    const std::size_t at = entries.size();
    entries.resize(at + kLoraEntryBytes);
    const LoraEntry e = entry_of(ctx, *group.weight);
    std::memcpy(entries.data() + at, &e, sizeof e);
    max_rank = std::max(max_rank, max_rank_of(*group.weight));
    append_lora_tiles(tiles, static_cast<std::int32_t>(at / kLoraEntryBytes), group.rows);
  }
  if (tiles.empty()) return;
  TileArgs args = tile_args(y_TN, x_TK);
  args.entries = reinterpret_cast<const char*>(staged(ctx, std::span<const std::byte>(entries)));
  args.entry_stride = kLoraEntryBytes;
  args.tiles = staged(ctx, std::span<const std::int32_t>(tiles));
  launch_tiles(ctx, args, static_cast<std::int64_t>(tiles.size()) / kLoraTileWords, max_rank);
}

void bf16_lora_backward(OpContext& ctx, TensorView dx_TK, TensorView da_RK, std::span<const TensorView> db, ConstTensorView dy_TN,
                        ConstTensorView x_TK, const LoraWeight& w, bool accumulate_dx, bool accumulate) {
  const std::int64_t T = x_TK.shape.num_rows(), K = x_TK.shape.num_cols(), R = w.num_ranks(), chunks = ceil_div(T, kChunkTokens);
  std::int64_t largest = R * K;
  for (const LoraPart& part : w.parts) largest = std::max(largest, part.num_outputs * part.rank);
  const std::int64_t h_stride = round_up(R, 8);
  Bf16 *h = nullptr, *dh = nullptr, *transposed = nullptr;
  float* partial = nullptr;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    h = carver.take<Bf16>(T * h_stride);
    dh = carver.take<Bf16>(T * h_stride);
    transposed = carver.take<Bf16>(largest);
    partial = carver.take<float>(chunks * largest);
    return carver.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  const auto columns = [&](Bf16* data, const LoraPart& part) {
    return ConstTensorView(TensorView{data + part.first_rank, Shape{T, part.rank}, DType::kBF16, dy_TN.device, h_stride});
  };
  const Bf16* a = dense(ctx, *w.a).w_NK.as<Bf16>();
  for (std::size_t i = 0; i < w.parts.size(); ++i) {
    const LoraPart& part = w.parts[i];
    const ConstTensorView dy = dy_TN.columns(part.first_output, part.num_outputs);
    run_shrink(ctx, h + part.first_rank, h_stride, x_TK, a + part.first_rank * K, part.rank, part.scale);
    run_gradient(ctx, db[i], columns(h, part), dy, /*is_transposed=*/true, accumulate, partial);
    run_transpose(ctx, transposed, dense(ctx, *part.b).w_NK.as<Bf16>(), part.num_outputs, part.rank);
    run_shrink(ctx, dh + part.first_rank, h_stride, dy, transposed, part.rank, part.scale);
  }
  const ConstTensorView all(TensorView{dh, Shape{T, R}, DType::kBF16, dy_TN.device, h_stride});
  run_gradient(ctx, da_RK, all, x_TK, /*is_transposed=*/false, accumulate, partial);
  if (dx_TK.data == nullptr) return;
  run_transpose(ctx, transposed, a, R, K);
  run_expand(ctx, dx_TK, dh, h_stride, transposed, R, 1.0f, accumulate_dx);
}

}  // namespace prl::ops::cuda
