#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "monitor/format.hpp"
#include "monitor/metric_set.hpp"

namespace prl::launch {

/// Merges the orchestrator's and the trainer's metrics of one run into one line per trained step, and keeps the run's sums.
/// Any thread.
class RlProgress {
 public:
  using Clock = std::chrono::steady_clock;
  RlProgress(std::optional<std::int64_t> max_steps, std::int64_t first_step) : max_steps_(max_steps), first_step_(first_step) {}

  void add_orchestrator(std::int64_t step, const monitor::Metrics& metrics);
  /// "Step 12/120 | Reward: 0.7300 | Loss: 0.0010 | Entropy: 0.2463 | Mismatch KL: 0.0022 | 21,086 tokens/s | Async Level: 1 | ETA 1m20s"
  std::string add_trainer(std::int64_t step, const monitor::Metrics& metrics, Clock::time_point now);
  /// Mean of mismatch_kl over the steps seen; 0 before the first.
  double mean_mismatch_kl() const;

 private:
  struct Batch {
    double reward = 0, async_level = 0;
  };
  const std::optional<std::int64_t> max_steps_;
  const std::int64_t first_step_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, Batch> batches_;  ///< collected, not trained yet; the queue's bound bounds it
  std::optional<Clock::time_point> last_step_;
  double seconds_per_step_ = 0;
  double mismatch_sum_ = 0;
  std::int64_t num_steps_ = 0;
};

using monitor::format_duration;

}  // namespace prl::launch
