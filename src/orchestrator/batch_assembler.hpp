#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "monitor/metric_set.hpp"
#include "orchestrator/batch_collector.hpp"
#include "orchestrator/dispatcher.hpp"
#include "orchestrator/failure_streak.hpp"
#include "orchestrator/group_runner.hpp"
#include "orchestrator/metrics.hpp"
#include "orchestrator/progress.hpp"
#include "orchestrator/task_sampler.hpp"

namespace prl::orchestrator {

/// Fills the batch in collection: carries out the dispatcher's plans, plays their groups, checks what comes back and collects it.
/// The loop's thread only.
class BatchAssembler {
 public:
  struct Options {
    DispatcherOptions dispatch;
    CollectorOptions collect;
    TaskSamplerOptions sampler;
    GroupRunnerOptions runner;
    FailureStreak::Options failures;
    std::int64_t resume_step = 0;  ///< the batch after it is the first
  };
  struct Services {
    std::vector<TrainEnv> environments;
    std::shared_ptr<env::ChatClientFactory> chat;
    std::shared_ptr<env::PromptScorer> teacher;  ///< null: none
    std::function<void()> on_episode_end;        ///< called after each episode that ended in an open group
    /// Throws if the episode, of a group opened under the given version, cannot come from this run's engines.
    std::function<void(const env::Episode&, PolicyVersion)> check_episode;
  };
  /// Error{kInvalidArgument} naming the key for options that contradict each other.
  BatchAssembler(asio::any_io_executor executor, Options options, Services services);

  /// Takes over what a checkpoint holds, before begin().
  void restore(OrchestratorState state);
  /// Engines hold `version`: groups may open.
  void begin(PolicyVersion version);
  void set_version(PolicyVersion version) { dispatcher_->set_version(version); }
  /// From now on. With `num_to_cancel` the newest groups are given up, so that as many rollouts fewer are in flight; their tasks open
  /// again.
  void set_max_inflight(std::int64_t count, std::int64_t num_to_cancel = 0);
  /// Starts and drops what the dispatcher plans.
  struct Opened {
    bool has_started = false;     ///< some rollout
    bool is_gate_closed = false;  ///< nothing may start until the weights catch up
  };
  Opened open_groups(net::TimePoint now);
  /// Collects one finished group; false if there is none, or the full batch must not change any more. Errors of FailureStreak, of the
  /// collector and of check_episode, and Error{kOutOfSync} for a rollout that lock-step forbids.
  bool collect_one();
  bool is_ready() const noexcept { return collector_.is_ready() && dispatcher_->may_ship(); }
  bool waits_for_open_groups() const noexcept { return collector_.is_ready() && dispatcher_->waits_for_open_groups(); }
  /// Cuts the batch, which must be ready. Null if nothing in it trains: it is collected again, and Error{kUnavailable} ends the run after
  /// kMaxEmptyBatches of them in a row.
  std::shared_ptr<CollectedBatch> take();
  /// Back to the head of the queue: it was not sent.
  void put_back(std::vector<ReadyRollout> rollouts);
  /// The batch in collection has shipped.
  void advance_step();
  /// Drops every open group: each is forgotten, or with `keep_tasks` its task stays for a checkpoint.
  void drop_groups(bool keep_tasks);
  /// All but the progress.
  OrchestratorState state() const;

  const Dispatcher& dispatcher() const noexcept { return *dispatcher_; }
  std::int64_t num_queued() const noexcept { return collector_.num_queued(); }
  const EpisodeCounts& counts() const noexcept { return runner_.counts(); }
  std::int64_t num_dropped_queued() const noexcept { return num_dropped_queued_; }
  std::int64_t max_staleness() const noexcept { return max_staleness_; }
  const std::vector<env::EnvironmentPtr>& environments() const noexcept { return environments_; }
  /// Longest that a rollout in flight may take.
  std::chrono::milliseconds max_rollout_time() const;
  /// Adds what was cancelled, dropped and scored since the last call, and the size of difficulty pools.
  void take_metrics(StepFacts& facts, monitor::Metrics& pools);

 private:
  void make_dispatcher(PolicyVersion version);
  void drop_group(GroupId id);
  void drop_stale_queued();
  void update_backlog();

  Options options_;
  Services services_;
  std::vector<env::EnvironmentPtr> environments_;
  TaskSampler sampler_;
  BatchCollector collector_;
  GroupRunner runner_;
  FailureStreak failures_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::vector<TaskRef> restored_tasks_;
  std::int64_t num_empty_batches_ = 0;
  std::int64_t num_dropped_queued_ = 0;
  std::int64_t max_staleness_ = 0;
  std::int64_t num_cancelled_since_ = 0, num_dropped_since_ = 0;
};

}  // namespace prl::orchestrator
