#pragma once

#include <chrono>
#include <string>

#include "comm/mesh.hpp"

namespace prl::comm {

/// How ranks find one another.

/// Says in the store that this rank is there, and waits until the others do: options.timeout if they may still be starting, else as long
/// as they have to connect. PeerLost naming those that do not come, or died meanwhile.
void wait_for_all(const CommOptions& options);
/// What a rank says in the store as a group is formed, once it does. Error{kDeadline} after `limit`, {kPeerLost} if a rank dies meanwhile.
std::string await_word(const CommOptions& options, const std::string& key, std::chrono::milliseconds limit);
/// How long ranks that are all there have to connect; at most options.timeout.
std::chrono::milliseconds time_to_connect(const CommOptions& options);

/// The first groups of a run, which all its ranks get or none: if one dies after it has come and before all are connected, the others
/// wait in the next generation for the one that is started in its place. Called by every rank with the same store, of this run alone.
/// Errors  PeerLost: ranks that did not come within options.timeout, or have met without this one.
Mesh meet(CommOptions options, MeshShape shape);
/// Whether the ranks of this store have met. From then on a rank that was lost has to join() the others.
bool has_met(Store& store);

}  // namespace prl::comm
