#include <cmath>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/experts.hpp"

// GPT-OSS: attention with sinks and biases, a window in every other layer, and in all layers experts with biases and a clamped gate.
namespace prl::nn {
namespace {

/// Every other layer, the first among them.
std::vector<std::int64_t> every_other_layer(std::int64_t num_layers) {
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < num_layers; layer += 2) layers.push_back(layer);
  return layers;
}

/// Where config.json has no rotary parameters.
Yarn default_yarn() {
  constexpr double kFactor = 32.0;
  return {.factor = kFactor, .truncates = false, .original_max_position = 4096, .attention_factor = 0.1 * std::log(kFactor) + 1.0};
}

void read_biased_experts(const ConfigReader& reader, ModelConfig& config) {
  config.num_experts = reader.integer("num_local_experts", reader.integer("num_experts", 128, 1, ops::kMaxExperts), 1, ops::kMaxExperts);
  config.num_active_experts =
      reader.integer("num_experts_per_tok", reader.integer("experts_per_token", 4, 1, ops::kMaxActiveExperts), 1, ops::kMaxActiveExperts);
  if (config.num_active_experts > config.num_experts)
    fail(ErrorCode::kCorrupt, "{}: key 'num_experts_per_tok' is {}, more than the {} of 'num_local_experts'", reader.subject(),
         config.num_active_experts, config.num_experts);
  config.expert_size = config.intermediate_size;
  config.expert_names = ExpertNames::kStacked;
  config.norm_topk_prob = true;
  config.clamped_swiglu =
      ClampedSwiglu{.alpha = reader.number("swiglu_alpha", 1.702, 1e-6, 1e6), .limit = reader.number("swiglu_limit", 7.0, 1e-6, 1e6)};
}

void configure_gpt_oss(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", 64, 2, 1024);
  config.attention_bias = reader.boolean("attention_bias", true);
  config.attention_out_bias = config.attention_bias;
  config.attention_sinks = true;
  if (!reader.has("rope_parameters") && !reader.has("rope_scaling")) config.yarn = default_yarn();
  read_window(reader, {.without = 128, .is_switched = false, .layers = every_other_layer(config.num_layers)}, config);
  refuse_dropout(reader, {"attention_dropout"});
  read_biased_experts(reader, config);
}

void describe_gpt_oss(const ModelConfig& config, boost::json::object& object) {
  object["attention_bias"] = config.attention_bias;
  object["num_experts_per_tok"] = config.num_active_experts;
  object["num_local_experts"] = config.num_experts;
  object["output_router_logits"] = false;
  object["router_aux_loss_coef"] = 0.001;
  object["swiglu_alpha"] = config.clamped_swiglu->alpha;
  object["swiglu_limit"] = config.clamped_swiglu->limit;
  describe_window(config, {.is_switched = false}, object);
  // Without these keys every other layer would have a window, and YaRN be in use.
  if (config.window == 0)
    object["layer_types"] = boost::json::array(static_cast<std::size_t>(config.num_layers), boost::json::value("full_attention"));
  if (!config.yarn) object["rope_parameters"] = boost::json::object{{"rope_type", "default"}, {"rope_theta", config.rope_theta}};
}

}  // namespace

const Family kGptOssFamily{.model_type = "gpt_oss",
                           .architecture = "GptOssForCausalLM",
                           .configure = configure_gpt_oss,
                           .describe = describe_gpt_oss,
                           .rope_theta = 150000.0,
                           .rms_norm_eps = 1e-5,
                           .max_position = 131072,
                           .num_kv_heads = 8,
                           .has_mxfp4 = true};

}  // namespace prl::nn
