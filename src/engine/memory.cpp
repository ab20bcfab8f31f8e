#include "engine/memory.hpp"

#include <algorithm>

#include "nn/activations.hpp"
#include "nn/decoder.hpp"
#include "nn/shards.hpp"

namespace prl::engine {

std::int64_t default_state_snapshots(const nn::ModelConfig& model, std::int64_t max_num_seqs, bool enable_prefix_caching) noexcept {
  return model.linear.layers.empty() || !enable_prefix_caching ? 0 : max_num_seqs;
}

std::int64_t num_state_slots(std::int64_t max_num_seqs, std::int64_t num_draft_tokens) noexcept {
  return num_draft_tokens > 0 ? 2 * max_num_seqs : max_num_seqs;
}

std::int64_t most_drawn_rows(std::int64_t max_num_seqs, std::int64_t num_draft_tokens) noexcept {
  constexpr std::int64_t kLarge = 256;
  return std::max(max_num_seqs, std::min(kLarge, max_num_seqs * (1 + num_draft_tokens)));
}

EngineBytes engine_bytes(const EngineSizes& sizes, const nn::ModelConfig& model, DType compute) {
  // A pass holds two streams, the largest layer's intermediates and the logits of all tokens that are drawn.
  const std::int64_t tokens = std::max(sizes.max_num_batched_tokens, sizes.max_num_seqs);
  std::int64_t heads = ((model.gates_heads ? 4 : 2) * model.num_heads + 2 * model.num_kv_heads) * model.head_dim;
  // Twice this is counted below.
  if (model.latent) heads = (model.latent->projected_width(model.num_heads) + 5 * model.num_heads * model.head_dim + 1) / 2;
  if (model.attends_to_latents) {
    const nn::LatentAttention& latent = *model.latent;
    const std::int64_t of_head = model.cached_key_dim() + latent.kv_rank + latent.value_dim;
    heads = (latent.projected_width(model.num_heads) + model.num_heads * of_head + model.cached_key_dim() + 1) / 2;
  }
  if (!model.linear.layers.empty())
    heads = std::max(heads, model.linear.projected_width() + model.linear.num_channels() + model.linear.value_width());
  // Rows of experts are gathered, one for each of a token's experts, and what comes of them takes the place of gate and up.
  const std::int64_t rows_of_experts =
      model.num_experts > 0
          ? model.num_active_experts * (model.hidden_size + std::max<std::int64_t>(0, model.hidden_size - 3 * model.expert_size)) +
                2 * model.expert_input_size
          : 0;
  std::int64_t mlp_size = 0;
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer) mlp_size = std::max(mlp_size, model.active_mlp_size(layer));
  const std::int64_t of_shared = model.shared_expert_size > 0 ? model.hidden_size : 0;
  // Where outputs are normed beside inputs, those of attention and MLP lie beside what their norms give; where layers are attention or an
  // MLP, three streams take turns.
  const bool has_more = (model.norms_inputs && model.norms_outputs) || model.has_single_parts;
  const std::int64_t of_stream = (has_more ? 8 : 6) * model.hidden_size;
  const std::int64_t per_token =
      (of_stream + 2 * heads + 3 * mlp_size + rows_of_experts + of_shared) * static_cast<std::int64_t>(size_of(compute));
  const std::int64_t logits =
      most_drawn_rows(sizes.max_num_seqs, sizes.num_draft_tokens) * model.vocab_size * static_cast<std::int64_t>(sizeof(float));
  const auto states = static_cast<std::size_t>(num_state_slots(sizes.max_num_seqs, sizes.num_draft_tokens) + sizes.num_state_snapshots) *
                      nn::KvCache::bytes_per_state(nn::config_of_shard(model, sizes.num_devices), compute, DeviceKind::kCuda);
  return {static_cast<std::size_t>(tokens * per_token + logits) + states + nn::rounded_input_bytes(model, tokens),
          nn::KvCache::bytes_per_block(model, compute, sizes.block_size), (sizes.max_model_len + sizes.block_size - 1) / sizes.block_size};
}

}  // namespace prl::engine
