#pragma once

#include "config/rl_config.hpp"

namespace prl::launch {

/// Makes output_dir ready: empties it if asked to, refuses to mix a fresh run with another run's checkpoints, and removes
/// rollouts and broadcasts beyond the step that a resume starts from (all of them, metrics and logs for a fresh run).
///
/// Settles ckpt.resume_step in the sections of trainer and orchestrator: -1 becomes the step that was found, or nothing, so that
/// both start from the same one. Error{kAlreadyExists} naming the folder and the ways out; what trainer::find_resume_step throws.
void prepare_run_folder(config::RlConfig& config);

}  // namespace prl::launch
