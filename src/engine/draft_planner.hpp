#pragma once

#include <cstdint>

#include "engine/draft_cost.hpp"
#include "engine/draft_source.hpp"
#include "engine/draft_yield.hpp"
#include "engine/kv/block_pool.hpp"
#include "engine/sequence_states.hpp"
#include "engine/step_plan.hpp"

namespace prl::engine {

struct DraftPlanOptions : DraftOptions {
  /// Tokens that drafts must be expected to save, for each sequence of a step: below it the step has none. More than 0 where a step without
  /// drafts is enqueued before the one ahead of it is over; those with drafts, which are not, must make up for that too (DraftCost).
  double least_gain = 0;
  /// What a step costs whatever its rows are, in rows. A draft must come true with the chance at which its row costs what it saves.
  double base_rows = 16;
  /// A model draws the drafts (DraftModel), of texts that are no longer than most_tokens with them; else they are looked up.
  bool has_model = false;
  std::int64_t most_tokens = 0;
};

/// Decides which rows of a step have drafts, for Scheduler. One thread.
class DraftPlanner {
 public:
  /// `states`: of a model whose sequences have states; nullptr: of another.
  DraftPlanner(const DraftPlanOptions& options, std::int64_t max_num_seqs, BlockPool& pool, const SequenceStates* states = nullptr);

  /// Adds drafts to rows that draw, or, where a model draws them, room for them: within `budget`, and taking no block that one of the
  /// `num_running` sequences may need next.
  void plan(StepPlan& plan, std::int64_t budget, std::int64_t num_running);
  /// Of the sequences that a step goes on with, whether some had better have drafts in the next one.
  [[nodiscard]] bool wants_to_plan(const StepPlan& begun) const;
  /// The sequence's last `num_tokens` tokens are new: the first ones that the row drew.
  void append(const PlanRow& row, std::int64_t num_tokens);
  void close(Sequence& sequence) { source_.close(sequence.draft); }
  /// A step took so long, right behind the one before it.
  void add_time(const StepPlan& plan, double seconds);

 private:
  void plan_lookups(StepPlan& plan, std::int64_t budget, std::int64_t num_running);
  void plan_room(StepPlan& plan, std::int64_t budget, std::int64_t num_running);
  /// Room for so many drafts of a model that the sequence may have yet. `num_unknown`: so many of its tokens are being drawn.
  [[nodiscard]] std::int64_t room_of(const Sequence& sequence, std::int64_t num_unknown) const noexcept;
  /// `count` drafts of a row, or as many as its sequence's state allows.
  [[nodiscard]] std::int64_t within_state(const PlanRow& row, std::int64_t count) const noexcept;
  /// Gives the row so many drafts, unless that takes a block which one of the `num_running` sequences may need next.
  [[nodiscard]] bool try_add(StepPlan& plan, PlanRow& row, std::int64_t count, std::int64_t num_running);
  /// Whether a step of so many sequences whose drafts save so many tokens is better than one without them.
  [[nodiscard]] bool is_worth_it(double gain, std::size_t num_sequences) const noexcept;
  /// That a draft must have in a step of so many tokens without it.
  [[nodiscard]] double least_chance(std::int64_t num_tokens) const noexcept;

  DraftPlanOptions options_;
  std::int64_t most_rows_;  ///< that a step draws
  BlockPool& pool_;
  const SequenceStates* states_;
  DraftSource source_;
  DraftCost cost_;
  DraftYield yield_;
};

}  // namespace prl::engine
