#include "base/error.hpp"
#include "nn/models/family.hpp"

// MiniMax-M2: in every layer attention with norms of q and k over all heads at once, of whose elements a part is rotated, and experts that
// sigmoids with a bias choose, under Mixtral's names.
namespace prl::nn {
namespace {

/// The first elements of a head that are rotated, as older files say it: a partial_rotary_factor wins, wherever it stands.
void read_rotary_dim(const ConfigReader& reader, ModelConfig& config) {
  if (!reader.has("rotary_dim") || reader.has("partial_rotary_factor")) return;
  std::optional<ConfigReader> rope = reader.object("rope_scaling");
  if (!rope || rope->empty()) rope = reader.object("rope_parameters");
  if (rope && rope->has("partial_rotary_factor")) return;
  const std::int64_t rotary_dim = reader.integer("rotary_dim", std::nullopt, 2, config.head_dim);
  config.partial_rotary_factor = static_cast<double>(rotary_dim) / static_cast<double>(config.head_dim);
}

/// Keys of the published files that transformers does not read, as all models have the same there. Anything else would be another model.
void refuse_other_layers(const ConfigReader& reader) {
  reader.require_string("scoring_func", "sigmoid", "sigmoid");
  reader.require_string("qk_norm_type", "per_layer", "per_layer");
  for (const char* key : {"norm_topk_prob", "use_qk_norm", "use_routing_bias"})
    if (!reader.boolean(key, true))
      fail(ErrorCode::kNotImplemented, "{}: key '{}' is false; models of type 'minimax_m2' have it in this build", reader.subject(), key);
  if (const std::int64_t width = reader.integer("shared_intermediate_size", 0, 0, 1 << 24); width != 0)
    fail(ErrorCode::kNotImplemented, "{}: key 'shared_intermediate_size' is {}; models of type 'minimax_m2' have no shared experts here",
         reader.subject(), width);
  for (const std::int32_t type : reader.ids("attn_type_list"))
    if (type != 1)
      fail(ErrorCode::kNotImplemented, "{}: key 'attn_type_list': {}; this build has softmax attention (1) in all layers", reader.subject(),
           type);
  if (reader.has("sliding_window"))
    fail(ErrorCode::kNotImplemented, "{}: key 'sliding_window': models of type 'minimax_m2' have full attention only", reader.subject());
  for (const char* key : {"layernorm_full_attention_beta", "layernorm_mlp_beta"})
    if (const double beta = reader.number(key, 1.0, -1e6, 1e6); beta != 1.0)
      fail(ErrorCode::kNotImplemented, "{}: key '{}' is {}; 1 is wanted", reader.subject(), key, beta);
}

void configure_minimax_m2(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", 128, 2, 1024);
  read_rotary_dim(reader, config);
  refuse_other_layers(reader);
  refuse_dropout(reader, {"attention_dropout", "router_jitter_noise"});
  config.qk_norm = true;
  config.qk_norm_is_whole = true;
  config.has_score_router = true;
  read_numbered_experts(reader, /*num_experts=*/256, /*num_active=*/8, config);
  if (reader.boolean("use_mtp", true)) config.num_skipped_layers = reader.integer("num_mtp_modules", 0, 0, 64);
}

void describe_minimax_m2(const ModelConfig& config, boost::json::object& object) {
  object["num_experts_per_tok"] = config.num_active_experts;
  object["num_local_experts"] = config.num_experts;
  object["num_mtp_modules"] = 0;  // those of a model that was read were not
  object["output_router_logits"] = false;
  object["qk_norm_type"] = "per_layer";
  object["rotary_dim"] = config.rotary_dim();
  object["router_aux_loss_coef"] = 0.001;
  object["router_jitter_noise"] = 0.0;
  object["scoring_func"] = "sigmoid";
  object["use_qk_norm"] = true;
  object["use_routing_bias"] = true;
  // Overwritten where there are some; without the keys transformers takes ids of MiniMax-M2's own vocabulary.
  for (const char* id : {"bos_token_id", "eos_token_id"}) object[id] = nullptr;
}

}  // namespace

const Family kMiniMaxM2Family{.model_type = "minimax_m2",
                              .architecture = "MiniMaxM2ForCausalLM",
                              .configure = configure_minimax_m2,
                              .describe = describe_minimax_m2,
                              .rope_theta = 5000000.0,
                              .max_position = 196608,
                              .num_kv_heads = 8,
                              .rotates_parts = true};

}  // namespace prl::nn
