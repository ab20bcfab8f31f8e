#include "orchestrator/dispatcher.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/error.hpp"

namespace prl::orchestrator {

std::int64_t Backlog::total() const noexcept {
  std::int64_t sum = 0;
  for (const auto& [version, count] : units) sum += count;
  return sum;
}

Dispatcher::Dispatcher(DispatcherOptions options, std::function<TaskRef()> draw, std::int64_t first_step, PolicyVersion version)
    : options_(std::move(options)), draw_(std::move(draw)), step_(first_step), version_(version) {
  const std::vector<std::int64_t> sizes = options_.group_sizes.empty() ? std::vector{options_.group_size} : options_.group_sizes;
  for (const std::int64_t size : sizes) {
    if (options_.batch_size < 1 || size < 1)
      fail(ErrorCode::kInvalidArgument, "batch_size {} and group_size {} must be at least 1", options_.batch_size, size);
    if (options_.batch_size % size != 0)
      fail(ErrorCode::kInvalidArgument, "batch_size {} must be a multiple of group_size {}", options_.batch_size, size);
  }
  const std::int64_t largest_group = *std::max_element(sizes.begin(), sizes.end());
  if (!(options_.oversampling_factor >= 1))
    fail(ErrorCode::kInvalidArgument, "oversampling_factor = {}: wanted at least 1", options_.oversampling_factor);
  if (options_.tasks_per_minute) rate_.emplace(*options_.tasks_per_minute);
  if (options_.max_async_level < 0 || options_.max_off_policy_steps < 0)
    fail(ErrorCode::kInvalidArgument, "max_async_level {} and max_off_policy_steps {} must not be negative", options_.max_async_level,
         options_.max_off_policy_steps);
  max_inflight_ =
      options_.max_inflight > 0
          ? options_.max_inflight
          : std::max(largest_group, static_cast<std::int64_t>(static_cast<double>(options_.batch_size) * options_.oversampling_factor));
  if (max_inflight_ < largest_group)
    fail(ErrorCode::kInvalidArgument, "max_inflight_rollouts {} is below group_size {}: no group could ever be in flight whole",
         max_inflight_, largest_group);
  largest_group_ = largest_group;
  lag_limit_ = std::min(options_.max_async_level, options_.max_off_policy_steps);
  set_backlog({});
}

void Dispatcher::set_max_inflight(std::int64_t count) { max_inflight_ = std::max(count, largest_group_); }

void Dispatcher::set_backlog(Backlog backlog) {
  backlog_ = std::move(backlog);
  if (backlog_.batch_units <= 0) backlog_.batch_units = options_.batch_size;
  backlog_.rollout_units = std::max<std::int64_t>(1, backlog_.rollout_units);
}

void Dispatcher::set_version(PolicyVersion version) {
  PRL_CHECK(version >= version_, "policy version went back from v{} to v{}", version_.value, version.value);
  version_ = version;
}

bool Dispatcher::may_open_groups() const noexcept {
  if (options_.max_steps && step_ > *options_.max_steps) return false;
  return !is_stale(version_);
}

bool Dispatcher::waits_for_open_groups() const noexcept {
  // Oversampling asks for more than fits, and groups taken in order never overtake each other.
  if (options_.ordered || options_.oversampling_factor > 1) return false;
  std::map<PolicyVersion, std::int64_t> open;
  for (const auto& [version, units] : backlog_.units) open.try_emplace(version, 0);
  for (const auto& [id, group] : groups_) open[group.version] += units_of(group);
  std::int64_t num_open = 0;
  std::int64_t num_finished = 0;
  for (const auto& [version, units] : open) {  // sums over versions up to this one, the oldest first as they ship
    num_open += units;
    if (const auto it = backlog_.units.find(version); it != backlog_.units.end()) num_finished += it->second;
    if (num_finished >= backlog_.batch_units) return false;  // the batch is full of these, so waiting would not help any of them
    if (num_open > (num_batches_for(version) - 1) * backlog_.batch_units) return true;
  }
  return false;
}

std::int64_t Dispatcher::num_inflight() const noexcept {
  std::int64_t sum = 0;
  // In ordered mode a permit comes back with its group, because groups close in order and episodes end in any order.
  for (const auto& [id, group] : groups_) sum += options_.ordered ? group.num_started : group.num_started - group.num_ended;
  return sum;
}

bool Dispatcher::wants_group() const noexcept {
  std::int64_t num_batches = num_batches_for(version_);
  if (options_.max_steps) num_batches = std::min(num_batches, *options_.max_steps - step_ + 1);
  if (options_.ordered) num_batches = std::min<std::int64_t>(num_batches, 1);
  // What these batches still lack. Where only one batch is open, oversampling adds a surplus to it; otherwise it allows more in flight, and
  // a surplus would only become too old.
  const std::int64_t num_missing = num_batches * backlog_.batch_units - backlog_.total();
  std::int64_t num_open = 0;
  for (const auto& [id, group] : groups_) num_open += units_of(group);
  return static_cast<double>(num_open) <
         static_cast<double>(num_missing) * (is_lock_step() || options_.ordered ? options_.oversampling_factor : 1.0);
}

bool TaskRate::take(net::TimePoint now) {
  const double burst = std::max(1.0, per_minute_ / 60.0);
  tokens_ = filled_at_ ? std::min(burst, tokens_ + std::chrono::duration<double>(now - *filled_at_).count() * per_minute_ / 60.0) : burst;
  filled_at_ = now;
  if (tokens_ < 1.0) return false;
  tokens_ -= 1.0;
  return true;
}

TaskRef Dispatcher::next_task() {
  if (pending_tasks_.empty()) return draw_();
  const TaskRef task = pending_tasks_.front();
  pending_tasks_.pop_front();
  return task;
}

std::int64_t Dispatcher::units_of(const Group& group) const noexcept { return group.size * group.num_learners * backlog_.rollout_units; }

void Dispatcher::fill(std::int64_t id, Group& group, std::int64_t& inflight, DispatchPlan& plan) {
  for (; group.num_started < group.size && inflight < max_inflight_; ++inflight)
    plan.start.push_back({.group = GroupId{id},
                          .rollout_idx = group.num_started++,
                          .group_size = group.size,
                          .task = group.task,
                          .step = group.step,
                          .ordinal = group.ordinal,
                          .version = group.version});
}

DispatchPlan Dispatcher::plan(net::TimePoint now) {
  DispatchPlan plan;
  for (const auto& [id, group] : groups_)
    if (is_stale(group.version)) plan.cancel.push_back(GroupId{id});
  for (const GroupId id : plan.cancel) groups_.erase(id.value);
  plan.is_gate_closed = !may_open_groups();
  std::int64_t inflight = num_inflight();
  // Groups that were opened go on even while the gate is closed: they are scored together.
  for (auto& [id, group] : groups_) fill(id, group, inflight, plan);
  while (!plan.is_gate_closed && inflight < max_inflight_ && wants_group() && (!rate_ || rate_->take(now))) {
    const std::int64_t id = next_group_++;
    Group& group = groups_[id];
    const TaskRef task = next_task();
    group = Group{.task = task,
                  .step = step_,
                  .ordinal = ordinal_++,
                  .version = version_,
                  .size = options_.group_size_of(task.env_idx),
                  .num_learners = options_.num_learners_of(task.env_idx)};
    fill(id, group, inflight, plan);
  }
  return plan;
}

void Dispatcher::on_episode_end(GroupId id) {
  const auto it = groups_.find(id.value);
  if (it == groups_.end()) return;
  ++it->second.num_ended;
  PRL_CHECK(it->second.num_ended <= it->second.num_started, "group {} ended more episodes than it started", id.value);
}

void Dispatcher::close_group(GroupId id) {
  if (groups_.erase(id.value) == 0) fail(ErrorCode::kInternal, "dispatcher: group {} is not open", id.value);
}

std::vector<GroupId> Dispatcher::cancel_newest(std::int64_t num_rollouts) {
  PRL_CHECK(!options_.ordered, "groups of an ordered run are not cancelled: which would depend on timing");
  std::vector<GroupId> cancelled;
  for (auto it = groups_.end(); it != groups_.begin() && num_rollouts > 0 && groups_.size() > 1;) {
    --it;
    const std::int64_t num_inflight = it->second.num_started - it->second.num_ended;
    if (num_inflight == 0) continue;  // finished, and about to be collected
    num_rollouts -= num_inflight;
    pending_tasks_.push_front(it->second.task);
    cancelled.emplace_back(it->first);
    it = groups_.erase(it);
  }
  return cancelled;
}

void Dispatcher::advance_step() {
  ++step_;
  ordinal_ = 0;
}

std::vector<TaskRef> Dispatcher::unfinished_tasks() const {
  std::vector<TaskRef> tasks;
  for (const auto& [id, group] : groups_)
    if (!is_stale(group.version)) tasks.push_back(group.task);
  tasks.insert(tasks.end(), pending_tasks_.begin(), pending_tasks_.end());
  return tasks;
}

}  // namespace prl::orchestrator
