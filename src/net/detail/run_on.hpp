#pragma once

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "net/deadline.hpp"
#include "net/signal.hpp"

namespace prl::net::detail {

/// Runs `task` on another strand and awaits its end there. A cancellation of the caller reaches the task on its strand, and the
/// caller still waits for its end. (co_spawn with use_awaitable does not do across threads: Boost 1.81 keeps the cancellation
/// signal in the caller's frame and hands a plain pointer to the other strand, where it may arrive after the caller has gone on.)
template <typename T>
asio::awaitable<T> run_on(asio::any_io_executor strand, asio::awaitable<T> task) {
  struct Shared {
    asio::cancellation_signal cancel;  // touched on the strand only
    Signal ended;
    Outcome<T> outcome;
  };
  const auto shared = std::make_shared<Shared>();
  auto captured = capture<T>(std::move(task));
  auto on_end = [shared](std::exception_ptr exception, Outcome<T> outcome) {
    shared->outcome = std::move(outcome);
    if (exception) shared->outcome.exception = exception;
    shared->ended.notify();
  };
  asio::co_spawn(strand, std::move(captured), asio::bind_cancellation_slot(shared->cancel.slot(), std::move(on_end)));

  const bool throws_if_cancelled = co_await asio::this_coro::throw_if_cancelled();
  for (bool is_ended = false, is_cancelled = false; !is_ended;) {
    bool is_new_cancel = false;
    try {
      auto waiting = shared->ended.wait_until(Clock::now() + std::chrono::hours(24));
      is_ended = co_await std::move(waiting);
    } catch (const Error&) {
      is_new_cancel = !std::exchange(is_cancelled, true);
    }
    if (!is_new_cancel) continue;
    asio::post(strand, [shared] { shared->cancel.emit(asio::cancellation_type::terminal); });
    co_await asio::this_coro::throw_if_cancelled(false);  // the wait for the end goes on
  }
  co_await asio::this_coro::throw_if_cancelled(throws_if_cancelled);
  if (shared->outcome.exception) throw to_error(shared->outcome.exception);
  if constexpr (!std::is_void_v<T>) co_return std::move(*shared->outcome.value);
}

}  // namespace prl::net::detail
