#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "comm/communicator.hpp"

namespace prl::comm {

/// How a rank that was started again comes into a group that has gone on without it: it asks by a name of its own; rank 0 of the group
/// answers between two steps; then all of them make the larger group (make_communicator), in which the newcomer is last. If one of them is
/// lost meanwhile, nobody has the larger group: the others go on with theirs, and the newcomer asks again.

/// The newcomer's side: the group with it. `options` but for rank, size and generation, which the others say. nullptr if `stop` came first;
/// Error{kDeadline} if the others did not let it in within `patience`.
std::unique_ptr<Communicator> join(const CommOptions& options, const std::string& name, std::chrono::milliseconds patience,
                                   std::stop_token stop);
/// The group's side, at every rank between two steps: if a newcomer asks and still answers, the options of the group with it, which is of
/// `generation`. nullopt if nobody does. PeerLost.
std::optional<CommOptions> admit(Communicator& group, std::int64_t generation);

}  // namespace prl::comm
