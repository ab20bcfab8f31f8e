#include "nn/models/family.hpp"

// Qwen3-Next (Qwen3-Next-80B-A3B, Qwen3-Coder-Next): what Qwen 3.5 with experts is, but for dense layers that it may have and for how files
// hold experts and the projections of linear attention.
namespace prl::nn {
namespace {

void configure_qwen3_next(const ConfigReader& reader, ModelConfig& config) {
  read_gated_layers(reader, config);
  config.linear.fuses_projections = true;
  read_softmax_experts(reader, {.num_experts = 512, .num_active = 10, .size = 512}, /*has_shared=*/true, config);
  config.norm_topk_prob = reader.boolean("norm_topk_prob", true);
  read_sparse_layers(reader, config);
}

void describe_qwen3_next(const ModelConfig& config, boost::json::object& object) {
  describe_gated_layers(config, object);
  describe_softmax_experts(config, object);
  object["decoder_sparse_step"] = 1;
  object["mlp_only_layers"] = boost::json::array(config.dense_layers.begin(), config.dense_layers.end());
  object["norm_topk_prob"] = config.norm_topk_prob;
}

}  // namespace

const Family kQwen3NextFamily{.model_type = "qwen3_next",
                              .architecture = "Qwen3NextForCausalLM",
                              .configure = configure_qwen3_next,
                              .describe = describe_qwen3_next,
                              .partial_rotary_factor = 0.25,
                              .max_position = 32768,
                              .num_kv_heads = 2,
                              .rotates_parts = true,
                              .drops_mtp = true,
                              .mtp = MtpNames::kApart};

}  // namespace prl::nn
