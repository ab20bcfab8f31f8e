#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/log_softmax.cuh"

// What the way back of the head wants of a row's logits: the weight e^(x - m) of each, as half where weights are bf16, and the maximum m of
// each piece. Of that the gradient is formed whether it was kept or is formed again. A half of a weight is off by 2^-12 of itself down to
// weights of e^-9.7, by at most 2^-25 below; a gradient in bf16 by up to 2^-9 of itself.

namespace prl::ops::cuda {

template <typename T>
using KeptWeight = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __half, float>;

/// x as it would come back from memory.
template <typename W>
__device__ __forceinline__ float kept_value(float x) {
  if constexpr (std::is_same_v<W, __half>)
    return __half2float(__float2half_rn(x));
  else
    return x;
}

/// Of the first `rows` rows that count: weights [rows][width], width the vocabulary in whole chunks, and maxima [rows][width / kPiece]. Of
/// a piece, value i of lane q lies at i / 8 * 32 + q * 8 + i % 8: what a lane has is stored at once, and four lanes store a line together.
template <typename W>
struct KeptSoftmax {
  W* weights = nullptr;
  float* tops = nullptr;
  std::int64_t width = 0, rows = 0;

  __device__ __forceinline__ W* piece(std::int64_t row, std::int64_t first_column) const { return weights + row * width + first_column; }
  __device__ __forceinline__ float* top(std::int64_t row, std::int64_t first_column) const {
    return tops + (row * width + first_column) / kPiece;
  }
};

/// A lane's weights of the piece at `to`.
__device__ __forceinline__ void keep_piece(__half* to, const float (&e)[kPieceValues]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint4 words;
    auto* pairs = reinterpret_cast<__half2*>(&words);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(e[8 * j + 2 * i], e[8 * j + 2 * i + 1]);
    __stcs(reinterpret_cast<uint4*>(to + 32 * j) + threadIdx.x % kPieceLanes, words);
  }
}
__device__ __forceinline__ void keep_piece(float* to, const float (&e)[kPieceValues]) {
#pragma unroll
  for (int i = 0; i < kPieceValues; i += 4)
    __stcs(reinterpret_cast<float4*>(to + i / 8 * 32 + i % 8) + threadIdx.x % kPieceLanes * 2,
           make_float4(e[i], e[i + 1], e[i + 2], e[i + 3]));
}

/// 8 values of a piece as they lie in memory.
template <typename W>
struct KeptWords {
  static constexpr int kWords = static_cast<int>(sizeof(W)) * kVec / 4, kPairWords = kWords / 4;
  alignas(16) std::uint32_t words[kWords] = {};

  __device__ __forceinline__ void read(const W* from) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) reinterpret_cast<uint4*>(words)[i / 4] = __ldcs(reinterpret_cast<const uint4*>(from) + i / 4);
  }
  /// Lane q of four has values i of the columns i / 2 * 8 + 2 q + i % 2; then those of the columns 8 q + i. By all lanes of a warp.
  __device__ __forceinline__ void put_side_by_side() {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      const bool is_high = (threadIdx.x & step) != 0;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if ((i / kPairWords & step) != 0) continue;
        std::uint32_t &low = words[i], &high = words[i + step * kPairWords];
        const std::uint32_t other = __shfl_xor_sync(kFullWarp, is_high ? low : high, step);
        low = is_high ? other : low;
        high = is_high ? high : other;
      }
    }
  }
  __device__ __forceinline__ void unpack(float (&e)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) e[i] = static_cast<float>(reinterpret_cast<const W*>(words)[i]);
  }
};

}  // namespace prl::ops::cuda
