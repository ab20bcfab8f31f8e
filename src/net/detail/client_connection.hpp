#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "net/detail/timed_socket.hpp"
#include "net/http_client.hpp"

namespace prl::net::detail {

/// TLS settings shared by the connections of one client; opaque so that OpenSSL stays in one file.
struct TlsContext;
std::shared_ptr<TlsContext> make_tls_context();

/// One client connection, plain or TLS. All coroutines run on strand(); one exchange at a time.
class ClientConnection : public std::enable_shared_from_this<ClientConnection> {
 public:
  explicit ClientConnection(asio::any_io_executor executor);
  ~ClientConnection();

  asio::any_io_executor strand() const { return strand_; }
  /// Resolves, connects and, for https, shakes hands. Error{kUnavailable}, {kDeadline}.
  asio::awaitable<void> open(Url url, std::shared_ptr<TlsContext> tls, TimePoint deadline);
  asio::awaitable<void> send(std::string bytes, TimePoint deadline);
  /// Status and header fields of the next reply; informational replies are skipped.
  asio::awaitable<HttpReply> read_head(bool is_head_request, std::size_t max_body_bytes, TimePoint deadline);
  /// The next piece of its body; empty when it is complete.
  asio::awaitable<std::string> read_piece(TimePoint deadline);

  /// True after a complete reply that allows another request.
  bool is_reusable() const noexcept;
  /// True if bytes of the current reply have arrived.
  bool has_reply_bytes() const noexcept { return has_reply_bytes_; }
  /// For an idle connection: the server closed it, or sent something nobody asked for.
  bool is_stale();
  /// From any thread: ends what runs.
  void close();

 private:
  struct Parser;
  struct Tls;
  asio::awaitable<IoOutcome> read_some(std::span<char> buffer, TimePoint deadline);
  /// Feeds buffer_ to the parser and reads on until header or body make progress.
  asio::awaitable<void> advance(bool until_header, TimePoint deadline);
  [[noreturn]] void fail_io(const IoOutcome& outcome, std::string_view doing) const;

  asio::any_io_executor strand_;
  std::shared_ptr<TimedSocket> socket_;
  std::unique_ptr<Tls> tls_;
  std::unique_ptr<Parser> parser_;
  std::string name_;    // host:port
  std::string buffer_;  // received, not yet parsed
  bool has_reply_bytes_ = false;
};

}  // namespace prl::net::detail
