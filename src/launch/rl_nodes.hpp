#pragma once

#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "config/rl_config.hpp"
#include "launch/node_meeting.hpp"

namespace prl::launch {

/// Which roles the nodes of deployment.type = "multi_node" run: inference on the first ones, the trainer on the next, the orchestrator on
/// the trainer's first node or the last one of inference.
struct RlNodes {
  int num_infer = 0, num_train = 1, per_node = 1;
  int engines_per_node = 1;  ///< of inference
  bool orchestrator_on_inference = false;

  explicit RlNodes(const config::RlConfig& config);
  int size() const noexcept { return num_infer + num_train; }
  bool is_inference(int node) const noexcept { return node < num_infer; }
  int orchestrator() const noexcept { return orchestrator_on_inference && num_infer > 0 ? num_infer - 1 : num_infer; }
  /// The trainer's first node.
  int master() const noexcept { return num_infer; }
};

/// `config` as its roles read it once the nodes' addresses are known: engines, and where samples and weights are handed over.
config::RlConfig with_addresses(config::RlConfig config, const std::vector<std::string>& hosts);

/// `prl launch rl` on one node of a run: starts its roles, watches them, and ends them when the run has ended or failed anywhere. Node 0
/// calls `prepare`, which makes the output folder ready and writes the configurations of the roles there, true if there is something to
/// do; all nodes see that folder. Logs of the attempt: inference/node_N.log and node_N_rank_K.log, the same of trainer, and
/// orchestrator.log; trainer.log and inference.log are links to those of the first node. Returns the exit status. What NodeMeeting throws.
int run_rl_node(const config::RlConfig& config, const NodePlace& place, const std::function<bool(config::RlConfig&)>& prepare,
                std::stop_token stop);

}  // namespace prl::launch
