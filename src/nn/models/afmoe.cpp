#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/experts.hpp"

// AFMoE (Arcee Trinity): norms of what attention and MLP take and give, heads with gates of their own matrix, windows in three of four
// layers, which alone rotate, and behind dense layers experts chosen by sigmoids with a bias, beside shared ones.
namespace prl::nn {
namespace {

constexpr std::string_view kSlidingLayer = "sliding_attention";

/// Where `layer_types` says nothing: all but every so many have windows.
std::vector<std::int64_t> windowed_by_interval(const ConfigReader& reader, std::int64_t num_layers) {
  const std::int64_t interval = reader.integer("global_attn_every_n_layers", 4, 1, 1 << 20);
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < num_layers; ++layer)
    if ((layer + 1) % interval != 0) layers.push_back(layer);
  return layers;
}

void read_layer_kinds(const ConfigReader& reader, ModelConfig& config) {
  std::vector<std::int64_t> windowed = windowed_by_interval(reader, config.num_layers);
  if (const std::vector<std::string> types = read_layer_types(reader, config.num_layers, kSlidingLayer); !types.empty())
    windowed = layers_of_type(types, kSlidingLayer);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    if (std::ranges::find(windowed, layer) == windowed.end()) config.unrotated_layers.push_back(layer);
  read_window(reader, {.without = 1024, .is_switched = false, .layers = std::move(windowed)}, config);
}

void read_token_choice_experts(const ConfigReader& reader, ModelConfig& config) {
  config.has_score_router = true;
  config.num_experts = reader.integer("num_experts", 64, 1, ops::kMaxExperts);
  config.num_active_experts = reader.integer("num_experts_per_tok", 6, 1, ops::kMaxActiveExperts);
  if (config.num_active_experts > config.num_experts)
    fail(ErrorCode::kCorrupt, "{}: key 'num_experts_per_tok' is {}, more than the {} of 'num_experts'", reader.subject(),
         config.num_active_experts, config.num_experts);
  config.expert_size = reader.integer("moe_intermediate_size", 1408, 1, 1 << 24);
  config.shared_expert_size = reader.integer("num_shared_experts", 2, 1, 1 << 10) * config.expert_size;
  config.expert_names = ExpertNames::kTokenChoice;
  config.norm_topk_prob = true;
  config.routed_scale = reader.number("route_scale", 1.0, 0.0, 1e6);
  config.dense_layers.resize(static_cast<std::size_t>(reader.integer("num_dense_layers", 1, 0, 4096)));
  if (static_cast<std::int64_t>(config.dense_layers.size()) >= config.num_layers)
    fail(ErrorCode::kNotImplemented, "{}: key 'num_dense_layers' is {}, which leaves none of {} layers with experts", reader.subject(),
         config.dense_layers.size(), config.num_layers);
  std::iota(config.dense_layers.begin(), config.dense_layers.end(), 0);
}

/// Keys of the published files that transformers does not read, as all models have the same there. Anything else would be another model.
void refuse_other_routers(const ConfigReader& reader) {
  reader.require_string("score_func", "sigmoid", "sigmoid");
  if (!reader.boolean("route_norm", true))
    fail(ErrorCode::kNotImplemented, "{}: key 'route_norm' is false; weights of a token's experts are divided by their sum here",
         reader.subject());
  for (const char* key : {"num_expert_groups", "num_limited_groups", "n_group", "topk_group"})
    if (const std::int64_t groups = reader.integer(key, 1, 0, ops::kMaxExperts); groups > 1)
      fail(ErrorCode::kNotImplemented, "{}: key '{}' is {}; models of type 'afmoe' have experts without groups in this build",
           reader.subject(), key, groups);
}

void configure_afmoe(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", reader.names("head_dim") ? config.hidden_size / config.num_heads : 128, 2, 1024);
  if (reader.boolean("attention_bias", false))
    fail(ErrorCode::kNotImplemented, "{}: key 'attention_bias' is true; models of type 'afmoe' have no biases in this build",
         reader.subject());
  refuse_dropout(reader, {"attention_dropout"});
  refuse_other_routers(reader);
  config.qk_norm = config.gates_heads = config.gates_are_apart = config.norms_outputs = true;
  if (reader.boolean("mup_enabled", false)) config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  read_layer_kinds(reader, config);
  read_token_choice_experts(reader, config);
}

void describe_afmoe(const ModelConfig& config, boost::json::object& object) {
  object["attention_bias"] = false;
  object["moe_intermediate_size"] = config.expert_size;
  object["mup_enabled"] = config.embedding_scale != 1.0;
  object["num_dense_layers"] = config.dense_layers.size();
  object["num_experts"] = config.num_experts;
  object["num_experts_per_tok"] = config.num_active_experts;
  object["num_shared_experts"] = config.shared_expert_size / config.expert_size;
  object["output_router_logits"] = false;
  object["route_norm"] = true;
  object["route_scale"] = config.routed_scale;
  object["score_func"] = "sigmoid";
  // Layers with a window that holds all positions rotate all the same.
  object["sliding_window"] = config.window > 0 ? config.window : config.max_position;
  boost::json::array types;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    types.emplace_back(boost::json::string_view(config.is_rotated(layer) ? kSlidingLayer : kFullAttention));
  object["layer_types"] = std::move(types);
}

}  // namespace

const Family kAfmoeFamily{.model_type = "afmoe",
                          .architecture = "AfmoeForCausalLM",
                          .configure = configure_afmoe,
                          .describe = describe_afmoe,
                          .rms_norm_eps = 1e-5,
                          .max_position = 16384};

}  // namespace prl::nn
