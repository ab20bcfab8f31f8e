#include <filesystem>
#include <optional>
#include <string>

#include "apps/commands.hpp"
#include "base/log.hpp"
#include "base/stop_signal.hpp"
#include "config/eval_config.hpp"
#include "config/inference_config.hpp"
#include "config/orchestrator_config.hpp"
#include "config/sft_config.hpp"
#include "config/tool_config.hpp"
#include "config/trainer_config.hpp"
#include "launch/batch_job.hpp"
#include "launch/dry_run.hpp"
#include "launch/eval_role.hpp"
#include "launch/inference_group.hpp"
#include "launch/inference_role.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"
#include "launch/orchestrator_role.hpp"
#include "launch/rank_launch.hpp"
#include "launch/ranks.hpp"
#include "launch/run_end.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_lock.hpp"
#include "launch/run_page.hpp"
#include "launch/run_spans.hpp"
#include "launch/sft_role.hpp"
#include "launch/start_checks.hpp"
#include "launch/synthesize_role.hpp"
#include "launch/trackers.hpp"
#include "launch/trainer_role.hpp"
#include "tools/router.hpp"

namespace prl::apps {
namespace {

/// The log of a command in the attempt that it begins or joins.
std::filesystem::path log_file(const config::LogConfig& log, const std::filesystem::path& output_dir, const config::ParsedCommand& parsed) {
  if (!log.file) return {};
  const std::string_view name = config::command_name(*parsed.command);
  try {
    (void)launch::join_attempt(output_dir, name);
  } catch (const Error& error) {
    throw error.with_context("log.file = true");
  }
  return launch::log_file(output_dir, fmt::format("{}.log", name));
}

/// Hands the command to SLURM instead of running it here.
template <typename Config>
int submit(const config::ParsedCommand& parsed, const config::Loaded<Config>& loaded) {
  config::write_resolved(*parsed.command, loaded.config, loaded.provenance);
  const launch::BatchJob job = launch::batch_job(loaded.config);
  launch::submit_batch_job(job, launch::write_batch_script(job));
  return 0;
}

/// Loads a role's configuration, sets up logging and signals, and runs it. A clean stop by Ctrl-C exits with 130.
/// Its log is <command>.log of an attempt (launch/log_folder.hpp), unless a launcher started it, which keeps what the role prints in that
/// file.
template <typename Config, typename Run>
int run_role(const config::ParsedCommand& parsed, Run run) {
  const auto loaded = config::load<Config>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded, [&] { launch::check_dry_run(loaded.config); })) return 0;
  if constexpr (requires { loaded.config.slurm; }) {
    if (loaded.config.slurm) return submit(parsed, loaded);
  }
  if constexpr (requires { loaded.config.env_vars; }) launch::apply_env_vars(loaded.config.env_vars);
  StopSignal stop;
  const std::filesystem::path& folder = loaded.config.output_dir;
  launch::setup_logging(loaded.config.log,
                        launch::is_folder_prepared(folder) ? std::filesystem::path() : log_file(loaded.config.log, folder, parsed));
  const launch::RunSpans spans(std::string(config::command_name(*parsed.command)), {}, std::nullopt);
  const int status = run(loaded, stop.token());
  return stop.was_interrupted() && status == 0 ? 130 : status;
}

/// How long a rank waits for the one that makes the folder ready.
template <typename Config>
std::chrono::milliseconds start_timeout(const Config& config) {
  if constexpr (requires { config.dist_timeout_seconds; }) return std::chrono::seconds(config.dist_timeout_seconds);
  return std::chrono::seconds(600);
}

/// The same for a role that keeps a run in output_dir: the folder is made ready as `prl rl` makes it, unless it did so and started
/// this process. `lock_name`: no second one with the same lock may run in the folder; trainer and orchestrator may, beside each other.
template <typename Config, typename Run>
int run_saving_role(const config::ParsedCommand& parsed, const char* lock_name, Run run) {
  auto loaded = config::load<Config>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded, [&] { launch::check_dry_run(loaded.config); })) return 0;
  if constexpr (requires { loaded.config.slurm; }) {
    if (loaded.config.slurm) return submit(parsed, loaded);
  }
  Config& config = loaded.config;
  launch::apply_env_vars(config.env_vars);
  StopSignal stop;
  std::optional<launch::RunLock> lock;
  launch::PreparedFolder prepared;
  std::filesystem::path log;
  bool prepares = false;
  if (!launch::is_folder_prepared(config.output_dir)) {
    const launch::RankEnv rank = launch::rank_env();
    std::optional<launch::StopWhileMeeting> watch;
    if (rank.size > 1) watch.emplace(stop.token());
    // A first rank that died before all had met is started again: its folder is ready, and the others may have begun.
    if (rank.is_first() && !launch::was_start_told(rank)) {
      try {
        launch::check_start(config);
        config::check_resolved_place(*parsed.command, config);
        lock.emplace(config.output_dir, lock_name);
        // One that a launcher starts again has made its folder ready before, and holds what it goes on from.
        if (std::getenv(launch::kRestartsVariable) == nullptr) prepared = launch::prepare_run_folder(config);
        launch::tell_start(rank, prepared.is_finished);
      } catch (const std::exception& error) {
        launch::tell_failure(rank, error.what());
        throw;
      }
      log = log_file(config.log, config.output_dir, parsed);
      prepares = true;
    } else {
      prepared.is_finished = launch::wait_for_start(rank, start_timeout(config));
    }
  }
  launch::setup_logging(config.log, log);
  for (const std::string& note : prepared.notes) prl::log::warning("{}", note);
  if (prepared.is_finished) return 0;
  if (prepares) config::write_resolved(*parsed.command, config, loaded.provenance);
  std::unique_ptr<dashboard::PageServer> page;
  if constexpr (requires { config.dashboard; }) {
    if (lock)
      page = launch::serve_run_page(config.dashboard, config.output_dir,
                                    {.has_checkpoints = config.ckpt.has_value(), .stop = [&stop] { stop.request_stop(); }});
  }
  std::optional<launch::Trackers> trackers;
  if (lock) trackers.emplace(launch::tracker_plan(config));
  std::optional<launch::UnsavedNotice> unsaved;
  // Of the orchestrator alone nothing is lost with its end.
  if constexpr (requires { config.optim; }) {
    bool is_fine = config.ckpt.has_value() || config.bench.has_value();
    if constexpr (requires { config.max_concurrent_runs; }) is_fine = is_fine || config.max_concurrent_runs > 1;  // each run says it
    if (lock) unsaved.emplace(is_fine, stop.token());
  }
  std::optional<std::filesystem::path> trace;
  if constexpr (requires { config.trace_path; }) trace = config.trace_path;
  const int status = [&] {
    const launch::TraceOfProcesses merged(lock ? trace : std::nullopt);
    const launch::RunSpans spans(std::string(config::command_name(*parsed.command)), config.output_dir, trace);
    return run(config, stop.token());
  }();
  if (trackers) trackers->finish(status != 0);
  if constexpr (requires { config.optim; }) {
    if (lock && status == 0) launch::log_weights(config.ckpt, config.output_dir);
  }
  return stop.was_interrupted() && status == 0 ? 130 : status;
}

}  // namespace

int run_inference(const config::ParsedCommand& parsed) {
  // A server is meant to be stopped: ending on a signal is its normal end.
  const int status = run_role<config::InferenceConfig>(parsed, [&](const auto& loaded, auto stop) {
    const config::ParallelConfig& parallel = loaded.config.parallel;
    if (std::holds_alternative<config::InferenceMultiNode>(loaded.config.deployment) && !parallel.dp_address)
      fail(ErrorCode::kInvalidArgument,
           "deployment.type = \"multi_node\": on each node start `prl launch --node-rank N --rdzv-endpoint HOST:PORT inference @ "
           "infer.toml`, "
           "or add a [slurm] section, which does");
    if (auto pools = launch::pools_of(loaded.config, /*engines_per_node=*/1)) {
      if (std::getenv(launch::kEngineKindVariable) != nullptr) return launch::run_inference_role(loaded.config, stop);
      config::write_resolved(*parsed.command, loaded.config, loaded.provenance);
      return launch::run_inference_group(loaded.config, stop, "", std::move(pools));
    }
    if (parallel.dp == 1 && !parallel.dp_address) return launch::run_inference_role(loaded.config, stop);
    config::write_resolved(*parsed.command, loaded.config, loaded.provenance);
    return launch::run_inference_group(loaded.config, stop);
  });
  return status == 130 ? 0 : status;
}
int run_inference_of_node(const config::ParsedCommand& parsed, const config::LaunchConfig& options) {
  const auto loaded = config::load<config::InferenceConfig>(config::Command::kInference, parsed.args);
  if (config::finish_early(config::Command::kInference, loaded, [&] { launch::check_dry_run(loaded.config); })) return 0;
  const auto* nodes = std::get_if<config::InferenceMultiNode>(&loaded.config.deployment);
  const auto* split = std::get_if<config::InferenceDisaggregated>(&loaded.config.deployment);
  if (nodes == nullptr && split == nullptr)
    fail(ErrorCode::kInvalidArgument,
         "`prl launch inference` is for deployment.type = \"multi_node\" or \"disaggregated\"; `prl inference` starts engines on one");
  const launch::NodesWanted wanted = split != nullptr
                                         ? launch::NodesWanted{.num_nodes = config::num_nodes_of(*split), .per_node = split->gpus_per_node}
                                         : launch::NodesWanted{.num_nodes = nodes->num_nodes, .per_node = nodes->gpus_per_node};
  const launch::NodePlace place = launch::find_node(options, wanted);
  config::InferenceConfig config = loaded.config;
  std::optional<launch::EnginePools> pools = launch::pools_of(config, config::num_engines_on(config, place.per_node));
  launch::place_engines(config, place);
  launch::apply_env_vars(config.env_vars);
  StopSignal stop;
  launch::setup_logging(config.log, log_file(config.log, config.output_dir, parsed));
  config::write_resolved(config::Command::kInference, config, loaded.provenance);
  return launch::run_inference_group(config, stop.token(), place.host.value_or(""), std::move(pools));
}
int run_router(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::RouterToolConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded) || loaded.config.dry_run) return 0;
  StopSignal stop;
  launch::setup_logging(loaded.config.log, log_file(loaded.config.log, loaded.config.output_dir, parsed));
  return tools::run_router(loaded.config, stop.token());
}
int run_trainer(const config::ParsedCommand& parsed) {
  return run_saving_role<config::TrainerConfig>(parsed, launch::RunLock::kFileName, launch::run_trainer_role);
}
int run_orchestrator(const config::ParsedCommand& parsed) {
  return run_saving_role<config::OrchestratorConfig>(parsed, ".lock.orchestrator", launch::run_orchestrator_role);
}
int run_sft(const config::ParsedCommand& parsed) {
  return run_saving_role<config::SftConfig>(parsed, launch::RunLock::kFileName, [](const config::SftConfig& config, std::stop_token stop) {
    const auto* node = std::get_if<config::SftSingleNode>(&config.deployment);
    if (const auto* nodes = std::get_if<config::SftMultiNode>(&config.deployment); nodes != nullptr && !launch::rank_env().is_told)
      fail(ErrorCode::kInvalidArgument,
           "deployment.type = \"multi_node\" needs {} nodes: on each of them start `prl launch --node-rank N --rdzv-endpoint HOST:PORT sft "
           "@ "
           "sft.toml`, or add a [slurm] section, which does",
           nodes->num_nodes);
    const launch::RankEnv rank = launch::rank_env();
    const bool is_launcher = node != nullptr && (node->num_gpus > 1 || config.eval) && !rank.is_told;
    if (config.eval && !is_launcher && rank.is_first() && !launch::is_folder_prepared(config.output_dir))
      log::warning("ranks that are started one by one have no process that evaluates: start `prl evals @ {}` where it sees that folder",
                   (config.output_dir / "configs" / "evals.json").string());
    return is_launcher ? launch::run_sft_ranks(config, stop) : launch::run_sft_role(config, stop);
  });
}
int run_eval(const config::ParsedCommand& parsed) {
  return run_role<config::EvalConfig>(parsed, [&](const auto& loaded, auto stop) {
    config::write_resolved(*parsed.command, loaded.config, loaded.provenance);
    return launch::run_eval_role(loaded.config, find_path(loaded.raw, "client.base_url") != nullptr, stop);
  });
}
int run_evals(const config::ParsedCommand& parsed) {
  return run_role<config::EvalsConfig>(parsed, [&](const auto& loaded, auto stop) {
    if (loaded.config.inference) launch::apply_env_vars(loaded.config.inference->env_vars);
    // A run that is evaluated has written it.
    if (!launch::is_folder_prepared(loaded.config.output_dir)) config::write_resolved(*parsed.command, loaded.config, loaded.provenance);
    return launch::run_evals_role(loaded.config, find_path(loaded.raw, "client.base_url") != nullptr, stop);
  });
}
int run_synthesize(const config::ParsedCommand& parsed) {
  return run_role<config::SynthesizeConfig>(parsed, [&](const auto& loaded, auto stop) {
    config::write_resolved(*parsed.command, loaded.config, loaded.provenance);
    return launch::run_synthesize_role(loaded.config, find_path(loaded.raw, "client.base_url") != nullptr, stop);
  });
}

}  // namespace prl::apps
