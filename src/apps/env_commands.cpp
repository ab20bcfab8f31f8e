#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/stop_signal.hpp"
#include "config/tool_config.hpp"
#include "env/python/install.hpp"
#include "env/python/server.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"

namespace prl::apps {
namespace {

namespace python = env::python;

std::string describe(const python::InstalledEnv& environment) {
  return fmt::format(
      "{}\n  version    {}\n  module     {}\n  api        {}\n  verifiers  {}\n  source     {}\n  installed  {}\n  folder     {}\n",
      environment.id, environment.version, environment.module, environment.api, environment.verifiers, environment.source,
      environment.installed_at, environment.folder.string());
}

void list_environments() {
  const auto found = python::list_installed(python::environments_folder());
  if (found.empty()) std::printf("no Python environment is installed in %s\n", python::environments_folder().c_str());
  for (const python::InstalledEnv& environment : found)
    std::printf("%s\n", fmt::format("{:<32} {:<12} {:<7} verifiers {}", environment.id, environment.version, environment.api,
                                    environment.verifiers.empty() ? "-" : environment.verifiers)
                            .c_str());
}

python::InstallOptions install_options(const config::EnvCommandConfig& config, std::string target) {
  python::InstallOptions options;
  options.target = std::move(target);
  options.python = config.python;
  options.with = config.with;
  options.index = config.index;
  options.is_offline = config.offline;
  options.overwrite = config.overwrite;
  return options;
}

/// The one that is named, or all; one that fails ends it, and keeps its old version.
void update_environments(const config::EnvCommandConfig& config) {
  std::vector<std::string> targets;
  if (config.target) targets = {*config.target};
  if (!config.target)
    for (const python::InstalledEnv& environment : python::list_installed(python::environments_folder())) targets.push_back(environment.id);
  for (const std::string& target : targets) {
    const auto old = python::find_installed(python::environments_folder(), python::plain_id(target));
    const python::InstalledEnv made = python::update_environment(install_options(config, target));
    std::printf("%s: %s, before %s\n", made.id.c_str(), made.version.c_str(), old ? old->version.c_str() : "-");
  }
}

}  // namespace

int run_env(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::EnvCommandConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::EnvCommandConfig& config = loaded.config;
  switch (config.action) {
    case config::EnvAction::kList: list_environments(); break;
    case config::EnvAction::kShow: {
      const auto found = python::find_installed(python::environments_folder(), *config.target);
      if (!found) fail(ErrorCode::kNotFound, "environment {} is not installed; `prl env list` lists those that are", *config.target);
      std::fputs(describe(*found).c_str(), stdout);
      break;
    }
    case config::EnvAction::kRemove: python::remove_environment(python::environments_folder(), *config.target); break;
    case config::EnvAction::kInit:
      std::fputs(python::init_environment(*config.target, std::string(enum_name(config.api)), config.overwrite).c_str(), stdout);
      break;
    case config::EnvAction::kInstall:
      std::fputs(describe(python::install_environment(install_options(config, *config.target))).c_str(), stdout);
      break;
    case config::EnvAction::kUpdate: update_environments(config); break;
  }
  return 0;
}

int run_env_server(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::EnvServerConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  StopSignal stop;
  (void)launch::join_attempt(loaded.config.output_dir, "env-server");
  launch::setup_logging(loaded.config.log, launch::log_file(loaded.config.output_dir, "env-server.log"));
  python::ServerOptions options;
  const env::EnvSpec spec = launch::in_run(launch::env_spec(loaded.config.env), launch::env_logs(loaded.config.output_dir, "served"), 1,
                                           loaded.config.log.vf_level);
  options.id = spec.id;
  options.settings = spec.python;
  options.address = loaded.config.address;
  options.num_workers = loaded.config.num_workers;
  python::serve(options, stop.token());
  return 0;
}

}  // namespace prl::apps
