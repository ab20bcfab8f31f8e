#include "orchestrator/reference_scoring.hpp"

#include <gtest/gtest.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>

#include "base/error.hpp"

namespace prl::orchestrator {
namespace {

/// Gives token i the score -(its id) / 100 - (its position), so that every shift shows.
class FakeTeacher final : public env::PromptScorer {
 public:
  explicit FakeTeacher(std::size_t max_tokens = 100) : max_tokens_(max_tokens) {}
  asio::awaitable<std::vector<float>> score(std::vector<std::int32_t> ids, net::TimePoint, net::Fields) override {
    requests.push_back(ids);
    if (ids.size() > max_tokens_) fail(ErrorCode::kOverlong, "no room");
    std::vector<float> out{0.0f};
    for (std::size_t i = 1; i < ids.size(); ++i) out.push_back(of(ids[i], i));
    co_return out;
  }
  asio::awaitable<void> check_ready(net::TimePoint) override { co_return; }
  std::string describe() const override { return "fake teacher"; }
  static float of(std::int32_t id, std::size_t position) { return -0.01f * static_cast<float>(id) - static_cast<float>(position); }
  std::vector<std::vector<std::int32_t>> requests;

 private:
  std::size_t max_tokens_;
};

env::TrajectoryStep turn(std::vector<std::int32_t> prompt, std::vector<std::int32_t> completion) {
  env::TrajectoryStep step;
  step.has_tokens = true;
  step.tokens.prompt_ids = std::move(prompt);
  step.tokens.logprobs.assign(completion.size(), -0.5f);
  step.tokens.completion_ids = std::move(completion);
  return step;
}

TurnScores score(const env::Episode& episode, FakeTeacher& teacher, ReferenceScoring options) {
  asio::io_context context;
  auto future =
      asio::co_spawn(context, score_episode(&episode, &teacher, options, net::Clock::now() + std::chrono::seconds(5)), asio::use_future);
  context.run();
  return future.get();
}

/// Two turns that extend each other, and one of another conversation between them.
env::Episode episode() {
  env::Episode out;
  out.env_name = "e";
  out.trajectory = {turn({1, 2}, {3, 4}), turn({9}, {8}), turn({1, 2, 3, 4, 5}, {6, 7})};
  return out;
}

// The policy as its own teacher reads the demonstration first; the scores are those of the rollout's own tokens behind it.
TEST(ReferenceScoring, ADemonstrationGoesInFront) {
  FakeTeacher teacher;
  env::Episode shown = episode();
  shown.info["hint"] = "ab";
  ReferenceScoring options;
  options.demonstrations.key = "hint";
  options.demonstrations.prefix_of = [](const std::string& text) { return std::vector<std::int32_t>(text.begin(), text.end()); };
  const TurnScores scores = score(shown, teacher, options);
  EXPECT_EQ(teacher.requests[0], (std::vector<std::int32_t>{'a', 'b', 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(scores[0], (std::vector<float>{FakeTeacher::of(3, 4), FakeTeacher::of(4, 5)}));
  EXPECT_EQ(scores[2], (std::vector<float>{FakeTeacher::of(6, 7), FakeTeacher::of(7, 8)}));
  EXPECT_THROW(score(episode(), teacher, options), Error) << "no demonstration";
}

TEST(ReferenceScoring, EveryTokenGetsTheScoreOfItsOwnPlace) {
  for (const auto strategy : {TrajectoryStrategy::kInterleaved, TrajectoryStrategy::kBranching}) {
    FakeTeacher teacher;
    const TurnScores scores = score(episode(), teacher, {.strategy = strategy});
    EXPECT_EQ(teacher.requests.size(), strategy == TrajectoryStrategy::kInterleaved ? 2u : 3u) << "one request per sample";
    for (wire::TrainingSample& sample : to_samples(episode(), strategy, scores)) {
      ASSERT_EQ(sample.ref_logprobs.size(), sample.token_ids.size());
      for (std::size_t i = 0; i < sample.token_ids.size(); ++i)
        EXPECT_EQ(sample.ref_logprobs[i], sample.mask[i] != 0 ? FakeTeacher::of(sample.token_ids[i], i) : 0.0f) << i;
    }
  }
}

TEST(ReferenceScoring, WhatTheTeacherCannotReachPullsNowhere) {
  FakeTeacher narrow(6);  // the first sample has 7 tokens
  const TurnScores scored = score(episode(), narrow, {});
  ASSERT_EQ(narrow.requests.size(), 3u);
  EXPECT_EQ(narrow.requests[1].size(), 6u) << "again without the last token";
  EXPECT_EQ(scored[2], (std::vector<float>{FakeTeacher::of(6, 5), -0.5f}));

  FakeTeacher teacher;
  const TurnScores cut = score(episode(), teacher, {.max_tokens = 3});
  EXPECT_EQ(cut[0], (std::vector<float>{FakeTeacher::of(3, 2), -0.5f}));
  EXPECT_EQ(cut[2], (std::vector<float>{-0.5f, -0.5f}));

  FakeTeacher tiny(3);
  EXPECT_THROW(score(episode(), tiny, {}), Error) << "more than the last token does not fit";
}

TEST(SampleLoss, ChoosesOneComponentForTheSampledTokens) {
  FakeTeacher teacher;
  auto samples = to_samples(episode(), TrajectoryStrategy::kInterleaved, score(episode(), teacher, {}));
  set_advantage(samples[0], 0.5f);
  wire::TrainingSample distilled = samples[0], imitated = samples[0];
  set_loss(distilled, SampleLoss::kDistillation);
  EXPECT_EQ(distilled.ref_kl_weights, (std::vector<float>{0, 0, 1, 1, 0, 1, 1}));
  EXPECT_EQ(distilled.rl_weights, std::vector<float>(7, 0.0f));
  EXPECT_EQ(distilled.mask, samples[0].mask);
  EXPECT_EQ(distilled.advantages[2], 0.5f) << "they choose the side of the mask";
  EXPECT_TRUE(prune_zero_advantages(distilled)) << "an advantage of 0 must not drop it";

  imitated.temperatures.assign(7, 0.7f);
  set_loss(imitated, SampleLoss::kImitation);
  EXPECT_EQ(imitated.ce_weights, (std::vector<float>{0, 0, 1, 1, 0, 1, 1}));
  EXPECT_EQ(imitated.mask, std::vector<std::uint8_t>(7, 0));
  EXPECT_EQ(imitated.logprobs, std::vector<float>(7, 0.0f));
  EXPECT_EQ(imitated.temperatures, std::vector<float>(7, 1.0f));

  wire::TrainingSample bare = to_samples(episode(), TrajectoryStrategy::kInterleaved)[0];
  EXPECT_THROW(set_loss(bare, SampleLoss::kDistillation), Error);
}

}  // namespace
}  // namespace prl::orchestrator
