#include "env/python/setup.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "env/python/installed.hpp"
#include "env/python/run_program.hpp"
#include "env/python/sandbox.hpp"
#include "env/python/worker_files.hpp"
#include "env/python/worker_templates.hpp"
#include "env/registry.hpp"

namespace prl::env::python {

namespace fs = std::filesystem;
namespace json = boost::json;

namespace {

/// What a worker gets of this process's variables: where programs, caches and time zones are. Everything else, keys above all, stays here.
constexpr std::array kKeptVariables = {"PATH",
                                       "HOME",
                                       "USER",
                                       "LANG",
                                       "LC_ALL",
                                       "LC_CTYPE",
                                       "TZ",
                                       "LD_LIBRARY_PATH",
                                       "SSL_CERT_FILE",
                                       "SSL_CERT_DIR",
                                       "XDG_CACHE_HOME",
                                       "XDG_DATA_HOME",
                                       "HF_HOME",
                                       "HF_HUB_CACHE",
                                       "HF_DATASETS_CACHE",
                                       "NLTK_DATA",
                                       "UV_CACHE_DIR"};
constexpr std::array kNetworkVariables = {"HTTP_PROXY",  "HTTPS_PROXY", "NO_PROXY",          "http_proxy",
                                          "https_proxy", "no_proxy",    "REQUESTS_CA_BUNDLE"};
constexpr std::array kFixedVariables = {"PYTHONHASHSEED=0", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1",
                                        "OPENBLAS_NUM_THREADS=1", "MKL_NUM_THREADS=1", "MALLOC_ARENA_MAX=2", "TOKENIZERS_PARALLELISM=false",
                                        "TQDM_DISABLE=1", "HF_DATASETS_DISABLE_PROGRESS_BARS=1", "HF_HUB_DISABLE_PROGRESS_BARS=1",
                                        "UV_PYTHON_DOWNLOADS=never",
                                        // Else importing pyarrow starts a thread, and a process with threads is not forked.
                                        "JE_ARROW_MALLOC_CONF=background_thread:false"};
constexpr std::array kOfflineVariables = {"HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", "TRANSFORMERS_OFFLINE=1"};

/// The interpreter behind `python`, which may be the shim of a version manager.
fs::path checked(const fs::path& python, const std::string& subject) {
  const ProgramResult said =
      run_program({python.string(), "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"}, {.captures = true});
  int major = 0;
  int minor = 0;
  if (said.status != 0 || std::sscanf(said.output.c_str(), "%d.%d", &major, &minor) != 2)
    fail(ErrorCode::kNotFound, "{}: {} is no Python that runs: {}", subject, python.string(), said.output.substr(0, 200));
  if (major != 3 || minor < 11)
    fail(ErrorCode::kNotFound, "{}: {} is Python {}.{}, wanted {} or newer", subject, python.string(), major, minor, kOldestPython);
  std::string executable = said.output.substr(said.output.find(' ') + 1);
  executable = executable.substr(0, executable.find('\n'));
  return fs::exists(executable) ? fs::path(executable) : python;
}

/// How the addresses of the library's own environment servers begin.
constexpr std::string_view kServerScheme = "tcp://";
bool is_environment_server(const std::string& address) { return address.starts_with(kServerScheme); }

/// Of workers, "host:port", or one environment server of the library, "tcp://host:port".
std::vector<std::string> split_addresses(const std::string& text) {
  std::vector<std::string> addresses;
  std::string one;
  for (const char c : text + ",") {
    if (c == ' ') continue;
    if (c != ',') {
      one += c;
      continue;
    }
    if (!one.empty()) addresses.push_back(std::exchange(one, {}));
  }
  for (const std::string& address : addresses) {
    if (address.find(':') == std::string::npos) fail(ErrorCode::kInvalidArgument, "env.address: {} is no host:port", address);
    if (is_environment_server(address) && (addresses.size() > 1 || address.find(':', kServerScheme.size()) == std::string::npos))
      fail(ErrorCode::kInvalidArgument, "env.address: {}: wanted one environment server, tcp://host:port, or workers, host:port, ...",
           text);
  }
  return addresses;
}

int choose_workers(const PythonSettings& settings) {
  if (settings.num_workers) return *settings.num_workers;
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) - 2);
  const std::int64_t wanted = (settings.concurrency + settings.rollouts - 1) / settings.rollouts;
  return static_cast<int>(std::clamp<std::int64_t>(wanted, 1, cores));
}

/// The folders that must be in Python's path, of a list with colons; one of them has the module.
std::vector<fs::path> import_folders(const std::string& id, const std::string& path) {
  std::string module = short_name(id);
  std::replace(module.begin(), module.end(), '-', '_');
  std::string place = module;  // "package.module" is a file of a folder
  std::replace(place.begin(), place.end(), '.', '/');
  const auto has_module = [&](const fs::path& folder) {
    return fs::exists(folder / (place + ".py")) || fs::exists(folder / place / "__init__.py");
  };
  std::vector<fs::path> folders = folders_of(path, fmt::format("environment {}: path", id));
  bool is_found = false;
  for (fs::path& folder : folders) {
    if (!has_module(folder) && has_module(folder / "src")) folder /= "src";
    // The package's own folder.
    if (!has_module(folder) && folder.filename() == module && fs::exists(folder / "__init__.py")) folder = folder.parent_path();
    is_found = is_found || has_module(folder);
  }
  if (!is_found) fail(ErrorCode::kNotFound, "environment {}: path {} holds neither {}.py nor a package {}", id, path, module, module);
  return folders;
}

struct Place {
  fs::path python;
  std::vector<fs::path> paths;
  std::string module_id;
  bool is_installed = false;
};

Place place_of(const std::string& id, const PythonSettings& settings) {
  Place place;
  place.module_id = id;
  const std::string subject = fmt::format("environment {}", id);
  if (!settings.python.empty()) place.python = find_interpreter(settings.python, fmt::format("{}: python", subject));
  if (!settings.path.empty()) place.paths = import_folders(id, settings.path);
  if (place.python.empty()) {
    if (const auto installed = find_installed(environments_folder(), id)) {
      place.python = installed->python();
      place.is_installed = true;
      if (!installed->module.empty()) place.module_id = installed->module;
      if (!fs::exists(place.python))
        fail(ErrorCode::kNotFound, "{}: its virtual environment {} has no Python any more; `prl env install --overwrite` makes it again",
             subject, installed->folder.string());
    }
  }
  if (place.python.empty() && (!settings.path.empty() || settings.kind == "fake")) place.python = default_interpreter(id);
  if (place.python.empty()) {
    std::vector<std::string> installed;
    for (const InstalledEnv& environment : list_installed(environments_folder())) installed.push_back(environment.id);
    fail(ErrorCode::kNotFound,
         "environment {}: not known; native ones are {}; installed Python environments: {}. Install it with `prl env install {}`, or set "
         "python "
         "(a virtual environment that has it) or path (its folder)",
         id, fmt::join(environment_ids(), ", "), installed.empty() ? "none" : fmt::format("{}", fmt::join(installed, ", ")), id);
  }
  return place;
}

}  // namespace

std::vector<fs::path> folders_of(const std::string& path, const std::string& key) {
  std::vector<fs::path> folders;
  const std::string list = path + ":";
  for (std::size_t begin = 0, end = 0; (end = list.find(':', begin)) != std::string::npos; begin = end + 1) {
    if (end == begin) continue;
    fs::path folder = fs::absolute(list.substr(begin, end - begin)).lexically_normal();
    if (fs::is_regular_file(folder)) folder = folder.parent_path();
    if (!fs::is_directory(folder)) fail(ErrorCode::kNotFound, "{} {} is no folder and no module", key, folder.string());
    folders.push_back(std::move(folder));
  }
  return folders;
}

std::string short_name(const std::string& id) {
  const std::string plain = plain_id(id);
  const std::size_t slash = plain.rfind('/');
  return slash == std::string::npos ? plain : plain.substr(slash + 1);
}

fs::path find_interpreter(const std::string& path, const std::string& key) {
  fs::path python = path;
  if (fs::is_directory(python)) python /= "bin/python";
  if (python.string().find('/') == std::string::npos) {
    if (const auto found = find_program(python.string())) python = *found;
  }
  if (::access(python.c_str(), X_OK) != 0)
    fail(ErrorCode::kNotFound, "{} = {}: neither an interpreter nor the folder of a virtual environment", key, path);
  // Links are not resolved: the name of the link is what makes a virtual environment.
  return checked(fs::absolute(python), key);
}

fs::path default_interpreter(const std::string& id) {
  if (const char* venv = std::getenv("VIRTUAL_ENV"); venv != nullptr && *venv != '\0') return find_interpreter(venv, "VIRTUAL_ENV");
  if (const auto found = find_program("python3")) return checked(*found, fmt::format("environment {}", id));
  fail(ErrorCode::kNotFound,
       "environment {} needs Python {} or newer, and there is no python3 here; native environments run without it: {}", id, kOldestPython,
       fmt::join(environment_ids(), ", "));
}

std::vector<std::string> worker_variables(const PythonSettings& settings, const fs::path& package, bool is_offline) {
  std::vector<std::string> variables;
  const auto keep = [&](const std::string& name) {
    if (const char* value = std::getenv(name.c_str()); value != nullptr) variables.push_back(name + "=" + value);
  };
  for (const char* name : kKeptVariables) keep(name);
  if (!is_offline)
    for (const char* name : kNetworkVariables) keep(name);
  for (const char* fixed : kFixedVariables) variables.emplace_back(fixed);
  if (is_offline)
    for (const char* fixed : kOfflineVariables) variables.emplace_back(fixed);
  variables.push_back("PYTHONPATH=" + package.string());
  for (const std::string& name : settings.pass_env) {
    if (std::getenv(name.c_str()) == nullptr) log::warning("env.pass_env: there is no variable {}", name);
    keep(name);
  }
  return variables;
}

PythonOptions plan_environment(const std::string& id, const std::string& name, json::object args, const PythonSettings& settings) {
  PythonOptions options;
  options.name = name;
  PoolOptions& pool = options.pool;
  pool.name = name;
  pool.schedule.max_inflight = settings.rollouts;
  pool.load["kind"] = settings.kind;
  pool.load["env_args"] = std::move(args);
  if (!settings.env_config.empty()) pool.load["env_config"] = settings.env_config;
  if (!settings.extra_env_kwargs.empty()) pool.load["extra_env_kwargs"] = settings.extra_env_kwargs;
  options.state_columns = settings.state_columns;
  if (settings.judge) options.judge = std::make_shared<Judge>(*settings.judge);
  pool.log_level = settings.log_level;
  if (!settings.log_folder.empty()) pool.log_file = settings.log_folder / fmt::format("{}.log", name);
  const std::vector<std::string> addresses = split_addresses(settings.address);
  // Workers in front of an environment server load the environment for its rows, and need the network.
  const bool is_relay = !addresses.empty() && is_environment_server(addresses.front());
  if (!addresses.empty() && !is_relay) {
    pool.addresses = addresses;
    // A server that is started together with the run may need a minute to come up, one that is started anew a few.
    pool.schedule.max_failed_starts = 8;
    pool.schedule.max_failed_restarts = 10;
    if (const char* token = std::getenv("PRL_ENV_TOKEN")) pool.token = token;
    pool.load["env_id"] = id;
    return options;
  }
  const Place place = place_of(id, settings);
  pool.load["env_id"] = place.module_id;
  json::array paths;
  for (const fs::path& path : place.paths) paths.emplace_back(path.string());
  if (!paths.empty()) pool.load["paths"] = std::move(paths);
  if (is_relay) pool.load["relay"] = addresses.front();
  pool.isolate_network = settings.sandbox && !is_relay && can_isolate_network();
  if (settings.sandbox && !is_relay && !pool.isolate_network)
    log::warning("{}: this machine does not let a process make a network namespace: its workers can use the network", name);
  else
    log::debug("{}: workers run {}", name,
               pool.isolate_network ? "without network" : "with network (sandbox = \"off\", or a server elsewhere)");
  // A judge of the library's own needs a network and a key.
  if (!pool.isolate_network && !settings.judge) pool.load["judge"] = "own";
  pool.schedule.num_workers = choose_workers(settings);
  pool.limits = {.memory_bytes = static_cast<std::int64_t>(settings.memory_gb * (1 << 30)),
                 .num_processes = settings.processes,
                 .num_files = settings.files,
                 .cpu_seconds = settings.cpu_seconds};
  // Forked workers share their template's user id: without a count for each namespace they would share a limit of processes, too.
  const bool can_fork = !pool.isolate_network || ::geteuid() != 0 || counts_processes_by_namespace();
  if (settings.forks && can_fork) pool.templates = settings.templates ? settings.templates : std::make_shared<WorkerTemplates>();
  pool.writes_bytecode = place.is_installed;
  pool.argv = {place.python.string(), "-m", "prl_worker", "--fd", std::to_string(kConnectionFd)};
  pool.env = worker_variables(settings, unpack_worker(cache_folder()), pool.isolate_network);
  return options;
}

EnvironmentPtr make_python_environment(const std::string& id, const std::string& name, json::object args, const PythonSettings& settings) {
  return std::make_shared<PythonEnvironment>(plan_environment(id, name, std::move(args), settings));
}

}  // namespace prl::env::python
