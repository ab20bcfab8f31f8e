#pragma once

#include <span>

#include "ops/linear.hpp"
#include "ops/shard_group.hpp"

namespace prl::ops {

// Mixtures of experts: which experts take a token, and how rows travel to them and back. The experts' products are ops::linear, expert by
// expert, over rows that lie together. Legend: T tokens, E experts, K experts of a token, R rows, C columns, H hidden, F width of an
// expert. A row of a result depends on its own row and the weights, as everywhere.

/// The most experts that a router chooses from.
inline constexpr std::int64_t kMaxExperts = 1024;
/// The most experts of one token.
inline constexpr std::int64_t kMaxActiveExperts = 32;

/// The K experts of the greatest logits_TE (fp32), greatest first, the lower index first among equals; and what their outputs are weighted
/// with (fp32): softmax over all E, or, with `renormalize`, over these K. mass_T (fp32): what these K have of the softmax over all.
///
/// `given_TK` (int32), unless its data is nullptr: the K experts that a token has whatever its logits are, in that order. A row with an
/// entry outside [0, E), or, for K > 1, of K equal entries, gives none: its token has those of its logits.
void route(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE, bool renormalize,
           ConstTensorView given_TK = {});
/// dlogits_TE (kF32 or kBF16) from dweights_TK (fp32) and what route() had and gave.
void route_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE, ConstTensorView ids_TK,
                    ConstTensorView weights_TK, bool renormalize);

/// How experts are chosen by scores of their own, each the sigmoid of its logit (DeepSeek-V3, GLM-4.5).
struct ScoreRule {
  /// Experts are of G groups of the same size, two or more. A group's value is the sum of the two greatest score + bias in it; a token's
  /// experts are of the `num_active_groups` groups of the greatest values, the lower index first among equals.
  std::int64_t num_groups = 1, num_active_groups = 1;
  bool renormalize = false;  ///< weights are scores divided by their sum + 1e-20; else the scores
  float scale = 1.0f;        ///< multiplies them
};
/// As route(), but the K experts of the greatest score + bias, where the bias of an expert is its column of bias_PE (fp32, contiguous)
/// summed from the last row to the first; weights are of the scores without it. mass_T: what the K scores are of the sum of all.
void route_by_score(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE,
                    ConstTensorView bias_PE, const ScoreRule& rule, ConstTensorView given_TK = {});
/// dlogits_TE (kF32 or kBF16) from dweights_TK (fp32) and the experts that were chosen, which the gradient takes as they are.
void route_by_score_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE,
                             ConstTensorView ids_TK, const ScoreRule& rule);

/// Writes ids_TK as 16-bit numbers into entries [first_entry, first_entry + K) of the rows slot_T (int32) of log_SB: bytes (kU8), two to an
/// entry, contiguous. Tokens of negative slots are left out.
void log_route(OpContext& ctx, TensorView log_SB, ConstTensorView ids_TK, ConstTensorView slot_T, std::int64_t first_entry);

/// Sorts the rows of tokens and their experts, R = T * K of them, by expert, and those of one expert by token. All int32 but for weights:
/// begin_P (P = E + 1): where each expert's rows begin, and R; of each row its token and its weight; slot_TK: the row of a token's k-th
/// expert. ids_TK, contiguous, are route()'s.
void place_rows(OpContext& ctx, TensorView begin_P, TensorView token_R, TensorView weight_R, TensorView slot_TK, ConstTensorView ids_TK,
                ConstTensorView weights_TK);

/// out_RF = factors_R (fp32) * swiglu(gate_up_R2F), which is rounded as if it were stored first.
void swiglu_rows(OpContext& ctx, TensorView out_RF, ConstTensorView gate_up_R2F, ConstTensorView factors_R);
/// Gradients of gate_up (not in its own memory) and of the factors (fp32), whose sums over F have one order that depends on F alone.
void swiglu_rows_backward(OpContext& ctx, TensorView dgate_up_R2F, TensorView dfactors_R, ConstTensorView dout_RF,
                          ConstTensorView gate_up_R2F, ConstTensorView factors_R);
/// out_TC = the sum of the rows rows_TK[t] (int32) of x_RC, in order of k and in fp32, or += if `accumulate`.
void sum_rows(OpContext& ctx, TensorView out_TC, ConstTensorView x_RC, ConstTensorView rows_TK, bool accumulate);

/// gates_T (fp32) = sigmoid(x_TH w_H), w fp32: what multiplies the output of an expert that all tokens pass (Qwen3-Next). The sum over H is
/// fp32 and has one order that depends on H alone.
void row_gates(OpContext& ctx, TensorView gates_T, ConstTensorView x_TH, ConstTensorView w_H);
/// dx_TH = the gradient, or += if `accumulate`; dw_H (fp32) +=, summed over T in an order that depends on T alone. Either one may have no
/// data: it is not wanted. dx not in x's own memory.
void row_gates_backward(OpContext& ctx, TensorView dx_TH, TensorView dw_H, ConstTensorView dgates_T, ConstTensorView gates_T,
                        ConstTensorView x_TH, ConstTensorView w_H, bool accumulate);

/// The gate of GPT-OSS's experts: gate' = min(gate, limit), up' = up within [-limit, limit], and of both
/// gate' * sigmoid(alpha * gate') * (up' + 1).
struct ClampedGate {
  float alpha = 1.702f, limit = 7.0f;
};
/// out_RF = factors_R (fp32) * that of pairs_RG, G = 2F, whose columns 2i and 2i + 1 are gate and up of i; rounded once as if it were
/// stored before it is multiplied.
void clamped_swiglu(OpContext& ctx, TensorView out_RF, ConstTensorView pairs_RG, ConstTensorView factors_R, const ClampedGate& gate);
/// Gradients of pairs (not in its own memory) and of the factors (fp32), whose sums over F have one order that depends on F alone. Beyond a
/// limit the gradient is 0, at it that of the value as it is.
void clamped_swiglu_backward(OpContext& ctx, TensorView dpairs_RG, TensorView dfactors_R, ConstTensorView dout_RF, ConstTensorView pairs_RG,
                             ConstTensorView factors_R, const ClampedGate& gate);

// Biases of all experts are one vector biases_V (fp32), V = E * N, those of one expert after those of another; begin_P (P = E + 1), token_R
// and factors_R are what place_rows() gives.

/// y of an expert's rows += its biases, times the row's factor unless factors_R has no data.
void add_expert_biases(OpContext& ctx, TensorView y_RN, ConstTensorView biases_V, ConstTensorView begin_P, ConstTensorView factors_R);
/// Tokens [first, first + count).
struct TokenRange {
  std::int64_t first = 0, count = 0;
};
/// dbiases_V (fp32) += the sum over those of an expert's rows that are of `tokens`, in their order, of factor * dy.
void expert_biases_backward(OpContext& ctx, TensorView dbiases_V, ConstTensorView dy_RN, ConstTensorView begin_P, ConstTensorView token_R,
                            ConstTensorView factors_R, const TokenRange& tokens);
/// dfactors_R (fp32) += the product of a row of dy with its expert's biases.
void add_bias_dots(OpContext& ctx, TensorView dfactors_R, ConstTensorView dy_RN, ConstTensorView biases_V, ConstTensorView begin_P);

// Products of rows that lie together by expert, all experts at once. begin_P (int32, P = E + 1) says where each expert's rows begin, and
// how many there are: place_rows() makes it. Of rows that lie together by the rank that sent them, and then by expert, begin_P has E
// entries for each rank, and the end: groups of rows take the weights in turn. Weights have no biases. Each returns false, and does
// nothing, where the device has no kernel for such matrices, whatever the rows: then the products are formed expert by expert.

/// y of an expert's rows = x W^T; the bits are linear()'s.
bool grouped_linear(OpContext& ctx, TensorView y_RN, ConstTensorView x_RK, std::span<const LinearWeight* const> weights,
                    ConstTensorView begin_P);
/// dx of an expert's rows = dy W.
bool grouped_linear_backward_input(OpContext& ctx, TensorView dx_RK, ConstTensorView dy_RN, std::span<const LinearWeight* const> weights,
                                   ConstTensorView begin_P);
/// dw[e] (fp32, [N, K]) = dy^T x over the expert's rows, 0 if it has none, or += if `accumulate`. The order of the sum depends on the
/// number of these rows alone. begin_P may be a part of a larger one, of one rank's rows; the other rows are not read.
bool grouped_linear_backward_weight(OpContext& ctx, std::span<const TensorView> dw, ConstTensorView dy_RN, ConstTensorView x_RK,
                                    ConstTensorView begin_P, bool accumulate);

/// What experts with biases have beside their matrices: their gate, in place of SwiGLU, and the biases as add_expert_biases() takes them.
struct BiasedExperts {
  ClampedGate gate;
  ConstTensorView gate_up_V, down_V;
};
/// The matrices of a layer's experts: [2F, H] and [H, F] of each, without biases; [F, H] in place of the first where `is_squared`.
struct ExpertMatrices {
  std::span<const LinearWeight*const> gate_up, down;
  const BiasedExperts* biased = nullptr;  ///< nullptr: experts without biases
  bool is_squared = false;                ///< squared_relu() in place of SwiGLU
};
/// Whether mix_experts() takes these, whatever the routing.
bool can_mix_experts(OpContext& ctx, std::int64_t num_tokens, std::int64_t num_active, const ExpertMatrices& experts);
/// What follows route(), without the host, so that it can be recorded: out_TH = the sum over a token's experts of down (weight *
/// swiglu(gate_up x)). The bits are those of place_rows, embedding, linear, swiglu_rows, linear and sum_rows, with squared_relu in place of
/// swiglu_rows, or with clamped_swiglu and add_expert_biases where experts have biases. ids_TK and weights_TK contiguous. False, and
/// nothing is done, unless can_mix_experts().
///
/// `shared`: the matrices and biases are this rank's part of the outputs of each, and out is of its part of H. All ranks make the same
/// call, with a gather in it.
bool mix_experts(OpContext& ctx, TensorView out_TH, ConstTensorView x_TH, ConstTensorView ids_TK, ConstTensorView weights_TK,
                 const ExpertMatrices& experts, const SharedLayers& shared = {});

}  // namespace prl::ops
