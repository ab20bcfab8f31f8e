#pragma once

#include "ops/cuda/log_softmax.cuh"

// What the backward pass of the LM head needs of a row's logits x: the weights e^(x - r), r the row's reference, as rows of a matrix that
// is an operand of matrix products; the target's weight is zero. With p = e^(x - lse) and c the upstream gradient of the row's
// log-probability, divided by its temperature, the gradient of a logit is c (1 - p) for the target and -c p elsewhere. So
//   dh = -c e^(r - lse) (weights W) + c (1 - p_target) W[target]
//   dW = weights^T (-c e^(r - lse) h) and, for each row, c (1 - p_target) h onto its target's
// and no gradient of logits is ever formed. In bf16 a weight is off by up to 2^-9 of itself, as a gradient of a logit would be, and a
// scaled row of h once more by as much; the target's part, which nearly cancels in rows that are sure of it, is not rounded.
//
// r has to be known before the row's logits are: it is the target's, as a plain sum. A row whose target has less than e^-kReach gets
// weights relative to its lse afterwards, from plain sums (far_rows_kernel), whether its weights were kept or are formed again; for each
// such row the head is read once more.

namespace prl::ops::cuda {

/// Weights of rows that count, from the first of them and the first column of the vocabulary on, or of a part of them.
template <typename W>
struct SoftmaxRows {
  W* weights = nullptr;
  std::int64_t stride = 0, rows = 0;  ///< stride: whole chunks
  const float* references = nullptr;  ///< [rows]

  __device__ __forceinline__ W* at(std::int64_t row, std::int64_t column) const { return weights + row * stride + column; }
};

/// Of a row's weights within a piece, e^(x - top) in registers, that of its target. `target`: from the piece's first column on.
__device__ __forceinline__ void clear_target(float (&e)[kPieceValues], int target) {
  if (target < 0 || target >= kPiece) return;
#pragma unroll
  for (int i = 0; i < kPieceValues; ++i)
    if (piece_column(i) == target) e[i] = 0.0f;
}
/// What makes them relative to the reference.
__device__ __forceinline__ float weight_factor(float top, float reference) { return expf(top - reference); }
/// In bf16: words[i] are the columns 8 i + 2 q and the next of lane q.
template <int kCount>
__device__ __forceinline__ void pack_weights(std::uint32_t (&words)[kCount], const float (&e)[2 * kCount], float factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = pack_bf16(e[2 * i] * factor, e[2 * i + 1] * factor);
}

/// A piece's weights, of which the lanes hold e^(x - top), go to `to`: what has no faster way.
template <typename W>
__device__ __forceinline__ void write_weights(W* to, float (&e)[kPieceValues], float top, float reference, int target) {
  clear_target(e, target);
  const float factor = weight_factor(top, reference);
#pragma unroll
  for (int i = 0; i < kPieceValues; i += 2) {
    const int column = piece_column(i);
    if constexpr (sizeof(W) == 2)
      *reinterpret_cast<std::uint32_t*>(to + column) = pack_bf16(e[i] * factor, e[i + 1] * factor);
    else
      *reinterpret_cast<float2*>(to + column) = make_float2(e[i] * factor, e[i + 1] * factor);
  }
}

}  // namespace prl::ops::cuda
