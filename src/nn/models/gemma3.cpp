#include <cmath>

#include "base/error.hpp"
#include "nn/models/family.hpp"

// Gemma 3 for text: norms of what attention and MLP take and give, and of each head, all by 1 + weight; MLPs gated by GELU; scaled
// embeddings; windows in five of six layers, whose heads rotate by a base of their own.
namespace prl::nn {
namespace {

/// All but every so many layers, where `layer_types` says nothing.
std::vector<std::int64_t> windowed_by_pattern(const ConfigReader& reader, std::int64_t num_layers) {
  const std::int64_t pattern = reader.integer("sliding_window_pattern", 6, 1, 4096);
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < num_layers; ++layer)
    if ((layer + 1) % pattern != 0) layers.push_back(layer);
  return layers;
}

void refuse_other_models(const ConfigReader& reader) {
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"})
    if (reader.has(key))
      fail(ErrorCode::kNotImplemented, "{}: key '{}' is not null; this build has scores and logits without caps", reader.subject(), key);
  if (reader.boolean("use_bidirectional_attention", false))
    fail(ErrorCode::kNotImplemented, "{}: key 'use_bidirectional_attention' is true; this build has causal attention only",
         reader.subject());
  refuse_dropout(reader, {"attention_dropout"});
}

void configure_gemma3(const ConfigReader& reader, ModelConfig& config) {
  refuse_other_models(reader);
  config.head_dim = reader.integer("head_dim", 256, 2, 1024);
  config.score_scale = 1.0 / std::sqrt(reader.number("query_pre_attn_scalar", 256.0, 1e-6, 1e9));
  config.attention_bias = config.attention_out_bias = reader.boolean("attention_bias", false);
  config.qk_norm = config.norms_outputs = config.norms_add_one = config.has_gelu_mlps = true;
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  config.rounds_embedding_scale = true;
  if (!config.window_rope_theta) config.window_rope_theta = kGemma3Family.window_rope_theta;  // of models made here
  // Layers whose window holds all positions rotate by their own base all the same. transformers computes nothing with null.
  read_window(
      reader,
      {.without = 4096, .of_null = config.max_position, .is_switched = false, .layers = windowed_by_pattern(reader, config.num_layers)},
      config);
}

void describe_gemma3(const ModelConfig& config, boost::json::object& object) {
  object["attention_bias"] = config.attention_bias;
  object["query_pre_attn_scalar"] = std::llround(1.0 / (config.score_scale * config.score_scale));
  object["rope_local_base_freq"] = *config.window_rope_theta;
  if (config.window > 0)
    describe_window(config, {.is_switched = false}, object);
  else
    object["layer_types"] = boost::json::array(static_cast<std::size_t>(config.num_layers), boost::json::string_view(kFullAttention));
  // Overwritten where there are some; without the keys transformers takes ids of Gemma's own vocabulary.
  for (const char* id : {"bos_token_id", "eos_token_id", "pad_token_id"}) object[id] = nullptr;
}

}  // namespace

const Family kGemma3Family{.model_type = "gemma3_text",
                           .architecture = "Gemma3ForCausalLM",
                           .configure = configure_gemma3,
                           .describe = describe_gemma3,
                           .rope_theta = 1e6,
                           .tie_word_embeddings = true,
                           .max_position = 131072,
                           .num_kv_heads = 4,
                           .num_heads = 8,
                           .vocab_size = 262208,
                           .window_rope_theta = 1e4,
                           .activation_key = "hidden_activation",
                           .activation = "gelu_pytorch_tanh",
                           .has_layer_ropes = true,
                           .multimodal_type = "gemma3"};

}  // namespace prl::nn
