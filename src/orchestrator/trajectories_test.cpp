#include "orchestrator/trajectories.hpp"

#include <gtest/gtest.h>

#include <boost/json/serialize.hpp>

#include "orchestrator/rollout_filter.hpp"

namespace prl::orchestrator {
namespace {

env::TrajectoryStep turn(std::vector<std::int32_t> prompt, std::vector<std::int32_t> completion) {
  env::TrajectoryStep step;
  step.has_tokens = true;
  step.tokens.prompt_ids = std::move(prompt);
  for (const std::int32_t id : completion) step.tokens.logprobs.push_back(-0.01f * static_cast<float>(id));
  step.tokens.completion_ids = std::move(completion);
  return step;
}

env::Episode episode(std::vector<env::TrajectoryStep> turns) {
  env::Episode out;
  out.env_name = "e";
  out.temperature = 0.5f;
  out.trajectory = std::move(turns);
  return out;
}

TEST(Trajectories, TurnsThatExtendEachOtherBecomeOneSample) {
  const auto samples = to_samples(episode({turn({1, 2}, {3, 4}), turn({1, 2, 3, 4, 5, 6}, {7})}), TrajectoryStrategy::kInterleaved);
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].token_ids, (std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(samples[0].mask, (std::vector<std::uint8_t>{0, 0, 1, 1, 0, 0, 1}));
  EXPECT_EQ(samples[0].logprobs, (std::vector<float>{0, 0, -0.03f, -0.04f, 0, 0, -0.07f}));
  EXPECT_EQ(samples[0].temperatures[6], 0.5f);
  EXPECT_EQ(samples[0].env_name, "e");
}

TEST(Trajectories, ARewrittenHistoryOpensANewSampleAndInterleavedAgentsKeepTheirs) {
  const auto samples = to_samples(episode({turn({1}, {2}), turn({1, 2, 3}, {4}), turn({9}, {8}), turn({1, 2, 3, 4, 5}, {6})}),
                                  TrajectoryStrategy::kInterleaved);
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[0].token_ids, (std::vector<std::int32_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(samples[1].token_ids, (std::vector<std::int32_t>{9, 8}));
  const auto broken = to_samples(episode({turn({1}, {2, 3}), turn({1, 2, 7}, {4})}), TrajectoryStrategy::kInterleaved);
  EXPECT_EQ(broken.size(), 2u) << "the completion must be a prefix as a whole";
}

TEST(Trajectories, ImagesStayWithTheirTokens) {
  const auto picture = [](std::uint8_t shade) {
    auto pixels = std::make_shared<wire::ImagePixels>(
        wire::ImagePixels{.rgb = std::vector<std::uint8_t>(12, shade), .height = 2, .width = 2, .deviation = {1, 1, 1}});
    pixels->hash = wire::hash_of(*pixels);
    return pixels;
  };
  const auto seeing = [](env::TrajectoryStep step, std::vector<wire::PromptImage> images) {
    step.tokens.images = std::move(images);
    return step;
  };
  const wire::PromptImage first{.pixels = picture(1), .first = 1, .rows = 1, .cols = 1},
      again{.pixels = picture(1), .first = 1, .rows = 1, .cols = 1}, other{.pixels = picture(2), .first = 1, .rows = 1, .cols = 1},
      second{.pixels = picture(2), .first = 5, .rows = 1, .cols = 1};
  const auto samples =
      to_samples(episode({seeing(turn({1, 9, 2}, {3, 4}), {first}), seeing(turn({1, 9, 2, 3, 4, 9, 5}, {6}), {again, second})}),
                 TrajectoryStrategy::kInterleaved);
  ASSERT_EQ(samples.size(), 1u);
  ASSERT_EQ(samples[0].images.size(), 2u) << "that of the first turn once";
  EXPECT_EQ(samples[0].images[1].first, 5);
  // The same ids, with another picture on the placeholder.
  EXPECT_EQ(to_samples(episode({seeing(turn({1, 9, 2}, {3, 4}), {first}), seeing(turn({1, 9, 2, 3, 4, 9, 5}, {6}), {other, second})}),
                       TrajectoryStrategy::kInterleaved)
                .size(),
            2u);
}

TEST(Trajectories, TokensKeepTheExpertsThatTheyWereSampledWith) {
  const auto experts = [](std::int64_t start, std::vector<std::uint16_t> ids) {
    return wire::RoutedExperts{.start = start, .num_layers = 1, .top_k = 2, .ids = std::move(ids)};
  };
  std::vector<env::TrajectoryStep> turns = {turn({1, 2}, {3, 4}), turn({1, 2, 3, 4, 5}, {6})};
  turns[0].tokens.routed_experts = experts(0, {10, 11, 20, 21, 30, 31});
  turns[1].tokens.routed_experts = experts(3, {40, 41, 50, 51});
  const auto interleaved = to_samples(episode(turns), TrajectoryStrategy::kInterleaved);
  ASSERT_EQ(interleaved.size(), 1u);
  EXPECT_EQ(interleaved[0].routed_experts, experts(0, {10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 0, 0})) << "the last token was in no layer";
  // Told from the start again, or of more tokens than the reply has: a stop string cut it.
  turns[1].tokens.routed_experts = experts(0, {90, 91, 90, 91, 90, 91, 40, 41, 50, 51, 60, 61, 70, 71, 80, 81});
  EXPECT_EQ(to_samples(episode(turns), TrajectoryStrategy::kInterleaved)[0].routed_experts,
            experts(0, {10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 60, 61}));
  // What no server of the same model tells.
  for (const wire::RoutedExperts& wrong :
       {experts(7, {1, 2}), experts(-1, {1, 2}), wire::RoutedExperts{.start = 0, .num_layers = 2, .top_k = 1, .ids = {1, 2}}}) {
    turns[1].tokens.routed_experts = wrong;
    EXPECT_THROW(to_samples(episode(turns), TrajectoryStrategy::kInterleaved), Error) << wrong.start;
  }
  // A turn that does not tell.
  turns[1].tokens.routed_experts = {};
  EXPECT_EQ(to_samples(episode(turns), TrajectoryStrategy::kInterleaved)[0].routed_experts,
            experts(0, {10, 11, 20, 21, 30, 31, 0, 0, 0, 0, 0, 0}));
}

TEST(Trajectories, BranchingKeepsEachTurn) {
  const auto samples = to_samples(episode({turn({1}, {2}), turn({1, 2, 3}, {4}), turn({5}, {})}), TrajectoryStrategy::kBranching);
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[1].mask, (std::vector<std::uint8_t>{0, 0, 0, 1}));
}

TEST(Trajectories, AdvantagesAndPruning) {
  auto samples = to_samples(episode({turn({1, 2}, {3, 4})}), TrajectoryStrategy::kInterleaved);
  set_advantage(samples[0], -0.5f);
  EXPECT_EQ(samples[0].advantages, (std::vector<float>{0, 0, -0.5f, -0.5f}));
  EXPECT_TRUE(prune_zero_advantages(samples[0]));
  EXPECT_TRUE(samples[0].rl_weights.empty());
  set_advantage(samples[0], 0);
  EXPECT_FALSE(prune_zero_advantages(samples[0]));
  samples[0].ce_weights = {0, 0, 1, 0};
  EXPECT_TRUE(prune_zero_advantages(samples[0])) << "it still takes part in the ce loss";
  EXPECT_EQ(samples[0].rl_weights, (std::vector<float>{1, 1, 0, 0}));
}

env::TrajectoryStep with_roles(env::TrajectoryStep step, std::vector<env::PromptRole> roles) {
  step.tokens.prompt_roles = std::move(roles);
  return step;
}

// A user's and a tool's words behind the first reply take part in the cross entropy; the first prompt and what was sampled do not.
TEST(Trajectories, EchoWeighsWhatOthersSayAfterTheFirstReply) {
  using enum env::PromptRole;
  const env::Episode made = episode({with_roles(turn({1, 2}, {3, 4}), {kSystem, kUser}),
                                     with_roles(turn({1, 2, 3, 4, 5, 6, 7}, {8}), {kNone, kNone, kNone, kNone, kNone, kTool, kUser}),
                                     with_roles(turn({9, 8}, {7}), {kTool, kTool})});
  auto samples = to_samples(made, TrajectoryStrategy::kInterleaved);
  ASSERT_EQ(samples.size(), 2u);
  set_echo(samples, made, TrajectoryStrategy::kInterleaved, {.user = 0.5f, .tool = 0.25f});
  EXPECT_EQ(samples[0].ce_weights, (std::vector<float>{0, 0, 0, 0, 0, 0.25f, 0.5f, 0}));
  EXPECT_TRUE(samples[1].ce_weights.empty()) << "nothing was sampled before";
  EXPECT_EQ(samples[0].mask, (std::vector<std::uint8_t>{0, 0, 1, 1, 0, 0, 0, 1})) << "they take no part in the rl loss";
  set_advantage(samples[0], 0);
  EXPECT_TRUE(prune_zero_advantages(samples[0])) << "they train without any advantage";
  set_loss(samples[0], SampleLoss::kImitation);
  EXPECT_EQ(samples[0].ce_weights, (std::vector<float>{0, 0, 1, 1, 0, 0.25f, 0.5f, 1}));
  auto filtered = to_samples(made, TrajectoryStrategy::kInterleaved);
  const EchoMask keep = {{1, 1, 1, 1, 1, 0, 1, 1}, {1, 1, 1}};
  set_echo(filtered, made, TrajectoryStrategy::kInterleaved, {.user = 0.5f, .tool = 0.25f}, keep);
  EXPECT_EQ(filtered[0].ce_weights, (std::vector<float>{0, 0, 0, 0, 0, 0, 0.5f, 0}));
  const boost::json::array branches = echo_branches(made, TrajectoryStrategy::kInterleaved);
  ASSERT_EQ(branches.size(), 2u);
  EXPECT_EQ(boost::json::serialize(branches[0]),
            R"({"token_ids":[1,2,3,4,5,6,7,8],"sampled":[false,false,true,true,false,false,false,true],)"
            R"("roles":[null,null,null,null,null,"tool","user",null]})");
  auto untouched = to_samples(made, TrajectoryStrategy::kInterleaved);
  set_echo(untouched, made, TrajectoryStrategy::kInterleaved, {.system = 1});
  EXPECT_TRUE(untouched[0].ce_weights.empty());
}

TEST(RolloutFilter, GibberishAndRepetition) {
  RolloutFilterOptions gibberish;
  gibberish.vocab_size = 1000;
  gibberish.token_id_threshold = 500;
  env::Episode e = episode({turn({1}, {600, 2})});
  EXPECT_FALSE(matches(gibberish, e)) << "likely enough";
  e.trajectory[0].tokens.logprobs[0] = -9.0f;
  EXPECT_TRUE(matches(gibberish, e)) << "below -ln(1000) - 2 = -8.9";
  RolloutFilterOptions repetition;
  repetition.kind = RolloutFilterOptions::Kind::kRepetition;
  repetition.window = 3;
  env::Episode r = episode({turn({1}, {5, 5, 5, 5})});
  r.trajectory[0].tokens.logprobs = {-0.001f, -0.5f, -0.001f, -0.001f};
  EXPECT_FALSE(matches(repetition, r));
  r.trajectory[0].tokens.logprobs[1] = -0.002f;
  EXPECT_TRUE(matches(repetition, r));
}

}  // namespace
}  // namespace prl::orchestrator
