#include "net/http_server.hpp"

#include <fcntl.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>

#include <condition_variable>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "base/log.hpp"
#include "net/deadline.hpp"
#include "net/detail/completion.hpp"
#include "net/detail/http_session.hpp"
#include "net/errors.hpp"
#include "net/io_runtime.hpp"
#include "net/port_owner.hpp"
#include "net/strand.hpp"

namespace prl::net {
namespace {

/// Connections beyond max_connections that may be told so at the same time; the rest is closed without a word.
constexpr std::size_t kMaxRefusing = 256;
/// Pause of the accept loop when the process has no file descriptors left.
constexpr auto kAcceptPause = std::chrono::milliseconds(50);
constexpr auto kStopTime = std::chrono::seconds(5);

}  // namespace

struct HttpServer::Impl {
  explicit Impl(Options options) : shared(std::make_shared<detail::ServerShared>()) {
    shared->options = std::move(options);
    shared->bodies = std::make_shared<BodyBudget>(shared->options.max_held_body_bytes);
  }

  std::shared_ptr<detail::ServerShared> shared;
  std::unique_ptr<IoRuntime> runtime;
  std::unique_ptr<asio::ip::tcp::acceptor> acceptor;  // on a strand of its own
  int port = 0;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::unordered_set<std::shared_ptr<detail::HttpSession>> sessions;  // guarded by mutex
  std::size_t num_refusing = 0;
  std::int64_t num_accepted = 0;
  std::int64_t num_refused = 0;
  bool is_accepting = false;
  bool is_stopping = false;

  asio::awaitable<void> accept_loop();
  void begin(asio::ip::tcp::socket socket);
  void end(const std::shared_ptr<detail::HttpSession>& session, bool was_refused, const std::exception_ptr& exception);
  bool wait_for_sessions(std::chrono::milliseconds timeout);
};

asio::awaitable<void> HttpServer::Impl::accept_loop() {
  while (acceptor->is_open()) {
    const asio::any_io_executor strand = new_strand(runtime->executor());
    auto [error, socket] = co_await acceptor->async_accept(strand, detail::kToken);
    if (!error) (void)::fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
    if (!error) {
      begin(std::move(socket));
      continue;
    }
    if (error == asio::error::operation_aborted || !acceptor->is_open()) co_return;
    // No descriptors or memory, or a client that left at once: go on, but do not spin.
    log::warning("{}: cannot accept a connection: {}", shared->options.name, error.message());
    co_await sleep_for(kAcceptPause);
  }
}

void HttpServer::Impl::begin(asio::ip::tcp::socket socket) {
  boost::system::error_code ignored;
  socket.set_option(asio::ip::tcp::no_delay(true), ignored);
  const auto executor = socket.get_executor();
  bool refused = false;
  std::shared_ptr<detail::HttpSession> session;
  {
    std::lock_guard lock(mutex);
    if (is_stopping) return;
    ++num_accepted;
    if (sessions.size() - num_refusing >= shared->options.max_connections) {
      ++num_refused;
      if (num_refusing >= kMaxRefusing) return;
      ++num_refusing;
      refused = true;
    }
    session = std::make_shared<detail::HttpSession>(std::move(socket), shared);
    sessions.insert(session);
  }
  auto task = refused ? session->refuse(503, fmt::format("the server has {} open connections, its limit; try again later",
                                                         shared->options.max_connections))
                      : session->run();
  auto done = [this, session, refused](const std::exception_ptr& exception) { end(session, refused, exception); };
  asio::co_spawn(executor, std::move(task), std::move(done));
}

void HttpServer::Impl::end(const std::shared_ptr<detail::HttpSession>& session, bool was_refused, const std::exception_ptr& exception) {
  if (exception) log::error("{}: a connection ended badly: {}", shared->options.name, to_error(exception).what());
  std::lock_guard lock(mutex);
  if (was_refused) --num_refusing;
  sessions.erase(session);
  changed.notify_all();
}

bool HttpServer::Impl::wait_for_sessions(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex);
  return changed.wait_for(lock, timeout, [&] { return sessions.empty() && !is_accepting; });
}

HttpServer::HttpServer(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {}

HttpServer::~HttpServer() { stop(std::chrono::milliseconds(0)); }

void HttpServer::route(std::string method, std::string path, Handler handler) {
  PRL_CHECK(impl_->acceptor == nullptr, "routes are added before start()");
  impl_->shared->routes[std::move(path)][std::move(method)] = std::move(handler);
}

void HttpServer::set_gate(Gate gate) { impl_->shared->gate = std::move(gate); }

void HttpServer::on_finished(
    std::function<void(const std::string& method, const std::string& path, int status, Clock::duration)> observer) {
  impl_->shared->observer = std::move(observer);
}

void HttpServer::start() {
  PRL_CHECK(impl_->acceptor == nullptr, "start() is called once");
  const Options& options = impl_->shared->options;
  asio::io_context lookup;
  asio::ip::tcp::resolver resolver(lookup);
  boost::system::error_code error;
  const auto found = resolver.resolve(options.host, std::to_string(options.port), asio::ip::tcp::resolver::passive, error);
  if (error || found.empty())
    fail(ErrorCode::kIo, "cannot listen on {}:{}: the host is not known ({})", options.host, options.port, error.message());
  const asio::ip::tcp::endpoint endpoint = found.begin()->endpoint();

  auto runtime = std::make_unique<IoRuntime>(options.num_io_threads, options.name);
  auto acceptor = std::make_unique<asio::ip::tcp::acceptor>(asio::any_io_executor(new_strand(runtime->executor())));
  const char* step = "open a socket for";
  acceptor->open(endpoint.protocol(), error);
  // Programs started by this one must not hold the port after it.
  if (!error) (void)::fcntl(acceptor->native_handle(), F_SETFD, FD_CLOEXEC);
  if (!error) acceptor->set_option(asio::socket_base::reuse_address(true), error);
  if (!error) {
    step = "bind to";
    acceptor->bind(endpoint, error);
  }
  if (!error) {
    step = "listen on";
    acceptor->listen(options.backlog, error);
  }
  if (error) {
    const std::string hint = error == asio::error::address_in_use ? port_taken_hint(options.port) : std::string();
    fail(ErrorCode::kIo, "cannot {} {}:{}: {}{}", step, options.host, options.port, error.message(), hint);
  }
  impl_->port = acceptor->local_endpoint().port();
  impl_->runtime = std::move(runtime);
  impl_->acceptor = std::move(acceptor);
  impl_->is_accepting = true;
  auto done = [impl = impl_.get()](const std::exception_ptr& exception) {
    if (exception) log::error("{}: the accept loop ended: {}", impl->shared->options.name, to_error(exception).what());
    std::lock_guard lock(impl->mutex);
    impl->is_accepting = false;
    impl->changed.notify_all();
  };
  asio::co_spawn(impl_->acceptor->get_executor(), impl_->accept_loop(), std::move(done));
}

int HttpServer::port() const noexcept { return impl_->port; }

asio::any_io_executor HttpServer::executor() const {
  PRL_CHECK(impl_->runtime != nullptr, "executor() is known after start()");
  return impl_->runtime->executor();
}

void HttpServer::stop(std::chrono::milliseconds drain, const std::function<void()>& end_early, std::chrono::milliseconds grace) {
  if (!impl_->runtime) return;
  std::unordered_set<std::shared_ptr<detail::HttpSession>> sessions;
  {
    std::lock_guard lock(impl_->mutex);
    if (std::exchange(impl_->is_stopping, true)) return;
    sessions = impl_->sessions;
  }
  asio::post(impl_->acceptor->get_executor(), [impl = impl_.get()] {
    boost::system::error_code ignored;
    impl->acceptor->close(ignored);
  });
  for (const auto& session : sessions) session->drain();
  bool has_ended = impl_->wait_for_sessions(drain);
  if (!has_ended && end_early) {
    end_early();
    has_ended = impl_->wait_for_sessions(grace);
  }
  if (!has_ended) {
    for (const auto& session : sessions) session->abort();
    if (!impl_->wait_for_sessions(kStopTime))
      log::warning("{}: some requests did not end when they were cancelled", impl_->shared->options.name);
  }
  sessions.clear();
  impl_->runtime->stop(kStopTime);
  {
    std::lock_guard lock(impl_->mutex);
    impl_->sessions.clear();
  }
  impl_->acceptor.reset();
  impl_->runtime.reset();
}

HttpServer::Stats HttpServer::stats() const {
  Stats stats;
  {
    std::lock_guard lock(impl_->mutex);
    stats.num_connections = impl_->sessions.size();
    stats.num_accepted = impl_->num_accepted;
    stats.num_refused = impl_->num_refused;
  }
  stats.num_held_body_bytes = impl_->shared->bodies->num_bytes();
  stats.num_requests = impl_->shared->num_requests;
  stats.num_disconnected = impl_->shared->num_disconnected;
  stats.num_malformed = impl_->shared->num_malformed;
  stats.num_errors = impl_->shared->num_errors;
  return stats;
}

}  // namespace prl::net
