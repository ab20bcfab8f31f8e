#pragma once

#include <array>
#include <chrono>

#include "engine/model_runner.hpp"

namespace prl::engine {

/// The steps that a runner has begun and that are not over: at most two. A step's output stays until the next but one has begun after it.
/// One thread.
class StepsUnderWay {
 public:
  struct Step {
    StepPlan plan;
    StepOutput output;
  };
  std::size_t size() const noexcept { return num_begun_ - num_retired_; }
  /// The plan of the step to begin next, to be filled in.
  StepPlan& next_plan() noexcept { return next().plan; }
  Step& oldest() noexcept { return steps_[num_retired_ % steps_.size()]; }
  /// Has the runner begin the next step. What ModelRunner::begin throws; then it was not begun.
  void begin(ModelRunner& runner) {
    const auto now = std::chrono::steady_clock::now();
    runner.begin(next().plan, next().output);
    for (const PlanRow& row : next().plan.rows) {
      if (row.sequence->first_step == std::chrono::steady_clock::time_point()) row.sequence->first_step = now;
      ++row.sequence->num_steps_under_way;
    }
    ++num_begun_;
  }
  /// The oldest step is over: its plan names its sequences no longer.
  void retire_oldest() noexcept {
    for (const PlanRow& row : oldest().plan.rows) --row.sequence->num_steps_under_way;
    ++num_retired_;
  }

 private:
  Step& next() noexcept { return steps_[num_begun_ % steps_.size()]; }
  std::array<Step, 3> steps_;  ///< those two, and the one before them
  std::size_t num_begun_ = 0, num_retired_ = 0;
};

}  // namespace prl::engine
