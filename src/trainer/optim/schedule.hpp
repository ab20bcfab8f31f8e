#pragma once

#include <cstdint>
#include <optional>

#include "config/optim_config.hpp"

namespace prl::trainer {

/// Learning rate of each optimizer step: a pure function, so a resume needs no state but the step.
///
///   constant  lr
///   linear    min_lr (or lr * 1e-8 when 0) up to lr over warmup_steps, flat, then down over the last decay_steps of max_steps so
///             that the last step runs at the lower end
///   cosine    the same warm-up, then half a cosine to min_lr with period max_steps - warmup_steps
class LrSchedule {
 public:
  /// Error{kInvalidArgument} naming the key: cosine without max_steps, or max_steps too short for warm-up and decay.
  LrSchedule(const config::SchedulerConfig& scheduler, double lr, std::optional<std::int64_t> max_steps);
  /// `step` counts from 0: the rate of the (step + 1)-th optimizer step.
  double at(std::int64_t step) const;

 private:
  config::SchedulerConfig scheduler_;
  double lr_;
  std::optional<std::int64_t> max_steps_;
};

}  // namespace prl::trainer
