#include "nn/activations.hpp"

#include <algorithm>

namespace prl::nn {
namespace {

/// Values per token in the compute dtype. Legend as in the ops: H hidden, Q query heads * D, K key heads * D, F MLP width.
struct PerToken {
  std::int64_t H, Q, K, F;
  std::int64_t norm, attn_proj, heads, mlp;  ///< what the parts of a layer hold
  std::int64_t kept;                         ///< what no part may drop, in values: sums, attention output, log-sum-exp
  explicit PerToken(const ModelConfig& c, DType compute)
      : H(c.hidden_size),
        Q(c.num_heads * c.head_dim),
        K(c.num_kv_heads * c.head_dim),
        F(c.intermediate_size),
        norm(2 * H),
        attn_proj(Q + 2 * K),
        heads(c.qk_norm ? Q + K : 0),
        mlp(3 * F),
        kept(2 * H + Q + c.num_heads * 4 / static_cast<std::int64_t>(size_of(compute))) {}
  std::int64_t layer() const { return norm + attn_proj + heads + mlp + kept; }
  std::int64_t dropped(const LayerParts& parts) const {
    return (parts.norm ? norm : 0) + (parts.attn_proj ? attn_proj : 0) + (parts.norm || parts.attn_proj ? heads : 0) +
           (parts.mlp ? mlp : 0);
  }
  /// Gradients that live at once while a layer's rules run: of all but the sums, which hand one gradient through. That of the heads is
  /// gone before that of the first norm comes.
  std::int64_t gradients() const { return H + std::max(H, heads) + attn_proj + mlp + Q; }
};

}  // namespace

std::size_t activation_bytes(const ModelConfig& config, DType compute, std::int64_t num_tokens,
                             const ActivationCheckpointing& checkpointing) {
  const PerToken t(config, compute);
  const KeptActivations how{checkpointing, nullptr};
  const bool is_whole = !checkpointing.parts.any();
  std::int64_t layers = 0, most_scratch = 0;
  bool was_whole = true;
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    std::int64_t scratch = t.gradients();
    const bool drops_all = how.is_checkpointed(i) && is_whole;
    if (drops_all) {
      layers += was_whole ? t.H : 2 * t.H;  // its output, and its input where that is a sum of two values
      scratch += t.layer() + 2 * t.H;
    } else {
      layers += t.layer() - (was_whole ? t.H : 0);  // after such a layer the first sum is that layer's output
      if (how.is_checkpointed(i)) layers -= t.dropped(checkpointing.parts);
    }
    most_scratch = std::max(most_scratch, scratch);
    was_whole = drops_all;
  }
  const std::int64_t remade = checkpointing.freq > 0 ? t.dropped(checkpointing.parts) : 0;
  // Embedding, shared delta, final sum and norm, their gradients; ids, positions and results are a few fp32 values per token.
  const std::int64_t ends = (was_whole ? 5 : 6) * t.H;
  constexpr std::size_t kSmallBytes = 24;
  return static_cast<std::size_t>(num_tokens) *
         (static_cast<std::size_t>(ends + layers + remade + most_scratch) * size_of(compute) + kSmallBytes);
}

}  // namespace prl::nn
