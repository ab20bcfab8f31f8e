#pragma once

#include "config/rl_config.hpp"

namespace prl::launch {

/// Makes output_dir ready: empties it if asked to, refuses to mix a fresh run with another run's checkpoints, and removes
/// rollouts and broadcasts beyond the step that a resume starts from (all of them for a fresh run).
/// Error{kAlreadyExists} naming the folder and the ways out.
void prepare_run_folder(const config::RlConfig& config);

}  // namespace prl::launch
