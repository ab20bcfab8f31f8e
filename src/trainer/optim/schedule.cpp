#include "trainer/optim/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.hpp"

namespace prl::trainer {

namespace {

using config::ConstantScheduler;
using config::CosineScheduler;
using config::LinearScheduler;

/// A warm-up cannot start at zero: the first step would do nothing.
constexpr double kSmallestFactor = 1e-8;

double lowest_factor(double min_lr, double lr) { return min_lr > 0 && lr > 0 ? min_lr / lr : kSmallestFactor; }

double warmup_factor(double low, std::int64_t step, std::int64_t warmup_steps) {
  return low + (1 - low) * static_cast<double>(step) / static_cast<double>(warmup_steps);
}

}  // namespace

LrSchedule::LrSchedule(const config::SchedulerConfig& scheduler, double lr, std::optional<std::int64_t> max_steps)
    : scheduler_(scheduler), lr_(lr), max_steps_(max_steps) {
  if (const auto* linear = std::get_if<LinearScheduler>(&scheduler);
      linear != nullptr && max_steps && linear->decay_steps > 0 && *max_steps < linear->warmup_steps + linear->decay_steps)
    fail(ErrorCode::kInvalidArgument,
         "[scheduler] linear: max_steps is {}, wanted at least warmup_steps + decay_steps = {}: raise max_steps or shorten the two",
         *max_steps, linear->warmup_steps + linear->decay_steps);
  if (const auto* cosine = std::get_if<CosineScheduler>(&scheduler)) {
    if (!max_steps) fail(ErrorCode::kInvalidArgument, "[scheduler] cosine needs max_steps: its period ends there");
    if (*max_steps <= cosine->warmup_steps)
      fail(ErrorCode::kInvalidArgument,
           "[scheduler] cosine: max_steps is {}, wanted more than warmup_steps = {}: raise max_steps or shorten the warm-up", *max_steps,
           cosine->warmup_steps);
  }
}

double LrSchedule::at(std::int64_t step) const {
  if (const auto* linear = std::get_if<LinearScheduler>(&scheduler_)) {
    const double low = lowest_factor(linear->min_lr, lr_);
    if (step < linear->warmup_steps) return lr_ * warmup_factor(low, step, linear->warmup_steps);
    if (!max_steps_ || linear->decay_steps == 0) return lr_;
    const std::int64_t into_decay = step - (*max_steps_ - linear->decay_steps);
    if (into_decay < 0) return lr_;
    const std::int64_t last = linear->decay_steps - 1;
    const double part = last == 0 ? 1.0 : static_cast<double>(std::min(into_decay, last)) / static_cast<double>(last);
    return lr_ * (1 + (low - 1) * part);
  }
  if (const auto* cosine = std::get_if<CosineScheduler>(&scheduler_)) {
    if (step < cosine->warmup_steps) return lr_ * warmup_factor(lowest_factor(cosine->min_lr, lr_), step, cosine->warmup_steps);
    const double period = static_cast<double>(*max_steps_ - cosine->warmup_steps);
    const double part = std::min(static_cast<double>(step - cosine->warmup_steps), period) / period;
    return cosine->min_lr + (lr_ - cosine->min_lr) * (1 + std::cos(std::numbers::pi * part)) / 2;
  }
  return lr_;
}

}  // namespace prl::trainer
