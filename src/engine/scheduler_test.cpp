#include "engine/scheduler.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <set>

namespace prl::engine {
namespace {

/// A scheduler whose plans are carried out by appending made-up tokens.
class SchedulerTest : public ::testing::Test {
 protected:
  void make(std::int64_t num_blocks, std::int64_t block_size, SchedulerOptions options, std::int64_t num_host_blocks = 0) {
    scheduler_.reset();
    pool_.reset();
    host_ = num_host_blocks > 0 ? std::make_unique<HostBlocks>(num_host_blocks, block_size) : nullptr;
    pool_ = std::make_unique<BlockPool>(num_blocks, block_size, host_.get());
    scheduler_ = std::make_unique<Scheduler>(options, *pool_, host_.get());
    scheduler_->change_weights(PolicyVersion{0});
  }
  Sequence& add(std::int64_t num_prompt_tokens, std::int32_t priority = 0, std::int32_t first_token = 0) {
    auto request = std::make_unique<ResolvedRequest>();
    request->prompt_ids.resize(static_cast<std::size_t>(num_prompt_tokens));
    std::iota(request->prompt_ids.begin(), request->prompt_ids.end(), first_token);
    request->priority = priority;
    request->max_new_tokens = 1000;
    auto sequence = std::make_unique<Sequence>();
    sequence->request_id = RequestId{sequences_.size() + 1};
    sequence->arrival = sequences_.size();
    sequence->request = request.get();
    sequence->tokens = request->prompt_ids;
    sequence->num_prompt_tokens = num_prompt_tokens;
    scheduler_->add(*sequence);
    sequences_.push_back(std::move(sequence));
    requests_.push_back(std::move(request));
    return *sequences_.back();
  }
  StepPlan planned() {
    StepPlan plan;
    scheduler_->plan(plan);
    return plan;
  }
  StepPlan planned_ahead(const StepPlan& begun) {
    StepPlan plan;
    scheduler_->plan_ahead(begun, plan);
    return plan;
  }
  const StepPlan& step() {
    scheduler_->plan(plan_);
    if (host_ != nullptr) host_->carried_out();
    scheduler_->commit(plan_);
    for (const PlanRow& row : plan_.rows) {
      if (row.is_sampled) row.sequence->tokens.push_back(next_token_++);
    }
    scheduler_->check_integrity();
    return plan_;
  }
  static std::vector<std::int64_t> sizes(const StepPlan& plan) {
    std::vector<std::int64_t> out;
    for (const PlanRow& row : plan.rows) out.push_back(row.num_tokens);
    return out;
  }
  void TearDown() override {
    for (auto& sequence : sequences_) scheduler_->remove(*sequence);
    if (scheduler_) scheduler_->check_integrity();
    if (pool_) {
      EXPECT_EQ(pool_->num_free(), pool_->num_blocks());
    }
  }

  std::unique_ptr<HostBlocks> host_;
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<std::unique_ptr<ResolvedRequest>> requests_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  StepPlan plan_;  ///< the last one of step()
  std::int32_t next_token_ = 100000;
};

using Sizes = std::vector<std::int64_t>;

TEST_F(SchedulerTest, PrefillThenDecode) {
  make(16, 4, {});
  Sequence& sequence = add(10);
  EXPECT_EQ(sizes(step()), Sizes{10});
  EXPECT_EQ(sequence.num_tokens(), 11);
  EXPECT_EQ(sizes(step()), Sizes{1});
  EXPECT_EQ(sequence.num_tokens_computed, 11);
  EXPECT_EQ(sequence.blocks.size(), 3u);
}

TEST_F(SchedulerTest, ALongPromptIsCutByTheBudgetAndDecodesGoFirst) {
  SchedulerOptions options;
  options.max_num_batched_tokens = 8;
  make(64, 4, options);
  add(4);
  EXPECT_EQ(sizes(step()), Sizes{4});
  add(20, 0, 1000);
  EXPECT_EQ(sizes(step()), (Sizes{1, 7}));
  EXPECT_EQ(sizes(step()), (Sizes{1, 7}));
  const StepPlan& plan = step();
  EXPECT_EQ(sizes(plan), (Sizes{1, 6}));
  EXPECT_TRUE(plan.rows[1].is_sampled);
}

TEST_F(SchedulerTest, WithoutChunkedPrefillAPromptWaitsForAWholeStep) {
  SchedulerOptions options;
  options.max_num_batched_tokens = 8;
  options.enable_chunked_prefill = false;
  make(64, 4, options);
  add(4);
  add(6, 0, 1000);
  EXPECT_EQ(sizes(step()), Sizes{4});
  EXPECT_EQ(sizes(step()), (Sizes{1, 6}));
}

TEST_F(SchedulerTest, LowerPriorityValueThenArrivalOrder) {
  SchedulerOptions options;
  options.max_num_seqs = 1;
  make(16, 4, options);
  Sequence& late = add(4, 5);
  Sequence& first = add(4, -1, 100);
  Sequence& second = add(4, -1, 200);
  EXPECT_EQ(step().rows[0].sequence, &first);
  scheduler_->remove(first);
  EXPECT_EQ(step().rows[0].sequence, &second);
  scheduler_->remove(second);
  EXPECT_EQ(step().rows[0].sequence, &late);
}

TEST_F(SchedulerTest, APrefixHitSkipsFullBlocksButNeverTheWholePrompt) {
  make(16, 4, {});
  Sequence& first = add(8);
  step();
  scheduler_->remove(first);
  Sequence& again = add(8);  // both its blocks are cached; the last token must still be computed
  const StepPlan& plan = step();
  EXPECT_EQ(sizes(plan), Sizes{4});
  EXPECT_EQ(again.num_cached_tokens, 4);
  Sequence& longer = add(11);
  EXPECT_EQ(step().rows.back().num_tokens, 3);
  EXPECT_EQ(longer.num_cached_tokens, 8);
  EXPECT_EQ(scheduler_->stats().num_prefix_hit_tokens, 12);
}

TEST_F(SchedulerTest, APrefixGoesOnInHostMemory) {
  make(4, 4, {}, 16);
  Sequence& first = add(14);
  step();
  scheduler_->remove(first);
  Sequence& other = add(10, 0, 500);
  EXPECT_EQ(step().copies.saves.size(), 2u) << "one block was never full";
  const std::vector<BlockCopy> saves = plan_.copies.saves;
  scheduler_->remove(other);
  Sequence& again = add(14);
  const StepPlan& plan = step();
  EXPECT_EQ(sizes(plan), Sizes{2});
  EXPECT_EQ(again.num_cached_tokens, 12);
  // The first block had stayed on the device. A sequence's tail was evicted first.
  ASSERT_EQ(plan.copies.restores.size(), 2u);
  EXPECT_EQ(plan.copies.restores[0], (BlockCopy{again.blocks[1].id(), saves[1].host}));
  EXPECT_EQ(plan.copies.restores[1], (BlockCopy{again.blocks[2].id(), saves[0].host}));
  EXPECT_EQ(scheduler_->stats().num_prefix_hit_tokens, 12);
  EXPECT_EQ(scheduler_->stats().num_host_hit_tokens, 8);
  EXPECT_TRUE(step().copies.empty());
}

TEST_F(SchedulerTest, RowsOfOneStepShareWhatItRestores) {
  make(5, 4, {}, 16);
  Sequence& first = add(9);
  step();
  scheduler_->remove(first);
  Sequence& other = add(20, 0, 500);
  step();
  scheduler_->remove(other);
  Sequence& one = add(9);
  Sequence& two = add(10);
  EXPECT_EQ(sizes(step()), (Sizes{1, 2}));
  EXPECT_EQ(plan_.copies.restores.size(), 2u) << "once for both";
  EXPECT_EQ(one.blocks[1].id(), two.blocks[1].id());
}

TEST_F(SchedulerTest, NothingIsCopiedForWhoIsNotAdmitted) {
  make(5, 4, {}, 16);
  Sequence& first = add(9);
  step();
  scheduler_->remove(first);
  add(17, 0, 500);
  step();
  Sequence& waits = add(9);
  const std::int64_t num_cached = host_->num_cached();
  EXPECT_GT(num_cached, 0);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(step().copies.empty());
  EXPECT_EQ(waits.state, SequenceState::kWaiting);
  EXPECT_EQ(host_->num_cached(), num_cached);
}

TEST_F(SchedulerTest, CopiesOfAStepThatWasNotBegunAreForgotten) {
  bool may_draw = false;
  SchedulerOptions options;
  options.may_draw = [&](Sequence& sequence) { return may_draw || sequence.num_tokens() > 10; };
  make(4, 4, options, 16);
  may_draw = true;
  Sequence& first = add(9);
  step();
  scheduler_->remove(first);
  Sequence& other = add(14, 0, 500);
  step();
  scheduler_->remove(other);
  may_draw = false;
  Sequence& held = add(9);  // all but its last token is in host memory, and that one may not be computed yet
  EXPECT_TRUE(planned().rows.empty());
  EXPECT_TRUE(host_->has_restores());
  EXPECT_EQ(held.state, SequenceState::kRunning);
  scheduler_->check_integrity();
  const StepPlan later = planned();
  EXPECT_EQ(later.copies.restores.size(), 2u) << "still to be made";
  scheduler_->give_up_copies();
  EXPECT_EQ(held.state, SequenceState::kWaiting);
  EXPECT_FALSE(host_->has_restores());
  EXPECT_EQ(pool_->num_cached(), 0) << "its blocks had been published";
  scheduler_->check_integrity();
  may_draw = true;
  EXPECT_EQ(sizes(step()), Sizes{9});
}

TEST_F(SchedulerTest, AStepAheadSavesWhatItTakes) {
  make(3, 4, {}, 16);
  Sequence& old = add(4);
  step();
  scheduler_->remove(old);
  Sequence& sequence = add(8, 0, 500);
  const StepPlan begun = planned();
  EXPECT_TRUE(begun.copies.empty());
  host_->carried_out();
  const StepPlan ahead = planned_ahead(begun);
  ASSERT_EQ(ahead.rows.size(), 1u);
  EXPECT_EQ(ahead.copies.saves.size(), 1u);
  host_->carried_out();
  for (const StepPlan* plan : {&begun, &ahead}) {
    scheduler_->commit(*plan);
    sequence.tokens.push_back(next_token_++);
  }
  scheduler_->check_integrity();
}

TEST_F(SchedulerTest, NewWeightsForgetHostMemory) {
  make(4, 4, {}, 16);
  Sequence& first = add(14);
  step();
  scheduler_->remove(first);
  Sequence& other = add(14, 0, 500);
  step();
  scheduler_->remove(other);
  EXPECT_GT(host_->num_cached(), 0);
  scheduler_->change_weights(PolicyVersion{0});  // other ones of the same name
  EXPECT_EQ(host_->num_cached(), 0);
  Sequence& again = add(14);
  EXPECT_EQ(sizes(step()), Sizes{14});
  EXPECT_EQ(again.num_cached_tokens, 0);
}

TEST_F(SchedulerTest, TwoEqualPromptsOfOneStepShareBlocks) {
  make(16, 4, {});
  Sequence& first = add(10);
  Sequence& second = add(10);
  EXPECT_EQ(sizes(step()), (Sizes{10, 2}));
  EXPECT_EQ(first.blocks[0].id(), second.blocks[0].id());
  EXPECT_EQ(first.blocks[1].id(), second.blocks[1].id());
  EXPECT_NE(first.blocks[2].id(), second.blocks[2].id());
}

TEST_F(SchedulerTest, ThePromptIsComputedWholeWhenItsLogProbabilitiesAreWanted) {
  SchedulerOptions options;
  options.max_num_batched_tokens = 6;
  make(16, 4, options);
  scheduler_->remove(add(10));
  Sequence& warm = add(10);
  step();
  step();
  scheduler_->remove(warm);
  Sequence& scored = add(10);
  requests_.back()->sampling.prompt_logprobs = 1;
  const StepPlan first = planned();
  ASSERT_EQ(first.rows.size(), 1u);
  EXPECT_EQ(first.rows[0].num_tokens, 6);
  EXPECT_EQ(first.rows[0].prompt_logprob_begin, 0);
  EXPECT_EQ(first.rows[0].num_prompt_logprobs, 6);
  scheduler_->commit(first);
  scored.prompt_logprobs.assign(7, 0.0f);
  const StepPlan second = planned();
  EXPECT_EQ(second.rows[0].prompt_logprob_begin, 6);
  EXPECT_EQ(second.rows[0].num_prompt_logprobs, 3);
}

TEST_F(SchedulerTest, TheYoungestIsPreemptedAndComesBackFirst) {
  SchedulerOptions options;
  options.enable_prefix_caching = false;
  make(4, 2, options);
  Sequence& old = add(4);
  Sequence& young = add(4, 0, 100);
  EXPECT_EQ(sizes(step()), (Sizes{4, 4}));  // all four blocks taken
  add(2, 0, 200);
  const StepPlan& plan = step();  // the old one needs a third block
  EXPECT_EQ(sizes(plan), Sizes{1});
  EXPECT_EQ(plan.rows[0].sequence, &old);
  EXPECT_EQ(plan.num_preempted, 1);
  EXPECT_EQ(young.state, SequenceState::kWaiting);
  EXPECT_EQ(young.num_tokens(), 5);  // keeps what it drew
  scheduler_->remove(old);
  const StepPlan& next = step();
  ASSERT_GE(next.rows.size(), 1u);
  EXPECT_EQ(next.rows[0].sequence, &young);
  EXPECT_EQ(next.rows[0].num_tokens, 5);
}

TEST_F(SchedulerTest, AnAdmissionDoesNotTakeBlocksAHalfComputedPromptNeeds) {
  SchedulerOptions options;
  options.max_num_batched_tokens = 4;
  make(5, 2, options);
  add(8);
  add(4, 0, 100);
  EXPECT_EQ(sizes(step()), Sizes{4});
  EXPECT_EQ(sizes(step()), Sizes{4});  // the second needs 2 blocks, 3 are free, 2 of those are spoken for
  EXPECT_EQ(scheduler_->stats().num_preemptions, 0);
}

TEST_F(SchedulerTest, NewWeightsHideOldBlocks) {
  make(16, 4, {});
  Sequence& old = add(9);
  step();
  scheduler_->change_weights(PolicyVersion{1});
  Sequence& fresh = add(9);
  EXPECT_EQ(sizes(step()), (Sizes{1, 9}));
  EXPECT_EQ(fresh.num_cached_tokens, 0);
  // Blocks that the old sequence fills from now on rest on old keys, so nobody else may see them.
  for (int steps = 0; old.num_tokens() < 17; ++steps) {
    ASSERT_LT(steps, 17) << "the old sequence does not grow";
    step();
  }
  Sequence& copy = add(16);
  copy.tokens.assign(old.tokens.begin(), old.tokens.begin() + 16);
  step();
  EXPECT_EQ(copy.num_cached_tokens, 8) << "the fresh sequence's two blocks and no more";
}

TEST_F(SchedulerTest, TheSaltSeparatesPrefixes) {
  make(16, 4, {});
  add(9);
  requests_.back()->cache_salt = "a";
  step();
  Sequence& other = add(9);
  requests_.back()->cache_salt = "b";
  Sequence& same = add(9);
  requests_.back()->cache_salt = "a";
  step();
  EXPECT_EQ(other.num_cached_tokens, 0);
  EXPECT_EQ(same.num_cached_tokens, 8);
}

TEST_F(SchedulerTest, AdaptersAndTheirVersionsSeparatePrefixes) {
  make(32, 4, {});
  const auto cached_with = [&](AdapterKey adapter) {
    Sequence& sequence = add(9);
    requests_.back()->adapter = adapter;
    step();
    return sequence.num_cached_tokens;
  };
  EXPECT_EQ(cached_with({}), 0);
  EXPECT_EQ(cached_with({1, PolicyVersion{5}}), 0);
  EXPECT_EQ(cached_with({2, PolicyVersion{5}}), 0);
  EXPECT_EQ(cached_with({1, PolicyVersion{6}}), 0);
  EXPECT_EQ(cached_with({1, PolicyVersion{5}}), 8);
  EXPECT_EQ(cached_with({}), 8);
}

TEST_F(SchedulerTest, AFewAdaptersAtATimeAndNobodyWaitsForEver) {
  SchedulerOptions options;
  options.max_adapters = 2;
  make(4096, 4, options);
  std::vector<std::shared_ptr<ServedAdapter>> adapters;
  for (std::uint64_t i = 1; i <= 3; ++i) {
    adapters.push_back(std::make_shared<ServedAdapter>());
    adapters.back()->id = i;
  }
  const auto add_with = [&](std::size_t adapter) -> Sequence& {
    Sequence& sequence = add(4, 0, static_cast<std::int32_t>(requests_.size()));
    requests_.back()->served = adapters[adapter];
    return sequence;
  };
  Sequence* first[] = {&add_with(0), &add_with(1), &add_with(0), &add_with(1)};
  Sequence& third = add_with(2);
  Sequence& plain = add(4, 0, 77);
  step();
  EXPECT_EQ(third.state, SequenceState::kWaiting);
  EXPECT_EQ(plain.state, SequenceState::kRunning);  // passes the one without a place
  // The others' adapters are always wanted by somebody; admissions stop until the third has had its turn.
  int num_steps = 0;
  for (; third.state == SequenceState::kWaiting && num_steps < 2000; ++num_steps) {
    const auto i = static_cast<std::size_t>(num_steps % 4);
    if (first[i]->state == SequenceState::kRunning) {
      scheduler_->remove(*first[i]);
      first[i] = &add_with(i % 2);
    }
    step();
    std::set<const ServedAdapter*> together;
    for (const Sequence* sequence : scheduler_->running())
      if (sequence->request->served) together.insert(sequence->request->served.get());
    ASSERT_LE(together.size(), 2u);
  }
  EXPECT_EQ(third.state, SequenceState::kRunning);
  EXPECT_GT(num_steps, 100);
}

TEST_F(SchedulerTest, SteadyDecodingReusesThePlansMemory) {
  make(64, 4, {});
  add(4);
  add(4, 0, 100);
  step();
  const PlanRow* const rows = step().rows.data();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(step().rows.data(), rows);
}

TEST_F(SchedulerTest, AStepAheadGoesOnWithThoseThatDoNotEnd) {
  make(64, 4, {});
  Sequence& first = add(4);
  Sequence& second = add(7, 0, 100);
  Sequence& third = add(4, 0, 200);
  requests_[0]->max_new_tokens = 1;
  const StepPlan begun = planned();
  const StepPlan ahead = planned_ahead(begun);
  ASSERT_EQ(ahead.rows.size(), 2u);
  EXPECT_EQ(ahead.num_tokens, 2);
  EXPECT_EQ(ahead.rows[0].sequence, &second);
  EXPECT_EQ(ahead.rows[0].first_token, 7);
  EXPECT_EQ(ahead.rows[0].drawn_row, 1);
  EXPECT_EQ(ahead.rows[1].drawn_row, 2);
  EXPECT_EQ(second.blocks.size(), 2u);
  EXPECT_EQ(third.blocks.size(), 2u) << "room for the token that is not known yet";
  // `begun` is over, and shows that the third ends.
  scheduler_->commit(begun);
  for (Sequence* sequence : {&first, &second, &third}) sequence->tokens.push_back(next_token_++);
  scheduler_->remove(first);
  scheduler_->remove(third);
  EXPECT_EQ(ahead.rows[1].sequence->state, SequenceState::kFinished);
  scheduler_->check_integrity();
  // The step behind `ahead` goes on with who is left.
  const StepPlan next = planned_ahead(ahead);
  ASSERT_EQ(next.rows.size(), 1u);
  EXPECT_EQ(next.rows[0].first_token, 8);
  EXPECT_EQ(next.rows[0].drawn_row, 0);
  EXPECT_EQ(second.num_hashed_blocks, 1);
  scheduler_->commit(ahead);
  EXPECT_EQ(second.num_tokens_computed, 8);
  EXPECT_EQ(second.num_hashed_blocks, 2) << "a block is published when its tokens are known";
  second.tokens.push_back(next_token_++);
  scheduler_->check_integrity();
}

TEST_F(SchedulerTest, NoStepAheadWhereTheNextOneMayBeAnother) {
  const auto num_ahead = [&] { return planned_ahead(planned()).rows.size(); };
  make(64, 4, {.max_num_seqs = 2, .max_num_batched_tokens = 8});
  add(4);
  EXPECT_EQ(num_ahead(), 1u);
  add(12, 0, 100);
  EXPECT_EQ(num_ahead(), 0u) << "a prompt is cut by the budget";
  TearDown();

  make(64, 4, {.max_num_seqs = 2});
  add(4, 0, 200);
  const StepPlan alone = planned();
  add(4, 0, 300);
  EXPECT_TRUE(planned_ahead(alone).rows.empty()) << "one waits who can come in";
  add(4, 0, 400);
  EXPECT_EQ(num_ahead(), 2u) << "all places are taken, whoever waits";
  TearDown();

  make(3, 4, {});
  add(4, 0, 500);
  add(4, 0, 600);
  EXPECT_EQ(num_ahead(), 0u) << "there is a block for one of two";
  TearDown();

  make(64, 4, {.preempt_period = 5});
  add(4, 0, 700);
  EXPECT_EQ(num_ahead(), 0u);
}

}  // namespace
}  // namespace prl::engine
