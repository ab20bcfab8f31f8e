#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "ops/context.hpp"

namespace prl::ops {

// Linear attention by the gated delta rule (Yang et al. 2024, "Gated Delta Networks"; Qwen 3.5) or by selective state spaces (Dao and Gu
// 2024, "Transformers are SSMs", Mamba-2; Nemotron-H), with what stands around it: a short causal convolution before, a gated norm behind.
// Each sequence has a state of fixed size in place of keys and values.
// Legend: T tokens, N value heads, M key heads (N % M == 0; key head n / (N / M) serves value head n), K size of a key, D size of a value,
// C = 2 M K + N D channels: queries, keys, values; W taps of the convolution.
// Activations are kF32 or kBF16 (all alike), rows may be strided; arithmetic and states are fp32 and rounded once when stored. The result
// of a token depends on its sequence up to it and on nothing else, bit for bit: training, a prompt in parts and decoding agree. So tokens
// follow one another one by one, or chunks of tokens that begin at fixed positions of a sequence. Gradients of parameters are fp32 and
// accumulate (+=), in a fixed order that is the device's own.

/// The sequences whose tokens lie one after the other, and the states from which they go on. One without rows leaves its state as it is.
struct StateRows {
  std::span<const std::int32_t> start_S;      ///< host; sequence s has rows [start_S[s], start_S[s + 1]); the first is 0, the last T
  std::span<const std::int32_t> slot_S = {};  ///< host; where the state of each sequence lies, no two alike; empty: nowhere, all begin anew
  std::span<const std::int32_t> begin_S = {};  ///< host, as long as slot_S: tokens of the sequence before these; 0: the state is not read
  /// In place of all three where can_decode_by_index() says so, that a step may be recorded: int32 in device memory. Row s is the only one
  /// of sequence s, whose state is in slot_B[s] (-1: there is no such sequence) and is read if context_len_B[s], with this token, is
  /// above 1.
  ConstTensorView slot_B = {}, context_len_B = {};
  bool is_by_index() const noexcept { return slot_B.data != nullptr; }
};

/// Tokens of a chunk, where the rule goes in chunks: they begin at multiples of this in a sequence.
inline constexpr std::int64_t kRuleChunk = 64;
/// How a token changes the state, and what is read from it: see DeltaRule.
enum class RuleKind : std::uint8_t { kGatedDelta, kStateSpace };
/// Whether the outputs of a chunk are products with the state before it and with one another; else the rule goes token by token.
bool delta_rule_goes_in_chunks(DeviceKind device, DType dtype, std::int64_t key_dim, std::int64_t value_dim,
                               RuleKind kind = RuleKind::kGatedDelta) noexcept;
/// Fp32 numbers that delta_rule keeps of a sequence: a state [N, K, D], and behind it, where the rule goes in chunks, what there is of the
/// tokens of a chunk that is not complete.
std::int64_t delta_rule_state_size(DeviceKind device, DType dtype, std::int64_t num_key_heads, std::int64_t num_value_heads,
                                   std::int64_t key_dim, std::int64_t value_dim, RuleKind kind = RuleKind::kGatedDelta) noexcept;

/// Where the states of a layer's sequences lie. A state that is not read (StateRows::begin_S) may hold anything.
struct StateLayer {
  TensorView inputs_SWC;  ///< [slots, W - 1, C]: causal_conv
  TensorView state_SF;    ///< [slots, delta_rule_state_size()] fp32: delta_rule
};

/// y_TC[t, c] = silu(bias_C[c] + sum over w of weight_CW[c, w] * x[t - (W - 1) + w, c]), in that order; tokens before the sequence are 0.
/// With slots inputs before these rows are in state_SWC [slots, W - 1, C] (dtype of x, oldest first), which then holds the last W - 1
/// inputs. weight_CW fp32 [C, W]; 2 <= W <= 8; bias_C fp32, or without data: 0.
void causal_conv(OpContext& ctx, TensorView y_TC, ConstTensorView x_TC, ConstTensorView weight_CW, TensorView state_SWC,
                 const StateRows& rows, ConstTensorView bias_C = {});
/// dx overwritten, dweight_CW and, where there is a bias, dbias_C (fp32) +=. Sequences that begin anew only.
void causal_conv_backward(OpContext& ctx, TensorView dx_TC, TensorView dweight_CW, ConstTensorView dy_TC, ConstTensorView x_TC,
                          ConstTensorView weight_CW, const StateRows& rows, ConstTensorView bias_C = {}, TensorView dbias_C = {});

/// Inputs of the rule. For each token and value head, with q' = q / |q| / sqrt(K), k' = k / |k| (|x| = sqrt(sum x^2 + 1e-6)),
/// decay = exp(-exp(decay_rate) * softplus(a + decay_bias)), beta = sigmoid(b) and the state S [K, D]:
///   S = decay * S;  S = S + k' (beta * (v - S^T k'));  out = S^T q'
/// Of RuleKind::kStateSpace there is no b, channels are values, keys (files: B), queries (files: C) in this order, queries and keys are
/// taken as they are, step = softplus(a + decay_bias) within [min_step, max_step], decay = exp(-exp(decay_rate) * step), and
///   S = decay * S;  S = S + k (step * v);  out = S^T q + skip * v
/// At a limit and beyond it a step has no gradient.
struct DeltaRule {
  ConstTensorView qkv_TC;  ///< rows begin at multiples of 16 bytes where delta_rule_goes_in_chunks(), else kNotImplemented
  ConstTensorView b_TN, a_TN;
  ConstTensorView decay_rate_N, decay_bias_N;                                       ///< fp32 (files: A_log, dt_bias)
  std::int64_t num_key_heads = 0, num_value_heads = 0, key_dim = 0, value_dim = 0;  ///< M, N, K, D; K and D are multiples of 16 up to 256
  RuleKind kind = RuleKind::kGatedDelta;
  ConstTensorView skip_N = {};  ///< fp32 (files: D); of kStateSpace, as what follows
  float min_step = 0.0f, max_step = std::numeric_limits<float>::infinity();

  bool is_state_space() const noexcept { return kind == RuleKind::kStateSpace; }
  /// Where queries, keys and values begin in a row.
  std::int64_t first_query() const noexcept { return is_state_space() ? num_value_heads * value_dim + num_key_heads * key_dim : 0; }
  std::int64_t first_key() const noexcept { return is_state_space() ? num_value_heads * value_dim : num_key_heads * key_dim; }
  std::int64_t first_value() const noexcept { return is_state_space() ? 0 : 2 * num_key_heads * key_dim; }
};
/// out_TV [T, N D]. With slots the states are in state_SF [slots, delta_rule_state_size()] fp32 and end there.
void delta_rule(OpContext& ctx, TensorView out_TV, TensorView state_SF, const DeltaRule& in, const StateRows& rows);
/// Where gradients go: those of inputs are overwritten, those of parameters (fp32) +=. data == nullptr of all of these: not wanted.
struct DeltaRuleGrads {
  TensorView dqkv_TC, db_TN, da_TN;
  TensorView ddecay_rate_N = {}, ddecay_bias_N = {};
  TensorView dskip_N = {};  ///< of kStateSpace
};
/// Sequences that begin anew only. Computes the states again from the inputs. Workspace in floats, beside some of each token and head:
/// CPUs about 2 sqrt(L) (N / M) K D for each thread, L tokens in the longest sequence; GPUs (T / 256 + P / 3) N K D, where P is 256 times
/// as many sequences as give 264 blocks of N D / 32 each, at most T; GPUs in chunks (2 K + 128) B N D, where B is the number of chunks, of
/// which a sequence has one for every 64 tokens and for what is left. Rows of dqkv_TC and dout_TV as those of qkv_TC.
void delta_rule_backward(OpContext& ctx, const DeltaRuleGrads& grads, ConstTensorView dout_TV, const DeltaRule& in, const StateRows& rows);

/// Bytes of that workspace on a GPU for `num_tokens` in sequences of some hundred tokens or more.
std::size_t delta_rule_backward_bytes(DType dtype, std::int64_t num_value_heads, std::int64_t key_dim, std::int64_t value_dim,
                                      std::int64_t num_tokens, RuleKind kind = RuleKind::kGatedDelta) noexcept;

/// y[t, n] = rms_norm(x[t, n], w_D, eps) * silu(gate[t, n]) for heads n of [T, N D]; w fp32. y may be x.
void gated_head_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps);
/// dx and dgate overwritten, dw_D (fp32) +=.
void gated_head_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_D, ConstTensorView dy_TV,
                              ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps);

/// y = rms_norm(x * silu(gate), eps) * w_V, where the norm is of each of `num_groups` parts of a row; the product is not rounded, w fp32
/// (Mamba-2). y may be x.
void gated_group_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_V,
                      std::int64_t num_groups, float eps);
/// dx and dgate overwritten, dw_V (fp32) +=.
void gated_group_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_V, ConstTensorView dy_TV,
                               ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_V, std::int64_t num_groups, float eps);

/// Attention heads with an output gate each: in_TE has for each of H heads its query and its gate, D each, then E - 2 H D further columns.
/// out_TF [T, E - H D] = queries and the further columns, without the gates.
void drop_gates(OpContext& ctx, TensorView out_TF, ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim);
/// The reverse for gradients: din's columns of queries and further ones = dout; those of the gates stay as they are.
void drop_gates_backward(OpContext& ctx, TensorView din_TE, ConstTensorView dout_TF, std::int64_t num_heads, std::int64_t head_dim);
/// y_TQ[t, h] = x_TQ[t, h] * sigmoid(gate of head h in in_TE), [T, H D]; y may be x.
void gate_heads(OpContext& ctx, TensorView y_TQ, ConstTensorView x_TQ, ConstTensorView in_TE, std::int64_t num_heads,
                std::int64_t head_dim);
/// dx overwritten; din's columns of the gates = their gradients, the others stay as they are. dx may be dy.
void gate_heads_backward(OpContext& ctx, TensorView dx_TQ, TensorView din_TE, ConstTensorView dy_TQ, ConstTensorView x_TQ,
                         ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim);

}  // namespace prl::ops
