#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "config/rl_config.hpp"
#include "launch/engine_pools.hpp"
#include "launch/run_folders.hpp"
#include "launch/supervisor.hpp"

namespace prl::launch {

/// Variable of an orchestrator that may be started again: the folder where it keeps its state (orchestrator/progress.hpp).
inline constexpr const char* kRecoveryVariable = "PRL_RECOVERY";

/// Where an engine of a run listens and logs, and what it runs on.
struct EnginePlace {
  int number = 0;                  ///< among the engines of this node
  int first = 0;                   ///< engines of the nodes before
  int num_here = 1;                ///< engines of this node, which share its cores
  std::string host;                ///< address to listen on; empty: inference.server.host
  std::string name = "inference";  ///< for messages
  std::filesystem::path log_file;
};

/// An RL run's roles as processes: each is `prl ROLE @ <output_dir>/configs/ROLE.json` with the variables, keys and GPUs that are its own.
class RoleChildren {
 public:
  /// `identity` goes to all roles (launch/run_identity). `config` outlives this.
  RoleChildren(const config::RlConfig& config, std::map<std::string, std::string> identity);

  /// An engine that is started again when it dies; it listens at inference.server.port + number.
  ChildSpec engine(const EnginePlace& place) const;
  ChildSpec teacher() const;
  /// It is started again when a signal kills it, deployment.max_orchestrator_restarts times.
  ChildSpec orchestrator() const;
  /// Of one of several runs, with the configuration in its folder: the others go on when it ends or fails.
  ChildSpec orchestrator_of(const RunFolder& run) const;
  /// What launch/rank_launch makes the trainer's ranks of; the whole trainer if it has one rank.
  ChildSpec trainer() const;

 private:
  ChildSpec role(const std::string& name, const std::map<std::string, std::string>& env, const std::string& secrets) const;

  const config::RlConfig& config_;
  std::map<std::string, std::string> identity_;
  std::optional<EnginePools> pools_;  ///< of the run's engines; nullopt: they are all of a kind
};

}  // namespace prl::launch
