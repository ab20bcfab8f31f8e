#include "nn/activations.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/lm_head.hpp"

namespace prl::nn {
namespace {

/// Values per token of a layer in the compute dtype. Legend as in the ops: H hidden, Q query heads * D, K key heads * D, F width of the MLP
/// or of the experts that a token is sent to, S of those that are shared. Of linear attention Q is the width of its values, without K. A
/// layer without attention has neither, one without an MLP no F and S.
struct PerToken {
  std::int64_t H, Q, K, S, F;
  std::int64_t normed;                  ///< by one norm: of attention, or of the MLP
  std::int64_t norm, attn_proj, heads;  ///< what the parts of a layer hold
  std::int64_t heads_for_good;          ///< of `heads` what has a gradient until the layer's end
  std::int64_t attended;                ///< what attention gives, before and behind its gate where there is one
  std::int64_t outputs;                 ///< of attention and MLP, where norms read them
  std::int64_t mlp;
  std::int64_t kept;            ///< what no part may drop, in values: sums, attention output, log-sum-exp, routing
  std::int64_t passing;         ///< what layers leave in memory that all share: only its gradient lives
  std::int64_t of_attention;    ///< what the backward pass through attention takes and gives back
  std::int64_t of_experts = 0;  ///< what the backward pass through a mixture of experts takes and gives back
  bool has_head_norms;
  bool has_attention_part, has_mlp_part;
  std::int64_t matrices;  ///< of an MLP
  PerToken(const ModelConfig& c, DType compute, std::int64_t layer)
      : PerToken(c, compute, c.is_sparse(layer), c.is_linear(layer), c.has_attention(layer), c.has_mlp(layer)) {}
  PerToken(const ModelConfig& c, DType compute, bool is_sparse, bool is_linear, bool has_attention, bool has_mlp)
      : H(c.hidden_size),
        Q(is_linear       ? c.linear.value_width()
          : has_attention ? c.num_heads * c.head_dim
                          : 0),
        K(is_linear || !has_attention ? 0 : c.num_kv_heads * c.head_dim),
        S(is_sparse ? c.shared_expert_size : 0),
        F(is_sparse ? c.num_active_experts * c.expert_size
          : has_mlp ? c.intermediate_size
                    : 0),
        normed(c.norms_inputs ? H : 0),
        norm(has_attention && has_mlp ? 2 * normed : normed),
        attn_proj(is_linear       ? c.linear.projected_width()
                  : c.latent      ? latent_projections(c)
                  : c.gates_heads ? 2 * (Q + K)
                                  : Q + 2 * K),
        heads(is_linear            ? c.linear.num_channels()
              : c.latent           ? (c.attends_to_latents ? 0 : latent_heads(c))
              : c.gates_heads      ? 2 * Q + 3 * K
              : c.qk_norm_is_whole ? Q + 2 * K
              : c.qk_norm          ? Q + K
                                   : 0),
        heads_for_good(is_linear                             ? 0
                       : c.latent                            ? heads
                       : c.gates_heads || c.qk_norm_is_whole ? Q + 2 * K
                                                             : 0),
        attended(is_linear || c.gates_heads ? 2 * Q
                 : c.attends_to_latents     ? c.num_heads * c.latent->value_dim
                                            : Q),
        outputs(c.norms_outputs ? 2 * H : 0),
        mlp(c.has_squared_relu_mlps ? (is_sparse ? F + 2 * S + c.expert_input_size : 2 * F)
            : is_sparse             ? 2 * F + 3 * S
                                    : 3 * F),
        kept((has_attention && has_mlp ? 2 : 1) * H + outputs + attended + (is_sparse ? c.expert_input_size : 0) +
             ((is_linear || !has_attention ? 0 : c.num_heads) + (is_sparse ? routing(c) : 0)) * 4 /
                 static_cast<std::int64_t>(size_of(compute))),
        passing(passing_of(c)),
        of_attention(c.attends_to_latents ? latent_scratch(c) : 0),
        has_head_norms(!is_linear && !c.latent),
        has_attention_part(has_attention),
        has_mlp_part(has_mlp),
        matrices(c.has_squared_relu_mlps ? 2 : 3) {
    const std::int64_t of_row = c.expert_input_size > 0 ? c.expert_input_size : H;
    if (is_sparse)
      of_experts = matrices * (F + S) + c.num_active_experts * of_row + 2 * c.expert_input_size + c.num_experts +
                   2 * c.num_active_experts * 4 / static_cast<std::int64_t>(size_of(compute));
  }
  /// What the products of latents give in memory that all layers share.
  static std::int64_t passing_of(const ModelConfig& c) { return c.latent && !c.attends_to_latents ? c.latent->widened(c.num_heads) : 0; }
  /// Latents and what comes of them that is kept; of attention to latents the queries too, whose heads are formed anew.
  static std::int64_t latent_projections(const ModelConfig& c) {
    const std::int64_t of_keys = c.num_heads * (c.latent->plain_dim + c.latent->value_dim);
    return c.latent->projected_width(c.num_heads) - (c.attends_to_latents ? of_keys : c.latent->widened(c.num_heads));
  }
  /// Heads of q, k and v and their gradients, what they come of, and what attention gives with padding and its gradient.
  static std::int64_t latent_scratch(const ModelConfig& c) {
    const std::int64_t of_heads =
        c.num_heads * ((c.latent->value_dim < c.head_dim ? 8 : 6) * c.head_dim + c.latent->plain_dim + c.latent->value_dim);
    return std::max(of_heads, c.num_heads * (c.cached_key_dim() + c.latent->kv_rank) + c.cached_key_dim());
  }
  /// q, k and v of latent attention, and what it gives without padding.
  static std::int64_t latent_heads(const ModelConfig& c) {
    const std::int64_t narrowed = c.latent->value_dim < c.head_dim ? c.latent->value_dim : 0;
    return c.num_heads * (3 * c.head_dim + narrowed);
  }
  /// Words of 4 bytes: logits of the experts, five of each active one, the sum of their probabilities, and the gate of those shared.
  static std::int64_t routing(const ModelConfig& c) {
    return c.num_experts + 5 * c.num_active_experts + 1 + (c.gates_shared_expert ? 1 : 0);
  }
  std::int64_t layer() const { return norm + attn_proj + heads + mlp + kept; }
  std::int64_t dropped(const LayerParts& parts) const {
    return (parts.norm ? norm : 0) + (parts.attn_proj ? attn_proj : 0) + ((parts.norm && has_head_norms) || parts.attn_proj ? heads : 0) +
           (parts.mlp ? mlp : 0);
  }
  /// Gradients that live at once while a layer's rules run: of all but the sums, which hand one gradient through. What norms of heads
  /// and rotation pass on is gone before the gradient of the first norm comes.
  std::int64_t outputs_made_again() const { return (S > 0 ? 4 : 2) * H - (has_attention_part && has_mlp_part ? 0 : H); }
  std::int64_t gradients() const {
    const std::int64_t of_output = outputs / 2;  // of attention, and of the MLP
    const std::int64_t of_heads = heads_for_good + std::max(normed, heads - heads_for_good);
    const std::int64_t at_attention = has_attention_part ? of_output + of_heads + attn_proj + passing + attended + of_attention : 0;
    return (has_mlp_part ? normed + of_output : 0) +
           (of_experts > 0 ? std::max(of_experts, matrices * S + at_attention) : mlp + at_attention);
  }
};

}  // namespace

std::size_t rounded_input_bytes(const ModelConfig& config, std::int64_t num_tokens) {
  if (config.eight_bits != EightBits::kProducts) return 0;
  constexpr auto kFactor = static_cast<std::int64_t>(sizeof(float));
  std::int64_t widest = std::max(config.hidden_size, config.num_heads * config.head_dim), of_experts = 0;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    widest = std::max(widest, config.is_sparse(layer) ? config.shared_expert_size : config.active_mlp_size(layer));
    if (!config.is_sparse(layer)) continue;
    const std::int64_t inputs = config.expert_input_size > 0 ? config.expert_input_size : config.hidden_size;
    of_experts = config.num_active_experts * (std::max(inputs, config.expert_size) + kFactor);
  }
  if (!config.linear.layers.empty()) widest = std::max(widest, config.linear.value_width());
  return static_cast<std::size_t>(num_tokens * std::max(widest + kFactor, of_experts));
}

ActivationBytes activation_bytes(const ModelConfig& config, DType compute, std::int64_t num_tokens,
                                 const ActivationCheckpointing& checkpointing, const ActivationOffload& offload,
                                 std::int64_t num_kept_logits) {
  const KeptActivations how{checkpointing};
  const bool is_whole = !checkpointing.parts.any();
  const auto num_layers = static_cast<std::size_t>(config.num_layers);
  const std::size_t num_places = offload.link == nullptr ? num_layers : static_cast<std::size_t>(offload.max_inflight) + 1;
  std::vector<std::int64_t> places(num_places, 0);
  std::int64_t on_host = 0, most_scratch = 0, remade = 0;
  for (std::size_t i = 0; i < num_layers; ++i) {
    const auto layer = static_cast<std::int64_t>(i);
    const PerToken t(config, compute, layer);
    const bool is_checkpointed = how.is_checkpointed(static_cast<std::int64_t>(i));
    if (is_checkpointed) remade = std::max(remade, t.dropped(checkpointing.parts));
    // A layer that is computed again as a whole keeps its input, and makes everything else beside its gradients.
    const bool keeps_input = is_checkpointed && is_whole;
    const std::int64_t kept = keeps_input ? t.H : t.layer() - (is_checkpointed ? t.dropped(checkpointing.parts) : 0);
    most_scratch = std::max(most_scratch, t.gradients() + (keeps_input ? t.layer() + t.passing + t.outputs_made_again() : 0));
    places[i % num_places] = std::max(places[i % num_places], kept);
    if (i + num_places < num_layers) on_host += kept;
  }
  const std::int64_t on_device = std::accumulate(places.begin(), places.end(), std::int64_t{0});
  // Shared delta and what shared experts add to it, final sum and norm, the gradient of the latter; ids, positions and results are a few
  // fp32 values per token.
  const std::int64_t H = config.hidden_size, passing = PerToken::passing_of(config),
                     ends = (config.shared_expert_size > 0 ? 5 : 4) * H + passing;
  constexpr std::size_t kSmallBytes = 24;
  const std::size_t tokens = static_cast<std::size_t>(num_tokens), size = size_of(compute);
  const auto logits = static_cast<std::size_t>(std::min(num_kept_logits, num_tokens) * ops::kept_row_bytes(compute, config.vocab_size));
  // What is kept of logits ends before the final sum's gradient and those of the layers begin.
  return {tokens * (static_cast<std::size_t>(ends + on_device + remade) * size + kSmallBytes) +
              std::max(logits, tokens * static_cast<std::size_t>(H + most_scratch) * size),
          tokens * static_cast<std::size_t>(on_host) * size};
}

}  // namespace prl::nn
