#include "launch/single_node.hpp"

#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "base/log.hpp"
#include "config/cli.hpp"
#include "config/secrets.hpp"
#include "launch/inference_role.hpp"
#include "launch/model_setup.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/rank_launch.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_identity.hpp"
#include "launch/run_spans.hpp"
#include "launch/step_console.hpp"
#include "launch/supervisor.hpp"
#include "net/port_owner.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

fs::path own_binary() { return fs::read_symlink("/proc/self/exe"); }

/// A role's variables, with the GPUs that it may see.
std::map<std::string, std::string> role_env(std::map<std::string, std::string> env, const std::optional<std::vector<int>>& gpu_ids) {
  if (gpu_ids) env["CUDA_VISIBLE_DEVICES"] = fmt::format("{}", fmt::join(*gpu_ids, ","));
  return env;
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

/// The trainer's ranks, and where they meet; one rank needs no such place.
std::unique_ptr<comm::StoreServer> start_trainer(const config::RlConfig& config, ChildSpec base, Supervisor& supervisor) {
  RankLayout layout;
  layout.ranks_per_node = std::get<config::SingleNodeDeployment>(*config.deployment).num_train_gpus;
  if (layout.ranks_per_node == 1) {
    supervisor.start(std::move(base));
    return nullptr;
  }
  auto store = std::make_unique<comm::StoreServer>();
  layout.store = store->address();
  layout.gpu_ids = config.trainer_gpu_ids;
  layout.healing = config.trainer.healing;
  layout.uses_gpus = device_kind(config.trainer.compute) == DeviceKind::kCuda;
  layout.first_gpu = config.inference ? std::get<config::SingleNodeDeployment>(*config.deployment).num_infer_gpus : 0;
  for (ChildSpec& child : rank_children(layout, base, config.output_dir / "logs" / "trainer")) supervisor.start(std::move(child));
  return store;
}

/// The child of engine `number`, made from that of the role: a name, a port and a GPU of its own.
ChildSpec engine_child(const config::RlConfig& config, int number, ChildSpec child) {
  const config::InferenceConfig& inference = *config.inference;
  const int num_engines = inference.parallel.dp;
  child.max_restarts = std::get<config::SingleNodeDeployment>(*config.deployment).max_engine_restarts;
  child.ready_mark = kServingMark;
  if (number > 0) child.name = fmt::format("inference_{}", number);
  child.log_file = child.log_file.parent_path() / (child.name + ".log");
  const auto set = [&child](const char* flag, int value) { child.argv.insert(child.argv.end(), {flag, std::to_string(value)}); };
  set("--server.port", inference.server.port + number);
  set("--parallel.dp", 1);
  set("--api-server-count", 1);
  if (num_engines > 1 && inference.compute.device == config::DeviceKind::kCpu && inference.compute.num_threads == 0)
    set("--compute.num-threads", std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / num_engines));
  if (config.inference_gpu_ids)
    child.env["CUDA_VISIBLE_DEVICES"] = std::to_string(config.inference_gpu_ids->at(static_cast<std::size_t>(number)));
  return child;
}

}  // namespace

int run_single_node(const config::RlConfig& config, std::stop_token stop) {
  // A taken port is told before anything is downloaded or started, and with the key that names it.
  const auto require_port = [](const char* key, const std::optional<config::InferenceConfig>& section) {
    if (!section) return;
    try {
      for (int i = 0; i < section->parallel.dp; ++i) net::require_free_port(section->server.host, section->server.port + i);
    } catch (const Error& error) {
      throw error.with_context(fmt::format("{}.server.port", key));
    }
  };
  require_port("inference", config.inference);
  require_port("teacher_inference", config.teacher_inference);
  const TraceOfProcesses trace(config.trainer.trace_path);
  const std::map<std::string, std::string> identity = identity_env(new_run_identity(), own_servers(config));
  const fs::path binary = own_binary();
  const fs::path configs = config.output_dir / "configs";
  const fs::path logs = config.output_dir / "logs";
  auto spec = [&](const std::string& role, bool must_finish, const std::map<std::string, std::string>& role_env,
                  const std::string& secrets) {
    ChildSpec child;
    child.name = role;
    child.argv = {binary.string(), role, "@", (configs / (role + ".json")).string()};
    child.env = config.env_vars;
    for (const auto& [key, value] : role_env) child.env[key] = value;
    for (const auto& [key, value] : identity) child.env[key] = value;
    child.env[kRunFolderVariable] = fs::absolute(config.output_dir).string();
    if (!trace.folder().empty()) child.env[kTraceVariable] = trace.folder();
    if (!secrets.empty()) child.env[config::kSecretsVariable] = secrets;
    child.log_file = logs / (role + ".log");
    child.must_finish = must_finish;
    return child;
  };
  // Downloads happen once, here and with their progress in sight; the roles then find the model in the cache.
  model_folder(config.trainer.model.name);
  text_folder(policy_text_name(config.orchestrator));
  if (config.teacher_inference) model_folder(config.teacher_inference->model.name);
  const fs::path metrics = config.output_dir / config.trainer.file_monitor.path;
  // A benchmark shows what its trainer says, the table among it.
  std::optional<StepConsole> steps;
  if (!config.bench) steps.emplace(metrics, end_of_file(metrics), config.trainer.max_steps, orchestrator_resume_step(config.orchestrator));
  Supervisor supervisor;
  if (config.inference)
    for (int i = 0; i < config.inference->parallel.dp; ++i)
      supervisor.start(
          engine_child(config, i, spec("inference", false, config.inference->env_vars, config::secrets_of(*config.inference))));
  else
    log::warning("there is no [inference] section: the orchestrator needs a server that runs already");
  if (config.teacher_inference) {
    ChildSpec teacher = spec("teacher_inference", false, role_env(config.teacher_inference->env_vars, config.teacher_gpu_ids),
                             config::secrets_of(*config.teacher_inference));
    teacher.argv[1] = "inference";
    supervisor.start(std::move(teacher));
  }
  supervisor.start(spec("orchestrator", true, orchestrator_env(config), config::secrets_of(config.orchestrator)));
  ChildSpec trainer = spec("trainer", true, role_env(config.trainer.env_vars, config.trainer_gpu_ids), config::secrets_of(config.trainer));
  trainer.echo = config.bench.has_value();
  const std::unique_ptr<comm::StoreServer> store = start_trainer(config, std::move(trainer), supervisor);
  const auto failure = supervisor.run(stop);
  steps.reset();
  if (failure) {
    log::error("rl: {}{}", *failure, stop.stop_requested() ? "" : ". Ending the other roles");
    supervisor.terminate_all(std::chrono::seconds(20));
    return 1;
  }
  supervisor.terminate_all(std::chrono::seconds(20));
  const bool can_go_on = stop.stop_requested() && config.trainer.ckpt;
  log::success("rl {}; logs in {}{}", stop.stop_requested() ? "stopped" : "finished", logs.string(),
               can_go_on ? "; continue with --ckpt.resume-step -1" : "");
  return 0;
}

}  // namespace prl::launch
