#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.hpp"

namespace prl::comm {

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
