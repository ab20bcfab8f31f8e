#include "launch/role_children.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "config/cli.hpp"
#include "config/secrets.hpp"
#include "launch/inference_role.hpp"
#include "launch/log_folder.hpp"
#include "launch/run_folder.hpp"
#include "launch/visible_gpus.hpp"
#include "orchestrator/progress.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

/// Adds the GPUs that a role may see to its variables.
void show_gpus(ChildSpec& child, const std::optional<std::vector<int>>& ids) {
  if (ids) child.env["CUDA_VISIBLE_DEVICES"] = visible_devices_of(*ids);
}

/// The orchestrator's variables, with the keys of the servers that this run starts.
std::map<std::string, std::string> orchestrator_env(const config::RlConfig& config) {
  std::map<std::string, std::string> env = config.orchestrator.env_vars;
  if (config.teacher_inference && config.teacher_inference->server.api_key)
    env.emplace(config.orchestrator.teacher->client.api_key_var, *config.teacher_inference->server.api_key);
  if (!config.inference) return env;
  const config::ServerConfig& server = config.inference->server;
  if (server.api_key) env.emplace(config.orchestrator.student.client.api_key_var, *server.api_key);
  if (server.admin_api_key) env.emplace("PRL_ADMIN_API_KEY", *server.admin_api_key);
  return env;
}

struct Restarts {
  int engine = 0, orchestrator = 0;
  std::chrono::seconds max_stopped{0}, max_hung{0};
};
Restarts max_restarts(const config::RlConfig& config) {
  if (const auto* node = std::get_if<config::SingleNodeDeployment>(&*config.deployment))
    return {node->max_engine_restarts, node->max_orchestrator_restarts, std::chrono::seconds(node->max_stopped_seconds),
            std::chrono::seconds(node->max_hung_seconds)};
  if (const auto* nodes = std::get_if<config::MultiNodeDeployment>(&*config.deployment))
    return {nodes->max_engine_restarts, nodes->max_orchestrator_restarts, std::chrono::seconds(nodes->max_stopped_seconds),
            std::chrono::seconds(nodes->max_hung_seconds)};
  return {};
}

}  // namespace

RoleChildren::RoleChildren(const config::RlConfig& config, std::map<std::string, std::string> identity)
    : config_(config), identity_(std::move(identity)) {
  if (!config.inference) return;
  const auto* nodes = std::get_if<config::MultiNodeDeployment>(&*config.deployment);
  pools_ = pools_of(*config.inference, nodes != nullptr ? config::num_engines_on(*config.inference, nodes->gpus_per_node) : 1);
  const config::ServerConfig& server = config.inference->server;
  if (pools_ && !config.inference->kv_transfer.api_key && !server.admin_api_key && !server.api_key) pools_->kv_key = make_kv_key();
}

ChildSpec RoleChildren::role(const std::string& name, const std::map<std::string, std::string>& env, const std::string& secrets) const {
  ChildSpec child;
  child.name = name;
  child.argv = {fs::read_symlink("/proc/self/exe").string(), name, "@",
                (config_.output_dir / "configs" / fmt::format("{}.json", name)).string()};
  child.env = config_.env_vars;
  for (const auto& [key, value] : env) child.env[key] = value;
  for (const auto& [key, value] : identity_) child.env[key] = value;
  child.env[kRunFolderVariable] = fs::absolute(config_.output_dir).string();
  if (!secrets.empty()) child.env[config::kSecretsVariable] = secrets;
  child.log_file = launch::log_file(config_.output_dir, fmt::format("{}.log", name));
  return child;
}

ChildSpec RoleChildren::engine(const EnginePlace& place) const {
  const config::InferenceConfig& inference = *config_.inference;
  ChildSpec child = role("inference", inference.env_vars, config::secrets_of(inference));
  child.name = place.name;
  if (!place.log_file.empty()) child.log_file = place.log_file;
  child.must_finish = false;
  child.max_restarts = max_restarts(config_).engine;
  child.max_stopped = max_restarts(config_).max_stopped;
  child.ready_mark = kServingMark;
  const std::string& host = place.host.empty() ? inference.server.host : place.host;
  const bool is_any = host.empty() || host == "0.0.0.0" || host == "::";
  child.health_url = fmt::format("http://{}:{}/health", is_any ? "127.0.0.1" : host, inference.server.port + place.number);
  child.max_hung = max_restarts(config_).max_hung;
  const auto set = [&child](const char* flag, std::string value) { child.argv.insert(child.argv.end(), {flag, std::move(value)}); };
  if (!place.host.empty()) set("--server.host", place.host);
  set("--server.port", std::to_string(inference.server.port + place.number));
  set("--parallel.dp", "1");
  set("--api-server-count", "1");
  if (place.num_here > 1 && inference.compute.device == config::DeviceKind::kCpu && inference.compute.num_threads == 0)
    set("--compute.num-threads", std::to_string(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / place.num_here)));
  if (pools_) pools_->set_up(child, place.first + place.number, place.number);
  if (config_.inference_gpu_ids) {
    std::vector<int> own;
    for (const int i : gpus_of_engine(inference, place.number)) own.push_back(config_.inference_gpu_ids->at(static_cast<std::size_t>(i)));
    show_gpus(child, own);
  }
  return child;
}

ChildSpec RoleChildren::teacher() const {
  ChildSpec child = role("teacher_inference", config_.teacher_inference->env_vars, config::secrets_of(*config_.teacher_inference));
  child.argv[1] = "inference";
  // Its launcher writes a configuration for its engines, beside which that of the policy's must not lie.
  if (config_.teacher_inference->parallel.dp > 1)
    child.argv.insert(child.argv.end(), {"--output-dir", (config_.output_dir / "teacher_inference").string()});
  child.must_finish = false;
  show_gpus(child, config_.teacher_gpu_ids);
  return child;
}

ChildSpec RoleChildren::orchestrator() const {
  ChildSpec child = role("orchestrator", orchestrator_env(config_), config::secrets_of(config_.orchestrator));
  child.max_restarts = config_.bench ? 0 : max_restarts(config_).orchestrator;
  child.restarts_after_signals_only = true;
  child.max_stopped = max_restarts(config_).max_stopped;
  if (child.max_restarts > 0) child.env[kRecoveryVariable] = fs::absolute(config_.output_dir / orchestrator::kRecoveryFolder).string();
  return child;
}

ChildSpec RoleChildren::orchestrator_of(const RunFolder& run) const {
  ChildSpec child = orchestrator();
  child.name = run.name;
  child.argv = {child.argv[0], "orchestrator", "@", (run.folder / "configs/orch.toml").string(), "--output-dir", run.folder.string()};
  const auto set = [&child](const char* flag, std::string value) { child.argv.insert(child.argv.end(), {flag, std::move(value)}); };
  set("--student.model.name", config_.trainer.model.name);
  if (config_.inference)
    for (const std::string& url : config_.orchestrator.student.client.base_url) set("--student.client.base-url", url);
  if (config_.inference && !config_.orchestrator.prefill.base_url.empty()) {
    for (const std::string& url : config_.orchestrator.prefill.base_url) set("--prefill.base-url", url);
    set("--prefill.non-cached-tokens", std::to_string(config_.orchestrator.prefill.non_cached_tokens));
  }
  child.env.erase(kRunFolderVariable);  // it prepares its folder itself
  if (child.max_restarts > 0) child.env[kRecoveryVariable] = fs::absolute(run.folder / orchestrator::kRecoveryFolder).string();
  child.log_file = launch::log_file(config_.output_dir, run.name + ".log");
  child.must_finish = false;
  child.may_end = child.is_optional = true;
  return child;
}

ChildSpec RoleChildren::trainer() const {
  ChildSpec child = role("trainer", config_.trainer.env_vars, config::secrets_of(config_.trainer));
  child.echo = config_.bench.has_value();
  show_gpus(child, config_.trainer_gpu_ids);
  return child;
}

}  // namespace prl::launch
