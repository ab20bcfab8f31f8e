#pragma once

#include <cstdint>

#include "engine/draft_cost.hpp"
#include "engine/draft_source.hpp"
#include "engine/kv/block_pool.hpp"
#include "engine/step_plan.hpp"

namespace prl::engine {

struct DraftPlanOptions : DraftOptions {
  /// Tokens that drafts must be expected to save, for each sequence of a step: below it the step has none. More than 0 where a step without
  /// drafts is enqueued before the one ahead of it is over; those with drafts, which are not, must make up for that too (DraftCost).
  double least_gain = 0;
  /// What a step costs whatever its rows are, in rows. A draft must come true with the chance at which its row costs what it saves.
  double base_rows = 16;
};

/// Decides which rows of a step have drafts, for Scheduler. One thread.
class DraftPlanner {
 public:
  DraftPlanner(const DraftPlanOptions& options, std::int64_t max_num_seqs, BlockPool& pool);

  /// Adds drafts to rows that draw: within `budget`, and taking no block that one of the `num_running` sequences may need next.
  void plan(StepPlan& plan, std::int64_t budget, std::int64_t num_running);
  /// Of the sequences that a step goes on with, whether some had better have drafts in the next one.
  [[nodiscard]] bool wants_to_plan(const StepPlan& begun) const;
  /// The sequence's last `num_tokens` tokens are new.
  void append(Sequence& sequence, std::int64_t num_tokens);
  void close(Sequence& sequence) { source_.close(sequence.draft); }
  /// A step took so long, right behind the one before it.
  void add_time(const StepPlan& plan, double seconds) { cost_.add(plan, seconds); }

 private:
  /// Whether a step of so many sequences whose drafts save so many tokens is better than one without them.
  [[nodiscard]] bool is_worth_it(double gain, std::size_t num_sequences) const noexcept;
  /// That a draft must have in a step of so many tokens without it.
  [[nodiscard]] double least_chance(std::int64_t num_tokens) const noexcept;

  DraftPlanOptions options_;
  std::int64_t most_rows_;  ///< that a step draws
  BlockPool& pool_;
  DraftSource source_;
  DraftCost cost_;
};

}  // namespace prl::engine
