#pragma once

#include <optional>
#include <string>

#include "config/inference_config.hpp"
#include "launch/supervisor.hpp"

namespace prl::launch {

/// The engines of deployment.type = "disaggregated": prefill engines first, then decode engines.
struct EnginePools {
  config::InferenceDisaggregated deployment;
  int num_prefill = 0, num_decode = 0;
  int kv_port = 0;     ///< of the first engine of a machine; 0: any free one
  std::string kv_key;  ///< that engines show each other; empty: the one of the configuration

  bool is_prefill(int number) const noexcept { return number < num_prefill; }
  int num_engines() const noexcept { return num_prefill + num_decode; }
  /// Where engine `number` of all listens, the `local`-th of its machine.
  int port_of(int number, int local) const noexcept;
  /// Gives the child what is its own beside where it listens: the port for blocks, key, variables and settings of its kind.
  void set_up(ChildSpec& child, int number, int local) const;
};

/// `engines_per_node` of each node of the deployment; 1 where one machine stands for all nodes. nullopt for other deployments.
std::optional<EnginePools> pools_of(const config::InferenceConfig& config, int engines_per_node);
/// 32 hexadecimal digits that nobody else knows.
std::string make_kv_key();

}  // namespace prl::launch
