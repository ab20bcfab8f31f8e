#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "net/async_result.hpp"
#include "net/errors.hpp"

namespace prl::net {

/// Threads for work that would block an I/O thread: templates, tokenization, loading weights. The queue is bounded; a full
/// one is Error{kOverloaded} at once.
class WorkerPool {
 public:
  struct Options {
    int num_threads = 1;
    std::size_t max_queued = 16;
    std::string name = {};
    int niceness = 0;         ///< above 0: these threads give way to others where cores are few
    bool gives_back = false;  ///< memory that a job has freed goes back to the system at once: for jobs that need much
  };
  explicit WorkerPool(Options options);
  /// stop().
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Runs `work` on a worker and returns its value or throws its error. Error{kDeadline} naming `what` when it takes longer
  /// than `timeout`, {kCancelled} when the caller is cancelled; the work itself always runs to its end.
  template <typename Work>
  asio::awaitable<std::invoke_result_t<Work&>> run(Work work, std::chrono::milliseconds timeout, std::string what);
  /// Takes no more jobs, runs what is queued, joins; from then on run() is Error{kUnavailable}. In one of its own jobs, which may be the
  /// last to hold what owns the pool, the other threads are joined and this one ends by itself. Idempotent, by one thread at a time.
  void stop();

 private:
  void post(std::function<void()> job);
  struct Impl;
  std::shared_ptr<Impl> impl_;  ///< each thread has it too
};

template <typename Work>
asio::awaitable<std::invoke_result_t<Work&>> WorkerPool::run(Work work, std::chrono::milliseconds timeout, std::string what) {
  using T = std::invoke_result_t<Work&>;
  using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;
  AsyncResult<Stored> result;
  auto shared_work = std::make_shared<Work>(std::move(work));
  std::function<void()> job = [result, shared_work] {
    try {
      if constexpr (std::is_void_v<T>) {
        (*shared_work)();
        result.set_value({});
      } else {
        result.set_value((*shared_work)());
      }
    } catch (const std::exception&) {
      result.set_exception(std::current_exception());
    }
  };
  post(std::move(job));
  auto waiting = result.wait(Clock::now() + timeout, std::move(what));
  if constexpr (std::is_void_v<T>)
    co_await std::move(waiting);
  else
    co_return co_await std::move(waiting);
}

}  // namespace prl::net
