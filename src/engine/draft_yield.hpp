#pragma once

#include <cstdint>

#include "engine/step_plan.hpp"

namespace prl::engine {

/// How many drafts of a model are worth their time, learnt from how many came true and how long steps took. Decides no token. One thread,
/// no clock.
class DraftYield {
 public:
  /// `base_rows` as DraftPlanOptions has it. Unless it adapts, `most` are always best.
  DraftYield(std::int64_t most, double base_rows, bool adapts = true) : most_(most), base_rows_(base_rows), adapts_(adapts) {}
  /// Of `num_tested` drafts, each behind others that came true, `num_accepted` did: all, or all but the last.
  void add_outcome(std::int64_t num_tested, std::int64_t num_accepted);
  /// A step took so long, right behind the one before it, with what the draft model did for it.
  void add_time(const StepPlan& plan, double seconds);
  /// Drafts of each of `num_sequences` sequences in a step that has `num_tokens` tokens without them; 0 if none are worth it.
  [[nodiscard]] std::int64_t best(std::int64_t num_tokens, std::int64_t num_sequences) const noexcept;
  /// Of a draft behind drafts that came true, to come true too.
  [[nodiscard]] double chance() const noexcept;

 private:
  std::int64_t most_;
  double base_rows_;
  bool adapts_;
  double num_tested_ = 0, num_accepted_ = 0;  ///< lately
  /// What something takes lately.
  struct Seconds {
    void add(double seconds) noexcept;
    double value = 0;  ///< 0 while it is not known
    int num_added = 0;
  };
  Seconds plain_row_, draft_row_;  ///< of a row, base rows counted too: of steps without drafts, and of those with drafts
  Seconds draft_step_;             ///< of a step of the draft model
  bool has_ahead_ = false;         ///< steps without drafts are enqueued ahead, so that others tell less
};

}  // namespace prl::engine
