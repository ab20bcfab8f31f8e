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
  std::vector<std::int64_t> group_sizes;   ///< of each environment's tasks; empty: group_size everywhere
  std::vector<std::int64_t> num_learners;  ///< rollouts that train of one episode of each environment; empty: 1 everywhere
  double oversampling_factor = 1.0;        ///< >= 1; above 1 a batch does not wait for slow groups, which may become too old
  std::int64_t max_inflight = 0;           ///< rollouts; 0: max(largest group, batch_size * oversampling_factor)
  std::int64_t max_async_level = 1;        ///< k: batch n trains rollouts of versions n - 1 - k to n - 1
  std::int64_t max_off_policy_steps = 8;   ///< the same bound for each rollout alone; the smaller of the two holds
  bool strict_async_level = false;         ///< batch n trains rollouts of version n - 1 - k alone, and the first ones of the first version
  bool ordered = false;                    ///< replayable: decisions depend on groups closed in order alone
  std::optional<double> tasks_per_minute;  ///< most groups opened per minute
  std::optional<std::int64_t> max_steps;

  /// Rollouts of a task of environment `env_idx`.
  std::int64_t group_size_of(std::int64_t env_idx) const {
    return group_sizes.empty() ? group_size : group_sizes.at(static_cast<std::size_t>(env_idx));
  }
  std::int64_t num_learners_of(std::int64_t env_idx) const {
    return num_learners.empty() ? 1 : num_learners.at(static_cast<std::size_t>(env_idx));
  }
};

/// A token bucket that holds one second's worth of tasks, at least one; full at first.
class TaskRate {
 public:
  explicit TaskRate(double tasks_per_minute) : per_minute_(tasks_per_minute) {}
  /// Takes the token of one task; false if there is none at `now`.
  bool take(net::TimePoint now);

 private:
  double per_minute_;
  std::optional<net::TimePoint> filled_at_;
  double tokens_ = 0;
};

struct EpisodeStart {
  GroupId group;
  std::int64_t rollout_idx = 0;  ///< in [0, group_size)
  std::int64_t group_size = 1;   ///< rollouts of the group
  TaskRef task;
  std::int64_t step = 0;     ///< batch in collection when the group was opened
  std::int64_t ordinal = 0;  ///< number of groups opened before it for this step
  PolicyVersion version;     ///< the group's version at its opening
};

/// Finished, accepted rollouts that wait for a batch, in the unit by which batches are cut: rollouts or tokens.
struct Backlog {
  std::map<PolicyVersion, std::int64_t> units;  ///< by start version
  std::int64_t batch_units = 0;                 ///< of one batch; 0: DispatcherOptions::batch_size
  std::int64_t rollout_units = 1;               ///< expected of a rollout that is still in flight
  std::int64_t total() const noexcept;
};

struct DispatchPlan {
  std::vector<GroupId> cancel;  ///< groups to drop: too stale
  std::vector<EpisodeStart> start;
  bool is_gate_closed = false;  ///< nothing may start until the weights catch up
};

/// Decides which rollouts start and which groups are dropped. Plain data in, plain data out; no clock, no threads.
///
/// With `step` the batch in collection (1-based), `v` the version the engines run and `lag` = min(max_async_level,
/// max_off_policy_steps):
///   1. batch `step` holds only rollouts that started under versions step - 1 - lag or newer. Others are dropped, in flight or
///      finished; with lag 0 (lock-step) that leaves version step - 1 alone.
///   2. A group opens only while all that is open and accepted fits into the batches that may still hold version v: those up to
///      v + 1 + lag.
///   3. A batch ships only while v >= step - 1 - lag. Without oversampling it also waits for open groups that would become too old
///      because no later batch that may hold them has room. By 2 and 3 nothing is dropped for its age then, but for the rest of a
///      batch that groups with failed rollouts or of different sizes left uneven.
/// In flight never exceeds max_inflight. Every group is opened once and closed once.
class Dispatcher {
 public:
  Dispatcher(DispatcherOptions options, std::function<TaskRef()> draw, std::int64_t first_step, PolicyVersion version);

  void set_version(PolicyVersion version);
  void set_backlog(Backlog backlog);
  void on_episode_end(GroupId group);
  /// The group is finished, failed or cancelled: its permits are free. Error{kInternal} if it is not open.
  void close_group(GroupId group);
  /// Closes the newest open groups until `num_rollouts` fewer are in flight, or one group is left; their tasks open again first, in order.
  /// The caller cancels their episodes. Not in ordered mode.
  std::vector<GroupId> cancel_newest(std::int64_t num_rollouts);
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
  /// From now on; at least a whole group. What is in flight above it goes on.
  void set_max_inflight(std::int64_t count);
  bool is_lock_step() const noexcept { return lag_limit_ == 0; }
  /// Invariant 3 for the batch in collection, once it is full.
  bool may_ship() const noexcept { return !is_stale(version_) && !waits_for_open_groups(); }
  /// The batch in collection must not ship before more of the open groups have finished.
  bool waits_for_open_groups() const noexcept;
  /// Invariant 1.
  bool is_stale(PolicyVersion start) const noexcept { return (step_ - 1) - start.value > lag_limit_; }

 private:
  struct Group {
    TaskRef task;
    std::int64_t step = 0;
    std::int64_t ordinal = 0;
    PolicyVersion version;
    std::int64_t size = 1;          ///< episodes
    std::int64_t num_learners = 1;  ///< rollouts that train of each
    std::int64_t num_started = 0;
    std::int64_t num_ended = 0;
  };
  bool may_open_groups() const noexcept;
  bool wants_group() const noexcept;
  /// Batches, from the one in collection on, that may hold rollouts of `start`; <= 0: it is stale.
  std::int64_t num_batches_for(PolicyVersion start) const noexcept { return start.value + lag_limit_ + 2 - step_; }
  TaskRef next_task();
  /// What the group is expected to give, in the unit by which batches are cut.
  std::int64_t units_of(const Group& group) const noexcept;
  /// Starts rollouts of the group while permits are left.
  void fill(std::int64_t id, Group& group, std::int64_t& inflight, DispatchPlan& plan);

  DispatcherOptions options_;
  std::function<TaskRef()> draw_;
  std::int64_t max_inflight_ = 0;
  std::int64_t largest_group_ = 1;
  std::int64_t lag_limit_ = 0;
  std::int64_t step_ = 1;
  PolicyVersion version_;
  Backlog backlog_;
  std::int64_t next_group_ = 0;
  std::int64_t ordinal_ = 0;
  std::map<std::int64_t, Group> groups_;
  std::deque<TaskRef> pending_tasks_;
  std::optional<TaskRate> rate_;
};

}  // namespace prl::orchestrator
