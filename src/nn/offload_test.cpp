// Activations that wait in host memory: on the CPU with copies that run as late as they may, and compiled a second time on a GPU with
// memory and copy streams of its own.
#include "autograd/offload.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/testing/lazy_host_link.hpp"
#include "device/testing/test_runtime.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {

using testing_support::Packed;
using testing_support::random_packed;
using testing_support::small_options;
using testing_support::step_results;
using testing_support::to_string;

constexpr int kLayers = 7;

struct OffloadCase {
  const char* family;
  DType compute;
};
void PrintTo(const OffloadCase& c, std::ostream* out) { *out << c.family << ' ' << to_string(c.compute); }

class OffloadTest : public ::testing::TestWithParam<OffloadCase> {
 protected:
  OffloadTest() {
    InitModelOptions options = small_options(GetParam().family);
    options.num_layers = kLayers;
    config_ = make_model_config(options);
    parameters_ = std::make_unique<Parameters>(runtime_, config_);
    parameters_->init_random(11, 0.15f);
    parameters_->ensure_grads();
    weights_ = make_weights(ctx(), *parameters_, GetParam().compute, PolicyVersion{1}, true, nullptr);
    packed_ = random_packed(config_.vocab_size, {40, 3, 70, 130}, 5);
  }
  ops::OpContext& ctx() { return session_.context(); }
  std::vector<std::vector<float>> step(TrainableModel& model) { return step(model, packed_); }
  std::vector<std::vector<float>> step(TrainableModel& model, const Packed& packed) {
    return step_results(ctx(), *parameters_, weights_, packed, model);
  }

  std::shared_ptr<DeviceRuntime> runtime_ = make_test_runtime();
  ops::OpSession session_{runtime_, 2};
  ModelConfig config_;
  std::unique_ptr<Parameters> parameters_;
  WeightsPtr weights_;
  Packed packed_;
};

/// What is offloaded follows from a layer's parts, how many at a time from their number: that is tried with some models.
bool tries_all(std::string_view family) { return family == "qwen3" || family == "qwen3_5_text" || family == "nemotron_h"; }

const std::vector<ActivationCheckpointing> kCheckpointings{{}, {1}, {2}, {3}, {1, {.norm = true}}, {2, {true, true, true}}};

TEST_P(OffloadTest, ChangesNoBit) {
  const Packed few = random_packed(config_.vocab_size, {20, 3, 41}, 5);  // how many tokens a copy has changes nothing about when it is made
  TrainableModel plain(ctx(), *parameters_, {});
  const std::vector<std::vector<float>> wanted = step(plain, few);
  std::vector<std::shared_ptr<HostLink>> links{make_host_link(runtime_, true)};
  if (tests_gpu())
    links.push_back(make_host_link(runtime_, false));
  else
    links.push_back(std::make_shared<LazyHostLink>(runtime_));
  for (const ActivationCheckpointing& checkpointing : kCheckpointings)
    for (const int max_inflight : tries_all(GetParam().family) ? std::vector{1, 2, 20} : std::vector{1})
      for (std::size_t link = max_inflight == 2 ? 0 : 1; link < links.size(); ++link) {  // the second is the stricter one
        TrainableModel model(ctx(), *parameters_, checkpointing, {links[link], max_inflight});
        const std::string what =
            to_string(checkpointing) + ", " + std::to_string(max_inflight) + " in flight, link " + std::to_string(link);
        EXPECT_TRUE(step(model, few) == wanted) << what;
        EXPECT_TRUE(step(model, few) == wanted) << what << ", memory that is taken again";
        // A pass without a backward pass leaves copies in flight.
        model.forward(weights_, few.batch(), few.targets, few.temperatures);
        model.evaluate(weights_, few.batch(), few.targets, few.temperatures);
        EXPECT_TRUE(step(model, few) == wanted) << what << ", after a forward pass alone";
        model.fit_memory();
        EXPECT_TRUE(step(model, few) == wanted) << what << ", fitted";
      }
}

TEST_P(OffloadTest, TakesWhatIsForetold) {
  const auto tokens = static_cast<std::int64_t>(packed_.ids.size());
  TrainableModel warm_up(ctx(), *parameters_, {});
  step(warm_up);
  for (const ActivationCheckpointing& checkpointing : kCheckpointings)
    for (const int max_inflight : tries_all(GetParam().family) ? std::vector{1, 3} : std::vector{3}) {
      const std::size_t before = runtime_->bytes_in_use();
      // The host's memory is the device's here: the link counts what it hands out.
      const auto host = std::make_shared<LazyHostLink>(make_cpu_runtime());
      const ActivationOffload offload{tests_gpu() ? make_host_link(runtime_, true) : host, max_inflight};
      TrainableModel model(ctx(), *parameters_, checkpointing, offload);
      step(model);
      model.fit_memory();
      const ActivationBytes foretold = activation_bytes(config_, GetParam().compute, tokens, checkpointing, offload);
      EXPECT_NEAR(static_cast<double>(runtime_->bytes_in_use() - before), static_cast<double>(foretold.device),
                  0.01 * static_cast<double>(foretold.device))
          << to_string(checkpointing) << ", " << max_inflight << " in flight";
      if (tests_gpu()) continue;
      const std::size_t copies = host->num_copies();
      step(model);
      EXPECT_NEAR(static_cast<double>(host->bytes_allocated()), static_cast<double>(foretold.host),
                  0.01 * static_cast<double>(foretold.host));
      // Layers that nobody follows in their place stay where they are; the others go and come back once.
      EXPECT_EQ(host->num_copies() - copies, 2u * static_cast<unsigned>(kLayers - max_inflight - 1));
    }
}

INSTANTIATE_TEST_SUITE_P(Models, OffloadTest,
                         ::testing::Values(OffloadCase{"qwen3", DType::kBF16}, OffloadCase{"llama", DType::kF32},
                                           OffloadCase{"qwen2", DType::kBF16}, OffloadCase{"qwen3_moe", DType::kBF16},
                                           OffloadCase{"glm4_moe", DType::kBF16}, OffloadCase{"olmo2", DType::kBF16},
                                           OffloadCase{"gpt_oss", DType::kBF16}, OffloadCase{"qwen3_5_text", DType::kBF16},
                                           OffloadCase{"qwen3_next", DType::kBF16}, OffloadCase{"minimax_m2", DType::kBF16},
                                           OffloadCase{"afmoe", DType::kBF16}, OffloadCase{"deepseek_v3", DType::kF32},
                                           OffloadCase{"deepseek_v3_latents", DType::kBF16},
                                           OffloadCase{"deepseek_v2_latents", DType::kF32}, OffloadCase{"gemma3_text", DType::kBF16},
                                           OffloadCase{"nemotron_h", DType::kBF16}, OffloadCase{"nemotron_h_narrow", DType::kBF16}));

TEST(OffloadedRegions, WantAtLeastOneInFlight) {
  const auto runtime = make_cpu_runtime();
  EXPECT_THROW(autograd::OffloadedRegions(runtime, make_host_link(runtime, true), 0), Error);
}

}  // namespace
}  // namespace prl::nn
