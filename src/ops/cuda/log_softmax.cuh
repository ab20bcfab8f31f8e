#pragma once

#include <cmath>
#include <type_traits>

#include "ops/cuda/device.cuh"
#include "ops/lm_head.hpp"

// The one rule by which training and sampling form log-probabilities on the GPU. A row of logits is cut into pieces of 64 columns and
// chunks of kVocabChunk. Four lanes take the statistics of a piece: lane q has its columns 8 t + 2 q and 8 t + 2 q + 1, which is what a
// lane has of a warpgroup product's result, and adds them in that order; then the four are added as a tree. The 16 pieces of a chunk are a
// tree too: piece g with g + 8, then neighbours. A row's chunks are dealt to 32 sums, which end in a tree.

namespace prl::ops::cuda {

constexpr int kPiece = kVocabPiece;
constexpr int kPieces = kVocabChunk / kPiece;  ///< of a chunk
constexpr int kPieceLanes = 4, kPieceValues = kPiece / kPieceLanes;
static_assert(kPieces == 2 * kWarp / kPieceLanes);

/// Maximum m and sum of e^(x - m) of scaled logits.
struct SoftmaxStats {
  float max, sum;
};
/// Besides, the sum of (x - m) e^(x - m).
struct ChunkStats : SoftmaxStats {
  float weighted;
};

__device__ __forceinline__ float scaled(float logit, float temperature) { return temperature != 1.0f ? logit / temperature : logit; }

/// Column within its piece of value i of this lane.
__device__ __forceinline__ int piece_column(int i) { return i / 2 * 8 + static_cast<int>(threadIdx.x) % kPieceLanes * 2 + i % 2; }

/// Logits of a piece become scaled ones.
__device__ __forceinline__ void scale_piece(float (&x)[kPieceValues], float temperature) {
  if (temperature != 1.0f)
#pragma unroll
    for (float& v : x) v = v / temperature;
}
/// Of a piece that begins at column `first`: columns from `end` on are none.
__device__ __forceinline__ void cut_piece(float (&x)[kPieceValues], int first, int end, float none = -INFINITY) {
#pragma unroll
  for (int i = 0; i < kPieceValues; ++i)
    if (first + piece_column(i) >= end) x[i] = none;
}

/// e^d of a logit d below the maximum, by two instructions: off by a few 2^-24 of itself, and by as much again for each unit of d.
__device__ __forceinline__ float weight_of(float d) { return power_of_two(d * kLog2e); }

/// What a piece's weights are relative to: its maximum, or 0 where no number came, so that NaN, which the maximum passes over, does not
/// pass for a banned token.
__device__ __forceinline__ float piece_base(float top) { return top == -INFINITY ? 0.0f : top; }

/// Of a piece whose lanes hold x, in each of them. x becomes e^(x - m). `kWeighted`: else that sum is 0. `kHasNone`: -inf may stand for
/// columns that are none.
template <bool kWeighted, bool kHasNone = true>
__device__ __forceinline__ ChunkStats piece_weights(float (&x)[kPieceValues]) {
  float tops[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};  // side by side: each waits for the one before
#pragma unroll
  for (int i = 0; i < kPieceValues; ++i) tops[i % 4] = fmaxf(tops[i % 4], x[i]);
  const float top = warp_max<kPieceLanes>(fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])));
  float sum = 0.0f, weighted = 0.0f;
  const float from = piece_base(top);
#pragma unroll
  for (int i = 0; i < kPieceValues; ++i) {
    const float d = x[i] - from, e = weight_of(d);
    sum += e;
    if constexpr (kWeighted) weighted = fmaf(e, kHasNone ? fmaxf(-1e30f, d) : d, weighted);  // 0 * -inf would be NaN
    x[i] = e;
  }
  sum = warp_sum<kPieceLanes>(sum);
  ChunkStats s{{top, sum}, 0.0f};
  if constexpr (kWeighted) s.weighted = warp_sum<kPieceLanes>(weighted);
  if (isnan(sum)) s = {{NAN, NAN}, NAN};  // a logit was NaN or +inf
  return s;
}
template <bool kWeighted>
__device__ __forceinline__ ChunkStats piece_stats(const float (&x)[kPieceValues]) {
  float e[kPieceValues];
#pragma unroll
  for (int i = 0; i < kPieceValues; ++i) e[i] = x[i];
  return piece_weights<kWeighted>(e);
}

/// What a piece adds to its chunk, or a chunk to its row, of which `max` is the maximum.
__device__ __forceinline__ ChunkStats part_of(const ChunkStats& p, float max) {
  if (p.max == -INFINITY) return {{max, 0.0f}, 0.0f};
  const float e = expf(p.max - max);
  return {{max, e * p.sum}, e * (p.weighted + (p.max - max) * p.sum)};
}
/// A chunk of which no number came is none.
__device__ __forceinline__ ChunkStats chunk_of(float max, float sum, float weighted) {
  if (isnan(sum)) return {{NAN, NAN}, NAN};
  return {{max, sum}, weighted};
}

/// A chunk's logits as the lanes of a warp hold them: pieces lane / 4 and lane / 4 + 8.
struct WarpChunk {
  float x[2][kPieceValues];

  static __device__ __forceinline__ int piece(int half) {
    return static_cast<int>(threadIdx.x) % kWarp / kPieceLanes + half * (kPieces / 2);
  }
  /// Scaled, -inf beyond `count`.
  __device__ __forceinline__ void load(const float* p, int count, float temperature) {
    const bool is_wide = reinterpret_cast<std::uintptr_t>(p) % 8 == 0 && count == kVocabChunk;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kPieceValues; i += 2) {
        const int at = piece(half) * kPiece + piece_column(i);
        float2 v;
        if (is_wide) {
          v = *reinterpret_cast<const float2*>(p + at);
        } else {
          v.x = at < count ? p[at] : -INFINITY;
          v.y = at + 1 < count ? p[at + 1] : -INFINITY;
        }
        x[half][i] = v.x;
        x[half][i + 1] = v.y;
      }
#pragma unroll
    for (auto& piece : x) scale_piece(piece, temperature);
  }
  /// In every lane.
  __device__ __forceinline__ ChunkStats stats() const {
    const ChunkStats low = piece_stats<true>(x[0]), high = piece_stats<true>(x[1]);
    const float max = warp_max(fmaxf(low.max, high.max));
    const ChunkStats a = part_of(low, max), b = part_of(high, max);
    float sum = a.sum + b.sum, weighted = a.weighted + b.weighted;
#pragma unroll
    for (int step = kPieceLanes; step < kWarp; step *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, step);
      weighted += __shfl_xor_sync(kFullWarp, weighted, step);
    }
    return chunk_of(max, sum, weighted);
  }
};

/// The same from the statistics of its pieces, four in each of four lanes, in all of these. `kWeighted`: as in piece_stats.
template <bool kWeighted>
struct QuadChunk {
  static constexpr int kLanes = 4;
  using Stats = std::conditional_t<kWeighted, ChunkStats, SoftmaxStats>;
  Stats pieces[4];
  /// Of pieces[i].
  static __device__ __forceinline__ int piece(int i) { return static_cast<int>(threadIdx.x) % kLanes * 2 + i % 2 + i / 2 * (kPieces / 2); }
  __device__ __forceinline__ Stats stats() const {
    const float max = warp_max<kLanes>(fmaxf(fmaxf(pieces[0].max, pieces[1].max), fmaxf(pieces[2].max, pieces[3].max)));
    float sums[4], weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ChunkStats piece{{pieces[i].max, pieces[i].sum}, 0.0f};
      if constexpr (kWeighted) piece.weighted = pieces[i].weighted;
      const ChunkStats part = part_of(piece, max);
      sums[i] = part.sum;
      weights[i] = part.weighted;
    }
    const auto total = [](const float(&x)[4]) {
      float t = (x[0] + x[2]) + (x[1] + x[3]);
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) t += __shfl_xor_sync(kFullWarp, t, step);
      return t;
    };
    if constexpr (kWeighted)
      return chunk_of(max, total(sums), total(weights));
    else
      return chunk_of(max, total(sums), 0.0f);
  }
};

/// Sums that a row's chunks are added to, each every kRowSums'th of them in order; then they are added as warp_sum adds its lanes.
constexpr int kRowSums = kWarp;

/// Of the whole row. Not finite if every token was banned or a logit was NaN or +inf.
__device__ __forceinline__ float log_sum_exp(float max, float sum) { return max + logf(sum); }

}  // namespace prl::ops::cuda
