// Configurations of MiniMax-M2 and AFMoE.
#include <cmath>

#include "nn/model_config_test_fixture.hpp"

namespace prl::nn {
namespace {
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The config.json of MiniMax-M2 as it is published, without the keys that say how its weights are quantised, and with four layers.
constexpr const char* kMiniMaxM2 = R"({
  "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1, 1, 1, 1], "bos_token_id": null,
  "eos_token_id": null, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 1536,
  "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
  "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
  "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 8, "num_local_experts": 256,
  "num_mtp_modules": 3, "output_router_logits": false, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000,
  "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
  "sliding_window": null, "tie_word_embeddings": false, "use_cache": true, "use_mtp": true, "use_qk_norm": true,
  "use_routing_bias": true, "vocab_size": 200064})";

TEST_F(ModelConfigTest, MiniMaxM2) {
  const ModelConfig config = load(kMiniMaxM2);
  EXPECT_TRUE(config.qk_norm && config.qk_norm_is_whole && !config.norms_outputs && !config.attention_bias);
  EXPECT_TRUE(config.has_score_router && config.norm_topk_prob && config.is_sparse(0) && config.is_sparse(3));
  EXPECT_EQ(config.rotary_dim(), 64);
  EXPECT_EQ(config.active_mlp_size(0), 8 * 1536);
  EXPECT_EQ(config.num_skipped_layers, 3);
  const std::int64_t attention = 3072 * 128 * (2 * 48 + 2 * 8), expert = 3LL * 3072 * 1536;
  EXPECT_EQ(config.num_active_parameters(), 4 * (attention + 256 * 3072 + 8 * expert) + 200064LL * 3072);
  EXPECT_EQ(config.num_parameters(), 4 * (attention + 256 * 3072 + 256 * expert + 2 * 3072 + 128 * (48 + 8)) + 2 * 200064LL * 3072 + 3072);
  EXPECT_THAT(saved_config_json(config, DType::kBF16), HasSubstr("\"num_mtp_modules\": 0")) << "they were not read";

  const auto replaced = [&](const std::string& key, const std::string& from, const std::string& to) {
    return edit(kMiniMaxM2, "\"" + key + "\": " + from, "\"" + key + "\": " + to);
  };
  // What transformers makes of the keys, and of those that are not there.
  EXPECT_EQ(load(edit(kMiniMaxM2, "\"rotary_dim\": 64,", "")).rotary_dim(), 128);
  EXPECT_EQ(load(replaced("rotary_dim", "64", "64, \"partial_rotary_factor\": 0.25")).rotary_dim(), 32);
  EXPECT_EQ(load(replaced("rotary_dim", "64", R"(64, "rope_parameters": {"rope_type": "default", "rope_theta": 3e6})")).rotary_dim(), 64);
  EXPECT_EQ(
      load(replaced("rotary_dim", "64", R"(64, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25})")).rotary_dim(),
      32);
  EXPECT_EQ(load(edit(kMiniMaxM2, "\"rope_theta\": 5000000,", "")).rope_theta, 5e6);
  EXPECT_EQ(load(edit(kMiniMaxM2, "\"num_key_value_heads\": 8,", "")).num_kv_heads, 8);
  EXPECT_EQ(load(edit(kMiniMaxM2, "\"head_dim\": 128,", "")).head_dim, 128);
  EXPECT_EQ(load(replaced("use_mtp", "true", "false")).num_skipped_layers, 0);

  expect_error(replaced("rotary_dim", "64", "40"), ErrorCode::kNotImplemented, "partial_rotary_factor");
  expect_error(replaced("rotary_dim", "64", "256"), ErrorCode::kCorrupt, "rotary_dim");
  expect_error(replaced("scoring_func", "\"sigmoid\"", "\"softmax\""), ErrorCode::kNotImplemented, "scoring_func");
  expect_error(replaced("qk_norm_type", "\"per_layer\"", "\"per_head\""), ErrorCode::kNotImplemented, "qk_norm_type");
  expect_error(replaced("use_qk_norm", "true", "false"), ErrorCode::kNotImplemented, "use_qk_norm");
  expect_error(replaced("use_routing_bias", "true", "false"), ErrorCode::kNotImplemented, "use_routing_bias");
  expect_error(replaced("shared_intermediate_size", "0", "1536"), ErrorCode::kNotImplemented, "shared_intermediate_size");
  expect_error(replaced("attn_type_list", "[1, 1", "[1, 0"), ErrorCode::kNotImplemented, "attn_type_list");
  expect_error(replaced("sliding_window", "null", "4096"), ErrorCode::kNotImplemented, "sliding_window");
  expect_error(replaced("layernorm_mlp_beta", "1.0", "3.5"), ErrorCode::kNotImplemented, "layernorm_mlp_beta");
  expect_error(replaced("router_jitter_noise", "0.0", "0.1"), ErrorCode::kNotImplemented, "router_jitter_noise");
  expect_error(replaced("num_experts_per_tok", "8", "257"), ErrorCode::kCorrupt, "num_experts_per_tok");
  const ModelConfig published = load(replaced("use_cache", "true", R"(true, "quantization_config": {"activation_scheme": "dynamic",
      "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"], "quant_method": "fp8",
      "weight_block_size": [128, 128]})"));
  EXPECT_EQ(published.fp8, (Fp8Format{.block_rows = 128, .block_cols = 128, .scale_suffix = "_scale_inv"}));
}

// The config.json of Trinity-Mini as it is published, with eight layers.
constexpr const char* kAfmoe = R"({
  "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": 3,
  "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 6144, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
  "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"], "load_balance_coeff": 0.001,
  "max_position_embeddings": 131072, "model_type": "afmoe", "moe_intermediate_size": 1024, "mup_enabled": true, "n_group": 1,
  "num_attention_heads": 32, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 8, "num_key_value_heads": 4, "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "rope_theta": 10000, "route_norm": true, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048,
  "tie_word_embeddings": false, "topk_group": 1, "use_cache": true, "vocab_size": 200192})";

TEST_F(ModelConfigTest, Afmoe) {
  const ModelConfig config = load(kAfmoe);
  EXPECT_TRUE(config.qk_norm && !config.qk_norm_is_whole && config.gates_heads && config.gates_are_apart);
  EXPECT_TRUE(config.norms_inputs && config.norms_outputs && !config.attention_bias && config.has_score_router && config.norm_topk_prob);
  EXPECT_THAT(config.windowed_layers, ElementsAre(0, 1, 2, 4, 5, 6));
  EXPECT_THAT(config.unrotated_layers, ElementsAre(3, 7));
  EXPECT_EQ(config.window, 2048);
  EXPECT_EQ(config.routed_scale, 2.826);
  EXPECT_EQ(config.embedding_scale, std::sqrt(2048.0));
  EXPECT_THAT(config.dense_layers, ElementsAre(0, 1));
  EXPECT_EQ(config.active_mlp_size(0), 6144);
  EXPECT_EQ(config.active_mlp_size(2), 9 * 1024);
  const std::int64_t attention = 2048 * 128 * (3 * 32 + 2 * 4), expert = 3LL * 2048 * 1024;
  EXPECT_EQ(config.num_active_parameters(), 8 * attention + 2 * 3LL * 2048 * 6144 + 6 * (128 * 2048 + 9 * expert) + 200192LL * 2048);
  EXPECT_EQ(config.num_parameters(), config.num_active_parameters() + 6 * 120 * expert + 200192LL * 2048 + 8 * (4 * 2048 + 2 * 128) + 2048);

  const auto replaced = [&](const std::string& key, const std::string& from, const std::string& to) {
    return edit(kAfmoe, "\"" + key + "\": " + from, "\"" + key + "\": " + to);
  };
  const std::string types = std::string(kAfmoe).substr(std::string(kAfmoe).find("\"layer_types\""));
  const std::string without_types = edit(kAfmoe, types.substr(0, types.find("\"load_balance")), "");
  EXPECT_THAT(load(without_types).unrotated_layers, ElementsAre(3, 7));
  EXPECT_THAT(load(edit(without_types, "every_n_layers\": 4", "every_n_layers\": 3")).unrotated_layers, ElementsAre(2, 5));
  const ModelConfig short_positions = load(replaced("max_position_embeddings", "131072", "2048"));
  EXPECT_EQ(short_positions.window, 0) << "all positions fit into it";
  EXPECT_THAT(short_positions.unrotated_layers, ElementsAre(3, 7)) << "yet its layers rotate";
  // What transformers makes of keys that are not there.
  EXPECT_EQ(load(edit(kAfmoe, "\"mup_enabled\": true,", "")).embedding_scale, 1.0);
  EXPECT_EQ(load(edit(kAfmoe, "\"num_key_value_heads\": 4,", "")).num_kv_heads, 32);
  EXPECT_EQ(load(edit(kAfmoe, "\"head_dim\": 128,", "")).head_dim, 128);
  EXPECT_EQ(load(replaced("head_dim", "128", "null")).head_dim, 64);
  EXPECT_EQ(load(edit(kAfmoe, "\"sliding_window\": 2048,", "")).window, 1024);
  EXPECT_EQ(load(edit(kAfmoe, "\"num_shared_experts\": 1,", "")).shared_expert_size, 2048);
  EXPECT_TRUE(load(replaced("num_dense_layers", "2", "0")).is_sparse(0));

  expect_error(replaced("sliding_window", "2048", "null"), ErrorCode::kCorrupt, "sliding_window");
  expect_error(replaced("num_dense_layers", "2", "8"), ErrorCode::kNotImplemented, "num_dense_layers");
  expect_error(replaced("score_func", "\"sigmoid\"", "\"softmax\""), ErrorCode::kNotImplemented, "score_func");
  expect_error(replaced("route_norm", "true", "false"), ErrorCode::kNotImplemented, "route_norm");
  expect_error(replaced("n_group", "1", "4"), ErrorCode::kNotImplemented, "n_group");
  expect_error(replaced("num_limited_groups", "1", "2"), ErrorCode::kNotImplemented, "num_limited_groups");
  expect_error(replaced("num_experts", "128", "4"), ErrorCode::kCorrupt, "num_experts_per_tok");
  expect_error(replaced("use_cache", "true", "true, \"attention_bias\": true"), ErrorCode::kNotImplemented, "attention_bias");
  expect_error(replaced("attention_dropout", "0.0", "0.1"), ErrorCode::kNotImplemented, "attention_dropout");
}

// The config.json of DeepSeek-V3.1 as it is published, but for its quantisation and with six layers.
constexpr const char* kDeepseekV3 = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "x.y"},
  "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
  "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
  "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
  "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 6,
  "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
  "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
  "use_cache": true, "v_head_dim": 128, "vocab_size": 129280})";

TEST_F(ModelConfigTest, DeepseekV3) {
  const ModelConfig config = load(kDeepseekV3);
  ASSERT_TRUE(config.latent);
  EXPECT_EQ(config.head_dim, 256) << "the smallest size of heads here that holds 192 elements";
  EXPECT_EQ(config.rotary_dim(), 64);
  const double of_yarn = 0.1 * std::log(40.0) + 1.0;
  EXPECT_NEAR(config.score_scale, of_yarn * of_yarn / std::sqrt(192.0), 1e-12);
  EXPECT_EQ(config.yarn->attention_factor, 1.0);
  EXPECT_THAT(config.dense_layers, ElementsAre(0, 1, 2));
  EXPECT_EQ(config.num_skipped_layers, 1);
  EXPECT_EQ(config.num_expert_groups, 8);
  EXPECT_EQ(config.routed_scale, 2.5);
  const std::int64_t attention = 7168LL * (1536 + 512 + 64) + 128LL * (192 * 1536 + 256 * 512) + 128LL * 128 * 7168;
  const std::int64_t expert = 3LL * 7168 * 2048, head = 129280LL * 7168;
  EXPECT_EQ(config.num_active_parameters(), 6 * attention + 3 * 3LL * 7168 * 18432 + 3 * (256LL * 7168 + 9 * expert) + head);
  EXPECT_EQ(config.num_parameters(), config.num_active_parameters() + 3 * 248 * expert + head + 6 * (2 * 7168 + 1536 + 512) + 7168);
  // Of a token's attention at length L: two products with 192 and 128 elements of each of 128 heads, three times with the backward pass.
  EXPECT_EQ(config.flops_per_token(1000) - config.flops_per_token(0), 6.0 * 1000 * 6 * 128 * (192 + 128));

  const auto replaced = [&](const std::string& key, const std::string& from, const std::string& to) {
    return edit(kDeepseekV3, "\"" + key + "\": " + from, "\"" + key + "\": " + to);
  };
  EXPECT_EQ(load(replaced("model_type", "\"deepseek_v3\"", "\"kimi_k2\"")).num_parameters(), config.num_parameters());
  const ModelConfig without = load(replaced("q_lora_rank", "1536", "null"));
  EXPECT_EQ(without.latent->query_rank, 0);
  EXPECT_EQ(config.num_parameters() - without.num_parameters(), 6 * (7168LL * 1536 + 128LL * 192 * 1536 + 1536 - 128LL * 192 * 7168));
  EXPECT_EQ(load(edit(kDeepseekV3, "\"q_lora_rank\": 1536, ", "")).latent->query_rank, 1536) << "what transformers takes then";
  expect_error(replaced("qk_rope_head_dim", "64", "40"), ErrorCode::kNotImplemented, "qk_rope_head_dim");
  expect_error(replaced("qk_nope_head_dim", "128", "256"), ErrorCode::kNotImplemented, "heads of 320 elements");
  expect_error(replaced("num_key_value_heads", "128", "8"), ErrorCode::kNotImplemented, "num_key_value_heads");
  expect_error(replaced("attention_bias", "false", "true"), ErrorCode::kNotImplemented, "attention_bias");
  expect_error(replaced("scoring_func", "\"sigmoid\"", "\"softmax\""), ErrorCode::kNotImplemented, "scoring_func");
  expect_error(replaced("topk_method", "\"noaux_tc\"", "\"greedy\""), ErrorCode::kNotImplemented, "topk_method");
  expect_error(replaced("moe_layer_freq", "1", "2"), ErrorCode::kNotImplemented, "moe_layer_freq");
  expect_error(replaced("n_group", "8", "7"), ErrorCode::kCorrupt, "n_group");
}

// The config.json of DeepSeek-V2-Lite as it is published, with four layers.
constexpr const char* kDeepseekV2Lite = R"({
  "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
  "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
  "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
  "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
  "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 4,
  "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
  "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.0,
  "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
  "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400})";

TEST_F(ModelConfigTest, DeepseekV2Lite) {
  const ModelConfig config = load(kDeepseekV2Lite);
  ASSERT_TRUE(config.latent);
  EXPECT_EQ(config.latent->query_rank, 0);
  EXPECT_FALSE(config.has_score_router || config.norm_topk_prob || config.gates_shared_expert);
  EXPECT_EQ(config.shared_expert_size, 2 * 1408);
  EXPECT_EQ(config.num_active_experts, 6);
  EXPECT_THAT(config.dense_layers, ElementsAre(0));
  const double of_yarn = 0.0707 * std::log(40.0) + 1.0;
  EXPECT_NEAR(config.score_scale, of_yarn * of_yarn / std::sqrt(192.0), 1e-12);
  const auto replaced = [&](const std::string& key, const std::string& from, const std::string& to) {
    return edit(kDeepseekV2Lite, "\"" + key + "\": " + from, "\"" + key + "\": " + to);
  };
  expect_error(replaced("topk_method", "\"greedy\"", "\"group_limited_greedy\""), ErrorCode::kNotImplemented, "topk_method");
  expect_error(replaced("routed_scaling_factor", "1.0", "16.0"), ErrorCode::kNotImplemented, "routed_scaling_factor");
  expect_error(replaced("norm_topk_prob", "false", "true"), ErrorCode::kNotImplemented, "norm_topk_prob");
  expect_error(replaced("scoring_func", "\"softmax\"", "\"sigmoid\""), ErrorCode::kNotImplemented, "scoring_func");
}

TEST_F(ModelConfigTest, Glm4MoeLiteSaysWhichLayersAreDense) {
  const std::string keys = R"({"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 154880,
    "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 4, "num_attention_heads": 20, "num_key_value_heads": 20)";
  const ModelConfig config = load(keys + "}");
  EXPECT_EQ(config.head_dim, 256) << "of queries and of values: nothing is padded";
  EXPECT_EQ(config.latent->value_dim, 256);
  EXPECT_EQ(config.num_experts, 64);
  EXPECT_THAT(config.dense_layers, ElementsAre(0));
  EXPECT_THAT(load(keys + R"(, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]})").dense_layers, ElementsAre(0, 2));
  expect_error(keys + R"(, "mlp_layer_types": ["dense", "sparse"]})", ErrorCode::kCorrupt, "mlp_layer_types");
  expect_error(keys + R"(, "mlp_layer_types": ["dense", "sparse", "sparse", "linear"]})", ErrorCode::kNotImplemented, "'linear'");
  expect_error(keys + R"(, "partial_rotary_factor": 0.5})", ErrorCode::kNotImplemented, "partial_rotary_factor");
}

}  // namespace
}  // namespace prl::nn
