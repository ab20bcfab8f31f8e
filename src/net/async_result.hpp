#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "net/signal.hpp"

namespace prl::net {

/// A value that a compute thread sets once and one coroutine awaits. Copies share one state.
template <typename T>
class AsyncResult {
 public:
  /// False if it was already settled; the first one wins. Any thread.
  bool set_value(T value) const { return settle(std::move(value), nullptr); }
  bool set_error(Error error) const { return settle(std::nullopt, std::make_exception_ptr(std::move(error))); }
  /// Keeps the exception's own type.
  bool set_exception(std::exception_ptr exception) const { return settle(std::nullopt, std::move(exception)); }
  bool is_settled() const {
    std::lock_guard lock(state_->mutex);
    return state_->settled;
  }
  /// The value, or throws the error that was set. Error{kDeadline} naming `what` when `deadline` passes first,
  /// Error{kCancelled} if the awaiting coroutine is cancelled. Call once.
  asio::awaitable<T> wait(TimePoint deadline, std::string what) const {
    const std::shared_ptr<State> state = state_;
    const bool notified = co_await state->signal.wait_until(deadline);
    if (!notified && !is_settled_in(*state)) fail(ErrorCode::kDeadline, "waited for {}: the deadline passed", what);
    std::lock_guard lock(state->mutex);
    if (state->exception) std::rethrow_exception(state->exception);
    co_return std::move(*state->value);
  }

 private:
  struct State {
    mutable std::mutex mutex;
    std::optional<T> value;
    std::exception_ptr exception;
    bool settled = false;
    Signal signal;
  };
  static bool is_settled_in(const State& state) {
    std::lock_guard lock(state.mutex);
    return state.settled;
  }
  bool settle(std::optional<T> value, std::exception_ptr exception) const {
    {
      std::lock_guard lock(state_->mutex);
      if (std::exchange(state_->settled, true)) return false;
      state_->value = std::move(value);
      state_->exception = std::move(exception);
    }
    state_->signal.notify();
    return true;
  }
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// Bounded FIFO from any threads to one coroutine. Copies share one state.
template <typename T>
class AsyncQueue {
 public:
  explicit AsyncQueue(std::size_t capacity) : state_(std::make_shared<State>(capacity)) {}

  /// False if full or closed; the value is then untouched. Any thread, never blocks.
  [[nodiscard]] bool try_push(T& value) const {
    {
      std::lock_guard lock(state_->mutex);
      if (state_->closed || state_->items.size() >= state_->capacity) return false;
      state_->items.push_back(std::move(value));
    }
    state_->signal.notify();
    return true;
  }
  /// The next item; nullopt when `deadline` passed, or when closed and drained (is_closed() tells). One consumer.
  asio::awaitable<std::optional<T>> pop(TimePoint deadline) const {
    const std::shared_ptr<State> state = state_;
    for (;;) {
      {
        std::lock_guard lock(state->mutex);
        if (!state->items.empty()) {
          std::optional<T> item(std::move(state->items.front()));
          state->items.pop_front();
          co_return item;
        }
        if (state->closed) co_return std::nullopt;
      }
      const bool notified = co_await state->signal.wait_until(deadline);
      if (!notified && Clock::now() >= deadline) co_return std::nullopt;
    }
  }
  /// Lets the consumer drain what is left, then see the end.
  void close() const {
    {
      std::lock_guard lock(state_->mutex);
      state_->closed = true;
    }
    state_->signal.notify();
  }
  bool is_closed() const {
    std::lock_guard lock(state_->mutex);
    return state_->closed;
  }
  std::size_t size() const {
    std::lock_guard lock(state_->mutex);
    return state_->items.size();
  }

 private:
  struct State {
    explicit State(std::size_t n) : capacity(n) {}
    const std::size_t capacity;
    mutable std::mutex mutex;
    std::deque<T> items;
    bool closed = false;
    Signal signal;
  };
  std::shared_ptr<State> state_;
};

}  // namespace prl::net
