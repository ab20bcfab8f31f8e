#include "base/error.hpp"
#include "nn/models/family.hpp"

// Qwen 3.5 with experts, the model for text: the layers of the dense one, with a router, experts and a shared expert in place of MLPs.
namespace prl::nn {
namespace {

void configure_qwen3_5_moe(const ConfigReader& reader, ModelConfig& config) {
  read_gated_layers(reader, config);
  read_softmax_experts(reader, {.num_experts = 256, .num_active = 8, .size = 512}, /*has_shared=*/true, config);
  config.norm_topk_prob = true;
  config.expert_names = ExpertNames::kStackedRows;
  config.intermediate_size = config.expert_size;  // of no layer
  read_sparse_layers(reader, config);
  if (!config.dense_layers.empty())
    fail(ErrorCode::kNotImplemented,
         "{}: keys 'decoder_sparse_step' and 'mlp_only_layers' leave layers without experts; models of type '{}' have them in all layers",
         reader.subject(), config.model_type);
}

void describe_qwen3_5_moe(const ModelConfig& config, boost::json::object& object) {
  describe_gated_layers(config, object);
  describe_softmax_experts(config, object);
  object.erase("intermediate_size");
}

}  // namespace

const Family kQwen35MoeFamily{.model_type = "qwen3_5_moe_text",
                              .architecture = "Qwen3_5MoeForCausalLM",
                              .configure = configure_qwen3_5_moe,
                              .describe = describe_qwen3_5_moe,
                              .partial_rotary_factor = 0.25,
                              .max_position = 32768,
                              .num_kv_heads = 2,
                              .rotates_parts = true,
                              .multimodal_type = "qwen3_5_moe",
                              .has_vision_tower = true,
                              .drops_mtp = true,
                              .mtp = MtpNames::kApart,
                              .has_dense_mlps = false};

}  // namespace prl::nn
