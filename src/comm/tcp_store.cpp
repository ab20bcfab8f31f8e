// The store between processes. Little-endian frames over one connection per client, a request and its answer at a time:
//   request  u8 kind ('S' set, 'G' get, 'C' compare and set), u32 bytes of key, of value, of expected (kAbsent: none), then these
//   answer   u8 1 if there is a value, u32 bytes, the value
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/hosts.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/store.hpp"

namespace prl::comm {

namespace {

using Clock = std::chrono::steady_clock;
static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

/// How long a server that was lost is looked for: at first, and at each later call, which leaves time for an answer from another machine.
constexpr std::chrono::milliseconds kReconnect{2000}, kReconnectAgain{100};
constexpr std::uint32_t kAbsent = 0xffffffffu;
constexpr std::size_t kRequestHead = 1 + 3 * sizeof(std::uint32_t), kAnswerHead = 1 + sizeof(std::uint32_t);

struct FreeAddresses {
  void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses look_up(const std::string& host, int port, bool is_server) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = is_server ? AI_PASSIVE : 0;
  addrinfo* list = nullptr;
  const int result = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (result != 0) fail(ErrorCode::kUnavailable, "[store] cannot resolve '{}': {}", host, ::gai_strerror(result));
  return Addresses(list);
}

void append(std::string& out, std::uint32_t number) { out.append(reinterpret_cast<const char*>(&number), sizeof number); }
std::uint32_t number_at(const char* bytes) {
  std::uint32_t number = 0;
  std::memcpy(&number, bytes, sizeof number);
  return number;
}

void send_at_once(int fd) {
  const int on = 1;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

class TcpStore final : public Store {
 public:
  TcpStore(std::string host, int port, std::chrono::milliseconds timeout) : host_(std::move(host)), port_(port), timeout_(timeout) {
    const std::lock_guard lock(mutex_);
    connect(Clock::now() + timeout_);
  }
  void set(const std::string& key, std::string_view value) override { (void)ask('S', key, value, std::nullopt); }
  std::optional<std::string> get(const std::string& key) override { return ask('G', key, {}, std::nullopt); }
  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected, std::string_view value) override {
    return ask('C', key, value, expected).value_or(std::string());
  }

 private:
  std::string name() const { return fmt::format("the store at {}:{}", host_, port_); }

  void connect(Clock::time_point deadline) {
    std::string reason;
    Waiting waiting({.who = fmt::format("process {}", ::getpid()),
                     .what = name() + " to accept its connection",
                     .limit = deadline - Clock::now(),
                     .detail = [&reason] { return reason; }});
    for (;; waiting.check()) {
      const Addresses addresses = look_up(host_, port_, /*is_server=*/false);
      for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
        Fd socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
        if (!socket.is_open()) continue;
        int error = ::connect(socket.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
        if (error == EINPROGRESS && is_ready(socket.get(), POLLOUT, deadline, waiting)) {
          socklen_t size = sizeof error;
          if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
        }
        if (error == 0 && is_connected_to_itself(socket.get())) error = ECONNREFUSED;
        if (error == 0) {
          send_at_once(socket.get());
          socket_ = std::move(socket);
          return;
        }
        reason = std::strerror(error);
      }
      if (Clock::now() >= deadline) fail(ErrorCode::kUnavailable, "[store] cannot connect to {}: {}", name(), reason);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  /// A server that was there is back soon or is gone for good, with the rank or launcher that kept it: who has lost a peer too asks it
  /// several things, and must not wait for each.
  void reconnect() {
    const auto patience = std::exchange(is_gone_, true) ? kReconnectAgain : kReconnect;
    connect(Clock::now() + std::min(timeout_, patience));
    is_gone_ = false;
  }

  static bool is_ready(int fd, short events, Clock::time_point deadline, Waiting& waiting) {
    for (;; waiting.check()) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      pollfd entry{fd, events, 0};
      const int n = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000)));
      if (n > 0) return true;
      if (left <= 0) return false;
    }
  }

  /// Calls `step(done)` until it has moved `bytes` in all.
  template <typename Step>
  void move_all(std::size_t bytes, short events, Clock::time_point deadline, Step step) {
    Waiting waiting({.who = fmt::format("process {}", ::getpid()), .what = name() + " to answer", .limit = deadline - Clock::now()});
    for (std::size_t done = 0; done < bytes;) {
      if (!is_ready(socket_.get(), events, deadline, waiting))
        lost(fmt::format("no answer in {:.1f} s", std::chrono::duration<double>(timeout_).count()));
      const ssize_t n = step(done);
      if (n > 0)
        done += static_cast<std::size_t>(n);
      else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        lost(n == 0 ? "the connection was closed" : std::strerror(errno));
    }
  }
  [[noreturn]] void lost(const std::string& reason) {
    socket_.close();
    fail(ErrorCode::kUnavailable, "[store] {} is lost: {}", name(), reason);
  }

  std::optional<std::string> ask(char kind, const std::string& key, std::string_view value, const std::optional<std::string>& expected) {
    check(key, value);
    if (expected) check(key, *expected);
    std::string request(1, kind);
    append(request, static_cast<std::uint32_t>(key.size()));
    append(request, static_cast<std::uint32_t>(value.size()));
    append(request, expected ? static_cast<std::uint32_t>(expected->size()) : kAbsent);
    request.append(key).append(value).append(expected.value_or(std::string()));

    const std::lock_guard lock(mutex_);
    const auto deadline = Clock::now() + timeout_;
    if (!socket_.is_open()) reconnect();
    const int fd = socket_.get();
    move_all(request.size(), POLLOUT, deadline,
             [&](std::size_t done) { return ::send(fd, request.data() + done, request.size() - done, MSG_NOSIGNAL); });
    char head[kAnswerHead];
    move_all(sizeof head, POLLIN, deadline, [&](std::size_t done) { return ::recv(fd, head + done, sizeof head - done, 0); });
    if (head[0] != '\0' && head[0] != '\1') lost("what answered is no store");
    std::string answer(number_at(head + 1), '\0');
    if (answer.size() > kMaxValueBytes) lost(fmt::format("an answer of {} bytes", answer.size()));
    move_all(answer.size(), POLLIN, deadline, [&](std::size_t done) { return ::recv(fd, answer.data() + done, answer.size() - done, 0); });
    return head[0] != 0 ? std::optional(std::move(answer)) : std::nullopt;
  }

  std::string host_;
  int port_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  Fd socket_;
  bool is_gone_ = false;  ///< it was lost, and could not be reached again
};

}  // namespace

std::shared_ptr<Store> make_tcp_store(const std::string& host, int port, std::chrono::milliseconds timeout) {
  return std::make_shared<TcpStore>(host, port, timeout);
}

struct StoreServer::Impl {
  struct Client {
    Fd socket;
    std::string in, out;
  };

  void serve() {
    std::vector<pollfd> polled;
    for (;;) {
      polled.assign({{wake.get(), POLLIN, 0}, {listener.get(), static_cast<short>(clients.size() < kMaxClients ? POLLIN : 0), 0}});
      for (const Client& client : clients)
        polled.push_back({client.socket.get(), static_cast<short>(client.out.empty() ? POLLIN : POLLOUT), 0});
      if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
      if (polled[0].revents != 0) return;
      for (std::size_t i = 0; i < clients.size(); ++i)
        if (polled[i + 2].revents != 0 && !serve(clients[i])) clients[i].socket.close();
      std::erase_if(clients, [](const Client& client) { return !client.socket.is_open(); });
      if (polled[1].revents != 0) accept();
    }
  }

  void accept() {
    Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) return;
    send_at_once(socket.get());
    clients.push_back({std::move(socket), {}, {}});
  }

  /// False if the client is gone or talks nonsense.
  bool serve(Client& client) {
    if (!client.out.empty()) {
      const ssize_t n = ::send(client.socket.get(), client.out.data(), client.out.size(), MSG_NOSIGNAL);
      if (n > 0) client.out.erase(0, static_cast<std::size_t>(n));
      return n > 0 || errno == EAGAIN || errno == EINTR;
    }
    char buffer[1 << 16];
    const ssize_t n = ::recv(client.socket.get(), buffer, sizeof buffer, 0);
    if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
    client.in.append(buffer, static_cast<std::size_t>(n));
    if (client.in.size() < kRequestHead) return true;
    const char* at = client.in.data() + 1;
    const std::uint32_t key_bytes = number_at(at), value_bytes = number_at(at + 4), expected_raw = number_at(at + 8);
    const std::uint32_t expected_bytes = expected_raw == kAbsent ? 0 : expected_raw;
    if (key_bytes > Store::kMaxKeyBytes || value_bytes > Store::kMaxValueBytes || expected_bytes > Store::kMaxValueBytes) return false;
    const std::size_t total = kRequestHead + key_bytes + value_bytes + expected_bytes;
    if (client.in.size() < total) return true;
    const std::string key = client.in.substr(kRequestHead, key_bytes), value = client.in.substr(kRequestHead + key_bytes, value_bytes);
    std::optional<std::string> expected;
    if (expected_raw != kAbsent) expected = client.in.substr(kRequestHead + key_bytes + value_bytes, expected_bytes);
    const char kind = client.in[0];
    client.in.erase(0, total);
    try {
      return answer(client, kind, key, value, expected);
    } catch (const Error&) {
      return false;  // a key that no client of ours sends
    }
  }

  bool answer(Client& client, char kind, const std::string& key, const std::string& value, const std::optional<std::string>& expected) {
    std::optional<std::string> held;
    if (kind == 'S')
      store->set(key, value);
    else if (kind == 'G')
      held = store->get(key);
    else if (kind == 'C')
      held = store->compare_and_set(key, expected, value);
    else
      return false;
    client.out.assign(1, held ? '\1' : '\0');
    append(client.out, held ? static_cast<std::uint32_t>(held->size()) : 0);
    if (held) client.out += *held;
    return true;
  }

  std::string host;
  int port = 0;
  Fd listener, wake;
  std::shared_ptr<Store> store = make_memory_store();
  std::vector<Client> clients;
  std::jthread thread;
};

StoreServer::StoreServer(const std::string& host, int port) : impl_(std::make_unique<Impl>()) {
  const Addresses addresses = look_up(host, port, /*is_server=*/true);
  impl_->host = host;
  int error = 0;
  for (const addrinfo* a = addresses.get(); a != nullptr && !impl_->listener.is_open(); a = a->ai_next) {
    Fd socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    const int on = 1;
    if (socket.is_open()) (void)::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (socket.is_open() && ::bind(socket.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(socket.get(), SOMAXCONN) == 0)
      impl_->listener = std::move(socket);
    else
      error = errno;
  }
  if (!impl_->listener.is_open()) fail(ErrorCode::kIo, "[store] cannot listen on {}:{}: {}", host, port, std::strerror(error));
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  (void)::getsockname(impl_->listener.get(), reinterpret_cast<sockaddr*>(&bound), &size);
  impl_->port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                                  : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
  impl_->wake = Fd(::eventfd(0, EFD_CLOEXEC));
  if (!impl_->wake.is_open()) fail(ErrorCode::kIo, "[store] eventfd: {}", std::strerror(errno));
  impl_->thread = std::jthread([impl = impl_.get()] { impl->serve(); });
}

StoreServer::~StoreServer() {
  const std::uint64_t one = 1;
  (void)!::write(impl_->wake.get(), &one, sizeof one);
  impl_->thread.join();
}

int StoreServer::port() const noexcept { return impl_->port; }
std::string StoreServer::address() const {
  return impl_->host.find(':') == std::string::npos ? fmt::format("tcp://{}:{}", impl_->host, impl_->port)
                                                    : fmt::format("tcp://[{}]:{}", impl_->host, impl_->port);
}

}  // namespace prl::comm
