#pragma once

#include <cmath>

#include "ops/cuda/device.cuh"
#include "ops/lm_head.hpp"

// The one rule by which training and sampling form log-probabilities on the GPU: a warp takes the statistics of a chunk of
// kVocabChunk logits, and one thread merges the chunks of a row in order.

namespace prl::ops::cuda {

/// Maximum m, sum of e^(x - m) and sum of (x - m) e^(x - m) of a chunk of scaled logits.
struct ChunkStats {
  float max, sum, weighted;
};

constexpr int kChunkVectors = kVocabChunk / (kWarp * kVec);
static_assert(kChunkVectors * kWarp * kVec == kVocabChunk);

/// Index within the chunk of element i of vector j of this lane.
__device__ __forceinline__ int chunk_index(int j, int i) { return (j * kWarp + static_cast<int>(threadIdx.x) % kWarp) * kVec + i; }

__device__ __forceinline__ float scaled(float logit, float temperature) { return temperature != 1.0f ? logit / temperature : logit; }

/// The chunk's logits scaled, -inf beyond `count`.
__device__ __forceinline__ void load_chunk(float (&x)[kChunkVectors][kVec], const float* p, int count, float temperature) {
  const bool wide = reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
  if (wide && count == kVocabChunk) {
#pragma unroll
    for (int j = 0; j < kChunkVectors; ++j) load<true>(x[j], p + chunk_index(j, 0), kVec);
    if (temperature == 1.0f) return;
#pragma unroll
    for (int j = 0; j < kChunkVectors; ++j)
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[j][i] = x[j][i] / temperature;
    return;
  }
#pragma unroll
  for (int j = 0; j < kChunkVectors; ++j) {
    const int first = chunk_index(j, 0);
    if (wide && first + kVec <= count)
      load<true>(x[j], p + first, kVec);
    else
      load<false>(x[j], p + first, count - first);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[j][i] = first + i < count ? scaled(x[j][i], temperature) : -INFINITY;
  }
}

__device__ __forceinline__ ChunkStats chunk_stats(const float (&x)[kChunkVectors][kVec]) {
  float top = -INFINITY;
#pragma unroll
  for (int j = 0; j < kChunkVectors; ++j)
#pragma unroll
    for (int i = 0; i < kVec; ++i) top = fmaxf(top, x[j][i]);
  top = warp_max(top);
  if (top == -INFINITY) {
    // NaN, which the maximum passes over, must not pass for a banned token.
    bool has_nan = false;
#pragma unroll
    for (int j = 0; j < kChunkVectors; ++j)
#pragma unroll
      for (int i = 0; i < kVec; ++i) has_nan = has_nan || isnan(x[j][i]);
    return __any_sync(kFullWarp, has_nan) ? ChunkStats{NAN, NAN, NAN} : ChunkStats{top, 0.0f, 0.0f};
  }
  float sum = 0.0f, weighted = 0.0f;
#pragma unroll
  for (int j = 0; j < kChunkVectors; ++j)
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float d = x[j][i] - top, e = expf(d);
      sum += e;
      weighted = fmaf(e, fmaxf(-1e30f, d), weighted);  // 0 * -inf would be NaN
    }
  sum = warp_sum(sum);
  if (isnan(sum)) return {NAN, NAN, NAN};  // a logit was NaN or +inf
  return {top, sum, warp_sum(weighted)};
}

/// Log-sum-exp of a row, fed with its chunks in order.
class LogSumExp {
 public:
  __device__ void merge(const ChunkStats& c) {
    if (c.max == -INFINITY) return;  // a chunk in which every token is banned
    if (empty_) {
      total_ = c;
      empty_ = false;
      return;
    }
    const float m = c.max > total_.max ? c.max : total_.max;
    const float a = expf(total_.max - m), b = expf(c.max - m);
    total_.weighted = a * (total_.weighted + (total_.max - m) * total_.sum) + b * (c.weighted + (c.max - m) * c.sum);
    total_.sum = a * total_.sum + b * c.sum;
    total_.max = m;
  }
  /// Not finite if every token was banned or a logit was NaN or +inf.
  __device__ float value() const { return empty_ ? -INFINITY : total_.max + logf(total_.sum); }
  __device__ float entropy() const { return logf(total_.sum) - total_.weighted / total_.sum; }
  __device__ float max() const { return total_.max; }

 private:
  ChunkStats total_{-INFINITY, 0.0f, 0.0f};
  bool empty_ = true;
};

}  // namespace prl::ops::cuda
