#include "transfer/socket.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "base/hosts.hpp"
#include "net/port_owner.hpp"

namespace prl::transfer {
namespace {

struct FreeList {
  void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, FreeList>;

AddressList addresses_of(const std::string& host, int port, bool is_server) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = is_server ? AI_PASSIVE : 0;
  addrinfo* list = nullptr;
  const int result = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (result != 0) fail(ErrorCode::kUnavailable, "[kv transfer] cannot resolve '{}': {}", host, ::gai_strerror(result));
  return AddressList(list);
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

/// True if one of `events` came by then.
bool poll_one(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int n = ::poll(&entry, 1, milliseconds_until(deadline));
    if (n > 0) return true;
    if (Clock::now() >= deadline) return false;
  }
}

}  // namespace

Socket::Socket(Fd fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {
  const int on = 1;
  (void)::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

Socket Socket::connect(const std::string& host, int port, Clock::time_point deadline) {
  const std::string name = fmt::format("{}:{}", host, port);
  std::string reason = "it has no address";
  const AddressList list = addresses_of(host, port, /*is_server=*/false);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Fd fd(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    if (!fd.is_open()) continue;
    int error = ::connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      socklen_t size = sizeof error;
      if (!poll_one(fd.get(), POLLOUT, deadline)) fail(ErrorCode::kDeadline, "[kv transfer] waited for {} to take a connection", name);
      if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    }
    if (error == 0 && is_connected_to_itself(fd.get())) error = ECONNREFUSED;
    if (error == 0) return Socket(std::move(fd), name);
    reason = std::strerror(error);
  }
  fail(ErrorCode::kUnavailable, "[kv transfer] cannot connect to {}: {}", name, reason);
}

bool Socket::is_ready(short events, Clock::time_point deadline) { return poll_one(fd_.get(), events, deadline); }

bool Socket::wait_readable(Clock::time_point deadline) { return is_ready(POLLIN, deadline); }

void Socket::read(std::span<std::byte> bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t n = ::recv(fd_.get(), bytes.data(), bytes.size(), 0);
    if (n > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(n));
      // A peer that sends a byte now and then is late, too.
      if (!bytes.empty() && Clock::now() >= deadline) fail(ErrorCode::kDeadline, "[kv transfer] {} sends too slowly", name_);
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (!is_ready(POLLIN, deadline)) fail(ErrorCode::kDeadline, "[kv transfer] waited for {} to send", name_);
    } else {
      fail(ErrorCode::kUnavailable, "[kv transfer] {} is lost: {}", name_, n == 0 ? "it closed the connection" : std::strerror(errno));
    }
  }
}

void Socket::write(std::span<const std::byte> bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(n));
      if (!bytes.empty() && Clock::now() >= deadline) fail(ErrorCode::kDeadline, "[kv transfer] {} takes bytes too slowly", name_);
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (!is_ready(POLLOUT, deadline)) fail(ErrorCode::kDeadline, "[kv transfer] waited for {} to take bytes", name_);
    } else {
      fail(ErrorCode::kUnavailable, "[kv transfer] {} is lost: {}", name_, std::strerror(errno));
    }
  }
}

void Socket::stop() noexcept { (void)::shutdown(fd_.get(), SHUT_RDWR); }

Listener::Listener(const std::string& host, int port) {
  std::string reason = "it has no address";
  bool is_taken = false;
  const AddressList list = addresses_of(host, port, /*is_server=*/true);
  for (const addrinfo* a = list.get(); a != nullptr && !fd_.is_open(); a = a->ai_next) {
    Fd fd(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    const int on = 1;
    if (fd.is_open()) (void)::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd.is_open() && ::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(fd.get(), 64) == 0) {
      fd_ = std::move(fd);
    } else {
      is_taken = errno == EADDRINUSE;
      reason = std::strerror(errno);
    }
  }
  if (!fd_.is_open())
    fail(ErrorCode::kIo, "kv_transfer.port: cannot listen on {}:{}: {}{}", host, port, reason, is_taken ? net::port_taken_hint(port) : "");
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0)
    fail(ErrorCode::kIo, "[kv transfer] cannot tell the own port: {}", std::strerror(errno));
  port_ = ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&own)->sin6_port
                                          : reinterpret_cast<const sockaddr_in*>(&own)->sin_port);
}

void Listener::stop() noexcept { (void)::shutdown(fd_.get(), SHUT_RDWR); }

Fd Listener::accept(Clock::time_point deadline, std::string* peer) {
  if (!poll_one(fd_.get(), POLLIN, deadline)) return Fd();
  sockaddr_storage other{};
  socklen_t size = sizeof other;
  Fd fd(::accept4(fd_.get(), reinterpret_cast<sockaddr*>(&other), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (fd.is_open() && ::getnameinfo(reinterpret_cast<sockaddr*>(&other), size, host.data(), host.size(), port.data(), port.size(),
                                    NI_NUMERICHOST | NI_NUMERICSERV) == 0)
    *peer = fmt::format("{}:{}", host.data(), port.data());
  return fd;
}

}  // namespace prl::transfer
