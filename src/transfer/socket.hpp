#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <span>
#include <string>

#include "base/fd.hpp"

namespace prl::transfer {

using Clock = std::chrono::steady_clock;

/// A TCP connection whose every operation has a deadline. One thread at a time, except stop().
/// Errors  {kUnavailable}: closed by the other side, refused, or stopped; {kDeadline}; both name the other side.
class Socket {
 public:
  /// `name`: the other side, for messages.
  Socket(Fd fd, std::string name);
  /// Resolves names, which the deadline does not bound.
  static Socket connect(const std::string& host, int port, Clock::time_point deadline);

  void read(std::span<std::byte> bytes, Clock::time_point deadline);
  void write(std::span<const std::byte> bytes, Clock::time_point deadline);
  /// False if nothing came by then.
  bool wait_readable(Clock::time_point deadline);
  /// Ends all operations. Any thread.
  void stop() noexcept;
  const std::string& name() const noexcept { return name_; }

 private:
  bool is_ready(short events, Clock::time_point deadline);
  Fd fd_;
  std::string name_;
};

/// Takes connections.
class Listener {
 public:
  /// `port` 0: any free one. Error{kIo} naming host and port.
  Listener(const std::string& host, int port);
  int port() const noexcept { return port_; }
  /// The next connection; one that is not open if none came by then or the listener was stopped.
  Fd accept(Clock::time_point deadline, std::string* peer);
  /// Ends accept(), now and later. Any thread.
  void stop() noexcept;

 private:
  Fd fd_;
  int port_ = 0;
};

}  // namespace prl::transfer
