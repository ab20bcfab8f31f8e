#pragma once

#include <boost/json/value.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "net/http_message.hpp"
#include "net/sse.hpp"

namespace prl::net {

class IoRuntime;

/// scheme://host[:port]/target
struct Url {
  std::string scheme;  ///< "http" or "https"
  std::string host;    ///< without brackets
  int port = 0;
  std::string target;  ///< path and query, at least "/"
  /// Error{kInvalidArgument} naming the text.
  static Url parse(std::string_view text);
};

/// "scheme://host:port" of a URL. Error{kInvalidArgument} naming the text.
std::string origin_of(std::string_view url);

/// Field of requests and replies that says which run a server belongs to.
inline constexpr const char* kRunIdHeader = "X-PRL-Run-ID";

/// One call. Fields left at their defaults take the client's options.
struct HttpCall {
  std::string method = "GET";
  std::string url;
  Fields headers;
  std::string body;
  std::string content_type;              ///< sent when there is a body; "application/json" if empty
  std::optional<std::string> bearer;     ///< overrides Options::bearer
  std::chrono::milliseconds timeout{0};  ///< for the whole call, with retries; 0: Options::timeout
  std::optional<TimePoint> deadline;     ///< when the caller's own time is up, if that comes before the timeout
  int max_retries = -1;                  ///< -1: Options::max_retries
};

struct HttpReply {
  int status = 0;
  Fields headers;
  std::string body;

  bool is_ok() const noexcept { return status >= 200 && status < 300; }
  /// Error{kCorrupt} if the body is not JSON.
  boost::json::value json() const;
  /// The message of an OpenAI-shaped error body, else the start of the body.
  std::string error_message() const;
  /// Throws an Error whose code mirrors the status (401 kUnauthorized, 404 kNotFound, 429 kOverloaded, 503 kUnavailable,
  /// overlong prompts kOverlong, ...) unless is_ok().
  void raise_for_status(std::string_view what) const;
};

/// Events of one streamed reply. Destroying it closes the connection, which is how a generation is cancelled.
class SseStream {
 public:
  SseStream();
  ~SseStream();
  SseStream(SseStream&&) noexcept;
  SseStream& operator=(SseStream&&) noexcept;
  /// The next event, nullopt at the end of the body. Error{kDeadline} after `timeout` without bytes, {kUnavailable} if the
  /// connection breaks. "[DONE]" is an event like any other.
  asio::awaitable<std::optional<SseEvent>> next(std::chrono::milliseconds timeout);

 private:
  friend class HttpClient;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A reply whose body is read piece by piece, for what does not fit in memory. Destroying it early closes the connection.
class BodyStream {
 public:
  BodyStream();
  ~BodyStream();
  BodyStream(BodyStream&&) noexcept;
  BodyStream& operator=(BodyStream&&) noexcept;
  /// Status and headers; the body is empty.
  const HttpReply& head() const noexcept { return head_; }
  /// The next piece, empty at the end. Error{kDeadline} after `timeout` without bytes, {kUnavailable} if the connection breaks
  /// before the length that the header promised.
  asio::awaitable<std::string> next(std::chrono::milliseconds timeout);

 private:
  friend class HttpClient;
  struct Impl;
  std::unique_ptr<Impl> impl_;
  HttpReply head_;
};

/// HTTP/1.1 client with a pool of kept connections per host. Any number of coroutines on any executors may call it at once;
/// each connection has a strand of its own. https needs a build with OpenSSL, else Error{kNotImplemented}.
///
/// Errors of every call: kInvalidArgument (URL), kUnavailable (no connection, or it broke), kDeadline (naming the phase),
/// kCancelled (the calling task was cancelled), kCorrupt (the reply is not HTTP, or too large). A reply of any status is
/// returned, not thrown. What is_transient (base/failure.hpp) says may pass is tried again, with exponential back-off and Retry-After,
/// max_retries times at most and only while there is time.
class HttpClient {
 public:
  struct Options {
    std::size_t max_connections_per_host = 1024;  ///< further calls wait for a free one
    std::size_t max_idle_per_host = 128;
    std::chrono::milliseconds connect_timeout{5'000};
    std::chrono::milliseconds timeout{600'000};
    std::chrono::milliseconds idle_limit{30'000};  ///< kept connections older than this are not used again
    int max_retries = 2;
    std::chrono::milliseconds backoff_first{250};
    std::chrono::milliseconds backoff_max{8'000};
    std::size_t max_reply_bytes = std::size_t{1} << 30;
    std::string bearer;      ///< sent as "Authorization: Bearer" unless empty
    Fields headers;          ///< added to every call
    std::uint64_t seed = 0;  ///< of the back-off jitter
    /// Servers that belong to a run, by origin ("http://127.0.0.1:8000", see origin_of): requests to them carry the run's id in
    /// kRunIdHeader, and a reply that does not carry the same one is Error{kOutOfSync} (another process has the port).
    std::map<std::string, std::string> run_ids;
  };

  HttpClient(asio::any_io_executor executor, Options options);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  asio::awaitable<HttpReply> call(HttpCall call);
  /// call() + raise_for_status + parse.
  asio::awaitable<boost::json::value> get_json(std::string url);
  asio::awaitable<boost::json::value> post_json(std::string url, boost::json::value body, std::chrono::milliseconds timeout = {});
  /// Sends the call and reads the header of its reply; throws as raise_for_status if it is not 2xx. `timeout` of the call
  /// covers this part only. Not retried after bytes of a reply arrived.
  asio::awaitable<SseStream> open_sse(HttpCall call);
  /// Sends the call and reads the header of its reply, of any status and with a body of any size. `timeout` of the call covers
  /// this part only. Not retried.
  asio::awaitable<BodyStream> open_body(HttpCall call);
  std::size_t num_open_connections() const;

 private:
  friend class SseStream;
  friend class BodyStream;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// The same for threads that are not I/O threads: tools, tests, start-up checks.
class BlockingHttpClient {
 public:
  explicit BlockingHttpClient(HttpClient::Options options);
  ~BlockingHttpClient();
  HttpReply call(HttpCall call);
  boost::json::value get_json(std::string url);
  boost::json::value post_json(std::string url, boost::json::value body);
  /// All events of a streamed reply.
  std::vector<SseEvent> read_sse(HttpCall call);
  /// Begins a reply that is read with next_piece(); the client must outlive it.
  BodyStream open_body(HttpCall call);
  std::string next_piece(BodyStream& body, std::chrono::milliseconds timeout);

 private:
  HttpClient::Options options_;
  std::unique_ptr<IoRuntime> runtime_;
  std::unique_ptr<HttpClient> client_;
};

}  // namespace prl::net
