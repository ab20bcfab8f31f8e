#pragma once

#include <stop_token>

#include "config/rl_config.hpp"

namespace prl::launch {

/// `prl rl` with trainer.max_concurrent_runs above 1: engines, the trainer, and an orchestrator for each folder run_* of output_dir that
/// has a configuration (docs/runs.md), as processes of their own. A run that appears is begun, one that has ended or failed leaves the
/// others alone, and a role that a signal kills is started again. Runs until `stop`, or until the trainer or an engine cannot go on.
/// Returns the exit status. Error{kAlreadyExists} if the port of inference is taken; {kNotFound}, ConfigError naming a file of `runs`.
int host_runs(const config::RlConfig& config, std::stop_token stop);

}  // namespace prl::launch
