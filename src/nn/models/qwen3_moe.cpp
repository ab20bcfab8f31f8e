#include <algorithm>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/experts.hpp"

// Qwen 3 mixture of experts: Qwen 3's attention, and a router with experts in place of MLPs.
namespace prl::nn {
/// Those that are named as such, and those between every so many.
void read_sparse_layers(const ConfigReader& reader, ModelConfig& config) {
  const std::int64_t step = reader.integer("decoder_sparse_step", 1, 1, 1 << 20);
  const std::vector<std::int32_t> named = reader.ids("mlp_only_layers");
  std::vector<std::int64_t>& dense = config.dense_layers;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    if ((layer + 1) % step != 0 || std::ranges::find(named, layer) != named.end()) dense.push_back(layer);
  if (static_cast<std::int64_t>(dense.size()) == config.num_layers)
    fail(ErrorCode::kNotImplemented, "{}: keys 'decoder_sparse_step' and 'mlp_only_layers' leave none of {} layers with experts",
         reader.subject(), config.num_layers);
}

void read_softmax_experts(const ConfigReader& reader, const SoftmaxExperts& without, bool has_shared, ModelConfig& config) {
  config.num_experts =
      reader.integer("num_experts", reader.integer("num_local_experts", without.num_experts, 1, ops::kMaxExperts), 1, ops::kMaxExperts);
  config.num_active_experts = reader.integer("num_experts_per_tok", without.num_active, 1, ops::kMaxActiveExperts);
  config.expert_size = reader.integer("moe_intermediate_size", without.size, 1, 1 << 24);
  config.gates_shared_expert = has_shared;
  if (has_shared) config.shared_expert_size = reader.integer("shared_expert_intermediate_size", without.size, 1, 1 << 24);
  if (config.num_active_experts > config.num_experts)
    fail(ErrorCode::kCorrupt, "{}: key 'num_experts_per_tok' is {}, more than the {} of 'num_experts'", reader.subject(),
         config.num_active_experts, config.num_experts);
}

void describe_softmax_experts(const ModelConfig& config, boost::json::object& object) {
  object["moe_intermediate_size"] = config.expert_size;
  object["num_experts"] = config.num_experts;
  object["num_experts_per_tok"] = config.num_active_experts;
  object["output_router_logits"] = false;
  object["router_aux_loss_coef"] = 0.001;
  if (config.gates_shared_expert) object["shared_expert_intermediate_size"] = config.shared_expert_size;
}

namespace {

void configure_qwen3_moe(const ConfigReader& reader, ModelConfig& config) {
  read_qwen3_attention(reader, config);
  read_common_window(reader, /*without=*/4096, /*is_switched=*/true, config);
  read_softmax_experts(reader, {.num_experts = 128, .num_active = 8, .size = 768}, /*has_shared=*/false, config);
  config.norm_topk_prob = reader.boolean("norm_topk_prob", false);
  read_sparse_layers(reader, config);
}

void describe_qwen3_moe(const ModelConfig& config, boost::json::object& object) {
  kQwen3Family.describe(config, object);
  describe_softmax_experts(config, object);
  object["decoder_sparse_step"] = 1;
  object["mlp_only_layers"] = boost::json::array(config.dense_layers.begin(), config.dense_layers.end());
  object["norm_topk_prob"] = config.norm_topk_prob;
}

}  // namespace

const Family kQwen3MoeFamily{"qwen3_moe", "Qwen3MoeForCausalLM", configure_qwen3_moe, describe_qwen3_moe};

}  // namespace prl::nn
