#include "env/python/worker_pool.hpp"

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "env/python/private_folder.hpp"
#include "env/python/worker_link.hpp"
#include "net/deadline.hpp"
#include "net/io_runtime.hpp"
#include "text/json_python.hpp"

namespace prl::env::python {

namespace json = boost::json;
namespace fs = std::filesystem;
using namespace std::chrono_literals;

namespace {

std::string describe_error(const json::object& error) {
  const std::string type = optional_text(error, "type");
  const std::string message = optional_text(error, "message");
  return type.empty() || message.starts_with(type) ? message : fmt::format("{}: {}", type, message);
}

/// The rollout of an attempt, of which the id begins with r and the rollout's number; one that there is not for other texts.
RunId run_of(std::string_view wire_id) {
  RunId run{-1};
  if (wire_id.starts_with('r')) std::from_chars(wire_id.data() + 1, wire_id.data() + wire_id.size(), run.value);
  return run;
}

/// What tells whether two workers have the same rows.
std::string fingerprint_of(const json::object& loaded) {
  std::string text;
  for (const auto& split : optional_object(loaded, "splits"))
    if (split.value().is_object())
      text += fmt::format("{}={};", std::string(split.key()), optional_text(split.value().get_object(), "fingerprint"));
  return text;
}

TemplateOptions template_options(const PoolOptions& options) {
  TemplateOptions made{.name = options.name,
                       .python = options.argv.front(),
                       .env = options.env,
                       .limits = options.limits,
                       .isolate_network = options.isolate_network,
                       .kind = optional_text(options.load, "kind"),
                       .env_id = optional_text(options.load, "env_id"),
                       .paths = {},
                       .writes_bytecode = options.writes_bytecode,
                       .import_limit = options.schedule.start_limit};
  for (const json::value& path : optional_array(options.load, "paths")) made.paths.emplace_back(path.get_string());
  return made;
}

json::object hello_of(const PoolOptions& options, int index) {
  json::object hello{{"t", "hello"}, {"protocol", 1}, {"log_level", options.log_level}, {"seed", 0}};
  hello["worker_name"] = fmt::format("{}-{}", options.name, index);
  hello["max_inflight"] = options.schedule.max_inflight;
  hello["max_frame"] = options.max_frame_bytes;
  hello["heartbeat_s"] = static_cast<double>(options.schedule.heartbeat.count()) / 1000.0;
  if (!options.token.empty()) hello["token"] = options.token;
  return hello;
}

}  // namespace

struct WorkerPool::Impl : std::enable_shared_from_this<Impl> {
  struct Run;
  struct Worker {
    std::unique_ptr<WorkerLink> link;
    std::string name;
    std::int64_t generation = 0;
    std::string fingerprint;
    double lag_ms = 0;
    double rss_mb = 0;
    double pss_mb = 0;
  };
  struct Entry {
    std::shared_ptr<Run> run;
    RunRequest request;
    std::string wire_id = {};  ///< of the present attempt, see run_of; empty: at no worker
    int worker = -1;
    std::int64_t num_open_calls = 0;
    bool is_orphan = false;  ///< cancelled: nobody hears of its end
  };
  struct Request {
    json::object message;
    Who who = Who::kAnyWorker;
    std::string group;
    std::optional<int> only_worker;  ///< who alone may answer; if it is not up, an empty object is the reply
    int worker = -1;
    int num_attempts = 0;
    net::AsyncResult<json::object> reply;
  };
  struct Ending {
    std::unique_ptr<WorkerLink> link;
    std::string name;
    std::string reason;
  };

  explicit Impl(PoolOptions pool_options)
      : options(std::move(pool_options)), log(std::make_shared<WorkerLog>(options.log_file)), scheduler(options.schedule) {
    workers.resize(static_cast<std::size_t>(options.schedule.num_workers));
  }

  /// Runs `work` on the pool's thread; dropped once the pool has stopped. What comes while that thread is busy waits for one call of it.
  void post(std::function<void(Impl&)> work) {
    std::lock_guard lock(runtime_mutex);
    if (!runtime) return;
    inbox.push_back(std::move(work));
    if (inbox.size() == 1) runtime->post([self = shared_from_this()] { self->take_inbox(); });
  }

  // -- the pool's thread from here on
  void take_inbox();
  static asio::awaitable<void> drive(std::shared_ptr<Impl> self);
  void carry_out(const PoolPlan& plan);
  void start_worker(int index);
  void open_worker(int index, std::optional<ChildProcess> child);
  void assign(const PoolPlan::Assign& assignment);
  void end_link(int index, const std::string& reason);
  void reap(bool wait_for_all);
  void on_message(int index, json::object message);
  void on_hello(int index, const json::object& message);
  void on_loaded(int index, const json::object& message);
  void on_load_failed(int index, const json::object& message);
  void on_reply(const json::object& message);
  void on_run_message(json::object message, RunEvent::Kind kind);
  void on_terminal(json::object message);
  void refuse_call(int index, const json::object& message);
  void count_calls(Entry& entry, int change);
  void finish(RunId id, RunEvent event);
  void dispatch(std::shared_ptr<Request> request);
  std::optional<int> worker_for(const Request& request);
  void retry_requests_of(int index);
  void tell_broken();
  void publish();
  Worker& at(int index) { return workers[static_cast<std::size_t>(index)]; }

  PoolOptions options;
  std::shared_ptr<WorkerLog> log;
  PrivateFolder folder;
  std::optional<WorkerTemplates::Environment> templates;  ///< made with the first worker
  std::mutex runtime_mutex;
  std::unique_ptr<net::IoRuntime> runtime;        ///< null once stopped
  std::vector<std::function<void(Impl&)>> inbox;  ///< guarded by runtime_mutex; its first one has called the thread

  PoolScheduler scheduler;
  std::vector<Worker> workers;
  std::vector<Ending> endings;
  std::unordered_map<RunId, Entry> runs;
  std::map<std::string, std::shared_ptr<Request>> requests;
  std::vector<std::shared_ptr<Request>> waiting;
  net::Signal wake;
  bool is_stopping = false;
  net::TimePoint stop_deadline;
  std::int64_t next_request = 0;
  std::string catalogue;  ///< fingerprint of the first worker

  std::mutex mutex;  ///< guards what follows
  std::condition_variable changed;
  std::optional<json::object> loaded;
  std::string problem;
  bool is_problem_final = false;
  Stats stats;
  std::int64_t next_run = 0;
};

struct WorkerPool::Impl::Run final : PooledRun {
  Run(const std::shared_ptr<Impl>& impl, RunId run) : PooledRun(impl->options.max_frame_bytes), pool(impl), id(run) {}
  void reply(std::string run_id, std::string frame) override {
    if (const auto impl = pool.lock())
      impl->post([id = id, run_id = std::move(run_id), frame = std::move(frame)](Impl& self) mutable {
        // Calls of an attempt that ended with its worker: the next one may have calls of the same ids.
        const auto it = self.runs.find(id);
        if (it == self.runs.end() || it->second.worker < 0 || it->second.wire_id != run_id) return;
        self.count_calls(it->second, -1);
        if (const auto& link = self.at(it->second.worker).link) link->send(std::move(frame));
      });
  }
  void cancel() override {
    if (const auto impl = pool.lock())
      impl->post([id = id](Impl& self) {
        const auto it = self.runs.find(id);
        if (it == self.runs.end()) return;
        it->second.is_orphan = true;
        self.scheduler.cancel(id);
        if (it->second.worker < 0) self.runs.erase(it);
        self.wake.notify();
      });
  }
  std::weak_ptr<Impl> pool;
  RunId id;
};

void WorkerPool::Impl::take_inbox() {
  std::vector<std::function<void(Impl&)>> works;
  {
    std::lock_guard lock(runtime_mutex);
    works.swap(inbox);
  }
  for (const auto& work : works) {
    try {
      work(*this);
    } catch (const std::exception& error) {
      prl::log::error("{}: {}", options.name, error.what());
    }
  }
}

asio::awaitable<void> WorkerPool::Impl::drive(std::shared_ptr<Impl> self) {
  Impl& pool = *self;
  for (;;) {
    net::TimePoint next = net::Clock::now() + 1s;
    if (!pool.is_stopping) {
      const PoolPlan plan = pool.scheduler.plan(net::Clock::now());
      next = plan.next;
      pool.carry_out(plan);
    } else {
      bool is_over = true;
      for (const Worker& worker : pool.workers) is_over = is_over && !worker.link;
      if (is_over || net::Clock::now() >= pool.stop_deadline) co_return;
      next = pool.stop_deadline;
    }
    pool.reap(false);
    pool.publish();
    if (!pool.endings.empty()) next = std::min(next, net::Clock::now() + 20ms);
    co_await pool.wake.wait_until(next);
  }
}

void WorkerPool::Impl::carry_out(const PoolPlan& plan) {
  for (const RunFailure& failure : plan.fail) {
    if (failure.type == "WorkerDied")
      if (const auto it = runs.find(failure.run); it != runs.end())
        prl::log::error("{}: task {}: {}", options.name, it->second.request.row->substr(0, 200), failure.message);
    RunEvent event;
    event.failure = failure;
    finish(failure.run, std::move(event));
  }
  for (const PoolPlan::Kill& kill : plan.kill) end_link(kill.worker, kill.reason);
  for (const int index : plan.start) start_worker(index);
  for (const PoolPlan::Assign& assignment : plan.assign) assign(assignment);
  for (const PoolPlan::Cancel& cancel : plan.cancel) {
    const auto it = runs.find(cancel.run);
    if (it == runs.end() || !at(cancel.worker).link) continue;
    json::object message{{"t", "cancel"}, {"reason", "its caller waits no longer"}};
    message["run_id"] = it->second.wire_id;
    at(cancel.worker).link->send(message);
  }
  for (const int index : plan.ping) {
    json::object ping{{"t", "ping"}, {"ts", 0}};
    ping["id"] = fmt::format("p{}", next_request++);
    if (at(index).link) at(index).link->send(ping);
  }
  tell_broken();
}

void WorkerPool::Impl::assign(const PoolPlan::Assign& assignment) {
  const auto it = runs.find(assignment.run);
  if (it == runs.end() || !at(assignment.worker).link) return;
  Entry& entry = it->second;
  entry.worker = assignment.worker;
  entry.num_open_calls = 0;
  entry.wire_id =
      assignment.attempt == 0 ? fmt::format("r{}", it->first.value) : fmt::format("r{}-{}", it->first.value, assignment.attempt);
  const RunRequest& request = entry.request;
  json::object message{{"t", "run"}, {"run_id", entry.wire_id}, {"session_id", request.session}};
  if (assignment.attempt > 0) {
    message["session_id"] = fmt::format("{}~{}", request.session, assignment.attempt);
    RunEvent event;
    event.kind = RunEvent::Kind::kRestarted;
    static_cast<void>(entry.run->events.try_push(event));
  }
  try {
    WorkerLink& link = *at(assignment.worker).link;
    link.send(encode_frame(message, link.max_frame_bytes(), {request.members, R"(,"task":)", *request.row}));
  } catch (const Error& error) {
    scheduler.on_finished(assignment.run);
    RunEvent event;
    event.failure = RunFailure{assignment.run, "TaskError", error.what(), false};
    finish(assignment.run, std::move(event));
  }
}

void WorkerPool::Impl::finish(RunId id, RunEvent event) {
  const auto it = runs.find(id);
  if (it == runs.end()) return;
  const std::shared_ptr<Run> run = it->second.run;
  runs.erase(it);
  event.kind = RunEvent::Kind::kEnded;
  // Room is left for it: calls stop at kMaxQueuedCalls.
  static_cast<void>(run->events.try_push(event));
  run->events.close();
}

void WorkerPool::Impl::start_worker(int index) {
  Worker& worker = at(index);
  worker.name = fmt::format("worker {}", index);
  const std::int64_t generation = ++worker.generation;
  try {
    if (!options.addresses.empty()) return open_worker(index, std::nullopt);
    ChildOptions child{.name = fmt::format("{} of {}", worker.name, options.name),
                       .argv = options.argv,
                       .env = options.env,
                       .folder = folder.path() / fmt::format("{}-{}", index, generation),
                       .limits = options.limits,
                       .isolate_network = options.isolate_network};
    fs::create_directories(child.folder);
    child.env.push_back("PRL_TMPDIR=" + child.folder.string());
    if (!options.templates) return open_worker(index, ChildProcess::start(child));
    if (!templates) templates.emplace(options.templates, template_options(options), log);
    templates->start(std::move(child), [weak = weak_from_this(), index, generation](WorkerTemplates::Started started) {
      const auto self = weak.lock();
      if (!self) return;
      self->post([index, generation, started = std::make_shared<WorkerTemplates::Started>(std::move(started))](Impl& pool) {
        if (pool.is_stopping || pool.at(index).generation != generation) return;
        if (started->child) return pool.open_worker(index, std::move(started->child));
        pool.scheduler.on_start_failed(index, started->problem, false, net::Clock::now());
        pool.wake.notify();
      });
    });
  } catch (const std::exception& error) {
    worker.link.reset();
    scheduler.on_start_failed(index, error.what(), false, net::Clock::now());
    wake.notify();
  }
}

/// The connection to a process of ours, or to a worker elsewhere.
void WorkerPool::Impl::open_worker(int index, std::optional<ChildProcess> child) {
  Worker& worker = at(index);
  // Reports of a link that was replaced are nobody's.
  const auto current = [weak = weak_from_this(), index, generation = worker.generation]() -> std::shared_ptr<Impl> {
    auto self = weak.lock();
    return self && self->at(index).generation == generation ? self : nullptr;
  };
  LinkEvents events;
  events.on_message = [current, index](json::object message) {
    if (const auto self = current()) self->on_message(index, std::move(message));
  };
  events.on_end = [current, index](const std::string& reason) {
    const auto self = current();
    if (!self) return;
    self->end_link(index, reason);
    self->scheduler.on_lost(index, reason, net::Clock::now());
    self->wake.notify();
  };
  const WorkerLink::Limits limits{.max_frame_bytes = options.max_frame_bytes};
  if (child)
    worker.link = std::make_unique<WorkerLink>(runtime->executor(), std::move(*child), log, worker.name, limits, std::move(events));
  else
    worker.link = std::make_unique<WorkerLink>(runtime->executor(), options.addresses[static_cast<std::size_t>(index)],
                                               net::Clock::now() + 30s, log, worker.name, limits, std::move(events));
  worker.link->send(hello_of(options, index));
  prl::log::debug("{}: {} started (pid {})", options.name, worker.name, worker.link->pid().value_or(0));
}

/// Takes the link of a worker that is dead or was killed; its rollouts are the scheduler's business.
void WorkerPool::Impl::end_link(int index, const std::string& reason) {
  Worker& worker = at(index);
  ++worker.generation;  // one that is still to come is not wanted, either
  if (!worker.link) return;
  for (auto& [id, entry] : runs)
    if (entry.worker == index) {
      entry.wire_id.clear();
      entry.worker = -1;
    }
  std::erase_if(runs, [](const auto& item) { return item.second.is_orphan && item.second.worker < 0; });
  worker.link->close();
  endings.push_back({std::move(worker.link), worker.name, reason});
  worker.fingerprint.clear();
  worker.rss_mb = 0;
  worker.pss_mb = 0;
  retry_requests_of(index);
}

void WorkerPool::Impl::reap(bool wait_for_all) {
  for (auto it = endings.begin(); it != endings.end();) {
    if (!wait_for_all && !it->link->is_gone()) {
      ++it;
      continue;
    }
    const std::string how = it->link->describe_end();
    if (!is_stopping)
      prl::log::warning("{}: {} ended: {}{}{}{}", options.name, it->name, it->reason, how.empty() ? "" : "; it ", how,
                        options.log_file.empty() ? "" : "; see " + options.log_file.string());
    it = endings.erase(it);
  }
}

void WorkerPool::Impl::on_message(int index, json::object message) {
  const std::string type = text_member(message, "t");
  if (type == "model_call") {
    if (optional_text(message, "run_id").empty())
      refuse_call(index, message);
    else
      on_run_message(std::move(message), RunEvent::Kind::kCall);
  } else if (type == "model_cancel") {
    on_run_message(std::move(message), RunEvent::Kind::kCallCancelled);
  } else if (type == "result" || type == "cancelled" || (type == "failed" && message.contains("run_id"))) {
    on_terminal(std::move(message));
  } else if (type == "pong") {
    at(index).lag_ms = optional_number(message, "loop_lag_ms", 0);
    at(index).rss_mb = optional_number(message, "rss_mb", 0);
    at(index).pss_mb = optional_number(message, "pss_mb", at(index).rss_mb);
    scheduler.on_pong(index, at(index).lag_ms, net::Clock::now());
  } else if (type == "log") {
    log->write(at(index).name,
               fmt::format("{} {}: {}", optional_text(message, "level"), optional_text(message, "logger"), optional_text(message, "msg")));
  } else if (type == "hello_ok") {
    on_hello(index, message);
  } else if (type == "loaded") {
    on_loaded(index, message);
  } else if (type == "failed" && optional_text(message, "id") == "load") {
    on_load_failed(index, message);
  } else if (type == "error") {
    const std::string text = fmt::format("{}: {}", optional_text(message, "code"), optional_text(message, "message"));
    log->write(at(index).name, text);
    if (!optional_bool(message, "fatal", false)) return;
    const bool is_final = optional_text(message, "code") == "protocol" || optional_text(message, "code") == "token";
    end_link(index, text);
    scheduler.on_start_failed(index, text, is_final, net::Clock::now());
    scheduler.on_lost(index, text, net::Clock::now());
    wake.notify();
  } else if (type == "bye") {
    log->write(at(index).name, "bye: " + optional_text(message, "reason"));
  } else {
    on_reply(message);
  }
}

void WorkerPool::Impl::on_hello(int index, const json::object& message) {
  const std::int64_t protocol = integer_member(message, "protocol");
  const bool has_token = options.token.empty() || optional_text(message, "token") == options.token;
  if (protocol != 1 || !has_token) {
    const std::string reason = protocol != 1 ? fmt::format("it speaks protocol prl-env/{}, wanted prl-env/1", protocol)
                                             : std::string("it does not know the token of this run");
    end_link(index, reason);
    scheduler.on_start_failed(index, reason, true, net::Clock::now());
    wake.notify();
    return;
  }
  log->write(at(index).name,
             fmt::format("Python {}, {}", optional_text(message, "python"), text::to_json_text(optional_object(message, "packages"))));
  json::object load = options.load;
  load["t"] = "load";
  load["id"] = "load";
  if (!options.states.empty()) {
    const json::value& state = options.states[static_cast<std::size_t>(index) % options.states.size()];
    if (!state.is_null()) load["state"] = state;
  }
  at(index).link->send(load);
}

void WorkerPool::Impl::on_loaded(int index, const json::object& message) {
  at(index).fingerprint = fingerprint_of(message);
  if (catalogue.empty()) {
    catalogue = at(index).fingerprint;
    for (const json::value& warning : optional_array(message, "warnings"))
      if (text::is_text(warning)) prl::log::warning("{}: {}", options.name, std::string(warning.get_string()));
  } else if (catalogue != at(index).fingerprint) {
    prl::log::warning(
        "{}: {} has other rows than the first worker: the environment does not make them from its seed alone. Rows are taken "
        "from one worker",
        options.name, at(index).name);
  }
  scheduler.on_ready(index, net::Clock::now());
  {
    std::lock_guard lock(mutex);
    if (!loaded) loaded.emplace(message, json::storage_ptr());
    changed.notify_all();
  }
  for (auto& request : std::exchange(waiting, {})) dispatch(std::move(request));
  wake.notify();
}

void WorkerPool::Impl::on_load_failed(int index, const json::object& message) {
  const json::object& error = optional_object(message, "error");
  const std::string reason = describe_error(error);
  if (const std::string traceback = optional_text(error, "traceback"); !traceback.empty()) log->write(at(index).name, traceback);
  end_link(index, reason);
  scheduler.on_start_failed(index, reason, !optional_bool(error, "retryable", false), net::Clock::now());
  wake.notify();
}

void WorkerPool::Impl::on_run_message(json::object message, RunEvent::Kind kind) {
  constexpr std::size_t kMaxQueuedCalls = 2048;
  const std::string wire_id = optional_text(message, "run_id");
  const auto it = runs.find(run_of(wire_id));
  if (it == runs.end() || it->second.wire_id != wire_id) return;
  Entry& entry = it->second;
  if (entry.run->events.size() > kMaxQueuedCalls) {
    if (kind == RunEvent::Kind::kCall) refuse_call(entry.worker, message);
    return;
  }
  count_calls(entry, kind == RunEvent::Kind::kCall ? 1 : -1);
  RunEvent event{.kind = kind, .message = std::move(message), .failure = std::nullopt};
  static_cast<void>(entry.run->events.try_push(event));
}

/// A rollout with an open call waits for the model.
void WorkerPool::Impl::count_calls(Entry& entry, int change) {
  entry.num_open_calls = std::max<std::int64_t>(0, entry.num_open_calls + change);
  scheduler.set_waiting(entry.run->id, entry.num_open_calls > 0);
}

void WorkerPool::Impl::refuse_call(int index, const json::object& message) {
  json::object error{{"class", "refused"}, {"message", "a model call outside of a rollout, or too many of one at once, are not served"}};
  json::object reply{{"t", "model_reply"}};
  reply["call_id"] = text_member(message, "call_id");
  reply["error"] = std::move(error);
  if (at(index).link) at(index).link->send(reply);
}

void WorkerPool::Impl::on_terminal(json::object message) {
  const std::string wire_id = text_member(message, "run_id");
  const RunId id = run_of(wire_id);
  const auto it = runs.find(id);
  if (it == runs.end() || it->second.wire_id != wire_id) return;
  scheduler.on_finished(id);
  RunEvent event{.kind = RunEvent::Kind::kEnded, .message = std::move(message), .failure = std::nullopt};
  finish(id, std::move(event));
  wake.notify();
}

void WorkerPool::Impl::on_reply(const json::object& message) {
  const auto it = requests.find(optional_text(message, "id"));
  if (it == requests.end()) return;
  const std::shared_ptr<Request> request = it->second;
  requests.erase(it);
  if (text_member(message, "t") == "failed")
    request->reply.set_error(Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}: {}", options.name, text_member(request->message, "t"),
                                                                            describe_error(optional_object(message, "error")))));
  else
    request->reply.set_value(json::object(message, json::storage_ptr()));  // it is kept, and read by other threads
}

std::optional<int> WorkerPool::Impl::worker_for(const Request& request) {
  if (request.who == Who::kGroup)
    if (const auto worker = scheduler.worker_of_group(request.group); worker && scheduler.is_ready(*worker)) return worker;
  std::optional<int> best;
  for (int i = 0; i < options.schedule.num_workers; ++i) {
    if (!scheduler.is_ready(i)) continue;
    if (request.who == Who::kCatalogue && at(i).fingerprint != catalogue) continue;
    if (!best || scheduler.num_inflight(i) < scheduler.num_inflight(*best)) best = i;
  }
  if (best || request.who != Who::kCatalogue || scheduler.counts().num_ready == 0) return best;
  // The worker with the first rows is gone for good: those of another one are as right as its were.
  for (int i = 0; i < options.schedule.num_workers && !best; ++i)
    if (scheduler.is_ready(i)) best = i;
  catalogue = at(*best).fingerprint;
  return best;
}

void WorkerPool::Impl::dispatch(std::shared_ptr<Request> request) {
  constexpr int kMaxAttempts = 3;
  constexpr std::size_t kMaxWaiting = 4096;
  if (request->only_worker && !scheduler.is_ready(*request->only_worker)) {
    request->reply.set_value(json::object());
    return;
  }
  if (!scheduler.broken().empty() && scheduler.counts().num_ready == 0) {
    request->reply.set_error(Error(ErrorCode::kUnavailable, fmt::format("{}: {}", options.name, scheduler.broken())));
    return;
  }
  if (request->num_attempts >= kMaxAttempts || waiting.size() >= kMaxWaiting) {
    request->reply.set_error(Error(ErrorCode::kUnavailable, fmt::format("{}: {} workers died, or too many requests wait for one",
                                                                        options.name, request->num_attempts)));
    return;
  }
  const std::optional<int> worker = request->only_worker ? request->only_worker : worker_for(*request);
  if (!worker) {
    waiting.push_back(std::move(request));
    return;
  }
  request->worker = *worker;
  ++request->num_attempts;
  const std::string id = fmt::format("q{}", next_request++);
  request->message["id"] = id;
  try {
    at(*worker).link->send(request->message);
    requests[id] = std::move(request);
  } catch (const Error& error) {
    request->reply.set_error(error);
  }
}

void WorkerPool::Impl::retry_requests_of(int index) {
  std::vector<std::shared_ptr<Request>> again;
  for (auto it = requests.begin(); it != requests.end();) {
    if (it->second->worker == index) {
      again.push_back(it->second);
      it = requests.erase(it);
    } else {
      ++it;
    }
  }
  // Not now: the scheduler does not know yet that the worker is gone.
  for (auto& request : again) post([request = std::move(request)](Impl& self) { self.dispatch(request); });
}

void WorkerPool::Impl::tell_broken() {
  if (scheduler.broken().empty() || scheduler.counts().num_ready > 0) return;
  for (auto& request : std::exchange(waiting, {})) dispatch(std::move(request));
  std::lock_guard lock(mutex);
  if (problem.empty()) prl::log::error("{}: no worker can be started: {}", options.name, scheduler.broken());
  problem = scheduler.broken();
  changed.notify_all();
}

void WorkerPool::Impl::publish() {
  Stats now;
  now.num_ready = scheduler.counts().num_ready;
  now.num_deaths = scheduler.counts().num_deaths;
  now.num_queued = scheduler.counts().num_queued;
  for (int i = 0; i < options.schedule.num_workers; ++i) {
    now.num_inflight += scheduler.num_inflight(i);
    now.max_lag_ms = std::max(now.max_lag_ms, at(i).lag_ms);
    now.rss_mb += at(i).rss_mb;
    now.pss_mb += at(i).pss_mb;
    now.pids.push_back(at(i).link ? at(i).link->pid() : std::nullopt);
  }
  std::lock_guard lock(mutex);
  stats = std::move(now);
}

WorkerPool::WorkerPool(PoolOptions options) {
  if (!options.addresses.empty()) options.schedule.num_workers = static_cast<int>(options.addresses.size());
  impl_ = std::make_shared<Impl>(std::move(options));
  impl_->runtime = std::make_unique<net::IoRuntime>(1, "env");
  impl_->runtime->spawn(fmt::format("workers of {}", impl_->options.name), Impl::drive(impl_));
}

WorkerPool::~WorkerPool() {
  impl_->post([](Impl& self) {
    self.is_stopping = true;
    self.stop_deadline = net::Clock::now() + self.options.stop_grace;
    const json::object shutdown{{"t", "shutdown"}, {"grace_s", 0}};
    for (Impl::Worker& worker : self.workers)
      if (worker.link) worker.link->send(shutdown);
    for (const auto& [id, entry] : self.runs) {
      RunEvent event;
      event.failure = RunFailure{id, "EnvironmentUnavailable", "the environment is being shut down", true};
      static_cast<void>(entry.run->events.try_push(event));
      entry.run->events.close();
    }
    self.runs.clear();
    self.wake.notify();
  });
  const auto deadline = net::Clock::now() + impl_->options.stop_grace + 2s;
  while (impl_->runtime->tasks().stats().num_running > 0 && net::Clock::now() < deadline) impl_->runtime->tasks().join_blocking(50ms);
  auto done = std::make_shared<std::promise<void>>();
  impl_->post([done](Impl& self) {
    for (int i = 0; i < self.options.schedule.num_workers; ++i) self.end_link(i, "the environment was shut down");
    self.reap(true);
    done->set_value();
  });
  done->get_future().wait_for(5s);
  std::unique_ptr<net::IoRuntime> runtime;
  {
    std::lock_guard lock(impl_->runtime_mutex);
    runtime = std::move(impl_->runtime);
  }
  runtime->stop(1s);
}

json::object WorkerPool::wait_loaded(net::TimePoint deadline) {
  Waiting waiting({.who = fmt::format("environment {}", impl_->options.name),
                   .what = "a Python worker to load it",
                   .limit = deadline - net::Clock::now()});
  std::unique_lock lock(impl_->mutex);
  bool is_known = false;
  while (!is_known && net::Clock::now() < deadline) {
    is_known = impl_->changed.wait_until(lock, std::min(deadline, net::Clock::now() + 500ms),
                                         [&] { return impl_->loaded || !impl_->problem.empty(); });
    waiting.check();
  }
  if (!is_known)
    fail(ErrorCode::kDeadline, "environment {}: its Python workers were not ready in time{}", impl_->options.name,
         impl_->options.log_file.empty() ? "" : "; see " + impl_->options.log_file.string());
  if (!impl_->loaded) fail(ErrorCode::kUnavailable, "environment {}: {}", impl_->options.name, impl_->problem);
  return *impl_->loaded;
}

std::shared_ptr<PooledRun> WorkerPool::submit(RunRequest request) {
  RunId id;
  {
    std::lock_guard lock(impl_->mutex);
    id = RunId{impl_->next_run++};
  }
  auto run = std::make_shared<Impl::Run>(impl_, id);
  impl_->post([run, id, request = std::move(request)](Impl& self) mutable {
    self.scheduler.submit(id, request.task, request.group);
    self.runs.emplace(id, Impl::Entry{.run = run, .request = std::move(request)});
    self.wake.notify();
  });
  return run;
}

asio::awaitable<json::object> WorkerPool::request(json::object message, net::TimePoint deadline, Who who, std::string group) {
  auto request = std::make_shared<Impl::Request>();
  request->message = std::move(message);
  request->who = who;
  request->group = std::move(group);
  const net::AsyncResult<json::object> reply = request->reply;
  std::string what = fmt::format("{} of a Python worker of {}", text_member(request->message, "t"), impl_->options.name);
  impl_->post([request = std::move(request)](Impl& self) { self.dispatch(request); });
  auto waiting = reply.wait(deadline, std::move(what));
  co_return co_await std::move(waiting);
}

asio::awaitable<std::vector<json::value>> WorkerPool::states(net::TimePoint deadline) {
  std::vector<json::value> states;
  const int num_workers = impl_->options.schedule.num_workers;
  for (int i = 0; i < num_workers; ++i) {
    auto request = std::make_shared<Impl::Request>();
    request->message = {{"t", "state"}};
    request->message["env_key"] = impl_->options.load.at("env_key");
    request->only_worker = i;
    const net::AsyncResult<json::object> reply = request->reply;
    impl_->post([request = std::move(request)](Impl& self) { self.dispatch(request); });
    auto waiting = reply.wait(deadline, fmt::format("the state of a Python worker of {}", impl_->options.name));
    const json::object said = co_await std::move(waiting);
    const json::value* state = said.if_contains("state");
    states.push_back(state != nullptr ? *state : json::value(nullptr));
  }
  impl_->post([states](Impl& self) {
    self.options.states.resize(states.size());
    for (std::size_t i = 0; i < states.size(); ++i)
      if (!states[i].is_null()) self.options.states[i] = states[i];
  });
  co_return states;
}

void WorkerPool::release_group(std::string group) {
  impl_->post([group = std::move(group)](Impl& self) {
    json::object message{{"t", "release"}, {"group_id", group}};
    message["env_key"] = self.options.load.at("env_key");
    if (const auto worker = self.scheduler.worker_of_group(group); worker && self.at(*worker).link) self.at(*worker).link->send(message);
    self.scheduler.forget_group(group);
  });
}

net::IoRuntime& WorkerPool::runtime() { return *impl_->runtime; }

WorkerPool::Stats WorkerPool::stats() {
  std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

}  // namespace prl::env::python
