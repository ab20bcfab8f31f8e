#pragma once

#include <stop_token>

#include "config/eval_config.hpp"
#include "config/tool_config.hpp"

namespace prl::launch {

/// `prl eval`: environments against a server, or against a model folder that is loaded in this process when model.name is one
/// and no server is named. Writes results.jsonl and metadata.json below output_dir/evals. Returns the exit status.
int run_eval_role(const config::EvalConfig& config, bool is_server_named, std::stop_token stop);

/// What both commands share, as `prl eval` writes it.
config::EvalConfig eval_config_of(const config::EvalsConfig& config);
/// `prl evals`: the same once, with the weights that there are; or, with `online`, of the steps of a training run while it writes them:
/// each time the newest, with the environments whose interval it is. Ends with the run's last step, or when `stop` is requested.
/// Error{kDeadline} if no step comes for online.timeout.
int run_evals_role(const config::EvalsConfig& config, bool is_server_named, std::stop_token stop);

}  // namespace prl::launch
