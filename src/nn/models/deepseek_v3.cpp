#include "base/error.hpp"
#include "nn/models/family.hpp"

// DeepSeek-V3 and what has its layers under other names: latent attention, the first layers dense, and in the others experts that sigmoids
// with a bias choose beside shared ones. Moonlight says "deepseek_v3" too; Kimi K2 has a name of its own; GLM-4.7-Flash has other sizes.
namespace prl::nn {
namespace {

/// Keys of the published files that transformers does not read, as all models have the same there. Anything else would be another model.
void refuse_other_experts(const ConfigReader& reader) {
  reader.require_string("scoring_func", "sigmoid", "sigmoid");
  reader.require_string("topk_method", "noaux_tc", "noaux_tc");
}

void configure_deepseek_v3(const ConfigReader& reader, ModelConfig& config) {
  read_latent_attention(reader, {.query_rank = 1536, .kv_rank = 512, .plain_dim = 128, .rotary_dim = 64, .value_dim = 128}, config);
  refuse_other_experts(reader);
  read_scored_experts(
      reader, {.num_experts = 256, .num_active = 8, .size = 2048, .num_groups = 8, .num_active_groups = 4, .scale = 2.5, .num_dense = 3},
      config);
}

/// As layer types, in place of `first_k_dense_replace`.
void read_mlp_types(const ConfigReader& reader, ModelConfig& config) {
  const std::vector<std::string> types = read_layer_types(reader, config.num_layers, "dense", "mlp_layer_types", "sparse");
  if (types.empty()) return;
  config.dense_layers = layers_of_type(types, "dense");
  if (static_cast<std::int64_t>(config.dense_layers.size()) == config.num_layers)
    fail(ErrorCode::kCorrupt, "{}: key 'mlp_layer_types': all {} layers are 'dense', wanted at least one 'sparse'", reader.subject(),
         config.num_layers);
}

void configure_glm4_moe_lite(const ConfigReader& reader, ModelConfig& config) {
  read_latent_attention(reader, {.query_rank = 768, .kv_rank = 512, .plain_dim = 192, .rotary_dim = 64, .value_dim = 256}, config);
  refuse_other_experts(reader);
  read_scored_experts(reader, {.num_experts = 64, .num_active = 4, .size = 1536, .scale = 1.8, .num_dense = 1}, config);
  read_mlp_types(reader, config);
}

void describe_deepseek_v3(const ModelConfig& config, boost::json::object& object) {
  describe_latent_attention(config, object);
  describe_scored_experts(config, object);
  // What transformers does not read and others want.
  object["moe_layer_freq"] = 1;
  object["scoring_func"] = "sigmoid";
  object["topk_method"] = "noaux_tc";
  // Overwritten where there are some; without the keys transformers takes ids of its own.
  for (const char* id : {"bos_token_id", "eos_token_id"}) object[id] = nullptr;
}

void describe_glm4_moe_lite(const ModelConfig& config, boost::json::object& object) {
  describe_deepseek_v3(config, object);
  boost::json::array types;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) types.emplace_back(config.is_sparse(layer) ? "sparse" : "dense");
  object["mlp_layer_types"] = std::move(types);
}

}  // namespace

const Family kDeepseekV3Family{.model_type = "deepseek_v3",
                               .architecture = "DeepseekV3ForCausalLM",
                               .configure = configure_deepseek_v3,
                               .describe = describe_deepseek_v3,
                               .max_position = 4096,
                               .mtp = MtpNames::kNextLayer,
                               .has_latent_attention = true};
const Family kKimiK2Family{.model_type = "kimi_k2",
                           .architecture = "DeepseekV3ForCausalLM",
                           .configure = configure_deepseek_v3,
                           .describe = describe_deepseek_v3,
                           .max_position = 4096,
                           .mtp = MtpNames::kNextLayer,
                           .has_latent_attention = true};
const Family kGlm4MoeLiteFamily{.model_type = "glm4_moe_lite",
                                .architecture = "Glm4MoeLiteForCausalLM",
                                .configure = configure_glm4_moe_lite,
                                .describe = describe_glm4_moe_lite,
                                .rms_norm_eps = 1e-5,
                                .max_position = 202752,
                                .mtp = MtpNames::kNextLayer,
                                .has_latent_attention = true};

}  // namespace prl::nn
