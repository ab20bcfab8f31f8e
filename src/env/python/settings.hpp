#pragma once

#include <boost/json/object.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace prl::env::python {

class WorkerTemplates;

/// The service that answers the calls of an environment's judges.
struct JudgeSettings {
  std::string base_url = "https://api.openai.com/v1";
  std::string model;            ///< empty: what the environment asks for
  std::string api_key;          ///< empty: none
  std::int64_t max_calls = -1;  ///< in the life of the process; -1: no limit
  bool has_cache = true;
  std::chrono::milliseconds timeout{120'000};
};

/// How an environment's Python workers run; what EnvConfig says about them.
struct PythonSettings {
  std::string kind = "auto";             ///< "auto", "legacy", "v1", "fake"
  std::string path;                      ///< folders that hold the environment's module or package, with colons; empty: it is installed
  std::string python;                    ///< interpreter, or folder of a virtual environment; empty: the one it was installed into
  std::string address;                   ///< "host:port, ..." of workers that run already, or "tcp://host:port" of a server of the library
  std::optional<int> num_workers;        ///< nullopt: by the number of rollouts at once and of cores
  bool sandbox = true;                   ///< no network and no capabilities, where the machine allows it
  std::vector<std::string> pass_env;     ///< variables of this process that workers get besides the usual ones
  double memory_gb = 16;                 ///< address space of a worker
  std::int64_t processes = 1024;         ///< processes and threads of a worker
  std::int64_t files = 65'536;           ///< open files of a worker
  std::int64_t cpu_seconds = 0;          ///< of a worker; 0: no limit
  std::int64_t rollouts = 128;           ///< at once in one worker
  boost::json::object env_config;        ///< of v1 environments, around the task set
  boost::json::object extra_env_kwargs;  ///< of legacy environments: set on the environment once it is made
  std::vector<std::string> state_columns;      ///< of the environment's state, put into the episode's info
  std::optional<JudgeSettings> judge;          ///< nullopt: judges use clients of their own, where they have a network
  std::string log_level = "info";              ///< least level of the records that workers send: "debug", "info", "warning", "error"
  std::filesystem::path log_folder;            ///< <log_folder>/<name>.log gets what workers write; empty: the log, at debug level
  std::int64_t concurrency = 128;              ///< rollouts at once in all
  bool forks = false;                          ///< workers are forked from a template, where the machine allows it; else each is executed
  std::shared_ptr<WorkerTemplates> templates;  ///< that environments share; null: each has its own

  /// Whether anything asks for Python although a native environment has the id.
  bool is_asked_for() const { return kind != "auto" || !path.empty() || !python.empty() || !address.empty(); }
};

}  // namespace prl::env::python
