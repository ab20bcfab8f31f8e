#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace prl::env::python {

/// An environment in a virtual environment of its own, made by `prl env install`.
struct InstalledEnv {
  std::string id;                      ///< "name" or "org/name"
  std::string module;                  ///< that is imported
  std::string version;                 ///< of its distribution; empty if it has none
  std::string source;                  ///< what was installed: a requirement, a folder, a wheel
  std::string api;                     ///< "legacy", "v1", or empty if that is not known
  std::string verifiers;               ///< version of the library
  std::string installed_at;            ///< UTC, ISO 8601
  std::vector<std::string> with = {};  ///< further requirements that it was installed with
  std::filesystem::path folder;        ///< holds environment.json, requirements.lock and venv/

  std::filesystem::path python() const { return folder / "venv" / "bin" / "python"; }
};

/// $PRL_ENVIRONMENTS, or $XDG_DATA_HOME/prl/environments, or ~/.local/share/prl/environments.
std::filesystem::path environments_folder();
/// "org/some_env==1.2" to "org/some-env".
std::string plain_id(const std::string& id);
/// "org/some-env==1.2" and "...@1.2" to "1.2"; empty without a version.
std::string version_of(const std::string& id);
/// The folder of the environment, whether there or not.
std::filesystem::path installed_folder(const std::filesystem::path& all, const std::string& id);
/// Where the former installation of an environment is while a new one is made, and the file that is locked for as long.
std::filesystem::path former_folder(const std::filesystem::path& folder);
std::filesystem::path lock_file(const std::filesystem::path& folder);
/// All that are complete, by id. A former installation whose replacement was killed halfway comes back first.
std::vector<InstalledEnv> list_installed(const std::filesystem::path& all);
/// The one with this id; "name" also finds "org/name" if there is but one. Error{kNotFound} if another version than the named one is there;
/// {kInvalidArgument} if several organisations have one of this name.
std::optional<InstalledEnv> find_installed(const std::filesystem::path& all, const std::string& id);
void write_installed(const InstalledEnv& environment);

}  // namespace prl::env::python
