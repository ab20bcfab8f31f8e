#include "ops/cuda/few_rows.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/few_rows_adapter.cuh"
#include "ops/cuda/few_rows_args.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

/// Of a multiprocessor. Blocks of which each has one to itself take all; else two share it, and one computes while the other copies.
constexpr int kSharedBytes = 224 * 1024;
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
  return kAdapter == AdapterPlace::kBehind ? blocks_per_slot(Tile::kRows) : 1;
}
template <typename Tile, bool kNorm, bool kSwiglu, bool kIsRows, AdapterPlace kAdapter, bool kOfExperts>
__device__ __forceinline__ void copy_steps(const FewRowsArgs& a, const RowsOfBlock<kOfExperts>& of_block, unsigned char* shared,
                                           std::uint64_t* full, std::uint64_t* empty) {
  constexpr int kBlocks = blocks_per_slot(Tile::kRows), kRowsBytes = kNorm ? 0 : kBlocks * Tile::kRows * kRowBytes;
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
  constexpr int kBlocks = blocks_per_slot(Tile::kRows);
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
template <int kRows, int kEach>
__device__ __forceinline__ void norm_rows_of_warps(const FewRowsArgs& a, unsigned char* rows, int num_rows) {
  constexpr int kWarps = kGroup / kWarp, kVectors = static_cast<int>(kMaxNormColumns) / (kWarp * kVec);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int end = a.num_steps * blocks_per_slot(kRows) * kBlock;  // columns beyond K are zero
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
template <int kRows>
__device__ __forceinline__ void norm_rows(const FewRowsArgs& a, unsigned char* rows) {
  constexpr int kWarps = kGroup / kWarp;
  const int num_rows = min(kRows, a.M - static_cast<int>(blockIdx.y) * kRows);
  num_rows <= kWarps ? norm_rows_of_warps<kRows, 1>(a, rows, num_rows) : norm_rows_of_warps<kRows, kRows / kWarps>(a, rows, num_rows);
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

/// Warps that copy weights and rows, and A and B of an adapter.
constexpr int copying_threads(bool has_adapter) { return (has_adapter ? 4 : 2) * kWarp; }

template <int kRows, typename T, bool kNorm, bool kSwiglu, AdapterPlace kAdapter, bool kOfExperts = false>
__global__ void __launch_bounds__(computing_threads(kRows) + copying_threads(kAdapter != AdapterPlace::kNone))
    few_rows_kernel(const __grid_constant__ FewRowsArgs a) {
#if PRL_HOPPER
  using Tile = cuda::Tile<kRows>;
  static_assert(!kNorm || !Tile::kHasRowsLeft);
  constexpr int kComputing = computing_threads(kRows);
  constexpr bool kHasAdapter = kAdapter != AdapterPlace::kNone, kIsApart = kAdapter == AdapterPlace::kApart;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* full = reinterpret_cast<std::uint64_t*>(shared + a.barriers_at);
  std::uint64_t* empty = full + a.slots;
  if (threadIdx.x == kComputing) {
    if (shared_address(shared) % 1024 != 0) __trap();
    prefetch_map(&a.weights);
    if constexpr (!kNorm) prefetch_map(&a.rows);
    if constexpr (kHasAdapter) prefetch_map(&a.adapter->a_map);
    for (int i = 0; i < a.slots; ++i) {
      barrier_init(full + i, kHasAdapter ? 2 : 1);
      barrier_init(empty + i, kComputing / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();
  let_next_begin();
  const RowsOfBlock<kOfExperts> rows = rows_of_block<kOfExperts>(a);
  if constexpr (kOfExperts)
    if (rows.first == rows.end) return;
  if (threadIdx.x >= kComputing) {
    if (threadIdx.x < kComputing + weight_copies<Tile, kAdapter>())
      copy_steps<Tile, kNorm, kSwiglu, false, kAdapter>(a, rows, shared, full, empty);
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
  };
  std::conditional_t<kHasAdapter, Adapter, None> adapter(a, shared + a.adapter_at);
  std::conditional_t<(Tile::kRows >= 32 && !std::is_same_v<T, float>), StagedStore<Tile, kSwiglu, kOfExperts>,
                     DirectStore<Tile, T, kSwiglu, kOfExperts>>
      store(a, rows);
  if constexpr (kNorm) norm_rows<Tile::kRows>(a, shared + a.rows_at);
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
  compute_tile<Tile, kNorm, kAdapter == AdapterPlace::kBehind>(a, shared, full, empty, d, apart);
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

template <int kRows>
void launch(const OpContext& ctx, const Product& p, const FewRowsArgs& a, const FewRowsFusion& fusion, bool is_apart) {
  const bool swiglu = fusion.swiglu;
  using Bf16 = __nv_bfloat16;
  const std::int64_t row_tiles = fusion.experts != nullptr ? fusion.experts->num_tiles : ceil_div(p.M, kRows);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.N, a.columns)), static_cast<unsigned>(row_tiles));
  const auto run = [&](auto kernel) {
    const int bytes = a.adapter != nullptr ? a.adapter_at + adapter_bytes(kRows) : a.barriers_at + 2 * a.slots * 8;
    if (bytes > kMaxSharedBytes) fail(ErrorCode::kShape, "[ops] a tile of {} bytes is more than shared memory has", bytes);
    // The limit is the whole process's, and another thread may launch this kernel for another tile: the most of all, not this one.
    PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes));
    launch_chained(stream_of(ctx), kernel, grid,
                   dim3(static_cast<unsigned>(computing_threads(kRows) + copying_threads(a.adapter != nullptr))),
                   static_cast<std::size_t>(bytes), a);
  };
  if (fusion.experts != nullptr) {
    constexpr AdapterPlace kNone = AdapterPlace::kNone;
    return swiglu ? run(few_rows_kernel<kRows, Bf16, false, true, kNone, true>)
                  : run(few_rows_kernel<kRows, Bf16, false, false, kNone, true>);
  }
  if (p.out_dtype == DType::kF32) return run(few_rows_kernel<kRows, float, false, false, AdapterPlace::kNone>);
  const auto of = [&]<bool kNorm>() {
    using enum AdapterPlace;
    if (a.adapter == nullptr)
      return swiglu ? run(few_rows_kernel<kRows, Bf16, kNorm, true, kNone>) : run(few_rows_kernel<kRows, Bf16, kNorm, false, kNone>);
    if (swiglu) return run(few_rows_kernel<kRows, Bf16, kNorm, true, kApart>);
    is_apart ? run(few_rows_kernel<kRows, Bf16, kNorm, false, kApart>) : run(few_rows_kernel<kRows, Bf16, kNorm, false, kBehind>);
  };
  if constexpr (kRows <= kMaxNormRows)
    if (a.norm != nullptr) return of.template operator()<true>();
  of.template operator()<false>();
}

/// The weights of gate and up, 8 columns of each in turns, and `more_rows` behind them.
CUtensorMap gate_up_map(const Product& p, std::int64_t more_rows, int box_columns, int box_blocks) {
  const auto eights = static_cast<std::uint64_t>((p.N / 2 + more_rows) / 8);
  return tensor_map_5(p.b,
                      MapShapeOf<5>{{kBlock, 8, 2, eights, static_cast<std::uint64_t>(p.K / kBlock)},
                                    {p.b_stride, p.N / 2 * p.b_stride, 8 * p.b_stride, kBlock},
                                    {kBlock, 8, 2, static_cast<std::uint32_t>(box_columns / 16), static_cast<std::uint32_t>(box_blocks)}});
}

/// Steps along K that fit into a block's share of shared memory.
int slots_of(const FewRowsTile& t, std::int64_t K, int shared_bytes) {
  const int blocks = blocks_per_slot(t.rows), slot_bytes = blocks * (t.rows + t.columns + t.ranks) * kRowBytes + 16;
  const std::int64_t room = (shared_bytes - kSpan * kRowBytes - (t.ranks > 0 ? adapter_bytes(t.rows) + 16 : 0)) / slot_bytes;
  return static_cast<int>(std::clamp<std::int64_t>(room, 1, ceil_div(K, blocks * kBlock)));
}

/// Nanoseconds, by the bytes that the copies load: a from the second-level cache once the earlier kernels have ended; b about half before
/// that.
double copy_time(const Product& p, int rows, int columns, int ranks, int processors) {
  constexpr double kCacheBytes = 5500.0, kProcessorBytes = 112.0;  // per nanosecond, of the device and of one multiprocessor; measured
  const std::int64_t blocks = ceil_div(p.M, rows) * ceil_div(p.N, columns);
  const double block_bytes = static_cast<double>((2 * rows + columns + ranks) * p.K);
  return std::max(static_cast<double>(blocks) * block_bytes / kCacheBytes,
                  static_cast<double>(ceil_div(blocks, processors)) * block_bytes / kProcessorBytes);
}

LoraParts parts_of(const LoraWeight& w) {
  LoraParts out{};
  out.num_parts = static_cast<int>(w.parts.size());
  for (std::size_t i = 0; i < w.parts.size(); ++i) {
    out.first_output[i] = static_cast<int>(w.parts[i].first_output);
    out.num_outputs[i] = static_cast<int>(w.parts[i].num_outputs);
    out.first_rank[i] = static_cast<int>(w.parts[i].first_rank);
    out.rank[i] = static_cast<int>(w.parts[i].rank);
  }
  return out;
}
/// Rows of A that a block of such a tile needs at most; nothing if they find no room.
std::optional<int> ranks_of_tile(const Product& p, const FewRowsFusion& fusion, int rows, int columns) {
  if (fusion.lora == nullptr) return 0;
  const LoraParts parts = parts_of(*fusion.lora->single);
  const auto padded_ranks = [&](auto&& counts) {
    int sum = 0;
    for (int part = 0; part < parts.num_parts; ++part) sum += counts(part) ? padded_rank(parts.rank[part]) : 0;
    return sum;
  };
  // Parts do not overlap, so that no block needs more than one of those in which a part begins. Blocks of gate and up may lie in all.
  int ranks = fusion.swiglu ? padded_ranks([](int) { return true; }) : 0;
  for (int begins = 0; begins < parts.num_parts && !fusion.swiglu; ++begins) {
    const int block = parts.first_output[begins] / columns;
    ranks = std::max(ranks, padded_ranks([&](int part) { return is_in_part(parts, part, block, columns, static_cast<int>(p.N), false); }));
  }
  // A product of A alone costs as much as one of 64 columns. Measured, decoding of 32 sequences: `qkv` of 1,024 inputs in 64 columns with A
  // apart makes 1.20 of the cost without adapters for 1.26 in 32 with A behind them; of 2,560 inputs 1.24 for 1.22.
  constexpr std::int64_t kMaxApartInputs = 2048;
  const bool has_room = columns + ranks <= kSpan || fusion.swiglu || p.K <= kMaxApartInputs;
  if (ranks > (rows >= 64 ? 32 : kSpan) || !has_room) return std::nullopt;
  return ranks;
}
/// Whether the adapter's parts are such that columns of a lane, pairs of neighbours, lie in one.
bool has_even_parts(const LoraWeight& w) {
  return w.parts.size() <= kMaxLoraParts && std::ranges::all_of(w.parts, [](const LoraPart& part) {
           return part.first_output % 8 == 0 && part.num_outputs % 8 == 0 && part.rank <= kSpan;
         });
}

}  // namespace

std::optional<FewRowsTile> few_rows_tile(const Product& p, const cudaDeviceProp& device, const FewRowsFusion& fusion) {
  if (device.major != 9 || p.M > kMaxFewRows || p.M * p.N > max_few_rows_outputs(p.M, p.K) || p.K % kBlock != 0) return std::nullopt;
  if (p.in_dtype != DType::kBF16 || p.may_split || p.accumulate || p.transpose_a || !p.transpose_b) return std::nullopt;
  if (fusion.norm != nullptr && (p.M > kMaxNormRows || p.K > kMaxNormColumns || fusion.rows_are_there != nullptr)) return std::nullopt;
  if (fusion.is_any() && p.out_dtype != DType::kBF16) return std::nullopt;
  if (fusion.swiglu && (p.N % 16 != 0 || p.bias != nullptr || fusion.residual != nullptr)) return std::nullopt;
  if (fusion.lora != nullptr &&
      (p.out_dtype != DType::kBF16 || fusion.lora->tiles.shape.num_rows() == 0 || !has_even_parts(*fusion.lora->single)))
    return std::nullopt;
  const int unit = fusion.swiglu ? 16 : 8;
  const int processors = device.multiProcessorCount;
  FewRowsTile best;
  double best_time = 0;
  for (int rows = 8; rows <= 128 && (rows == 8 || rows < 2 * p.M); rows *= 2)
    for (int columns = unit; columns <= 64; columns += unit) {
      const std::optional<int> ranks = ranks_of_tile(p, fusion, rows, columns);
      if (!ranks) continue;
      const double time = copy_time(p, rows, columns, *ranks, processors);
      if (best_time > 0 && time >= best_time) continue;
      best_time = time;
      best = {rows, columns, 1};
    }
  if (best_time == 0) return std::nullopt;
  const auto blocks_with = [&](int columns) { return ceil_div(p.M, best.rows) * ceil_div(p.N, columns); };
  // Blocks of the next product that find no processor free begin when these end, and then wait for their weights. Measured for up to four
  // rows: `o` and `down` of one sequence in 32 columns for 24, 2,001 tok/s for 1,935.
  while (p.M <= 4 && best.columns + unit <= 64 && ranks_of_tile(p, fusion, best.rows, best.columns + unit) &&
         4 * blocks_with(best.columns) > processors)
    best.columns += unit;
  // Measured: 128 rows of gate and up are faster in 128 blocks of 48 columns than in 96 of 64. `qkv`, which attention begins beside, is
  // not.
  while (fusion.swiglu && best.rows == 128 && best.columns > unit && blocks_with(best.columns - unit) <= processors) best.columns -= unit;
  best.ranks = ranks_of_tile(p, fusion, best.rows, best.columns).value_or(0);
  const bool is_one_wave = blocks_with(best.columns) <= processors;
  const int shared_bytes = kSharedBytes - (fusion.rows_are_there != nullptr ? kBesideBytes : 0);
  best.slots = slots_of(best, p.K, is_one_wave ? shared_bytes : shared_bytes / 2);
  // Many ranks leave two blocks of a multiprocessor too little room: a slot is given back only after the products of the next have begun.
  if (best.slots < 2) best.slots = slots_of(best, p.K, shared_bytes);
  if (best.slots < 2 && p.K > blocks_per_slot(best.rows) * kBlock) return std::nullopt;
  return best;
}

std::optional<FewRowsTile> expert_rows_tile(const Product& p, const cudaDeviceProp& device, const RowsOfExperts& experts, int rows,
                                            bool swiglu) {
  const int unit = swiglu ? 16 : 8;
  if (device.major != 9 || p.K % kBlock != 0 || p.N % unit != 0 || experts.rows_apart % 8 != 0) return std::nullopt;
  if (p.in_dtype != DType::kBF16 || p.out_dtype != DType::kBF16 || p.bias != nullptr) return std::nullopt;
  const int processors = device.multiProcessorCount;
  FewRowsTile tile{.rows = rows, .columns = kSpan};
  while (tile.columns > unit && experts.num_tiles * ceil_div(p.N, tile.columns) < processors) tile.columns -= unit;
  tile.slots = slots_of(tile, p.K, kSharedBytes / 2);
  if (tile.slots < 2) tile.slots = slots_of(tile, p.K, kSharedBytes);
  return tile;
}

void few_rows_product(const OpContext& ctx, const Product& p, const FewRowsTile& t, const FewRowsFusion& fusion) {
  FewRowsArgs a{};
  const int blocks = blocks_per_slot(t.rows);
  const bool is_apart = t.ranks > 0 && (fusion.swiglu || t.columns + t.ranks > kSpan);
  const std::int64_t more_rows = fusion.experts != nullptr ? (fusion.experts->num_experts - 1) * fusion.experts->rows_apart : 0;
  a.weights = fusion.swiglu ? gate_up_map(p, more_rows, t.columns, blocks)
                            : rows_map(p.b, p.N + more_rows, p.K, p.b_stride, t.columns, t.ranks > 0 && !is_apart ? 1 : blocks);
  if (fusion.experts != nullptr) {
    a.row_tiles = fusion.experts->tiles;
    a.rows_apart = static_cast<int>(fusion.experts->rows_apart);
    a.row_factors = fusion.experts->factors;
  }
  a.out = p.out;
  if (fusion.lora != nullptr) {
    a.adapted_bias = p.bias;
    a.adapter = reinterpret_cast<const LoraEntryMemory*>(fusion.lora->single_entry.as<char>());
    a.parts = parts_of(*fusion.lora->single);
    a.tiles = fusion.lora->tiles.as<std::int32_t>();
    a.num_tiles = static_cast<int>(fusion.lora->tiles.shape.num_rows());
    a.ranks = t.ranks;
  } else {
    a.bias = p.bias;
  }
  a.out_stride = p.out_stride;
  a.M = static_cast<int>(p.M);
  a.N = static_cast<int>(fusion.swiglu ? p.N / 2 : p.N);
  a.K = static_cast<int>(p.K);
  a.num_steps = static_cast<int>(ceil_div(p.K, blocks * kBlock));
  a.columns = t.columns;
  a.slots = t.slots;
  // A slot is given back only after the products of the next one have begun.
  if (a.num_steps > 1 && a.slots < 2)
    fail(ErrorCode::kShape, "[ops] {} slots for {} steps of a product, at least 2 are wanted", a.slots, a.num_steps);
  a.residual = static_cast<const __nv_bfloat16*>(fusion.residual);
  a.residual_stride = fusion.residual_stride;
  a.is_wide = a.N % 8 == 0 && p.out_stride % 8 == 0 && is_aligned(p.out, 16);
  if (a.residual != nullptr) a.is_wide = a.is_wide && a.residual_stride % 8 == 0 && is_aligned(a.residual, 16);
  a.rows_are_there = fusion.rows_are_there;
  a.norm = fusion.norm;
  a.eps = fusion.eps;
  a.inverse_K = 1.0f / static_cast<float>(p.K);
  if (fusion.norm != nullptr) {
    a.x = static_cast<const __nv_bfloat16*>(p.a);
    a.x_stride = p.a_stride;
  } else {
    a.rows = rows_map(p.a, p.M, p.K, p.a_stride, t.rows, blocks);
  }
  const int behind = is_apart ? 0 : t.ranks, apart = is_apart ? t.ranks : 0;  // rows of A
  const int weight_slot = blocks * (t.columns + behind) * kRowBytes, row_slots = fusion.norm != nullptr ? a.num_steps : t.slots;
  a.ranks_at = t.slots * weight_slot;
  a.rows_at = a.ranks_at + t.slots * blocks * apart * kRowBytes;
  // Products read kSpan rows of weights and of A, whatever there is.
  const int overrun = (kSpan - (apart > 0 ? apart : t.columns + behind)) * kRowBytes;
  a.barriers_at = a.rows_at + std::max(row_slots * blocks * t.rows * kRowBytes, overrun);
  a.adapter_at = round_up(a.barriers_at + 2 * t.slots * 8, 16);
  switch (t.rows) {
    case 8: return launch<8>(ctx, p, a, fusion, is_apart);
    case 16: return launch<16>(ctx, p, a, fusion, is_apart);
    case 32: return launch<32>(ctx, p, a, fusion, is_apart);
    case 64: return launch<64>(ctx, p, a, fusion, is_apart);
    default: return launch<128>(ctx, p, a, fusion, is_apart);
  }
}

}  // namespace prl::ops::cuda
