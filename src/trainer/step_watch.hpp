#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace prl::trainer {

/// Logs the progress of a long step every `interval`: "training step 12: 3 of 16 rows, 42s so far".
/// A thread of its own; the other methods are for one thread.
class StepWatch {
 public:
  /// 0: says nothing.
  explicit StepWatch(std::chrono::milliseconds interval);
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  void begin(std::int64_t step);
  void end();
  /// What the step is at; a literal.
  void set_phase(const char* phase) noexcept { phase_.store(phase); }
  void set_rows(std::int64_t done, std::int64_t total) noexcept {
    num_done_.store(done);
    num_rows_.store(total);
  }

 private:
  using Clock = std::chrono::steady_clock;
  void run();
  std::string describe(Clock::time_point now) const;

  const std::chrono::milliseconds interval_;
  const std::string role_;  ///< of the thread that made this, for the log
  std::atomic<const char*> phase_{""};
  std::atomic<std::int64_t> num_done_{0}, num_rows_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t step_ = -1;          ///< guarded; -1: none is under way
  Clock::time_point begin_, next_;  ///< guarded
  bool is_over_ = false;            ///< guarded
  std::thread thread_;
};

}  // namespace prl::trainer
