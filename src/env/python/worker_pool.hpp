#pragma once

#include <boost/json/object.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/python/child_process.hpp"
#include "env/python/frame.hpp"
#include "env/python/pool_scheduler.hpp"
#include "env/python/worker_templates.hpp"
#include "net/async_result.hpp"

namespace prl::net {
class IoRuntime;
}

namespace prl::env::python {

namespace asio = boost::asio;

struct PoolOptions {
  std::string name;                    ///< of the environment, for messages
  std::vector<std::string> argv;       ///< of a worker process
  std::vector<std::string> env;        ///< its variables, "NAME=value"; PRL_TMPDIR is added
  std::vector<std::string> addresses;  ///< "host:port" of workers that run elsewhere, instead of processes
  std::string token;                   ///< that such workers ask for; empty: none
  ChildLimits limits;
  bool isolate_network = false;
  std::shared_ptr<WorkerTemplates> templates;  ///< that fork the workers; null: each is started by exec
  bool writes_bytecode = false;                ///< see TemplateOptions
  boost::json::object load;                    ///< the `load` message without its id
  SchedulerOptions schedule;                   ///< num_workers is the number of addresses if there are some
  std::vector<boost::json::value> states;      ///< that workers go on from, in their order and again from the first; empty or null: none
  std::string log_level = "info";              ///< of records that workers send
  std::filesystem::path log_file;              ///< of output and log records of the workers; empty: this process's log at debug level
  std::size_t max_frame_bytes = kDefaultMaxFrameBytes;
  std::chrono::milliseconds stop_grace{2'000};
};

/// What happens to a rollout in the pool.
struct RunEvent {
  enum class Kind {
    kCall,           ///< message: a model_call; answer it with PooledRun::reply
    kCallCancelled,  ///< message: a model_cancel
    kRestarted,      ///< its worker died: it begins anew at another, with other call ids
    kEnded,          ///< the last one: message is result, failed or cancelled, or there is a failure
  };
  Kind kind = Kind::kEnded;
  boost::json::object message;
  std::optional<RunFailure> failure;
};

/// A rollout to be played.
struct RunRequest {
  std::string members;                     ///< of a `run` but for those below, as JSON text without braces
  std::string session;                     ///< session_id, which gets a suffix in later attempts
  std::shared_ptr<const std::string> row;  ///< `task`, as JSON text
  std::string task;                        ///< names the task in every rollout of it
  std::string group;                       ///< empty if the rollout is scored alone
};

/// One rollout in the pool. Any thread; one coroutine takes the events.
class PooledRun {
 public:
  virtual ~PooledRun() = default;
  explicit PooledRun(std::size_t max_bytes) : max_frame_bytes(max_bytes) {}
  net::AsyncQueue<RunEvent> events{4096};
  const std::size_t max_frame_bytes;  ///< of what reply() takes
  /// Sends the frame of a model_reply to the worker that plays the rollout; not if the attempt `run_id`, that of its call, is over.
  virtual void reply(std::string run_id, std::string frame) = 0;
  /// Nobody waits for it any more. No effect after its end.
  virtual void cancel() = 0;
};

/// The worker processes of one environment: started, watched, restarted and given rollouts as PoolScheduler decides.
///
/// Has a thread of its own. Members may be called from any other thread.
class WorkerPool {
 public:
  /// Starts the workers.
  explicit WorkerPool(PoolOptions options);
  /// Asks the workers to stop, then kills them. Rollouts in flight end as failed.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// What the first worker that came up said in `loaded`. Blocks. Error{kUnavailable} with the reason if no worker can be had,
  /// {kInvalidArgument} if the environment refuses its configuration, {kDeadline}.
  boost::json::object wait_loaded(net::TimePoint deadline);

  std::shared_ptr<PooledRun> submit(RunRequest request);

  /// Who may answer a request.
  enum class Who { kAnyWorker, kCatalogue, kGroup };
  /// Sends a request without its id and returns the reply. kCatalogue: a worker whose rows are those of the first one. kGroup: the one that
  /// holds the rollouts of `group`, or any. Another worker is asked if one dies, twice at most.
  /// Error{kUnavailable}, {kDeadline}; {kInvalidArgument} with what the worker said when it answered `failed`.
  asio::awaitable<boost::json::object> request(boost::json::object message, net::TimePoint deadline, Who who = Who::kAnyWorker,
                                               std::string group = {});
  /// What each worker answers to `state`, in their order; null for one that is not up. A worker that is replaced later goes on from it.
  /// Errors of request().
  asio::awaitable<std::vector<boost::json::value>> states(net::TimePoint deadline);
  /// The workers forget the held rollouts of the group.
  void release_group(std::string group);

  struct Stats {
    std::int64_t num_ready = 0;
    std::int64_t num_deaths = 0;
    std::int64_t num_inflight = 0;
    std::int64_t num_queued = 0;
    std::vector<std::optional<pid_t>> pids;  ///< of the workers that are up
    double max_lag_ms = 0;                   ///< of the last pongs
    double rss_mb = 0;                       ///< of all workers
    double pss_mb = 0;                       ///< the same, what they share with other processes in parts
  };
  Stats stats();
  /// Its thread, for who must wait for a coroutine without one.
  net::IoRuntime& runtime();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace prl::env::python
