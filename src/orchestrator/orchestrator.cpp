#include "orchestrator/orchestrator.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "net/task_group.hpp"
#include "orchestrator/training_loop.hpp"

namespace prl::orchestrator {

using namespace std::chrono_literals;

namespace {

constexpr auto kDrain = 10s;  // for cancelled coroutines to end

/// The options with what follows from others.
OrchestratorOptions completed(OrchestratorOptions options) {
  // Lock-step is always replayable: nothing depends on which rollout ends first.
  options.deterministic = options.deterministic || std::min(options.dispatch.max_async_level, options.dispatch.max_off_policy_steps) == 0;
  options.dispatch.ordered = options.deterministic;
  options.collect.batch_size = options.dispatch.batch_size;
  options.collect.max_rollout_tokens = options.pack.seq_len;
  return options;
}

OrchestratorServices completed(OrchestratorServices services, const OrchestratorOptions& options) {
  if (!services.chat || !services.samples || !services.policy)
    fail(ErrorCode::kInternal, "the orchestrator needs a chat client, a sample queue and a policy source");
  if (options.collect.loss == SampleLoss::kDistillation && !services.teacher)
    fail(ErrorCode::kInternal, "distillation needs a teacher that scores tokens");
  if (!services.eval_chat) services.eval_chat = services.chat;
  return services;
}

BatchAssembler::Options assembler_options(const OrchestratorOptions& o, const Demonstrations& demonstrations) {
  return {.dispatch = o.dispatch,
          .collect = o.collect,
          .sampler = o.sampler,
          .runner = {.ordered = o.deterministic,
                     .seed = o.seed,
                     .retry_wait = o.retry_wait,
                     .scoring = {.strategy = o.collect.strategy, .demonstrations = demonstrations, .max_tokens = o.pack.seq_len},
                     .headers_from_state = o.headers_from_state,
                     .teacher_headers_from_state = o.teacher_headers_from_state},
          .failures = {.max_final = std::max<std::int64_t>(100, 2 * o.dispatch.batch_size), .patience = o.inference_timeout},
          .resume_step = o.resume_step};
}

/// In lock-step too: an orchestrator that was started again collects a batch anew whose weights the trainer has left behind.
std::optional<std::int64_t> strict_lag(const OrchestratorOptions& o) {
  const std::int64_t lag = std::min(o.dispatch.max_async_level, o.dispatch.max_off_policy_steps);
  if (!o.dispatch.strict_async_level && lag > 0) return std::nullopt;
  return lag;
}

EvalRoundOptions eval_options(const OrchestratorOptions& o) {
  return {.evals = o.evals,
          .eval_base_model = o.eval_base_model,
          .skip_eval_on_resume = o.skip_eval_on_resume,
          .validation = o.validation,
          .output_dir = o.output_dir,
          .log_interval = o.status_interval,
          .headers_from_state = o.eval_headers_from_state};
}

StepRecorder::Options recorder_options(const OrchestratorOptions& o, bool is_lock_step) {
  StepRecorder::Options options{.output_dir = o.output_dir,
                                .log_tokens = o.log_tokens,
                                .checkpoints = o.checkpoints,
                                .max_steps = o.dispatch.max_steps,
                                .resume_step = o.resume_step,
                                .is_lock_step = is_lock_step};
  if (o.recovery) {
    options.recovery = o.recovery->folder;
    options.is_recovered = o.recovery->is_recovered && o.recovery->has_state;
    options.recorded_step = o.recovery->recorded_step;
  }
  return options;
}

}  // namespace

struct Orchestrator::Impl {
  Impl(OrchestratorOptions o, OrchestratorServices s)
      : options(completed(std::move(o))),
        services(completed(std::move(s), options)),
        policy(services.policy, {options.policy_timeout, options.update_timeout, strict_lag(options)}, control),
        assembler(context.get_executor(), assembler_options(options, services.demonstrations),
                  {.environments = services.environments,
                   .chat = services.chat,
                   .teacher = services.teacher,
                   .on_episode_end = [this] { on_episode_end(); },
                   .check_episode = [this](const env::Episode& e, PolicyVersion opened) { policy.check_versions(e, opened); }}),
        shipper(services.samples,
                {.pack = options.pack,
                 .timeout = options.ship_timeout,
                 .orders = options.orders,
                 .newest_policy = [source = services.policy] { return source->newest(); }},
                control),
        evals(eval_options(options),
              {.environments = services.environments,
               .chat = services.eval_chat,
               .monitor = services.monitor,
               .files = &files,
               .before_evals =
                   [this] {
                     if (options.cancel_inflight_on_eval) assembler.drop_groups(/*keep_tasks=*/false);
                   }},
              policy, control),
        recorder(recorder_options(options, assembler.dispatcher().is_lock_step()), assembler.environments(), services.monitor, files,
                 [this] { return assembler.state(); }),
        loop({.orders = options.orders,
              .batch_size = options.dispatch.batch_size,
              .status_interval = options.status_interval,
              .policy_timeout = options.policy_timeout,
              .strict_lag = strict_lag(options),
              .rollouts_from = services.chat->describe(),
              .is_recovered = is_recovered(),
              .add_metrics = [this](monitor::Metrics& metrics) { add_metrics(metrics); }},
             {control, policy, assembler, shipper, evals, recorder}) {}

  bool is_recovered() const { return options.recovery && options.recovery->is_recovered; }

  void add_metrics(monitor::Metrics& metrics) {
    if (concurrency) {
      metrics["concurrency/turnover"] = concurrency->take_turnover(net::Clock::now());
      metrics["concurrency/capacity"] = concurrency->capacity();
      metrics["concurrency/signal"] = static_cast<double>(concurrency->signal());
    }
    if (options.recovery) metrics["healing/orchestrator_restarts"] = static_cast<double>(options.recovery->num_restarts);
    if (services.engine_metrics) services.engine_metrics(metrics);
  }

  void on_episode_end() {
    if (concurrency) {
      concurrency->on_completion(assembler.dispatcher().num_inflight(), net::Clock::now());
      assembler.set_max_inflight(concurrency->cap());
    }
    loop.on_progress();
  }

  /// Keeps the number of rollouts in flight to what the engines have room for, until it is cancelled.
  asio::awaitable<void> follow_pressure() {
    std::int64_t told = concurrency->cap();
    for (;;) {
      auto reading = services.pressure->read(net::Clock::now() + std::chrono::seconds(ConcurrencyController::kPollSeconds));
      const std::optional<EnginePressure> pressure = co_await std::move(reading);
      if (pressure) concurrency->on_poll(*pressure, assembler.dispatcher().num_inflight(), net::Clock::now());
      const std::int64_t cap = concurrency->cap();
      assembler.set_max_inflight(cap);
      if (const std::int64_t num = concurrency->take_num_to_cancel(); num > 0) {
        log::info("the engines' caches are all but full: about {} of {} rollouts in flight are cancelled and begin again later", num,
                  assembler.dispatcher().num_inflight());
        assembler.set_max_inflight(cap, num);
      }
      if (2 * cap < told || cap > 2 * told) log::info("at most {} rollouts are in flight now, {} before", cap, std::exchange(told, cap));
      loop.on_progress();
      co_await net::sleep_for(std::chrono::seconds(ConcurrencyController::kPollSeconds));
    }
  }

  void begin_concurrency() {
    if (!options.concurrency || !services.pressure) return;
    if (options.deterministic) {
      log::warning("concurrency.initial_inflight has no effect in lock-step: which rollouts run at one time would depend on timing");
      return;
    }
    ConcurrencyController::Options limits = *options.concurrency;
    limits.max = assembler.dispatcher().max_inflight();
    concurrency.emplace(limits);
    assembler.set_max_inflight(concurrency->cap());
    roles->spawn("concurrency", control.guard(follow_pressure()));
  }

  /// Reads the engines' load for the metrics, until it is cancelled.
  asio::awaitable<void> follow_load() {
    for (;;) {
      auto reading = services.load->read(net::Clock::now() + std::chrono::seconds(LoadWindow::kPollSeconds));
      const std::optional<EnginePressure> pressure = co_await std::move(reading);
      if (pressure) loop.on_load(*pressure);
      co_await net::sleep_for(std::chrono::seconds(LoadWindow::kPollSeconds));
    }
  }

  asio::awaitable<void> wait_for_services() {
    log::info("waiting for inference at {}", services.eval_chat->describe());
    auto waiting = control.until_ended<void>(services.eval_chat->check_health(net::Clock::now() + options.inference_timeout));
    co_await std::move(waiting);
    if (services.chat != services.eval_chat) {
      log::info("waiting for the teacher at {}", services.chat->describe());
      auto waiting_more = control.until_ended<void>(services.chat->check_health(net::Clock::now() + options.teacher_timeout));
      co_await std::move(waiting_more);
    }
    if (services.teacher) {
      log::info("waiting for the teacher at {}", services.teacher->describe());
      auto waiting_more = control.until_ended<void>(services.teacher->check_ready(net::Clock::now() + options.teacher_timeout));
      co_await std::move(waiting_more);
    }
  }

  asio::awaitable<void> run_all() {
    auto waiting = wait_for_services();
    co_await std::move(waiting);
    if (auto state = recorder.resume(/*with_state=*/!options.skip_progress)) {
      for (const env::EnvironmentPtr& environment : assembler.environments())
        if (const auto* kept = state->env_states.if_contains(environment->name())) environment->load_state(*kept);
      if (options.skip_buffer)
        log::info("ckpt.skip_buffer: pools of tasks and {} rollouts that waited are left out", state->queue.size());
      else
        assembler.restore(std::move(*state));
    }
    // The trainer may have trained on the batch that the killed process sent last.
    const PolicyVersion first{options.resume_step};
    auto loading = policy.load_first(first, is_recovered() ? PolicyVersion{first.value + 1} : first);
    co_await std::move(loading);
    assembler.begin(policy.version());
    if (is_recovered() && options.recovery->has_state)
      evals.begin_again(options.recovery->evaluated_step, options.recovery->validated_step);
    else
      evals.begin(policy.version(), /*is_resumed=*/options.resume_step > 0);
    begin_concurrency();
    if (services.load) roles->spawn("engine load", control.guard(follow_load()));
    std::function<void()> on_update = [this] {
      assembler.set_version(policy.version());
      loop.on_progress();
    };
    roles->spawn("policy watcher", control.guard(policy.follow(std::move(on_update))));
    auto looping = loop.run();
    co_await std::move(looping);
    assembler.drop_groups(/*keep_tasks=*/true);  // a checkpoint keeps their tasks, and a resumed run starts them again
    shipper.close();                             // before the files: a trainer that is stopped too waits for this word
    auto saving = recorder.save_last();
    co_await std::move(saving);
    if (recorder.is_done()) {
      auto evaluating = evals.run_last(PolicyVersion{recorder.progress().step});
      co_await std::move(evaluating);
    }
    auto draining = shipper.drain(recorder.progress().step);
    co_await std::move(draining);
  }

  asio::awaitable<void> main_role() {
    auto all = run_all();
    auto guarded = control.guard(std::move(all));
    co_await std::move(guarded);
    if (control.is_stopped()) close_queue();
    control.finish();
  }

  /// Also of a run that was stopped before its first batch: the trainer, which is stopped too, waits for this word.
  void close_queue() {
    try {
      shipper.close();
    } catch (const Error& error) {
      log::warning("the trainer was not told that no more samples come: {}", error.what());
    }
  }

  OrchestratorReport run(std::stop_token stop) {
    PRL_CHECK(!std::exchange(has_run, true), "Orchestrator::run is called once");
    control.begin(std::move(stop));
    roles = std::make_unique<net::TaskGroup>(context.get_executor(), "orchestrator");
    auto guard = std::make_unique<asio::executor_work_guard<asio::io_context::executor_type>>(context.get_executor());
    roles->spawn("main loop", main_role());
    while (!control.is_finished()) context.run_one_for(100ms);
    roles->cancel();
    assembler.drop_groups(/*keep_tasks=*/true);
    guard.reset();
    context.run_for(kDrain);
    const bool is_stopped = control.is_stopped();
    if (control.has_failed()) {
      const Error error = net::to_error(control.failure());
      if (!(is_stopped && error.code() == ErrorCode::kCancelled)) throw error;
    }
    const EpisodeCounts& counts = assembler.counts();
    PRL_CHECK(counts.num_started == counts.num_processed + counts.num_cancelled + counts.num_dropped,
              "episodes: {} started, {} processed, {} cancelled, {} dropped", counts.num_started, counts.num_processed,
              counts.num_cancelled, counts.num_dropped);
    return {.progress = recorder.progress(),
            .episodes = counts,
            .num_dropped_queued = assembler.num_dropped_queued(),
            .max_staleness = assembler.max_staleness(),
            .was_stopped = is_stopped,
            .final_evals = evals.results()};
  }

  // The context outlives everything that holds an executor of it.
  asio::io_context context{1};
  OrchestratorOptions options;
  OrchestratorServices services;
  net::OffThread files;
  RunControl control;
  PolicyFollower policy;
  BatchAssembler assembler;
  std::optional<ConcurrencyController> concurrency;
  BatchShipper shipper;
  EvalRounds evals;
  StepRecorder recorder;
  TrainingLoop loop;
  std::unique_ptr<net::TaskGroup> roles;
  bool has_run = false;
};

Orchestrator::Orchestrator(OrchestratorOptions options, OrchestratorServices services)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(services))) {}
Orchestrator::~Orchestrator() = default;

OrchestratorReport Orchestrator::run(std::stop_token stop) { return impl_->run(std::move(stop)); }

}  // namespace prl::orchestrator
