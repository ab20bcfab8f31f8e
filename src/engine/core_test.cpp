#include "engine/core.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "engine/test_support.hpp"

namespace prl::engine {
namespace {
using testing::Collected;
using testing::expected_output;
using testing::fake_weights;
using testing::FakeRunner;
using wire::FinishReason;

constexpr std::int32_t kVocab = 1000;

struct World : testing::FakeWorld {
  explicit World(const CoreOptions& options, bool is_beside_host = false) : FakeWorld(options, kVocab, is_beside_host) {}
  /// Until there is nothing to do but to wait for token rules, or nothing at all.
  void drain_held(int max_steps = 100000) {
    while (core->step()) ASSERT_GT(max_steps--, 0) << "the engine does not come to an end";
    core->scheduler().check_integrity();
  }
};

CoreOptions roomy() {
  CoreOptions options;
  options.num_blocks = 64;
  options.block_size = 4;
  return options;
}

ResolvedRequest request_of(std::vector<std::int32_t> prompt, std::int64_t max_new_tokens, std::uint64_t seed = 1) {
  ResolvedRequest request;
  request.prompt_ids = std::move(prompt);
  request.max_new_tokens = max_new_tokens;
  request.seed = seed;
  return request;
}

TEST(EngineCore, GeneratesUntilLength) {
  World world(roomy());
  const auto request = request_of({1, 2, 3}, 10);
  const auto got = world.add(1, request);
  world.drain();
  EXPECT_EQ(got->output.token_ids, expected_output(request, 1, PolicyVersion{0}, kVocab));
  EXPECT_EQ(got->output.finish_reason, FinishReason::kLength);
  EXPECT_EQ(got->output.num_prompt_tokens, 3);
  EXPECT_TRUE(got->is_over);
  EXPECT_EQ(world.core->take_ended(), std::vector<RequestId>{RequestId{1}});
}

TEST(EngineCore, StopTokenEndsAndIsIncluded) {
  World world(roomy());
  auto request = request_of({1, 2, 3}, 50);
  const auto full = expected_output(request, 1, PolicyVersion{0}, kVocab);
  request.stop_ids = {full[4]};
  const auto got = world.add(1, request);
  world.drain();
  EXPECT_EQ(got->output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(got->output.stop_token_id, full[4]);
  EXPECT_EQ(got->output.token_ids.back(), full[4]);
  EXPECT_LE(got->output.token_ids.size(), 5u);
}

TEST(EngineCore, StopTokenBeforeMinTokensDoesNotEnd) {
  World world(roomy());
  auto request = request_of({1, 2, 3}, 8);
  const auto full = expected_output(request, 1, PolicyVersion{0}, kVocab);
  request.stop_ids = {full[1]};
  request.sampling.min_tokens = 4;
  const auto got = world.add(1, request);
  world.drain();
  EXPECT_EQ(got->output.finish_reason, FinishReason::kLength);
}

TEST(EngineCore, PromptLogprobsSurviveChunksAndPreemption) {
  CoreOptions options;
  options.num_blocks = 8;
  options.block_size = 2;
  options.scheduler.max_num_batched_tokens = 3;
  options.scheduler.preempt_period = 3;
  World world(options);
  auto request = request_of({1, 2, 3, 4, 5, 6, 7}, 4);
  world.add(1, request_of({9, 9}, 8));
  request.sampling.prompt_logprobs = 0;
  const auto got = world.add(2, request);
  world.drain();
  std::vector<float> wanted;
  for (int i = 0; i < 7; ++i) wanted.push_back(static_cast<float>(-i));
  EXPECT_EQ(got->output.prompt_logprobs, wanted);
  EXPECT_EQ(got->output.token_ids, expected_output(request, 1, PolicyVersion{0}, kVocab));
}

TEST(EngineCore, CancelAndStopEndOnce) {
  World world(roomy());
  const auto cancelled = world.add(1, request_of({1, 2}, 50));
  const auto stopped = world.add(2, request_of({1, 3}, 50));
  const auto waiting = world.add(3, request_of({1, 4}, 50));
  world.core->cancel(RequestId{3});
  world.core->step();
  world.core->cancel(RequestId{1});
  world.core->cancel(RequestId{1});
  world.core->stop(RequestId{2}, "END");
  world.core->stop(RequestId{2}, "END");
  world.core->cancel(RequestId{77});
  world.drain();
  EXPECT_EQ(cancelled->output.finish_reason, FinishReason::kAbort);
  EXPECT_EQ(cancelled->output.token_ids.size(), 1u);
  EXPECT_EQ(waiting->output.finish_reason, FinishReason::kAbort);
  EXPECT_EQ(stopped->output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped->output.stop_string, "END");
  EXPECT_EQ(stopped->output.token_ids.size(), 1u);
  EXPECT_EQ(world.core->stats().num_blocks_used, 0);
}

TEST(EngineCore, AFailingStepEndsItsRequestsOnly) {
  CoreOptions options = roomy();
  options.scheduler.max_num_seqs = 1;
  World world(options);
  const auto victim = world.add(1, request_of({1, 2, 3, 4, 5}, 10));
  const auto request = request_of({1, 2, 3, 4, 5}, 10);
  const auto survivor = world.add(2, request);
  world.core->step();
  world.runner->before_run = [&](const StepPlan&) {
    world.runner->before_run = nullptr;
    fail(ErrorCode::kInternal, "made to fail");
  };
  EXPECT_TRUE(world.core->step());
  EXPECT_EQ(world.core->stats().num_failures_in_a_row, 1);
  world.drain();
  EXPECT_EQ(world.core->stats().num_failures_in_a_row, 0);
  EXPECT_EQ(victim->output.finish_reason, FinishReason::kError);
  EXPECT_EQ(victim->output.error, "made to fail");
  EXPECT_EQ(survivor->output.token_ids, expected_output(request, 1, PolicyVersion{0}, kVocab));
  EXPECT_EQ(survivor->output.num_cached_tokens, 0) << "blocks of a failed step must not be found";
}

TEST(EngineCore, AFailingRowEndsItsRequestOnly) {
  World world(roomy());
  const auto request = request_of({1, 2, 3}, 5);
  const auto good = world.add(1, request);
  const auto bad = world.add(2, request_of({4, 5, 6}, 5));
  world.runner->fail_row = [](const PlanRow& row) { return row.sequence->request_id == RequestId{2}; };
  world.drain();
  EXPECT_EQ(good->output.token_ids, expected_output(request, 1, PolicyVersion{0}, kVocab));
  EXPECT_EQ(bad->output.finish_reason, FinishReason::kError);
  EXPECT_TRUE(bad->output.token_ids.empty());
}

TEST(EngineCore, ASinkThatThrowsLosesItsRequestOnly) {
  for (const bool is_beside_host : {false, true}) {  // then it throws while the next step computes
    SCOPED_TRACE(is_beside_host);
    World world(roomy(), is_beside_host);
    world.core->add(RequestId{1}, request_of({1, 2, 3}, 5), [](const StepEvent&) { throw std::runtime_error("gone"); });
    const auto request = request_of({1, 2, 3}, 5);
    const auto good = world.add(2, request);
    world.drain();
    EXPECT_EQ(good->output.token_ids, expected_output(request, 1, PolicyVersion{0}, kVocab));
    EXPECT_THAT(world.core->take_ended(), ::testing::UnorderedElementsAre(RequestId{1}, RequestId{2}));
    EXPECT_EQ(world.core->stats().num_blocks_used, 0);
  }
}

TEST(EngineCore, TokensRecordTheVersionThatDrewThem) {
  World world(roomy());
  const auto got = world.add(1, request_of({1, 2, 3, 4, 5}, 6));
  world.core->step();
  world.core->step();
  EXPECT_EQ(world.core->update_weights(fake_weights(7)).version, PolicyVersion{7});
  const auto fresh = world.add(2, request_of({1, 2, 3, 4, 5}, 6));
  world.drain();
  EXPECT_EQ(got->output.versions, (std::vector<std::int64_t>{0, 0, 7, 7, 7, 7}));
  EXPECT_EQ(got->output.version_start, PolicyVersion{0});
  EXPECT_EQ(got->output.version_end, PolicyVersion{7});
  EXPECT_EQ(fresh->output.num_cached_tokens, 0);
  EXPECT_EQ(fresh->output.version_start, PolicyVersion{7});
}

TEST(EngineCore, AMultiTurnConversationFindsItsOwnPastAgain) {
  for (const bool is_beside_host : {false, true}) {  // then blocks are full before their tokens are known
    SCOPED_TRACE(is_beside_host);
    World world(roomy(), is_beside_host);
    const auto first = world.add(1, request_of({1, 2, 3, 4, 5}, 8));
    world.drain();
    std::vector<std::int32_t> prompt = {1, 2, 3, 4, 5};
    prompt.insert(prompt.end(), first->output.token_ids.begin(), first->output.token_ids.end());
    prompt.insert(prompt.end(), {6, 7});
    const auto request = request_of(prompt, 4);
    const auto second = world.add(2, request);
    world.drain();
    EXPECT_EQ(second->output.num_cached_tokens, 12);
    EXPECT_EQ(second->output.token_ids, expected_output(request, 1, PolicyVersion{0}, kVocab));
  }
}

TEST(EngineCore, AbortAllEndsEverything) {
  World world(roomy());
  const auto first = world.add(1, request_of({1}, 5));
  const auto second = world.add(2, request_of({2}, 5));
  world.core->step();
  world.core->abort_all(FinishReason::kAbort, "");
  EXPECT_TRUE(first->is_over && second->is_over);
  EXPECT_TRUE(world.core->is_idle());
}

TEST(EngineCore, ADeviceThatWorksBesideTheHostWaitsNeitherForListenersNorForTokens) {
  World world(roomy(), /*is_beside_host=*/true);
  const auto got = world.add(1, request_of({1, 2, 3}, 5));
  std::vector<std::size_t> heard_at_start;
  world.runner->before_run = [&](const StepPlan&) { heard_at_start.push_back(got->output.token_ids.size()); };
  world.core->step();
  EXPECT_EQ(world.runner->num_runs, 2) << "the second is queued behind the first";
  EXPECT_EQ(got->output.token_ids.size(), 0u) << "sent while the next step computes";
  world.core->step();
  EXPECT_EQ(world.runner->num_runs, 3);
  EXPECT_EQ(got->output.token_ids.size(), 1u);
  world.core->deliver();
  EXPECT_EQ(got->output.token_ids.size(), 3u) << "all that was queued";
  world.core->step();
  world.core->step();
  EXPECT_TRUE(got->is_over) << "nothing is left to compute, so nobody waits";
  EXPECT_TRUE(world.core->is_idle());
  EXPECT_EQ(got->output.token_ids, expected_output(request_of({1, 2, 3}, 5), 1, PolicyVersion{0}, kVocab));
  EXPECT_EQ(heard_at_start, (std::vector<std::size_t>{0, 0, 0, 3, 3}));
  EXPECT_EQ(world.runner->num_ahead, 3);
}

TEST(EngineCore, AStepAheadCountsForNothingWhereASequenceHadEnded) {
  World world(roomy(), /*is_beside_host=*/true);
  const auto goes_on = request_of({1, 2}, 40);
  auto ends = request_of({3, 4, 5}, 50);
  const auto full = expected_output(ends, 1, PolicyVersion{0}, kVocab);
  ends.stop_ids = {full[6]};
  const auto first = world.add(1, goes_on), second = world.add(2, ends);
  world.drain();
  EXPECT_EQ(first->output.token_ids, expected_output(goes_on, 1, PolicyVersion{0}, kVocab));
  EXPECT_EQ(second->output.token_ids, (std::vector<std::int32_t>(full.begin(), full.begin() + 7)));
  EXPECT_EQ(second->output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(world.core->stats().num_generation_tokens, 47);
  EXPECT_EQ(world.core->stats().num_blocks_used, 0);
  EXPECT_EQ(world.runner->num_runs, 40) << "the end of one does not hold up the other";
  EXPECT_EQ(world.runner->num_ahead, 39);
}

TEST(EngineCore, StepsRunAheadWhileOthersWaitForAPlace) {
  CoreOptions options = roomy();
  options.scheduler.max_num_seqs = 2;
  World world(options, /*is_beside_host=*/true);
  std::vector<std::shared_ptr<Collected>> got;
  for (std::int32_t i = 0; i < 6; ++i) got.push_back(world.add(static_cast<std::uint64_t>(i + 1), request_of({i, 2}, 10 + i)));
  world.drain();
  for (std::int32_t i = 0; i < 6; ++i)
    EXPECT_EQ(got[static_cast<std::size_t>(i)]->output.token_ids, expected_output(request_of({i, 2}, 10 + i), 1, PolicyVersion{0}, kVocab));
  EXPECT_GT(world.runner->num_ahead, 30);
  EXPECT_EQ(world.runner->num_runs, 39) << "a place that becomes free at a known time is filled at once";
}

class AnyToken final : public wire::TokenRule {
 public:
  bool allow(std::span<const std::int32_t>, wire::TokenRuleCursor&, std::span<std::uint64_t> words) const override {
    std::ranges::fill(words, ~std::uint64_t{0});
    return true;
  }
};

TEST(EngineCore, StepsThatNeedTheTokensBeforeThemDoNotRunAhead) {
  const auto num_ahead = [](const std::function<void(ResolvedRequest&)>& change) {
    World world(roomy(), /*is_beside_host=*/true);
    auto request = request_of({1, 2, 3}, 8);
    change(request);
    world.add(1, request);
    world.drain();
    return world.runner->num_ahead;
  };
  EXPECT_EQ(num_ahead([](ResolvedRequest&) {}), 7);
  EXPECT_EQ(num_ahead([](ResolvedRequest& r) { r.sampling.stop = {"END"}; }), 0) << "its listener may end it at each token";
  EXPECT_EQ(num_ahead([](ResolvedRequest& r) { r.sampling.token_rule = std::make_shared<AnyToken>(); }), 0) << "it asks for each token";
  EXPECT_EQ(num_ahead([](ResolvedRequest& r) {
              r.edits_logits = true;
              r.sampling.repetition_penalty = 1.5f;
              r.stop_ids = {kVocab};
              r.sampling.min_tokens = 5;
            }),
            7)
      << "the device counts what was drawn there";
}

/// Answers when the test says so.
class LateRule final : public wire::SlowTokenRule {
 public:
  bool allow(std::span<const std::int32_t>, wire::TokenRuleCursor&, std::span<std::uint64_t> words) const override {
    std::ranges::fill(words, ~std::uint64_t{0});
    return true;
  }
  std::shared_ptr<wire::TokenRuleAnswer> ask(std::span<const std::int32_t> output, const wire::TokenRuleCursor&,
                                             const std::function<void()>&) const override {
    asked.push_back(output.size());
    answers.push_back(std::make_shared<wire::TokenRuleAnswer>());
    return answers.back();
  }
  std::string failure() const override { return why; }
  void answer_all() const {
    for (const auto& answer : answers) answer->is_ready = true;
  }
  mutable std::vector<std::size_t> asked;
  mutable std::vector<std::shared_ptr<wire::TokenRuleAnswer>> answers;
  std::string why;
};

TEST(EngineCore, ARuleAtWorkHoldsItsOwnSequenceOnly) {
  for (const bool is_beside_host : {false, true}) {
    World world(roomy(), is_beside_host);
    const auto rule = std::make_shared<LateRule>();
    auto ruled = request_of({1, 2, 3, 4, 5, 6, 7, 8, 9}, 6, 3);
    ruled.sampling.token_rule = rule;
    const auto held = world.add(1, ruled);
    const auto free = world.add(2, request_of({4, 5}, 20));
    world.drain_held();
    EXPECT_EQ(free->output.token_ids, expected_output(request_of({4, 5}, 20), 1, PolicyVersion{0}, kVocab));
    EXPECT_TRUE(held->output.token_ids.empty()) << "nobody knows yet what it may draw";
    EXPECT_TRUE(world.core->waits_for_rules());
    for (int i = 0; i < 20 && !world.core->is_idle(); ++i) {
      rule->answer_all();
      world.drain_held();
    }
    EXPECT_TRUE(world.core->is_idle());
    auto plain = ruled;
    plain.sampling.token_rule = nullptr;
    World other(roomy());
    const auto same = other.add(1, plain);
    other.drain();
    EXPECT_EQ(held->output.token_ids, same->output.token_ids) << "waiting changes no token";
    EXPECT_EQ(rule->asked.size(), 6U) << "once for each token";
  }
}

TEST(EngineCore, WhoeverIsHeldGetsItsBlocksFromHostMemoryAllTheSame) {
  for (const bool is_beside_host : {false, true})
    for (const bool fails : {false, true}) {  // the step that was to bring the blocks, half-way
      SCOPED_TRACE(is_beside_host);
      SCOPED_TRACE(fails);
      CoreOptions options;
      options.num_blocks = 6;
      options.block_size = 4;
      options.num_host_blocks = 32;
      World world(options, is_beside_host);
      auto request = request_of({1, 2, 3, 4, 5, 6, 7, 8, 9}, 4, 3);
      world.add(1, request);
      world.drain();
      std::vector<std::int32_t> other(20);
      std::iota(other.begin(), other.end(), 100);
      world.add(2, request_of(other, 4));
      world.drain();
      const auto rule = std::make_shared<LateRule>();
      auto ruled = request;
      ruled.sampling.token_rule = rule;
      const auto held = world.add(3, ruled);
      world.drain_held();
      EXPECT_TRUE(world.core->waits_for_rules());
      EXPECT_EQ(world.core->stats().num_host_hit_tokens, 8);
      EXPECT_EQ(world.core->stats().num_blocks_restored, 0) << "there was no step yet";
      world.runner->before_begun = [&](const StepPlan& plan) {
        EXPECT_EQ(plan.copies.restores.size(), 2u);
        world.runner->before_begun = nullptr;
        if (fails) fail(ErrorCode::kInternal, "made to fail");
      };
      const auto beside = world.add(4, request_of({50, 51}, 2));
      world.drain_held();
      EXPECT_EQ(beside->output.finish_reason, fails ? FinishReason::kError : FinishReason::kLength);
      for (int i = 0; i < 20 && !world.core->is_idle(); ++i) {
        rule->answer_all();
        world.drain_held();
      }
      ASSERT_TRUE(held->is_over);
      EXPECT_EQ(held->output.token_ids, expected_output(request, 3, PolicyVersion{0}, kVocab));
      EXPECT_EQ(world.core->stats().num_blocks_restored, fails ? 0 : 2);
      EXPECT_EQ(world.core->stats().num_preemptions, fails ? 1 : 0);
    }
}

TEST(EngineCore, ARuleThatGivesUpEndsItsRequests) {
  World world(roomy());
  const auto rule = std::make_shared<LateRule>();
  auto ruled = request_of({1, 2, 3}, 6);
  ruled.sampling.token_rule = rule;
  const auto held = world.add(1, ruled);
  const auto free = world.add(2, request_of({4, 5}, 3));
  world.drain_held();
  rule->why = "too much work";
  rule->answer_all();
  world.drain();
  EXPECT_EQ(held->output.finish_reason, FinishReason::kError);
  EXPECT_EQ(held->output.error, "too much work");
  EXPECT_EQ(free->output.finish_reason, FinishReason::kLength);
  EXPECT_EQ(world.runner->num_runs, 3) << "no step is made for it alone";
}

TEST(EngineCore, WeightsThatGiveNoNumbersAreNotTaken) {
  World world(roomy());
  world.core->update_weights(fake_weights(3));
  world.runner->probe_logprobs = {-1.0f, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_THROW(world.core->update_weights(fake_weights(4)), Error);
  EXPECT_EQ(world.core->runner().weights()->version, PolicyVersion{3});
  EXPECT_EQ(world.core->stats().version, PolicyVersion{3});
  world.runner->probe_logprobs = {-1.0f};
  EXPECT_EQ(world.core->update_weights(fake_weights(5)).version, PolicyVersion{5});
}

TEST(EngineCore, AStepThatCannotBeQueuedAheadIsMadeAnew) {
  World world(roomy(), /*is_beside_host=*/true);
  const auto got = world.add(1, request_of({1, 2, 3}, 12));
  world.runner->before_run = [&](const StepPlan& plan) {
    if (plan.rows.front().drawn_row >= 0 && world.runner->num_runs % 3 == 0) fail(ErrorCode::kOutOfMemory, "made to fail");
  };
  world.drain();
  EXPECT_EQ(got->output.token_ids, expected_output(request_of({1, 2, 3}, 12), 1, PolicyVersion{0}, kVocab));
  EXPECT_EQ(world.core->stats().num_failures_in_a_row, 0);
}

TEST(EngineCore, WhatAStepAheadWasToSaveIsForgottenIfItFails) {
  CoreOptions options;
  options.num_blocks = 3;
  options.block_size = 4;
  options.num_host_blocks = 8;
  World world(options, /*is_beside_host=*/true);
  world.add(1, request_of({1, 2, 3, 4, 5}, 1));
  world.drain();
  int num_failures = 0;
  world.runner->before_begun = [&](const StepPlan& plan) {  // its row has overwritten the block by then
    if (plan.rows.front().drawn_row < 0 || plan.copies.saves.empty()) return;
    ++num_failures;
    fail(ErrorCode::kOutOfMemory, "made to fail");
  };
  const auto other = request_of({11, 12, 13, 14, 15, 16, 17, 18}, 3);
  const auto got = world.add(2, other);
  world.drain();
  EXPECT_EQ(num_failures, 1);
  EXPECT_EQ(got->output.token_ids, expected_output(other, 1, PolicyVersion{0}, kVocab));
  const auto request = request_of({1, 2, 3, 4, 5}, 2);
  const auto again = world.add(3, request);
  world.drain();
  EXPECT_EQ(again->output.num_cached_tokens, 0);
  EXPECT_EQ(again->output.token_ids, expected_output(request, 1, PolicyVersion{0}, kVocab));
}

TEST(EngineCore, AFailureTakesTheStepBehindItAlong) {
  World world(roomy(), /*is_beside_host=*/true);
  const auto lost = world.add(1, request_of({1, 2, 3}, 12));
  int num_finished = 0;
  world.runner->before_finish = [&](const StepPlan&) {
    if (++num_finished == 4) fail(ErrorCode::kInternal, "made to fail");
  };
  for (int i = 0; i < 4; ++i) world.core->step();
  EXPECT_EQ(lost->output.finish_reason, FinishReason::kError);
  EXPECT_EQ(lost->output.token_ids.size(), 3u) << "what came before is kept";
  EXPECT_TRUE(world.core->is_idle());
  EXPECT_EQ(world.core->stats().num_blocks_used, 0);
  const auto next = world.add(2, request_of({1, 2, 3}, 12));
  world.drain();
  EXPECT_EQ(next->output.num_cached_tokens, 0) << "blocks of a failed step may hold anything";
  EXPECT_EQ(next->output.token_ids, expected_output(request_of({1, 2, 3}, 12), 1, PolicyVersion{0}, kVocab));
}

TEST(EngineCore, RequestsThatStopAtStringsHearOfEachTokenAtOnce) {
  World world(roomy(), /*is_beside_host=*/true);
  auto request = request_of({1, 2, 3}, 50);
  request.sampling.stop = {"END"};
  const auto got = world.add(1, request);
  world.core->step();
  EXPECT_EQ(got->output.token_ids.size(), 1u);
  world.core->stop(RequestId{1}, "END");
  world.drain();
  EXPECT_EQ(got->output.token_ids.size(), 1u);
  EXPECT_EQ(got->output.finish_reason, FinishReason::kStop);
}

TEST(EngineCore, NewsOfAStepComeBeforeWhatAnOrderDoesToTheirRequests) {
  World world(roomy(), /*is_beside_host=*/true);
  const auto cancelled = world.add(1, request_of({1, 2}, 50)), ended = world.add(2, request_of({1, 3}, 1)),
             updated = world.add(3, request_of({1, 4}, 5));
  world.core->step();
  world.core->cancel(RequestId{2});
  EXPECT_EQ(ended->output.finish_reason, FinishReason::kLength) << "it had ended before it was cancelled";
  world.core->cancel(RequestId{1});
  EXPECT_EQ(cancelled->output.token_ids.size(), 2u) << "the second step was in flight";
  EXPECT_EQ(cancelled->output.finish_reason, FinishReason::kAbort);
  world.core->step();
  world.core->update_weights(fake_weights(7));
  EXPECT_EQ(updated->output.versions, (std::vector<std::int64_t>{0, 0, 0, 0})) << "drawn before there were new weights";
  world.core->step();
  EXPECT_EQ(updated->output.versions, (std::vector<std::int64_t>{0, 0, 0, 0, 7}));
  world.core->abort_all(FinishReason::kAbort, "");
  EXPECT_TRUE(updated->is_over);
}

// Random arrivals, cancels, stops, failures and weight updates under configurations made to hurt. Requests that nothing
// interfered with must give exactly the tokens they give alone, and every request must end exactly once.
struct Hostile {
  const char* name;
  CoreOptions options;
};

class EngineProperty : public ::testing::TestWithParam<Hostile> {};

TEST_P(EngineProperty, EveryRequestEndsOnceAndUndisturbedOnesAreExact) {
  int num_undisturbed = 0;
  std::int64_t num_ahead = 0, num_restored = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed, 99);
    const CoreOptions options = GetParam().options;
    const std::int64_t max_len = options.num_blocks * options.block_size;
    World world(options, /*is_beside_host=*/seed % 2 != 0);
    struct Tracked {
      ResolvedRequest request;
      std::shared_ptr<Collected> got;
      PolicyVersion version;
      bool is_disturbed = false;
    };
    std::map<std::uint64_t, Tracked> all;
    bool fails_now = false, fails_half_way = false, fails_late = false;
    const auto fail_if = [&](bool& fails, const StepPlan& plan) {
      if (!std::exchange(fails, false)) return;
      for (const PlanRow& row : plan.rows)
        all.at(row.sequence->request_id.value).is_disturbed |= row.sequence->state != SequenceState::kFinished;
      fail(ErrorCode::kInternal, "made to fail");
    };
    world.runner->before_run = [&](const StepPlan& plan) { fail_if(fails_now, plan); };
    world.runner->before_begun = [&](const StepPlan& plan) { fail_if(fails_half_way, plan); };
    world.runner->before_finish = [&](const StepPlan& plan) { fail_if(fails_late, plan); };
    PolicyVersion version{0};
    std::uint64_t next_id = 1;
    for (int i = 0; i < 300; ++i) {
      const auto choice = rng.next_below(100);
      if (choice < 25 && next_id <= 40) {
        ResolvedRequest request;
        const auto num_prompt = 1 + static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(max_len - 1)));
        const auto family = static_cast<std::int32_t>(rng.next_below(3));  // prompts of a family share prefixes
        for (std::int64_t t = 0; t < num_prompt; ++t) request.prompt_ids.push_back(family * 100 + static_cast<std::int32_t>(t));
        if (rng.next_below(3) == 0) request.prompt_ids.back() = 999;
        request.max_new_tokens = 1 + static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(max_len - num_prompt)));
        request.seed = rng.next_u64();
        request.priority = static_cast<std::int32_t>(rng.next_below(3)) - 1;
        request.adapter.id = rng.next_below(3);
        if (rng.next_below(4) == 0) request.sampling.prompt_logprobs = 0;
        if (rng.next_below(4) == 0) request.cache_salt = "salt";
        for (int s = 0; s < 100; ++s) request.stop_ids.push_back(static_cast<std::int32_t>(rng.next_below(kVocab)));
        std::sort(request.stop_ids.begin(), request.stop_ids.end());
        request.sampling.min_tokens = static_cast<std::int32_t>(rng.next_below(3));
        all.emplace(next_id, Tracked{request, world.add(next_id, request), version});
        ++next_id;
      } else if (choice < 30 && next_id > 1) {
        const std::uint64_t id = 1 + rng.next_below(next_id - 1);
        all.at(id).is_disturbed |= !all.at(id).got->is_over;
        world.core->cancel(RequestId{id});
      } else if (choice < 33 && next_id > 1) {
        const std::uint64_t id = 1 + rng.next_below(next_id - 1);
        all.at(id).is_disturbed |= !all.at(id).got->is_over;
        world.core->stop(RequestId{id}, "x");
      } else if (choice < 35 && i < 150) {
        for (auto& [id, tracked] : all) tracked.is_disturbed |= !tracked.got->is_over;
        version = PolicyVersion{static_cast<std::int64_t>(rng.next_below(3))};  // versions may come back with other weights
        world.core->update_weights(fake_weights(version.value));
      } else if (choice < 36) {
        world.core->scheduler().reset_prefix_cache();
      } else if (choice < 37) {
        (rng.next_below(2) == 0 ? fails_now : fails_half_way) = true;
      } else if (choice < 38) {
        fails_late = true;
      } else {
        world.core->step();
      }
      world.core->scheduler().check_integrity();
    }
    fails_now = fails_half_way = fails_late = false;
    world.drain();
    num_restored += world.core->stats().num_blocks_restored;
    num_ahead += world.runner->num_ahead;
    EXPECT_EQ(world.core->stats().num_blocks_used, 0);
    EXPECT_EQ(world.core->take_ended().size(), all.size());
    for (const auto& [id, tracked] : all) {
      ASSERT_TRUE(tracked.got->is_over) << "request " << id;
      if (tracked.is_disturbed) continue;
      ++num_undisturbed;
      ASSERT_EQ(tracked.got->output.token_ids, expected_output(tracked.request, tracked.request.seed, tracked.version, kVocab))
          << "request " << id;
      const auto num_prompt_logprobs = tracked.request.sampling.prompt_logprobs ? tracked.request.prompt_ids.size() : 0;
      ASSERT_EQ(tracked.got->output.prompt_logprobs.size(), num_prompt_logprobs);
    }
  }
  EXPECT_GT(num_undisturbed, 50);
  EXPECT_EQ(num_restored > 0, GetParam().options.num_host_blocks > 0);
  if (GetParam().options.scheduler.preempt_period > 0) {
    EXPECT_EQ(num_ahead, 0) << "the next step may preempt";
  } else {
    EXPECT_GT(num_ahead, 20);
  }
}

CoreOptions hostile(std::int64_t num_blocks, std::int64_t block_size, std::int64_t max_num_seqs, std::int64_t budget) {
  CoreOptions options;
  options.num_blocks = num_blocks;
  options.block_size = block_size;
  options.scheduler.max_num_seqs = max_num_seqs;
  options.scheduler.max_num_batched_tokens = budget;
  return options;
}
CoreOptions without_cache(CoreOptions options) {
  options.scheduler.enable_prefix_caching = false;
  return options;
}
CoreOptions without_chunks(CoreOptions options) {
  options.scheduler.enable_chunked_prefill = false;
  options.scheduler.max_num_batched_tokens = options.num_blocks * options.block_size;
  return options;
}
CoreOptions with_host(CoreOptions options, std::int64_t num_host_blocks) {
  options.num_host_blocks = num_host_blocks;
  return options;
}
CoreOptions preempting(CoreOptions options, std::int64_t period) {
  options.scheduler.preempt_period = period;
  return options;
}

INSTANTIATE_TEST_SUITE_P(Hostile, EngineProperty,
                         ::testing::Values(Hostile{"Roomy", hostile(64, 4, 8, 64)}, Hostile{"BlockSizeOne", hostile(24, 1, 6, 16)},
                                           Hostile{"BudgetSeven", hostile(16, 4, 10, 7)}, Hostile{"BudgetOne", hostile(12, 4, 4, 1)},
                                           Hostile{"ThreeBlocks", hostile(3, 4, 8, 32)}, Hostile{"OneBlock", hostile(1, 8, 8, 32)},
                                           Hostile{"CachingOff", without_cache(hostile(16, 4, 8, 32))},
                                           Hostile{"ChunksOff", without_chunks(hostile(16, 4, 8, 0))},
                                           Hostile{"PreemptEveryStep", preempting(hostile(24, 4, 8, 32), 1)},
                                           Hostile{"PreemptCachingOff", preempting(without_cache(hostile(12, 2, 8, 9)), 2)},
                                           Hostile{"OneAtATime", hostile(16, 2, 1, 5)},
                                           Hostile{"HostRoomy", with_host(hostile(16, 4, 8, 32), 256)},
                                           Hostile{"HostSmall", with_host(hostile(16, 2, 6, 16), 5)},
                                           Hostile{"HostOneBlock", with_host(hostile(8, 4, 4, 7), 1)},
                                           Hostile{"HostChunksOff", with_host(without_chunks(hostile(16, 4, 8, 0)), 40)},
                                           Hostile{"HostPreemptEveryStep", preempting(with_host(hostile(12, 2, 8, 32), 64), 1)},
                                           Hostile{"HostOneAtATime", with_host(hostile(16, 2, 1, 5), 30)}),
                         [](const auto& config) { return std::string(config.param.name); });

}  // namespace
}  // namespace prl::engine
