#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "ops/cuda/device.cuh"

// The arithmetic of one row of attention, shared by every kernel that computes it, so that all give the same bits.
//
// A row walks the keys of its sequence in tiles at fixed positions. Its state within a chunk is (top, sum, out): `top` a reference
// for the scaled scores in powers of two, sum and out the sums of 2^(score - top) and of that times v. `top` moves only when a tile
// exceeds it by more than kSlack: weights then stay below 2^kSlack, which costs fp32 nothing, and out is seldom rescaled. A tile that
// is banned altogether leaves the state as it is, to the bit, so a row does not notice what tiles its neighbours needed.

namespace prl::ops::cuda {

constexpr float kSlack = 8.0f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kMinusInfinity = -__builtin_inff();

/// For rows whose inputs are of type T: fp32 gets the last bits too.
template <typename T>
__device__ __forceinline__ float power_of_two_for(float x) {
  if constexpr (std::is_same_v<T, float>)
    return exp2f(x);
  else
    return power_of_two(x);
}
/// Over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// `top` and this lane's part of `sum` of the two rows (lane / 4 and lane / 4 + 8) a lane takes part in.
struct RowPair {
  float top[2], sum[2];
  __device__ __forceinline__ void clear() {
    top[0] = top[1] = kMinusInfinity;
    sum[0] = sum[1] = 0.0f;
  }
};

/// Bans the keys after each row's limit: columns as in mma accumulators, 8 j + 2 (lane % 4) + e.
template <int kScores>
__device__ __forceinline__ void ban_after(float (&s)[kScores], int limit0, int limit1) {
  const int first = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    if (8 * (i / 4) + i % 2 + first > ((i & 2) != 0 ? limit1 : limit0)) s[i] = kMinusInfinity;
}

/// Bans the keys before each row's first.
template <int kScores>
__device__ __forceinline__ void ban_before(float (&s)[kScores], int first0, int first1) {
  const int first = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    if (8 * (i / 4) + i % 2 + first < ((i & 2) != 0 ? first1 : first0)) s[i] = kMinusInfinity;
}

/// Scores of a tile become weights; `rescale` is what `out` has to be multiplied by. True if that is 1 for this warp's rows. Of the
/// two rows of a lane the first `num_rows` are wanted; whatever comes out for the others, it reaches no other row.
template <int kScores>
__device__ __forceinline__ bool weigh_tile(float (&s)[kScores], RowPair& rows, float (&rescale)[2], float scale_log2, int num_rows = 2) {
  bool same = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rescale[r] = 1.0f;
    if (r >= num_rows) break;
    float a = kMinusInfinity, b = kMinusInfinity;
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
      a = fmaxf(a, s[i]);
      b = fmaxf(b, s[i + 1]);
    }
    const float tile_top = quad_max(fmaxf(a, b)) * scale_log2;
    const float before = rows.top[r];
    const float top = tile_top - before > kSlack ? tile_top : before;  // false for NaN: nothing seen so far, nothing here
    rescale[r] = top == before ? 1.0f : power_of_two(before - top);
    rows.top[r] = top;
    same = same && top == before;
    const float minus_top = top == kMinusInfinity ? 0.0f : -top;
    a = b = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
      s[i] = power_of_two(fmaf(s[i], scale_log2, minus_top));
      s[i + 1] = power_of_two(fmaf(s[i + 1], scale_log2, minus_top));
      a += s[i];
      b += s[i + 1];
    }
    rows.sum[r] = fmaf(rows.sum[r], rescale[r], a + b);
  }
  return __all_sync(0xffffffffu, same);
}

/// Merges the next chunk's (top, sum) into the total's; the outs add as fmaf(out_next, next, out_total * total).
struct ChunkWeights {
  float total, next;
};
template <typename T>
__device__ __forceinline__ ChunkWeights merge_rows(float& total_top, float& total_sum, float top, float sum) {
  const float m = fmaxf(total_top, top), reference = m == kMinusInfinity ? 0.0f : m;  // a window may begin after both
  const ChunkWeights w{power_of_two_for<T>(total_top - reference), power_of_two_for<T>(top - reference)};
  total_top = m;
  total_sum = fmaf(sum, w.next, total_sum * w.total);
  return w;
}
__device__ __forceinline__ float merge_out(float total, float next, const ChunkWeights& w) { return fmaf(next, w.next, total * w.total); }
/// Adding zero turns -0 into +0, the one trace a banned key could leave.
__device__ __forceinline__ float finish_out(float out, float inverse_sum) { return fmaf(out, inverse_sum, 0.0f); }
/// How a row ends: what its out is multiplied with, and (top, sum) for log_sum.
struct RowEnd {
  float scale, top, sum;
};
/// `sinks` of all heads, or nullptr: one more key for each, of which there is no value.
template <typename T>
__device__ __forceinline__ RowEnd end_row(float top, float sum, const float* sinks, int head) {
  if (sinks == nullptr) return {inverse(sum), top, sum};
  const float sink = sinks[head] * kLog2e, most = fmaxf(top, sink);
  const float weight = power_of_two_for<T>(top - most);
  const float all = fmaf(sum, weight, power_of_two_for<T>(sink - most));
  return {weight * inverse(all), most, all};
}
__device__ __forceinline__ float log_sum(float top, float sum) { return (top + log2f(sum)) * kLn2; }

}  // namespace prl::ops::cuda
