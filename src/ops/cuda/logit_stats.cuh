#pragma once

#include "ops/cuda/blas.hpp"
#include "ops/cuda/kept_softmax.cuh"

// Logits of many rows and their softmax statistics in one kernel, for training and scoring. A separate kernel would read all logits
// back from memory. Compute capability 9.0.

namespace prl::ops::cuda {

/// The rows that count. `index` maps to the caller's rows; null when all of them count.
struct LiveRows {
  const std::int32_t* index = nullptr;
  std::int64_t count = 0;
  __device__ std::int64_t of(std::int64_t row) const { return index == nullptr ? row : index[row]; }
};

/// Whether logit_stats takes the product p of a head, [rows that count, V]: one with the bits of the library's kernels for many rows. It
/// still does if p.a is then a dense copy of some of its rows.
bool can_form_logit_stats(const OpContext& ctx, const Product& p);
/// stats[chunk * p.M + row] of the scaled logits p.a p.b^T and target_logits[row], bit for bit those of stored logits, and the weights of
/// the first kept.rows rows. targets and temperatures: of the caller's rows. p.out is not used.
void logit_stats(const OpContext& ctx, ChunkStats* stats, float* target_logits, const Product& p, const SoftmaxRows<__nv_bfloat16>& kept,
                 const LiveRows& live, const std::int32_t* targets, const float* temperatures);

}  // namespace prl::ops::cuda
