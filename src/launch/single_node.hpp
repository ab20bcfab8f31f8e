#pragma once

#include <memory>
#include <stop_token>

#include "comm/store.hpp"
#include "config/rl_config.hpp"
#include "launch/role_children.hpp"
#include "launch/supervisor.hpp"

namespace prl::launch {

/// `prl rl` with deployment.type = "single_node": inference, orchestrator and trainer as processes of their own, started with
/// the resolved configurations in <output_dir>/configs, logs in <output_dir>/logs. When one fails the others are ended and
/// the message names it.
struct SingleNodeEnd {
  int status = 0;                  ///< of the program
  bool is_trainer_killed = false;  ///< by a signal, which ended the run
};
SingleNodeEnd run_single_node(const config::RlConfig& config, std::stop_token stop);

/// The parts of it that a launch of several runs (launch/run_host.hpp) has too.
/// A taken port is told before anything is downloaded or started, with the key that names it: Error{kAlreadyExists}.
void require_free_ports(const config::RlConfig& config);
void start_engines(const config::RlConfig& config, const RoleChildren& roles, Supervisor& supervisor);
/// The trainer's ranks, made of `base`, and where they meet; one rank needs no such place.
std::unique_ptr<comm::StoreServer> start_trainer(const config::RlConfig& config, ChildSpec base, Supervisor& supervisor);

/// Whether a run that ended so begins again, for the time after `num_restarts`: tells it, and waits with a back-off first.
bool begins_again(const config::RlConfig& config, const SingleNodeEnd& end, int num_restarts, const std::stop_token& stop);

}  // namespace prl::launch
