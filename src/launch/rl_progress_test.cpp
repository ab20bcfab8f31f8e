#include "launch/rl_progress.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace prl::launch {
namespace {

using std::chrono::seconds;

TEST(RlProgress, OneLinePerStepWithBothRolesAndTheTimeLeft) {
  RlProgress progress(10, 0);
  const auto start = RlProgress::Clock::time_point();
  progress.add_orchestrator(1, {{"reward/all/mean", 0.5}, {"scheduler/async_level", 0}});
  progress.add_orchestrator(2, {{"reward/all/mean", 0.75}, {"scheduler/async_level", 1}});
  const std::string first =
      progress.add_trainer(1, {{"loss/mean", 0.25}, {"mismatch_kl/all/mean", 0.0}, {"perf/throughput", 1234567}, {"time/step", 2}}, start);
  EXPECT_EQ(
      first,
      "Step 1/10 | Reward: 0.5000 | Loss: 0.2500 | Entropy: 0.0000 | Mismatch KL: 0.0000 | 1,234,567 tokens/s | Async Level: 0 | ETA 18s");
  const std::string second = progress.add_trainer(2, {{"mismatch_kl/all/mean", 0.5}, {"perf/throughput", 999}}, start + seconds(2));
  EXPECT_THAT(second, testing::HasSubstr("Reward: 0.7500"));
  EXPECT_THAT(second, testing::HasSubstr(" 999 tokens/s | Async Level: 1 | ETA 16s"));
  EXPECT_DOUBLE_EQ(progress.mean_mismatch_kl(), 0.25);
}

TEST(RlProgress, AnEvaluationUnderTheSameStepDoesNotReplaceTheBatch) {
  RlProgress progress(std::nullopt, 0);
  progress.add_orchestrator(3, {{"reward/all/mean", 0.5}});
  progress.add_orchestrator(3, {{"eval/reverse-text/avg@1", 0.9}});
  EXPECT_THAT(progress.add_trainer(3, {}, {}), testing::StartsWith("Step 3 | Reward: 0.5000 |"));
}

TEST(FormatDuration, PicksTheUnit) {
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(80), "1m20s");
  EXPECT_EQ(format_duration(7500), "2h05m");
}

}  // namespace
}  // namespace prl::launch
