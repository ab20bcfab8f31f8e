#include "orchestrator/step_recorder.hpp"

#include <set>
#include <utility>

#include "base/log.hpp"
#include "base/units.hpp"
#include "orchestrator/rollout_log.hpp"

namespace prl::orchestrator {

StepRecorder::StepRecorder(Options options, std::vector<env::EnvironmentPtr> environments, monitor::Monitor* monitor, net::OffThread& files,
                           StateOf state_of)
    : options_(std::move(options)),
      environments_(std::move(environments)),
      monitor_(monitor),
      files_(files),
      state_of_(std::move(state_of)) {}

std::optional<OrchestratorState> StepRecorder::resume(bool with_state) {
  progress_.step = options_.resume_step;
  if (options_.resume_step == 0 || !with_state) return std::nullopt;
  if (!options_.checkpoints && !options_.is_recovered)
    fail(ErrorCode::kInvalidArgument, "resume_step = {}, but there is no checkpoint folder", options_.resume_step);
  const std::filesystem::path& folder = options_.is_recovered ? *options_.recovery : options_.checkpoints->folder;
  OrchestratorState state = load_state(folder, options_.resume_step, environments_);
  progress_ = state.progress;
  log::info("resumed after batch {}: {} rollouts wait, {} tasks are started again", progress_.step, state.queue.size(),
            state.unfinished_tasks.size());
  return state;
}

asio::awaitable<void> StepRecorder::keep_recovery() {
  if (!options_.recovery) co_return;
  auto looking = current_state();
  const StatePtr state = co_await std::move(looking);
  std::function<bool()> work = [state, folder = *options_.recovery, envs = environments_] {
    orchestrator::keep_recovery(folder, *state, envs);
    return true;
  };
  auto keeping = files_.run<bool>(std::move(work), net::Clock::now() + kFileDeadline, "the state for a restart");
  co_await std::move(keeping);
}

void StepRecorder::count(const CollectedBatch& batch, std::int64_t step) {
  progress_.step = step;
  std::set<std::int64_t> groups;
  for (const ReadyRollout& rollout : batch.rollouts) {
    progress_.total_tokens += count_tokens(rollout.episode).total();
    groups.insert(rollout.group.value);
  }
  progress_.total_samples += static_cast<std::int64_t>(batch.rollouts.size());
  progress_.total_problems += static_cast<std::int64_t>(groups.size());
}

asio::awaitable<void> StepRecorder::record(std::shared_ptr<const CollectedBatch> batch, StepFacts facts, monitor::Metrics pools) {
  monitor::Metrics metrics = step_metrics(*batch, facts, progress_);
  metrics.merge(pools);
  log::step("{}", step_line(*batch, facts));
  if (!options_.output_dir.empty()) {
    std::function<bool()> work = [batch, folder = options_.output_dir, step = facts.step, log_tokens = options_.log_tokens] {
      if (log_tokens) write_train_tokens(folder, step, *batch);
      write_train_rollouts(folder, step, *batch);
      return true;
    };
    auto writing = files_.run<bool>(std::move(work), net::Clock::now() + kFileDeadline, "the rollout log");
    co_await std::move(writing);
  }
  if (options_.checkpoints && options_.is_lock_step) {
    auto looking = current_state();
    state_at_ship_ = co_await std::move(looking);
  }
  if (!is_checkpoint_due()) {
    if (monitor_ != nullptr && facts.step > options_.recorded_step) monitor_->log(facts.step, metrics);
    co_return;
  }
  // A checkpoint that counts has its row: the row goes first.
  std::function<void()> log_row = [metrics = std::move(metrics), step = facts.step, begin = net::Clock::now(),
                                   monitor = facts.step > options_.recorded_step ? monitor_ : nullptr]() mutable {
    if (monitor == nullptr) return;
    metrics["time/save_ckpt"] = seconds_since(begin);
    monitor->log(step, metrics);
    monitor->sync();
  };
  auto looking = current_state();
  StatePtr state = co_await std::move(looking);
  auto saving = save(std::move(state), std::move(log_row));
  co_await std::move(saving);
}

bool StepRecorder::is_checkpoint_due() const {
  if (is_done() || !options_.checkpoints) return false;
  if (save_after_ == progress_.step) return true;
  return options_.checkpoints->interval && progress_.step % *options_.checkpoints->interval == 0;
}

asio::awaitable<void> StepRecorder::save_last() {
  if (!options_.checkpoints || progress_.step <= options_.resume_step || saved_step_ == progress_.step) co_return;
  std::function<void()> sync_rows = [monitor = monitor_] {
    if (monitor != nullptr) monitor->sync();
  };
  StatePtr state = state_at_ship_;
  if (!state) {
    auto looking = current_state();
    state = co_await std::move(looking);
  }
  auto saving = save(std::move(state), std::move(sync_rows));
  co_await std::move(saving);
}

asio::awaitable<StepRecorder::StatePtr> StepRecorder::current_state() {
  auto state = std::make_shared<OrchestratorState>(state_of_());
  state->progress = progress_;
  for (const env::EnvironmentPtr& environment : environments_) {
    auto saving = environment->save_state();
    boost::json::value kept = co_await std::move(saving);
    if (!kept.is_null()) state->env_states[environment->name()] = std::move(kept);
  }
  co_return state;
}

asio::awaitable<void> StepRecorder::save(StatePtr state, std::function<void()> before_commit) {
  std::function<bool()> work = [state, checkpoints = *options_.checkpoints, envs = environments_, before_commit] {
    save_state(checkpoints.folder, *state, envs, before_commit);
    // Whichever role completes a step makes room for it: the trainer saves its part at another time.
    const std::string units[] = {"trainer", kCheckpointUnit};
    io::clean_checkpoints(checkpoints.folder, units, checkpoints.retention);
    return true;
  };
  auto saving = files_.run<bool>(std::move(work), net::Clock::now() + kFileDeadline, "the checkpoint");
  co_await std::move(saving);
  saved_step_ = state->progress.step;
}

}  // namespace prl::orchestrator
