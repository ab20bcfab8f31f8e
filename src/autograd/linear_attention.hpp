#pragma once

#include <limits>

#include "autograd/attention.hpp"
#include "ops/delta_rule.hpp"

namespace prl::autograd {

/// Sizes and parameters of a layer of linear attention by the gated delta rule or a state space (ops/delta_rule.hpp). Legend: T tokens, N
/// value heads, V = N * value_dim, C channels (queries, keys, values).
struct LinearAttentionParameter {
  std::int64_t num_key_heads = 0, num_value_heads = 0, key_dim = 0, value_dim = 0;
  std::int64_t num_taps = 0;
  VectorParameter taps;  ///< [C * num_taps]
  VectorParameter decay_rate, decay_bias;
  NormParameter norm;  ///< of each head's output; of a state space [V], of groups of num_key_heads
  ops::RuleKind kind = ops::RuleKind::kGatedDelta;
  // Of a state space:
  VectorParameter conv_bias = {};  ///< [C]; no data: the convolution has none
  VectorParameter skip = {};
  float min_step = 0.0f, max_step = std::numeric_limits<float>::infinity();
};

/// From projections [T, C + V + 2N] (channels, output gates, then b and a of each head), of a state space [T, V + C + N] (gates, channels,
/// then a of each head), to [T, V]: convolution, rule, gated norm.
/// The sequences are those of `index`: packed ones begin anew, others go on from their states. Only packed ones have a backward pass.
/// A recomputing frame recomputes the convolution. PRL_CHECK: the index is no exchange's.
Var linear_attention(Frame& frame, const Var& projected_TE, const LinearAttentionParameter& p, const AttentionIndex& index);

/// self_attention() of heads with output gates: projections [T, 2Q + 2K], for each head its query and its gate, or the queries of all and
/// then the gates of all (`gates_are_apart`), then k and v.
Var gated_attention(Frame& frame, const Var& projected_TE, const AttentionParameter& p, const AttentionIndex& index);

}  // namespace prl::autograd
