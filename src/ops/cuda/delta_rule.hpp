#pragma once

#include "ops/cuda/launch.hpp"
#include "ops/delta_rule.hpp"

// What the two directions of the gated delta rule share on the host's side.

namespace prl::ops::cuda {

/// Tokens whose outputs are products with the state before them and with one another: a chunk begins at every multiple of this in a sequence.
inline constexpr std::int64_t kRuleChunk = 64;
/// Whether a call goes chunk by chunk; else it goes token by token. Depends on the model alone, not on the call.
bool is_in_chunks(const DeltaRule& in);

/// What the rule needs of each token beside its vectors, all fp32.
struct RuleScales {
  float *q_TM = nullptr, *k_TM = nullptr;  ///< what queries and keys are multiplied with
  float *gate_TN = nullptr;                ///< of value heads: the logarithm of the decay where is_in_chunks(), else the decay
  float *beta_TN = nullptr;                ///< of value heads
};
RuleScales take_rule_scales(Carver& carve, const DeltaRule& in);
/// Computes them.
void write_rule_scales(OpContext& ctx, const RuleScales& scales, const DeltaRule& in);

/// Tokens of all sequences, one behind the other, whose gradients are computed together.
inline constexpr std::int64_t kRuleWindow = 256;
/// The states before tokens kRuleWindow, 2 kRuleWindow, ... into checkpoints [.., N, K, D], where these do not begin a sequence.
void write_rule_checkpoints(OpContext& ctx, float* checkpoints, const RuleScales& scales, const DeltaRule& in, const StateRows& rows);

}  // namespace prl::ops::cuda
