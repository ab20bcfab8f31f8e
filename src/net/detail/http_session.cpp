#include "net/detail/http_session.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>

#include <span>
#include <utility>

#include "base/log.hpp"
#include "net/detail/body_reader.hpp"
#include "net/detail/completion.hpp"
#include "net/errors.hpp"
#include "net/route_table.hpp"

namespace prl::net::detail {
namespace {

namespace http = boost::beast::http;

constexpr std::size_t kHeaderReadBytes = 8 * 1024;
constexpr std::size_t kBodyReadBytes = 64 * 1024;
/// Bytes of following requests taken in while a handler runs; beyond it the connection is not read, so a client that
/// pipelines more than this is no longer noticed when it leaves.
constexpr std::size_t kMaxPipelinedBytes = 64 * 1024;
constexpr auto kLingerTime = std::chrono::seconds(2);
constexpr auto kHandlerCheckTime = std::chrono::minutes(10);

std::string peer_name(const asio::ip::tcp::socket& socket) {
  boost::system::error_code error;
  const auto endpoint = socket.remote_endpoint(error);
  return error ? std::string("unknown") : fmt::format("{}:{}", endpoint.address().to_string(), endpoint.port());
}

}  // namespace

HttpSession::HttpSession(asio::ip::tcp::socket socket, std::shared_ptr<ServerShared> shared)
    : socket_(std::make_shared<TimedSocket>(std::move(socket))), shared_(std::move(shared)), peer_(peer_name(socket_->socket())) {}

asio::awaitable<void> HttpSession::run() {
  while (!stopping_) {
    auto request = co_await read_head();
    if (!request) break;
    const bool keep = co_await answer(std::move(*request));
    in_request_ = false;
    if (!keep) break;
  }
  if (is_input_unread_ && !gone_)
    co_await linger_and_close();
  else
    socket_->close();
}

asio::awaitable<void> HttpSession::refuse(int status, std::string message) {
  HttpResponse response = error_response(status, message);
  keep_alive_ = false;
  co_await send(std::move(response), false);
  co_await linger_and_close();
}

void HttpSession::drain() {
  asio::post(socket_->socket().get_executor(), [self = shared_from_this()] {
    self->stopping_ = true;
    if (!self->in_request_) self->socket_->close();
  });
}

void HttpSession::abort() {
  asio::post(socket_->socket().get_executor(), [self = shared_from_this()] {
    self->stopping_ = true;
    self->gone_ = true;
    self->cancelled_.cancel();
    self->handler_cancel_.emit(asio::cancellation_type::terminal);
    self->socket_->close();
  });
}

asio::awaitable<IoOutcome> HttpSession::fill(std::size_t count, TimePoint deadline) {
  const std::size_t used = buffer_.size();
  buffer_.resize(used + count);
  const std::span<char> room(buffer_.data() + used, count);
  const IoOutcome outcome = co_await socket_->read_some(room, deadline);
  buffer_.resize(used + outcome.num_bytes);
  co_return outcome;
}

asio::awaitable<std::optional<HttpRequest>> HttpSession::read_head() {
  const HttpServer::Options& options = shared_->options;
  if (buffer_.empty()) {
    buffer_ = std::string();  // an idle connection holds no memory for the last body
    const IoOutcome first = co_await fill(kHeaderReadBytes, Clock::now() + options.idle_timeout);
    if (!first) {
      gone_ = !first.timed_out;
      co_return std::nullopt;
    }
  }
  in_request_ = true;
  cancelled_ = CancelToken();
  keep_alive_ = false;
  extra_headers_ = Fields();

  http::request_parser<http::empty_body> parser;
  parser.header_limit(static_cast<std::uint32_t>(options.max_header_bytes));
  parser.body_limit(boost::none);  // checked once it is known who asks
  const TimePoint deadline = Clock::now() + options.header_timeout;
  for (;;) {
    boost::system::error_code error = http::error::need_more;
    if (!buffer_.empty()) {
      error = {};
      const std::size_t num_parsed = parser.put(asio::buffer(buffer_), error);
      buffer_.erase(0, num_parsed);
    }
    if (parser.is_header_done()) break;
    if (error && error != http::error::need_more) {
      if (error == http::error::header_limit)
        co_await send_malformed(431, fmt::format("the request header is larger than the limit of {} bytes", options.max_header_bytes));
      else
        co_await send_malformed(400, fmt::format("the request is not valid HTTP/1.1: {}", error.message()));
      co_return std::nullopt;
    }
    if (!error) continue;
    const IoOutcome more = co_await fill(kHeaderReadBytes, deadline);
    if (more.timed_out) {
      co_await send_malformed(408, "the request did not arrive in time");
      co_return std::nullopt;
    }
    if (!more) {
      ++shared_->num_malformed;
      gone_ = true;
      co_return std::nullopt;
    }
  }

  const auto message = parser.release();
  keep_alive_ = message.keep_alive();
  HttpRequest request;
  request.method = std::string(message.method_string());
  std::optional<HttpResponse> refusal;
  try {
    Fields headers;
    for (const auto& field : message) headers.add(std::string(field.name_string()), std::string(field.value()));
    fill_request(request, message.version(), std::move(headers), {message.target().data(), message.target().size()});
  } catch (const Error&) {
    refusal = error_response(std::current_exception());
  }
  if (refusal) {
    co_await send_malformed(std::move(*refusal));
    co_return std::nullopt;
  }
  co_return request;
}

void HttpSession::fill_request(HttpRequest& request, unsigned version, Fields headers, std::string_view target) {
  is_http_1_0_ = version < 11;
  framing_ = read_framing(headers, is_http_1_0_);
  RequestTarget where = read_target(request.method, target, headers, is_http_1_0_);
  request.path = std::move(where.path);
  request.query = parse_query(where.query);
  request.host = std::move(where.host);
  request.headers = std::move(headers);
  request.peer = peer_;
  request.cancelled = cancelled_;
  request.stream = this;
}

std::optional<HttpResponse> HttpSession::decide(const HttpRequest& request, HttpServer::Handler& handler) {
  if (shared_->gate) {
    try {
      HttpServer::Verdict verdict = shared_->gate(request);
      extra_headers_ = std::move(verdict.headers);
      if (verdict.refusal) return verdict.refusal;
    } catch (const std::exception&) {
      return error_response(std::current_exception());
    }
  }
  const auto* const methods = find_route(shared_->routes, request.path);
  if (methods == nullptr) return error_response(404, fmt::format("no route {} {}", request.method, request.path));
  auto by_method = methods->find(request.method);
  if (by_method == methods->end() && request.method == "HEAD") by_method = methods->find("GET");
  if (by_method == methods->end()) {
    std::string allowed;
    for (const auto& [name, unused] : *methods) allowed += (allowed.empty() ? "" : ", ") + name;
    HttpResponse response = error_response(405, fmt::format("{} does not accept {}; it accepts {}", request.path, request.method, allowed));
    response.headers.add("Allow", allowed);
    return response;
  }
  const std::string_view expected = request.headers.get("Expect");
  if (!expected.empty() && !iequals(expected, "100-continue"))
    return error_response(417, fmt::format("Expect '{}' is not understood; only 100-continue is", expected.substr(0, 64)));
  handler = by_method->second;
  return std::nullopt;
}

asio::awaitable<std::optional<HttpResponse>> HttpSession::read_body(HttpRequest* request) {
  const HttpServer::Options& options = shared_->options;
  if (!framing_.has_body()) co_return std::nullopt;
  const auto too_large = [&] {
    return error_response(413, fmt::format("the request body is larger than the limit of {} bytes", options.max_body_bytes));
  };
  const auto no_room = [&] {
    return error_response(503, fmt::format("the server holds {} bytes of requests, of {} at most; try again later",
                                           shared_->bodies->num_bytes(), shared_->bodies->max_bytes()));
  };
  if (!framing_.is_chunked && framing_.length > options.max_body_bytes) co_return too_large();
  if (!framing_.is_chunked && !shared_->bodies->has_room(framing_.length)) co_return no_room();
  const TimePoint deadline = Clock::now() + options.body_timeout;
  if (iequals(request->headers.get("Expect"), "100-continue") && buffer_.empty() && !is_http_1_0_) {
    const IoOutcome sent = co_await socket_->write("HTTP/1.1 100 Continue\r\n\r\n", deadline);
    if (!sent) {
      gone_ = true;
      co_return std::nullopt;
    }
  }
  request->body_lease = std::make_shared<BodyLease>(shared_->bodies);
  BodyReader reader(framing_, {options.max_body_bytes, options.max_header_bytes}, request->body_lease);
  for (;;) {
    const std::size_t num_used = reader.feed(buffer_);
    buffer_.erase(0, num_used);
    switch (reader.state()) {
      case BodyReader::State::kDone: request->body = reader.take(); co_return std::nullopt;
      case BodyReader::State::kBad: co_return error_response(400, "the request is not valid HTTP/1.1: the chunked body is malformed");
      case BodyReader::State::kTooLarge: co_return too_large();
      case BodyReader::State::kTooMuch:
        co_return error_response(
            431, fmt::format("the chunk extensions and trailer fields are larger than the limit of {} bytes", options.max_header_bytes));
      case BodyReader::State::kNoRoom: co_return no_room();
      case BodyReader::State::kMore: break;
    }
    const IoOutcome more = co_await fill(kBodyReadBytes, deadline);
    if (more.timed_out) co_return error_response(408, "the request did not arrive in time");
    if (!more) {
      gone_ = true;
      co_return std::nullopt;
    }
  }
}

asio::awaitable<bool> HttpSession::answer(HttpRequest request) {
  const TimePoint began = Clock::now();
  stream_started_ = false;
  stream_finished_ = false;
  stream_status_ = 0;
  const std::string method = request.method;
  const std::string path = request.path;
  HttpServer::Handler handler;
  std::optional<HttpResponse> response = decide(request, handler);
  if (response) {
    is_input_unread_ = framing_.has_body();
  } else {
    auto reading = read_body(&request);
    response = co_await std::move(reading);
    is_input_unread_ = response.has_value();
    if (response || gone_) ++shared_->num_malformed;
  }
  if (is_input_unread_) {
    request.body_lease.reset();
    buffer_ = std::string();
    keep_alive_ = false;
  }
  if (!response && !gone_) {
    ++shared_->num_requests;
    auto call = call_handler(std::move(handler), std::move(request));
    response = co_await std::move(call);
  }
  bool keep = false;
  if (!gone_) keep = co_await send(std::move(*response), method == "HEAD");
  if (shared_->observer) {
    const int status = gone_ ? 499 : stream_started_ ? stream_status_ : response_.status;
    shared_->observer(method, path, status, Clock::now() - began);
  }
  co_return keep && !gone_ && !stopping_;
}

asio::awaitable<HttpResponse> HttpSession::call_handler(HttpServer::Handler handler, HttpRequest request) {
  const auto self = shared_from_this();
  const auto executor = socket_->socket().get_executor();
  // The two flags live in this frame, which outlasts both children: it returns only after both have ended.
  bool is_watching = true;
  bool is_handling = true;
  auto on_watch_end = [self, &is_watching](const std::exception_ptr&) {
    is_watching = false;
    self->child_ended_.notify();
  };
  asio::co_spawn(executor, watch_for_close(), asio::bind_cancellation_slot(watch_cancel_.slot(), std::move(on_watch_end)));

  handler_error_ = nullptr;
  response_ = HttpResponse();
  auto task = handle(std::move(handler), std::move(request));
  auto on_handler_end = [self, &is_handling](const std::exception_ptr& error) {
    if (error && !self->handler_error_) self->handler_error_ = error;
    is_handling = false;
    self->child_ended_.notify();
  };
  asio::co_spawn(executor, std::move(task), asio::bind_cancellation_slot(handler_cancel_.slot(), std::move(on_handler_end)));
  // How long a handler may run is the handler's business; the wait is cut into pieces only to have a deadline.
  while (is_handling) co_await child_ended_.wait_until(Clock::now() + kHandlerCheckTime);
  cancelled_.clear();

  watch_cancel_.emit(asio::cancellation_type::terminal);
  while (is_watching) co_await child_ended_.wait_until(Clock::now() + kHandlerCheckTime);
  if (handler_error_) {
    const Error error = to_error(handler_error_);
    if (error.code() != ErrorCode::kCancelled) ++shared_->num_errors;
    if (http_status(error.code()) == 500) log::error("{}: request from {} failed: {}", shared_->options.name, peer_, error.what());
    response_ = error_response(handler_error_);
    response_.is_streamed = stream_started_;
    if (stream_started_) gone_ = true;  // cut the body short, so that the client sees that it is incomplete
  }
  co_return std::move(response_);
}

asio::awaitable<void> HttpSession::handle(HttpServer::Handler handler, HttpRequest request) {
  try {
    auto call = handler(std::move(request));
    response_ = co_await std::move(call);
  } catch (const std::exception&) {
    handler_error_ = std::current_exception();
  }
}

asio::awaitable<void> HttpSession::watch_for_close() {
  const auto self = shared_from_this();
  char bytes[4096];
  while (buffer_.size() < kMaxPipelinedBytes) {
    const auto [error, num_bytes] = co_await socket_->socket().async_read_some(asio::buffer(bytes), kToken);
    if (error == asio::error::operation_aborted) co_return;
    if (error) {
      client_gone();
      co_return;
    }
    buffer_.append(bytes, num_bytes);
  }
}

void HttpSession::client_gone() {
  if (std::exchange(gone_, true)) return;
  ++shared_->num_disconnected;
  cancelled_.cancel();
  handler_cancel_.emit(asio::cancellation_type::terminal);
}

std::string HttpSession::head(int status, std::string_view content_type, const Fields& headers, std::optional<std::size_t> length) const {
  std::string out = fmt::format("HTTP/1.1 {} {}\r\n", status, status_reason(status));
  if (!content_type.empty()) out += fmt::format("Content-Type: {}\r\n", content_type);
  for (const auto& [name, value] : shared_->options.headers) out += fmt::format("{}: {}\r\n", name, value);
  for (const Fields* fields : {&headers, &extra_headers_})
    for (const auto& [name, value] : *fields) out += fmt::format("{}: {}\r\n", name, value);
  if (status == 204)
    ;  // it has no body, and says nothing of one
  else if (length)
    out += fmt::format("Content-Length: {}\r\n", *length);
  else if (!is_http_1_0_)
    out += "Transfer-Encoding: chunked\r\n";
  out += keep_alive_ && !stopping_ ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n";
  return out;
}

asio::awaitable<bool> HttpSession::send(HttpResponse response, bool is_head) {
  response_.status = response.status;
  if (response.is_streamed) {
    if (stream_started_ && !stream_finished_) {
      try {
        co_await finish();
      } catch (const Error&) {
        co_return false;  // the client left during the last write
      }
    }
    co_return keep_alive_&& stream_finished_;
  }
  const bool keep = keep_alive_ && !stopping_;
  std::string bytes = head(response.status, response.content_type, response.headers, response.body.size());
  if (!is_head) bytes += response.body;
  const IoOutcome outcome = co_await socket_->write(bytes, Clock::now() + shared_->options.write_timeout);
  if (!outcome) gone_ = true;
  co_return outcome&& keep;
}

asio::awaitable<void> HttpSession::send_malformed(int status, std::string message) {
  auto sending = send_malformed(error_response(status, message));
  co_await std::move(sending);
}

asio::awaitable<void> HttpSession::send_malformed(HttpResponse response) {
  ++shared_->num_malformed;
  keep_alive_ = false;
  is_input_unread_ = true;
  co_await send(std::move(response), false);
}

asio::awaitable<void> HttpSession::linger_and_close() {
  // Closing with unread input would reset the connection and could destroy the answer before the client reads it.
  boost::system::error_code ignored;
  socket_->socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  const TimePoint deadline = Clock::now() + kLingerTime;
  char sink[4096];
  const std::span<char> room(sink);
  while (!stopping_) {
    const IoOutcome outcome = co_await socket_->read_some(room, deadline);
    if (!outcome || Clock::now() >= deadline) break;
  }
  socket_->close();
}

asio::awaitable<void> HttpSession::start(int status, std::string content_type, Fields headers) {
  PRL_CHECK(!stream_started_, "ResponseStream::start was called twice");
  stream_started_ = true;
  stream_status_ = status;
  if (is_http_1_0_) keep_alive_ = false;
  const std::string bytes = head(status, content_type, headers, std::nullopt);
  const IoOutcome outcome = co_await socket_->write(bytes, Clock::now() + shared_->options.write_timeout);
  if (!outcome) {
    client_gone();
    fail(ErrorCode::kCancelled, "the client closed its connection");
  }
}

asio::awaitable<void> HttpSession::write(std::string bytes) {
  PRL_CHECK(stream_started_ && !stream_finished_, "ResponseStream::write outside start() and finish()");
  if (bytes.empty()) co_return;  // an empty chunk would end the body
  if (gone_) fail(ErrorCode::kCancelled, "the client closed its connection");
  const std::string framed = is_http_1_0_ ? std::move(bytes) : fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes);
  const IoOutcome outcome = co_await socket_->write(framed, Clock::now() + shared_->options.write_timeout);
  if (!outcome) {
    client_gone();
    fail(ErrorCode::kCancelled, "the client {}", outcome.timed_out ? "did not read its answer in time" : "closed its connection");
  }
}

asio::awaitable<void> HttpSession::finish() {
  if (std::exchange(stream_finished_, true) || is_http_1_0_) co_return;
  const IoOutcome outcome = co_await socket_->write("0\r\n\r\n", Clock::now() + shared_->options.write_timeout);
  if (!outcome) {
    client_gone();
    fail(ErrorCode::kCancelled, "the client closed its connection");
  }
}

}  // namespace prl::net::detail
