#include "net/detail/client_connection.hpp"

#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#ifdef PRL_HAVE_OPENSSL
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/host_name_verification.hpp>
#include <boost/asio/ssl/stream.hpp>
#endif

#include <utility>

#include "net/deadline.hpp"
#include "net/detail/completion.hpp"
#include "net/strand.hpp"

namespace prl::net::detail {
namespace {

namespace http = boost::beast::http;
constexpr std::size_t kReadBytes = 32 * 1024;
constexpr std::uint32_t kMaxHeaderBytes = 256 * 1024;

asio::awaitable<asio::ip::tcp::resolver::results_type> resolve(std::string host, int port) {
  asio::ip::tcp::resolver resolver(co_await asio::this_coro::executor);
  const std::string service = std::to_string(port);
  co_return co_await resolver.async_resolve(host, service, asio::use_awaitable);
}

}  // namespace

#ifdef PRL_HAVE_OPENSSL
struct TlsContext {
  asio::ssl::context context{asio::ssl::context::tls_client};
};
struct ClientConnection::Tls {
  Tls(std::shared_ptr<TlsContext> shared, asio::ip::tcp::socket& socket) : context(std::move(shared)), stream(socket, context->context) {}
  std::shared_ptr<TlsContext> context;
  asio::ssl::stream<asio::ip::tcp::socket&> stream;
};
std::shared_ptr<TlsContext> make_tls_context() {
  auto context = std::make_shared<TlsContext>();
  context->context.set_default_verify_paths();
  context->context.set_verify_mode(asio::ssl::verify_peer);
  return context;
}
#else
struct TlsContext {};
struct ClientConnection::Tls {};
std::shared_ptr<TlsContext> make_tls_context() {
  fail(ErrorCode::kNotImplemented, "https: this build has no TLS; install libssl-dev and build again, or use http");
}
#endif

struct ClientConnection::Parser {
  http::response_parser<http::string_body> parser;
};

ClientConnection::ClientConnection(asio::any_io_executor executor) : strand_(new_strand(executor)) {
  socket_ = std::make_shared<TimedSocket>(asio::ip::tcp::socket(strand_));
}

ClientConnection::~ClientConnection() = default;

void ClientConnection::fail_io(const IoOutcome& outcome, std::string_view doing) const {
  if (outcome.timed_out) fail(ErrorCode::kDeadline, "{}: {} did not end before its deadline", name_, doing);
  if (outcome.error == asio::error::operation_aborted) fail(ErrorCode::kCancelled, "{}: {} was cancelled", name_, doing);
  fail(ErrorCode::kUnavailable, "{}: {} failed: {}", name_, doing, outcome.error.message());
}

asio::awaitable<void> ClientConnection::open(Url url, std::shared_ptr<TlsContext> tls, TimePoint deadline) {
  const auto self = shared_from_this();
  name_ = fmt::format("{}:{}", url.host, url.port);
  std::vector<asio::ip::tcp::endpoint> endpoints;
  boost::system::error_code not_literal;
  const auto address = asio::ip::make_address(url.host, not_literal);
  if (!not_literal) {
    endpoints.emplace_back(address, static_cast<unsigned short>(url.port));
  } else {
    try {
      auto lookup = resolve(url.host, url.port);
      auto bounded = with_deadline(std::move(lookup), deadline, fmt::format("the address of {}", url.host));
      const auto results = co_await std::move(bounded);
      for (const auto& entry : results) endpoints.push_back(entry.endpoint());
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kIo) throw;
      fail(ErrorCode::kUnavailable, "{}: the host name is not known: {}", name_, error.what());
    }
  }
  IoOutcome outcome{asio::error::host_not_found, 0, false};
  for (const auto& endpoint : endpoints) {
    socket_->close();
    outcome = co_await socket_->connect(endpoint, deadline);
    if (outcome || outcome.timed_out || outcome.error == asio::error::operation_aborted) break;
  }
  if (!outcome) fail_io(outcome, "connecting");
#ifdef PRL_HAVE_OPENSSL
  if (tls) {
    tls_ = std::make_unique<Tls>(std::move(tls), socket_->socket());
    tls_->stream.set_verify_callback(asio::ssl::host_name_verification(url.host));
    SSL_set_tlsext_host_name(tls_->stream.native_handle(), url.host.c_str());
    socket_->arm(deadline);
    const auto [error] = co_await tls_->stream.async_handshake(asio::ssl::stream_base::client, kToken);
    const IoOutcome handshake{error, 0, socket_->disarm()};
    if (!handshake) fail_io(handshake, "the TLS handshake");
  }
#endif
}

asio::awaitable<void> ClientConnection::send(std::string bytes, TimePoint deadline) {
  const auto self = shared_from_this();
  has_reply_bytes_ = false;
  parser_.reset();
  IoOutcome outcome;
#ifdef PRL_HAVE_OPENSSL
  if (tls_) {
    socket_->arm(deadline);
    const auto [error, num_bytes] = co_await asio::async_write(tls_->stream, asio::buffer(bytes), kToken);
    outcome = IoOutcome{error, num_bytes, socket_->disarm() && error};
  } else {
    outcome = co_await socket_->write(bytes, deadline);
  }
#else
  outcome = co_await socket_->write(bytes, deadline);
#endif
  if (!outcome) fail_io(outcome, "sending the request");
}

asio::awaitable<IoOutcome> ClientConnection::read_some(std::span<char> buffer, TimePoint deadline) {
#ifdef PRL_HAVE_OPENSSL
  if (tls_) {
    socket_->arm(deadline);
    const auto [error, num_bytes] = co_await tls_->stream.async_read_some(asio::buffer(buffer.data(), buffer.size()), kToken);
    co_return IoOutcome{error, num_bytes, socket_->disarm() && error};
  }
#endif
  auto read = socket_->read_some(buffer, deadline);
  co_return co_await std::move(read);
}

asio::awaitable<void> ClientConnection::advance(bool until_header, TimePoint deadline) {
  auto& parser = parser_->parser;
  for (;;) {
    boost::system::error_code error = http::error::need_more;
    if (!buffer_.empty()) {
      error = {};
      const std::size_t num_parsed = parser.put(asio::buffer(buffer_), error);
      buffer_.erase(0, num_parsed);
    }
    if (error && error != http::error::need_more) {
      if (error == http::error::body_limit) fail(ErrorCode::kCorrupt, "{}: the reply is larger than the limit of this client", name_);
      fail(ErrorCode::kCorrupt, "{}: the reply is not valid HTTP: {}", name_, error.message());
    }
    if (until_header ? parser.is_header_done() : (parser.is_done() || !parser.get().body().empty())) co_return;
    if (!error) continue;
    const std::size_t used = buffer_.size();
    buffer_.resize(used + kReadBytes);
    const std::span<char> room(buffer_.data() + used, kReadBytes);
    const IoOutcome outcome = co_await read_some(room, deadline);
    buffer_.resize(used + outcome.num_bytes);
    if (outcome.num_bytes > 0) has_reply_bytes_ = true;
    if (outcome) continue;
    if (outcome.error == asio::error::eof && parser.is_header_done() && parser.need_eof()) {
      boost::system::error_code ignored;
      parser.put_eof(ignored);
      co_return;
    }
    fail_io(outcome, until_header ? "waiting for the reply" : "reading the reply");
  }
}

asio::awaitable<HttpReply> ClientConnection::read_head(bool is_head_request, std::size_t max_body_bytes, TimePoint deadline) {
  const auto self = shared_from_this();
  for (;;) {
    parser_ = std::make_unique<Parser>();
    parser_->parser.header_limit(kMaxHeaderBytes);
    parser_->parser.body_limit(max_body_bytes);
    parser_->parser.skip(is_head_request);
    auto reading = advance(true, deadline);
    co_await std::move(reading);
    const auto& message = parser_->parser.get();
    if (message.result_int() / 100 == 1) continue;
    parser_->parser.eager(true);
    HttpReply reply;
    reply.status = static_cast<int>(message.result_int());
    for (const auto& field : message) reply.headers.add(std::string(field.name_string()), std::string(field.value()));
    co_return reply;
  }
}

asio::awaitable<std::string> ClientConnection::read_piece(TimePoint deadline) {
  const auto self = shared_from_this();
  auto& parser = parser_->parser;
  if (parser.get().body().empty() && !parser.is_done()) {
    auto reading = advance(false, deadline);
    co_await std::move(reading);
  }
  co_return std::exchange(parser.get().body(), std::string());
}

bool ClientConnection::is_reusable() const noexcept {
  return parser_ && parser_->parser.is_done() && parser_->parser.keep_alive() && buffer_.empty() && socket_->socket().is_open();
}

bool ClientConnection::is_stale() {
  char byte = 0;
  const ssize_t num_bytes = ::recv(socket_->socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return !(num_bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
}

void ClientConnection::close() {
  asio::post(strand_, [self = shared_from_this()] { self->socket_->close(); });
}

}  // namespace prl::net::detail
