#pragma once

#include <algorithm>
#include <type_traits>

#include "base/error.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/few_rows_adapter.cuh"
#include "ops/cuda/few_rows_args.cuh"
#include "ops/cuda/few_rows_codes.cuh"
#include "ops/cuda/few_rows_eight.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/hopper.cuh"

// The kernel of few_rows.hpp, for the files that launch it.

namespace prl::ops::cuda::few_rows {

/// What a block of compute capability 9.0 may ask for.
constexpr int kMaxSharedBytes = 227 * 1024;

#if PRL_HOPPER

using namespace hopper;

/// Weight copies that a block with a norm keeps in flight: it starts long before its result is needed, and copies that other blocks wait
/// for queue behind its own. Measured, one sequence, one, two and all: 1,782, 1,935 and 1,878 tok/s.
constexpr int kPacedCopies = 2;

/// Weights before anything else, for no kernel of recorded work writes those, rows after earlier kernels have ended: by one thread each,
/// and by one for each block of K of a slot where an adapter's A lies between those.
template <typename Tile, AdapterPlace kAdapter>
__host__ __device__ constexpr int weight_copies() {
  return kAdapter == AdapterPlace::kBehind ? Tile::kBlocks : 1;
}
template <typename Tile, bool kNorm, bool kSwiglu, bool kIsRows, AdapterPlace kAdapter, bool kOfExperts>
__device__ __forceinline__ void copy_steps(const FewRowsArgs& a, const RowsOfBlock<kOfExperts>& of_block, unsigned char* shared,
                                           std::uint64_t* full, std::uint64_t* empty) {
  constexpr int kBlocks = Tile::kBlocks, kRowsBytes = kNorm ? 0 : kBlocks * Tile::kRows * kRowBytes;
  constexpr bool kHasRanksBehind = kAdapter == AdapterPlace::kBehind;
  const int row = rows_begin<Tile::kRows>(of_block);
  int column = static_cast<int>(blockIdx.x) * a.columns;
  if constexpr (kOfExperts) column += kSwiglu ? 2 * of_block.first_weight : of_block.first_weight;
  const int weight_bytes = kBlocks * a.columns * kRowBytes, pitch = (a.columns + (kHasRanksBehind ? a.ranks : 0)) * kRowBytes;
  const int slot_bytes = kIsRows ? kRowsBytes : kBlocks * pitch,
            copy = !kIsRows && kHasRanksBehind ? static_cast<int>(threadIdx.x) % kWarp : 0;
  unsigned char* const begin = shared + (kIsRows ? a.rows_at : 0) + copy * pitch;
  unsigned char* to = begin;
  const CachePolicy once = read_once();
  if constexpr (kIsRows) {
    wait_for_previous();
    if (a.rows_are_there != nullptr && blockIdx.x == 0 && blockIdx.y == 0) signal(a.rows_are_there);
  }
  int slot = 0;
  std::uint32_t phase = 1;
  for (int step = 0; step < a.num_steps; ++step) {
    const int block = step * kBlocks + copy;
    if (step >= a.slots) barrier_wait(empty + slot, phase);
    if (kNorm && step >= kPacedCopies && step - kPacedCopies < a.slots) barrier_wait(full + step - kPacedCopies, 0);
    if constexpr (kIsRows) {
      if (Tile::kOperands == Operands::kWidened) barrier_arrive_expect(full + slot, kRowsBytes);
      copy_box(to, &a.rows, full + slot, 0, row, block);
    } else {
      if (copy == 0) barrier_arrive_expect(full + slot, static_cast<std::uint32_t>(weight_bytes + kRowsBytes));
      if constexpr (kSwiglu)
        copy_box(to, &a.weights, full + slot, once, 0, 0, 0, column / 16, block);
      else
        copy_box(to, &a.weights, full + slot, once, 0, column, block);
    }
    to += slot_bytes;
    if (++slot == a.slots) {
      slot = 0;
      to = begin;
      phase ^= 1;
    }
  }
}

__device__ __forceinline__ std::uint32_t sum_of_pairs(std::uint32_t x, std::uint32_t y) {
  const auto a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
  const auto b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&y));
  const __nv_bfloat162 sum = __floats2bfloat162_rn(a.x + b.x, a.y + b.y);
  return *reinterpret_cast<const std::uint32_t*>(&sum);
}
/// Gate and up are rounded as they would be stored.
template <typename T>
__device__ __forceinline__ float2 gated_pair(float2 gate, float2 up) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    gate = __bfloat1622float2(__floats2bfloat162_rn(gate.x, gate.y));
    up = __bfloat1622float2(__floats2bfloat162_rn(up.x, up.y));
  }
  return {gated(gate.x, up.x), gated(gate.y, up.y)};
}

/// A pair as it is stored, in row `row` of out if it has that.
template <bool kHasFactors>
__device__ __forceinline__ std::uint32_t stored_pair(const FewRowsArgs& a, float2 x, int row, bool is_there) {
  const std::uint32_t pair = pack_bf16(x.x, x.y);
  if constexpr (!kHasFactors) return pair;
  if (a.row_factors == nullptr) return pair;
  const float factor = is_there ? __ldcg(a.row_factors + row) : 0.0f;  // an earlier layer has had others in its place
  return pack_bf16(unpacked<__nv_bfloat16>(&pair, 0) * factor, unpacked<__nv_bfloat16>(&pair, 1) * factor);
}

/// A lane's results as pairs of neighbouring columns of out. With rows on the left d[4 j + e] is row lane / 4 (+ 8 for e >= 2) of the
/// warp's 16, column 8 j + 2 (lane % 4) + e % 2; with columns there it is column lane / 4 (+ 8), row 8 j + 2 (lane % 4) + e % 2, and lanes
/// of neighbouring columns exchange halves.
template <typename Tile, typename T, bool kSwiglu>
struct LanePairs {
  static constexpr int kInRow = Tile::kHasRowsLeft ? kSpan / 8 : Tile::kRows / 8, kHalves = !Tile::kHasRowsLeft && kSwiglu ? 1 : 2;
  static constexpr int kStep = Tile::kHasRowsLeft && kSwiglu ? 2 : 1;  ///< of j: pieces of gate, each before its piece of up
  static constexpr int kCount = kHalves * kInRow / kStep, kBiases = Tile::kHasRowsLeft ? kInRow : kHalves;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, first = static_cast<int>(threadIdx.x) % kGroup / kWarp * 16;
  const bool is_odd = lane / 4 % 2 != 0;
  float2 bias[kSwiglu ? 1 : kBiases];  ///< zero, which changes no sum that began with zero, if there is none

  __device__ __forceinline__ explicit LanePairs(const FewRowsArgs& a) {
    if constexpr (!kSwiglu) {
#pragma unroll
      for (int k = 0; k < kBiases; ++k) {
        const int c = column(Tile::kHasRowsLeft ? k * kHalves : k), n = static_cast<int>(blockIdx.x) * a.columns + c;
        bias[k] = a.bias != nullptr && c < a.columns && n < a.N ? float2{a.bias[n], a.bias[n + 1]} : float2{};
      }
    }
  }
  /// Of the warpgroup's rows.
  __device__ __forceinline__ int row(int i) const {
    const int half = i % kHalves, j = i / kHalves;
    return Tile::kHasRowsLeft ? first + 8 * half + lane / 4 : 8 * j + 2 * (lane % 4) + (is_odd ? 1 : 0);
  }
  /// Of the tile's columns of out: the first of two.
  __device__ __forceinline__ int column(int i) const {
    const int half = i % kHalves, j = i / kHalves;
    if constexpr (Tile::kHasRowsLeft) return 8 * j + 2 * (lane % 4);
    return first / (kSwiglu ? 2 : 1) + 8 * half + lane / 4 - (is_odd ? 1 : 0);
  }
  __device__ __forceinline__ float2 value(const float (&d)[Tile::kResults], int i) const {
    const int half = i % kHalves, j = i / kHalves * kStep;
    const auto pair = [&](int at) { return float2{d[at], d[at + 1]}; };
    if constexpr (Tile::kHasRowsLeft) {
      const float2 x = pair(4 * j + 2 * half);
      return kSwiglu ? gated_pair<T>(x, pair(4 * (j + 1) + 2 * half)) : x;
    } else {
      float2 x = pair(4 * j + 2 * half);
      if constexpr (kSwiglu) x = gated_pair<T>(x, pair(4 * j + 2));
      const float other = __shfl_xor_sync(0xffffffffu, is_odd ? x.x : x.y, 4);
      return is_odd ? float2{other, x.y} : float2{x.x, other};
    }
  }
  /// use(i, pair): what is stored but for the residual.
  template <typename Use>
  __device__ __forceinline__ void for_each(const float (&d)[Tile::kResults], Use&& use) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float2 x = value(d, i);
      if constexpr (!kSwiglu) {
        const float2& b = bias[Tile::kHasRowsLeft ? i / kHalves : i % kHalves];
        x.x += b.x;
        x.y += b.y;
      }
      use(i, x);
    }
  }
};

/// Stores results from where they are formed: for fp32, and for few rows, which shared memory would only delay.
template <typename Tile, typename T, bool kSwiglu, bool kOfExperts>
struct DirectStore {
  using Pairs = LanePairs<Tile, T, kSwiglu>;
  const Pairs pairs;
  const RowsOfBlock<kOfExperts> of_block;
  std::int64_t at[Pairs::kCount];  ///< in out, or -1 where the tile has none; known before the sum begins
  std::uint32_t residual[Pairs::kCount];

  __device__ __forceinline__ int top_row() const {
    return rows_begin<Tile::kRows>(of_block) + static_cast<int>(threadIdx.x) / kGroup * Tile::kEach;
  }
  __device__ __forceinline__ DirectStore(const FewRowsArgs& a, const RowsOfBlock<kOfExperts>& rows) : pairs(a), of_block(rows) {
    const int columns = a.columns / (kSwiglu ? 2 : 1), first_column = static_cast<int>(blockIdx.x) * columns, top = top_row();
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      const int row = top + pairs.row(i), column = first_column + pairs.column(i);
      at[i] = known_here(pairs.column(i) < columns && column < a.N && row < rows_end(a, of_block) ? row * a.out_stride + column : -1);
    }
  }
  __device__ __forceinline__ void load_residual(const FewRowsArgs& a) {
    const int first_column = static_cast<int>(blockIdx.x) * (a.columns / (kSwiglu ? 2 : 1));
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i)
      residual[i] = at[i] >= 0 ? *reinterpret_cast<const std::uint32_t*>(a.residual + (top_row() + pairs.row(i)) * a.residual_stride +
                                                                         first_column + pairs.column(i))
                               : 0;
  }
  __device__ __forceinline__ void run(const FewRowsArgs& a, unsigned char* /*rows*/, const float (&d)[Tile::kResults]) const {
    pairs.for_each(d, [&](int i, float2 x) {
      T* to = static_cast<T*>(a.out) + at[i];
      if constexpr (std::is_same_v<T, float>) {
        if (at[i] >= 0) *reinterpret_cast<float2*>(to) = x;
      } else {
        std::uint32_t pair = stored_pair < kOfExperts && kSwiglu > (a, x, top_row() + pairs.row(i), at[i] >= 0);
        if (a.residual != nullptr) pair = sum_of_pairs(pair, residual[i]);
        if (at[i] >= 0) *reinterpret_cast<std::uint32_t*>(to) = pair;
      }
    });
  }
};

/// Stores rows of the tile whole, by way of the shared memory of the rows that its warpgroup has read: the pairs that the lanes of a warp
/// hold lie in eight rows, 16 bytes of each.
template <typename Tile, bool kSwiglu, bool kOfExperts>
struct StagedStore {
  using Pairs = LanePairs<Tile, __nv_bfloat16, kSwiglu>;
  static constexpr int kPieces = kSpan / 8 / (kSwiglu ? 2 : 1);  ///< of 8 columns, in a row
  /// With rows on the left a warp has its own 16 of them; else four share all.
  static constexpr bool kIsByWarps = Tile::kHasRowsLeft;
  static constexpr int kRowsAtOnce = (kIsByWarps ? kWarp : kGroup) / kPieces, kPasses = (kIsByWarps ? 16 : Tile::kEach) / kRowsAtOnce;
  const Pairs pairs;
  const RowsOfBlock<kOfExperts> of_block;
  std::int64_t at[kPasses];  ///< as in DirectStore
  int count;                 ///< of columns that lie there
  uint4 residual[kPasses];

  const int group = static_cast<int>(threadIdx.x) / kGroup, thread = static_cast<int>(threadIdx.x) % (kIsByWarps ? kWarp : kGroup);
  const int first_row = kIsByWarps ? static_cast<int>(threadIdx.x) % kGroup / kWarp * 16 : 0;
  const int piece = thread % kPieces;
  __device__ __forceinline__ int row_in_group(int pass) const { return first_row + pass * kRowsAtOnce + thread / kPieces; }
  __device__ __forceinline__ int row(int pass) const {
    return rows_begin<Tile::kRows>(of_block) + group * Tile::kEach + row_in_group(pass);
  }
  __device__ __forceinline__ int first_column(const FewRowsArgs& a) const {
    return static_cast<int>(blockIdx.x) * (a.columns / (kSwiglu ? 2 : 1)) + piece * 8;
  }
  __device__ __forceinline__ StagedStore(const FewRowsArgs& a, const RowsOfBlock<kOfExperts>& rows) : pairs(a), of_block(rows) {
    const int columns = a.columns / (kSwiglu ? 2 : 1);
    count = piece * 8 < columns ? min(8, a.N - first_column(a)) : 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      at[pass] = known_here(count > 0 && row(pass) < rows_end(a, of_block) ? row(pass) * a.out_stride + first_column(a) : -1);
  }
  /// Pieces of a row change places with its number, so that neither the lanes of a result nor those of a row share banks.
  __device__ __forceinline__ unsigned char* staged(unsigned char* rows, int row, int at_piece) const {
    return rows + (group * Tile::kEach + row) * kRowBytes + (at_piece ^ row % kPieces) * 16;
  }
  __device__ __forceinline__ void sync() const {
    if constexpr (kIsByWarps)
      __syncwarp();
    else
      named_sync<kGroup>(1 + group);
  }

  __device__ __forceinline__ void load_residual(const FewRowsArgs& a) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      residual[pass] = uint4{};
      if (at[pass] < 0) continue;
      const __nv_bfloat16* from = a.residual + row(pass) * a.residual_stride + first_column(a);
      if (a.is_wide) {
        residual[pass] = *reinterpret_cast<const uint4*>(from);
      } else {
        auto* words = reinterpret_cast<std::uint32_t*>(&residual[pass]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (2 * e < count) words[e] = *reinterpret_cast<const std::uint32_t*>(from + 2 * e);
      }
    }
  }
  __device__ __forceinline__ void run(const FewRowsArgs& a, unsigned char* rows, const float (&d)[Tile::kResults]) const {
    sync();  // no product reads these rows any more
    pairs.for_each(d, [&](int i, float2 x) {
      const int c = pairs.column(i), r = pairs.row(i), in_all = rows_begin<Tile::kRows>(of_block) + group * Tile::kEach + r;
      *reinterpret_cast<std::uint32_t*>(staged(rows, r, c / 8) + c % 8 * 2) =
          stored_pair < kOfExperts && kSwiglu > (a, x, in_all, in_all < rows_end(a, of_block));
    });
    sync();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (at[pass] < 0) continue;
      uint4 values = *reinterpret_cast<const uint4*>(staged(rows, row_in_group(pass), piece));
      auto* words = reinterpret_cast<std::uint32_t*>(&values);
      const auto* added = reinterpret_cast<const std::uint32_t*>(&residual[pass]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (a.residual != nullptr) words[e] = sum_of_pairs(words[e], added[e]);
      __nv_bfloat16* to = static_cast<__nv_bfloat16*>(a.out) + at[pass];
      if (a.is_wide) {
        *reinterpret_cast<uint4*>(to) = values;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (2 * e < count) *reinterpret_cast<std::uint32_t*>(to + 2 * e) = words[e];
      }
    }
  }
};

/// The sum over K, in order. Operand addresses are kept in the form that the instructions take, in units of 16 bytes: with few rows the
/// instructions between two products are what costs.
template <typename Tile, bool kNorm, bool kHasRanksBehind, int kApart>
__device__ __forceinline__ void compute_tile(const FewRowsArgs& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty,
                                             float (&d)[Tile::kResults], float (&apart)[kApart]) {
  constexpr int kBlocks = Tile::kBlocks;
  // Both in one exchange: with two the compiler no longer sees that the addresses are alike in a warp.
  const std::uint32_t both = same_in_warp(shared_address(shared) + (Tile::kGroups == 1 ? 0 : threadIdx.x / kGroup << 20));
  const std::uint32_t begin = both & 0xfffff, group = both >> 20;
  const std::uint64_t weights = along_rows(begin),
                      rows = along_rows(begin + static_cast<std::uint32_t>(a.rows_at) + group * (Tile::kEach * kRowBytes));
  const auto weights_block = static_cast<std::uint32_t>((a.columns + (kHasRanksBehind ? a.ranks : 0)) * kRowBytes / 16);
  const std::uint64_t ranks = kApart > 1 ? along_rows(begin + static_cast<std::uint32_t>(a.ranks_at)) : 0;
  const auto ranks_block = static_cast<std::uint32_t>(a.ranks * kRowBytes / 16);
  std::uint64_t at_ranks = ranks;
  constexpr std::uint32_t kRowsBlock = Tile::kRows * kRowBytes / 16;
  std::uint64_t at_weights = weights, at_rows = rows;
  int slot = 0;
  std::uint32_t phase = 0;
  for (int step = 0; step < a.num_steps; ++step) {
    barrier_wait(full + slot, phase);
    products_begin();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int k = 0; k < kBlock / 16; ++k) {
        const std::uint64_t w = at_weights + static_cast<std::uint32_t>(2 * k), r = at_rows + static_cast<std::uint32_t>(2 * k);
        if constexpr (Tile::kHasRowsLeft)
          product<0>(d, r, w, 1);
        else
          product<0>(d, w, r, 1);
        if constexpr (kApart > 1) {
          const std::uint64_t of_ranks = at_ranks + static_cast<std::uint32_t>(2 * k);
          if constexpr (Tile::kHasRowsLeft)
            product<0>(apart, r, of_ranks, 1);
          else
            product<0>(apart, of_ranks, r, 1);
        }
      }
      at_weights += weights_block;
      at_ranks += ranks_block;
      at_rows += kRowsBlock;
    }
    products_commit();
    // The slot before this one is free once its products have been formed.
    if (step > 0 && step - 1 + a.slots < a.num_steps) {
      products_wait<1>();
      arrive_once_per_warp(empty + (slot == 0 ? a.slots : slot) - 1);
    }
    if (++slot == a.slots) {
      slot = 0;
      phase ^= 1;
      at_weights = weights;
      at_ranks = ranks;
      if constexpr (!kNorm) at_rows = rows;
    }
  }
  products_wait<0>();
  pin(d);
  if constexpr (kApart > 1) pin(apart);
}

/// kEach rows of each warp, or of warps that share them: each of these sums the whole row, in the one order, and stores a part of its
/// columns. The arithmetic is norm.cu's, where a warp holds a row of this width.
template <int kRows, int kEach, int kBlocks>
__device__ __forceinline__ void norm_rows_of_warps(const FewRowsArgs& a, unsigned char* rows, int num_rows) {
  constexpr int kWarps = kGroup / kWarp, kVectors = static_cast<int>(kMaxNormColumns) / (kWarp * kVec);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int end = a.num_steps * kBlocks * kBlock;  // columns beyond K are zero
  const int log_sharers = kEach > 1 ? 0 : num_rows == 1 ? 2 : num_rows == 2 ? 1 : 0;
  const auto is_mine = [&](int j) { return ((j ^ warp) & ((1 << log_sharers) - 1)) == 0; };
  const auto column = [&](int j) { return (lane + j * kWarp) * kVec; };
  // Rows beyond M are the last one again: nobody stores what comes of them.
  const auto row = [&](int i) { return (warp >> log_sharers) + i * kWarps; };
  float w[kVectors][kVec] = {};
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (is_mine(j) && column(j) < a.K) load<true>(w[j], a.norm + column(j), kVec);
  wait_for_previous();
  uint4 x[kEach][kVectors] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const __nv_bfloat16* from = a.x + (static_cast<int>(blockIdx.y) * kRows + min(row(i), num_rows - 1)) * a.x_stride;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (column(j) < a.K) x[i][j] = *reinterpret_cast<const uint4*>(from + column(j));
    // Whole registers from here on; else zeros are merged with what is read half by half.
    pin(reinterpret_cast<std::uint32_t(&)[4 * kVectors]>(x[i]));
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float v[kVectors][kVec], squares[kVectors] = {};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      load<true>(v[j], reinterpret_cast<const __nv_bfloat16*>(&x[i][j]), kVec);
#pragma unroll
      for (int e = 0; e < kVec; ++e) squares[j] = fmaf(v[j][e], v[j][e], squares[j]);
    }
    const float scale = norm_scale(warp_sum(pair_sum(squares)), a.inverse_K, a.eps);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int c = column(j), r = row(i);
      if (!is_mine(j) || c >= end) continue;
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[j][e] = v[j][e] * scale * w[j][e];
      unsigned char* to = rows + (c / kBlock * kRows + r) * kRowBytes + (c / kVec % 8 ^ r % 8) * 16;
      store<true>(reinterpret_cast<__nv_bfloat16*>(to), v[j], kVec);
    }
  }
}
/// Normalises the tile's rows in shared memory, in the layout that the copy engine writes.
template <typename Tile>
__device__ __forceinline__ void norm_rows(const FewRowsArgs& a, unsigned char* rows) {
  constexpr int kWarps = kGroup / kWarp, kRows = Tile::kRows;
  const int num_rows = min(kRows, a.M - static_cast<int>(blockIdx.y) * kRows);
  num_rows <= kWarps ? norm_rows_of_warps<kRows, 1, Tile::kBlocks>(a, rows, num_rows)
                     : norm_rows_of_warps<kRows, kRows / kWarps, Tile::kBlocks>(a, rows, num_rows);
  async_fence();
  named_sync<kGroup>(1);
}

#endif  // PRL_HOPPER

/// Of experts, known to all threads. Their tiles are there before the kernel in front of this one has ended: no block of that begins, or
/// lets blocks of this begin, before the kernel that makes them has. So weights begin to come while rows are still written.
template <bool kOfExperts>
__device__ __forceinline__ RowsOfBlock<kOfExperts> rows_of_block(const FewRowsArgs& a) {
  if constexpr (kOfExperts) {
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(a.row_tiles) + blockIdx.y);
    return {tile.y, tile.y + tile.z, tile.x * a.rows_apart};
  } else {
    return {};
  }
}

/// Warps that copy weights and rows, then those of A and B of an adapter, or those that widen codes.
constexpr int copying_threads(bool has_adapter, Operands operands) {
  return 2 * kWarp + (has_adapter ? 2 * kWarp : operands == Operands::kWidened ? kWideners * kWidening : 0);
}

template <int kRows, typename T, bool kNorm, bool kSwiglu, AdapterPlace kAdapter, bool kOfExperts = false,
          Operands kOperands = Operands::kBf16>
__global__ void __launch_bounds__(computing_threads(kRows) + copying_threads(kAdapter != AdapterPlace::kNone, kOperands),
                                  kOperands == Operands::kWidened && !kNorm ? 2 : 1)
    few_rows_kernel(const __grid_constant__ FewRowsArgs a) {
#if PRL_HOPPER
  using Tile = cuda::Tile<kRows, kOperands>;
  constexpr bool kEight = kOperands == Operands::kWidened, kIsOfCodes = kOperands == Operands::kCodes;
  static_assert(!kNorm || !Tile::kHasRowsLeft);
  constexpr int kComputing = computing_threads(kRows);
  constexpr bool kHasAdapter = kAdapter != AdapterPlace::kNone, kIsApart = kAdapter == AdapterPlace::kApart;
  static_assert(kOperands == Operands::kBf16 || (!kHasAdapter && (kIsOfCodes || !kOfExperts)));
  static_assert(!kIsOfCodes || !kNorm);
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* full = reinterpret_cast<std::uint64_t*>(shared + a.barriers_at);
  std::uint64_t* empty = full + a.slots;
  std::uint64_t* const of_codes = empty + a.slots;
  if (threadIdx.x == kComputing) {
    if (shared_address(shared) % 1024 != 0) __trap();
    prefetch_map(&a.weights);
    if constexpr (!kNorm) prefetch_map(&a.rows);
    if constexpr (kHasAdapter) prefetch_map(&a.adapter->a_map);
    for (int i = 0; i < a.slots; ++i) {
      barrier_init(full + i, kEight ? kWidening / kWarp + (kNorm ? 0 : 1) : kHasAdapter ? 2 : 1);
      barrier_init(empty + i, kComputing / kWarp);
    }
    if constexpr (kEight) init_code_barriers(a, of_codes);
    barrier_init_fence();
  }
  __syncthreads();
  let_next_begin();
  const RowsOfBlock<kOfExperts> rows = rows_of_block<kOfExperts>(a);
  if constexpr (kOfExperts)
    if (rows.first == rows.end) return;
  if (threadIdx.x >= kComputing) {
    if constexpr (kEight) {
      if (threadIdx.x == kComputing) copy_codes<Tile, kNorm, kSwiglu>(a, shared + a.codes_at, of_codes);
      if (threadIdx.x >= kComputing + 2 * kWarp)
        widen_steps<Tile, kSwiglu>(a, static_cast<int>(threadIdx.x) - kComputing - 2 * kWarp, shared, full, empty, of_codes);
    } else if (threadIdx.x < kComputing + weight_copies<Tile, kAdapter>()) {
      copy_steps<Tile, kNorm, kSwiglu, false, kAdapter>(a, rows, shared, full, empty);
    }
    if (!kNorm && threadIdx.x == kComputing + kWarp) copy_steps<Tile, kNorm, kSwiglu, true, kAdapter>(a, rows, shared, full, empty);
    if constexpr (kHasAdapter) {
      if (threadIdx.x / kWarp == kComputing / kWarp + 2) copy_adapter_steps<kRows, kSwiglu, kIsApart>(a, shared, full, empty);
      if (threadIdx.x >= kComputing + 3 * kWarp)
        read_adapter<kRows, kSwiglu>(a, *reinterpret_cast<AdapterOfBlock<kRows>*>(shared + a.adapter_at));
    }
    return;
  }
  using Adapter = AdapterOfThread<Tile, kSwiglu, kIsApart>;
  struct None {
    __device__ None(const FewRowsArgs&, unsigned char*) {}
    __device__ None(const FewRowsArgs&, const RowsOfBlock<kOfExperts>&) {}
  };
  std::conditional_t<kHasAdapter, Adapter, None> adapter(a, shared + a.adapter_at);
  std::conditional_t<(Tile::kRows >= 32 && !std::is_same_v<T, float>), StagedStore<Tile, kSwiglu, kOfExperts>,
                     DirectStore<Tile, T, kSwiglu, kOfExperts>>
      store(a, rows);
  if constexpr (kNorm) norm_rows<Tile>(a, shared + a.rows_at);
  std::conditional_t<kIsOfCodes, ScalesOfThread<Tile, kSwiglu, kOfExperts>, None> scales(a, rows);
  if (a.residual != nullptr) {
    wait_for_previous();
    store.load_residual(a);
  }
  constexpr int kApart = kIsApart ? Adapter::kApart : 1;
  float d[Tile::kResults], apart[kApart];
#pragma unroll
  for (float& v : d) v = 0.0f;
#pragma unroll
  for (float& v : apart) v = 0.0f;
  pin(d);
  if constexpr (kApart > 1) pin(apart);
  if constexpr (kIsOfCodes) {
    sum_codes<Tile>(a, shared, full, empty, d);
    scales.apply(d);
  } else {
    compute_tile<Tile, kNorm, kAdapter == AdapterPlace::kBehind>(a, shared, full, empty, d, apart);
  }
  if constexpr (kHasAdapter) {
    if constexpr (kIsApart)
      adapter.store_ranks(apart);
    else
      adapter.store_ranks(d);
    adapter.add(d);
  }
  store.run(a, shared + a.rows_at, d);
#endif
}

/// Queues `kernel`, which is few_rows_kernel<kRows, ...>.
template <int kRows, Operands kOperands, typename Kernel>
void launch_kernel(const OpContext& ctx, const Product& p, const FewRowsArgs& a, std::int64_t row_tiles, Kernel kernel) {
  const int bytes = a.adapter != nullptr ? a.adapter_at + adapter_bytes(kRows) : a.barriers_at + 2 * (a.slots + a.code_slots) * 8;
  if (bytes > kMaxSharedBytes) fail(ErrorCode::kShape, "[ops] a tile of {} bytes is more than shared memory has", bytes);
  // The limit is the whole process's, and another thread may launch this kernel for another tile: the most of all, not this one.
  PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes));
  launch_chained(stream_of(ctx), kernel, dim3(static_cast<unsigned>(ceil_div(p.N, a.columns)), static_cast<unsigned>(row_tiles)),
                 dim3(static_cast<unsigned>(computing_threads(kRows) + copying_threads(a.adapter != nullptr, kOperands))),
                 static_cast<std::size_t>(bytes), a);
}

}  // namespace prl::ops::cuda::few_rows
