#include "orchestrator/algo/advantage.hpp"

#include <gtest/gtest.h>

#include <map>

#include "base/error.hpp"

namespace prl::orchestrator {
namespace {

RolloutStats rollout(double reward, std::int64_t out = 10, std::int64_t in = 5, std::int64_t turns = 1, std::int64_t response = 0) {
  RolloutStats stats;
  stats.reward = reward;
  stats.num_output_tokens = out;
  stats.num_input_tokens = in;
  stats.num_response_tokens = response;
  stats.num_turns = turns;
  return stats;
}

std::vector<float> compute(const std::string& algorithm, std::vector<RolloutStats> group, LengthPenalty penalty = {}) {
  AdvantageOptions options;
  options.algorithm = algorithm;
  options.length_penalty = penalty;
  return compute_advantages(options, group);
}

void expect_near(const std::vector<float>& found, const std::vector<double>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(found[i], wanted[i], 1e-6) << i;
}

TEST(Advantage, Baselines) {
  const std::vector<RolloutStats> group{rollout(1, 10), rollout(0, 30), rollout(0, 20), rollout(0.2, 40)};
  expect_near(compute("grpo", group), {0.7, -0.3, -0.3, -0.1});
  expect_near(compute("drgrpo", group), {0.7, -0.3, -0.3, -0.1});
  expect_near(compute("rloo", group), {0.7 * 4 / 3, -0.4, -0.4, -0.4 / 3});
  const double weighted = (1.0 * 10 + 0.2 * 40) / 100;
  expect_near(compute("opo", group), {1 - weighted, -weighted, -weighted, 0.2 - weighted});
  expect_near(compute("max_rl", group), {0.7 / 0.3, -1, -1, -0.1 / 0.3});
  expect_near(compute("reward", group), {1, 0, 0, 0.2});
}

TEST(Advantage, EqualRewardsAreExactlyZero) {
  // 0.1 summed three times and divided is not 0.1.
  for (const char* algorithm : {"grpo", "rloo", "opo", "max_rl"})
    EXPECT_EQ(compute(algorithm, {rollout(0.1, 3), rollout(0.1, 5), rollout(0.1, 9)}), (std::vector<float>{0, 0, 0})) << algorithm;
  EXPECT_EQ(compute("max_rl", {rollout(-1), rollout(0)}), (std::vector<float>{0, 0})) << "a mean of at most 0";
  EXPECT_EQ(compute("grpo", {rollout(3)}), (std::vector<float>{0}));
  EXPECT_EQ(compute("rloo", {rollout(3)}), (std::vector<float>{0}));
  EXPECT_EQ(compute("reward", {rollout(3)}), (std::vector<float>{3}));
}

TEST(Advantage, LinearLengthPenaltyShrinksByTheGroupMean) {
  const LinearLengthPenalty penalty{0.5, 0.25, 0.1};
  // Fractions: 0.5 * out/20 + 0.25 * in/10 + 0.1 * turns/2; the mean reward is 0.5.
  const double a = 1 - 0.5 * (0.25 + 0.25 + 0.1);
  const double b = 0 - 0.5 * (0.5 + 0.125 + 0.05);
  expect_near(compute("grpo", {rollout(1, 10, 10, 2), rollout(0, 20, 5, 1)}, penalty), {a - (a + b) / 2, b - (a + b) / 2});
}

TEST(Advantage, CorrectLengthPenaltyTouchesTheBestOnly) {
  CorrectLengthPenalty penalty;
  // Costs of the two right ones: 10 and 30 + 10 = 40, mean 25; bonus 1 - 10/25 = 0.6 and 0.
  const double mean = (1.6 + 1 + 0) / 3;
  expect_near(compute("grpo", {rollout(1, 10), rollout(1, 30, 20, 1, 10), rollout(0, 5)}, penalty), {1.6 - mean, 1 - mean, -mean});
  expect_near(compute("grpo", {rollout(0, 10), rollout(-1, 30)}, penalty), {0.5, -0.5});
}

RolloutStats agent(std::string seat, std::int64_t play, double reward) {
  RolloutStats stats = rollout(reward);
  stats.seat = std::move(seat);
  stats.play = play;
  return stats;
}

// Two episodes: solvers are compared within theirs, proposers with each other, and the one reader has nobody.
TEST(Advantage, HierarchicalAgentsHavePeersOfTheirOwn) {
  AdvantageOptions options;
  options.algorithm = "hierarchical_grpo";
  options.episode_agents = {"solver"};
  const std::vector<RolloutStats> group{agent("proposer", 0, 0.75), agent("solver", 0, 1), agent("solver", 0, 0), agent("reader", 0, 5),
                                        agent("proposer", 1, 0.25), agent("solver", 1, 1), agent("solver", 1, 1)};
  expect_near(compute_advantages(options, group), {0.25, 0.5, -0.5, 0, -0.25, 0, 0});
}

TEST(Advantage, RunningAveragesAreOfASeat) {
  std::map<std::string, double> averages;
  expect_near(subtract_running_average(std::vector{agent("a", 0, 1), agent("b", 0, -1), agent("a", 1, 1)}, 0.5, averages), {1, -1, 0.5});
  EXPECT_DOUBLE_EQ(averages.at("a"), 0.75);
  EXPECT_DOUBLE_EQ(averages.at("b"), -0.5);
}

TEST(Advantage, UnknownAlgorithmListsTheKnown) {
  try {
    compute("ppo", {rollout(1)});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("max_rl"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace prl::orchestrator
