#include "nn/shards.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "nn/init_model.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {
using testing_support::small_options;

/// `first` and `count` of each.
std::vector<RowRun> runs(const std::vector<std::pair<std::int64_t, std::int64_t>>& all) {
  std::vector<RowRun> out;
  for (const auto& [first, count] : all) out.push_back({.first = first, .count = count});
  return out;
}

void expect_rows_once(const ModelConfig& config, int size) {
  const TensorTablePtr whole = make_tensor_table(config);
  std::vector<TensorTablePtr> parts;
  for (int rank = 0; rank < size; ++rank) parts.push_back(make_tensor_table(config, {rank, size}));
  for (std::size_t i = 0; i < whole->tensors().size(); ++i) {
    const TensorSpec& all = whole->tensors()[i];
    std::vector<int> num_holders(static_cast<std::size_t>(all.shape[0]), 0);
    for (const TensorTablePtr& part : parts) {
      const TensorSpec& own = part->tensors()[i];
      EXPECT_EQ(own.name, all.name);
      if (all.is_matrix()) {
        EXPECT_EQ(own.shape[1], all.shape[1]) << all.name << ": sums are whole";
      }
      std::int64_t num_rows = 0;
      for (const RowRun& run : own.held_rows()) {
        num_rows += run.count;
        for (std::int64_t row = run.first; row < run.first + run.count && !run.is_copy; ++row) ++num_holders[static_cast<std::size_t>(row)];
      }
      EXPECT_EQ(num_rows, own.shape[0]) << all.name;
    }
    EXPECT_THAT(num_holders, ::testing::Each(all.is_shared && size > 1 ? 1 : size)) << config.model_type << " " << all.name;
  }
}

TEST(Shards, EachRowIsHeldOnce) {
  for (const char* family : {"qwen2", "phi3", "glm4_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "qwen3_next", "nemotron_h"}) {
    InitModelOptions options = small_options(family);
    options.num_kv_heads = options.num_heads = 8;
    options.expert_size = 64;
    const ModelConfig config = make_model_config(options);
    for (const int size : {1, 2, 4}) expect_rows_once(config, size);
  }
}

TEST(Shards, DevicesHaveTheSameHeadsOfKeysWhereThereAreFewer) {
  InitModelOptions options = small_options("phi3");
  options.num_heads = 8;
  options.num_kv_heads = 2;
  options.intermediate_size = 96;
  const ModelConfig config = make_model_config(options);  // heads of 32 elements: 256 rows of queries, 64 of keys and of values
  EXPECT_EQ(num_kv_heads_of_shard(config, 2), 1);
  EXPECT_EQ(num_kv_heads_of_shard(config, 4), 1);
  std::vector<RowRun> wanted = runs({{64, 64}, {256, 32}, {320, 32}});
  wanted[1].is_copy = wanted[2].is_copy = true;
  EXPECT_EQ(held_rows(config, Slot::kFusedQkv, 384, {1, 4}), wanted);
  EXPECT_EQ(held_rows(config, Slot::kFusedQkv, 384, {2, 4}), runs({{128, 64}, {288, 32}, {352, 32}}));
  EXPECT_NO_THROW(check_shards(config, 4));
  expect_rows_once(config, 4);
}

TEST(Shards, MatricesOfLayersAreShared) {
  for (const TensorSpec& spec : make_tensor_table(make_model_config(small_options("qwen2")))->tensors())
    EXPECT_EQ(spec.is_shared, spec.layer >= 0 && (spec.is_matrix() || is_bias(spec.block))) << spec.name;
}

TEST(Shards, RowsOfSeveralKindsAreDividedKindByKind) {
  ModelConfig config = make_model_config(small_options("phi3"));  // 4 heads of queries and 2 of keys, of 32 elements
  EXPECT_EQ(held_rows(config, Slot::kFusedQkv, 256, {1, 2}), runs({{64, 64}, {160, 32}, {224, 32}}));
  EXPECT_EQ(held_rows(config, Slot::kFusedGateUp, 160, {0, 2}), runs({{0, 40}, {80, 40}}));
  EXPECT_EQ(held_rows(config, Slot::kO, 64, {1, 2}), runs({{32, 32}}));
  config = make_model_config(small_options("gpt_oss"));  // 6 experts of a width of 80
  EXPECT_EQ(held_rows(config, Slot::kExpertPairsBias, 960, {1, 2}),
            runs({{80, 80}, {240, 80}, {400, 80}, {560, 80}, {720, 80}, {880, 80}}));
  config = make_model_config(small_options("nemotron_h"));  // 4 heads and 2 groups, all of 32 elements
  EXPECT_EQ(held_rows(config, Slot::kStateIn, 388, {1, 2}), runs({{64, 64}, {192, 64}, {288, 32}, {352, 32}, {386, 2}}));
}

TEST(Shards, LayersThatDevicesCannotShareAreRefusedByTheirKey) {
  ModelConfig config = make_model_config(small_options("qwen3"));
  EXPECT_NO_THROW(check_shards(config, 1));
  EXPECT_NO_THROW(check_shards(config, 2));
  const auto refusal = [&](int size) {
    try {
      check_shards(config, size);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refusal(3), ::testing::HasSubstr("num_attention_heads"));
  config.num_kv_heads = 3;
  EXPECT_THAT(refusal(2), ::testing::HasSubstr("num_key_value_heads = 3 is no multiple of 2"));
  config.num_kv_heads = 1;
  EXPECT_THAT(refusal(2), ::testing::IsEmpty());
  config.qk_norm_is_whole = true;
  EXPECT_THAT(refusal(2), ::testing::HasSubstr("num_key_value_heads = 1 is no multiple of 2"));
  config.qk_norm_is_whole = false;
  config.num_kv_heads = 2;
  config.intermediate_size += 8;
  EXPECT_THAT(refusal(2), ::testing::HasSubstr("intermediate_size"));
  config.num_experts = 4;
  config.expert_size = 24;
  EXPECT_THAT(refusal(2), ::testing::HasSubstr("moe_intermediate_size = 24 is no multiple of 16"));
  config.expert_size = 32;
  EXPECT_THAT(refusal(2), ::testing::IsEmpty()) << "no layer has the other width";
  config.expert_names = ExpertNames::kNumbered;
  config.expert_size = 24;
  EXPECT_THAT(refusal(2), ::testing::HasSubstr(" intermediate_size = 24 is no multiple of 16"));
  config = make_model_config(small_options("qwen3_5_text"));
  config.linear.num_key_heads = 1;
  EXPECT_THAT(refusal(2), ::testing::HasSubstr("linear_num_key_heads = 1 is no multiple of 2"));
}

}  // namespace
}  // namespace prl::nn
