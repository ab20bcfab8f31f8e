#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace prl::env::python {

/// How an environment's Python workers run; what EnvConfig says about them.
struct PythonSettings {
  std::string kind = "auto";          ///< "auto", "legacy", "v1", "fake"
  std::string path;                   ///< folders that hold the environment's module or package, with colons; empty: it is installed
  std::string python;                 ///< interpreter, or folder of a virtual environment; empty: the one it was installed into
  std::string address;                ///< "host:port, ..." of workers that run already
  std::optional<int> num_workers;     ///< nullopt: by the number of rollouts at once and of cores
  bool sandbox = true;                ///< no network and no capabilities, where the machine allows it
  std::vector<std::string> pass_env;  ///< variables of this process that workers get besides the usual ones
  double memory_gb = 16;              ///< address space of a worker
  std::int64_t processes = 1024;      ///< processes and threads of a worker
  std::int64_t files = 65'536;        ///< open files of a worker
  std::int64_t cpu_seconds = 0;       ///< of a worker; 0: no limit
  std::int64_t rollouts = 128;        ///< at once in one worker
  boost::json::object env_config;     ///< of v1 environments, around the task set
  std::filesystem::path log_folder;   ///< <log_folder>/env_<name>.log gets what workers write; empty: the log, at debug level
  std::int64_t concurrency = 128;     ///< rollouts at once in all

  /// Whether anything asks for Python although a native environment has the id.
  bool is_asked_for() const { return kind != "auto" || !path.empty() || !python.empty() || !address.empty(); }
};

}  // namespace prl::env::python
