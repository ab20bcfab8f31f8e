#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <stop_token>
#include <utility>

#include "base/error.hpp"
#include "net/signal.hpp"
#include "net/stop.hpp"

namespace prl::orchestrator {

namespace asio = boost::asio;

/// For one write of files, or one call of the sample queue.
constexpr std::chrono::minutes kFileDeadline{10};

/// What ends a run before its last step: a stop from outside, or the first failure of one of its coroutines.
/// One thread, but for wake() and the stop token.
class RunControl {
 public:
  /// From now on a stop of `stop` counts, and wakes the main loop.
  void begin(std::stop_token stop);
  bool is_stopped() const noexcept { return stop_.stop_requested(); }
  bool has_failed() const noexcept { return failure_ != nullptr; }
  const std::exception_ptr& failure() const noexcept { return failure_; }
  /// Throws the first failure, if there is one.
  void check_failure() const;
  /// Error{kCancelled} after a stop, else as check_failure.
  void check() const;

  /// Runs one of the coroutines that make up the run: what it throws becomes the run's failure. Being cancelled after finish() is not one.
  asio::awaitable<void> guard(asio::awaitable<void> role);
  /// The main coroutine has ended; the others are cancelled next.
  void finish() noexcept { is_finished_ = true; }
  bool is_finished() const noexcept { return is_finished_; }

  /// Awaits `operation`, or cancels it: Error{kCancelled} after a stop, else the first failure of another coroutine.
  template <typename T>
  asio::awaitable<T> until_ended(asio::awaitable<T> operation) {
    std::function<bool()> should_stop = [this] { return is_stopped() || has_failed(); };
    auto stoppable = net::until_stop<T>(std::move(operation), std::move(should_stop));
    try {
      co_return co_await std::move(stoppable);
    } catch (const Error&) {
      check_failure();
      throw;
    }
  }

  /// Any thread.
  void wake() const noexcept { wake_.notify(); }
  /// Until wake() or `deadline`. One waiter at a time: the main coroutine.
  asio::awaitable<bool> wait_until(net::TimePoint deadline) const { return wake_.wait_until(deadline); }

 private:
  net::Signal wake_;
  std::stop_token stop_;
  std::exception_ptr failure_;
  bool is_finished_ = false;
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

}  // namespace prl::orchestrator
