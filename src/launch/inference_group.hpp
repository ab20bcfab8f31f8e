#pragma once

#include <stop_token>

#include "config/inference_config.hpp"

namespace prl::launch {

/// `prl inference` with several copies of the model: an engine in a process each, on ports from backend_port on, started with the resolved
/// configuration in <output_dir>/configs, and in this process a router in front of them on server.port. An engine that dies is started
/// again; its requests go to the others meanwhile. Returns the exit status.
int run_inference_group(const config::InferenceConfig& config, std::stop_token stop);

}  // namespace prl::launch
