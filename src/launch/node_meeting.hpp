#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "comm/store.hpp"
#include "config/tool_config.hpp"

namespace prl::launch {

/// One node of a run over several: each has one `prl launch`.
struct NodePlace {
  int num_nodes = 1, rank = 0;
  int per_node = 1;                     ///< processes of each node
  std::string run_id = "run";           ///< nodes of another run at the same endpoint are refused
  std::optional<std::string> endpoint;  ///< host:port of node 0, which has to be free there; none: any free port of this machine
  std::optional<std::string> host;      ///< at which other nodes reach this one; none: the address that leads to the endpoint
};

/// What a deployment says of its nodes.
struct NodesWanted {
  std::optional<int> num_nodes, per_node;
};

/// Which node this is: by the options of `prl launch`, else by the deployment, else by the environment: PRL_NODE_RANK, PRL_NUM_NODES,
/// PRL_RDZV_ENDPOINT and PRL_NODE_HOST, in a step of SLURM SLURM_NODEID and SLURM_STEP_NUM_NODES, in a pod of a StatefulSet the number at
/// the end of POD_NAME and STATEFUL_REPLICAS. Error{kInvalidArgument} naming the option or variable that is missing or contradicts.
NodePlace find_node(const config::LaunchConfig& config, const NodesWanted& wanted = {});

/// The address of this machine that packets to `endpoint` (host:port) leave from; nothing is sent. Error{kUnavailable}.
std::string own_address_towards(const std::string& endpoint);

/// Where the nodes of one run meet: a store that node 0 holds. One thread.
class NodeMeeting {
 public:
  /// Error{kInvalidArgument} for an endpoint that is none, Error{kIo} at node 0 if it cannot be bound.
  explicit NodeMeeting(NodePlace place);

  /// Waits until all nodes have come; false after a stop. Error{kInvalidArgument} if the nodes do not agree, {kDeadline} naming those that
  /// do not come.
  bool meet(std::stop_token stop);
  /// Says that this node has ended; node 0 waits for the others, for a moment.
  void leave(std::stop_token stop) noexcept;

  /// Whether all other nodes have left; `store` is the meeting's.
  bool are_others_gone(comm::Store& store) const;

  const NodePlace& place() const noexcept { return place_; }
  /// "tcp://host:port".
  const std::string& address() const noexcept { return address_; }
  /// At which the other nodes reach this one.
  const std::string& host() const noexcept { return host_; }
  /// The same of all nodes, after meet().
  const std::vector<std::string>& hosts() const noexcept { return hosts_; }
  comm::Store& store() noexcept { return *store_; }
  /// A client for another thread.
  std::shared_ptr<comm::Store> make_store() const;

 private:
  NodePlace place_;
  std::string address_, host_ = "127.0.0.1";
  std::unique_ptr<comm::StoreServer> server_;  ///< at node 0
  std::shared_ptr<comm::Store> store_;
  std::vector<std::string> hosts_;
};

}  // namespace prl::launch
