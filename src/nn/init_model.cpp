#include "nn/init_model.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/attention.hpp"

namespace prl::nn {
namespace {

/// Of a head's elements those that a model made here rotates if its family rotates some: half, in whole steps.
std::int64_t half_of_head(std::int64_t head_dim) { return (head_dim / 2 + ops::kRotaryStep - 1) / ops::kRotaryStep * ops::kRotaryStep; }

/// Of the latents of a model made here: half of its width, in whole steps.
std::int64_t latent_rank(std::int64_t hidden_size) { return (hidden_size / 2 + 15) / 16 * 16; }

/// What each layer of a Nemotron-H made here is.
std::string pattern_of_layers(std::int64_t num_layers) {
  std::string pattern;
  for (std::int64_t layer = 0; layer < num_layers; ++layer) pattern += "M*E-"[layer % 4];
  return pattern;
}

/// What families read beyond the sizes that all have, for models of these sizes.
boost::json::object keys_of_families(const InitModelOptions& o, const Family& family) {
  const bool has_window = o.sliding_window > 0;
  return {{"hybrid_override_pattern", pattern_of_layers(o.num_layers)},
          {"mamba_num_heads", o.num_heads},
          {"mamba_head_dim", o.head_dim},
          {"n_groups", o.num_kv_heads},
          {"ssm_state_size", o.head_dim},
          {"moe_shared_expert_intermediate_size", o.expert_size},
          {"head_dim", o.head_dim},
          {"attention_bias", o.attention_bias || &family == &kGptOssFamily},
          {"use_qk_norm", true},
          {"num_experts", o.num_experts},
          {"n_routed_experts", o.num_experts},
          {"num_local_experts", o.num_experts},
          {"num_experts_per_tok", o.num_active_experts},
          {"moe_intermediate_size", o.expert_size},
          {"shared_expert_intermediate_size", o.expert_size},
          {"norm_topk_prob", &family != &kDeepseekV2Family},
          {"sliding_window", has_window ? boost::json::value(o.sliding_window) : nullptr},
          {"use_sliding_window", has_window},
          {"max_window_layers", 1},
          {"query_pre_attn_scalar", o.head_dim},
          {"rotary_dim", half_of_head(o.head_dim)},
          {"linear_num_key_heads", o.num_kv_heads},
          {"linear_num_value_heads", o.num_heads},
          {"linear_key_head_dim", o.head_dim},
          {"linear_value_head_dim", o.head_dim},
          // The last layer, where there are fewer than the family's interval.
          {"full_attention_interval", std::min<std::int64_t>(o.num_layers, 4)},
          {"global_attn_every_n_layers", std::min<std::int64_t>(o.num_layers, 4)},
          {"sliding_window_pattern", std::min<std::int64_t>(o.num_layers, 6)},
          {"q_lora_rank", latent_rank(o.hidden_size)},
          {"kv_lora_rank", latent_rank(o.hidden_size)},
          {"qk_nope_head_dim", std::max<std::int64_t>(8, o.head_dim / 2 - 8)},
          {"qk_rope_head_dim", half_of_head(o.head_dim)},
          {"v_head_dim", std::max<std::int64_t>(8, o.head_dim / 16 * 8)},
          {"n_group", 1},
          {"topk_group", 1},
          {"first_k_dense_replace", 1},
          {"mup_enabled", true},
          {"num_shared_experts", 1},
          {"no_rope_layer_interval", std::min<std::int64_t>(o.num_layers, 4)}};
}

}  // namespace

ModelConfig make_model_config(const InitModelOptions& o) {
  const Family& family = find_family(o.family, "init-model");
  const auto positive = [](const char* name, std::int64_t value) {
    if (value < 1) fail(ErrorCode::kInvalidArgument, "init-model: {} is {}, wanted at least 1", name, value);
  };
  positive("vocab_size", o.vocab_size);
  positive("hidden_size", o.hidden_size);
  positive("intermediate_size", o.intermediate_size);
  positive("num_layers", o.num_layers);
  positive("num_experts", o.num_experts);
  positive("num_active_experts", o.num_active_experts);
  positive("expert_size", o.expert_size);
  positive("num_heads", o.num_heads);
  positive("num_kv_heads", o.num_kv_heads);
  positive("max_position", o.max_position);
  if (o.sliding_window < 0) fail(ErrorCode::kInvalidArgument, "init-model: sliding_window is {}, wanted at least 0", o.sliding_window);
  if (o.num_heads % o.num_kv_heads != 0)
    fail(ErrorCode::kInvalidArgument, "init-model: num_heads {} is not a multiple of num_kv_heads {}", o.num_heads, o.num_kv_heads);
  if (!ops::is_head_dim(o.head_dim))
    fail(ErrorCode::kInvalidArgument, "init-model: head_dim is {}, wanted one of {}", o.head_dim, fmt::join(ops::kHeadDims, ", "));
  if (!(o.rope_theta >= 1.0)) fail(ErrorCode::kInvalidArgument, "init-model: rope_theta is {}, wanted at least 1", o.rope_theta);
  for (const std::int32_t id : {o.bos_id, o.eos_id, o.pad_id})
    if (id >= o.vocab_size) fail(ErrorCode::kInvalidArgument, "init-model: token id {} is outside the vocabulary of {}", id, o.vocab_size);

  ModelConfig config;
  config.model_type = family.model_type;
  config.architecture = family.architecture;
  config.vocab_size = o.vocab_size;
  config.hidden_size = o.hidden_size;
  config.intermediate_size = o.intermediate_size;
  config.num_layers = o.num_layers;
  config.num_heads = o.num_heads;
  config.num_kv_heads = family.has_latent_attention ? o.num_heads : o.num_kv_heads;
  config.max_position = o.max_position;
  config.rope_theta = o.rope_theta;
  config.rms_norm_eps = static_cast<float>(o.rms_norm_eps);
  config.tie_word_embeddings = o.tie_word_embeddings;
  config.bos_id = o.bos_id;
  config.pad_id = o.pad_id;
  if (o.eos_id >= 0) config.eos_ids = {o.eos_id};
  config.torch_dtype = o.dtype == DType::kBF16 ? "bfloat16" : "float32";
  config.partial_rotary_factor = family.partial_rotary_factor;
  config.head_dim = o.head_dim;
  if (config.rotary_dim() % ops::kRotaryStep != 0)
    fail(ErrorCode::kInvalidArgument, "init-model: head_dim is {}, of which a {} model rotates {}, wanted a multiple of {}", o.head_dim,
         o.family, config.rotary_dim(), ops::kRotaryStep);
  // The family sets its switches as it does for a file that has these keys.
  const boost::json::object keys = keys_of_families(o, family);
  family.configure(ConfigReader("init-model", keys), config);
  if (o.sliding_window > 0 && config.window == 0 && o.sliding_window < o.max_position)
    fail(ErrorCode::kInvalidArgument, "init-model: sliding_window is {}, and a {} model of {} layers has no layer with a window",
         o.sliding_window, o.family, o.num_layers);
  return config;
}

void init_model(const InitModelOptions& options, const std::filesystem::path& folder) {
  const ModelConfig config = make_model_config(options);
  Parameters parameters(make_cpu_runtime(), config);
  parameters.init_random(options.seed, options.std_dev);
  save_pretrained(parameters, folder, options.dtype, {});
}

}  // namespace prl::nn
