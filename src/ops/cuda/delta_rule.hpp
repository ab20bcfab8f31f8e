#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/launch.hpp"
#include "ops/delta_rule.hpp"

// What the two directions of the gated delta rule share on the host's side.

namespace prl::ops::cuda {

/// Whether a call goes chunk by chunk; else it goes token by token. Depends on the model alone, not on the call.
inline bool is_in_chunks(const DeltaRule& in) {
  return delta_rule_goes_in_chunks(DeviceKind::kCuda, in.qkv_TC.dtype, in.key_dim, in.value_dim, in.kind);
}

/// Whether there are slots and all sequences have one token, as in a step of decoding.
bool is_a_step(const StateRows& rows);

/// What the rule needs of each token beside its vectors, all fp32.
struct RuleScales {
  float *q_TM = nullptr, *k_TM = nullptr;  ///< what queries and keys are multiplied with
  float* gate_TN = nullptr;                ///< of value heads: the logarithm of the decay where is_in_chunks(), else the decay
  float* beta_TN = nullptr;                ///< of value heads; of a state space their steps
};
RuleScales take_rule_scales(Carver& carve, const DeltaRule& in);
/// Computes them.
void write_rule_scales(OpContext& ctx, const RuleScales& scales, const DeltaRule& in);

/// Tokens of all sequences, one behind the other, whose gradients are computed together.
inline constexpr std::int64_t kRuleWindow = 256;
/// The states before tokens kRuleWindow, 2 kRuleWindow, ... into checkpoints [.., N, K, D], where these do not begin a sequence.
void write_rule_checkpoints(OpContext& ctx, float* checkpoints, const RuleScales& scales, const DeltaRule& in, const StateRows& rows);

/// What a token adds to gradients of parameters of each value head: of the rate and the bias of the decay, and the skip of a state space.
inline std::int64_t num_rule_parameters(const DeltaRule& in) { return in.is_state_space() ? 3 : 2; }
/// Adds these gradients, if they are wanted: of each value head a sum over tokens, sequence by sequence. parts [T, N,
/// num_rule_parameters()].
void add_rule_parameters(OpContext& ctx, const DeltaRuleGrads& grads, const float* parts, const StateRows& rows);

// What follows is for calls that go in chunks.

/// For the gradient. Sequences have ceil(tokens / kRuleChunk) chunks each, numbered from one sequence to the next.
struct ChunkStates {
  float* states_CNKD;                 ///< fp32 [chunks, N, K, D]: before each chunk; that before a sequence's first is 0 and not written
  __nv_bfloat16* u_CNPDT;             ///< bf16 [chunks, N, 2, D, kRuleChunk]: U, high and low parts; 0 for tokens that are not there
  const std::int32_t* chunk_start_S;  ///< device; the first chunk of each sequence
};
/// Sequences that begin anew only.
void write_chunk_states(OpContext& ctx, const ChunkStates& to, const RuleScales& scales, const DeltaRule& in, const StateRows& rows);
/// A call for which is_a_step() is true.
void delta_rule_step(OpContext& ctx, TensorView out_TV, TensorView state_SF, const DeltaRule& in, const StateRows& rows);
/// Any other.
void delta_rule_in_chunks(OpContext& ctx, TensorView out_TV, TensorView state_SF, const RuleScales& scales, const DeltaRule& in,
                          const StateRows& rows);
/// From the last chunk of each sequence to its first.
struct ChunkGradients {
  float* dstates_CNKD;     ///< fp32 [chunks, N, K, D]: of the state behind each chunk; behind a sequence's last it is 0, not written
  __nv_bfloat16* y_CNPDT;  ///< bf16 [chunks, N, 2, D, kRuleChunk]: of R, and of the values; as u_CNPDT of ChunkStates
  const std::int32_t* chunk_start_S;  ///< as of ChunkStates, and one for the end
};
/// Writes the gradients of values in dqkv_TC, too.
void write_chunk_gradients(OpContext& ctx, const ChunkGradients& to, TensorView dqkv_TC, ConstTensorView dout_TV, const RuleScales& scales,
                           const DeltaRule& in, const StateRows& rows);
void delta_rule_backward_in_chunks(OpContext& ctx, const DeltaRuleGrads& grads, ConstTensorView dout_TV, const DeltaRule& in,
                                   const StateRows& rows);

}  // namespace prl::ops::cuda
