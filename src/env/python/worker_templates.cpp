#include "env/python/worker_templates.hpp"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "env/python/frame.hpp"
#include "env/python/private_folder.hpp"
#include "env/python/sandbox.hpp"
#include "env/python/worker_link.hpp"
#include "net/io_runtime.hpp"
#include "net/signal.hpp"
#include "net/task_group.hpp"

namespace prl::env::python {

namespace json = boost::json;
namespace fs = std::filesystem;
using namespace std::chrono_literals;

namespace {

constexpr auto kForkLimit = 30s;  ///< of one fork; they take milliseconds
constexpr int kMaxTemplateDeaths = 3;
/// Workers of one template: the limit of processes of its namespace, in which theirs are, is that of one worker times this.
constexpr std::int64_t kMostTogether = 64;

/// What processes must have in common to be forked from one that has imported the library.
std::string library_key(const TemplateOptions& options) {
  const ChildLimits& limits = options.limits;
  return fmt::format("{} {} {} {} {} {} {}", options.python, options.kind == "fake", options.isolate_network, limits.memory_bytes,
                     limits.num_processes, limits.num_files, fmt::join(options.env, "\n"));
}

json::object limits_object(const ChildLimits& limits) {
  json::object object;
  object["memory_bytes"] = limits.memory_bytes;
  object["processes"] = limits.num_processes;
  object["files"] = limits.num_files;
  object["cpu_seconds"] = limits.cpu_seconds;
  return object;
}

}  // namespace

struct WorkerTemplates::Impl : std::enable_shared_from_this<Impl> {
  /// A process to be forked: a worker, or the template of a module.
  struct Request {
    ChildOptions child;
    bool is_template = false;
    Done done;
  };
  struct Asked {
    Request request;
    ChildStreams streams;
    net::TimePoint due;
  };
  enum class State { kNone, kStarting, kReady, kRefused };
  struct Template {
    std::string name;  ///< for messages
    State state = State::kNone;
    std::shared_ptr<WorkerLog> log;
    json::object preload;               ///< what it imports
    std::shared_ptr<Template> library;  ///< that it is forked from; null: it is executed itself, as `child`
    ChildOptions child;
    std::chrono::milliseconds import_limit{};
    std::unique_ptr<WorkerLink> link;
    std::vector<Request> waiting;        ///< until it is ready
    std::map<std::string, Asked> asked;  ///< forks under way
    std::int64_t generation = 0;         ///< of its processes
    int num_deaths = 0;
    net::TimePoint due;  ///< kStarting: ready by then
  };
  using Shared = std::shared_ptr<Template>;
  struct Ending {
    std::unique_ptr<WorkerLink> link;
    std::string text;  ///< for the log; empty: nothing
  };

  void post(std::function<void(Impl&)> work) {
    std::lock_guard lock(mutex);
    if (runtime) runtime->post([self = shared_from_this(), work = std::move(work)] { work(*self); });
  }

  // -- the templates' thread from here on
  static asio::awaitable<void> drive(std::shared_ptr<Impl> self);
  void add(std::int64_t id, const TemplateOptions& options, const std::shared_ptr<WorkerLog>& log);
  Shared library_of(const TemplateOptions& options, const std::shared_ptr<WorkerLog>& log);
  /// Forks from `process`, once it is there, or else from what it would be forked from; executes where neither can be.
  void serve(const Shared& process, Request request);
  void begin(const Shared& process);
  void open(const Shared& process, ChildProcess child);
  void fork(const Shared& process, Request request);
  void on_message(const Shared& process, const json::object& message);
  void on_ready(const Shared& process, const json::object& message);
  void on_forked(const Shared& process, const json::object& message);
  /// Its process is dead, or as good as that.
  void lose(const Shared& process, const std::string& reason);
  /// There will be none any more.
  void refuse(const Shared& process);
  /// Its requests, to the next process or elsewhere.
  void serve_again(const Shared& process);
  void close(Template& process, std::string text);
  void check_deadlines(const Shared& process);
  void reap();
  fs::path new_folder(const std::string& kind);
  static void execute(const Request& request);

  std::mutex mutex;
  std::unique_ptr<net::IoRuntime> runtime;  ///< null once stopped; guarded by mutex
  PrivateFolder folder;
  std::map<std::string, Shared> libraries;
  std::map<std::int64_t, Shared> environments;
  std::vector<Ending> endings;
  std::int64_t num_asked = 0;
  std::int64_t num_folders = 0;
  bool is_stopping = false;
  net::Signal wake;
  std::atomic<std::int64_t> next_id{0};
};

asio::awaitable<void> WorkerTemplates::Impl::drive(std::shared_ptr<Impl> self) {
  Impl& all = *self;
  while (!all.is_stopping) {
    std::vector<Shared> processes;
    for (const auto& [key, process] : all.libraries) processes.push_back(process);
    for (const auto& [id, process] : all.environments) processes.push_back(process);
    for (const Shared& process : processes) all.check_deadlines(process);
    all.reap();
    co_await all.wake.wait_until(net::Clock::now() + (all.endings.empty() ? 1s : 20ms));
  }
}

fs::path WorkerTemplates::Impl::new_folder(const std::string& kind) {
  const fs::path path = folder.path() / fmt::format("{}-{}", kind, num_folders++);
  fs::create_directories(path);
  return path;
}

WorkerTemplates::Impl::Shared WorkerTemplates::Impl::library_of(const TemplateOptions& options, const std::shared_ptr<WorkerLog>& log) {
  Shared& library = libraries[library_key(options)];
  if (library) return library;
  library = std::make_shared<Template>();
  library->name = fmt::format("the template process of {}", options.python);
  library->log = log;
  library->import_limit = options.import_limit;
  library->preload = {{"t", "preload"}, {"what", "library"}};
  library->preload["kind"] = options.kind == "fake" ? "fake" : "auto";
  library->preload["writes_bytecode"] = options.writes_bytecode;
  library->child = {.name = library->name,
                    .argv = {options.python, "-m", "prl_worker", "--template", "--fd", std::to_string(kConnectionFd)},
                    .env = options.env,
                    .folder = new_folder("library"),
                    .limits = options.limits,
                    .isolate_network = options.isolate_network,
                    .is_template = true};
  library->child.env.push_back("PRL_TMPDIR=" + library->child.folder.string());
  library->child.limits.num_processes *= kMostTogether;
  // What it imports is not on a worker's account.
  library->child.limits.cpu_seconds = 0;
  return library;
}

void WorkerTemplates::Impl::add(std::int64_t id, const TemplateOptions& options, const std::shared_ptr<WorkerLog>& log) {
  const Shared library = library_of(options, log);
  if (options.kind == "fake") {
    environments[id] = library;
    return;
  }
  const auto process = std::make_shared<Template>();
  process->name = fmt::format("the template process of {}", options.name);
  process->log = log;
  process->import_limit = options.import_limit;
  process->preload = {{"t", "preload"}, {"what", "module"}};
  process->preload["env_id"] = options.env_id;
  json::array paths;
  for (const std::string& path : options.paths) paths.emplace_back(path);
  process->preload["paths"] = std::move(paths);
  process->library = library;
  environments[id] = process;
}

void WorkerTemplates::Impl::serve(const Shared& process, Request request) {
  if (process->state == State::kReady) return fork(process, std::move(request));
  if (process->state == State::kRefused) {
    if (process->library && !request.is_template) return serve(process->library, std::move(request));
    if (request.is_template) return request.done({std::nullopt, "there is no template of the library"});
    return execute(request);
  }
  process->waiting.push_back(std::move(request));
  if (process->state == State::kNone) begin(process);
}

/// A worker without a template.
void WorkerTemplates::Impl::execute(const Request& request) {
  Started started;
  try {
    started.child.emplace(ChildProcess::start(request.child));
  } catch (const std::exception& error) {
    started.problem = error.what();
  }
  request.done(std::move(started));
}

void WorkerTemplates::Impl::begin(const Shared& process) {
  process->state = State::kStarting;
  process->due = net::Clock::now() + process->import_limit;
  if (!process->library) {
    try {
      open(process, ChildProcess::start(process->child));
    } catch (const std::exception& error) {
      log::warning("{}; Python workers are started without it", error.what());
      refuse(process);
    }
    return;
  }
  ChildOptions child{.name = process->name, .argv = {}, .env = {}, .folder = new_folder("environment"), .limits = {}};
  const std::weak_ptr<Template> weak = process;
  serve(process->library, {std::move(child), true, [this, weak](Started started) {
                             const Shared self = weak.lock();
                             if (!self || self->state != State::kStarting) return;
                             if (started.child)
                               open(self, std::move(*started.child));
                             else
                               refuse(self);
                           }});
}

void WorkerTemplates::Impl::open(const Shared& process, ChildProcess child) {
  const std::int64_t generation = ++process->generation;
  const std::weak_ptr<Template> weak = process;
  const auto current = [weak, generation]() -> Shared {
    Shared self = weak.lock();
    return self && self->generation == generation ? self : nullptr;
  };
  LinkEvents events;
  events.on_message = [this, current](json::object message) {
    if (const Shared self = current()) on_message(self, message);
  };
  events.on_end = [this, current](const std::string& reason) {
    if (const Shared self = current()) lose(self, reason);
  };
  process->link = std::make_unique<WorkerLink>(runtime->executor(), std::move(child), process->log, "template", WorkerLink::Limits{},
                                               std::move(events));
  log::debug("{} started (pid {})", process->name, process->link->pid().value_or(0));
  process->link->send(process->preload);
}

void WorkerTemplates::Impl::fork(const Shared& process, Request request) {
  const ChildOptions& child = request.child;
  const SandboxPlan plan = plan_sandbox(child.limits, child.isolate_network, ::geteuid(), uid_in_template());
  json::object message{{"t", "fork"}};
  const std::string id = fmt::format("f{}", num_asked++);
  message["id"] = id;
  message["role"] = request.is_template ? "template" : "worker";
  message["folder"] = child.folder.string();
  message["parent"] = ::getpid();
  if (!request.is_template) message["limits"] = limits_object(child.limits);
  if (child.isolate_network) {
    json::object maps;
    maps["uid_map"] = plan.uid_map;
    maps["gid_map"] = plan.gid_map;
    message["namespace"] = std::move(maps);
  } else {
    message["counted_uid"] = plan.counted_uid;
  }
  std::string problem;
  try {
    ChildStreams streams(child.name);
    const std::array descriptors{streams.connection_end, streams.output_end};
    const std::string frame = encode_frame(message);
    process->asked.emplace(id, Asked{std::move(request), std::move(streams), net::Clock::now() + kForkLimit});
    if (process->link->send_with(frame, descriptors)) return;
    problem = "it takes no requests";
  } catch (const Error& error) {
    problem = error.what();
    process->waiting.push_back(std::move(request));
  }
  lose(process, problem);
}

void WorkerTemplates::Impl::on_message(const Shared& process, const json::object& message) {
  const std::string type = text_member(message, "t");
  if (type == "ready") {
    on_ready(process, message);
  } else if (type == "forked") {
    on_forked(process, message);
  } else {
    lose(process, fmt::format("it sent a message {}", type));
  }
}

void WorkerTemplates::Impl::on_ready(const Shared& process, const json::object& message) {
  if (process->state != State::kStarting) return;
  const std::string problem = optional_text(message, "problem");
  if (problem.empty()) {
    log::debug("{} is ready: {:.2f} s of a processor, {:.2f} s", process->name, optional_number(message, "cpu_s", 0),
               optional_number(message, "took_s", 0));
    process->state = State::kReady;
    for (Request& request : std::exchange(process->waiting, {})) serve(process, std::move(request));
    return;
  }
  // A worker that fails to import the same says so itself, and better.
  const bool is_failed = optional_bool(message, "is_failed", false);
  const std::string text = fmt::format("{}: importing {} {}; workers are {}", process->name,
                                       process->library ? text_member(process->preload, "env_id") : "the library", problem,
                                       process->library ? "forked from before that import" : "started by exec");
  if (is_failed)
    log::debug("{}", text);
  else
    log::warning("{}", text);
  close(*process, "");
  refuse(process);
}

void WorkerTemplates::Impl::on_forked(const Shared& process, const json::object& message) {
  const auto it = process->asked.find(optional_text(message, "id"));
  if (it == process->asked.end()) return;
  Asked asked = std::move(it->second);
  process->asked.erase(it);
  const std::string problem = optional_text(message, "problem");
  const std::int64_t pid = optional_integer(message, "pid", 0);
  Started started;
  // One that failed is waited for, too.
  if (pid > 0) started.child.emplace(ChildProcess::adopt(static_cast<pid_t>(pid), std::move(asked.streams)));
  if (problem.empty() && started.child) return asked.request.done(std::move(started));
  log::warning("{} cannot fork: {}; it is not used any more", process->name, problem);
  started.child.reset();
  process->waiting.push_back(std::move(asked.request));
  close(*process, "");
  refuse(process);
}

void WorkerTemplates::Impl::lose(const Shared& process, const std::string& reason) {
  // What dies during its imports would die there again.
  const bool is_over = ++process->num_deaths >= kMaxTemplateDeaths || process->state == State::kStarting;
  close(*process, fmt::format("{} ended: {}; {}", process->name, reason,
                              is_over ? "workers are started without it" : "a new one is started for the next worker"));
  process->state = is_over ? State::kRefused : State::kNone;
  serve_again(process);
}

void WorkerTemplates::Impl::refuse(const Shared& process) {
  process->state = State::kRefused;
  serve_again(process);
}

void WorkerTemplates::Impl::serve_again(const Shared& process) {
  std::vector<Request> requests = std::exchange(process->waiting, {});
  for (auto& [id, asked] : std::exchange(process->asked, {})) requests.push_back(std::move(asked.request));
  for (Request& request : requests) serve(process, std::move(request));
}

void WorkerTemplates::Impl::close(Template& process, std::string text) {
  ++process.generation;
  if (!process.link) return;
  process.link->close();
  endings.push_back({std::move(process.link), std::move(text)});
  wake.notify();
}

void WorkerTemplates::Impl::check_deadlines(const Shared& process) {
  const auto now = net::Clock::now();
  if (process->state == State::kStarting && now >= process->due)
    return lose(process,
                fmt::format("its imports took over {} s", std::chrono::duration_cast<std::chrono::seconds>(process->import_limit).count()));
  for (const auto& [id, asked] : process->asked)
    if (now >= asked.due) return lose(process, fmt::format("a fork took over {} s", kForkLimit.count()));
}

void WorkerTemplates::Impl::reap() {
  std::erase_if(endings, [](const Ending& ending) {
    if (!ending.link->is_gone()) return false;
    const std::string how = ending.link->describe_end();
    if (!ending.text.empty()) log::warning("{}{}{}", ending.text, how.empty() ? "" : "; it ", how);
    return true;
  });
}

std::shared_ptr<WorkerTemplates::Impl> WorkerTemplates::impl() {
  std::lock_guard lock(mutex_);
  if (!impl_) {
    impl_ = std::make_shared<Impl>();
    impl_->runtime = std::make_unique<net::IoRuntime>(1, "templates");
    impl_->runtime->spawn("templates of Python workers", Impl::drive(impl_));
  }
  return impl_;
}

WorkerTemplates::~WorkerTemplates() {
  if (!impl_) return;
  auto done = std::make_shared<std::promise<void>>();
  impl_->post([done](Impl& all) {
    all.is_stopping = true;
    for (auto& [id, process] : all.environments) all.close(*process, "");
    for (auto& [key, process] : all.libraries) all.close(*process, "");
    all.environments.clear();
    all.libraries.clear();
    all.endings.clear();  // kills and waits
    all.wake.notify();
    done->set_value();
  });
  done->get_future().wait_for(5s);
  std::unique_ptr<net::IoRuntime> runtime;
  {
    std::lock_guard lock(impl_->mutex);
    runtime = std::move(impl_->runtime);
  }
  runtime->stop(1s);
}

WorkerTemplates::Environment::Environment(std::shared_ptr<WorkerTemplates> templates, TemplateOptions options,
                                          std::shared_ptr<WorkerLog> log)
    : templates_(std::move(templates)), impl_(templates_->impl()), id_(impl_->next_id++) {
  impl_->post([id = id_, options = std::move(options), log = std::move(log)](Impl& all) { all.add(id, options, log); });
}

WorkerTemplates::Environment::~Environment() {
  impl_->post([id = id_](Impl& all) {
    const auto it = all.environments.find(id);
    if (it == all.environments.end()) return;
    if (it->second->library) all.close(*it->second, "");
    all.environments.erase(it);
  });
}

void WorkerTemplates::Environment::start(ChildOptions child, Done done) {
  impl_->post([id = id_, child = std::move(child), done = std::move(done)](Impl& all) {
    all.serve(all.environments.at(id), {child, false, done});
  });
}

}  // namespace prl::env::python
