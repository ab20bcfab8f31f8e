#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/experts.hpp"

// Qwen 3 mixture of experts: Qwen 3's attention, and a router with experts in place of every MLP.
namespace prl::nn {
namespace {

/// All checkpoints of this type have experts in every layer; others would have layers that differ.
void refuse_dense_layers(const ConfigReader& reader) {
  if (reader.integer("decoder_sparse_step", 1, 0, 1 << 20) != 1)
    fail(ErrorCode::kNotImplemented, "{}: key 'decoder_sparse_step' is not 1; this build has experts in every layer", reader.subject());
  if (!reader.ids("mlp_only_layers").empty())
    fail(ErrorCode::kNotImplemented, "{}: key 'mlp_only_layers' is not empty; this build has experts in every layer", reader.subject());
}

void configure_qwen3_moe(const ConfigReader& reader, ModelConfig& config) {
  kQwen3Family.configure(reader, config);
  config.num_experts = reader.integer("num_experts", reader.integer("num_local_experts", 128, 1, ops::kMaxExperts), 1, ops::kMaxExperts);
  config.num_active_experts = reader.integer("num_experts_per_tok", 8, 1, ops::kMaxActiveExperts);
  config.expert_size = reader.integer("moe_intermediate_size", 768, 1, 1 << 24);
  config.norm_topk_prob = reader.boolean("norm_topk_prob", false);
  refuse_dense_layers(reader);
  if (config.num_active_experts > config.num_experts)
    fail(ErrorCode::kCorrupt, "{}: key 'num_experts_per_tok' is {}, more than the {} of 'num_experts'", reader.subject(),
         config.num_active_experts, config.num_experts);
}

void describe_qwen3_moe(const ModelConfig& config, boost::json::object& object) {
  kQwen3Family.describe(config, object);
  object["decoder_sparse_step"] = 1;
  object["mlp_only_layers"] = boost::json::array();
  object["moe_intermediate_size"] = config.expert_size;
  object["norm_topk_prob"] = config.norm_topk_prob;
  object["num_experts"] = config.num_experts;
  object["num_experts_per_tok"] = config.num_active_experts;
  object["output_router_logits"] = false;
  object["router_aux_loss_coef"] = 0.001;
}

}  // namespace

const Family kQwen3MoeFamily{"qwen3_moe", "Qwen3MoeForCausalLM", configure_qwen3_moe, describe_qwen3_moe};

}  // namespace prl::nn
