#include "nn/tensor_table.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/error.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {
using testing_support::small_options;

ModelConfig config_of(const std::string& family, bool tied) {
  InitModelOptions options = small_options(family);
  options.num_layers = 2;
  options.tie_word_embeddings = tied;
  return make_model_config(options);
}

std::vector<std::string> names_and_shapes(const TensorTable& table) {
  std::vector<std::string> out;
  for (const TensorSpec& spec : table.tensors()) out.push_back(spec.name + " " + spec.shape.to_string());
  return out;
}

TEST(TensorTable, ListsWhatCheckpointsHoldInTheirOrder) {
  using ::testing::ElementsAre;
  EXPECT_THAT(names_and_shapes(*make_tensor_table(config_of("qwen2", false))),
              ElementsAre("model.embed_tokens.weight [97, 64]", "model.layers.0.input_layernorm.weight [64]",
                          "model.layers.0.self_attn.q_proj.weight [128, 64]", "model.layers.0.self_attn.k_proj.weight [64, 64]",
                          "model.layers.0.self_attn.v_proj.weight [64, 64]", "model.layers.0.self_attn.q_proj.bias [128]",
                          "model.layers.0.self_attn.k_proj.bias [64]", "model.layers.0.self_attn.v_proj.bias [64]",
                          "model.layers.0.self_attn.o_proj.weight [64, 128]", "model.layers.0.post_attention_layernorm.weight [64]",
                          "model.layers.0.mlp.gate_proj.weight [80, 64]", "model.layers.0.mlp.up_proj.weight [80, 64]",
                          "model.layers.0.mlp.down_proj.weight [64, 80]", "model.layers.1.input_layernorm.weight [64]",
                          "model.layers.1.self_attn.q_proj.weight [128, 64]", "model.layers.1.self_attn.k_proj.weight [64, 64]",
                          "model.layers.1.self_attn.v_proj.weight [64, 64]", "model.layers.1.self_attn.q_proj.bias [128]",
                          "model.layers.1.self_attn.k_proj.bias [64]", "model.layers.1.self_attn.v_proj.bias [64]",
                          "model.layers.1.self_attn.o_proj.weight [64, 128]", "model.layers.1.post_attention_layernorm.weight [64]",
                          "model.layers.1.mlp.gate_proj.weight [80, 64]", "model.layers.1.mlp.up_proj.weight [80, 64]",
                          "model.layers.1.mlp.down_proj.weight [64, 80]", "model.norm.weight [64]", "lm_head.weight [97, 64]"));
  ModelConfig qwen3 = config_of("qwen3", true);
  qwen3.num_layers = 1;
  qwen3.attention_out_bias = true;
  EXPECT_THAT(names_and_shapes(*make_tensor_table(qwen3)),
              ElementsAre("model.embed_tokens.weight [97, 64]", "model.layers.0.input_layernorm.weight [64]",
                          "model.layers.0.self_attn.q_proj.weight [128, 64]", "model.layers.0.self_attn.k_proj.weight [64, 64]",
                          "model.layers.0.self_attn.v_proj.weight [64, 64]", "model.layers.0.self_attn.q_norm.weight [32]",
                          "model.layers.0.self_attn.k_norm.weight [32]", "model.layers.0.self_attn.o_proj.weight [64, 128]",
                          "model.layers.0.self_attn.o_proj.bias [64]", "model.layers.0.post_attention_layernorm.weight [64]",
                          "model.layers.0.mlp.gate_proj.weight [80, 64]", "model.layers.0.mlp.up_proj.weight [80, 64]",
                          "model.layers.0.mlp.down_proj.weight [64, 80]", "model.norm.weight [64]"));
}

TEST(TensorTable, MastersLieInOneArrayVectorsFirst) {
  for (const char* family : {"llama", "qwen2", "qwen3"}) {
    for (const bool tied : {true, false}) {
      const TensorTablePtr table = make_tensor_table(config_of(family, tied));
      std::vector<bool> is_taken(static_cast<std::size_t>(table->num_master_elements()));
      std::int64_t sum = 0;
      for (const TensorSpec& spec : table->tensors()) {
        EXPECT_EQ(spec.offset < table->num_vector_elements(), !spec.is_matrix()) << spec.name;
        for (std::int64_t i = spec.offset; i < spec.offset + spec.num_elements(); ++i) {
          EXPECT_FALSE(is_taken[static_cast<std::size_t>(i)]) << spec.name;
          is_taken[static_cast<std::size_t>(i)] = true;
        }
        sum += spec.num_elements();
      }
      EXPECT_EQ(sum, table->num_parameters());
      EXPECT_EQ(sum, table->num_trainable());
      for (const BlockSpec& block : table->blocks()) {
        EXPECT_EQ(block.offset % 16, 0);
        std::int64_t row = 0;
        for (const TensorSpec& spec : table->tensors_of(block)) {
          EXPECT_EQ(spec.first_row, row) << spec.name;
          EXPECT_EQ(spec.offset, block.offset + row * block.shape.num_elements() / block.shape[0]) << spec.name;
          row += spec.shape[0];
        }
        EXPECT_EQ(row, block.shape[0]);
      }
    }
  }
}

TEST(TensorTable, IsCountedWithoutBeingMade) {
  for (const char* family : {"llama",      "qwen2", "qwen3",       "qwen3_moe",   "glm4_moe",      "mistral",          "smollm3",
                             "mixtral",    "olmo2", "phi3",        "gpt_oss",     "qwen3_5_text",  "qwen3_5_moe_text", "qwen3_next",
                             "minimax_m2", "afmoe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gemma3_text",      "nemotron_h"})
    for (const bool tied : {true, false}) {
      const ModelConfig config = config_of(family, tied);
      const TensorTablePtr table = make_tensor_table(config);
      std::int64_t active = tied ? config.vocab_size * config.hidden_size : 0;
      for (const TensorSpec& spec : table->tensors())
        if ((spec.is_matrix() || spec.slot == Slot::kSharedExpertGate) && spec.slot != Slot::kEmbedding &&
            spec.expert < config.num_active_experts)
          active += spec.num_elements();
      EXPECT_EQ(count_parameters(config).all, table->num_parameters()) << family;
      EXPECT_EQ(count_parameters(config).active, active) << family;
    }
}

TEST(TensorTable, ExpertsFollowTheirLayersOtherTensors) {
  using ::testing::ElementsAre;
  InitModelOptions options = small_options("qwen3_moe");
  options.num_layers = 1;
  options.num_experts = 2;
  const TensorTablePtr table = make_tensor_table(make_model_config(options));
  std::vector<std::string> names;
  for (const TensorSpec& spec : table->tensors())
    if (spec.name.find(".mlp.") != std::string::npos) names.push_back(spec.name.substr(15));
  EXPECT_THAT(names, ElementsAre("mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight",
                                 "mlp.experts.0.down_proj.weight", "mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight",
                                 "mlp.experts.1.down_proj.weight"));
  EXPECT_FALSE(table->has(Block::kGateUp, 0)) << "the layer has no MLP of its own";
  EXPECT_EQ(table->blocks()[table->find(Block::kGateUp, 0, 1)].num_tensors, 2u);
}

TEST(TensorTable, ExpertsMayHaveMixtralsNames) {
  using ::testing::ElementsAre;
  InitModelOptions options = small_options("mixtral");
  options.num_layers = 1;
  options.num_experts = 2;
  const ModelConfig config = make_model_config(options);
  const TensorTablePtr table = make_tensor_table(config);
  std::vector<std::string> names;
  for (const TensorSpec& spec : table->tensors())
    if (spec.name.find(".block_sparse_moe.") != std::string::npos)
      names.push_back(spec.name.substr(32) + " " + spec.shape.to_string());
    else
      EXPECT_EQ(spec.name.find("mlp"), std::string::npos) << spec.name;
  EXPECT_THAT(names, ElementsAre("gate.weight [2, 64]", "experts.0.w1.weight [80, 64]", "experts.0.w3.weight [80, 64]",
                                 "experts.0.w2.weight [64, 80]", "experts.1.w1.weight [80, 64]", "experts.1.w3.weight [80, 64]",
                                 "experts.1.w2.weight [64, 80]"));
}

std::vector<std::string> layer_tensors(const std::string& family) {
  std::vector<std::string> names;
  const TensorTablePtr table = make_tensor_table(make_model_config(small_options(family)));
  for (const TensorSpec& spec : table->tensors())
    if (spec.layer == 0) names.push_back(spec.name.substr(15) + " " + spec.shape.to_string());
  return names;
}

TEST(TensorTable, MixtralsNamesMayHaveABias) {
  InitModelOptions options = small_options("minimax_m2");
  options.num_layers = options.num_experts = options.num_active_experts = 1;
  const TensorTablePtr table = make_tensor_table(make_model_config(options));
  std::vector<std::string> names;
  for (const TensorSpec& spec : table->tensors())
    if (spec.layer == 0) names.push_back(spec.name.substr(15) + " " + spec.stored_shape().to_string());
  EXPECT_THAT(names,
              ::testing::ElementsAre("input_layernorm.weight [64]", "self_attn.q_proj.weight [128, 64]", "self_attn.k_proj.weight [64, 64]",
                                     "self_attn.v_proj.weight [64, 64]", "self_attn.q_norm.weight [128]", "self_attn.k_norm.weight [64]",
                                     "self_attn.o_proj.weight [64, 128]", "post_attention_layernorm.weight [64]",
                                     "block_sparse_moe.gate.weight [1, 64]", "block_sparse_moe.e_score_correction_bias [1]",
                                     "block_sparse_moe.experts.0.w1.weight [80, 64]", "block_sparse_moe.experts.0.w3.weight [80, 64]",
                                     "block_sparse_moe.experts.0.w2.weight [64, 80]"));
}

TEST(TensorTable, ExpertsMayBeOneTensorInFiles) {
  InitModelOptions options = small_options("gpt_oss");
  options.num_layers = 1;
  options.num_experts = 2;
  const ModelConfig config = make_model_config(options);
  const TensorTablePtr table = make_tensor_table(config);
  std::vector<std::string> names;
  for (const TensorSpec& spec : table->tensors())
    if (spec.name.find(".mlp.") != std::string::npos || spec.slot == Slot::kSinks)
      names.push_back(spec.name.substr(15) + " " + spec.stored_shape().to_string());
  EXPECT_THAT(names, ::testing::ElementsAre("mlp.router.weight [2, 64]", "self_attn.sinks [4]", "mlp.router.bias [2]",
                                            "mlp.experts.gate_up_proj_bias [2, 160]", "mlp.experts.down_proj_bias [2, 64]",
                                            "mlp.experts.0.gate_up_proj.weight [160, 64]", "mlp.experts.0.down_proj.weight [64, 80]",
                                            "mlp.experts.1.gate_up_proj.weight [160, 64]", "mlp.experts.1.down_proj.weight [64, 80]"));
  EXPECT_EQ(table->blocks()[table->find(Block::kGateUpBiases, 0)].shape, (Shape{320})) << "one vector for kernels";
}

TEST(TensorTable, NormsMayStandBehindWhatTheyNormAndSpanAllHeads) {
  EXPECT_THAT(
      layer_tensors("olmo2"),
      ::testing::ElementsAre("self_attn.q_proj.weight [128, 64]", "self_attn.k_proj.weight [64, 64]", "self_attn.v_proj.weight [64, 64]",
                             "self_attn.q_norm.weight [128]", "self_attn.k_norm.weight [64]", "self_attn.o_proj.weight [64, 128]",
                             "post_attention_layernorm.weight [64]", "mlp.gate_proj.weight [80, 64]", "mlp.up_proj.weight [80, 64]",
                             "mlp.down_proj.weight [64, 80]", "post_feedforward_layernorm.weight [64]"));
}

TEST(TensorTable, LayersMayNormInputsAndOutputsAndGateHeadsApart) {
  InitModelOptions options = small_options("afmoe");
  options.num_layers = 2;
  options.num_experts = options.num_active_experts = 1;
  const TensorTablePtr table = make_tensor_table(make_model_config(options));
  std::vector<std::string> names[2];
  for (const TensorSpec& spec : table->tensors())
    if (spec.layer >= 0) names[spec.layer].push_back(spec.name.substr(15) + " " + spec.stored_shape().to_string());
  EXPECT_THAT(names[0], ::testing::ElementsAre(
                            "input_layernorm.weight [64]", "self_attn.q_proj.weight [128, 64]", "self_attn.gate_proj.weight [128, 64]",
                            "self_attn.k_proj.weight [64, 64]", "self_attn.v_proj.weight [64, 64]", "self_attn.q_norm.weight [32]",
                            "self_attn.k_norm.weight [32]", "self_attn.o_proj.weight [64, 128]", "post_attention_layernorm.weight [64]",
                            "pre_mlp_layernorm.weight [64]", "mlp.gate_proj.weight [80, 64]", "mlp.up_proj.weight [80, 64]",
                            "mlp.down_proj.weight [64, 80]", "post_mlp_layernorm.weight [64]"));
  names[1].erase(names[1].begin(), names[1].begin() + 10);
  EXPECT_THAT(names[1], ::testing::ElementsAre("post_mlp_layernorm.weight [64]", "mlp.router.gate.weight [1, 64]", "mlp.expert_bias [1]",
                                               "mlp.shared_experts.gate_proj.weight [40, 64]", "mlp.shared_experts.up_proj.weight [40, 64]",
                                               "mlp.shared_experts.down_proj.weight [64, 40]", "mlp.experts.0.gate_proj.weight [40, 64]",
                                               "mlp.experts.0.up_proj.weight [40, 64]", "mlp.experts.0.down_proj.weight [64, 40]"));
  EXPECT_EQ(table->blocks()[table->find(Block::kQkv, 1)].shape, (Shape{384, 64})) << "queries, gates, keys and values are one product";
}

TEST(TensorTable, ProjectionsMayBeOneTensor) {
  EXPECT_THAT(layer_tensors("phi3"), ::testing::ElementsAre("input_layernorm.weight [64]", "self_attn.qkv_proj.weight [256, 64]",
                                                            "self_attn.o_proj.weight [64, 128]", "post_attention_layernorm.weight [64]",
                                                            "mlp.gate_up_proj.weight [160, 64]", "mlp.down_proj.weight [64, 80]"));
  const ModelConfig config = make_model_config(small_options("phi3"));
  const TensorTablePtr table = make_tensor_table(config);
  EXPECT_EQ(table->blocks()[table->find(Block::kQkv, 1)].shape, (Shape{256, 64}));
  EXPECT_EQ(table->blocks()[table->find(Block::kGateUp, 1)].shape, (Shape{160, 64}));
}

TEST(TensorTable, LayersMayDiffer) {
  using ::testing::ElementsAre;
  InitModelOptions options = small_options("glm4_moe");
  options.num_layers = 2;
  options.num_experts = 2;
  const ModelConfig config = make_model_config(options);
  const TensorTablePtr table = make_tensor_table(config);
  std::vector<std::string> names;
  for (const TensorSpec& spec : table->tensors())
    if (spec.name.find(".mlp.") != std::string::npos) names.push_back(spec.name.substr(13) + " " + spec.stored_shape().to_string());
  EXPECT_THAT(names, ElementsAre("0.mlp.gate_proj.weight [80, 64]", "0.mlp.up_proj.weight [80, 64]", "0.mlp.down_proj.weight [64, 80]",
                                 "1.mlp.gate.weight [2, 64]", "1.mlp.gate.e_score_correction_bias [2]",
                                 "1.mlp.shared_experts.gate_proj.weight [40, 64]", "1.mlp.shared_experts.up_proj.weight [40, 64]",
                                 "1.mlp.shared_experts.down_proj.weight [64, 40]", "1.mlp.experts.0.gate_proj.weight [40, 64]",
                                 "1.mlp.experts.0.up_proj.weight [40, 64]", "1.mlp.experts.0.down_proj.weight [64, 40]",
                                 "1.mlp.experts.1.gate_proj.weight [40, 64]", "1.mlp.experts.1.up_proj.weight [40, 64]",
                                 "1.mlp.experts.1.down_proj.weight [64, 40]"));
  EXPECT_FALSE(table->has(Block::kRouter, 0));
  EXPECT_EQ(table->blocks()[table->find(Block::kGateUp, 1)].shape, (Shape{80, 64})) << "of the shared experts";
  EXPECT_EQ(table->find(Block::kGateUp, 0, 0), TensorTable::kNone);
  const std::vector<ElementRange> exact = exact_ranges(*table);
  ASSERT_EQ(exact.size(), 1u);
  EXPECT_EQ(exact[0], table->blocks()[table->find(Block::kRouterBias, 1)].range());
  EXPECT_EQ(exact[0].count(), 6) << "two experts in three parts";
}

TEST(TensorTable, ASharedExpertMayHaveAGate) {
  using ::testing::ElementsAre;
  InitModelOptions options = small_options("qwen3_next");
  options.num_layers = options.num_experts = 1;
  options.num_active_experts = 1;
  const TensorTablePtr next = make_tensor_table(make_model_config(options));
  options.family = "qwen3_5_moe_text";
  options.num_layers = 2;
  const TensorTablePtr moe = make_tensor_table(make_model_config(options));
  const auto names = [](const TensorTable& table, const std::string& part) {
    std::vector<std::string> out;
    for (const TensorSpec& spec : table.tensors())
      if (spec.layer == 0 && spec.name.find(part) != std::string::npos)
        out.push_back(spec.name.substr(15) + " " + spec.stored_shape().to_string());
    return out;
  };
  for (const TensorTablePtr& table : {next, moe})
    EXPECT_THAT(names(*table, ".mlp."),
                ElementsAre("mlp.gate.weight [1, 64]", "mlp.shared_expert.gate_proj.weight [40, 64]",
                            "mlp.shared_expert.up_proj.weight [40, 64]", "mlp.shared_expert.down_proj.weight [64, 40]",
                            "mlp.shared_expert_gate.weight [1, 64]", "mlp.experts.0.gate_proj.weight [40, 64]",
                            "mlp.experts.0.up_proj.weight [40, 64]", "mlp.experts.0.down_proj.weight [64, 40]"));
  EXPECT_THAT(names(*moe, "in_proj"), ElementsAre("linear_attn.in_proj_qkv.weight [512, 64]", "linear_attn.in_proj_z.weight [256, 64]",
                                                  "linear_attn.in_proj_b.weight [4, 64]", "linear_attn.in_proj_a.weight [4, 64]"));
  options.family = "qwen3_next";
  EXPECT_THAT(names(*make_tensor_table(make_model_config(options)), "in_proj"),
              ElementsAre("linear_attn.in_proj_qkvz.weight [768, 64]", "linear_attn.in_proj_ba.weight [8, 64]"));
  const TensorSpec& gate = *std::ranges::find(moe->tensors(), Slot::kSharedExpertGate, &TensorSpec::slot);
  EXPECT_FALSE(gate.is_matrix());
  EXPECT_TRUE(gate.is_matrix_in_files());
}

TEST(TensorTable, FindsBlocksByKindAndLayer) {
  const TensorTablePtr tied = make_tensor_table(config_of("llama", true)), own = make_tensor_table(config_of("qwen2", false));
  for (const TensorTablePtr& table : {tied, own})
    for (std::size_t i = 0; i < table->blocks().size(); ++i) EXPECT_EQ(table->find(table->blocks()[i].kind, table->blocks()[i].layer), i);
  EXPECT_EQ(own->blocks()[own->find(Block::kQkv, 1)].shape, (Shape{256, 64}));
  EXPECT_FALSE(tied->has(Block::kQkvBias, 0));
  EXPECT_TRUE(own->has(Block::kQkvBias, 0));
  EXPECT_FALSE(own->has(Block::kQkv, 2));
  EXPECT_FALSE(own->has(Block::kQkv));
  EXPECT_TRUE(tied->has_tied_head());
  EXPECT_EQ(tied->find(Block::kLmHead), tied->find(Block::kEmbedding));
  EXPECT_FALSE(own->has_tied_head());
}

TEST(TensorTable, ExpertsHaveBlocksOfTheirOwn) {
  std::vector<TensorSpec> specs;
  for (const std::int64_t layer : {0, 1})
    for (const std::int64_t expert : {0, 1, 2})
      for (const Slot slot : {Slot::kGate, Slot::kUp})
        specs.push_back({.name = fmt::format("{}.{}.{}", layer, expert, static_cast<int>(slot)),
                         .slot = slot,
                         .layer = layer,
                         .expert = expert,
                         .shape = {4, 8},
                         .block = Block::kGateUp});
  const TensorTable table(specs);
  EXPECT_EQ(table.blocks().size(), 6u);
  std::set<std::size_t> found;
  for (const std::int64_t layer : {0, 1})
    for (const std::int64_t expert : {0, 1, 2}) found.insert(table.find(Block::kGateUp, layer, expert));
  EXPECT_THAT(found, ::testing::ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_EQ(table.find(Block::kGateUp, 1, 3), TensorTable::kNone);
  EXPECT_EQ(table.find(Block::kGateUp, 1), TensorTable::kNone);
}

TEST(TensorTable, OnlyTrainableTensorsHaveAPlaceAmongMasters) {
  const TensorTablePtr whole = make_tensor_table(config_of("llama", false));
  std::vector<TensorSpec> specs(whole->tensors().begin(), whole->tensors().end());
  for (TensorSpec& spec : specs) spec.trainable = spec.layer == 1;
  const TensorTable some(specs);
  EXPECT_EQ(some.num_parameters(), whole->num_parameters());
  EXPECT_EQ(some.num_master_elements(), some.num_trainable()) << "shapes here leave no gaps";
  EXPECT_LT(some.num_trainable(), whole->num_trainable() * 0.6);
  for (const TensorSpec& spec : some.tensors()) EXPECT_EQ(spec.offset >= 0, spec.layer == 1) << spec.name;
}

TEST(TensorTable, GgufNamesAreThoseOfItsArchitectures) {
  EXPECT_EQ(gguf_name(Slot::kEmbedding), "token_embd.weight");
  EXPECT_EQ(gguf_name(Slot::kQ, 3), "blk.3.attn_q.weight");
  EXPECT_EQ(gguf_name(Slot::kVBias, 11), "blk.11.attn_v.bias");
  EXPECT_EQ(gguf_name(Slot::kO, 0), "blk.0.attn_output.weight");
  EXPECT_EQ(gguf_name(Slot::kPostNorm, 1), "blk.1.ffn_norm.weight");
  EXPECT_EQ(gguf_name(Slot::kLmHead), "output.weight");
}

}  // namespace
}  // namespace prl::nn
