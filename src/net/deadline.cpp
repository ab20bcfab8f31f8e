#include "net/deadline.hpp"

#include <boost/asio/as_tuple.hpp>

namespace prl::net {

asio::awaitable<void> sleep_until(TimePoint when) {
  asio::steady_timer timer(co_await asio::this_coro::executor, when);
  const auto [error] = co_await timer.async_wait(asio::as_tuple(asio::use_awaitable));
  if (error) fail(ErrorCode::kCancelled, "the sleeping task was cancelled");
}

asio::awaitable<void> sleep_for(Clock::duration duration) { return sleep_until(Clock::now() + duration); }

}  // namespace prl::net
