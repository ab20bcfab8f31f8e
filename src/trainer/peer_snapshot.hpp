#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "comm/communicator.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"

namespace prl::trainer {

/// What the ranks own after a step, in host memory: each keeps its own part and that of the rank before it, so that the run can go on
/// without any one rank. The last step is kept until every rank has the new one. One thread.
class PeerSnapshots {
 public:
  /// `is_newcomer`: this rank joins a group that goes on, and has nothing until its first commit.
  PeerSnapshots(Policy& policy, bool is_newcomer) : policy_(policy), is_newcomer_(is_newcomer) {}

  /// Every rank calls it after the step of `progress`. PeerLost; what was kept is then still there.
  void commit(const TrainProgress& progress, const GradientStep& gradient_step);
  /// Every rank of the group that `gradient_step` has moved to calls it. Masters, optimizer and counters become those of the newest step
  /// that all of them keep but for newcomers, whose progress it returns; nullopt, with nothing touched, if one of them has none yet.
  /// Error{kUnavailable} if a part is nowhere, PeerLost.
  std::optional<TrainProgress> restore(GradientStep& gradient_step);
  std::size_t num_bytes() const noexcept;

 private:
  struct Snapshot {
    std::int64_t generation = 0, step = 0;
    std::string progress;              ///< as JSON
    int num_owners = 0;                ///< ranks of the group that made it
    std::map<int, std::string> parts;  ///< by owner
  };
  /// Generation and step of the newest that all have, negative if one has none.
  std::pair<std::int64_t, std::int64_t> find_common(comm::Communicator& group) const;
  void take(std::string_view part, GradientStep& gradient_step) const;

  Policy& policy_;
  bool is_newcomer_ = false;
  std::deque<Snapshot> kept_;  ///< oldest first, at most two
};

}  // namespace prl::trainer
