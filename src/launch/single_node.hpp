#pragma once

#include <stop_token>

#include "config/rl_config.hpp"

namespace prl::launch {

/// `prl rl` with deployment.type = "single_node": inference, orchestrator and trainer as processes of their own, started with
/// the resolved configurations in <output_dir>/configs, logs in <output_dir>/logs. When one fails the others are ended and
/// the message names it.
struct SingleNodeEnd {
  int status = 0;                  ///< of the program
  bool is_trainer_killed = false;  ///< by a signal, which ended the run
};
SingleNodeEnd run_single_node(const config::RlConfig& config, std::stop_token stop);

/// Whether a run that ended so begins again, for the time after `num_restarts`: tells it, and waits with a back-off first.
bool begins_again(const config::RlConfig& config, const SingleNodeEnd& end, int num_restarts, const std::stop_token& stop);

}  // namespace prl::launch
