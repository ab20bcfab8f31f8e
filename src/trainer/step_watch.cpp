#include "trainer/step_watch.hpp"

#include "base/log_progress.hpp"
#include "monitor/format.hpp"

namespace prl::trainer {

StepWatch::StepWatch(std::chrono::milliseconds interval) : interval_(interval), role_(log::thread_role()) {
  if (interval_.count() > 0) thread_ = std::thread([this] { run(); });
}

StepWatch::~StepWatch() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StepWatch::begin(std::int64_t step) {
  set_phase("");
  set_rows(0, 0);
  const std::lock_guard lock(mutex_);
  step_ = step;
  begin_ = Clock::now();
  next_ = begin_ + interval_;
  changed_.notify_all();
}

void StepWatch::end() {
  const std::lock_guard lock(mutex_);
  step_ = -1;
}

std::string StepWatch::describe(Clock::time_point now) const {
  const std::string seconds = monitor::format_time(std::chrono::duration<double>(now - begin_).count());
  const std::int64_t total = num_rows_.load();
  const std::string phase = phase_.load();
  if (!phase.empty()) return fmt::format("training step {}: {}, {} so far", step_, phase, seconds);
  return fmt::format("training step {}: {} of {} rows, {} so far", step_, num_done_.load(), total, seconds);
}

void StepWatch::run() {
  log::set_thread_role(role_);
  std::unique_lock lock(mutex_);
  while (!is_over_) {
    const auto now = Clock::now();
    if (step_ < 0) {
      changed_.wait(lock, [&] { return is_over_ || step_ >= 0; });
    } else if (now < next_) {
      changed_.wait_until(lock, next_);
    } else {
      log::progress("{}", describe(now));
      next_ = now + interval_;
    }
  }
}

}  // namespace prl::trainer
