#pragma once

#include <stop_token>

#include "config/orchestrator_config.hpp"

namespace prl::launch {

/// `prl orchestrator`: against servers over HTTP, samples and weights through files or ZeroMQ. Returns the exit status.
int run_orchestrator_role(const config::OrchestratorConfig& config, std::stop_token stop);

}  // namespace prl::launch
