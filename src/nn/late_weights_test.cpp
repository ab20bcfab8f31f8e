// Weights that arrive while they are computed with: on the CPU, and compiled a second time on a GPU.
#include "nn/late_weights.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "base/error.hpp"
#include "device/testing/test_runtime.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {

using testing_support::Packed;
using testing_support::random_packed;
using testing_support::small_options;
using testing_support::step_results;

struct LateWeightsCase {
  const char* family;
  DType compute;
  bool ties_head;
};
void PrintTo(const LateWeightsCase& c, std::ostream* out) {
  *out << c.family << ' ' << to_string(c.compute) << (c.ties_head ? ", tied" : "");
}

class LateWeightsTest : public ::testing::TestWithParam<LateWeightsCase> {
 protected:
  static constexpr int kLayers = 5;
  LateWeightsTest() {
    InitModelOptions options = small_options(GetParam().family);
    options.num_layers = kLayers;
    options.tie_word_embeddings = GetParam().ties_head;
    config_ = make_model_config(options);
    parameters_ = std::make_unique<Parameters>(runtime_, config_);
    parameters_->init_random(11, 0.15f);
    parameters_->ensure_grads();
    parts_ = grad_sections(*parameters_->table());
    std::ranges::sort(parts_, {}, [](const GradSection& section) { return section.range.begin; });
    rounded_ = Tensor::empty(runtime_, {parameters_->table()->num_master_elements()}, GetParam().compute);
    ops::cast(ctx(), rounded_, parameters_->all_values());
    packed_ = random_packed(config_.vocab_size, {40, 3, 70}, 5);
  }
  ops::OpContext& ctx() { return session_.context(); }
  std::vector<std::vector<float>> step(TrainableModel& model, const WeightsPtr& weights) {
    return step_results(ctx(), *parameters_, weights, packed_, model);
  }

  /// Values that are NaN until they are awaited.
  LateValues late() {
    LateValues late{.values = Tensor::empty(runtime_, rounded_.shape(), rounded_.dtype()), .parts = {}, .await = {}};
    const std::vector<char> spoilt(rounded_.num_bytes(), '\xff');
    runtime_->copy_from_host(late.values.data(), spoilt.data(), spoilt.size());
    for (const GradSection& part : parts_) late.parts.push_back(part.range);
    num_awaited_ = 0;
    late.await = [this, values = late.values](std::size_t part) {
      EXPECT_EQ(part, num_awaited_++);
      const ElementRange range = parts_[part].range;
      const Tensor from = rounded_.slice(range.begin, range.count()), to = values.slice(range.begin, range.count());
      runtime_->copy_within(to.data(), from.data(), from.num_bytes());
    };
    return late;
  }
  LateWeights make(LateValues values) {
    return LateWeights(ctx(), *parameters_, GetParam().compute, PolicyVersion{2}, true, nullptr, std::move(values));
  }

  std::shared_ptr<DeviceRuntime> runtime_ = make_test_runtime();
  ops::OpSession session_{runtime_, 2};
  ModelConfig config_;
  std::unique_ptr<Parameters> parameters_;
  std::vector<GradSection> parts_;
  Tensor rounded_;
  Packed packed_;
  std::size_t num_awaited_ = 0;
};

TEST_P(LateWeightsTest, AStepComputesWithWhatHasArrived) {
  const WeightsPtr whole = make_weights(ctx(), *parameters_, GetParam().compute, PolicyVersion{2}, true, nullptr, rounded_);
  for (const ActivationCheckpointing& checkpointing : {ActivationCheckpointing{}, ActivationCheckpointing{1}}) {
    TrainableModel plain(ctx(), *parameters_, checkpointing), model(ctx(), *parameters_, checkpointing);
    const std::vector<std::vector<float>> wanted = step(plain, whole);
    LateWeights weights = make(late());
    weights.begin();
    EXPECT_EQ(step(model, weights.weights()), wanted);
    EXPECT_TRUE(weights.is_complete());
    EXPECT_EQ(weights.weights()->layers, nullptr) << "they are as any others now";
    EXPECT_EQ(step(model, weights.weights()), wanted);
    EXPECT_EQ(num_awaited_, parts_.size());
    EXPECT_EQ(checksum(ctx(), *weights.weights()).combined, checksum(ctx(), *whole).combined);
    EXPECT_EQ(weights.weights()->version, whole->version);
  }
}

TEST_P(LateWeightsTest, ALayerComesWhenAPassEntersTheOneBefore) {
  ASSERT_EQ(parts_.size(), kLayers + (GetParam().ties_head ? 1u : 2u));
  LateWeights weights = make(late());
  EXPECT_EQ(num_awaited_, 0u);
  weights.begin();
  EXPECT_EQ(num_awaited_, 1u);
  for (std::size_t layer = 0; layer + 1 < kLayers; ++layer) {
    weights.enter(static_cast<std::int64_t>(layer), static_cast<std::int64_t>(layer) + 1);
    EXPECT_EQ(num_awaited_, layer + 3) << layer;  // it, the next, and what lies outside of layers
    EXPECT_EQ(weights.is_complete(), GetParam().ties_head && layer + 2 == kLayers);
  }
  weights.enter(kLayers - 1, -1);
  EXPECT_TRUE(weights.is_complete());
  EXPECT_EQ(num_awaited_, parts_.size());
}

TEST_P(LateWeightsTest, AnErrorLeavesThemIncomplete) {
  LateValues values = late();
  values.await = [inner = values.await](std::size_t part) {
    if (part == 2) fail(ErrorCode::kPeerLost, "rank 1 is gone");
    inner(part);
  };
  LateWeights weights = make(std::move(values));
  weights.begin();
  EXPECT_THROW(weights.enter(1, 2), Error);
  EXPECT_THROW(weights.complete(), Error);
  EXPECT_FALSE(weights.is_complete());
}

TEST(LateWeights, OfOnePartComeAtOnce) {
  ops::OpSession session(make_cpu_runtime(), 1);
  Parameters parameters(make_cpu_runtime(), make_model_config(small_options("qwen3")));
  parameters.init_random(1, 0.1f);
  const Tensor values = parameters.all_values();
  int num_awaited = 0;
  LateWeights weights(session.context(), parameters, DType::kF32, PolicyVersion{1}, true, nullptr,
                      {.values = values, .parts = {{0, values.num_elements()}}, .await = [&](std::size_t) { ++num_awaited; }});
  weights.begin();
  EXPECT_TRUE(weights.is_complete());
  EXPECT_EQ(num_awaited, 1);
}

INSTANTIATE_TEST_SUITE_P(Cases, LateWeightsTest,
                         ::testing::Values(LateWeightsCase{"qwen3", DType::kF32, false}, LateWeightsCase{"qwen3", DType::kBF16, true},
                                           LateWeightsCase{"qwen2", DType::kBF16, false}, LateWeightsCase{"llama", DType::kF32, true}));

}  // namespace
}  // namespace prl::nn
