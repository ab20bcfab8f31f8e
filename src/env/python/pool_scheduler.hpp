#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/ids.hpp"
#include "net/asio.hpp"

namespace prl::env::python {

/// A rollout in the pool, over all its attempts; ascends in the order of submission.
using RunId = StrongId<struct RunIdTag>;

struct SchedulerOptions {
  using Duration = std::chrono::milliseconds;
  int num_workers = 1;
  std::int64_t max_inflight = 128;   ///< rollouts per worker
  std::int64_t max_queued = 65'536;  ///< rollouts that wait for a worker
  Duration heartbeat{5'000};         ///< between two pings
  int max_missed = 3;                ///< heartbeats without a pong until a worker is dead
  double max_lag_ms = 5'000;         ///< a loop that answers nothing for longer ...
  int max_lags = 3;                  ///< ... in this many pongs in a row is as good as dead
  Duration start_limit{600'000};     ///< from the start of the process until the environment is loaded
  Duration cancel_limit{15'000};     ///< until a cancelled rollout has ended
  Duration restart_wait{500};        ///< before the first restart; doubled with every worker that ends before it finished a rollout
  Duration restart_wait_max{60'000};
  int max_failed_starts = 5;    ///< of one worker in a row while none is up: the pool gives up
  int max_failed_restarts = 5;  ///< the same once one had been up
  int max_deaths = 2;           ///< of workers with the same task: it is recorded as failed
};

/// A rollout that ends without the environment's answer, and why.
struct RunFailure {
  RunId run;
  std::string type;  ///< "WorkerDied", "PoolOverloaded", "EnvironmentUnavailable"
  std::string message;
  bool is_transient = false;
};

struct PoolPlan {
  struct Assign {
    RunId run;
    int worker = 0;
    int attempt = 0;  ///< 0 for the first
  };
  struct Cancel {
    RunId run;
    int worker = 0;
  };
  struct Kill {
    int worker = 0;
    std::string reason;
  };
  std::vector<RunFailure> fail;
  std::vector<Kill> kill;
  std::vector<int> start;
  std::vector<Assign> assign;
  std::vector<Cancel> cancel;
  std::vector<int> ping;
  net::TimePoint next;  ///< plan again then, if nothing happens before
};

/// Decides which worker plays which rollout, which worker is dead, and what becomes of its rollouts. Plain data in, plain data out: no
/// clock, no process, no thread.
///
/// Invariants
/// 1. Every submitted rollout leaves exactly once: by on_finished, by cancel, or by an entry of PoolPlan::fail.
/// 2. A rollout is at one worker at most; at most max_inflight are at a worker.
/// 3. The rollouts of a worker that died are given out again before newer ones. Those that were not waiting for the model may have killed
///    it: their tasks are suspects, and each is played at a worker that has no other task, so that the second death has one name on it.
///    That task is recorded as failed then and refused from then on. A suspect that finishes is none any more.
/// 4. The rollouts of a group are at one worker as long as it lives.
class PoolScheduler {
 public:
  explicit PoolScheduler(SchedulerOptions options);

  // What happened. Reports about a worker that is not up, or a rollout that has left, have no effect.
  /// `task` names the task in every rollout of it; `group` is empty if the rollout is scored alone.
  void submit(RunId run, std::string task, std::string group);
  void cancel(RunId run);
  /// Whether the rollout waits for the model: a rollout that does cannot harm its worker.
  void set_waiting(RunId run, bool is_waiting);
  /// The rollout's terminal message has arrived.
  void on_finished(RunId run);
  /// Nobody will ask for the group's scores any more.
  void forget_group(const std::string& group) { groups_.erase(group); }
  void on_ready(int worker, net::TimePoint now);
  /// `is_final`: starting it again would fail in the same way.
  void on_start_failed(int worker, const std::string& reason, bool is_final, net::TimePoint now);
  /// Its connection ended, its process ended, or it broke the protocol.
  void on_lost(int worker, const std::string& reason, net::TimePoint now);
  void on_pong(int worker, double lag_ms, net::TimePoint now);

  PoolPlan plan(net::TimePoint now);

  struct Counts {
    std::int64_t num_ready = 0;   ///< workers
    std::int64_t num_queued = 0;  ///< rollouts that wait for one
    std::int64_t num_deaths = 0;  ///< of workers that had come up
  };
  Counts counts() const;
  std::int64_t num_inflight(int worker) const {
    return static_cast<std::int64_t>(workers_.at(static_cast<std::size_t>(worker)).runs.size());
  }
  bool is_ready(int worker) const { return workers_.at(static_cast<std::size_t>(worker)).state == State::kReady; }
  /// Why no worker can be had any more; empty as long as one can.
  const std::string& broken() const { return broken_; }
  /// The worker that holds the group's rollouts.
  std::optional<int> worker_of_group(const std::string& group) const;

 private:
  enum class State { kDown, kStarting, kReady };
  struct Worker {
    State state = State::kDown;
    net::TimePoint due;  ///< kDown: may start then; kStarting: must be up by then
    net::TimePoint next_ping;
    int num_unanswered = 0;
    int num_lags = 0;
    int num_restarts = 0;      ///< in a row without a finished rollout
    int num_failed = 0;        ///< starts in a row while no worker was up
    bool is_reserved = false;  ///< takes no rollouts but those of a suspect, once it is empty
    std::unordered_set<RunId> runs;
  };
  struct Run {
    std::string task;
    std::string group;
    std::optional<int> worker;
    int num_attempts = 0;
    bool is_waiting = false;
    bool is_cancelled = false;
    std::optional<net::TimePoint> cancel_due;  ///< the worker was told
  };

  Worker& at(int worker) { return workers_.at(static_cast<std::size_t>(worker)); }
  void watch(net::TimePoint now, PoolPlan& plan);
  void assign(PoolPlan& plan);
  std::optional<int> choose(const Run& run) const;
  void reserve();
  bool has_only(const Worker& worker, const std::string& task) const;
  void take_down(int worker, net::TimePoint now);
  void blame(const Worker& worker);
  void release(int worker);
  void leave(RunId run);

  SchedulerOptions options_;
  std::vector<Worker> workers_;
  std::unordered_map<RunId, Run> runs_;
  std::set<RunId> queue_;
  std::set<RunId> cancelled_;          ///< those at a worker
  std::map<std::string, int> deaths_;  ///< of workers, by suspect task
  std::map<std::string, std::string> poisoned_;
  std::map<std::string, int> groups_;
  std::vector<RunFailure> failures_;  ///< for the next plan
  bool was_up_ = false;               ///< a worker, at any time
  std::int64_t num_deaths_ = 0;
  std::string broken_;
};

}  // namespace prl::env::python
