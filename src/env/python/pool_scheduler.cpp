#include "env/python/pool_scheduler.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::env::python {

/// Attempts of a rollout that was always waiting for the model when its worker died.
constexpr int kMaxBystander = 5;

PoolScheduler::PoolScheduler(SchedulerOptions options) : options_(options) {
  PRL_CHECK(options_.num_workers > 0 && options_.max_inflight > 0, "a pool without workers");
  workers_.resize(static_cast<std::size_t>(options_.num_workers));
}

void PoolScheduler::submit(RunId run, std::string task, std::string group) {
  PRL_CHECK(!runs_.contains(run), "rollout {} was submitted before", run.value);
  if (const auto poison = poisoned_.find(task); poison != poisoned_.end()) {
    failures_.push_back({run, "WorkerDied", poison->second, false});
    return;
  }
  if (!broken_.empty()) {
    failures_.push_back({run, "EnvironmentUnavailable", broken_, false});
    return;
  }
  if (static_cast<std::int64_t>(queue_.size()) >= options_.max_queued) {
    failures_.push_back({run, "PoolOverloaded", fmt::format("{} rollouts wait for a worker already", queue_.size()), true});
    return;
  }
  Run entry;
  entry.task = std::move(task);
  entry.group = std::move(group);
  runs_.emplace(run, std::move(entry));
  queue_.insert(run);
}

void PoolScheduler::leave(RunId run) {
  const auto it = runs_.find(run);
  if (it == runs_.end()) return;
  if (it->second.worker) at(*it->second.worker).runs.erase(run);
  queue_.erase(run);
  cancelled_.erase(run);
  runs_.erase(it);
}

void PoolScheduler::cancel(RunId run) {
  const auto it = runs_.find(run);
  if (it == runs_.end()) return;
  // A rollout at a worker keeps its place until the worker says that it has ended.
  if (!it->second.worker) return leave(run);
  it->second.is_cancelled = true;
  cancelled_.insert(run);
}

void PoolScheduler::on_finished(RunId run) {
  const auto it = runs_.find(run);
  if (it == runs_.end() || !it->second.worker) return;
  at(*it->second.worker).num_restarts = 0;
  if (!it->second.is_cancelled) deaths_.erase(it->second.task);
  leave(run);
}

void PoolScheduler::on_ready(int worker, net::TimePoint now) {
  Worker& entry = at(worker);
  if (entry.state != State::kStarting) return;
  entry.state = State::kReady;
  entry.next_ping = now + options_.heartbeat;
  entry.num_unanswered = 0;
  entry.num_lags = 0;
  was_up_ = true;
  for (Worker& other : workers_) other.num_failed = 0;
  broken_.clear();
}

void PoolScheduler::take_down(int worker, net::TimePoint now) {
  Worker& entry = at(worker);
  entry.state = State::kDown;
  const auto factor = std::int64_t{1} << std::min(entry.num_restarts, 20);
  entry.due = now + std::min(options_.restart_wait * factor, options_.restart_wait_max);
  ++entry.num_restarts;
}

void PoolScheduler::on_start_failed(int worker, const std::string& reason, bool is_final, net::TimePoint now) {
  if (at(worker).state != State::kStarting) return;
  take_down(worker, now);
  if (counts().num_ready > 0) return;  // the others go on, and this one is tried again
  const int num_failed = ++at(worker).num_failed;
  if (is_final)
    broken_ = reason;
  else if (num_failed >= (was_up_ ? options_.max_failed_restarts : options_.max_failed_starts))
    broken_ = fmt::format("a worker did not start {} times in a row, the last time because: {}", num_failed, reason);
}

void PoolScheduler::set_waiting(RunId run, bool is_waiting) {
  if (const auto it = runs_.find(run); it != runs_.end()) it->second.is_waiting = is_waiting;
}

bool PoolScheduler::has_only(const Worker& worker, const std::string& task) const {
  return std::all_of(worker.runs.begin(), worker.runs.end(), [&](RunId run) { return runs_.at(run).task == task; });
}

/// The tasks that may have killed a worker. One that was there alone when it died for the second time is poisoned.
void PoolScheduler::blame(const Worker& worker) {
  std::set<std::string> tasks;
  std::set<std::string> awake;
  for (const RunId id : worker.runs) {
    const Run& run = runs_.at(id);
    tasks.insert(run.task);
    // One that was tried again and again is no bystander.
    if (!run.is_waiting || run.num_attempts > kMaxBystander) awake.insert(run.task);
  }
  for (const std::string& task : awake.empty() ? tasks : awake) ++deaths_[task];
  if (tasks.size() != 1) return;
  const std::string& task = *tasks.begin();
  if (deaths_[task] < options_.max_deaths) return;
  poisoned_[task] = fmt::format("{} worker processes died while they played this task; it is not tried again", deaths_[task]);
  deaths_.erase(task);
}

/// Takes the rollouts of a worker that is gone; those of a poisoned task end, the others wait for another worker.
void PoolScheduler::release(int worker) {
  Worker& entry = at(worker);
  const std::unordered_set<RunId> runs = std::exchange(entry.runs, {});
  for (const RunId id : runs) {
    Run& run = runs_.at(id);
    run.worker.reset();
    if (run.is_cancelled)
      leave(id);
    else
      queue_.insert(id);
  }
  // The rollouts that wait are of the poisoned task too.
  for (auto it = queue_.begin(); it != queue_.end();) {
    const RunId id = *it++;
    const auto poison = poisoned_.find(runs_.at(id).task);
    if (poison == poisoned_.end()) continue;
    failures_.push_back({id, "WorkerDied", poison->second, false});
    leave(id);
  }
  std::erase_if(groups_, [worker](const auto& group) { return group.second == worker; });
}

void PoolScheduler::on_lost(int worker, const std::string& reason, net::TimePoint now) {
  Worker& entry = at(worker);
  if (entry.state == State::kDown) return;
  if (entry.state == State::kStarting) {
    on_start_failed(worker, reason, false, now);
    return;
  }
  ++num_deaths_;
  blame(entry);
  release(worker);
  take_down(worker, now);
}

void PoolScheduler::on_pong(int worker, double lag_ms, net::TimePoint now) {
  Worker& entry = at(worker);
  if (entry.state != State::kReady) return;
  entry.num_unanswered = 0;
  entry.num_lags = lag_ms > options_.max_lag_ms ? entry.num_lags + 1 : 0;
  static_cast<void>(now);
}

/// Finds workers that are dead or may start, and those to ping.
void PoolScheduler::watch(net::TimePoint now, PoolPlan& plan) {
  const auto kill = [&](int worker, std::string reason) {
    plan.kill.push_back({worker, reason});
    on_lost(worker, reason, now);
  };
  for (int i = 0; i < options_.num_workers; ++i) {
    Worker& worker = at(i);
    if (worker.state == State::kStarting && now >= worker.due)
      kill(i, fmt::format("it was not ready {} s after its start", options_.start_limit.count() / 1000));
    if (worker.state == State::kReady) {
      const bool has_stuck = std::any_of(cancelled_.begin(), cancelled_.end(), [&](RunId id) {
        const Run& run = runs_.at(id);
        return run.worker == i && run.cancel_due && now >= *run.cancel_due;
      });
      if (worker.num_lags >= options_.max_lags)
        kill(i,
             fmt::format("its event loop was blocked for more than {} s, {} times in a row", options_.max_lag_ms / 1000, worker.num_lags));
      else if (has_stuck)
        kill(i, fmt::format("a cancelled rollout had not ended after {} s", options_.cancel_limit.count() / 1000));
      else if (now >= worker.next_ping && worker.num_unanswered >= options_.max_missed)
        kill(i, fmt::format("it answered none of {} pings, {} s apart", worker.num_unanswered, options_.heartbeat.count() / 1000.0));
    }
    if (worker.state == State::kReady && now >= worker.next_ping) {
      plan.ping.push_back(i);
      ++worker.num_unanswered;
      worker.next_ping = now + options_.heartbeat;
    }
    if (worker.state == State::kDown && broken_.empty() && now >= worker.due) {
      plan.start.push_back(i);
      worker.state = State::kStarting;
      worker.due = now + options_.start_limit;
    }
  }
}

/// Keeps workers from new rollouts as long as suspects wait for one of their own: the emptiest, half of them at most.
void PoolScheduler::reserve() {
  for (Worker& worker : workers_) worker.is_reserved = false;
  if (deaths_.empty()) return;
  std::set<std::string> waiting;
  for (const RunId id : queue_)
    if (const std::string& task = runs_.at(id).task; deaths_.contains(task)) waiting.insert(task);
  std::vector<Worker*> ready;
  for (Worker& worker : workers_)
    if (worker.state == State::kReady) ready.push_back(&worker);
  std::sort(ready.begin(), ready.end(), [](const Worker* a, const Worker* b) { return a->runs.size() < b->runs.size(); });
  const std::size_t wanted = std::min(waiting.size(), std::max<std::size_t>(1, ready.size() / 2));
  for (std::size_t i = 0; i < std::min(wanted, ready.size()); ++i) ready[i]->is_reserved = true;
}

std::optional<int> PoolScheduler::choose(const Run& run) const {
  const bool is_suspect = deaths_.contains(run.task);
  const auto fits = [&](int i) {
    const Worker& worker = workers_[static_cast<std::size_t>(i)];
    if (worker.state != State::kReady || static_cast<std::int64_t>(worker.runs.size()) >= options_.max_inflight) return false;
    if (is_suspect) return has_only(worker, run.task);
    const bool has_suspect = !deaths_.empty() && !worker.runs.empty() && deaths_.contains(runs_.at(*worker.runs.begin()).task) &&
                             has_only(worker, runs_.at(*worker.runs.begin()).task);
    return !worker.is_reserved && !has_suspect;
  };
  // A suspect leaves its group's worker: what is held there is given on with the request for scores.
  if (const auto pinned = groups_.find(run.group); !run.group.empty() && !is_suspect && pinned != groups_.end())
    return fits(pinned->second) ? std::optional(pinned->second) : std::nullopt;
  std::optional<int> best;
  for (int i = 0; i < options_.num_workers; ++i)
    if (fits(i) && (!best || num_inflight(i) < num_inflight(*best))) best = i;
  return best;
}

void PoolScheduler::assign(PoolPlan& plan) {
  if (queue_.empty()) return;
  reserve();
  std::int64_t room = 0;
  for (const Worker& worker : workers_)
    if (worker.state == State::kReady) room += options_.max_inflight - static_cast<std::int64_t>(worker.runs.size());
  for (auto it = queue_.begin(); it != queue_.end() && room > 0;) {
    const RunId id = *it;
    Run& run = runs_.at(id);
    const std::optional<int> worker = choose(run);
    if (!worker) {
      ++it;
      continue;
    }
    if (!run.group.empty()) groups_[run.group] = *worker;
    run.worker = worker;
    run.is_waiting = false;
    at(*worker).runs.insert(id);
    plan.assign.push_back({id, *worker, run.num_attempts++});
    it = queue_.erase(it);
    --room;
  }
}

PoolPlan PoolScheduler::plan(net::TimePoint now) {
  PoolPlan plan;
  watch(now, plan);
  plan.fail = std::exchange(failures_, {});
  // A pool that cannot start any worker fails what waits, once none is left that could play it.
  if (!broken_.empty() && counts().num_ready == 0)
    for (const RunId id : std::set<RunId>(queue_)) {
      plan.fail.push_back({id, "EnvironmentUnavailable", broken_, false});
      leave(id);
    }
  for (const RunId id : cancelled_) {
    Run& run = runs_.at(id);
    if (run.cancel_due) continue;
    run.cancel_due = now + options_.cancel_limit;
    plan.cancel.push_back({id, *run.worker});
  }
  assign(plan);
  plan.next = now + options_.heartbeat;
  for (const Worker& worker : workers_) {
    if (worker.state == State::kReady) plan.next = std::min(plan.next, worker.next_ping);
    if (worker.state == State::kStarting || (worker.state == State::kDown && broken_.empty())) plan.next = std::min(plan.next, worker.due);
  }
  for (const RunId id : cancelled_) plan.next = std::min(plan.next, *runs_.at(id).cancel_due);
  return plan;
}

PoolScheduler::Counts PoolScheduler::counts() const {
  Counts counts;
  counts.num_ready = std::count_if(workers_.begin(), workers_.end(), [](const Worker& worker) { return worker.state == State::kReady; });
  counts.num_queued = static_cast<std::int64_t>(queue_.size());
  counts.num_deaths = num_deaths_;
  return counts;
}

std::optional<int> PoolScheduler::worker_of_group(const std::string& group) const {
  const auto it = groups_.find(group);
  return it == groups_.end() ? std::nullopt : std::optional(it->second);
}

}  // namespace prl::env::python
