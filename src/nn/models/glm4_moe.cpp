#include <numeric>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/experts.hpp"

// GLM-4.5, GLM-4.5-Air and what is trained from them (INTELLECT-3): a part of each head is rotated, the first layers are dense, and in the
// others experts chosen by sigmoids stand beside shared ones.
namespace prl::nn {

void read_scored_experts(const ConfigReader& reader, const ScoredExperts& without, ModelConfig& config) {
  config.has_score_router = true;
  config.num_experts = reader.integer("n_routed_experts", reader.integer("num_local_experts", without.num_experts, 1, ops::kMaxExperts), 1,
                                      ops::kMaxExperts);
  config.num_active_experts = reader.integer("num_experts_per_tok", without.num_active, 1, ops::kMaxActiveExperts);
  config.expert_size = reader.integer("moe_intermediate_size", without.size, 1, 1 << 24);
  config.shared_expert_size = reader.integer("n_shared_experts", without.num_shared, 0, 1 << 10) * config.expert_size;
  config.norm_topk_prob = reader.boolean("norm_topk_prob", true);
  config.routed_scale = reader.number("routed_scaling_factor", without.scale, 0.0, 1e6);
  config.num_expert_groups = reader.integer("n_group", without.num_groups, 1, config.num_experts);
  config.num_active_groups = reader.integer("topk_group", without.num_active_groups, 1, config.num_expert_groups);
  const std::int64_t of_group = config.num_experts / config.num_expert_groups;
  if (config.num_experts % config.num_expert_groups != 0 || of_group < 2)
    fail(ErrorCode::kCorrupt,
         "{}: key 'n_group' is {}: wanted groups of the same size, two experts or more, of the {} of 'n_routed_experts'", reader.subject(),
         config.num_expert_groups, config.num_experts);
  if (config.num_active_experts > config.num_active_groups * of_group)
    fail(ErrorCode::kCorrupt, "{}: key 'num_experts_per_tok' is {}, more than the {} experts of {} groups of {} ('topk_group', 'n_group')",
         reader.subject(), config.num_active_experts, config.num_active_groups * of_group, config.num_active_groups, of_group);
  config.dense_layers.resize(static_cast<std::size_t>(reader.integer("first_k_dense_replace", without.num_dense, 0, 4096)));
  if (static_cast<std::int64_t>(config.dense_layers.size()) >= config.num_layers)
    fail(ErrorCode::kNotImplemented, "{}: key 'first_k_dense_replace' is {}, which leaves none of {} layers with experts", reader.subject(),
         config.dense_layers.size(), config.num_layers);
  if (const std::int64_t step = reader.integer("moe_layer_freq", 1, 1, 1 << 20); step != 1)
    fail(ErrorCode::kNotImplemented, "{}: key 'moe_layer_freq' is {}; this build has experts in every layer that is not dense: 1",
         reader.subject(), step);
  std::iota(config.dense_layers.begin(), config.dense_layers.end(), 0);
  config.num_skipped_layers = reader.integer("num_nextn_predict_layers", reader.integer("num_mtp_layers", 0, 0, 64), 0, 64);
}

void describe_scored_experts(const ModelConfig& config, boost::json::object& object) {
  object["first_k_dense_replace"] = config.dense_layers.size();
  object["moe_intermediate_size"] = config.expert_size;
  object["n_group"] = config.num_expert_groups;
  object["n_routed_experts"] = config.num_experts;
  object["n_shared_experts"] = config.shared_expert_size / config.expert_size;
  object["norm_topk_prob"] = config.norm_topk_prob;
  object["num_experts_per_tok"] = config.num_active_experts;
  object["num_nextn_predict_layers"] = 0;  // those of a model that was read were not
  object["routed_scaling_factor"] = config.routed_scale;
  object["topk_group"] = config.num_active_groups;
}

namespace {

void configure_glm4_moe(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  config.attention_bias = reader.boolean("attention_bias", false);
  config.qk_norm = reader.boolean("use_qk_norm", false);
  refuse_dropout(reader, {"attention_dropout"});
  read_scored_experts(reader, {.num_experts = 128, .num_active = 8, .size = 1408, .num_dense = 1}, config);
}

void describe_glm4_moe(const ModelConfig& config, boost::json::object& object) {
  describe_scored_experts(config, object);
  object["attention_bias"] = config.attention_bias;
  object["partial_rotary_factor"] = config.partial_rotary_factor;
  object["use_qk_norm"] = config.qk_norm;
}

}  // namespace

const Family kGlm4MoeFamily{.model_type = "glm4_moe",
                            .architecture = "Glm4MoeForCausalLM",
                            .configure = configure_glm4_moe,
                            .describe = describe_glm4_moe,
                            .partial_rotary_factor = 0.5,
                            .rotates_parts = true,
                            .mtp = MtpNames::kNextLayer};

}  // namespace prl::nn
