#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/error.hpp"
#include "net/asio.hpp"

namespace prl::net {

/// Owner of spawned coroutines: each runs on a strand of its own, its failure is logged and counted, and the group can be
/// cancelled and waited for. The only way to spawn in this project. All members may be called from any thread.
class TaskGroup {
 public:
  struct Stats {
    std::int64_t num_running = 0;
    std::int64_t num_finished = 0;  ///< returned normally
    std::int64_t num_failed = 0;    ///< threw anything but a cancellation
    std::int64_t num_cancelled = 0;
  };

  /// `name` stands in log lines. `on_error` is called on the task's strand for each failure, after the log line.
  TaskGroup(asio::any_io_executor executor, std::string name, std::function<void(const Error&)> on_error = {});
  /// Cancels what still runs; the coroutines end later on their executor.
  ~TaskGroup();
  TaskGroup(const TaskGroup&) = delete;
  TaskGroup& operator=(const TaskGroup&) = delete;

  /// Starts `task` on a fresh strand. After cancel() the task is dropped unstarted and counted as cancelled.
  void spawn(std::string what, asio::awaitable<void> task);
  /// Requests terminal cancellation of every task: its current wait ends with Error{kCancelled}.
  void cancel();
  /// True when all tasks have ended, false when `deadline` passed first. One joiner at a time.
  asio::awaitable<bool> join(TimePoint deadline);
  /// The same for a thread that is not an I/O thread.
  bool join_blocking(std::chrono::milliseconds timeout);
  Stats stats() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace prl::net
