#pragma once

#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "net/asio.hpp"
#include "net/errors.hpp"

namespace prl::net {

/// Suspends until `when`. Error{kCancelled} when the task is cancelled.
asio::awaitable<void> sleep_until(TimePoint when);
asio::awaitable<void> sleep_for(Clock::duration duration);

namespace detail {

template <typename T>
using StoredValue = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

/// What an operation ended with; never throws out of the race below, which waits for a success.
template <typename T>
struct Outcome {
  std::optional<StoredValue<T>> value;
  std::exception_ptr exception;
};

template <typename T>
asio::awaitable<Outcome<T>> capture(asio::awaitable<T> operation) {
  Outcome<T> outcome;
  try {
    if constexpr (std::is_void_v<T>) {
      co_await std::move(operation);
      outcome.value.emplace();
    } else {
      outcome.value.emplace(co_await std::move(operation));
    }
  } catch (const std::exception&) {
    outcome.exception = std::current_exception();
  }
  co_return outcome;
}

}  // namespace detail

/// Awaits `operation`; when `deadline` passes first, cancels it and throws Error{kDeadline} naming `what`, the thing that
/// was waited for. The operation must honour terminal cancellation (every Asio operation, Signal and this module do).
/// Other exceptions of the operation pass through; an Asio abort becomes Error{kCancelled}.
template <typename T>
asio::awaitable<T> with_deadline(asio::awaitable<T> operation, TimePoint deadline, std::string what) {
  using namespace asio::experimental::awaitable_operators;
  asio::steady_timer timer(co_await asio::this_coro::executor, deadline);
  auto captured = detail::capture<T>(std::move(operation));
  auto expiry = timer.async_wait(asio::use_awaitable);
  auto race = std::move(captured) || std::move(expiry);
  auto winner = co_await std::move(race);
  if (winner.index() == 1) fail(ErrorCode::kDeadline, "waited for {}: the deadline passed", what);
  auto& outcome = std::get<0>(winner);
  if (outcome.exception) throw to_error(outcome.exception);
  if constexpr (!std::is_void_v<T>) co_return std::move(*outcome.value);
}

}  // namespace prl::net
