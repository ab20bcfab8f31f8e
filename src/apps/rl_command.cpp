#include <algorithm>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/stop_signal.hpp"
#include "config/rl_config.hpp"
#include "launch/batch_job.hpp"
#include "launch/colocated.hpp"
#include "launch/dry_run.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"
#include "launch/rl_nodes.hpp"
#include "launch/run_end.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_host.hpp"
#include "launch/run_lock.hpp"
#include "launch/run_page.hpp"
#include "launch/run_spans.hpp"
#include "launch/single_node.hpp"
#include "launch/start_checks.hpp"
#include "launch/trackers.hpp"
#include "launch/visible_gpus.hpp"

namespace prl::apps {

namespace {

int run_in_one_process(const config::RlConfig& config, std::stop_token stop) {
  const launch::TraceOfProcesses trace(config.trainer.trace_path);
  const launch::RunSpans spans("rl", config.output_dir, config.trainer.trace_path);
  return launch::run_colocated(config, stop);
}

/// Several runs, each of which has its own folder, records and trackers.
int host_runs_of(config::Command command, const config::Loaded<config::RlConfig>& loaded, StopSignal& stop) {
  const config::RlConfig& config = loaded.config;
  (void)launch::begin_attempt(config.output_dir);
  launch::setup_logging(config.trainer.log, launch::log_file(config.output_dir, "rl.log"));
  config::write_resolved(command, config, loaded.provenance);
  const auto page =
      launch::serve_run_page(config.dashboard, config.output_dir, {.has_checkpoints = true, .stop = [&stop] { stop.request_stop(); }});
  const int status = launch::host_runs(config, stop.token());
  return stop.was_interrupted() && status == 0 ? 130 : status;
}

}  // namespace

int run_rl_of_node(const config::ParsedCommand& parsed, const config::LaunchConfig& options) {
  config::Context context = config::Context::from_process();
  context.num_devices = std::max(1, launch::num_visible_gpus());
  const auto loaded = config::load<config::RlConfig>(config::Command::kRl, parsed.args, context);
  if (config::finish_early(config::Command::kRl, loaded, [&] { launch::check_dry_run(loaded.config); })) return 0;
  const auto* nodes = loaded.config.deployment ? std::get_if<config::MultiNodeDeployment>(&*loaded.config.deployment) : nullptr;
  if (nodes == nullptr)
    fail(ErrorCode::kInvalidArgument, "`prl launch rl` is for deployment.type = \"multi_node\"; on one machine `prl rl` starts the roles");
  const launch::NodePlace place =
      launch::find_node(options, {.num_nodes = launch::RlNodes(loaded.config).size(), .per_node = nodes->gpus_per_node});
  StopSignal stop;
  std::optional<launch::RunLock> lock;
  std::unique_ptr<dashboard::PageServer> page;
  std::optional<launch::Trackers> trackers;
  std::optional<launch::UnsavedNotice> unsaved;
  const auto prepare = [&](config::RlConfig& config) {
    launch::check_start(config);
    config::check_resolved_place(config::Command::kRl, config);
    lock.emplace(config.output_dir);
    const launch::PreparedFolder prepared = launch::prepare_run_folder(config);
    config::LogConfig log = config.trainer.log;
    log.step_interval = config.log.step_interval;
    (void)launch::begin_attempt(config.output_dir);
    launch::setup_logging(log, launch::log_file(config.output_dir, "rl.log"));
    for (const std::string& note : prepared.notes) log::warning("{}", note);
    if (prepared.is_finished) return false;
    config::write_resolved(config::Command::kRl, config, loaded.provenance);
    page = launch::serve_run_page(config.dashboard, config.output_dir,
                                  {.has_checkpoints = config.trainer.ckpt.has_value(), .stop = [&stop] { stop.request_stop(); }});
    trackers.emplace(launch::tracker_plan(config));
    unsaved.emplace(config.trainer.ckpt.has_value() || config.bench.has_value(), stop.token());
    return true;
  };
  const int status = launch::run_rl_node(loaded.config, place, prepare, stop.token());
  if (trackers) trackers->finish(status != 0);
  if (lock && status == 0) launch::log_weights(loaded.config.trainer.ckpt, loaded.config.output_dir);
  return stop.was_interrupted() && status == 0 ? 130 : status;
}

int run_rl(const config::ParsedCommand& parsed) {
  config::Context context = config::Context::from_process();
  context.num_devices = std::max(1, launch::num_visible_gpus());
  const auto loaded = config::load<config::RlConfig>(*parsed.command, parsed.args, context);
  if (config::finish_early(*parsed.command, loaded, [&] { launch::check_dry_run(loaded.config); })) return 0;
  if (loaded.config.slurm) {
    config::write_resolved(*parsed.command, loaded.config, loaded.provenance);
    const launch::BatchJob job = launch::batch_job(loaded.config);
    launch::submit_batch_job(job, launch::write_batch_script(job));
    return 0;
  }
  config::RlConfig config = loaded.config;
  if (config.deployment && std::holds_alternative<config::MultiNodeDeployment>(*config.deployment))
    fail(ErrorCode::kInvalidArgument,
         "deployment.type = \"multi_node\" needs {} nodes: on each of them start `prl launch --node-rank N --rdzv-endpoint HOST:PORT rl @ "
         "rl.toml`, or add a [slurm] section, which does",
         launch::RlNodes(config).size());
  const bool is_single_node = config.deployment && std::holds_alternative<config::SingleNodeDeployment>(*config.deployment);
  // One process has one environment: what the sections of the roles set, in this order.
  if (!is_single_node) {
    if (config.inference_gpu_ids) launch::apply_env_vars({{"CUDA_VISIBLE_DEVICES", launch::visible_devices_of(*config.inference_gpu_ids)}});
    launch::apply_env_vars(config.env_vars);
    launch::apply_env_vars(config.trainer.env_vars);
    launch::apply_env_vars(config.orchestrator.env_vars);
    if (config.inference) launch::apply_env_vars(config.inference->env_vars);
  }
  StopSignal stop;
  launch::check_start(config);
  config::check_resolved_place(*parsed.command, config);
  const launch::RunLock lock(config.output_dir);
  if (config.trainer.max_concurrent_runs > 1) return host_runs_of(*parsed.command, loaded, stop);
  const launch::PreparedFolder prepared = launch::prepare_run_folder(config);
  config::LogConfig log = config.trainer.log;
  log.step_interval = config.log.step_interval;
  (void)launch::begin_attempt(config.output_dir);
  launch::setup_logging(log, launch::log_file(config.output_dir, "rl.log"));
  for (const std::string& note : prepared.notes) log::warning("{}", note);
  if (prepared.is_finished) return 0;
  config::write_resolved(*parsed.command, config, loaded.provenance);
  const auto page = launch::serve_run_page(config.dashboard, config.output_dir,
                                           {.has_checkpoints = config.trainer.ckpt.has_value(), .stop = [&stop] { stop.request_stop(); }});
  launch::Trackers trackers(launch::tracker_plan(config));
  const launch::UnsavedNotice unsaved(config.trainer.ckpt.has_value() || config.bench.has_value(), stop.token());
  const auto run_processes = [&] {
    for (int num_restarts = 0;; ++num_restarts) {
      const launch::SingleNodeEnd end = launch::run_single_node(config, stop.token());
      if (!launch::begins_again(config, end, num_restarts, stop.token())) return end.status;
      for (const std::string& note : launch::prepare_run_folder(config, /*begins_again=*/true).notes) log::warning("{}", note);
      config::write_resolved(*parsed.command, config, loaded.provenance);
    }
  };
  const int status = is_single_node ? run_processes() : run_in_one_process(config, stop.token());
  trackers.finish(status != 0);
  if (status == 0) launch::log_weights(config.trainer.ckpt, config.output_dir);
  return stop.was_interrupted() && status == 0 ? 130 : status;
}

}  // namespace prl::apps
