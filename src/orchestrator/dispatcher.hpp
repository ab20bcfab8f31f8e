#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "net/asio.hpp"
#include "orchestrator/task_sampler.hpp"

namespace prl::orchestrator {

/// Identity of the rollouts of one task that are scored together; ascends in the order of dispatch.
using GroupId = StrongId<struct GroupIdTag>;

struct DispatcherOptions {
  std::int64_t batch_size = 128;           ///< rollouts per step
  std::int64_t group_size = 1;             ///< rollouts per task
  double oversampling_factor = 1.0;        ///< >= 1
  std::int64_t max_inflight = 0;           ///< rollouts; 0: max(group_size, batch_size * oversampling_factor)
  std::int64_t max_async_level = 1;        ///< k: how many steps the batch in collection may be ahead of the weights
  std::int64_t max_off_policy_steps = 8;   ///< oldest start version of a rollout that still ships, in steps before the batch's own
  bool strict_async_level = false;         ///< not built: always lag by exactly k steps
  bool ordered = false;                    ///< replayable: decisions depend on groups closed in order alone
  std::optional<double> tasks_per_minute;  ///< most groups opened per minute
  std::optional<std::int64_t> max_steps;
};

struct EpisodeStart {
  GroupId group;
  std::int64_t rollout_idx = 0;  ///< in [0, group_size)
  TaskRef task;
  std::int64_t step = 0;     ///< batch in collection when the group was opened
  std::int64_t ordinal = 0;  ///< number of groups opened before it for this step
  PolicyVersion version;     ///< the group's version at its opening
};

struct DispatchPlan {
  std::vector<GroupId> cancel;  ///< groups to drop: too stale
  std::vector<EpisodeStart> start;
  bool is_gate_closed = false;  ///< nothing may start until the weights catch up
};

/// Decides which rollouts start and which groups are dropped. Plain data in, plain data out; no clock, no threads.
///
/// With `step` the batch in collection (1-based) and `v` the version the engines run:
///   1. groups open only while (step - 1) - v <= min(max_async_level, max_off_policy_steps), so with either at 0 rollouts of
///      step N start only under version N - 1 (lock-step);
///   2. a batch ships only while the same holds for v;
///   3. a group whose start version is older than (step - 1) - max_off_policy_steps is dropped, in flight or finished; in
///      lock-step any start version but step - 1 is too old.
/// In flight never exceeds max_inflight. Every group is opened once and closed once.
class Dispatcher {
 public:
  Dispatcher(DispatcherOptions options, std::function<TaskRef()> draw, std::int64_t first_step, PolicyVersion version);

  void set_version(PolicyVersion version);
  /// Rollouts that wait, finished and accepted, for the next batch.
  void set_num_accepted(std::int64_t num_rollouts) { num_accepted_ = num_rollouts; }
  void on_episode_end(GroupId group);
  /// The group is finished, failed or cancelled: its permits are free. Error{kInternal} if it is not open.
  void close_group(GroupId group);
  /// The batch in collection has shipped.
  void advance_step();
  /// Tasks to open before new ones are drawn: those that were in flight when a run stopped.
  void set_pending_tasks(std::vector<TaskRef> tasks) { pending_tasks_.assign(tasks.begin(), tasks.end()); }
  /// Tasks of the open groups that are not stale, and those still pending, in order: what a checkpoint must keep.
  std::vector<TaskRef> unfinished_tasks() const;

  DispatchPlan plan(net::TimePoint now);

  std::int64_t step() const noexcept { return step_; }
  PolicyVersion version() const noexcept { return version_; }
  std::int64_t num_inflight() const noexcept;
  std::int64_t num_open_groups() const noexcept { return static_cast<std::int64_t>(groups_.size()); }
  std::int64_t max_inflight() const noexcept { return max_inflight_; }
  bool is_lock_step() const noexcept { return lag_limit_ == 0; }
  /// Invariant 1 for new groups, invariant 2 for shipping.
  bool may_dispatch() const noexcept;
  bool may_ship() const noexcept;
  /// Invariant 3.
  bool is_stale(PolicyVersion start) const noexcept;
  std::int64_t num_started() const noexcept { return num_started_; }

 private:
  struct Group {
    TaskRef task;
    std::int64_t step = 0;
    std::int64_t ordinal = 0;
    PolicyVersion version;
    std::int64_t num_started = 0;
    std::int64_t num_ended = 0;
  };
  bool wants_group() const noexcept;
  bool take_token(net::TimePoint now);
  TaskRef next_task();

  DispatcherOptions options_;
  std::function<TaskRef()> draw_;
  std::int64_t max_inflight_ = 0;
  std::int64_t lag_limit_ = 0;
  std::int64_t step_ = 1;
  PolicyVersion version_;
  std::int64_t num_accepted_ = 0;
  std::int64_t next_group_ = 0;
  std::int64_t ordinal_ = 0;
  std::int64_t num_started_ = 0;
  std::map<std::int64_t, Group> groups_;
  std::deque<TaskRef> pending_tasks_;
  std::optional<net::TimePoint> bucket_time_;
  double bucket_ = 0;
};

}  // namespace prl::orchestrator
