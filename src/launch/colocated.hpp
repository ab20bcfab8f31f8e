#pragma once

#include <stop_token>

#include "config/rl_config.hpp"

namespace prl::launch {

/// All roles of `prl rl` in this process, on one device: engine, orchestrator and trainer as threads, samples through a queue
/// in memory, weights as a pointer that changes hands. Returns the exit status; throws the failure of the role that failed
/// first, with the role's name in front.
int run_colocated(const config::RlConfig& config, std::stop_token stop);

}  // namespace prl::launch
