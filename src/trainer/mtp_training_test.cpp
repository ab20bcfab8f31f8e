// A head for multi-token prediction that is trained beside a policy: it learns, the policy is the same bits with it and without, and it is
// in what is saved and resumed.
#include "trainer/mtp_training.hpp"

#include <gtest/gtest.h>

#include "io/safetensors.hpp"
#include "nn/mtp_head.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {
namespace fs = std::filesystem;
using testing_support::Scratch;

PolicyOptions options_of_head(const fs::path& folder, bool has_head, std::uint64_t seed = 5) {
  PolicyOptions options;
  options.model = folder;
  options.num_threads = 1;
  options.seed = seed;
  if (has_head) options.mtp = MtpTrainingOptions{.lr = 5e-3, .init = true};
  return options;
}

GradientStepOptions step_of_head() {
  GradientStepOptions options;
  options.optim = config::AdamWConfig{.lr = 3e-3, .weight_decay = 0.01};
  return options;
}

/// Two sequences a row, which count up in steps of their own.
std::vector<wire::MicroBatch> counting_rows(std::int64_t step) {
  std::vector<wire::MicroBatch> rows(2);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    wire::MicroBatch& row = rows[r];
    for (std::int32_t s = 0; s < 2; ++s) {
      for (std::int32_t i = 0; i < 20; ++i) {
        row.input_ids.push_back((static_cast<std::int32_t>(step) * 3 + s * 7 + i * static_cast<std::int32_t>(1 + r)) % 30);
        row.position_ids.push_back(i);
      }
      row.sequence_lengths.push_back(20);
      row.env_names.push_back("env");
    }
    const std::size_t size = row.input_ids.size();
    row.temperatures.assign(size, 1.0f);
    row.loss_mask.assign(size, 1);
    row.advantages.assign(size, 0.0f);
    row.inference_logprobs.assign(size, 0.0f);
    row.rl_weights.assign(size, 0.0f);
    row.ce_weights.assign(size, 1.0f);
  }
  return rows;
}

std::vector<float> head_values(Policy& policy) {
  const Tensor& all = policy.head()->parameters().all_values();
  return {all.as<float>(), all.as<float>() + all.num_elements()};
}

TEST(MtpTraining, LearnsBesideAPolicyThatIsTheSameBitsWithoutIt) {
  const Scratch scratch("mtp-training");
  nn::init_model(testing_support::tiny_model(), scratch.path / "model");
  Policy alone(make_cpu_runtime(), options_of_head(scratch.path / "model", false)),
      with_head(make_cpu_runtime(), options_of_head(scratch.path / "model", true));
  GradientStep step_alone(alone, step_of_head()), step(with_head, step_of_head());
  std::vector<double> losses;
  for (std::int64_t n = 1; n <= 40; ++n) {
    const GradientStepResult wanted = step_alone.run(counting_rows(n), PolicyVersion{n}),
                             found = step.run(counting_rows(n), PolicyVersion{n});
    ASSERT_EQ(found.loss, wanted.loss) << n;
    ASSERT_EQ(found.grad_norm, wanted.grad_norm) << n;
    EXPECT_FALSE(wanted.head.has_value());
    ASSERT_TRUE(found.head.has_value());
    EXPECT_EQ(found.head->num_tokens, 4 * 18) << "of a sequence all but the first two tokens are guessed";
    EXPECT_GT(found.head->grad_norm, 0.0);
    losses.push_back(found.head->loss);
  }
  EXPECT_EQ(testing_support::masters(with_head), testing_support::masters(alone));
  EXPECT_EQ(with_head.manifest().checksum, alone.manifest().checksum);
  EXPECT_GT(losses.front(), 3.0);
  EXPECT_LT(losses.back(), 0.5 * losses.front());
  EXPECT_EQ(with_head.weights()->mtp->version, PolicyVersion{40});
  EXPECT_EQ(alone.weights()->mtp, nullptr);
}

TEST(MtpTraining, WhatIsSavedIsTheHeadThatWasTrained) {
  const Scratch scratch("mtp-saved");
  nn::init_model(testing_support::tiny_model(), scratch.path / "model");
  EXPECT_FALSE(nn::load_model_config(scratch.path / "model").mtp.has_value());
  Policy policy(make_cpu_runtime(), options_of_head(scratch.path / "model", true));
  GradientStep step(policy, step_of_head());
  step.run(counting_rows(1), PolicyVersion{1});
  policy.save(scratch.path / "saved", {}, 1 << 30);
  // Read again, as the start of another run, which goes on with it.
  Policy again(make_cpu_runtime(), options_of_head(scratch.path / "saved", true, 99));
  ASSERT_TRUE(again.config().mtp.has_value());
  EXPECT_EQ(head_values(again), head_values(policy));
  // A run that does not train it hands it on.
  Policy other(make_cpu_runtime(), options_of_head(scratch.path / "saved", false));
  other.save(scratch.path / "handed-on", {}, 1 << 30);
  Policy last(make_cpu_runtime(), options_of_head(scratch.path / "handed-on", true, 98));
  EXPECT_EQ(head_values(last), head_values(policy));
}

TEST(MtpTraining, AResumedRunGoesOnWithTheSameBits) {
  const Scratch scratch("mtp-resumed");
  nn::init_model(testing_support::tiny_model(), scratch.path / "model");
  CheckpointOptions options;
  options.checkpoints = scratch.path / "checkpoints";
  options.weights = scratch.path / "weights";
  for (const bool is_async : {false, true}) {
    SCOPED_TRACE(is_async);
    Policy whole(make_cpu_runtime(), options_of_head(scratch.path / "model", true));
    GradientStep step(whole, step_of_head());
    options.save_async = is_async;
    {
      TrainerCheckpoints checkpoints(options);
      for (std::int64_t n = 1; n <= 3; ++n) step.run(counting_rows(n), PolicyVersion{n});
      checkpoints.save(3, {}, whole, step, {});
      for (std::int64_t n = 4; n <= 5; ++n) step.run(counting_rows(n), PolicyVersion{n});
      checkpoints.finish();
    }
    Policy resumed(make_cpu_runtime(), options_of_head(scratch.path / "model", true, 77));  // another head at first
    GradientStep next(resumed, step_of_head());
    ResumeOptions resume;
    resume.step = 3;
    EXPECT_EQ(restore(options.checkpoints, 3, resume, resumed, next).step, 3);
    for (std::int64_t n = 4; n <= 5; ++n) next.run(counting_rows(n), PolicyVersion{n});
    EXPECT_EQ(head_values(resumed), head_values(whole));
    EXPECT_EQ(testing_support::masters(resumed), testing_support::masters(whole));
    EXPECT_TRUE(nn::load_model_config(scratch.path / "weights" / "step_3").mtp.has_value());
  }
}

TEST(MtpTraining, AModelWithoutAHeadNeedsInit) {
  const Scratch scratch("mtp-init");
  nn::init_model(testing_support::tiny_model(), scratch.path / "model");
  PolicyOptions options = options_of_head(scratch.path / "model", true);
  options.mtp->init = false;
  try {
    Policy policy(make_cpu_runtime(), options);
    FAIL() << "was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string_view(error.what()).find("model.mtp.init makes one"), std::string_view::npos) << error.what();
  }
}

}  // namespace
}  // namespace prl::trainer
