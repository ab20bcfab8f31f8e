#include "nn/model_config.hpp"

#include <array>
#include <cmath>
#include <fstream>

#include "base/error.hpp"
#include "nn/init_model.hpp"
#include "nn/model_config_test_fixture.hpp"
#include "nn/models/family.hpp"
#include "nn/same_model.hpp"

namespace prl::nn {
namespace {
namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(ModelConfigTest, ReadsPublishedConfigs) {
  const ModelConfig smol = load(kSmolLM2);
  EXPECT_EQ(smol.model_type, "llama");
  EXPECT_EQ(smol.head_dim, 64);
  EXPECT_EQ(smol.num_kv_heads, 3);
  EXPECT_TRUE(smol.tie_word_embeddings);
  EXPECT_FALSE(smol.qk_norm);
  EXPECT_FLOAT_EQ(smol.rms_norm_eps, 1e-5f);
  EXPECT_EQ(smol.rope_theta, 100000.0);
  EXPECT_EQ(smol.num_parameters(), 134515008) << "the published size of SmolLM2-135M";
  EXPECT_THAT(smol.eos_ids, ElementsAre(0));

  const ModelConfig qwen = load(kQwen3);
  EXPECT_TRUE(qwen.qk_norm);
  EXPECT_FALSE(qwen.attention_bias);
  EXPECT_EQ(qwen.head_dim, 128);
  EXPECT_EQ(qwen.num_parameters(), 596049920) << "the published size of Qwen3-0.6B";
  EXPECT_EQ(qwen.num_active_parameters(), 28 * (1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072) + 151936 * 1024);
  EXPECT_DOUBLE_EQ(qwen.flops_per_token(100), 6.0 * static_cast<double>(qwen.num_active_parameters()) + 12.0 * 28 * 1024 * 100);
}

TEST_F(ModelConfigTest, Qwen2HasBiasesAndFamilyDefaults) {
  const std::string qwen2 =
      edit(edit(edit(kQwen3, "Qwen3ForCausalLM", "Qwen2ForCausalLM"), "\"qwen3\"", "\"qwen2\""), "\"head_dim\": 128,", "");
  const ModelConfig config = load(qwen2);
  EXPECT_TRUE(config.attention_bias);
  EXPECT_FALSE(config.attention_out_bias);
  EXPECT_FALSE(config.qk_norm);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(load(edit(kQwen3, "\"head_dim\": 128,", "")).head_dim, 128) << "Qwen 3's own default";
  EXPECT_EQ(load(edit(kSmolLM2, "\"num_key_value_heads\": 3,", "")).num_kv_heads, 9);
  EXPECT_FALSE(load(edit(kSmolLM2, "\"tie_word_embeddings\": true,", "")).tie_word_embeddings);
  EXPECT_TRUE(load(edit(kSmolLM2, "\"attention_bias\": false", "\"attention_bias\": true")).attention_out_bias);
}

// Mistral-Nemo's config.json.
constexpr const char* kMistral = R"({
  "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
  "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
  "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
  "vocab_size": 131072})";

TEST_F(ModelConfigTest, Mistral) {
  const ModelConfig config = load(kMistral);
  EXPECT_EQ(config.head_dim, 128) << "and not 5120 / 32";
  EXPECT_EQ(config.num_parameters(), 12247782400) << "the published size of Mistral-Nemo";
  EXPECT_FALSE(config.attention_bias || config.attention_out_bias || config.qk_norm || config.tie_word_embeddings);
  EXPECT_EQ(load(edit(edit(kMistral, "\"head_dim\": 128,", ""), "\"hidden_size\": 5120", "\"hidden_size\": 4096")).head_dim, 128);
  const auto window = [](const std::string& value) { return edit(kMistral, "\"sliding_window\": null", "\"sliding_window\": " + value); };
  EXPECT_EQ(load(window("131072")).max_position, 131072) << "a window that all positions fit into";
  EXPECT_EQ(load(window("131072")).window, 0) << "changes nothing";
  EXPECT_EQ(load(window("131071")).window_of(0), 131071);
  EXPECT_EQ(load(window("131071")).windowed_layers.size(), 40U);
  expect_error(window("0"), ErrorCode::kCorrupt, "sliding_window");
  // Without the key, transformers takes a window of 4096.
  const std::string silent = edit(kMistral, "\"sliding_window\": null,", "");
  EXPECT_EQ(load(silent).window_of(39), 4096);
  EXPECT_EQ(load(edit(silent, "\"max_position_embeddings\": 131072", "\"max_position_embeddings\": 4096")).max_position, 4096);
  expect_error(edit(kMistral, "\"use_cache\": true", R"("layer_types": ["sliding_attention"])"), ErrorCode::kCorrupt,
               "wanted a type for each of the 40 layers, found 1");
  const auto types = [&](const std::string& value) {
    std::string all = "\"" + value + "\"";
    for (int i = 1; i < 40; ++i) all += ", \"full_attention\"";
    return edit(window("4096"), "\"use_cache\": true", "\"layer_types\": [" + all + "]");
  };
  expect_error(types("sliding_attention"), ErrorCode::kNotImplemented, "all of one type, sliding_attention here");
  expect_error(types("chunked_attention"), ErrorCode::kNotImplemented, "'chunked_attention'");
}

TEST_F(ModelConfigTest, WindowsOfSomeLayers) {
  const std::string used = edit(edit(kQwen3, "\"use_sliding_window\": false", "\"use_sliding_window\": true"), "\"sliding_window\": null",
                                "\"sliding_window\": 512");
  const ModelConfig named = load(edit(used, "\"max_window_layers\": 28", "\"max_window_layers\": 26"));
  EXPECT_EQ(named.window, 512);
  EXPECT_THAT(named.windowed_layers, ::testing::ElementsAre(26, 27));
  EXPECT_EQ(named.window_of(25), 0);
  EXPECT_EQ(named.attended_keys(1000), 26 * 1000 + 2 * 512);
  EXPECT_EQ(named.attended_keys(100), 28 * 100);
  EXPECT_EQ(load(used).window, 0) << "no layer is at or behind the 28th";
  EXPECT_EQ(load(edit(kQwen3, "\"use_sliding_window\": false", "\"use_sliding_window\": true")).window, 0) << "the window is null";
  std::string types = "\"sliding_attention\"";
  for (int i = 1; i < 28; ++i) types += i % 2 == 1 ? ", \"full_attention\"" : ", \"sliding_attention\"";
  const auto with_types = [&](const std::string& config) {
    return edit(config, "\"max_window_layers\": 28", "\"layer_types\": [" + types + "]");
  };
  EXPECT_EQ(load(with_types(used)).windowed_layers.size(), 14U);
  expect_error(with_types(kQwen3), ErrorCode::kCorrupt, "no window is in use (keys 'use_sliding_window', 'sliding_window')");
  // What init-model writes is read back.
  EXPECT_EQ(load(to_config_json(named)).windowed_layers, named.windowed_layers);
  const ModelConfig mistral = load(edit(kMistral, "\"sliding_window\": null", "\"sliding_window\": 4096"));
  EXPECT_EQ(load(to_config_json(mistral)).windowed_layers, mistral.windowed_layers);
}

// SmolLM3-3B's config.json, its lists left to the keys' defaults. Tied embeddings are one of these.
constexpr const char* kSmolLM3 = R"({
  "architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 128012, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 65536, "max_window_layers": 28,
  "mlp_bias": false, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": null, "num_attention_heads": 16,
  "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null, "torch_dtype": "bfloat16", "use_cache": false,
  "use_sliding_window": false, "vocab_size": 128256})";

TEST_F(ModelConfigTest, SmolLm3) {
  const ModelConfig config = load(kSmolLM3);
  EXPECT_TRUE(config.tie_word_embeddings) << "what is not said of SmolLM 3";
  EXPECT_EQ(config.num_parameters(), 3075098624) << "the published size of SmolLM3-3B";
  EXPECT_THAT(config.unrotated_layers, ElementsAre(3, 7, 11, 15, 19, 23, 27, 31, 35));
  EXPECT_TRUE(config.is_rotated(0) && config.is_rotated(2) && !config.is_rotated(3) && config.is_rotated(4));
  EXPECT_EQ(load(edit(kSmolLM3, "\"rope_theta\": 5000000.0,", "")).rope_theta, 2000000.0);
  EXPECT_TRUE(load(edit(kSmolLM3, "\"attention_bias\": false", "\"attention_bias\": true")).attention_out_bias);
  EXPECT_THAT(load(edit(kSmolLM3, "\"no_rope_layer_interval\": 4", "\"no_rope_layer_interval\": 18")).unrotated_layers,
              ElementsAre(17, 35));

  const std::string two = edit(kSmolLM3, "\"num_hidden_layers\": 36", "\"num_hidden_layers\": 2");
  EXPECT_TRUE(load(two).unrotated_layers.empty());
  const auto marks = [&](const std::string& value) { return edit(two, "\"no_rope_layers\": null", "\"no_rope_layers\": " + value); };
  const ModelConfig first = load(marks("[0, 1, 0]"));  // more marks than layers
  EXPECT_THAT(first.unrotated_layers, ElementsAre(0));
  EXPECT_THAT(load(saved_config_json(first, DType::kF32)).unrotated_layers, ElementsAre(0));
  ModelConfig made = first;
  made.raw_json.clear();
  EXPECT_THAT(load(to_config_json(made)).unrotated_layers, ElementsAre(0));
  check_same_model(first, load(marks("[0, 1]")), "there");
  EXPECT_THROW(check_same_model(first, load(marks("[1, 0]")), "there"), Error);

  expect_error(marks("[0]"), ErrorCode::kCorrupt, "'no_rope_layers': wanted a 0 or 1 for each of the 2 layers, found 1");
  expect_error(marks("[1, 2]"), ErrorCode::kCorrupt, "'no_rope_layers': wanted 0 or 1, found 2 for layer 1");
  expect_error(marks("[1, \"0\"]"), ErrorCode::kCorrupt, "'no_rope_layers': wanted a list of 0 and 1");
  expect_error(edit(kSmolLM3, "\"no_rope_layer_interval\": 4", "\"no_rope_layer_interval\": 0"), ErrorCode::kCorrupt,
               "no_rope_layer_interval");
  expect_error(edit(kSmolLM3, "\"mlp_bias\": false", "\"mlp_bias\": true"), ErrorCode::kNotImplemented, "mlp_bias");
  const std::string used = edit(edit(kSmolLM3, "\"use_sliding_window\": false", "\"use_sliding_window\": true"), "\"sliding_window\": null",
                                "\"sliding_window\": 512");
  EXPECT_EQ(load(used).windowed_layers, load(used).unrotated_layers);
  EXPECT_EQ(load(used).window, 512);
  expect_error(edit(kSmolLM3, "\"max_window_layers\": 28", R"("layer_types": ["sliding_attention"])"), ErrorCode::kCorrupt, "layer_types");
}

// The published config.json of Qwen3-30B-A3B.
constexpr const char* kQwen3Moe = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645,
  "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
  "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
  "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
  "vocab_size": 151936})";

TEST_F(ModelConfigTest, MixturesOfExperts) {
  const ModelConfig config = load(kQwen3Moe);
  EXPECT_EQ(config.num_experts, 128);
  EXPECT_EQ(config.num_active_experts, 8);
  EXPECT_EQ(config.active_mlp_size(0), 8 * 768);
  EXPECT_TRUE(config.norm_topk_prob && config.qk_norm);
  EXPECT_EQ(config.num_parameters(), 30532122624) << "the published size of Qwen3-30B-A3B";
  EXPECT_EQ(config.num_active_parameters(), 48LL * (2048 * 128 * (2 * 32 + 2 * 4) + 128 * 2048 + 8 * 3 * 2048 * 768) + 151936LL * 2048);
  EXPECT_FALSE(load(edit(kQwen3Moe, "\"norm_topk_prob\": true,", "")).norm_topk_prob);
  EXPECT_EQ(load(edit(kQwen3Moe, "\"num_experts\": 128", "\"num_local_experts\": 64")).num_experts, 64) << "as transformers 5 writes it";
  const std::string windowed = edit(edit(kQwen3Moe, "\"use_sliding_window\": false", "\"use_sliding_window\": true"),
                                    "\"sliding_window\": null", "\"sliding_window\": 512");
  EXPECT_EQ(load(windowed).windowed_layers.size(), 48U) << "not those from max_window_layers on, as in Qwen 3";
  EXPECT_EQ(load(kQwen3Moe).window, 0);

  const ModelConfig sparse = load(edit(edit(kQwen3Moe, "\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 16"),
                                       "\"mlp_only_layers\": []", "\"mlp_only_layers\": [31, 3]"));
  for (std::int64_t layer = 0; layer < sparse.num_layers; ++layer) EXPECT_EQ(sparse.is_sparse(layer), layer == 15 || layer == 47) << layer;
  EXPECT_EQ(sparse.active_mlp_size(3), 6144);
  expect_error(edit(kQwen3Moe, "\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 49"), ErrorCode::kNotImplemented,
               "decoder_sparse_step");
  expect_error(edit(kQwen3Moe, "\"num_experts\": 128", "\"num_experts\": 4"), ErrorCode::kCorrupt, "num_experts_per_tok");
  expect_error(edit(kQwen3Moe, "\"num_experts\": 128", "\"num_experts\": 2000"), ErrorCode::kCorrupt, "num_experts");
}

// The published config.json of Mixtral-8x7B-v0.1.
constexpr const char* kMixtral = R"({
  "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
  "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
  "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000})";

TEST_F(ModelConfigTest, Mixtral) {
  const ModelConfig config = load(kMixtral);
  EXPECT_EQ(config.num_parameters(), 46702792704) << "the published size of Mixtral 8x7B";
  EXPECT_EQ(config.num_active_parameters(), 32LL * (4096 * 128 * (2 * 32 + 2 * 8) + 8 * 4096 + 2 * 3 * 4096 * 14336) + 32000LL * 4096);
  EXPECT_TRUE(config.norm_topk_prob && !config.has_score_router && !config.qk_norm && !config.attention_bias);
  EXPECT_TRUE(config.is_sparse(0) && config.is_sparse(31));
  EXPECT_EQ(config.active_mlp_size(0), 2 * 14336);
  const auto replaced = [&](const std::string& key, const std::string& from, const std::string& to) {
    return edit(kMixtral, "\"" + key + "\": " + from, "\"" + key + "\": " + to);
  };
  // What a key that is not there means to transformers.
  EXPECT_EQ(load(edit(kMixtral, "\"num_key_value_heads\": 8,", "")).num_kv_heads, 8);
  EXPECT_EQ(load(replaced("num_key_value_heads", "8", "null")).num_kv_heads, 32);
  EXPECT_EQ(load(edit(kMixtral, "\"rope_theta\": 1000000.0,", "")).rope_theta, 1000000.0);
  EXPECT_EQ(load(edit(kMixtral, "\"rms_norm_eps\": 1e-05,", "")).rms_norm_eps, 1e-5f);
  EXPECT_EQ(load(edit(kMixtral, "\"max_position_embeddings\": 32768,", "")).max_position, 131072);
  EXPECT_EQ(load(edit(kMixtral, "\"num_local_experts\": 8,", "\"num_experts\": 4,")).num_experts, 4);
  EXPECT_EQ(load(edit(kMixtral, ", \"sliding_window\": null", "")).max_position, 32768) << "a missing window is none";
  EXPECT_EQ(load(replaced("sliding_window", "null", "32768")).max_position, 32768);
  EXPECT_EQ(load(replaced("sliding_window", "null", "32768")).window, 0) << "changes nothing";
  EXPECT_EQ(load(replaced("sliding_window", "null", "4096")).window_of(31), 4096);
  expect_error(replaced("attention_dropout", "0.0", "0.1"), ErrorCode::kNotImplemented, "'attention_dropout' is 0.1");
  expect_error(replaced("use_cache", "true", "true, \"router_jitter_noise\": 0.01"), ErrorCode::kNotImplemented, "router_jitter_noise");
  expect_error(replaced("num_experts_per_tok", "2", "9"), ErrorCode::kCorrupt, "more than the 8 of 'num_local_experts'");
}

// The published config.json of gpt-oss-20b.
constexpr const char* kGptOss = R"({
  "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4,
  "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
  "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
  "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
  "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
  "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
  "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
  "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088})";

TEST_F(ModelConfigTest, GptOss) {
  const ModelConfig config = load(kGptOss);
  EXPECT_EQ(config.num_parameters(), 20914757184) << "the published size";
  EXPECT_TRUE(config.attention_sinks && config.attention_bias && config.attention_out_bias && config.norm_topk_prob);
  EXPECT_EQ(config.window_of(0), 128);
  EXPECT_EQ(config.window_of(1), 0);
  EXPECT_EQ(config.windowed_layers.size(), 12u);
  EXPECT_EQ(config.expert_size, 2880);
  EXPECT_EQ(config.num_active_experts, 4);
  ASSERT_TRUE(config.yarn && config.clamped_swiglu);
  EXPECT_EQ(*config.clamped_swiglu, (ClampedSwiglu{1.702, 7.0}));
  EXPECT_FALSE(config.yarn->truncates);
  EXPECT_NEAR(config.yarn->attention_factor, 1.3465735902799727, 1e-12);
  EXPECT_THAT(saved_config_json(config, DType::kBF16), ::testing::Not(HasSubstr("mxfp4"))) << "saved weights are not quantised";
  const std::string rope = std::string(kGptOss).substr(std::string(kGptOss).find("\"rope_scaling\""));
  const ModelConfig without = load(edit(kGptOss, rope.substr(0, rope.find("\"router")), ""));
  EXPECT_EQ(without.yarn, config.yarn) << "what missing keys mean to transformers";
  EXPECT_EQ(without.rope_theta, 150000.0);
  EXPECT_FALSE(load(edit(kGptOss, "\"rope_type\": \"yarn\"", "\"rope_type\": \"default\"")).yarn);
  EXPECT_EQ(load(edit(kGptOss, "\"num_experts_per_tok\": 4,", "")).num_active_experts, 4);
  EXPECT_EQ(load(edit(kGptOss, "\"swiglu_limit\": 7.0", "\"swiglu_limit\": 5.0")).clamped_swiglu->limit, 5.0);
  EXPECT_EQ(load(edit(
                     kGptOss, "\"sliding_window\": 128,",
                     "\"sliding_window\": null, \"layer_types\": [" +
                         [] {
                           std::string types;
                           for (int i = 0; i < 24; ++i) types += i == 0 ? "\"full_attention\"" : ", \"full_attention\"";
                           return types;
                         }() +
                         "],"))
                .window,
            0);
  expect_error(edit(kGptOss, "\"mxfp4\"", "\"gptq\""), ErrorCode::kNotImplemented, "'compressed-tensors', and 'mxfp4'");
  expect_error(edit(kGptOss, "\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 33"), ErrorCode::kCorrupt, "num_experts_per_tok");
  expect_error(edit(kGptOss, "\"attention_dropout\": 0.0", "\"attention_dropout\": 0.1"), ErrorCode::kNotImplemented, "attention_dropout");
}

// The published config.json of OLMo-2-1124-7B.
constexpr const char* kOlmo2 = R"({
  "architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "float32", "use_cache": true,
  "vocab_size": 100352})";

TEST_F(ModelConfigTest, Olmo2) {
  const ModelConfig config = load(kOlmo2);
  EXPECT_EQ(config.num_parameters(), 7298617344) << "the published size of OLMo 2 7B";
  EXPECT_TRUE(config.qk_norm && config.qk_norm_is_whole && config.norms_outputs && !config.attention_bias);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(load(edit(kOlmo2, "\"rms_norm_eps\": 1e-06,", "")).rms_norm_eps, 1e-5f) << "the family's own default";
  EXPECT_EQ(load(edit(kOlmo2, "\"num_key_value_heads\": 32", "\"num_key_value_heads\": 8")).num_parameters(),
            7298617344 - 32LL * (2 * 24 * 128 * 4096 + 24 * 128));
  EXPECT_TRUE(load(edit(kOlmo2, "\"attention_bias\": false", "\"attention_bias\": true")).attention_out_bias);
  expect_error(edit(kOlmo2, "\"attention_dropout\": 0.0", "\"attention_dropout\": 0.5"), ErrorCode::kNotImplemented, "attention_dropout");
}

// OLMo 3's config.json, with four layers.
constexpr const char* kOlmo3 = R"({
  "architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
  "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"], "max_position_embeddings": 65536,
  "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 4, "num_key_value_heads": 32, "pad_token_id": 100277,
  "rms_norm_eps": 1e-06, "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
  "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window": 4096,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100278})";

TEST_F(ModelConfigTest, Olmo3) {
  const ModelConfig config = load(kOlmo3);
  EXPECT_TRUE(config.qk_norm_is_whole && config.norms_outputs);
  EXPECT_THAT(config.windowed_layers, ElementsAre(0, 1, 2));
  EXPECT_EQ(config.window, 4096);
  ASSERT_TRUE(config.yarn);
  EXPECT_EQ(config.yarn->factor, 8.0);
  EXPECT_EQ(config.yarn->original_max_position, 8192);
  EXPECT_NEAR(config.yarn->attention_factor, 0.1 * std::log(8.0) + 1.0, 1e-12) << "what YaRN advises";
  EXPECT_EQ(config.window_rope_theta, 500000.0);
  const std::string types = R"("layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],)";
  EXPECT_THAT(load(edit(kOlmo3, types, "")).windowed_layers, ElementsAre(0, 1, 2)) << "the family's own pattern";
  // As transformers 5 writes it.
  const auto nested = [](const std::string& sliding, const std::string& full) {
    const std::string from = kOlmo3;
    const std::size_t begin = from.find("\"rope_scaling\""), end = from.find(", \"sliding_window\"");
    return from.substr(0, begin) + R"("rope_parameters": {"sliding_attention": )" + sliding + R"(, "full_attention": )" + full + "}" +
           from.substr(end);
  };
  const ModelConfig new_style =
      load(nested(R"({"rope_type": "default", "rope_theta": 1e4})", R"({"rope_type": "yarn", "rope_theta": 2e6, "factor": 4.0,
                                            "original_max_position_embeddings": 16384})"));
  EXPECT_EQ(new_style.window_rope_theta, 1e4);
  EXPECT_EQ(new_style.rope_theta, 2e6);
  EXPECT_EQ(new_style.yarn->factor, 4.0);
  EXPECT_FALSE(load(nested(R"({"rope_type": "default"})", R"({"rope_type": "default"})")).yarn);
  expect_error(nested(R"({"rope_type": "yarn", "factor": 4.0})", R"({"rope_type": "default"})"), ErrorCode::kNotImplemented, "rope_type");
}

// The part for text of Qwen 3.5's config.json, with eight layers of 0.8B's sizes.
constexpr const char* kQwen35 = R"({
  "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
  "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
  "initializer_range": 0.02, "intermediate_size": 3584, "layer_types": ["linear_attention", "linear_attention", "linear_attention",
  "full_attention", "linear_attention", "linear_attention", "linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
  "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
  "num_attention_heads": 8, "num_hidden_layers": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": true,
  "use_cache": true, "vocab_size": 248320, "mamba_ssm_dtype": "float32", "rope_parameters": {"mrope_interleaved": true,
  "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}})";

TEST_F(ModelConfigTest, Qwen35) {
  const ModelConfig config = load(kQwen35);
  EXPECT_THAT(config.linear.layers, ElementsAre(0, 1, 2, 4, 5, 6));
  EXPECT_EQ(config.linear.num_channels(), 3 * 2048);
  EXPECT_EQ(config.rotary_dim(), 64);
  EXPECT_EQ(config.rope_theta, 1e7);
  EXPECT_TRUE(config.gates_heads && config.norms_add_one && config.qk_norm && !config.attention_bias);
  // Embedding and final norm; eight MLPs with two norms each; six layers of linear attention and two of heads with gates.
  const std::int64_t H = 1024, linear = (6144 + 2048 + 32) * H + 6144 * 4 + 32 + 128 + 2048 * H,
                     full = (4096 + 2 * 512) * H + 2 * 256 + 2048 * H;
  EXPECT_EQ(config.num_parameters(), 248320 * H + H + 8 * (3 * 3584 * H + 2 * H) + 6 * linear + 2 * full);
  EXPECT_EQ(config.num_softmax_layers(), 2);
  EXPECT_EQ(config.attended_keys(100), 200) << "of the layers of softmax attention";
  const std::string from = kQwen35;
  const std::size_t begin = from.find("\"layer_types\""), end = from.find("\"linear_conv_kernel_dim\"");
  EXPECT_THAT(load(from.substr(0, begin) + from.substr(end)).linear.layers, ElementsAre(0, 1, 2, 4, 5, 6)) << "by the interval";
  expect_error(edit(kQwen35, "\"attn_output_gate\": true", "\"attn_output_gate\": false"), ErrorCode::kNotImplemented, "attn_output_gate");
  expect_error(edit(kQwen35, "\"attention_bias\": false", "\"attention_bias\": true"), ErrorCode::kNotImplemented, "attention_bias");
  expect_error(edit(kQwen35, "\"linear_num_value_heads\": 16", "\"linear_num_value_heads\": 24"), ErrorCode::kCorrupt,
               "linear_num_value_heads");
  expect_error(edit(kQwen35, "\"linear_key_head_dim\": 128", "\"linear_key_head_dim\": 100"), ErrorCode::kNotImplemented,
               "linear_key_head_dim");
}

// The sizes of Qwen3-Next-80B-A3B, and what of them Qwen3.5-35B-A3B has. The numbers of parameters are those of transformers' models.
constexpr const char* kQwen3Next = R"({
  "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "decoder_sparse_step": 1,
  "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
  "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
  "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
  "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
  "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 151936})";

TEST_F(ModelConfigTest, Qwen3Next) {
  const ModelConfig config = load(kQwen3Next);
  EXPECT_EQ(config.num_parameters(), 79674391296);
  EXPECT_EQ(config.num_softmax_layers(), 12);
  EXPECT_TRUE(config.is_linear(0) && config.is_sparse(0) && config.is_sparse(47) && !config.is_linear(47));
  EXPECT_TRUE(config.gates_shared_expert && config.linear.fuses_projections && config.norm_topk_prob && config.norms_add_one);
  EXPECT_EQ(config.rotary_dim(), 64);
  EXPECT_EQ(config.active_mlp_size(5), 11 * 512);
  const std::int64_t H = 2048, linear = (8192 + 4096 + 64) * H + 4096 * H, full = (2 * 4096 + 2 * 512) * H + 4096 * H,
                     experts = 512 * H + 11 * 3 * 512 * H + H;
  EXPECT_EQ(config.num_active_parameters(), 36 * linear + 12 * full + 48 * experts + 151936 * H);
  const ModelConfig dense = load(edit(kQwen3Next, "\"mlp_only_layers\": []", "\"mlp_only_layers\": [3]"));
  EXPECT_FALSE(dense.is_sparse(3));
  EXPECT_EQ(dense.active_mlp_size(3), 5120);
  EXPECT_FALSE(load(edit(kQwen3Next, "\"norm_topk_prob\": true", "\"norm_topk_prob\": false")).norm_topk_prob);
  expect_error(edit(kQwen3Next, "\"attention_dropout\": 0.0", "\"attention_dropout\": 0.5"), ErrorCode::kNotImplemented,
               "attention_dropout");
  expect_error(edit(kQwen3Next, "\"num_experts\": 512", "\"num_experts\": 8"), ErrorCode::kCorrupt, "num_experts_per_tok");
  expect_error(edit(kQwen3Next, "\"shared_expert_intermediate_size\": 512", "\"shared_expert_intermediate_size\": 0"), ErrorCode::kCorrupt,
               "shared_expert_intermediate_size");
  expect_error(edit(kQwen3Next, "\"intermediate_size\": 5120,", ""), ErrorCode::kCorrupt, "intermediate_size");
}

TEST_F(ModelConfigTest, Qwen35WithExperts) {
  const std::string text = R"({"attention_bias": false, "attn_output_gate": true, "eos_token_id": 248044, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 512, "vocab_size": 248320, "rope_parameters": {"mrope_interleaved": true,
    "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}})";
  const std::string whole = R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "tie_word_embeddings": false, "vision_config": {"depth": 27}, "text_config": )" +
                            text + "}";
  const ModelConfig config = load(whole);
  EXPECT_EQ(config.model_type, "qwen3_5_moe_text");
  EXPECT_EQ(config.num_parameters(), 34660610688);
  EXPECT_EQ(config.num_softmax_layers(), 10);
  EXPECT_EQ(config.active_mlp_size(0), 9 * 512);
  EXPECT_TRUE(config.gates_shared_expert && !config.linear.fuses_projections && config.norm_topk_prob);
  EXPECT_TRUE(config.dense_layers.empty());
  EXPECT_EQ(load(saved_config_json(config, DType::kBF16)).num_parameters(), config.num_parameters());
  expect_error(edit(text, "\"mlp_only_layers\": []", "\"mlp_only_layers\": [1]"), ErrorCode::kNotImplemented, "mlp_only_layers");
}

// As published: with a part for images beside it.
TEST_F(ModelConfigTest, ThePartForTextOfAModelForImages) {
  const std::string whole = R"({"architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": )" + std::string(kQwen35) +
                            R"(, "tie_word_embeddings": true, "vision_config": {"depth": 12, "model_type": "qwen3_5"}})";
  const ModelConfig config = load(whole), alone = load(kQwen35);
  EXPECT_EQ(config.model_type, "qwen3_5_text");
  EXPECT_EQ(config.num_parameters(), alone.num_parameters());
  EXPECT_EQ(config.eos_ids, alone.eos_ids);
  EXPECT_EQ(load(saved_config_json(config, DType::kBF16)).num_parameters(), alone.num_parameters()) << "what is saved is a model for text";
  EXPECT_THAT(saved_config_json(config, DType::kBF16), ::testing::Not(::testing::HasSubstr("vision_config")));
  expect_error(R"({"model_type": "qwen3_5", "vision_config": {}})", ErrorCode::kNotImplemented, "model_type");
}

// The published config.json of Phi-4, and what Phi-4-mini and Phi-3.5-mini have in other places; their lists of factors are shortened.
constexpr const char* kPhi4 = R"({
  "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 100257, "embd_pdrop": 0.0,
  "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17920,
  "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
  "original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 250000, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
  "vocab_size": 100352})";

TEST_F(ModelConfigTest, Phi3) {
  const ModelConfig phi4 = load(kPhi4);
  EXPECT_EQ(phi4.num_parameters(), 14659507200) << "the published size of Phi-4";
  EXPECT_TRUE(phi4.fuses_projections && !phi4.attention_bias && !phi4.long_rope);
  EXPECT_EQ(phi4.rotary_dim(), 128);
  const auto replaced = [](std::string text, const std::vector<std::array<std::string, 3>>& changes) {
    for (const auto& [key, from, to] : changes) text = edit(text, "\"" + key + "\": " + from, "\"" + key + "\": " + to);
    return text;
  };
  const std::string mini = replaced(kPhi4, {{"hidden_size", "5120", "3072"},
                                            {"intermediate_size", "17920", "8192"},
                                            {"num_attention_heads", "40", "24"},
                                            {"num_hidden_layers", "40", "32"},
                                            {"num_key_value_heads", "10", "8"},
                                            {"tie_word_embeddings", "false", "true"},
                                            {"vocab_size", "100352", "200064, \"partial_rotary_factor\": 0.75"}});
  EXPECT_EQ(load(mini).num_parameters(), 3836021760) << "the published size of Phi-4-mini";
  EXPECT_EQ(load(mini).rotary_dim(), 96);
  const std::string phi35 = replaced(mini, {{"num_attention_heads", "24", "32"},
                                            {"num_key_value_heads", "8", "32"},
                                            {"tie_word_embeddings", "true", "false"},
                                            {"vocab_size", "200064", "32064"},
                                            {"partial_rotary_factor", "0.75", "1.0"},
                                            {"bos_token_id", "100257", "1"},
                                            {"eos_token_id", "100265", "32000"}});
  EXPECT_EQ(load(phi35).num_parameters(), 3821079552) << "the published size of Phi-3.5-mini";
  EXPECT_EQ(load(phi35).head_dim, 96);
  EXPECT_EQ(load(replaced(kPhi4, {{"sliding_window", "null", "262144"}})).max_position, 16384);
  EXPECT_EQ(load(replaced(kPhi4, {{"sliding_window", "null", "2047"}})).window_of(0), 2047);
  expect_error(replaced(kPhi4, {{"resid_pdrop", "0.0", "0.1"}}), ErrorCode::kNotImplemented, "'resid_pdrop' is 0.1");
  expect_error(replaced(kPhi4, {{"embd_pdrop", "0.0", "0.1"}}), ErrorCode::kNotImplemented, "'embd_pdrop' is 0.1");
  expect_error(replaced(mini, {{"partial_rotary_factor", "0.75", "0.7"}}), ErrorCode::kNotImplemented, "partial_rotary_factor");
}

TEST_F(ModelConfigTest, LongRope) {
  std::string ones = "1.0", twos = "2.0";
  for (int i = 1; i < 64; ++i) ones += ", 1.0", twos += ", 2.0";
  const auto with = [&](const std::string& keys, const std::string& max_position = "131072", const std::string& original = "4096") {
    return edit(edit(edit(kPhi4, "\"rope_scaling\": null", "\"rope_scaling\": {" + keys + "}"), "\"max_position_embeddings\": 16384",
                     "\"max_position_embeddings\": " + max_position),
                "\"original_max_position_embeddings\": 16384,",
                original.empty() ? "" : "\"original_max_position_embeddings\": " + original + ",");
  };
  const std::string factors = "\"short_factor\": [" + ones + "], \"long_factor\": [" + twos + "]";
  const auto rope = [&](const std::string& text) { return load(text).long_rope.value(); };
  // The expected factors are those of transformers 5.24 (_compute_longrope_parameters).
  for (const char* type : {"longrope", "su", "yarn"}) {
    const LongRope found = rope(with("\"type\": \"" + std::string(type) + "\", " + factors));
    EXPECT_DOUBLE_EQ(found.attention_factor, 1.1902380714238083) << type;
    EXPECT_EQ(found.original_max_position, 4096);
    EXPECT_EQ(found.short_factors, std::vector<double>(64, 1.0));
    EXPECT_EQ(found.long_factors, std::vector<double>(64, 2.0));
  }
  const std::string longrope = "\"rope_type\": \"longrope\", " + factors;
  EXPECT_EQ(rope(with(longrope, "4096")).attention_factor, 1.0);
  EXPECT_DOUBLE_EQ(rope(with(longrope + ", \"factor\": 32.0", "4096")).attention_factor, 1.1902380714238083);
  EXPECT_EQ(rope(with(longrope + ", \"attention_factor\": 1.25", "4096")).attention_factor, 1.25);
  EXPECT_EQ(rope(with(longrope + ", \"original_max_position_embeddings\": 512")).original_max_position, 4096) << "the top level's counts";
  EXPECT_EQ(rope(with(longrope + ", \"original_max_position_embeddings\": 512", "131072", "")).original_max_position, 4096)
      << "and without it the family's";

  ModelConfig made = load(with(longrope));
  made.raw_json.clear();
  EXPECT_EQ(load(to_config_json(made)).long_rope, made.long_rope);
  check_same_model(made, load(with(longrope)), "there");
  EXPECT_THROW(check_same_model(made, load(with(longrope + ", \"attention_factor\": 2.0")), "there"), Error);
  EXPECT_THROW(check_same_model(made, load(with(longrope + ", \"attention_factor\": 1.1902380714238083", "4096")), "there"), Error)
      << "one takes the long factors, the other the short ones";

  expect_error(with("\"rope_type\": \"longrope\""), ErrorCode::kCorrupt, "short_factor");
  expect_error(with("\"rope_type\": \"longrope\", \"short_factor\": [1.0], \"long_factor\": [" + twos + "]"), ErrorCode::kCorrupt,
               "'short_factor' has 1 numbers, wanted one for each of the 64 pairs");
  expect_error(with("\"rope_type\": \"longrope\", \"short_factor\": [" + ones + "], \"long_factor\": [\"x\"]"), ErrorCode::kCorrupt,
               "long_factor");
  expect_error(with("\"rope_type\": \"llama3\", \"factor\": 8.0"), ErrorCode::kNotImplemented,
               "'rope_type' is 'llama3'; of phi3 models this build knows 'default' and 'longrope'");
  expect_error(edit(kSmolLM2, "\"rope_scaling\": null", "\"rope_scaling\": {" + longrope + "}"), ErrorCode::kNotImplemented,
               "of llama models this build knows 'default', 'linear', 'llama3' and 'yarn'");
}

// The published config.json of GLM-4.5-Air.
constexpr const char* kGlm4Moe = R"({
  "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "pad_token_id": 151329,
  "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
  "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
  "moe_intermediate_size": 1408, "norm_topk_prob": true, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
  "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
  "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.54.0", "use_cache": true, "use_qk_norm": false,
  "vocab_size": 151552})";

TEST_F(ModelConfigTest, Glm4Moe) {
  const ModelConfig config = load(kGlm4Moe);
  EXPECT_TRUE(config.attention_bias && !config.attention_out_bias && !config.qk_norm && config.has_score_router && config.norm_topk_prob);
  EXPECT_EQ(config.rotary_dim(), 64);
  EXPECT_EQ(config.shared_expert_size, 1408);
  EXPECT_EQ(config.num_skipped_layers, 1);
  EXPECT_FALSE(config.is_sparse(0));
  EXPECT_TRUE(config.is_sparse(1) && config.is_sparse(45));
  EXPECT_EQ(config.active_mlp_size(0), 10944);
  EXPECT_EQ(config.active_mlp_size(1), 9 * 1408);
  const std::int64_t attention = 4096 * 128 * (2 * 96 + 2 * 8), experts = 45LL * 3 * 4096 * 1408;
  EXPECT_EQ(config.num_active_parameters(), 46 * attention + 3LL * 4096 * 10944 + 45LL * 128 * 4096 + 9 * experts + 151552LL * 4096);
  EXPECT_EQ(config.num_parameters(),
            config.num_active_parameters() + 120 * experts + 151552LL * 4096 + 46LL * (2 * 4096 + 128 * (96 + 2 * 8)) + 4096);

  const auto replaced = [&](const std::string& key, const std::string& from, const std::string& to) {
    return edit(kGlm4Moe, "\"" + key + "\": " + from, "\"" + key + "\": " + to);
  };
  EXPECT_EQ(load(edit(kGlm4Moe, "\"partial_rotary_factor\": 0.5,", "")).rotary_dim(), 64) << "the family's own default";
  EXPECT_EQ(load(replaced("rope_scaling", "null", R"({"rope_type": "default", "partial_rotary_factor": 0.25})")).rotary_dim(), 32);
  EXPECT_EQ(load(replaced("partial_rotary_factor", "0.5", "1.0")).rotary_dim(), 128);
  EXPECT_EQ(load(replaced("n_shared_experts", "1", "0")).active_mlp_size(1), 8 * 1408);
  EXPECT_EQ(load(replaced("first_k_dense_replace", "1", "3")).dense_layers, (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_TRUE(load(replaced("first_k_dense_replace", "1", "0")).is_sparse(0));
  const ModelConfig grouped = load(edit(replaced("n_group", "1", "8"), "\"topk_group\": 1", "\"topk_group\": 4"));
  EXPECT_EQ(grouped.num_expert_groups, 8);
  EXPECT_EQ(grouped.num_active_groups, 4);

  expect_error(replaced("first_k_dense_replace", "1", "46"), ErrorCode::kNotImplemented, "first_k_dense_replace");
  expect_error(replaced("partial_rotary_factor", "0.5", "0.3"), ErrorCode::kNotImplemented, "partial_rotary_factor");
  expect_error(replaced("attention_dropout", "0.0", "0.1"), ErrorCode::kNotImplemented, "attention_dropout");
  expect_error(replaced("n_group", "1", "3"), ErrorCode::kCorrupt, "n_group");
  expect_error(replaced("n_group", "1", "128"), ErrorCode::kCorrupt, "n_group");
  expect_error(replaced("topk_group", "1", "2"), ErrorCode::kCorrupt, "topk_group");
  expect_error(replaced("n_group", "1", "32"), ErrorCode::kCorrupt, "num_experts_per_tok");
  expect_error(replaced("hidden_act", "\"silu\"", "\"gelu\""), ErrorCode::kNotImplemented, "hidden_act");
  expect_error(edit(kQwen3, "\"rope_theta\": 1000000", "\"rope_theta\": 1000000, \"partial_rotary_factor\": 0.5"),
               ErrorCode::kNotImplemented, "partial_rotary_factor");
  // What was not read is not said to be in what is saved.
  EXPECT_THAT(saved_config_json(config, DType::kBF16), HasSubstr("\"num_nextn_predict_layers\": 0"));
}

TEST_F(ModelConfigTest, HeadSizesWithoutAKernelAreRefusedAtLoad) {
  for (const int size : {24, 40, 100, 33, 512})
    expect_error(edit(kQwen3, "\"head_dim\": 128", "\"head_dim\": " + std::to_string(size)), ErrorCode::kNotImplemented,
                 "16, 32, 64, 80, 96, 128, 256");
  expect_error(edit(kSmolLM2, "\"hidden_size\": 576", "\"hidden_size\": 360"), ErrorCode::kNotImplemented, "heads of 40 elements");
}

TEST_F(ModelConfigTest, RefusesWhatItCannotCompute) {
  expect_error(edit(kSmolLM2, "\"model_type\": \"llama\"", "\"model_type\": \"mamba\""), ErrorCode::kNotImplemented, "llama, qwen2, qwen3");
  expect_error(edit(kSmolLM2, "LlamaForCausalLM", "LlamaForSequenceClassification"), ErrorCode::kNotImplemented, "architectures");
  expect_error(edit(kSmolLM2, "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""), ErrorCode::kNotImplemented, "hidden_act");
  expect_error(edit(kSmolLM2, "\"mlp_bias\": false", "\"mlp_bias\": true"), ErrorCode::kNotImplemented, "mlp_bias");
  expect_error(edit(kQwen3, "\"max_window_layers\": 28", R"("layer_types": ["full_attention", "sliding_attention"])"), ErrorCode::kCorrupt,
               "layer_types");
  expect_error(edit(kQwen3, "\"max_window_layers\": 28", R"("quantization_config": {"quant_method": "mxfp4"})"), ErrorCode::kNotImplemented,
               "key 'quantization_config' has the 'quant_method' 'mxfp4'");
}

TEST_F(ModelConfigTest, NamesTheKeyThatIsWrong) {
  expect_error("{", ErrorCode::kCorrupt, "JSON");
  expect_error("[]", ErrorCode::kCorrupt, "JSON object");
  expect_error("{}", ErrorCode::kCorrupt, "model_type");
  expect_error(edit(kSmolLM2, "\"hidden_size\": 576,", ""), ErrorCode::kCorrupt, "hidden_size");
  expect_error(edit(kSmolLM2, "\"hidden_size\": 576", "\"hidden_size\": -4"), ErrorCode::kCorrupt, "hidden_size");
  expect_error(edit(kSmolLM2, "\"hidden_size\": 576", "\"hidden_size\": \"big\""), ErrorCode::kCorrupt, "hidden_size");
  expect_error(edit(kSmolLM2, "\"num_key_value_heads\": 3", "\"num_key_value_heads\": 2"), ErrorCode::kCorrupt, "num_key_value_heads");
  expect_error(edit(kSmolLM2, "\"eos_token_id\": 0", "\"eos_token_id\": 99999"), ErrorCode::kCorrupt, "eos_token_id");
  expect_error(edit(kSmolLM2, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": 1"), ErrorCode::kCorrupt, "tie_word_embeddings");
  fs::remove(folder_ / "config.json");
  try {
    load_model_config(folder_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  }
}

TEST_F(ModelConfigTest, EndIdsComeFromBothFiles) {
  std::ofstream(folder_ / "generation_config.json") << R"({"eos_token_id": [151645, 151643], "temperature": 0.6})";
  EXPECT_THAT(load(kQwen3).eos_ids, ElementsAre(151645, 151643));
}

TEST_F(ModelConfigTest, WhatInitModelWritesReadsBack) {
  for (const Family* family : families()) {
    InitModelOptions options;
    options.family = family->model_type;
    options.head_dim = family->partial_rotary_factor < 0.5 ? 64 : 32;
    options.eos_id = 5;
    options.rope_theta = 12345.5;
    ModelConfig made = make_model_config(options);
    if (family->has_long_rope)
      made.long_rope = LongRope{std::vector<double>(16, 1.5), std::vector<double>(16, 0.1), 512, 1.25};
    else
      made.rope_scaling = {true, 8.0, 1.0, 4.0, 512};
    made.yarn.reset();  // of families that have it where nothing else is said
    const ModelConfig read = load(to_config_json(made));
    EXPECT_EQ(read.architecture, family->architecture);
    EXPECT_EQ(read.num_parameters(), made.num_parameters());
    EXPECT_EQ(read.head_dim, made.head_dim);
    EXPECT_EQ(read.unrotated_layers, made.unrotated_layers);
    EXPECT_EQ(read.unrotated_layers.empty(),
              family->model_type != "smollm3" && family->model_type != "afmoe" && family->model_type != "nemotron_h");
    EXPECT_EQ(read.embedding_scale, made.embedding_scale);
    EXPECT_EQ(read.qk_norm, made.qk_norm);
    EXPECT_EQ(read.attention_bias, made.attention_bias);
    EXPECT_EQ(read.tie_word_embeddings, made.tie_word_embeddings);
    EXPECT_EQ(read.rope_theta, 12345.5);
    EXPECT_EQ(read.rms_norm_eps, made.rms_norm_eps);
    EXPECT_EQ(read.rope_scaling.enabled, !family->has_long_rope);
    EXPECT_EQ(read.rope_scaling.original_max_position, made.rope_scaling.original_max_position);
    EXPECT_EQ(read.long_rope, made.long_rope);
    EXPECT_EQ(read.window_rope_theta, made.window_rope_theta);
    EXPECT_EQ(read.num_experts, made.num_experts);
    EXPECT_EQ(read.expert_size, made.expert_size);
    EXPECT_EQ(read.shared_expert_size, made.shared_expert_size);
    EXPECT_EQ(read.gates_shared_expert, made.gates_shared_expert);
    EXPECT_EQ(read.linear, made.linear);
    EXPECT_EQ(read.latent, made.latent);
    EXPECT_THAT(read.eos_ids, ElementsAre(5));
  }
  InitModelOptions odd;
  odd.head_dim = 33;
  EXPECT_THROW(make_model_config(odd), Error);
  odd = {};
  odd.family = "gpt5";
  EXPECT_THROW(make_model_config(odd), Error);
}

}  // namespace
}  // namespace prl::nn
