#include "net/http_client.hpp"

#include <boost/json/serialize.hpp>

#include <algorithm>
#include <charconv>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "base/failure.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "net/deadline.hpp"
#include "net/detail/client_connection.hpp"
#include "net/detail/run_on.hpp"
#include "net/io_runtime.hpp"
#include "net/signal.hpp"

namespace prl::net {
namespace {

using Connection = detail::ClientConnection;

std::string origin_of(const Url& url) { return fmt::format("{}://{}:{}", url.scheme, url.host, url.port); }

/// When a call ends at the latest.
TimePoint deadline_of(const HttpCall& call, const HttpClient::Options& options) {
  const TimePoint deadline = Clock::now() + (call.timeout.count() > 0 ? call.timeout : options.timeout);
  return call.deadline ? std::min(deadline, *call.deadline) : deadline;
}

/// A server of this run must say so in every reply.
void check_run_id(const HttpClient::Options& options, const std::string& origin, const HttpReply& reply) {
  const auto wanted = options.run_ids.find(origin);
  if (wanted == options.run_ids.end()) return;
  const std::string_view found = reply.headers.get(kRunIdHeader);
  if (found == wanted->second) return;
  fail(ErrorCode::kOutOfSync, "the server at {} belongs to {}, wanted this run's own ({}): another process has taken the port", origin,
       found.empty() ? std::string("no run") : fmt::format("run {}", found), wanted->second);
}

std::string format_request(const HttpCall& call, const Url& url, const HttpClient::Options& options) {
  const bool is_default_port = url.port == (url.scheme == "https" ? 443 : 80);
  const std::string host = url.host.find(':') == std::string::npos ? url.host : "[" + url.host + "]";
  std::string out = fmt::format("{} {} HTTP/1.1\r\nHost: {}", call.method, url.target, host);
  if (!is_default_port) out += fmt::format(":{}", url.port);
  out += "\r\nAccept: */*\r\nUser-Agent: prl\r\n";
  const std::string& bearer = call.bearer ? *call.bearer : options.bearer;
  if (!bearer.empty()) out += fmt::format("Authorization: Bearer {}\r\n", bearer);
  for (const auto& [name, value] : options.headers)
    if (!call.headers.find(name)) out += fmt::format("{}: {}\r\n", name, value);
  for (const auto& [name, value] : call.headers) out += fmt::format("{}: {}\r\n", name, value);
  if (const auto id = options.run_ids.find(origin_of(url)); id != options.run_ids.end())
    out += fmt::format("{}: {}\r\n", kRunIdHeader, id->second);
  if (!call.body.empty() || (call.method != "GET" && call.method != "HEAD")) {
    if (!call.headers.find("Content-Type") && !call.body.empty())
      out += fmt::format("Content-Type: {}\r\n", call.content_type.empty() ? "application/json" : call.content_type);
    out += fmt::format("Content-Length: {}\r\n", call.body.size());
  }
  out += "\r\n";
  out += call.body;
  return out;
}

void check_header_values(const HttpCall& call) {
  const auto check = [](std::string_view text) {
    if (text.find_first_of("\r\n") != std::string_view::npos) fail(ErrorCode::kInvalidArgument, "a header field holds a line break");
  };
  check(call.url);
  check(call.method);
  if (call.bearer) check(*call.bearer);
  for (const auto& [name, value] : call.headers) {
    check(name);
    check(value);
  }
}

}  // namespace

/// The pool and what one attempt needs. Held by shared_ptr: calls in progress outlive the client object.
struct HttpClient::Impl : std::enable_shared_from_this<HttpClient::Impl> {
  struct Idle {
    std::shared_ptr<Connection> connection;
    TimePoint since;
  };
  struct Host {
    std::vector<Idle> idle;
    std::size_t num_open = 0;
    std::deque<Signal> waiters;
  };
  /// One slot of a host's connection budget, and the connection in it. Returns both when destroyed.
  struct Lease {
    std::shared_ptr<Impl> owner;
    std::string host;
    std::shared_ptr<Connection> connection;
    bool was_used = false;
    Lease() = default;
    Lease(std::shared_ptr<Impl> impl, std::string key) : owner(std::move(impl)), host(std::move(key)) {}
    Lease(Lease&&) noexcept = default;
    Lease& operator=(Lease&&) noexcept = delete;
    ~Lease() {
      if (owner) owner->release(*this);
    }
  };

  asio::any_io_executor executor;
  Options options;
  mutable std::mutex mutex;
  std::map<std::string, Host> hosts;  // guarded by mutex
  Rng rng{0};                         // guarded by mutex
  std::shared_ptr<detail::TlsContext> tls;

  asio::awaitable<Lease> acquire(std::string key, TimePoint deadline);
  void release(Lease& lease);
  std::optional<Lease> try_acquire(const std::string& key, Signal& signal);
  /// Sends the call and reads the header of the reply, once; a kept connection that proves dead is replaced silently.
  asio::awaitable<HttpReply> begin(std::shared_ptr<std::optional<Lease>> lease, HttpCall call, Url url, std::size_t max_bytes,
                                   TimePoint deadline);
  asio::awaitable<HttpReply> attempt(HttpCall call, Url url, TimePoint deadline);
  std::chrono::milliseconds backoff(int attempt_index);
  std::shared_ptr<detail::TlsContext> tls_for(const Url& url);
};

std::optional<HttpClient::Impl::Lease> HttpClient::Impl::try_acquire(const std::string& key, Signal& signal) {
  std::vector<Idle> dropped;  // destroyed after the lock
  std::lock_guard lock(mutex);
  Host& host = hosts[key];
  while (!host.idle.empty()) {
    Idle idle = std::move(host.idle.back());
    host.idle.pop_back();
    if (Clock::now() - idle.since > options.idle_limit || idle.connection->is_stale()) {
      --host.num_open;
      dropped.push_back(std::move(idle));
      continue;
    }
    Lease lease(shared_from_this(), key);
    lease.connection = std::move(idle.connection);
    lease.was_used = true;
    return lease;
  }
  if (host.num_open < options.max_connections_per_host) {
    ++host.num_open;
    return Lease(shared_from_this(), key);
  }
  signal = Signal();
  host.waiters.push_back(signal);
  return std::nullopt;
}

asio::awaitable<HttpClient::Impl::Lease> HttpClient::Impl::acquire(std::string key, TimePoint deadline) {
  const auto self = shared_from_this();
  for (;;) {
    Signal signal;
    auto lease = try_acquire(key, signal);
    if (lease) co_return std::move(*lease);
    // A waiter that gives up leaves its signal in the queue; release() wakes it to no effect and the slot stays free for
    // the next try_acquire, so one more waiter is woken here to pass the turn on.
    bool is_mine = false;
    std::exception_ptr exception;
    try {
      is_mine = co_await signal.wait_until(deadline);
    } catch (const Error&) {
      exception = std::current_exception();
    }
    if (is_mine) continue;
    {
      std::lock_guard lock(mutex);
      Host& host = hosts[key];
      if (!host.waiters.empty() && (host.num_open < options.max_connections_per_host || !host.idle.empty())) {
        host.waiters.front().notify();
        host.waiters.pop_front();
      }
    }
    if (exception) std::rethrow_exception(exception);
    fail(ErrorCode::kDeadline, "{}: all {} connections of this client stayed in use", key, options.max_connections_per_host);
  }
}

void HttpClient::Impl::release(Lease& lease) {
  std::shared_ptr<Connection> dropped;  // destroyed after the lock
  std::lock_guard lock(mutex);
  Host& host = hosts[lease.host];
  if (lease.connection && lease.connection->is_reusable() && host.idle.size() < options.max_idle_per_host) {
    host.idle.push_back(Idle{std::move(lease.connection), Clock::now()});
  } else {
    --host.num_open;
    dropped = std::move(lease.connection);
  }
  if (!host.waiters.empty()) {
    host.waiters.front().notify();
    host.waiters.pop_front();
  }
}

std::shared_ptr<detail::TlsContext> HttpClient::Impl::tls_for(const Url& url) {
  if (url.scheme != "https") return nullptr;
  std::lock_guard lock(mutex);
  if (!tls) tls = detail::make_tls_context();
  return tls;
}

std::chrono::milliseconds HttpClient::Impl::backoff(int attempt_index) {
  std::lock_guard lock(mutex);
  const double doubled = static_cast<double>(options.backoff_first.count()) * static_cast<double>(1 << std::min(attempt_index, 20));
  const double bounded = std::min(doubled, static_cast<double>(options.backoff_max.count()));
  return std::chrono::milliseconds(static_cast<std::int64_t>(bounded * (0.75 + 0.25 * rng.next_double())));
}

namespace {

asio::awaitable<HttpReply> send_and_read_head(std::shared_ptr<Connection> connection, std::string request, bool is_head,
                                              std::size_t max_bytes, TimePoint deadline) {
  auto sending = connection->send(std::move(request), deadline);
  co_await std::move(sending);
  auto reading = connection->read_head(is_head, max_bytes, deadline);
  co_return co_await std::move(reading);
}

asio::awaitable<std::string> read_all(std::shared_ptr<Connection> connection, TimePoint deadline) {
  std::string body;
  for (;;) {
    auto reading = connection->read_piece(deadline);
    std::string piece = co_await std::move(reading);
    if (piece.empty()) co_return body;
    if (body.empty())
      body = std::move(piece);
    else
      body += piece;
  }
}

}  // namespace

asio::awaitable<HttpReply> HttpClient::Impl::begin(std::shared_ptr<std::optional<Lease>> lease, HttpCall call, Url url,
                                                   std::size_t max_bytes, TimePoint deadline) {
  const std::string key = origin_of(url);
  const std::string request = format_request(call, url, options);
  const bool is_head = call.method == "HEAD";
  for (;;) {
    lease->reset();
    auto acquiring = acquire(key, deadline);
    lease->emplace(co_await std::move(acquiring));
    Lease& held = **lease;
    if (!held.connection) {
      auto connection = std::make_shared<Connection>(executor);
      auto opening = connection->open(url, tls_for(url), std::min(deadline, Clock::now() + options.connect_timeout));
      auto on_own_strand = detail::run_on<void>(connection->strand(), std::move(opening));
      co_await std::move(on_own_strand);
      held.connection = std::move(connection);
    }
    bool is_dead = false;
    try {
      auto exchange = send_and_read_head(held.connection, request, is_head, max_bytes, deadline);
      auto on_own_strand = detail::run_on<HttpReply>(held.connection->strand(), std::move(exchange));
      HttpReply reply = co_await std::move(on_own_strand);
      check_run_id(options, key, reply);
      co_return reply;
    } catch (const Error& error) {
      // The server may close a kept connection in the moment we use it; it has then not begun to work on the request.
      is_dead = held.was_used && error.code() == ErrorCode::kUnavailable && !held.connection->has_reply_bytes();
      if (!is_dead) throw;
    }
  }
}

asio::awaitable<HttpReply> HttpClient::Impl::attempt(HttpCall call, Url url, TimePoint deadline) {
  const auto self = shared_from_this();
  auto lease = std::make_shared<std::optional<Lease>>();
  auto beginning = begin(lease, std::move(call), std::move(url), options.max_reply_bytes, deadline);
  HttpReply reply = co_await std::move(beginning);
  const auto connection = (*lease)->connection;
  auto reading = read_all(connection, deadline);
  auto on_own_strand = detail::run_on<std::string>(connection->strand(), std::move(reading));
  reply.body = co_await std::move(on_own_strand);
  co_return reply;
}

HttpClient::HttpClient(asio::any_io_executor executor, Options options) : impl_(std::make_shared<Impl>()) {
  impl_->executor = std::move(executor);
  impl_->rng = Rng(options.seed);
  impl_->options = std::move(options);
}

HttpClient::~HttpClient() {
  std::map<std::string, Impl::Host> hosts;
  std::lock_guard lock(impl_->mutex);
  for (auto& [name, host] : impl_->hosts) {
    host.num_open -= host.idle.size();
    hosts[name].idle.swap(host.idle);
  }
}

std::string origin_of(std::string_view url) { return origin_of(Url::parse(url)); }

asio::awaitable<HttpReply> HttpClient::call(HttpCall call) {
  const auto impl = impl_;
  const Options& options = impl->options;
  check_header_values(call);
  const Url url = Url::parse(call.url);
  const TimePoint deadline = deadline_of(call, options);
  const int max_retries = call.max_retries >= 0 ? call.max_retries : options.max_retries;
  for (int attempt_index = 0;; ++attempt_index) {
    std::chrono::milliseconds pause = impl->backoff(attempt_index);
    try {
      auto attempt = impl->attempt(call, url, deadline);
      HttpReply reply = co_await std::move(attempt);
      const bool is_final = reply.status < 400 || !is_transient(error_code_of_status(reply.status));
      if (is_final || attempt_index >= max_retries) co_return reply;
      int seconds = 0;
      const std::string_view wanted = reply.headers.get("Retry-After");
      std::from_chars(wanted.data(), wanted.data() + wanted.size(), seconds);
      pause = std::max(pause, std::min<std::chrono::milliseconds>(std::chrono::seconds(seconds), options.backoff_max));
      if (Clock::now() + pause >= deadline) co_return reply;
    } catch (const Error& error) {
      if (!is_transient(error.code()) || attempt_index >= max_retries || Clock::now() + pause >= deadline)
        throw error.with_context(fmt::format("{} {}", call.method, call.url));
    }
    auto sleep = sleep_for(pause);
    co_await std::move(sleep);
  }
}

asio::awaitable<boost::json::value> HttpClient::get_json(std::string url) {
  HttpCall request;
  request.url = url;
  auto calling = call(std::move(request));
  const HttpReply reply = co_await std::move(calling);
  reply.raise_for_status("GET " + url);
  co_return reply.json();
}

asio::awaitable<boost::json::value> HttpClient::post_json(std::string url, boost::json::value body, std::chrono::milliseconds timeout) {
  HttpCall request;
  request.method = "POST";
  request.url = url;
  request.body = boost::json::serialize(body);
  request.timeout = timeout;
  auto calling = call(std::move(request));
  const HttpReply reply = co_await std::move(calling);
  reply.raise_for_status("POST " + url);
  co_return reply.json();
}

std::size_t HttpClient::num_open_connections() const {
  std::lock_guard lock(impl_->mutex);
  std::size_t count = 0;
  for (const auto& [name, host] : impl_->hosts) count += host.num_open;
  return count;
}

struct SseStream::Impl {
  std::shared_ptr<std::optional<HttpClient::Impl::Lease>> lease;
  SseParser parser;
  bool is_ended = false;
};

SseStream::SseStream() = default;
SseStream::~SseStream() = default;
SseStream::SseStream(SseStream&&) noexcept = default;
SseStream& SseStream::operator=(SseStream&&) noexcept = default;

asio::awaitable<std::optional<SseEvent>> SseStream::next(std::chrono::milliseconds timeout) {
  PRL_CHECK(impl_ != nullptr, "next() on an empty SseStream");
  for (;;) {
    if (auto event = impl_->parser.next()) co_return event;
    if (impl_->is_ended) co_return std::nullopt;
    const auto connection = (*impl_->lease)->connection;
    auto reading = connection->read_piece(Clock::now() + timeout);
    auto on_own_strand = detail::run_on<std::string>(connection->strand(), std::move(reading));
    const std::string piece = co_await std::move(on_own_strand);
    if (piece.empty()) {
      impl_->is_ended = true;
      impl_->lease->reset();  // back to the pool
    }
    impl_->parser.feed(piece);
  }
}

asio::awaitable<SseStream> HttpClient::open_sse(HttpCall call) {
  const auto impl = impl_;
  check_header_values(call);
  const Url url = Url::parse(call.url);
  const TimePoint deadline = deadline_of(call, impl->options);
  if (!call.headers.find("Accept")) call.headers.add("Accept", "text/event-stream");
  const std::string what = fmt::format("{} {}", call.method, call.url);
  auto lease = std::make_shared<std::optional<Impl::Lease>>();
  auto beginning = impl->begin(lease, std::move(call), url, std::numeric_limits<std::size_t>::max(), deadline);
  HttpReply reply = co_await std::move(beginning);
  if (!reply.is_ok()) {
    const auto connection = (*lease)->connection;
    auto reading = read_all(connection, deadline);
    auto on_own_strand = detail::run_on<std::string>(connection->strand(), std::move(reading));
    reply.body = co_await std::move(on_own_strand);
    reply.raise_for_status(what);
  }
  SseStream stream;
  stream.impl_ = std::make_unique<SseStream::Impl>();
  stream.impl_->lease = std::move(lease);
  co_return stream;
}

struct BodyStream::Impl {
  std::shared_ptr<std::optional<HttpClient::Impl::Lease>> lease;
};

BodyStream::BodyStream() = default;
BodyStream::~BodyStream() = default;
BodyStream::BodyStream(BodyStream&&) noexcept = default;
BodyStream& BodyStream::operator=(BodyStream&&) noexcept = default;

asio::awaitable<std::string> BodyStream::next(std::chrono::milliseconds timeout) {
  if (!impl_) co_return std::string();  // it has ended
  const auto connection = (*impl_->lease)->connection;
  auto reading = connection->read_piece(Clock::now() + timeout);
  auto on_own_strand = detail::run_on<std::string>(connection->strand(), std::move(reading));
  std::string piece = co_await std::move(on_own_strand);
  if (piece.empty()) impl_.reset();  // its connection goes back to the pool
  co_return piece;
}

asio::awaitable<BodyStream> HttpClient::open_body(HttpCall call) {
  const auto impl = impl_;
  check_header_values(call);
  const Url url = Url::parse(call.url);
  const TimePoint deadline = deadline_of(call, impl->options);
  const std::string what = fmt::format("{} {}", call.method, call.url);
  auto lease = std::make_shared<std::optional<Impl::Lease>>();
  BodyStream stream;
  try {
    auto beginning = impl->begin(lease, std::move(call), url, std::numeric_limits<std::size_t>::max(), deadline);
    stream.head_ = co_await std::move(beginning);
  } catch (const Error& error) {
    throw error.with_context(what);
  }
  stream.impl_ = std::make_unique<BodyStream::Impl>();
  stream.impl_->lease = std::move(lease);
  co_return stream;
}

}  // namespace prl::net
