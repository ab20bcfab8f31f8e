#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "net/http_message.hpp"

namespace prl::net {

/// HTTP/1.1 server: keep-alive, pipelining, chunked and plain bodies, streamed replies, detection of clients that leave.
///
/// One strand per connection; requests of one connection are answered in order. While a handler runs the connection is
/// still read, so a closed one cancels request.cancelled and, terminally, the handler coroutine itself.
/// A client that shuts down its sending side counts as gone.
/// Overload never grows: beyond max_connections a connection is answered 503 and closed, beyond max_held_body_bytes a request is.
/// Requests whose end is ambiguous are refused as RFC 9112 asks. A refusal never waits for the body.
class HttpServer {
 public:
  using Handler = std::function<asio::awaitable<HttpResponse>(HttpRequest)>;

  struct Options {
    std::string host = "127.0.0.1";  ///< address or name to bind; "0.0.0.0" for every interface
    int port = 0;                    ///< 0 takes a free one, see port()
    int num_io_threads = 2;
    int backlog = 4096;  ///< pending connections the kernel holds
    std::size_t max_connections = 8192;
    std::size_t max_header_bytes = 64 * 1024;
    std::size_t max_body_bytes = 64 * 1024 * 1024;     ///< larger bodies are answered 413
    std::size_t max_held_body_bytes = 256 << 20;       ///< of all bodies held at one time; beyond it requests are answered 503
    std::chrono::milliseconds header_timeout{20'000};  ///< from the first byte of a request to the end of its header
    std::chrono::milliseconds body_timeout{120'000};   ///< from the end of the header to the end of the body
    std::chrono::milliseconds idle_timeout{75'000};    ///< without any byte between requests
    std::chrono::milliseconds write_timeout{60'000};   ///< a client that reads nothing for so long is dropped
    std::string name = "http";                         ///< for log lines
    Fields headers = {};                               ///< of every reply, whatever its status
  };

  /// What is decided about a request when its header is there and its body is not.
  struct Verdict {
    std::optional<HttpResponse> refusal;  ///< sent at once; no handler is called, and the body is not read
    Fields headers;                       ///< added to whatever answers the request
  };
  using Gate = std::function<Verdict(const HttpRequest&)>;

  struct Stats {
    std::size_t num_connections = 0;  ///< open now
    std::int64_t num_accepted = 0;
    std::size_t num_held_body_bytes = 0;
    std::int64_t num_refused = 0;       ///< beyond max_connections
    std::int64_t num_requests = 0;      ///< handed to a handler
    std::int64_t num_disconnected = 0;  ///< clients that left while their handler ran
    std::int64_t num_malformed = 0;     ///< requests that could not be parsed, timed out or were too large
    std::int64_t num_errors = 0;        ///< handlers that threw anything but a cancellation
  };

  explicit HttpServer(Options options);
  /// stop(0).
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  /// Before start(). One handler per method and path; a path that ends in "/*" takes all below it that have none. Exceptions of a handler
  /// become error_response().
  void route(std::string method, std::string path, Handler handler);
  /// Decides about every request before its body is read; an exception is answered like that of a handler. On the connection's strand,
  /// and never slow. Before start().
  void set_gate(Gate gate);
  /// Called, on the connection's strand, with method, path, status and duration of each finished request. Before start().
  void on_finished(std::function<void(const std::string& method, const std::string& path, int status, Clock::duration)> observer);
  /// Binds, listens and serves on its own threads. Error{kIo} naming host:port if it is taken or may not be bound.
  void start();
  /// The bound port, after start().
  int port() const noexcept;
  /// Stops accepting, closes idle connections, lets running handlers end for up to `drain`, then cancels them. Blocks until
  /// all is closed. Idempotent. Not from a handler. With `end_early`, that is called after `drain` if handlers still run, and they get
  /// `grace` to say good-bye before they are cancelled.
  void stop(std::chrono::milliseconds drain, const std::function<void()>& end_early = {}, std::chrono::milliseconds grace = {});
  asio::any_io_executor executor() const;
  Stats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prl::net
