#include "trainer/replay.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "trainer/fake_rollouts.hpp"
#include "trainer/metrics.hpp"
#include "trainer/rl_trainer.hpp"
#include "trainer/test_support.hpp"
#include "weights/weight_channel.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class ReplayTest : public ::testing::Test {
 protected:
  RlRunOptions options(std::int64_t max_steps) const {
    config::AdamWConfig adamw;
    adamw.lr = 1e-3;
    RlRunOptions options;
    options.step.optim = adamw;
    options.step.max_steps = max_steps;
    options.seq_len = 48;
    return options;
  }
  /// Runs on made-up samples and records them; the checksum of the last weights.
  std::uint64_t record(std::int64_t max_steps) {
    RlRunOptions run = options(max_steps);
    run.recorder = std::make_shared<StepRecorder>(run_, "this machine");
    run.checkpoint.emplace();
    run.checkpoint->checkpoints = run_ / "checkpoints";
    run.checkpoint->weights = run_ / "weights";
    run.checkpoint->interval = 2;
    const auto policy = make_tiny_policy(scratch_.path / "model");
    const ReceiverFactory samples = [](std::int64_t first_step) {
      return make_fake_rollouts(
          {.num_micro_batches = 2, .seq_len = 48, .vocab_size = 96, .generate_samples = true, .first_step = first_step});
    };
    // As in a run whose weights go to engines.
    const auto channel = weights::make_local_channel();
    monitor::Monitor monitor(trainer_metrics(), "trainer");
    run_rl_trainer(run, *policy, samples, channel.get(), monitor, {});
    return policy->manifest().checksum;
  }
  /// Replays those steps on another policy of that model; the checksum of its last weights.
  std::uint64_t replay(const RlRunOptions& run, std::optional<std::int64_t> last = std::nullopt, const char* model = "model") {
    const auto policy = make_tiny_policy(scratch_.path / model);
    const ReceiverFactory samples = [&](std::int64_t first_step) {
      return std::make_unique<rollouts::RecordedSteps>(run_, first_step, last);
    };
    monitor::Monitor monitor(trainer_metrics(), "trainer");
    last_step_ = run_rl_trainer(run, *policy, samples, nullptr, monitor, {}).last_step;
    return policy->manifest().checksum;
  }
  RlRunOptions replay_options(std::int64_t max_steps, bool must_agree, const char* machine = "this machine") const {
    RlRunOptions run = options(max_steps);
    run.replay = std::make_shared<Replay>(run_, machine, must_agree);
    return run;
  }
  std::string error_of_replay(const RlRunOptions& run, const char* model = "model") {
    try {
      replay(run, std::nullopt, model);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfSync);
      return error.what();
    }
    return "";
  }

  Scratch scratch_{"replay"};
  fs::path run_ = scratch_.path / "run";
  std::int64_t last_step_ = 0;
};

TEST_F(ReplayTest, RecordedStepsMakeTheSameWeights) {
  const std::uint64_t wanted = record(5);
  const RlRunOptions all = replay_options(5, true);
  EXPECT_EQ(replay(all), wanted);
  EXPECT_EQ(all.replay->num_same(), 5);
  EXPECT_FALSE(all.replay->first_other().has_value());
  // A run that was stopped before its max_steps ends where its records do.
  const RlRunOptions longer = replay_options(9, true);
  EXPECT_EQ(replay(longer), wanted);
  EXPECT_EQ(last_step_, 5);
}

TEST_F(ReplayTest, APartBeginsAtACheckpointAndEndsBeforeTheLast) {
  const std::uint64_t wanted = record(6);
  RlRunOptions rest = replay_options(6, true);
  rest.resume.emplace().step = 4;
  rest.resume_from = run_ / "checkpoints";
  EXPECT_EQ(replay(rest), wanted);
  EXPECT_EQ(rest.replay->num_same(), 2);
  const RlRunOptions first = replay_options(6, true);
  EXPECT_NE(replay(first, 2), wanted);
  EXPECT_EQ(last_step_, 2);
  EXPECT_EQ(first.replay->num_same(), 2);
}

TEST_F(ReplayTest, OtherSettingsAreAnErrorOrGoTheirOwnWay) {
  const std::uint64_t recorded = record(4);
  RlRunOptions other = replay_options(4, true);
  std::get<config::AdamWConfig>(other.step.optim).lr = 2e-3;
  EXPECT_THAT(error_of_replay(other), HasSubstr("the weights after step 1 have the checksum"));
  other = replay_options(4, false);
  std::get<config::AdamWConfig>(other.step.optim).lr = 2e-3;
  EXPECT_NE(replay(other), recorded);
  EXPECT_EQ(last_step_, 4);
  EXPECT_EQ(other.replay->num_same(), 0);
  EXPECT_EQ(other.replay->first_other(), 1);
}

TEST_F(ReplayTest, ErrorsNameTheModelOrTheMachine) {
  record(2);
  nn::InitModelOptions another = tiny_model();
  another.seed = 4;
  nn::init_model(another, scratch_.path / "another");
  EXPECT_THAT(error_of_replay(replay_options(2, true), "another"), HasSubstr("is model.name the same folder"));
  RlRunOptions elsewhere = replay_options(2, true, "another machine");
  std::get<config::AdamWConfig>(elsewhere.step.optim).lr = 2e-3;  // stands for kernels that round in other ways
  EXPECT_THAT(error_of_replay(elsewhere), HasSubstr("recorded on this machine, and this is another machine"));
}

}  // namespace
}  // namespace prl::trainer
