#include "engine/draft_cost.hpp"

#include <gtest/gtest.h>

namespace prl::engine {
namespace {

/// A step of decoding of so many sequences, each with so many drafts.
StepPlan decoding(int num_sequences, std::int64_t num_drafts) {
  StepPlan plan;
  for (int i = 0; i < num_sequences; ++i) {
    PlanRow row;
    row.is_sampled = true;
    row.num_drafts = num_drafts;
    row.num_tokens = 1 + num_drafts;
    row.drawn_row = num_drafts == 0 ? i : -1;  // plain steps are enqueued ahead
    plan.rows.push_back(row);
  }
  return plan;
}

TEST(DraftCost, IsWhatStepsWithDraftsTakeMore) {
  DraftCost cost;
  EXPECT_EQ(cost.least_gain(), 0) << "nothing is known";
  cost.add(decoding(4, 3), 0.004);
  EXPECT_EQ(cost.least_gain(), 0) << "more than what?";
  for (int i = 0; i < 50; ++i) cost.add(decoding(4, 0), 0.001);
  for (int i = 0; i < 20; ++i) cost.add(decoding(4, 3), 0.0022);
  EXPECT_NEAR(cost.least_gain(), 1.2, 0.05);
  // Plain steps of fewer sequences take less time; what drafts take more does not change with it.
  for (int i = 0; i < 60; ++i) cost.add(decoding(1, 0), 0.0005);
  EXPECT_NEAR(cost.least_gain(), 2.4, 0.3);
}

TEST(DraftCost, AStallIsForgotten) {
  DraftCost cost;
  for (int i = 0; i < 10; ++i) cost.add(decoding(2, 0), 0.001);
  cost.add(decoding(2, 4), 5.0);  // kernels were tuned
  EXPECT_LE(cost.least_gain(), 3.01);
  for (int i = 0; i < 3000; ++i) cost.add(decoding(2, 0), 0.001);
  EXPECT_LT(cost.least_gain(), 0.2);
}

TEST(DraftCost, PromptsTellNothing) {
  DraftCost cost;
  StepPlan mixed = decoding(2, 0);
  mixed.rows[1].num_tokens = 500;
  cost.add(mixed, 1.0);
  for (int i = 0; i < 50; ++i) cost.add(decoding(2, 0), 0.001);
  cost.add(mixed, 1.0);
  cost.add(decoding(2, 2), 0.0015);
  EXPECT_NEAR(cost.least_gain(), 0.5, 0.01);
}

}  // namespace
}  // namespace prl::engine
