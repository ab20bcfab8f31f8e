// How a config.json says that its folder's matrices are FP8.
#include "nn/model_config_test_fixture.hpp"

namespace prl::nn {
namespace {
using ::testing::HasSubstr;
using ::testing::Not;

class QuantizationConfigTest : public ModelConfigTest {
 protected:
  static std::string with(const std::string& quantization) {
    return edit(kQwen3, "\"max_window_layers\": 28", "\"max_window_layers\": 28, \"quantization_config\": " + quantization);
  }
};

constexpr const char* kBlocks = R"({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
  "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]})";
const Fp8Format kInBlocks{.block_rows = 128, .block_cols = 128, .scale_suffix = "_scale_inv"};

TEST_F(QuantizationConfigTest, Fp8InBlocksOrWithOneScaleForAMatrix) {
  EXPECT_FALSE(load(kQwen3).fp8);
  const ModelConfig config = load(with(kBlocks));
  EXPECT_EQ(config.fp8, kInBlocks);
  EXPECT_EQ(config.num_parameters(), load(kQwen3).num_parameters());
  EXPECT_THAT(saved_config_json(config, DType::kBF16), Not(HasSubstr("quantization_config"))) << "saved weights are not quantised";
  EXPECT_EQ(load(with(edit(kBlocks, "\"e4m3\"", "\"float8_e4m3fn\""))).fp8, kInBlocks) << "MiniMax-M2";
  EXPECT_EQ(load(with(edit(kBlocks, "\"fmt\": \"e4m3\", ", ""))).fp8, kInBlocks);
  EXPECT_EQ(load(with(edit(kBlocks, "\"fmt\"", "\"scale_fmt\": \"ue8m0\", \"fmt\""))).fp8, kInBlocks) << "DeepSeek-V3.1";
  EXPECT_EQ(load(with(edit(kBlocks, "[128, 128]", "null"))).fp8, (Fp8Format{.scale_suffix = "_scale_inv"}));
}

TEST_F(QuantizationConfigTest, WhatIsNotReadIsRefusedByItsKey) {
  const auto refused = [&](const std::string& from, const std::string& to, const std::string& said) {
    expect_error(with(edit(kBlocks, from, to)), ErrorCode::kNotImplemented, said);
  };
  refused("\"e4m3\"", "\"e5m2\"", "key 'fmt' is 'e5m2'; this build reads 'e4m3'");
  refused("[128, 128]", "[64, 128]", "key 'weight_block_size' is [64, 128]; this build reads blocks of 128 x 128");
  refused("[128, 128]", "[128]", "key 'weight_block_size' is [128]");
  refused("\"fp8\"", "\"awq\"", "'quant_method' 'awq'; this build reads unquantised checkpoints, 'fp8' and 'compressed-tensors'");
  refused("\"quant_method\": \"fp8\", ", "", "'quant_method' ''");
  expect_error(with(edit(kBlocks, "[128, 128]", "\"large\"")), ErrorCode::kCorrupt, "wanted two numbers");
  expect_error(edit(with(kBlocks), "\"quantization_config\"", "\"compression_config\""), ErrorCode::kNotImplemented,
               "'compression_config'");
}

// As GLM-4.5-FP8 is published.
constexpr const char* kCompressed =
    R"({"config_groups": {"group_0": {"input_activations": {"dynamic": true, "num_bits": 8, "strategy": "token",
  "symmetric": true, "type": "float"}, "output_activations": null, "targets": ["Linear"], "weights": {"actorder": null,
  "block_structure": null, "dynamic": false, "group_size": null, "num_bits": 8, "observer": "minmax", "strategy": "channel",
  "symmetric": true, "type": "float"}}}, "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": null,
  "quant_method": "compressed-tensors", "quantization_status": "compressed"})";

TEST_F(QuantizationConfigTest, CompressedTensorsByRowMatrixAndBlock) {
  EXPECT_EQ(load(with(kCompressed)).fp8, (Fp8Format{.block_rows = 1, .scale_suffix = "_scale"}));
  EXPECT_EQ(load(with(edit(kCompressed, "\"channel\"", "\"tensor\""))).fp8, (Fp8Format{.scale_suffix = "_scale"}));
  const std::string blocks =
      edit(edit(kCompressed, "\"channel\"", "\"block\""), "\"block_structure\": null", "\"block_structure\": [128, 128]");
  EXPECT_EQ(load(with(blocks)).fp8, (Fp8Format{.block_rows = 128, .block_cols = 128, .scale_suffix = "_scale"}));
  EXPECT_TRUE(load(with(edit(kCompressed, "\"kv_cache_scheme\": null", R"("sparsity_config": {}, "transform_config": {})"))).fp8);
}

TEST_F(QuantizationConfigTest, CompressedTensorsOfOtherKindsAreRefused) {
  const auto refused = [&](const std::string& from, const std::string& to, const std::string& said) {
    expect_error(with(edit(kCompressed, from, to)), ErrorCode::kNotImplemented, said);
  };
  refused("float-quantized", "nvfp4-pack-quantized", "key 'format' is 'nvfp4-pack-quantized'");
  refused("\"kv_cache_scheme\": null", "\"kv_cache_scheme\": {\"num_bits\": 8}", "key 'kv_cache_scheme'");
  refused("\"kv_cache_scheme\": null", R"("sparsity_config": {"format": "sparse-24-bitmask"})", "key 'sparsity_config'");
  refused("\"channel\"", "\"group\"", "key 'strategy' is 'group'");
  refused("\"channel\"", "\"block\"", "key 'block_structure' is []");
  refused("\"minmax\", \"strategy\": \"channel\",\n  \"symmetric\": true, \"type\": \"float\"",
          "\"minmax\", \"strategy\": \"channel\", \"type\": \"int\"", "'type' and 'num_bits' are 'int' and 8");
  refused("\"minmax\", \"strategy\": \"channel\",\n  \"symmetric\": true", "\"minmax\", \"strategy\": \"channel\", \"symmetric\": false",
          "key 'symmetric' is false");
  refused("\"group_0\"", R"("group_1": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "group_0")",
          "scaled in another way than those of other groups");
  expect_error(with(edit(kCompressed, "\"config_groups\"", "\"groups\"")), ErrorCode::kCorrupt, "key 'config_groups'");
}

}  // namespace
}  // namespace prl::nn
