#pragma once

#include "ops/context.hpp"

namespace prl::ops {

// Mixtures of experts: which experts take a token, and how rows travel to them and back. The experts' products are ops::linear, expert by
// expert, over rows that lie together. Legend: T tokens, E experts, K experts of a token, R rows, C columns. A row of a result depends on
// its own row and the weights, as everywhere.

/// The most experts that a router chooses from.
inline constexpr std::int64_t kMaxExperts = 1024;
/// The most experts of one token.
inline constexpr std::int64_t kMaxActiveExperts = 32;

/// The K experts of the greatest logits_TE (fp32), greatest first, the lower index first among equals; and what their outputs are weighted
/// with (fp32): softmax over all E, or, with `renormalize`, over these K. mass_T (fp32): what these K have of the softmax over all.
void route(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE, bool renormalize);
/// dlogits_TE (kF32 or kBF16) from dweights_TK (fp32) and what route() had and gave.
void route_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE, ConstTensorView ids_TK,
                    ConstTensorView weights_TK, bool renormalize);

/// out_RC = factors_R (fp32) * x_RC; out may be x.
void scale_rows(OpContext& ctx, TensorView out_RC, ConstTensorView x_RC, ConstTensorView factors_R);
/// out_R (fp32) = sum over C of a_RC * b_RC, in one order that depends on C alone.
void row_dots(OpContext& ctx, TensorView out_R, ConstTensorView a_RC, ConstTensorView b_RC);
/// out_TC = the sum of the rows rows_TK[t] (int32) of x_RC, in order of k and in fp32, or += if `accumulate`.
void sum_rows(OpContext& ctx, TensorView out_TC, ConstTensorView x_RC, ConstTensorView rows_TK, bool accumulate);

}  // namespace prl::ops
