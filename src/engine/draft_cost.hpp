#pragma once

#include <cstdint>

#include "engine/step_plan.hpp"

namespace prl::engine {

/// What drafts cost on devices that work beside the host, where a step with them is neither enqueued ahead of the one before nor replayed
/// from a recording: learnt from the times of steps. Decides how much drafts must be expected to save, and so no token. One thread, no
/// clock.
class DraftCost {
 public:
  /// Steps of decoding took so long, one right after the other; others tell nothing of it.
  void add(const StepPlan& plan, double seconds);
  /// Tokens that drafts must be expected to save for each sequence of a step, so that the step is worth its time; 0 while nothing is known.
  [[nodiscard]] double least_gain() const noexcept { return plain_s_ > 0 ? extra_s_ / plain_s_ : 0; }

 private:
  double plain_s_ = 0;  ///< of steps without drafts, lately
  double extra_s_ = 0;  ///< that steps with drafts took more, lately; it fades, so that it is measured again
};

}  // namespace prl::engine
