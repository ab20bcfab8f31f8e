#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/experts.hpp"

// Mixtral 8x7B and 8x22B: Mistral's attention, and in every layer a router with experts in place of the MLP.
namespace prl::nn {
void read_numbered_experts(const ConfigReader& reader, std::int64_t num_experts, std::int64_t num_active, ModelConfig& config) {
  config.num_experts =
      reader.integer("num_local_experts", reader.integer("num_experts", num_experts, 1, ops::kMaxExperts), 1, ops::kMaxExperts);
  config.num_active_experts = reader.integer("num_experts_per_tok", num_active, 1, ops::kMaxActiveExperts);
  if (config.num_active_experts > config.num_experts)
    fail(ErrorCode::kCorrupt, "{}: key 'num_experts_per_tok' is {}, more than the {} of 'num_local_experts'", reader.subject(),
         config.num_active_experts, config.num_experts);
  config.expert_size = config.intermediate_size;
  config.expert_names = ExpertNames::kNumbered;
  config.norm_topk_prob = true;
}

namespace {

void configure_mixtral(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  read_common_window(reader, /*without=*/0, /*is_switched=*/false, config);
  refuse_dropout(reader, {"attention_dropout", "router_jitter_noise"});
  read_numbered_experts(reader, /*num_experts=*/8, /*num_active=*/2, config);
}

void describe_mixtral(const ModelConfig& config, boost::json::object& object) {
  object["num_experts_per_tok"] = config.num_active_experts;
  object["num_local_experts"] = config.num_experts;
  object["output_router_logits"] = false;
  object["router_aux_loss_coef"] = 0.001;
  object["router_jitter_noise"] = 0.0;
  describe_window(config, kOneWindow, object);
}

}  // namespace

const Family kMixtralFamily{.model_type = "mixtral",
                            .architecture = "MixtralForCausalLM",
                            .configure = configure_mixtral,
                            .describe = describe_mixtral,
                            .rope_theta = 1000000.0,
                            .rms_norm_eps = 1e-5,
                            .max_position = 131072,
                            .num_kv_heads = 8};

}  // namespace prl::nn
