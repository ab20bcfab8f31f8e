#include "net/detail/timed_socket.hpp"

#include <boost/asio/buffer.hpp>
#include <boost/asio/write.hpp>

#include <utility>

#include "base/hosts.hpp"
#include "net/detail/completion.hpp"

namespace prl::net::detail {
TimedSocket::TimedSocket(asio::ip::tcp::socket socket) : socket_(std::move(socket)), watchdog_(socket_.get_executor()) {}

void TimedSocket::arm(TimePoint deadline) {
  expired_ = false;
  const std::uint64_t number = ++arm_count_;
  watchdog_.expires_at(deadline);
  watchdog_.async_wait([self = shared_from_this(), number](boost::system::error_code error) {
    if (error || self->arm_count_ != number) return;
    self->expired_ = true;
    boost::system::error_code ignored;
    self->socket_.cancel(ignored);
  });
}

bool TimedSocket::disarm() noexcept {
  ++arm_count_;
  watchdog_.cancel();
  return std::exchange(expired_, false);
}

asio::awaitable<IoOutcome> TimedSocket::connect(asio::ip::tcp::endpoint endpoint, TimePoint deadline) {
  const auto self = shared_from_this();
  arm(deadline);
  auto [error] = co_await socket_.async_connect(endpoint, kToken);
  const bool timed_out = disarm();
  if (!error && is_connected_to_itself(socket_.native_handle())) error = asio::error::connection_refused;
  boost::system::error_code ignored;
  if (!error) socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  co_return IoOutcome{error, 0, timed_out};
}

asio::awaitable<IoOutcome> TimedSocket::read_some(std::span<char> buffer, TimePoint deadline) {
  const auto self = shared_from_this();
  arm(deadline);
  const auto [error, num_bytes] = co_await socket_.async_read_some(asio::buffer(buffer.data(), buffer.size()), kToken);
  const bool timed_out = disarm();
  co_return IoOutcome{error, num_bytes, timed_out && error};
}

asio::awaitable<IoOutcome> TimedSocket::write(std::string_view bytes, TimePoint deadline) {
  const auto self = shared_from_this();
  arm(deadline);
  const auto [error, num_bytes] = co_await asio::async_write(socket_, asio::buffer(bytes.data(), bytes.size()), kToken);
  const bool timed_out = disarm();
  co_return IoOutcome{error, num_bytes, timed_out && error};
}

void TimedSocket::close() noexcept {
  boost::system::error_code ignored;
  socket_.close(ignored);
}

}  // namespace prl::net::detail
