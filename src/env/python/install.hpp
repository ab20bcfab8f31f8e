#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "env/python/installed.hpp"

namespace prl::env::python {

/// What `prl env install` was asked for.
struct InstallOptions {
  std::string target;                          ///< see Requirement
  std::optional<std::string> python;           ///< interpreter; nullopt: one that is found
  std::vector<std::string> with;               ///< more requirements
  std::optional<std::filesystem::path> index;  ///< folder of wheels
  bool is_offline = false;
  bool overwrite = false;
  std::filesystem::path all = environments_folder();
};

/// A target, understood.
struct Requirement {
  enum class Kind { kName, kHub, kFolder, kWheel, kGit };
  Kind kind = Kind::kName;
  std::string id;    ///< of the environment: "name" or "org/name"
  std::string text;  ///< for pip and uv: "name==1.0", "/path/to/folder", "git+https://..."
};
/// "name", "name==1.0", "name@1.0", "org/name" (the platform's hub), a folder with pyproject.toml, a wheel, "git+URL". Looks at the file
/// system for folders and wheels. Error{kNotFound} for a path that is not there; {kInvalidArgument} for a folder without pyproject.toml.
Requirement parse_requirement(const std::string& target);

/// Makes a virtual environment with the package, by uv if it is there, else by venv and pip; writes environment.json and requirements.lock
/// (every package with its version and, where it came from an index, its hashes). An environment that is written for the legacy API
/// gets verifiers<=0.3.1. What the tools print goes to stderr.
/// An installation that is replaced comes back if the new one fails; files that no installation made are never removed.
/// Error{kAlreadyExists} unless options.overwrite; {kNotFound} for a missing Python or client; {kUnavailable} if the installation fails.
InstalledEnv install_environment(const InstallOptions& options);
/// Installs the environment `options.target` again from where it came: the newest version of a package or of the hub's, or the version that
/// the target names; a folder, wheel or git URL as it is now. Its further requirements stay, and options.with adds to them. The old one
/// stays if that fails. Error{kNotFound} if it is not installed; errors of install_environment.
InstalledEnv update_environment(const InstallOptions& options);
/// Error{kNotFound}; {kAlreadyExists} for files in its folder that no installation made.
void remove_environment(const std::filesystem::path& all, const std::string& id);

/// Writes the package of a new environment (api "legacy" or "v1"), or questions in JSON and their configuration ("native"), into `folder`,
/// which must not exist or be empty, and returns what to type next.
std::string init_environment(const std::filesystem::path& folder, const std::string& api, bool overwrite);

}  // namespace prl::env::python
