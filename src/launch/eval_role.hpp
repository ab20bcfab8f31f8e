#pragma once

#include <stop_token>

#include "config/eval_config.hpp"

namespace prl::launch {

/// `prl eval`: environments against a server, or against a model folder that is loaded in this process when model.name is one
/// and no server is named. Writes results.jsonl and metadata.json below output_dir/evals. Returns the exit status.
int run_eval_role(const config::EvalConfig& config, bool is_server_named, std::stop_token stop);

}  // namespace prl::launch
