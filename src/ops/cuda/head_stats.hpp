#pragma once

#include <span>

#include "ops/cuda/blas.hpp"
#include "ops/linear.hpp"

// The head of a decoding step without logits in memory: what it costs is reading its weight, and logits would be as much again to write
// and to read. Compute capability 9.0.

namespace prl::ops::cuda {

struct SoftmaxStats;

/// Of fewer rows logits cost less than what it takes to form some of them again.
constexpr std::int64_t kMinHeadRows = 24, kMaxHeadRows = 128;

/// Whether these kernels form the product p of a head: one with the bits of the library's kernels for many rows.
bool can_form_head(const OpContext& ctx, const Product& p);
/// stats[m * stride + n / kPiece] of the pieces (log_softmax.cuh) of the logits p.a p.b^T / temperatures[m], bit for bit those of stored
/// logits. p.out is not used.
void head_stats(const OpContext& ctx, SoftmaxStats* stats, std::int64_t stride, const Product& p, std::span<const float> temperatures);

}  // namespace prl::ops::cuda
