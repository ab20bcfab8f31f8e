#include "base/error.hpp"
#include "nn/models/family.hpp"

// DeepSeek-V2-Lite and DeepSeek-Coder-V2-Lite: latent attention, the first layers dense, and in the others experts that one softmax over
// all chooses beside shared ones. The large models of the series choose experts within groups, which this build does not.
namespace prl::nn {
namespace {

void configure_deepseek_v2(const ConfigReader& reader, ModelConfig& config) {
  read_latent_attention(reader, {.query_rank = 1536, .kv_rank = 512, .plain_dim = 128, .rotary_dim = 64, .value_dim = 128}, config);
  reader.require_string("scoring_func", "softmax", "softmax");
  reader.require_string("topk_method", "greedy", "greedy");
  if (reader.boolean("norm_topk_prob", false))
    fail(ErrorCode::kNotImplemented, "{}: key 'norm_topk_prob' is true; models of type 'deepseek_v2' weigh experts by the softmax itself",
         reader.subject());
  config.mlp_bias = reader.boolean("mlp_bias", false);
  read_scored_experts(reader, {.num_experts = 64, .num_active = 6, .size = 1407, .num_shared = 2}, config);
  if (config.routed_scale != 1.0)
    fail(ErrorCode::kNotImplemented, "{}: key 'routed_scaling_factor' is {}; models of type 'deepseek_v2' have 1 in this build",
         reader.subject(), config.routed_scale);
  config.has_score_router = false;
  config.norm_topk_prob = false;
  config.num_expert_groups = config.num_active_groups = 1;  // without a meaning where 'topk_method' is greedy
}

void describe_deepseek_v2(const ModelConfig& config, boost::json::object& object) {
  describe_latent_attention(config, object);
  object.erase("rope_interleave");
  describe_scored_experts(config, object);
  object.erase("num_nextn_predict_layers");
  object["moe_layer_freq"] = 1;
  object["scoring_func"] = "softmax";
  object["topk_method"] = "greedy";
  for (const char* id : {"bos_token_id", "eos_token_id"}) object[id] = nullptr;
}

}  // namespace

const Family kDeepseekV2Family{.model_type = "deepseek_v2",
                               .architecture = "DeepseekV2ForCausalLM",
                               .configure = configure_deepseek_v2,
                               .describe = describe_deepseek_v2,
                               .has_latent_attention = true};

}  // namespace prl::nn
