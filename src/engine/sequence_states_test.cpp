// Which states of prefixes are kept, found again and copied, in the order in which a runner carries the copies out.
#include "engine/sequence_states.hpp"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "base/rng.hpp"
#include "engine/memory.hpp"
#include "engine/scheduler.hpp"

namespace prl::engine {
namespace {

TEST(StateSnapshots, TheLeastRecentlyUsedOneMakesRoom) {
  StateSnapshots snapshots(8, 2);
  const BlockHash a{1}, b{2}, c{3};
  EXPECT_EQ(snapshots.add(a), 8);
  EXPECT_EQ(snapshots.add(b), 9);
  EXPECT_EQ(snapshots.add(a), std::nullopt) << "there already";
  EXPECT_EQ(snapshots.find(a), 8);
  EXPECT_EQ(snapshots.add(c), 9);
  EXPECT_FALSE(snapshots.has(b));
  snapshots.forget(a);
  EXPECT_EQ(snapshots.find(a), std::nullopt);
  EXPECT_EQ(snapshots.add(b), 8) << "what was forgotten is taken first";
  snapshots.check_integrity();
  snapshots.clear();
  EXPECT_FALSE(snapshots.has(b) || snapshots.has(c));
  EXPECT_FALSE(StateSnapshots(0, 0).is_enabled());
}

/// A scheduler whose plans are carried out on states that say which tokens they are of: what a model with linear attention would compute.
class SequenceStatesTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kBlock = 4;
  static constexpr std::uint64_t kFewDrawn = 2;  ///< tokens that come where there are drafts
  void make(SchedulerOptions options, std::int64_t num_blocks = 256) {
    options.num_state_snapshots = options.num_state_snapshots.value_or(8);
    pool_ = std::make_unique<BlockPool>(num_blocks, kBlock);
    scheduler_ = std::make_unique<Scheduler>(options, *pool_);
    scheduler_->change_weights(PolicyVersion{0});
    const std::int64_t num_slots = num_state_slots(options.max_num_seqs, options.drafts.num_tokens);
    states_.assign(static_cast<std::size_t>(num_slots + *options.num_state_snapshots), {-1});
  }
  Sequence& add(std::vector<std::int32_t> prompt, std::int64_t max_new_tokens = 1000) {
    auto request = std::make_unique<ResolvedRequest>();
    request->prompt_ids = std::move(prompt);
    request->max_new_tokens = max_new_tokens;
    auto sequence = std::make_unique<Sequence>();
    sequence->request_id = RequestId{sequences_.size() + 1};
    sequence->arrival = sequences_.size();
    sequence->request = request.get();
    sequence->tokens = request->prompt_ids;
    sequence->num_prompt_tokens = static_cast<std::int64_t>(request->prompt_ids.size());
    scheduler_->add(*sequence);
    sequences_.push_back(std::move(sequence));
    requests_.push_back(std::move(request));
    return *sequences_.back();
  }
  /// Plans a step and carries it out, like a runner on one stream.
  StepPlan step() {
    StepPlan plan;
    scheduler_->plan(plan);
    for (PlanRow& row : plan.rows)
      for (std::int64_t i = 0; i < row.num_drafts; ++i)
        row.drafts[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(rng_.next_below(kFewDrawn));
    carry_out(plan);
    scheduler_->commit(plan);
    for (const PlanRow& row : plan.rows) {
      if (!row.is_sampled) continue;
      std::vector<std::int32_t>& tokens = row.sequence->tokens;
      std::int64_t num = 0;
      do tokens.push_back(static_cast<std::int32_t>(rng_.next_below(row.num_drafts > 0 ? kFewDrawn : 50)));
      while (++num <= row.num_drafts && row.drafts[static_cast<std::size_t>(num - 1)] == tokens.back());
      num_accepted_ += num - 1;
      num_refused_ += row.num_drafts - num + 1;
      scheduler_->accept(row, num);
    }
    scheduler_->check_integrity();
    return plan;
  }
  void carry_out(const StepPlan& plan) {
    for (const StateCopy& copy : plan.state_copies)
      states_.at(static_cast<std::size_t>(copy.to)) = states_.at(static_cast<std::size_t>(copy.from));
    for (const PlanRow& row : plan.rows) {
      std::vector<std::int32_t>& state = states_.at(static_cast<std::size_t>(row.state_slot));
      if (row.first_token == 0) state.clear();
      const auto first = row.sequence->tokens.begin();
      ASSERT_EQ(state, std::vector<std::int32_t>(first, first + row.first_token)) << "sequence " << row.sequence->request_id.value;
      state.insert(state.end(), first + row.first_token, first + row.known_end());
      state.insert(state.end(), row.drafts.begin(), row.drafts.begin() + row.num_drafts);
    }
  }
  void TearDown() override {
    for (auto& sequence : sequences_) scheduler_->remove(*sequence);
    if (scheduler_) scheduler_->check_integrity();
  }
  static std::vector<std::int32_t> counted(std::int32_t first, std::int64_t count) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
  }

  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<std::unique_ptr<ResolvedRequest>> requests_;
  std::vector<std::vector<std::int32_t>> states_;
  Rng rng_{7};
  std::int64_t num_accepted_ = 0, num_refused_ = 0;  ///< drafts
};

TEST_F(SequenceStatesTest, APromptStopsAtItsLastFullBlockAndIsFoundAgain) {
  make({.max_num_seqs = 4});
  Sequence& first = add(counted(0, 11));
  EXPECT_EQ(step().rows[0].num_tokens, 8) << "up to the last full block";
  const StepPlan rest = step();
  EXPECT_EQ(rest.rows[0].num_tokens, 3);
  EXPECT_EQ(rest.state_copies.size(), 1u) << "the state at token 8";
  scheduler_->remove(first);
  Sequence& again = add(counted(0, 11));
  const StepPlan plan = step();
  EXPECT_EQ(again.num_cached_tokens, 8);
  EXPECT_EQ(plan.rows[0].first_token, 8);
  EXPECT_EQ(plan.state_copies.size(), 1u);
}

TEST_F(SequenceStatesTest, SequencesWithOnePromptComputeItOnce) {
  make({.max_num_seqs = 4});
  for (int i = 0; i < 3; ++i) add(counted(0, 14));
  EXPECT_EQ(step().rows.size(), 1u) << "the others wait for what the first one computes";
  const StepPlan plan = step();
  ASSERT_EQ(plan.rows.size(), 3u);
  for (const PlanRow& row : plan.rows) EXPECT_EQ(row.first_token, 12);
  EXPECT_EQ(scheduler_->stats().num_prefix_hit_tokens, 24);
}

TEST_F(SequenceStatesTest, AConversationGoesOnFromItsLastTurn) {
  make({.max_num_seqs = 2}, 512);
  Sequence& turn = add(counted(0, 10));
  while (turn.num_tokens() < 300) step();
  std::vector<std::int32_t> prompt = turn.tokens;
  scheduler_->remove(turn);
  prompt.insert(prompt.end(), {7, 7, 7});
  Sequence& next = add(prompt);
  step();
  EXPECT_EQ(next.num_cached_tokens, 256) << "the last multiple of SequenceStates::kStep";
}

TEST_F(SequenceStatesTest, LongTextsKeepOneStateEach) {
  make({.max_num_seqs = 2, .num_state_snapshots = 4}, 1024);
  Sequence& prompt = add(counted(500, 9));
  step();
  step();
  scheduler_->remove(prompt);
  Sequence& longest = add(counted(0, 10));
  while (longest.num_tokens() < 1000) step();
  Sequence& again = add(counted(500, 9));
  step();
  EXPECT_EQ(again.num_cached_tokens, 8) << "a short prompt's state is not evicted by those of one long text";
}

TEST_F(SequenceStatesTest, NewWeightsForgetTheStatesOfPrefixes) {
  make({.max_num_seqs = 2});
  Sequence& first = add(counted(0, 11));
  step();
  step();
  scheduler_->change_weights(PolicyVersion{1});
  scheduler_->remove(first);
  Sequence& again = add(counted(0, 11));
  step();
  EXPECT_EQ(again.num_cached_tokens, 0);
}

TEST_F(SequenceStatesTest, AfterAStepThatWasNotBegunAllStartOver) {
  make({.max_num_seqs = 2});
  Sequence& first = add(counted(0, 11));
  step();
  step();
  StepPlan lost;
  scheduler_->plan(lost);
  ASSERT_EQ(lost.rows[0].first_token, 11);
  for (std::vector<std::int32_t>& state : states_) state = {-1};  // some layers may have gone on, others not
  scheduler_->give_up_copies();
  const StepPlan plan = step();
  EXPECT_EQ(plan.rows[0].sequence, &first);
  EXPECT_EQ(plan.rows[0].first_token, 0);
  EXPECT_EQ(first.num_preemptions, 1);
}

TEST_F(SequenceStatesTest, RandomTrafficNeverComputesFromAnotherState) {
  for (const auto& [num_snapshots, num_drafts] : {std::pair{0, 0}, {1, 0}, {3, 0}, {16, 0}, {16, 5}, {3, 15}, {0, 2}}) {
    SCOPED_TRACE(fmt::format("{} snapshots, {} drafts", num_snapshots, num_drafts));
    SchedulerOptions options{.max_num_seqs = 5, .max_num_batched_tokens = 24, .num_state_snapshots = num_snapshots, .preempt_period = 9};
    options.drafts.num_tokens = num_drafts;
    options.drafts.has_model = num_drafts > 0;
    options.drafts.most_tokens = 1000;
    options.drafts.adapts = false;
    num_accepted_ = num_refused_ = 0;
    make(options, 80);  // so few blocks that sequences are preempted and prefixes evicted
    std::vector<std::vector<std::int32_t>> texts;
    std::map<Sequence*, std::int64_t> lengths;
    for (int i = 0; i < 600; ++i) {
      if (rng_.next_below(3) == 0 && lengths.size() < 9) {
        std::vector<std::int32_t> prompt =
            counted(static_cast<std::int32_t>(rng_.next_below(3)) * 100, 3 + static_cast<std::int64_t>(rng_.next_below(30)));
        if (!texts.empty() && rng_.next_below(2) == 0) prompt = texts[rng_.next_below(texts.size())];
        if (prompt.size() > 160) continue;
        Sequence& added = add(prompt);
        lengths[&added] = added.num_tokens() + 1 + static_cast<std::int64_t>(rng_.next_below(90));
      }
      step();
      if (HasFatalFailure()) return;
      for (auto it = lengths.begin(); it != lengths.end();) {
        if (it->first->num_tokens() < it->second) {
          ++it;
          continue;
        }
        texts.push_back(it->first->tokens);
        scheduler_->remove(*it->first);
        it = lengths.erase(it);
      }
    }
    EXPECT_EQ(scheduler_->stats().num_prefix_hit_tokens > 0, num_snapshots > 0);
    EXPECT_EQ(num_accepted_ > 50 && num_refused_ > 100, num_drafts > 0) << num_accepted_ << " of " << num_accepted_ + num_refused_;
    for (auto& sequence : sequences_) scheduler_->remove(*sequence);
  }
}

TEST_F(SequenceStatesTest, StepsPlannedAheadKeepStatesToo) {
  make({.max_num_seqs = 1}, 512);
  Sequence& sequence = add(counted(0, 5));
  StepPlan plan, ahead;
  scheduler_->plan(plan);
  carry_out(plan);
  // As on a GPU: the next step is begun before the tokens of the one before are known here.
  for (int i = 0; i < 200; ++i) {
    scheduler_->plan_ahead(plan, ahead);
    scheduler_->commit(plan);
    const std::int64_t planned = ahead.rows.empty() ? 0 : ahead.rows[0].first_token;
    if (plan.rows[0].is_sampled) sequence.tokens.push_back(i % 40);
    if (planned == 0) scheduler_->plan(ahead);
    carry_out(ahead);
    if (HasFatalFailure()) return;
    std::swap(plan, ahead);
  }
  scheduler_->commit(plan);
  sequence.tokens.push_back(0);
  std::vector<std::int32_t> prompt = sequence.tokens;
  scheduler_->remove(sequence);
  prompt.push_back(3);
  Sequence& next = add(prompt);
  step();
  EXPECT_EQ(next.num_cached_tokens, 192);
}

}  // namespace
}  // namespace prl::engine
