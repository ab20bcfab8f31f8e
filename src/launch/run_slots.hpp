#pragma once

#include <stop_token>

#include "config/trainer_config.hpp"

namespace prl::launch {

/// `prl trainer` with max_concurrent_runs above 1: serves the runs of the folders run_* below output_dir, each with its own orchestrator,
/// until `stop`. A run that is found takes the smallest free slot; one whose configuration is bad gets configs/error.txt and none; one
/// whose folder is taken away leaves at once. <output_dir>/runs.json says how all of them are. Returns the exit status.
int run_trainer_of_runs(const config::TrainerConfig& config, std::stop_token stop);

}  // namespace prl::launch
