#include <cmath>
#include <string>

#include "nn/init_model.hpp"
#include "nn/model_config_test_fixture.hpp"

namespace prl::nn {
namespace {
using ::testing::ElementsAre;

class Gemma3ConfigTest : public ModelConfigTest {};

// The config.json of gemma-3-1b-it.
constexpr const char* kGemma3 = R"({
  "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "attn_logit_softcapping": null,
  "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912,
  "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
  "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
  "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144})";

// That of gemma-3-4b-it, without its part for images.
constexpr const char* kGemma3Multimodal = R"({
  "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
  "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3", "text_config": {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
  "torch_dtype": "float16", "transformers_version": "4.50.0.dev0", "vision_config": {"model_type": "siglip_vision_model"}})";

// Numbers of parameters are those of transformers 5.24.
TEST_F(Gemma3ConfigTest, PublishedFile) {
  const ModelConfig config = load(kGemma3);
  EXPECT_EQ(config.num_parameters(), 999885952);
  EXPECT_TRUE(config.norms_inputs && config.norms_outputs && config.norms_add_one && config.qk_norm && config.has_gelu_mlps);
  EXPECT_TRUE(config.tie_word_embeddings && !config.attention_bias && !config.attention_out_bias && config.rounds_embedding_scale);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.score_scale, 1.0 / 16.0);
  EXPECT_EQ(config.embedding_scale, std::sqrt(1152.0));
  EXPECT_EQ(config.window, 512);
  EXPECT_EQ(config.windowed_layers.size(), 22u);
  EXPECT_FALSE(config.is_windowed(5));
  EXPECT_FALSE(config.is_windowed(23));
  EXPECT_TRUE(config.is_windowed(25));
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.window_rope_theta, 1e4);
  EXPECT_THAT(config.eos_ids, ElementsAre(1, 106));
}

TEST_F(Gemma3ConfigTest, ThePartForTextOfAModelForImages) {
  const ModelConfig config = load(kGemma3Multimodal);
  EXPECT_EQ(config.model_type, "gemma3_text");
  EXPECT_EQ(config.num_parameters(), 3880263168);
  EXPECT_EQ(config.vocab_size, 262208);
  EXPECT_EQ(config.num_heads, 8);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.max_position, 131072);
  EXPECT_EQ(config.rope_divisor, 8.0);
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.window_rope_theta, 1e4);
  EXPECT_EQ(config.torch_dtype, "float16");
  EXPECT_THAT(config.eos_ids, ElementsAre(1, 106));
  EXPECT_EQ(load(config.raw_json).num_parameters(), config.num_parameters()) << "what is saved is a model for text";
  const ModelConfig large = load(
      edit(kGemma3Multimodal, R"("hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34)",
           R"("head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text", "num_attention_heads": 32,
         "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168)"));
  EXPECT_EQ(large.num_parameters(), 27009346304);
  EXPECT_NEAR(large.score_scale, 1.0 / std::sqrt(168.0), 1e-12);
}

// As transformers 5.24 reads them.
TEST_F(Gemma3ConfigTest, RotaryKeys) {
  const auto with = [](const std::string& keys) {
    return edit(kGemma3, R"("rope_local_base_freq": 10000,
  "rope_scaling": null, "rope_theta": 1000000)",
                keys);
  };
  const ModelConfig none = load(with(R"("rope_scaling": null)"));
  EXPECT_EQ(none.rope_theta, 1e6);
  EXPECT_EQ(none.window_rope_theta, 1e4);
  const ModelConfig tables = load(with(R"("rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
                                          "rope_theta": 3e5, "rope_local_base_freq": 2e4)"));
  EXPECT_EQ(tables.rope_divisor, 8.0);
  EXPECT_EQ(tables.rope_theta, 3e5);
  EXPECT_EQ(tables.window_rope_theta, 2e4);
  const ModelConfig both = load(with(
      R"("rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7e5},
         "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}, "rope_theta": 3e5, "rope_local_base_freq": 2e4)"));
  EXPECT_EQ(both.rope_divisor, 8.0);
  EXPECT_EQ(both.rope_theta, 7e5);
  EXPECT_EQ(both.window_rope_theta, 5e3);
  expect_error(with(R"("rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}})"), ErrorCode::kNotImplemented,
               "rope_type");
}

TEST_F(Gemma3ConfigTest, WhatIsRefusedOrSupported) {
  const auto replaced = [](const std::string& key, const std::string& from, const std::string& to) {
    return edit(kGemma3, "\"" + key + "\": " + from, "\"" + key + "\": " + to);
  };
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"})
    expect_error(replaced(key, "null", "30.0"), ErrorCode::kNotImplemented, key);
  expect_error(replaced("use_cache", "true", R"(true, "use_bidirectional_attention": true)"), ErrorCode::kNotImplemented,
               "use_bidirectional_attention");
  expect_error(replaced("hidden_activation", R"("gelu_pytorch_tanh")", R"("silu")"), ErrorCode::kNotImplemented, "hidden_activation");
  expect_error(replaced("attention_dropout", "0.0", "0.1"), ErrorCode::kNotImplemented, "attention_dropout");
  const ModelConfig biased = load(replaced("attention_bias", "false", "true"));
  EXPECT_TRUE(biased.attention_bias && biased.attention_out_bias);
  // Layers with a window that holds all positions have their own rotary base all the same.
  for (const char* window : {"32768", "null"}) EXPECT_EQ(load(replaced("sliding_window", "512", window)).windowed_layers.size(), 22u);
  EXPECT_EQ(load(replaced("sliding_window_pattern", "6", "2")).windowed_layers.size(), 13u);
  EXPECT_EQ(load(edit(kGemma3, "\"sliding_window\": 512,", "")).window, 4096);
}

TEST_F(Gemma3ConfigTest, ModelsMadeHereReadBack) {
  for (const std::int64_t num_layers : {1, 2, 7})
    for (const std::int64_t window : {0, 100}) {
      if (num_layers == 1 && window > 0) continue;  // which has none
      InitModelOptions options;
      options.family = "gemma3_text";
      options.num_layers = num_layers;
      options.sliding_window = window;
      options.head_dim = 32;
      ModelConfig made = make_model_config(options);
      made.rope_divisor = 4.0;
      const ModelConfig read = load(to_config_json(made));
      EXPECT_EQ(read.windowed_layers, made.windowed_layers);
      EXPECT_EQ(read.window, made.window);
      EXPECT_EQ(read.window_rope_theta, made.window_rope_theta);
      EXPECT_EQ(read.score_scale, made.score_scale);
      EXPECT_EQ(read.score_scale, 1.0 / std::sqrt(32.0));
      EXPECT_EQ(read.rope_divisor, 4.0);
      EXPECT_TRUE(read.has_gelu_mlps && read.norms_add_one);
    }
}

}  // namespace
}  // namespace prl::nn
