#include "orchestrator/batch_assembler.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/log.hpp"

namespace prl::orchestrator {

namespace {

std::vector<env::EnvironmentPtr> environments_of(const std::vector<TrainEnv>& envs) {
  std::vector<env::EnvironmentPtr> out;
  for (const TrainEnv& train_env : envs) out.push_back(train_env.environment);
  return out;
}

/// The batch of `step` takes what version step - 1 alone has sampled.
void check_lock_step(const env::Episode& episode, std::int64_t step) {
  const std::int64_t wanted = step - 1;
  const auto start = episode.version_start();
  const auto end = episode.version_end();
  if ((start && start->value != wanted) || (end && end->value != wanted))
    fail(ErrorCode::kOutOfSync, "lock-step: a rollout for batch {} was sampled by v{} to v{}, wanted v{} alone", step, start->value,
         end->value, wanted);
}

/// The options with the environments' own numbers of learners.
DispatcherOptions with_learners(DispatcherOptions options, const std::vector<env::EnvironmentPtr>& environments) {
  options.num_learners.clear();
  for (std::size_t i = 0; i < environments.size(); ++i) {
    options.num_learners.push_back(environments[i]->num_learners());
    const std::int64_t of_group = options.group_size_of(static_cast<std::int64_t>(i)) * options.num_learners.back();
    if (options.num_learners.back() > 1 && options.batch_size % of_group != 0)
      log::warning(
          "{}: a group gives {} rollouts, {} for each of its episodes; batches of {} leave a part of one over, which lock-step drops",
          environments[i]->name(), of_group, options.num_learners.back(), options.batch_size);
  }
  return options;
}

}  // namespace

BatchAssembler::BatchAssembler(asio::any_io_executor executor, Options options, Services services)
    : options_(std::move(options)),
      services_(std::move(services)),
      environments_(environments_of(services_.environments)),
      sampler_(environments_, options_.sampler),
      collector_(options_.collect),
      runner_(std::move(executor), options_.runner, services_.environments, services_.chat, services_.teacher),
      failures_(options_.failures) {
  runner_.on_episode_end([this](GroupId id) {
    dispatcher_->on_episode_end(id);
    if (services_.on_episode_end) services_.on_episode_end();
  });
  options_.dispatch = with_learners(std::move(options_.dispatch), environments_);
  // Made here so that contradictions show before anything starts; made again with the engines' version in begin().
  make_dispatcher(PolicyVersion{options_.resume_step});
}

void BatchAssembler::make_dispatcher(PolicyVersion version) {
  dispatcher_ = std::make_unique<Dispatcher>(
      options_.dispatch, [this] { return sampler_.draw(); }, options_.resume_step + 1, version);
}

void BatchAssembler::restore(OrchestratorState state) {
  sampler_.load(state.sampler);
  collector_.restore_queue(std::move(state.queue));
  restored_tasks_ = std::move(state.unfinished_tasks);
}

void BatchAssembler::begin(PolicyVersion version) {
  make_dispatcher(version);
  dispatcher_->set_pending_tasks(std::exchange(restored_tasks_, {}));
  drop_stale_queued();  // the bounds may be tighter than those of the run that saved the queue
}

BatchAssembler::Opened BatchAssembler::open_groups(net::TimePoint now) {
  runner_.reap();
  const DispatchPlan plan = dispatcher_->plan(now);
  for (const GroupId id : plan.cancel) drop_group(id);
  for (const EpisodeStart& info : plan.start) runner_.start(info);
  return {.has_started = !plan.start.empty(), .is_gate_closed = plan.is_gate_closed};
}

bool BatchAssembler::collect_one() {
  if (collector_.is_ready() && !dispatcher_->waits_for_open_groups()) return false;
  std::optional<FinishedGroup> group = runner_.take_finished();
  if (!group) return false;
  const GroupId id = group->id;
  const TaskRef task = group->task;
  for (const env::Episode& episode : group->episodes) {
    if (dispatcher_->is_lock_step()) check_lock_step(episode, dispatcher_->step());
    if (services_.check_episode) services_.check_episode(episode, group->version);
    if (const auto error = failures_.add(episode, net::Clock::now())) throw *error;
  }
  const BatchCollector::Added added = collector_.add(std::move(*group), *environments_[static_cast<std::size_t>(task.env_idx)]);
  if (added.has_survivors) sampler_.observe(task, added.mean_reward);
  dispatcher_->close_group(id);
  drop_stale_queued();
  return true;
}

std::shared_ptr<CollectedBatch> BatchAssembler::take() {
  const std::int64_t step = dispatcher_->step();
  auto batch = std::make_shared<CollectedBatch>(collector_.take());
  for (const ReadyRollout& rollout : batch->rollouts) {
    PRL_CHECK(!dispatcher_->is_stale(rollout.version_start), "a rollout of v{} was about to ship in batch {}", rollout.version_start.value,
              step);
    max_staleness_ = std::max(max_staleness_, (step - 1) - rollout.version_start.value);
  }
  if (!batch->samples.empty()) {
    num_empty_batches_ = 0;
    return batch;
  }
  ++num_empty_batches_;
  log::warning("batch {} has nothing to train on (every advantage is 0): collected again, time {} in a row", step, num_empty_batches_);
  if (num_empty_batches_ >= kMaxEmptyBatches)
    fail(ErrorCode::kUnavailable,
         "{} batches in a row had nothing to train on: all rewards within each group are equal. Check the reward, raise group_size or "
         "temperature, or warm the model up",
         num_empty_batches_);
  update_backlog();
  return nullptr;
}

void BatchAssembler::put_back(std::vector<ReadyRollout> rollouts) {
  std::deque<ReadyRollout> queue = collector_.queue();
  queue.insert(queue.begin(), std::make_move_iterator(rollouts.begin()), std::make_move_iterator(rollouts.end()));
  collector_.restore_queue(std::move(queue));
}

void BatchAssembler::advance_step() {
  dispatcher_->advance_step();
  drop_stale_queued();
}

void BatchAssembler::drop_group(GroupId id) {
  const EpisodeCounts before = runner_.counts();
  runner_.drop(id);
  num_dropped_since_ += runner_.counts().num_dropped - before.num_dropped;
  num_cancelled_since_ += runner_.counts().num_cancelled - before.num_cancelled;
}

void BatchAssembler::set_max_inflight(std::int64_t count, std::int64_t num_to_cancel) {
  dispatcher_->set_max_inflight(count);
  if (num_to_cancel <= 0) return;
  for (const GroupId id : dispatcher_->cancel_newest(num_to_cancel)) drop_group(id);
}

void BatchAssembler::drop_groups(bool keep_tasks) {
  for (const GroupId id : runner_.open_groups()) {
    if (!keep_tasks) dispatcher_->close_group(id);
    drop_group(id);
  }
}

void BatchAssembler::drop_stale_queued() {
  const std::int64_t num_dropped = collector_.drop_stale([this](PolicyVersion version) { return dispatcher_->is_stale(version); });
  num_dropped_queued_ += num_dropped;
  num_dropped_since_ += num_dropped;
  update_backlog();
}

void BatchAssembler::update_backlog() {
  if (!options_.dispatch.ordered || !options_.collect.token_batch_size) return dispatcher_->set_backlog(collector_.backlog());
  // The mean length of rollouts is not part of a checkpoint, so a replayable run does not depend on it.
  Backlog backlog;
  if (collector_.is_ready()) backlog.units[dispatcher_->version()] = options_.dispatch.batch_size;
  dispatcher_->set_backlog(std::move(backlog));
}

OrchestratorState BatchAssembler::state() const {
  return {.progress = {},
          .sampler = sampler_.save(),
          .unfinished_tasks = dispatcher_->unfinished_tasks(),
          .queue = collector_.queue(),
          .env_states = {}};
}

std::chrono::milliseconds BatchAssembler::max_rollout_time() const {
  std::chrono::milliseconds longest{0};
  for (const TrainEnv& train_env : services_.environments)
    longest = std::max(longest, train_env.rollout_timeout * (services_.teacher ? 2 : 1));
  return longest;
}

void BatchAssembler::take_metrics(StepFacts& facts, monitor::Metrics& pools) {
  if (const ScoringTime scored = runner_.take_scoring_time(); scored.num_episodes > 0)
    facts.seconds_teacher = scored.seconds / static_cast<double>(scored.num_episodes);
  facts.num_inflight = dispatcher_->num_inflight();
  facts.max_inflight = dispatcher_->max_inflight();
  facts.num_cancelled = std::exchange(num_cancelled_since_, 0);
  facts.num_dropped_stale = std::exchange(num_dropped_since_, 0);
  for (std::size_t i = 0; i < environments_.size(); ++i) {
    for (const auto& [name, value] : environments_[i]->gauges()) pools["env/" + environments_[i]->name() + "/" + name] = value;
    const TaskSampler::PoolSizes sizes = sampler_.pool_sizes(static_cast<std::int64_t>(i));
    const std::string prefix = "pool/" + environments_[i]->name() + "/";
    pools[prefix + "easy"] = static_cast<double>(sizes.easy);
    pools[prefix + "normal"] = static_cast<double>(sizes.normal);
    pools[prefix + "hard"] = static_cast<double>(sizes.hard);
    for (const auto& [name, count] : sampler_.difficulty_sizes(static_cast<std::int64_t>(i)))
      pools["curriculum/" + environments_[i]->name() + "/" + name] = static_cast<double>(count);
  }
}

}  // namespace prl::orchestrator
