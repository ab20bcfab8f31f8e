#pragma once

#include <memory>
#include <vector>

#include "env/generate_client.hpp"

namespace prl::env {

/// Several engines behind one client. All requests of a session go to the same engine, so that its prefix cache helps; which
/// one is a hash of the session id, so a retried rollout (which has an id of its own) may land elsewhere.
/// check_health asks all of them. Error{kInvalidArgument} for an empty list.
std::shared_ptr<GenerateClient> make_generate_pool(std::vector<std::shared_ptr<GenerateClient>> clients);

}  // namespace prl::env
