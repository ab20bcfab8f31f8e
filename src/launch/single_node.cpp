#include "launch/single_node.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "base/log.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/rank_launch.hpp"
#include "launch/role_children.hpp"
#include "launch/run_identity.hpp"
#include "launch/run_spans.hpp"
#include "launch/step_console.hpp"
#include "launch/supervisor.hpp"
#include "net/port_owner.hpp"
#include "orchestrator/progress.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
using std::chrono::milliseconds;
namespace {

/// Before all roles begin again, twice as long each time.
constexpr milliseconds kFirstWait{500}, kLongestWait{30'000};

EnginePlace engine_place(const config::RlConfig& config, int number) {
  EnginePlace place{.number = number, .num_here = config.inference->parallel.dp, .host = {}, .log_file = {}};
  if (number > 0) place.name = fmt::format("inference_{}", number);
  place.log_file = launch::log_file(config.output_dir, place.name + ".log");
  return place;
}

}  // namespace

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
  for (ChildSpec& child : rank_children(layout, base, log_file(config.output_dir, "trainer"))) supervisor.start(std::move(child));
  return store;
}

void start_engines(const config::RlConfig& config, const RoleChildren& roles, Supervisor& supervisor) {
  if (config.inference)
    for (int i = 0; i < config.inference->parallel.dp; ++i) supervisor.start(roles.engine(engine_place(config, i)));
  else
    log::warning("there is no [inference] section: the orchestrator needs a server that runs already");
}

void require_free_ports(const config::RlConfig& config) {
  const auto require_port = [](const char* key, const std::optional<config::InferenceConfig>& section, int num_ports) {
    if (!section) return;
    try {
      for (int i = 0; i < num_ports; ++i) net::require_free_port(section->server.host, section->server.port + i);
    } catch (const Error& error) {
      throw error.with_context(fmt::format("{}.server.port", key));
    }
  };
  require_port("inference", config.inference, config.inference ? config.inference->parallel.dp : 0);
  require_port("teacher_inference", config.teacher_inference, 1);
}

SingleNodeEnd run_single_node(const config::RlConfig& config, std::stop_token stop) {
  require_free_ports(config);
  const TraceOfProcesses trace(config.trainer.trace_path);
  std::map<std::string, std::string> variables = identity_env(new_run_identity(), own_servers(config));
  if (!trace.folder().empty()) variables[kTraceVariable] = trace.folder();
  const RoleChildren roles(config, std::move(variables));
  const fs::path logs = log_folder(config.output_dir);
  // Downloads happen once, here and with their progress in sight; the roles then find the model in the cache.
  model_folder(config.trainer.model.name);
  text_folder(policy_text_name(config.orchestrator));
  if (config.teacher_inference) model_folder(config.teacher_inference->model.name);
  const fs::path metrics = config.output_dir / config.trainer.file_monitor.path;
  // A benchmark shows what its trainer says, the table among it.
  std::optional<StepConsole> steps;
  if (!config.bench) steps.emplace(metrics, end_of_file(metrics), config.trainer.max_steps, orchestrator_resume_step(config.orchestrator));
  if (stop.stop_requested()) {
    log::success("rl stopped before its roles were started");
    return {};
  }
  // Of a launcher before this one, whose run has ended.
  orchestrator::drop_recovery(config.output_dir / orchestrator::kRecoveryFolder);
  Supervisor supervisor;
  start_engines(config, roles, supervisor);
  if (config.teacher_inference) supervisor.start(roles.teacher());
  supervisor.start(roles.orchestrator());
  const std::unique_ptr<comm::StoreServer> store = start_trainer(config, roles.trainer(), supervisor);
  const auto failure = supervisor.run(stop);
  steps.reset();
  if (failure) {
    log::error("rl: {}{}", *failure, stop.stop_requested() ? "" : ". Ending the other roles");
    const bool is_trainer_killed = supervisor.was_killed("trainer");
    supervisor.terminate_all(std::chrono::seconds(20));
    return {.status = 1, .is_trainer_killed = is_trainer_killed};
  }
  supervisor.terminate_all(std::chrono::seconds(20));
  orchestrator::drop_recovery(config.output_dir / orchestrator::kRecoveryFolder);
  const bool can_go_on = stop.stop_requested() && config.trainer.ckpt;
  log::success("rl {}; logs in {}{}", stop.stop_requested() ? "stopped" : "finished", logs.string(),
               can_go_on ? "; continue with --ckpt.resume-step -1" : "");
  return {};
}

bool begins_again(const config::RlConfig& config, const SingleNodeEnd& end, int num_restarts, const std::stop_token& stop) {
  const int most = std::get<config::SingleNodeDeployment>(*config.deployment).max_trainer_restarts;
  if (!end.is_trainer_killed || num_restarts >= most || stop.stop_requested()) return false;
  const milliseconds wait = std::min(kFirstWait * (1 << std::min(num_restarts, 10)), kLongestWait);
  log::warning("the trainer was killed: all roles begin again in {:.1f} s ({} of {} restarts)", std::chrono::duration<double>(wait).count(),
               num_restarts + 1, most);
  const auto until = std::chrono::steady_clock::now() + wait;
  while (std::chrono::steady_clock::now() < until && !stop.stop_requested()) std::this_thread::sleep_for(milliseconds(20));
  return !stop.stop_requested();
}

}  // namespace prl::launch
