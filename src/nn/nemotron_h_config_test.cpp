#include <limits>
#include <string>

#include "nn/init_model.hpp"
#include "nn/model_config_test_fixture.hpp"

namespace prl::nn {
namespace {
using ::testing::ElementsAre;

class NemotronHConfigTest : public ModelConfigTest {};

// The config.json of NVIDIA-Nemotron-Nano-9B-v2, which has an Infinity that is no JSON.
constexpr const char* kNemotronNano2 = R"({
  "architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "chunk_size": 128,
  "conv_kernel": 4, "eos_token_id": 12, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 4480,
  "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "initializer_range": 0.02,
  "intermediate_size": 15680, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 80, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
  "mamba_proj_bias": false, "max_position_embeddings": 131072, "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
  "n_groups": 8, "num_attention_heads": 40, "num_hidden_layers": 56, "num_key_value_heads": 8, "num_logits_to_keep": 1,
  "pad_token_id": 0, "rescale_prenorm_residual": true, "residual_in_fp32": false, "rms_norm_eps": 1e-05, "sliding_window": null,
  "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity],
  "time_step_max": 0.1, "time_step_min": 0.001, "torch_dtype": "bfloat16", "use_bias": false, "use_cache": true, "use_conv_bias": true,
  "use_mamba_kernels": true, "vocab_size": 131072})";

// That of NVIDIA-Nemotron-3-Nano-30B-A3B, but for keys that change nothing.
constexpr const char* kNemotron3Nano = R"({
  "architectures": ["NemotronHForCausalLM"], "conv_kernel": 4, "eos_token_id": 2, "head_dim": 128, "hidden_size": 2688,
  "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
  "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_num_heads": 64, "max_position_embeddings": 262144, "mlp_hidden_act": "relu2",
  "model_type": "nemotron_h", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
  "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts_per_tok": 6,
  "num_hidden_layers": 52, "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5,
  "ssm_state_size": 128, "topk_group": 1, "use_conv_bias": true, "vocab_size": 131072})";

// Numbers of parameters are those of transformers 5.24.
TEST_F(NemotronHConfigTest, PublishedFiles) {
  const ModelConfig config = load(kNemotronNano2);
  EXPECT_EQ(config.num_parameters(), 8888227328);
  EXPECT_TRUE(config.has_single_parts && config.has_squared_relu_mlps && config.linear.is_state_space && config.linear.has_conv_bias);
  EXPECT_TRUE(config.is_linear(0) && !config.has_mlp(0) && config.has_mlp(1) && !config.has_attention(1) && config.is_linear(7));
  EXPECT_THAT(config.unrotated_layers, ElementsAre(14, 21, 30, 39));
  EXPECT_TRUE(config.has_softmax(14) && !config.has_mlp(14));
  EXPECT_EQ(config.num_softmax_layers(), 4);
  EXPECT_EQ(config.linear.layers.size(), 27u);
  EXPECT_EQ(config.linear.projected_width(), 2 * 10240 + 2 * 8 * 128 + 128);
  EXPECT_EQ(config.linear.min_step, 0.0);
  EXPECT_EQ(config.linear.max_step, std::numeric_limits<double>::infinity());
  EXPECT_FLOAT_EQ(config.rms_norm_eps, 1e-5f);
  EXPECT_DOUBLE_EQ(config.flops_per_token(1000),
                   6.0 * static_cast<double>(config.num_active_parameters()) + 12.0 * 4480 * 4 * 1000 + 12.0 * 27 * 128 * 80 * 128)
      << "two products for each element of a state";

  const ModelConfig sparse = load(kNemotron3Nano);
  EXPECT_EQ(sparse.num_parameters(), 31577937344);
  EXPECT_TRUE(sparse.is_sparse(1) && !sparse.is_sparse(0) && !sparse.is_sparse(5) && sparse.has_score_router && sparse.norm_topk_prob);
  EXPECT_EQ(sparse.shared_expert_size, 3712);
  EXPECT_EQ(sparse.expert_input_size, 0);
  EXPECT_EQ(sparse.routed_scale, 2.5);
  EXPECT_EQ(sparse.active_mlp_size(0), 0);
  EXPECT_EQ(sparse.active_mlp_size(1), 6 * 1856 + 3712);
}

TEST_F(NemotronHConfigTest, NewerSpellings) {
  const std::string listed =
      edit(edit(kNemotron3Nano, R"("hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME")",
                R"("layers_block_type": ["mamba", "moe", "linear_attention", "attention", "full_attention", "mlp"])"),
           R"("num_hidden_layers": 52)", R"("time_step_limit": [0.01, {"__float__": "Infinity"}])");
  const ModelConfig config = load(listed);
  EXPECT_EQ(config.num_layers, 6);
  EXPECT_THAT(config.linear.layers, ElementsAre(0, 2));
  EXPECT_THAT(config.mlp_layers, ElementsAre(1, 5));
  EXPECT_TRUE(config.is_sparse(1) && !config.is_sparse(5));
  EXPECT_EQ(config.linear.min_step, 0.01);
  EXPECT_EQ(config.linear.max_step, std::numeric_limits<double>::infinity());
  // Experts between two matrices.
  const ModelConfig narrow = load(edit(edit(kNemotron3Nano, "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "MEM*E"),
                                       R"("num_hidden_layers": 52)", R"("moe_latent_size": 1024)"));
  EXPECT_EQ(narrow.expert_input_size, 1024);
  EXPECT_EQ(narrow.num_parameters(), 1830228096);
}

TEST_F(NemotronHConfigTest, WhatIsSavedIsReadAgain) {
  const ModelConfig published = load(kNemotronNano2);
  EXPECT_EQ(load(saved_config_json(published, DType::kF32)).linear, published.linear);
  for (const bool narrow : {false, true}) {
    InitModelOptions options;
    options.family = "nemotron_h";
    options.num_layers = 6;
    ModelConfig made = make_model_config(options);
    if (narrow) made.expert_input_size = 96;
    made.linear.max_step = narrow ? 2.0 : made.linear.max_step;
    const ModelConfig read = load(to_config_json(made));
    EXPECT_EQ(read.linear, made.linear);
    EXPECT_EQ(read.mlp_layers, made.mlp_layers);
    EXPECT_EQ(read.dense_layers, made.dense_layers);
    EXPECT_EQ(read.expert_input_size, made.expert_input_size);
    EXPECT_EQ(read.num_parameters(), made.num_parameters());
    EXPECT_EQ(read.rms_norm_eps, made.rms_norm_eps);
  }
}

TEST_F(NemotronHConfigTest, RefusesWhatThisBuildLacks) {
  const auto with = [](const std::string& key) { return edit(kNemotron3Nano, R"("conv_kernel": 4)", key); };
  const std::pair<const char*, const char*> cases[] = {{R"("use_bias": true)", "use_bias"},
                                                       {R"("mlp_bias": true)", "mlp_bias"},
                                                       {R"("residual_in_fp32": true)", "residual_in_fp32"},
                                                       {R"("sliding_window": 512)", "sliding_window"},
                                                       {R"("attention_dropout": 0.1)", "attention_dropout"},
                                                       {R"("mamba_hidden_act": "relu")", "mamba_hidden_act"}};
  for (const auto& [key, part] : cases) expect_error(with(key), ErrorCode::kNotImplemented, part);
  expect_error(edit(kNemotron3Nano, R"("n_shared_experts": 1)", R"("n_shared_experts": 2)"), ErrorCode::kNotImplemented,
               "n_shared_experts");
  expect_error(edit(kNemotron3Nano, R"("mlp_hidden_act": "relu2")", R"("mlp_hidden_act": "silu")"), ErrorCode::kNotImplemented,
               "mlp_hidden_act");
  expect_error(edit(kNemotron3Nano, "MEMEM*", "MEMEMX"), ErrorCode::kNotImplemented, "letter 'X'");
  expect_error(edit(kNemotron3Nano, "MEMEM*EM", "MEMEM*E"), ErrorCode::kCorrupt, "num_hidden_layers");
  expect_error(edit(kNemotron3Nano, R"("ssm_state_size": 128)", R"("ssm_state_size": 100)"), ErrorCode::kNotImplemented, "ssm_state_size");
  expect_error(edit(kNemotron3Nano, R"("mamba_num_heads": 64)", R"("mamba_num_heads": 60)"), ErrorCode::kCorrupt, "mamba_num_heads");
  expect_error(edit(kNemotron3Nano, R"("conv_kernel": 4)", R"("time_step_limit": [2.0, 1.0])"), ErrorCode::kCorrupt, "time_step_limit");
  expect_error(edit(edit(kNemotron3Nano, "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "MEME"), R"("num_hidden_layers": 52)",
                    R"("num_hidden_layers": 4)"),
               ErrorCode::kNotImplemented, "no layer of attention");
}

}  // namespace
}  // namespace prl::nn
