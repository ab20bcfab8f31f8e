#pragma once

#include <boost/asio/experimental/awaitable_operators.hpp>

#include <chrono>
#include <functional>
#include <utility>

#include "base/error.hpp"
#include "net/deadline.hpp"

namespace prl::net {

namespace detail {
inline asio::awaitable<void> poll_until(std::function<bool()> condition) {
  while (!condition()) co_await sleep_for(std::chrono::milliseconds(50));
}
}  // namespace detail

/// Awaits `operation`; once `should_stop` answers true (asked 20 times a second, on the caller's strand), cancels it and throws
/// Error{kCancelled}. The operation must honour terminal cancellation. Its own exceptions pass through.
template <typename T>
asio::awaitable<T> until_stop(asio::awaitable<T> operation, std::function<bool()> should_stop) {
  using namespace asio::experimental::awaitable_operators;
  auto captured = detail::capture<T>(std::move(operation));
  auto watching = detail::poll_until(std::move(should_stop));
  auto race = std::move(captured) || std::move(watching);
  auto winner = co_await std::move(race);
  if (winner.index() == 1) fail(ErrorCode::kCancelled, "stopped");
  auto& outcome = std::get<0>(winner);
  if (outcome.exception) throw to_error(outcome.exception);
  if constexpr (!std::is_void_v<T>) co_return std::move(*outcome.value);
}

}  // namespace prl::net
