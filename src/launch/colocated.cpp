#include "launch/colocated.hpp"

#include <exception>
#include <mutex>
#include <thread>

#include "base/log.hpp"
#include "base/log_progress.hpp"
#include "env/python/worker_templates.hpp"
#include "launch/engine_client.hpp"
#include "launch/engine_host.hpp"
#include "launch/local_pressure.hpp"
#include "launch/log_folder.hpp"
#include "launch/memory_plan.hpp"
#include "launch/metric_services.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/policy_sources.hpp"
#include "launch/ranks.hpp"
#include "launch/rl_progress.hpp"
#include "launch/run_folder.hpp"
#include "launch/trainer_role.hpp"
#include "monitor/sinks.hpp"
#include "net/errors.hpp"
#include "net/io_runtime.hpp"
#include "orchestrator/metrics.hpp"
#include "rollouts/local_queue.hpp"
#include "trainer/metrics.hpp"

namespace prl::launch {
namespace {

/// The first failure of any role; asks the others to stop.
class FirstFailure {
 public:
  explicit FirstFailure(std::stop_source& stop) : stop_(&stop) {}
  /// Requested by a failure alone.
  std::stop_token abort() const { return abort_.get_token(); }
  void record(const char* role, const Error& error) {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = error.with_context(role);
    abort_.request_stop();
    stop_->request_stop();
  }
  std::optional<Error> take() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  std::stop_source* stop_;
  std::stop_source abort_;
  std::mutex mutex_;
  std::optional<Error> failure_;
};

template <typename Body>
void guarded(const char* role, FirstFailure& failure, Body body) {
  log::set_thread_role(role);
  try {
    body();
  } catch (const std::exception&) {
    failure.record(role, net::to_error(std::current_exception()));
  }
}

/// A step's line is of the run, whichever role's thread completes it.
void show_step(const std::string& line) {
  const std::string role = log::thread_role();
  log::set_thread_role("");
  log::step("{}", line);
  log::set_thread_role(role);
}

/// One console line per trained step, of what both roles say of it.
void show_progress(RlProgress& progress, monitor::Monitor& orchestrator, monitor::Monitor& trainer) {
  orchestrator.add_sink(monitor::make_callback_sink(
      [&progress](std::int64_t step, const monitor::Metrics& metrics) { progress.add_orchestrator(step, metrics); }));
  trainer.add_sink(monitor::make_callback_sink(
      [&progress](std::int64_t step, const monitor::Metrics& metrics) { progress.add_trainer(step, metrics, RlProgress::Clock::now()); }));
}

void log_end(const trainer::RlRunOptions& run, const trainer::TrainRunResult& trained, const orchestrator::OrchestratorReport& report,
             const ProofLog& proofs, const RlProgress& progress) {
  log::success("rl {}: {} steps, {} episodes, largest staleness {}, {} weight updates proven, probe_diff={} mismatch_kl={:.3e}",
               trained.was_stopped ? "stopped" : "finished", trained.last_step, report.episodes.num_started, report.max_staleness,
               proofs.num_updates, proofs.max_probe_difference, progress.mean_mismatch_kl());
  if (trained.was_stopped && trained.last_checkpoint)
    log::success("checkpoint of step {} in {}; continue with --ckpt.resume-step -1", *trained.last_checkpoint,
                 run.checkpoint->checkpoints.string());
}

/// The console gets one line per trained step and what needs attention; the rest is in the roles' own logs.
void open_logs(const std::filesystem::path& output_dir) {
  for (const char* role : {"trainer", "orchestrator", "inference"})
    log::add_role_file(role, log_file(output_dir, fmt::format("{}.log", role)), {.level = log::Level::kSuccess, .steps = false});
}

/// The engine gets its part of the plan, and the cache that fits.
void share_with_engine(MemoryPlan& plan, config::InferenceConfig& inference, trainer::Policy& policy, const std::filesystem::path& run) {
  add_engine(plan, inference, policy.config(), policy.options().compute, version_bytes(policy.options(), policy.config()));
  inference.kv.num_blocks = static_cast<int>(plan.num_kv_blocks);
  log::info("memory plan: {}", plan.to_string());
  keep_plan(plan, "rl", run);
}

/// What the two roles of the run report to.
struct RoleMonitors {
  std::unique_ptr<monitor::Monitor> orchestrator, trainer;
};

RoleMonitors make_monitors(const config::RlConfig& config) {
  monitor::MetricSet declared;
  declared.declare(orchestrator::metric_infos());
  RoleMonitors monitors{
      .orchestrator =
          make_monitor(std::move(declared), kOrchestratorRows, config.orchestrator.output_dir, config.orchestrator.file_monitor),
      .trainer = make_monitor(trainer::trainer_metrics(), kTrainerRows, config.trainer.output_dir, config.trainer.file_monitor)};
  add_heartbeat(*monitors.orchestrator, config.orchestrator.heartbeat);
  add_heartbeat(*monitors.trainer, config.trainer.heartbeat);
  add_metrics_server(*monitors.trainer, config.trainer.metrics_server);
  return monitors;
}

/// Error{kInvalidArgument} if sampling has fields that an engine in this process does not know.
void check_requests(const config::OrchestratorConfig& config, const orchestrator::OrchestratorServices& services) {
  if (config.training_mode != config::TrainingMode::kSft)
    for (const orchestrator::TrainEnv& train : services.environments) check_local_sampling(train.sampling);
  if (!config.eval) return;
  for (const config::EvalEnvConfig& entry : config.eval->env)
    check_local_sampling(sampling_params(entry.sampling.value_or(config.eval->sampling)));
}

}  // namespace

int run_colocated(const config::RlConfig& config, std::stop_token outer_stop) {
  PRL_CHECK(config.inference.has_value(), "one process without an [inference] section");
  check_expert_ranks({}, config.trainer.model);
  config::InferenceConfig inference = *config.inference;
  const auto runtime = make_runtime(config.trainer.compute);
  open_logs(config.output_dir);
  const trainer::GradientStepOptions training = step_options(config.trainer, runtime);
  const trainer::PolicyOptions options = policy_options(config.trainer, runtime);
  const nn::ModelConfig model = trainer::model_config(options);
  PlannedPolicy planned =
      make_policy(runtime, options, training, config.trainer.model.seq_len,
                  is_planned(*runtime) ? least_engine_bytes(inference, model, options.compute, version_bytes(options, model)) : 0);
  trainer::Policy& policy = *planned.policy;
  std::optional<MemoryPlan>& plan = planned.plan;
  trainer::RlRunOptions run =
      rl_run_options(config.trainer, training, measured_peak_flops(config.trainer.compute, policy.options().compute));
  add_records(run, config.trainer, *runtime);
  run.first_notice = std::chrono::minutes(1);  // here a failure of the others is seen at once, and sampling may take as long as training
  const std::int64_t resume_step = orchestrator_resume_step(config.orchestrator);

  if (plan) share_with_engine(*plan, inference, policy, config.output_dir);
  // On a GPU each role has a stream, and with it a runtime, of its own; on the CPU one count of memory serves both.
  const auto engine_runtime = runtime->device().kind == DeviceKind::kCpu ? runtime : make_runtime(inference.compute);
  EngineHost host(inference, engine_runtime, policy.weights());
  auto channel = weights::make_local_channel();
  auto policy_source = std::make_shared<LocalPolicySource>(channel->follow(), host.engine());
  policy_source->record_proofs_in(config.output_dir / kProofFile);
  const auto* transport = std::get_if<config::LocalRollouts>(&config.orchestrator.rollout_transport);
  PRL_CHECK(transport != nullptr, "one process with a rollout_transport between processes");
  rollouts::LocalSampleQueue queue(1, transport->capacity);

  const TextSetup text = load_policy_text(config.orchestrator);
  const auto templates = std::make_shared<env::python::WorkerTemplates>();
  OrchestratorTransports transports;
  transports.templates = templates;
  transports.generate = make_engine_client(host.engine(), host.text().tokenizer);
  transports.samples = queue.make_sender();
  transports.policy = policy_source;
  transports.load = make_local_pressure(host.engine());
  // Requests to a teacher are the only ones of such a run that leave the process.
  std::optional<net::IoRuntime> io;
  if (config.orchestrator.teacher) transports.io = io.emplace(1, "teacher").executor();
  const RoleMonitors monitors = make_monitors(config);
  orchestrator::OrchestratorServices services =
      orchestrator_services(config.orchestrator, text, std::move(transports), monitors.orchestrator.get());
  check_requests(config.orchestrator, services);

  std::stop_source stop;
  std::stop_callback forward(outer_stop, [&stop] { stop.request_stop(); });
  FirstFailure failure(stop);
  run.abort = failure.abort();
  orchestrator::OrchestratorReport report;
  trainer::TrainRunResult trained;
  RlProgress progress(config.trainer.max_steps, resume_step, show_step);
  const OrchestratorBench bench(*monitors.orchestrator, config.orchestrator.bench);
  show_progress(progress, *monitors.orchestrator, *monitors.trainer);
  {
    std::jthread orchestrator_thread([&] {
      // Outlives the guard: its end closes the sample queue, and the trainer must not take that for the first failure.
      std::optional<orchestrator::Orchestrator> role;
      guarded("orchestrator", failure, [&] {
        role.emplace(orchestrator_options(config.orchestrator, text.tokenizer->vocab_size(), resume_step, templates), std::move(services));
        report = role->run(stop.get_token());
      });
    });
    std::jthread trainer_thread([&] {
      guarded("trainer", failure, [&] {
        const trainer::ReceiverFactory receiver = [&](std::int64_t) { return queue.make_receiver(0); };
        trained = trainer::run_rl_trainer(run, policy, receiver, channel.get(), *monitors.trainer, stop.get_token());
      });
    });
  }
  progress.finish();
  host.engine().shutdown();
  if (const auto error = failure.take()) throw *error;
  if (!trained.was_stopped) bench.write();
  log_end(run, trained, report, policy_source->proofs(), progress);
  if (plan) plan->log_peak(runtime->peak_bytes() + engine_runtime->peak_bytes(), "trainer and engine");
  return 0;
}

}  // namespace prl::launch
