#include "nn/same_model.hpp"

#include <fmt/ranges.h>

#include "base/error.hpp"

namespace prl::nn {

void check_same_model(const ModelConfig& wanted, const ModelConfig& found, const std::filesystem::path& where) {
  const auto check = [&](const char* key, const auto& a, const auto& b) {
    if (a == b) return;
    fail(ErrorCode::kInvalidArgument, "{} is of another model: {} is {}, this one has {}", where.string(), key, b, a);
  };
  check("model_type", wanted.model_type, found.model_type);
  check("vocab_size", wanted.vocab_size, found.vocab_size);
  check("hidden_size", wanted.hidden_size, found.hidden_size);
  if (wanted.num_experts == 0 || !wanted.dense_layers.empty())
    check("intermediate_size", wanted.intermediate_size, found.intermediate_size);
  check("num_experts", wanted.num_experts, found.num_experts);
  check("num_experts_per_tok", wanted.num_active_experts, found.num_active_experts);
  check("moe_intermediate_size", wanted.expert_size, found.expert_size);
  if (wanted.dense_layers != found.dense_layers)
    fail(ErrorCode::kInvalidArgument, "{} is of another model: of its layers [{}] have no experts, of this one's [{}]", where.string(),
         fmt::join(found.dense_layers, ", "), fmt::join(wanted.dense_layers, ", "));
  check("width of the shared experts", wanted.shared_expert_size, found.shared_expert_size);
  check("gate of the shared expert", wanted.gates_shared_expert, found.gates_shared_expert);
  check("norm_topk_prob", wanted.norm_topk_prob, found.norm_topk_prob);
  check("n_group", wanted.num_expert_groups, found.num_expert_groups);
  check("topk_group", wanted.num_active_groups, found.num_active_groups);
  check("routed_scaling_factor", wanted.routed_scale, found.routed_scale);
  check("num_hidden_layers", wanted.num_layers, found.num_layers);
  check("num_attention_heads", wanted.num_heads, found.num_heads);
  check("num_key_value_heads", wanted.num_kv_heads, found.num_kv_heads);
  check("head_dim", wanted.head_dim, found.head_dim);
  check("rope_theta", wanted.rope_theta, found.rope_theta);
  check("partial_rotary_factor", wanted.partial_rotary_factor, found.partial_rotary_factor);
  if (wanted.window != found.window || wanted.windowed_layers != found.windowed_layers)
    fail(ErrorCode::kInvalidArgument, "{} is of another model: it has windows of {} keys in layers [{}], this one of {} in [{}]",
         where.string(), found.window, fmt::join(found.windowed_layers, ", "), wanted.window, fmt::join(wanted.windowed_layers, ", "));
  if (wanted.unrotated_layers != found.unrotated_layers)
    fail(ErrorCode::kInvalidArgument, "{} is of another model: of its layers [{}] have no rotary positions, of this one's [{}]",
         where.string(), fmt::join(found.unrotated_layers, ", "), fmt::join(wanted.unrotated_layers, ", "));
  if (wanted.linear != found.linear)
    fail(ErrorCode::kInvalidArgument, "{} is of another model: its layers of linear attention are [{}] or of other sizes, this one's [{}]",
         where.string(), fmt::join(found.linear.layers, ", "), fmt::join(wanted.linear.layers, ", "));
  if (wanted.mlp_layers != found.mlp_layers)
    fail(ErrorCode::kInvalidArgument, "{} is of another model: of its layers [{}] are MLPs alone, of this one's [{}]", where.string(),
         fmt::join(found.mlp_layers, ", "), fmt::join(wanted.mlp_layers, ", "));
  check("moe_latent_size", wanted.expert_input_size, found.expert_input_size);
  if (wanted.latent != found.latent)
    fail(ErrorCode::kInvalidArgument,
         "{} is of another model: its latent attention ('kv_lora_rank', 'q_lora_rank', 'qk_nope_head_dim' and the like) is another",
         where.string());
  check("rms_norm_eps", wanted.rms_norm_eps, found.rms_norm_eps);
  check("mup_enabled", wanted.embedding_scale != 1.0, found.embedding_scale != 1.0);
  check("tie_word_embeddings", wanted.tie_word_embeddings, found.tie_word_embeddings);
  check("attention_bias", wanted.attention_bias, found.attention_bias);
  check("attention_out_bias", wanted.attention_out_bias, found.attention_out_bias);
  check("mlp_bias", wanted.mlp_bias, found.mlp_bias);
  check("qk_norm", wanted.qk_norm, found.qk_norm);
  check("query_pre_attn_scalar", wanted.score_scale, found.score_scale);
  check("norm of q and k over all heads", wanted.qk_norm_is_whole, found.qk_norm_is_whole);
  if (wanted.long_rope != found.long_rope)
    fail(ErrorCode::kInvalidArgument,
         "{} is of another model: its LongRoPE ('rope_scaling', 'original_max_position_embeddings') is another", where.string());
  const bool takes_long = wanted.long_rope && wanted.max_position > wanted.long_rope->original_max_position;
  if (takes_long != (found.long_rope && found.max_position > found.long_rope->original_max_position))
    fail(ErrorCode::kInvalidArgument,
         "{} is of another model: max_position_embeddings is {}, this one has {}, and only one of them is beyond "
         "'original_max_position_embeddings'",
         where.string(), found.max_position, wanted.max_position);
  if (wanted.yarn != found.yarn)
    fail(ErrorCode::kInvalidArgument, "{} is of another model: its YaRN ('rope_scaling', 'original_max_position_embeddings') is another",
         where.string());
  check("factor of linear 'rope_scaling'", wanted.rope_divisor, found.rope_divisor);
  check("rope_theta of layers with windows", wanted.window_rope_theta.value_or(0), found.window_rope_theta.value_or(0));
  const RopeScaling &a = wanted.rope_scaling, &b = found.rope_scaling;
  check("rope_scaling", a.enabled, b.enabled);
  if (!a.enabled) return;
  check("rope_scaling.factor", a.factor, b.factor);
  check("rope_scaling.low_freq_factor", a.low_freq_factor, b.low_freq_factor);
  check("rope_scaling.high_freq_factor", a.high_freq_factor, b.high_freq_factor);
  check("rope_scaling.original_max_position_embeddings", a.original_max_position, b.original_max_position);
}

}  // namespace prl::nn
