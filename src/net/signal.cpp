#include "net/signal.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <mutex>
#include <optional>
#include <utility>

#include "base/error.hpp"

namespace prl::net {

struct Signal::State {
  std::mutex mutex;
  bool is_set = false;
  bool is_waiting = false;                  // and was not notified since
  std::optional<asio::steady_timer> timer;  // of who waits; touched under the mutex only
};

namespace {

/// Starts the wait under the mutex that guards the timer object, so that notify() may touch the timer from any thread.
template <typename State>
struct StartWait {
  State* state;
  template <typename Handler>
  void operator()(Handler&& handler) {
    std::lock_guard lock(state->mutex);
    // A notification between the check in wait_until and this line has moved the expiry into the past.
    state->timer->async_wait(std::forward<Handler>(handler));
  }
};

/// The timer goes with the coroutine that waits on it, also where that is dropped with its executor.
template <typename State>
struct EndWait {
  State* state;
  ~EndWait() {
    std::lock_guard lock(state->mutex);
    state->is_waiting = false;
    state->timer.reset();
  }
};

}  // namespace

Signal::Signal() : state_(std::make_shared<State>()) {}

void Signal::notify() const noexcept {
  std::lock_guard lock(state_->mutex);
  state_->is_set = true;
  if (std::exchange(state_->is_waiting, false)) state_->timer->expires_at(TimePoint::min());
}

asio::awaitable<bool> Signal::wait_until(TimePoint deadline) const {
  const std::shared_ptr<State> state = state_;
  const auto executor = co_await asio::this_coro::executor;
  {
    std::lock_guard lock(state->mutex);
    if (state->is_set) {
      state->is_set = false;
      co_return true;
    }
    PRL_CHECK(!state->timer, "a Signal has one waiter at a time");
    state->timer.emplace(executor, deadline);
    state->is_waiting = true;
  }
  const EndWait<State> end{state.get()};
  StartWait<State> start{state.get()};
  const auto token = asio::as_tuple(asio::use_awaitable);
  auto operation = asio::async_initiate<decltype(token), void(boost::system::error_code)>(start, token);
  std::exception_ptr cancelled;
  try {
    co_await std::move(operation);
  } catch (const boost::system::system_error&) {
    cancelled = std::current_exception();  // cancelled before the wait could start
  }
  bool was_set = false;
  {
    std::lock_guard lock(state->mutex);
    if (!cancelled) was_set = std::exchange(state->is_set, false);
  }
  if (cancelled) fail(ErrorCode::kCancelled, "the waiting task was cancelled");
  if (!was_set) {
    const auto cancellation = co_await asio::this_coro::cancellation_state;
    if (cancellation.cancelled() != asio::cancellation_type::none) fail(ErrorCode::kCancelled, "the waiting task was cancelled");
  }
  co_return was_set;
}

}  // namespace prl::net
