#include "launch/engine_host.hpp"

#include <gtest/gtest.h>

#include "launch/testing/tiny_engine.hpp"
#include "nn/decoder.hpp"

namespace prl::launch {
namespace {

TEST(EngineHost, OptionsFollowTheConfigurationAndTheModelsLimits) {
  const testing::TinyModel tiny("options");
  const nn::ModelConfig model = nn::load_model_config(tiny.folder);
  const auto runtime = make_cpu_runtime();
  config::InferenceConfig config = tiny.config();
  EXPECT_EQ(context_length(config, model), 256);
  config.model.max_model_len = 64;
  config.max_num_batched_tokens = 2;
  config.kv.block_size = 8;
  const engine::EngineOptions options = engine_options(config, model, *runtime);
  EXPECT_EQ(options.max_model_len, 64);
  EXPECT_EQ(options.max_num_batched_tokens, 4) << "a step has room for a token of each running request";
  EXPECT_EQ(options.num_blocks, 4 * 64 / 8) << "every running request at full length";
  config.kv.num_blocks = 11;
  EXPECT_EQ(engine_options(config, model, *runtime).num_blocks, 11);
  config.model.max_model_len = 257;
  try {
    context_length(config, model);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("inference.model.max_model_len 257"), std::string::npos) << error.what();
  }
}

TEST(EngineHost, LoadsOtherWeightsOfTheSameModelAndRefusesAnotherModel) {
  const testing::TinyModel first("first", 1), second("second", 2), deeper("deeper", 3, 2);
  EngineHost host(first.config(), make_cpu_runtime());
  const wire::WeightProof before = host.engine().proof(std::chrono::seconds(60));
  const nn::WeightsPtr weights = host.load(second.folder, PolicyVersion{4}, nullptr);
  EXPECT_EQ(weights->version.value, 4);
  const wire::WeightProof after = host.engine().update_weights(weights, std::chrono::seconds(60));
  EXPECT_EQ(after.version.value, 4);
  EXPECT_NE(after.checksum, before.checksum);
  EXPECT_NE(after.probe_logprobs, before.probe_logprobs);
  EXPECT_THROW(host.load(deeper.folder, PolicyVersion{5}, weights), Error);
  host.engine().shutdown();
}

}  // namespace
}  // namespace prl::launch
