#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "monitor/format.hpp"
#include "monitor/metric_set.hpp"

namespace prl::launch {

/// Merges the orchestrator's and the trainer's metrics of one run into one line per trained step, and keeps the run's sums.
/// A step may be trained before the orchestrator has written its row: the line then waits for it, until the orchestrator has reported a
/// later step, a few more steps are trained, or the run ends. Any thread.
class RlProgress {
 public:
  using Clock = std::chrono::steady_clock;
  /// Gets the lines in the order of their steps, one at a time, on the thread that added what completes them:
  /// "Step 12/120 | Reward: 0.7300 | Loss: 0.0010 | Entropy: 0.2463 | Mismatch KL: 0.0022 | 21,086 tokens/s | Async Level: 1 | ETA 1m20s"
  using Show = std::function<void(const std::string& line)>;
  RlProgress(std::optional<std::int64_t> max_steps, std::int64_t first_step, Show show)
      : max_steps_(max_steps), first_step_(first_step), show_(std::move(show)) {}
  /// Shows what still waits.
  ~RlProgress();
  RlProgress(const RlProgress&) = delete;
  RlProgress& operator=(const RlProgress&) = delete;

  void add_orchestrator(std::int64_t step, const monitor::Metrics& metrics);
  void add_trainer(std::int64_t step, const monitor::Metrics& metrics, Clock::time_point now);
  /// Shows what still waits, without what the orchestrator says of it.
  void finish();
  /// Mean of mismatch_kl over the steps seen; 0 before the first.
  double mean_mismatch_kl() const;

 private:
  struct Batch {
    double reward = 0, async_level = 0;
  };
  struct Trained {
    monitor::Metrics metrics;
    double seconds_per_step = 0;
  };
  void show_complete();
  void show_first();

  const std::optional<std::int64_t> max_steps_;
  const std::int64_t first_step_;
  const Show show_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, Batch> batches_;    ///< collected, not shown yet; the queue's bound bounds it
  std::map<std::int64_t, Trained> trained_;  ///< not shown yet, kMostWaiting at most
  std::optional<Clock::time_point> last_step_;
  double seconds_per_step_ = 0;
  double mismatch_sum_ = 0;
  std::int64_t num_steps_ = 0;
};

using monitor::format_duration;

}  // namespace prl::launch
