#include <algorithm>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/experts.hpp"

// Qwen 3 mixture of experts: Qwen 3's attention, and a router with experts in place of MLPs.
namespace prl::nn {
namespace {

/// Layers that are named as such, and those between every so many.
std::vector<std::int64_t> read_dense_layers(const ConfigReader& reader, std::int64_t num_layers) {
  const std::int64_t step = reader.integer("decoder_sparse_step", 1, 1, 1 << 20);
  const std::vector<std::int32_t> named = reader.ids("mlp_only_layers");
  std::vector<std::int64_t> dense;
  for (std::int64_t layer = 0; layer < num_layers; ++layer)
    if ((layer + 1) % step != 0 || std::ranges::find(named, layer) != named.end()) dense.push_back(layer);
  if (static_cast<std::int64_t>(dense.size()) == num_layers)
    fail(ErrorCode::kNotImplemented, "{}: keys 'decoder_sparse_step' and 'mlp_only_layers' leave none of {} layers with experts",
         reader.subject(), num_layers);
  return dense;
}

void configure_qwen3_moe(const ConfigReader& reader, ModelConfig& config) {
  read_qwen3_attention(reader, config);
  read_common_window(reader, /*without=*/4096, /*is_switched=*/true, config);
  config.num_experts = reader.integer("num_experts", reader.integer("num_local_experts", 128, 1, ops::kMaxExperts), 1, ops::kMaxExperts);
  config.num_active_experts = reader.integer("num_experts_per_tok", 8, 1, ops::kMaxActiveExperts);
  config.expert_size = reader.integer("moe_intermediate_size", 768, 1, 1 << 24);
  config.norm_topk_prob = reader.boolean("norm_topk_prob", false);
  config.dense_layers = read_dense_layers(reader, config.num_layers);
  if (config.num_active_experts > config.num_experts)
    fail(ErrorCode::kCorrupt, "{}: key 'num_experts_per_tok' is {}, more than the {} of 'num_experts'", reader.subject(),
         config.num_active_experts, config.num_experts);
}

void describe_qwen3_moe(const ModelConfig& config, boost::json::object& object) {
  kQwen3Family.describe(config, object);
  object["decoder_sparse_step"] = 1;
  object["mlp_only_layers"] = boost::json::array(config.dense_layers.begin(), config.dense_layers.end());
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
