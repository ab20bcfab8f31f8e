// Ranks that divide the experts of each layer: the bits of one rank that has them all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "comm/testing/ranks.hpp"
#include "trainer/memory.hpp"
#include "trainer/test_support.hpp"
#include "trainer/trace_test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

nn::InitModelOptions model_of_experts(const std::string& family) {
  nn::InitModelOptions model = model_of_several_chunks();
  model.family = family;
  model.num_layers = 3;
  model.num_experts = 7;  // not as many at each rank
  model.num_active_experts = 3;
  model.expert_size = 40;
  if (family == "glm4_moe") model.head_dim = 32;  // of which half is rotated, of the next a quarter
  if (family == "qwen3_5_moe_text") model.head_dim = 64;
  return model;
}

void expect_alike(const std::filesystem::path& model, TrainingCase run, int size, const std::string& what, bool is_lazy = false) {
  run.num_steps = 2;
  const Trace alone = train(run, model, nullptr);
  run.divides_experts = true;
  double held = 0;
  for (const Trace& trace : train_on(size, run, model, is_lazy)) {
    expect_equal(trace, alone, what);
    held += trace.share;
  }
  EXPECT_DOUBLE_EQ(held, 1) << "each master is held once: " << what;
}

TEST(DividedExperts, FamiliesPrecisionsAndRanksGiveTheBitsOfOneRank) {
  for (const std::string family : {"qwen3_moe", "mixtral", "glm4_moe", "qwen3_5_moe_text", "minimax_m2", "afmoe", "deepseek_v3"}) {
    Scratch scratch(fmt::format("experts-{}", family));
    nn::init_model(model_of_experts(family), scratch.path);
    for (const DType compute : {DType::kF32, DType::kBF16})
      for (const int size : family == "qwen3_moe" ? std::vector{1, 2, 3, 4} : std::vector{3})
        expect_alike(scratch.path, {.compute = compute, .overlaps = size != 2}, size,
                     fmt::format("{}, {} ranks, {}", family, size, to_string(compute)), size == 4);
  }
}

TEST(DividedExperts, OptimizersRecomputationAndFewRowsChangeNoBit) {
  Scratch scratch("experts-kinds");
  nn::init_model(model_of_experts("qwen3_moe"), scratch.path);
  expect_alike(scratch.path, {.num_rows = 1}, 3, "ranks without a row");
  expect_alike(scratch.path, {.num_rows = 5, .overlaps = true}, 4, "ranks without a row in the second round");
  expect_alike(scratch.path, {.optim = with_lr<config::SgdConfig>(1e-1)}, 3, "SGD");
  expect_alike(scratch.path, {.offloads_masters = true}, 3, "masters in host memory");
  expect_alike(scratch.path, {.compute = DType::kBF16, .overlaps = true, .checkpointing = {1}}, 2, "whole layers again");
  expect_alike(scratch.path, {.overlaps = true, .checkpointing = {2}}, 2, "every second layer again");
  expect_alike(scratch.path, {.overlaps = true, .checkpointing = {1, {true, true, true}}}, 3, "parts of layers again");
}

// What a rank holds: its experts alone, of which no other has a copy.
TEST(DividedExperts, ARankHoldsItsExpertsAlone) {
  Scratch scratch("experts-bytes");
  nn::InitModelOptions model = model_of_experts("qwen3_moe");
  model.num_experts = 32;
  model.expert_size = 128;
  model.num_layers = 6;
  nn::init_model(model, scratch.path);
  const auto bytes_of = [&](bool divides_experts) {
    std::atomic<std::size_t> most{0};
    comm::testing::run_threads("threads", 4, [&](comm::Communicator& group) {
      comm::Mesh mesh(group.subgroup(std::vector<int>{0, 1, 2, 3}, "train", 0));
      const auto runtime = make_cpu_runtime();
      PolicyOptions options;
      options.model = scratch.path;
      options.num_threads = 1;
      options.gathers_layers = true;
      options.share = {.rank = group.rank(), .num_ranks = 4, .divides_grads = true, .divides_experts = divides_experts};
      Policy policy(runtime, options);
      GradientStepOptions of_step;
      of_step.mesh = &mesh;
      GradientStep step(policy, of_step);
      step.run(cross_entropy_rows(1, 4), PolicyVersion{1});
      const std::size_t bytes = runtime->bytes_in_use();
      for (std::size_t seen = most; bytes > seen && !most.compare_exchange_weak(seen, bytes);) {
      }
    });
    return static_cast<double>(most);
  };
  const nn::ModelConfig config = nn::load_model_config(scratch.path);
  const auto of_layer = static_cast<double>(nn::expert_sections(*nn::make_tensor_table(config)).front().range().count()) * sizeof(float);
  // Brought layer by layer: two layers' values, and twice their packed forms (the second time once); a row's gradient, and what arrives of
  // it from four ranks, for which that of embedding or head is enough else. Divided: a quarter of six layers in packed forms.
  const double of_head = static_cast<double>(config.vocab_size * config.hidden_size) * sizeof(float);
  const double saved = of_layer * (2.0 + 2 * 2.0 + 1.0 + 1.0 - 2 * 6 / 4.0) - of_head;
  EXPECT_NEAR(bytes_of(false) - bytes_of(true), saved, 0.15 * saved);
}

// Of what a rank holds the plan knows the greatest.
TEST(DividedExperts, ThePlanKnowsWhatARankHolds) {
  Scratch scratch("experts-plan");
  nn::InitModelOptions of_model = model_of_experts("qwen3_moe");
  of_model.num_experts = 32;
  of_model.expert_size = 128;
  nn::init_model(of_model, scratch.path);
  const nn::ModelConfig model = nn::load_model_config(scratch.path);
  PolicyOptions policy;
  policy.gathers_layers = true;
  policy.share = {.rank = 0, .num_ranks = 4, .divides_grads = true};
  GradientStepOptions step;
  step.num_ranks = 4;
  const TrainingBytes brought = training_bytes(model, policy, step);
  policy.share.divides_experts = true;
  const TrainingBytes divided = training_bytes(model, policy, step);
  const auto of_layer = static_cast<double>(nn::expert_sections(*nn::make_tensor_table(model)).front().range().count()) * sizeof(float);
  EXPECT_NEAR(static_cast<double>(brought.weights - divided.weights), 2 * of_layer, 0.05 * of_layer) << "two layers come whole";
  EXPECT_GT(static_cast<double>(brought.gradients - divided.gradients), of_layer) << "a row's gradient, and what arrives of it";
  EXPECT_NEAR(static_cast<double>(brought.masters), static_cast<double>(divided.masters), 0.05 * static_cast<double>(brought.masters));
}

TEST(DividedExperts, ModelsThatCannotBeDividedAreNamed) {
  const auto refuses = [](const nn::ModelConfig& model, int num_ranks, const std::string& why) {
    try {
      check_experts_divide(model, num_ranks);
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("model.ep")) << why;
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  };
  refuses(nn::make_model_config(tiny_model()), 2, "no experts");
  nn::InitModelOptions options = model_of_experts("qwen3_moe");
  refuses(nn::make_model_config(options), 8, "8 ranks cannot divide 7 experts");
  EXPECT_NO_THROW(check_experts_divide(nn::make_model_config(options), 7));
  options.family = "gpt_oss";
  refuses(nn::make_model_config(options), 2, "biases");
}

// A rank that is lost within a layer: the others wait for it there, and know of it.
TEST(DividedExperts, ALostRankIsNoticedWithinALayer) {
  Scratch scratch("experts-lost");
  nn::init_model(model_of_experts("qwen3_moe"), scratch.path);
  std::atomic<int> num_told{0};
  comm::testing::run_threads("threads", 3, [&](comm::Communicator& group) {
    comm::Mesh mesh(group.subgroup(std::vector<int>{0, 1, 2}, "train", 0));
    const auto policy = make_policy(scratch.path, DType::kF32, false, true, {}, true);
    GradientStepOptions options;
    options.mesh = &mesh;
    GradientStep step(*policy, options);
    step.check_ranks();
    if (group.rank() == 1) return step.abort("a test took it");
    try {
      step.run(cross_entropy_rows(1, 3), PolicyVersion{1});
    } catch (const comm::PeerLost&) {
      ++num_told;
    }
  });
  EXPECT_EQ(num_told, 2);
}

}  // namespace
}  // namespace prl::trainer
