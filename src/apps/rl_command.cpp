#include <fmt/core.h>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/stop_signal.hpp"
#include "config/rl_config.hpp"
#include "launch/batch_job.hpp"
#include "launch/colocated.hpp"
#include "launch/dry_run.hpp"
#include "launch/model_setup.hpp"
#include "launch/run_end.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_lock.hpp"
#include "launch/run_page.hpp"
#include "launch/run_spans.hpp"
#include "launch/single_node.hpp"
#include "launch/start_checks.hpp"
#include "launch/trackers.hpp"

namespace prl::apps {

namespace {

int run_in_one_process(const config::RlConfig& config, std::stop_token stop) {
  const launch::TraceOfProcesses trace(config.trainer.trace_path);
  const launch::RunSpans spans("rl", config.output_dir, config.trainer.trace_path);
  return launch::run_colocated(config, stop);
}

}  // namespace

int run_rl(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::RlConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded, [&] { launch::check_dry_run(loaded.config); })) return 0;
  if (loaded.config.slurm) {
    config::write_resolved(*parsed.command, loaded.config, loaded.provenance);
    const launch::BatchJob job = launch::batch_job(loaded.config);
    launch::submit_batch_job(job, launch::write_batch_script(job));
    return 0;
  }
  config::RlConfig config = loaded.config;
  const bool is_single_node = config.deployment && std::holds_alternative<config::SingleNodeDeployment>(*config.deployment);
  // One process has one environment: what the sections of the roles set, in this order.
  if (!is_single_node) {
    if (config.inference_gpu_ids) launch::apply_env_vars({{"CUDA_VISIBLE_DEVICES", fmt::format("{}", config.inference_gpu_ids->front())}});
    launch::apply_env_vars(config.env_vars);
    launch::apply_env_vars(config.trainer.env_vars);
    launch::apply_env_vars(config.orchestrator.env_vars);
    if (config.inference) launch::apply_env_vars(config.inference->env_vars);
  }
  StopSignal stop;
  launch::check_start(config);
  const launch::RunLock lock(config.output_dir);
  const launch::PreparedFolder prepared = launch::prepare_run_folder(config);
  config::LogConfig log = config.trainer.log;
  log.step_interval = config.log.step_interval;
  launch::setup_logging(log, config.output_dir / "logs" / "rl.log");
  for (const std::string& note : prepared.notes) log::warning("{}", note);
  if (prepared.is_finished) return 0;
  config::write_resolved(*parsed.command, config, loaded.provenance);
  const auto page = launch::serve_run_page(config.dashboard, config.output_dir,
                                           {.has_checkpoints = config.trainer.ckpt.has_value(), .stop = [&stop] { stop.request_stop(); }});
  launch::Trackers trackers(launch::tracker_plan(config));
  const launch::UnsavedNotice unsaved(config.trainer.ckpt.has_value() || config.bench.has_value(), stop.token());
  const int status = is_single_node ? launch::run_single_node(config, stop.token()) : run_in_one_process(config, stop.token());
  trackers.finish(status != 0);
  if (status == 0) launch::log_weights(config.trainer.ckpt, config.output_dir);
  return stop.was_interrupted() && status == 0 ? 130 : status;
}

}  // namespace prl::apps
