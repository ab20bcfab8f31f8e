#include "launch/rl_progress.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <exception>

#include "base/log.hpp"

namespace prl::launch {
namespace {

/// Trained steps that wait for the orchestrator's row at most: it is as many steps ahead or behind as the queue and the disk let it be.
constexpr std::size_t kMostWaiting = 8;

double value_of(const monitor::Metrics& metrics, const std::string& name) {
  const auto it = metrics.find(name);
  return it == metrics.end() ? 0.0 : it->second;
}

std::string with_separators(double value) {
  std::string digits = fmt::format("{:.0f}", value);
  for (std::ptrdiff_t i = static_cast<std::ptrdiff_t>(digits.size()) - 3; i > 0; i -= 3) digits.insert(static_cast<std::size_t>(i), ",");
  return digits;
}

}  // namespace

RlProgress::~RlProgress() {
  try {
    finish();
  } catch (const std::exception& error) {
    log::warning("the last step lines are missing: {}", error.what());
  }
}

void RlProgress::add_orchestrator(std::int64_t step, const monitor::Metrics& metrics) {
  std::lock_guard lock(mutex_);
  // Evaluations are logged under the same step, without a batch.
  if (!metrics.contains("reward/all/mean")) return;
  batches_[step] = {value_of(metrics, "reward/all/mean"), value_of(metrics, "scheduler/async_level")};
  show_complete();
}

void RlProgress::add_trainer(std::int64_t step, const monitor::Metrics& metrics, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  if (const auto it = metrics.find("mismatch_kl/all/mean"); it != metrics.end()) {
    mismatch_sum_ += it->second;
    ++num_steps_;
  }
  const double seconds = last_step_ ? std::chrono::duration<double>(now - *last_step_).count() : value_of(metrics, "time/step");
  last_step_ = now;
  // Smoothed over about ten steps, so that one evaluation or checkpoint does not throw the estimate.
  seconds_per_step_ = step - first_step_ <= 1 || seconds_per_step_ == 0 ? seconds : seconds_per_step_ + 0.1 * (seconds - seconds_per_step_);
  trained_[step] = {metrics, seconds_per_step_};
  show_complete();
}

void RlProgress::finish() {
  std::lock_guard lock(mutex_);
  while (!trained_.empty()) show_first();
}

void RlProgress::show_complete() {
  // The orchestrator's rows come in order: a later one says that none will come for the step.
  while (!trained_.empty() &&
         (trained_.size() > kMostWaiting || (!batches_.empty() && batches_.rbegin()->first >= trained_.begin()->first)))
    show_first();
}

void RlProgress::show_first() {
  const auto node = trained_.extract(trained_.begin());
  const std::int64_t step = node.key();
  const monitor::Metrics& metrics = node.mapped().metrics;
  std::string line = max_steps_ ? fmt::format("Step {}/{}", step, *max_steps_) : fmt::format("Step {}", step);
  const auto batch = batches_.find(step);
  if (batch != batches_.end()) line += fmt::format(" | Reward: {:.4f}", batch->second.reward);
  line += fmt::format(" | Loss: {:.4f} | Entropy: {:.4f} | Mismatch KL: {:.4f}", value_of(metrics, "loss/mean"),
                      value_of(metrics, "entropy/all/mean"), value_of(metrics, "mismatch_kl/all/mean"));
  if (metrics.contains("ref_kl/mean")) line += fmt::format(" | Teacher KL: {:.4f}", value_of(metrics, "ref_kl/mean"));
  if (metrics.contains("nll/mean")) line += fmt::format(" | NLL: {:.4f}", value_of(metrics, "nll/mean"));
  line += fmt::format(" | {} tokens/s", with_separators(value_of(metrics, "perf/throughput")));
  if (batch != batches_.end()) line += fmt::format(" | Async Level: {:.0f}", batch->second.async_level);
  if (max_steps_) line += " | ETA " + format_duration(node.mapped().seconds_per_step * static_cast<double>(*max_steps_ - step));
  batches_.erase(batches_.begin(), batches_.upper_bound(step));
  show_(line);
}

double RlProgress::mean_mismatch_kl() const {
  std::lock_guard lock(mutex_);
  return num_steps_ == 0 ? 0.0 : mismatch_sum_ / static_cast<double>(num_steps_);
}

}  // namespace prl::launch
