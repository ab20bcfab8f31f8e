#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "net/asio.hpp"

namespace prl::net::detail {

/// How one socket operation ended.
struct IoOutcome {
  boost::system::error_code error;
  std::size_t num_bytes = 0;
  bool timed_out = false;
  explicit operator bool() const noexcept { return !error; }
};

/// A TCP socket whose operations have deadlines: on expiry all its operations are cancelled and this one ends timed_out.
/// Everything happens on the strand the socket was made with; one deadline-bound operation at a time.
class TimedSocket : public std::enable_shared_from_this<TimedSocket> {
 public:
  explicit TimedSocket(asio::ip::tcp::socket socket);

  asio::ip::tcp::socket& socket() noexcept { return socket_; }
  asio::awaitable<IoOutcome> connect(asio::ip::tcp::endpoint endpoint, TimePoint deadline);
  /// At least one byte, or an error (end of stream is asio::error::eof).
  asio::awaitable<IoOutcome> read_some(std::span<char> buffer, TimePoint deadline);
  /// All of `bytes`, which must outlive the operation.
  asio::awaitable<IoOutcome> write(std::string_view bytes, TimePoint deadline);
  void close() noexcept;

  /// For composed operations of others (TLS): from arm() to disarm() a deadline cancels the socket's operations.
  void arm(TimePoint deadline);
  /// True if the deadline had passed.
  bool disarm() noexcept;

 private:
  asio::ip::tcp::socket socket_;
  asio::steady_timer watchdog_;
  std::uint64_t arm_count_ = 0;  // tells a late expiry of an earlier operation from that of this one
  bool expired_ = false;
};

}  // namespace prl::net::detail
