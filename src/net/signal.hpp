#pragma once

#include <memory>

#include "net/asio.hpp"

namespace prl::net {

/// Auto-reset event from any thread to one coroutine: the bridge between compute threads and I/O coroutines.
/// A notification that arrives while nobody waits is kept (once). Copies share one state.
class Signal {
 public:
  Signal();
  /// Wakes the waiter, or lets the next wait return at once. Any thread; never blocks on the waiter.
  void notify() const noexcept;
  /// True if notified, false if `deadline` passed first. One waiter at a time. Any executor, strand or not.
  /// Error{kCancelled} if the awaiting coroutine was cancelled.
  asio::awaitable<bool> wait_until(TimePoint deadline) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace prl::net
