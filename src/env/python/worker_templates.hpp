#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "env/python/child_process.hpp"
#include "env/python/worker_log.hpp"

namespace prl::env::python {

/// What a template process imports, and what it has in common with the workers that are forked from it.
struct TemplateOptions {
  std::string name;              ///< of the environment, for messages
  std::string python;            ///< interpreter
  std::vector<std::string> env;  ///< variables, "NAME=value"; PRL_TMPDIR is added
  ChildLimits limits;            ///< of one worker
  bool isolate_network = false;
  std::string kind = "auto";       ///< "fake": nothing of the library, and no module
  std::string env_id;              ///< whose module is imported
  std::vector<std::string> paths;  ///< that Python's path begins with
  bool writes_bytecode = false;    ///< of the library, where it is missing: the interpreter is that of an installed environment
  std::chrono::milliseconds import_limit{300'000};
};

/// Template processes (python/prl_worker/template.py): each has imported what Python workers need and forks them in milliseconds.
///
/// Environments whose workers have interpreter, variables, limits and namespaces in common share the template of the library; each has one
/// of its own, forked from that, which has imported its module. Where a module's import leaves threads or descriptors behind, workers are
/// forked from before it; where there can be no template, or it fails, they are started by exec. Templates and workers are children of
/// this process, whoever forked them, and get SIGKILL when it ends. Has a thread of its own; members may be called from any other.
class WorkerTemplates {
 public:
  WorkerTemplates() = default;
  /// Kills the templates, and with its thread, which starts with the first environment, the workers: who has workers must keep this.
  ~WorkerTemplates();
  WorkerTemplates(const WorkerTemplates&) = delete;
  WorkerTemplates& operator=(const WorkerTemplates&) = delete;

 private:
  struct Impl;

 public:
  struct Started {
    std::optional<ChildProcess> child;
    std::string problem;  ///< why there is none
  };
  using Done = std::function<void(Started)>;

  /// The templates of one environment. The template of its module starts with the first worker and ends with this.
  class Environment {
   public:
    Environment(std::shared_ptr<WorkerTemplates> templates, TemplateOptions options, std::shared_ptr<WorkerLog> log);
    ~Environment();
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;
    /// Forks a worker, or executes `child` where that cannot be. `done` is called once, on the templates' thread, unless these end before.
    void start(ChildOptions child, Done done);

   private:
    std::shared_ptr<WorkerTemplates> templates_;
    std::shared_ptr<Impl> impl_;
    std::int64_t id_ = 0;
  };

 private:
  std::shared_ptr<Impl> impl();

  std::mutex mutex_;
  std::shared_ptr<Impl> impl_;  ///< guarded by mutex_
};

}  // namespace prl::env::python
