#pragma once

#include <stop_token>

#include "config/rl_config.hpp"

namespace prl::launch {

/// `prl rl` with deployment.type = "single_node": inference, orchestrator and trainer as processes of their own, started with
/// the resolved configurations in <output_dir>/configs, logs in <output_dir>/logs. When one fails the others are ended and
/// the message names it. Returns the exit status.
int run_single_node(const config::RlConfig& config, std::stop_token stop);

}  // namespace prl::launch
