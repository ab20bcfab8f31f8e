#pragma once

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"

namespace prl::comm {

/// How often a rank that waits asks whose connections are closed. A rank that has finished may be gone before the others have read what it
/// sent: the second answer counts.
inline constexpr std::chrono::milliseconds kWatchInterval{500};

/// Whether a rank has died since a wait began, where what is waited for does not tell before its deadline.
class DeathCheck {
 public:
  using Clock = std::chrono::steady_clock;
  /// As often as one likes; `gone` is asked every kWatchInterval.
  template <typename Gone>
  bool has_lost_a_rank(const Gone& gone) {
    if (Clock::now() - asked_ < kWatchInterval) return false;
    asked_ = Clock::now();
    const bool is_gone = !gone().empty();
    return std::exchange(was_gone_, is_gone) && is_gone;
  }

 private:
  Clock::time_point asked_ = Clock::now();
  bool was_gone_ = false;
};

/// Connections to the other ranks of a group that carry nothing: when a process dies, its own are closed. For backends that do not tell.
class LossWatch {
 public:
  virtual ~LossWatch() = default;
  /// Ranks whose connection is closed: they died, or have closed their watch. One thread. Returns at once.
  virtual std::vector<int> gone() = 0;
};

/// Every rank of the group that `options` name makes one, in options.timeout at most. nullptr for a group of one, and in a build without
/// Gloo; Error{kUnavailable} with the reason where the ranks cannot reach one another.
std::unique_ptr<LossWatch> make_loss_watch(CommOptions options);

}  // namespace prl::comm
