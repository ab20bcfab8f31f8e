#pragma once

#include <filesystem>
#include <optional>
#include <stop_token>
#include <string>

#include "config/inference_config.hpp"
#include "launch/engine_pools.hpp"
#include "launch/node_meeting.hpp"

namespace prl::launch {

/// `prl inference` with several copies of the model: an engine in a process each, on ports from backend_port on, started with the resolved
/// configuration in <output_dir>/configs, and in this process a router in front of them on server.port. An engine that dies is started
/// again; its requests go to the others meanwhile.
///
/// With parallel.dp_address the copies are on several nodes: each runs parallel.dp_local of them from dp_start_rank on, which listen at
/// `engine_host` (empty: server.host, or the address that leads to dp_address), and tells them at dp_address:dp_rpc_port, where the node
/// that is not headless has its router. A headless node ends when that one is gone. Returns the exit status.
///
/// With `pools` the first engines compute prompts for the others, and all have ports and settings of their kind.
int run_inference_group(const config::InferenceConfig& config, std::stop_token stop, const std::string& engine_host = {},
                        std::optional<EnginePools> pools = {});

/// The engines of one node of deployment.type = "multi_node" or "disaggregated", as the keys under parallel; its output goes to
/// <output_dir>/node_N.
void place_engines(config::InferenceConfig& config, const NodePlace& place);

}  // namespace prl::launch
