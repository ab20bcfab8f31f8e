#include "launch/engine_pools.hpp"

#include <fmt/core.h>

#include <random>
#include <utility>
#include <variant>

#include "launch/inference_role.hpp"

namespace prl::launch {

int EnginePools::port_of(int number, int local) const noexcept {
  // On one machine decode engines are counted from the first of their own on.
  if (is_prefill(number)) return deployment.prefill_port + local;
  return deployment.decode_port + (local == number ? number - num_prefill : local);
}

void EnginePools::set_up(ChildSpec& child, int number, int local) const {
  const auto set = [&child](std::string flag, std::string value) {
    child.argv.insert(child.argv.end(), {std::move(flag), std::move(value)});
  };
  set("--kv-transfer.port", std::to_string(kv_port == 0 ? 0 : kv_port + local));
  const bool is_prompts = is_prefill(number);
  for (auto& [flag, value] : config::engine_flags_of(is_prompts ? deployment.prefill_vllm_overrides : deployment.decode_vllm_overrides))
    set(flag, value);
  for (const auto& [name, value] : is_prompts ? deployment.prefill_env_vars : deployment.decode_env_vars) child.env[name] = value;
  child.env[kEngineKindVariable] = is_prompts ? "prefill" : "decode";
  if (!kv_key.empty()) child.env[kKvKeyVariable] = kv_key;
}

std::optional<EnginePools> pools_of(const config::InferenceConfig& config, int engines_per_node) {
  const auto* nodes = std::get_if<config::InferenceDisaggregated>(&config.deployment);
  if (nodes == nullptr) return std::nullopt;
  return EnginePools{.deployment = *nodes,
                     .num_prefill = nodes->num_prefill_replicas * nodes->prefill_nodes_per_replica * engines_per_node,
                     .num_decode = nodes->num_decode_replicas * nodes->decode_nodes_per_replica * engines_per_node,
                     .kv_port = config.kv_transfer.port,
                     .kv_key = {}};
}

std::string make_kv_key() {
  std::random_device device;
  std::string key;
  for (int i = 0; i < 4; ++i) key += fmt::format("{:08x}", device());
  return key;
}

}  // namespace prl::launch
