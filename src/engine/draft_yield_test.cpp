#include "engine/draft_yield.hpp"

#include <gtest/gtest.h>

namespace prl::engine {
namespace {

/// A step of decoding; steps of the draft model take `draft_step_s`.
StepPlan yielding(int num_sequences, std::int64_t num_drafts, double draft_step_s = 0) {
  StepPlan plan;
  for (int i = 0; i < num_sequences; ++i) {
    PlanRow row;
    row.is_sampled = true;
    row.num_drafts = num_drafts;
    row.num_tokens = 1 + num_drafts;
    row.drawn_row = num_drafts == 0 ? i : -1;
    plan.rows.push_back(row);
  }
  const auto count = static_cast<double>(num_drafts);
  plan.drafting = {.num_steps = num_drafts, .step_s = draft_step_s, .total_s = 1.5 * count * draft_step_s};
  return plan;
}

/// A device on which a step takes 1 ms and 5 us a row, and a step of the draft model 0.1 ms.
void watch(DraftYield& yield, int num_sequences, std::int64_t num_drafts, int num_steps, double draft_step_s = 1e-4) {
  for (int i = 0; i < num_steps; ++i) {
    const double step_s = 1e-3 + 5e-6 * num_sequences * static_cast<double>(1 + num_drafts);
    yield.add_time(yielding(num_sequences, num_drafts, draft_step_s), step_s + 1.5 * draft_step_s * static_cast<double>(num_drafts));
  }
}

TEST(DraftYield, AllAreTriedWhileNothingIsKnown) {
  DraftYield yield(6, 200);
  EXPECT_EQ(yield.best(1, 1), 6);
  EXPECT_NEAR(yield.chance(), 0.7, 1e-6);
  watch(yield, 1, 0, 10);
  EXPECT_EQ(yield.best(1, 1), 6) << "what drafts cost is not known";
}

TEST(DraftYield, ThereAreAsManyAsMakeTokensComeFastest) {
  DraftYield yield(15, 200);
  watch(yield, 1, 0, 10);
  watch(yield, 1, 6, 10);
  for (int i = 0; i < 2000; ++i) yield.add_outcome(6, 6);
  EXPECT_GT(yield.chance(), 0.97);
  EXPECT_EQ(yield.best(1, 1), 15);
  for (int i = 0; i < 2000; ++i) yield.add_outcome(i % 2 == 0 ? 2 : 1, i % 2 == 0 ? 1 : 0);
  EXPECT_NEAR(yield.chance(), 1.0 / 3, 0.06);
  // By hand: (1 + 1/3) / 1.105 is less than (1 + 1/3 + 1/9) / 1.21 by 1%, and more than what a third one gives.
  EXPECT_GE(yield.best(1, 1), 1);
  EXPECT_LE(yield.best(1, 1), 2);
  for (int i = 0; i < 2000; ++i) yield.add_outcome(1, 0);
  EXPECT_EQ(yield.best(1, 1), 0);
}

TEST(DraftYield, AModelThatIsNeverRightIsFoundOutSoon) {
  DraftYield yield(4, 200);
  watch(yield, 1, 0, 10);
  watch(yield, 1, 4, 4);
  int num_rows = 0;
  for (; num_rows < 1000 && yield.best(1, 1) > 0; ++num_rows) yield.add_outcome(1, 0);
  EXPECT_GT(num_rows, 5);
  EXPECT_LT(num_rows, 100);
}

TEST(DraftYield, LargeBatchesHaveFewer) {
  DraftYield yield(8, 200);
  watch(yield, 4, 0, 20);
  watch(yield, 4, 5, 20);
  const std::int64_t few = yield.best(1, 1), many = yield.best(400, 400);
  EXPECT_GT(few, many);
  EXPECT_LE(many, 1);
}

TEST(DraftYield, ASlowModelDrawsNone) {
  DraftYield yield(8, 200);
  watch(yield, 1, 0, 10);
  watch(yield, 1, 4, 10, 2e-3);
  EXPECT_EQ(yield.best(1, 1), 0);
  // It is tried again much later, as its texts may have become others.
  for (int i = 0; i < 2000; ++i) yield.add_outcome(1, 0);
  EXPECT_LT(yield.chance(), 0.05);
  watch(yield, 1, 0, 10000);
  EXPECT_GT(yield.chance(), 0.5);
}

TEST(DraftYield, TheFirstStepsAndStallsSayLittle) {
  DraftYield yield(8, 200);
  watch(yield, 1, 0, 10);
  for (int i = 0; i < 3; ++i) yield.add_time(yielding(1, 4, 1e-4), 2.0);  // kernels are tuned and steps recorded
  watch(yield, 1, 4, 10);
  const std::int64_t before = yield.best(1, 1);
  EXPECT_GE(before, 2);
  yield.add_time(yielding(1, 4, 1e-4), 5.0);
  EXPECT_GE(yield.best(1, 1), 2);
  // Rows that read prompts tell nothing of decoding.
  StepPlan prompt = yielding(1, 4, 1e-4);
  prompt.rows[0].num_tokens = 1000;
  for (int i = 0; i < 100; ++i) yield.add_time(prompt, 9.0);
  EXPECT_GE(yield.best(1, 1), 2);
}

}  // namespace
}  // namespace prl::engine
