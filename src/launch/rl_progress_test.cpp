#include "launch/rl_progress.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace prl::launch {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Console {
  std::vector<std::string> lines;
  RlProgress::Show show() {
    return [this](const std::string& line) { lines.push_back(line); };
  }
};

TEST(RlProgress, OneLinePerStepWithBothRolesAndTheTimeLeft) {
  Console console;
  RlProgress progress(10, 0, console.show());
  const auto start = RlProgress::Clock::time_point();
  progress.add_orchestrator(1, {{"reward/all/mean", 0.5}, {"scheduler/async_level", 0}});
  progress.add_orchestrator(2, {{"reward/all/mean", 0.75}, {"scheduler/async_level", 1}});
  progress.add_trainer(1, {{"loss/mean", 0.25}, {"mismatch_kl/all/mean", 0.0}, {"perf/throughput", 1234567}, {"time/step", 2}}, start);
  progress.add_trainer(2, {{"mismatch_kl/all/mean", 0.5}, {"perf/throughput", 999}}, start + seconds(2));
  EXPECT_THAT(console.lines, ElementsAre("Step 1/10 | Reward: 0.5000 | Loss: 0.2500 | Entropy: 0.0000 | Mismatch KL: 0.0000 | 1,234,567 "
                                         "tokens/s | Async Level: 0 | ETA 18s",
                                         AllOf(HasSubstr("Reward: 0.7500"), HasSubstr(" 999 tokens/s | Async Level: 1 | ETA 16s"))));
  EXPECT_DOUBLE_EQ(progress.mean_mismatch_kl(), 0.25);
}

TEST(RlProgress, AnEvaluationUnderTheSameStepDoesNotReplaceTheBatch) {
  Console console;
  RlProgress progress(std::nullopt, 0, console.show());
  progress.add_orchestrator(3, {{"reward/all/mean", 0.5}});
  progress.add_orchestrator(3, {{"eval/reverse-text/avg@1", 0.9}});
  progress.add_trainer(3, {}, {});
  EXPECT_THAT(console.lines, ElementsAre(StartsWith("Step 3 | Reward: 0.5000 |")));
}

TEST(RlProgress, AStepThatWasTrainedFirstWaitsForItsRow) {
  Console console;
  RlProgress progress(std::nullopt, 0, console.show());
  progress.add_trainer(1, {}, {});
  progress.add_trainer(2, {}, {});
  progress.add_orchestrator(1, {{"eval/reverse-text/avg@1", 0.9}});
  EXPECT_THAT(console.lines, ElementsAre());
  progress.add_orchestrator(1, {{"reward/all/mean", 0.25}});
  EXPECT_THAT(console.lines, ElementsAre(StartsWith("Step 1 | Reward: 0.2500 |")));
  progress.add_orchestrator(2, {{"reward/all/mean", 0.5}});
  EXPECT_THAT(console.lines, ElementsAre(StartsWith("Step 1 | Reward"), StartsWith("Step 2 | Reward: 0.5000 |")));
}

TEST(RlProgress, AStepWhoseRowDoesNotComeIsShownWithoutIt) {
  Console console;
  {
    RlProgress progress(std::nullopt, 0, console.show());
    progress.add_trainer(1, {}, {});
    progress.add_orchestrator(2, {{"reward/all/mean", 0.5}});
    EXPECT_THAT(console.lines, ElementsAre(StartsWith("Step 1 | Loss"))) << "a later row has come";
    progress.add_trainer(2, {}, {});
    for (std::int64_t step = 3; step <= 12; ++step) progress.add_trainer(step, {}, {});
    EXPECT_EQ(console.lines.size(), 4u) << "eight wait";
    EXPECT_THAT(console.lines[1], StartsWith("Step 2 | Reward: 0.5000 |"));
  }
  ASSERT_EQ(console.lines.size(), 12u) << "those that wait at the end are shown";
  EXPECT_THAT(console.lines.back(), StartsWith("Step 12 | Loss"));
}

TEST(FormatDuration, PicksTheUnit) {
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(80), "1m20s");
  EXPECT_EQ(format_duration(7500), "2h05m");
}

}  // namespace
}  // namespace prl::launch
