#include "net/signal.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <mutex>
#include <utility>

#include "base/error.hpp"

namespace prl::net {

struct Signal::State {
  std::mutex mutex;
  bool is_set = false;
  std::shared_ptr<asio::steady_timer> waiter;  // guarded by mutex, its object too: see wait_until
};

namespace {

/// Starts the wait under the mutex that guards the timer object, so that notify() may touch the timer from any thread.
template <typename State>
struct StartWait {
  std::shared_ptr<State> state;
  std::shared_ptr<asio::steady_timer> timer;
  template <typename Handler>
  void operator()(Handler&& handler) {
    std::lock_guard lock(state->mutex);
    // A notification between the check in wait_until and this line has moved the expiry into the past.
    timer->async_wait(std::forward<Handler>(handler));
  }
};

}  // namespace

Signal::Signal() : state_(std::make_shared<State>()) {}

void Signal::notify() const noexcept {
  std::lock_guard lock(state_->mutex);
  state_->is_set = true;
  if (auto timer = std::exchange(state_->waiter, nullptr)) timer->expires_at(TimePoint::min());
}

asio::awaitable<bool> Signal::wait_until(TimePoint deadline) const {
  const std::shared_ptr<State> state = state_;
  const auto executor = co_await asio::this_coro::executor;
  auto timer = std::make_shared<asio::steady_timer>(executor, deadline);
  {
    std::lock_guard lock(state->mutex);
    if (state->is_set) {
      state->is_set = false;
      co_return true;
    }
    PRL_CHECK(state->waiter == nullptr, "a Signal has one waiter at a time");
    state->waiter = timer;
  }
  StartWait<State> start{state, timer};
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
    if (state->waiter == timer) state->waiter = nullptr;
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
