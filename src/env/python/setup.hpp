#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "env/environment.hpp"
#include "env/python/python_environment.hpp"
#include "env/python/settings.hpp"

namespace prl::env::python {

/// "org/some_env==1.2" and "org/some_env@1.2" are some-env: the name of the environment in metrics and logs.
std::string short_name(const std::string& id);

/// An interpreter, or the one of a virtual environment's folder. Error{kNotFound} naming `key` if there is none, or it is older than
/// kOldestPython.
std::filesystem::path find_interpreter(const std::string& path, const std::string& key);
/// python3 of PATH, or of $VIRTUAL_ENV. Error{kNotFound} in one line that says what is needed.
std::filesystem::path default_interpreter(const std::string& id);
inline constexpr const char* kOldestPython = "3.11";

/// The folders of a list with colons; of a file, its folder. Error{kNotFound} naming `key`.
std::vector<std::filesystem::path> folders_of(const std::string& path, const std::string& key);

/// The variables of a worker: what programs need to run and to find their caches, and `pass_env`; no keys of ours.
std::vector<std::string> worker_variables(const PythonSettings& settings, const std::filesystem::path& package, bool is_offline);

/// What starts the workers of environment `id`: an installed one, one in settings.path, or one at settings.address.
/// Error{kNotFound} if it is none of these, saying how to install it; {kInvalidArgument} naming a bad key.
PythonOptions plan_environment(const std::string& id, const std::string& name, boost::json::object args, const PythonSettings& settings);
EnvironmentPtr make_python_environment(const std::string& id, const std::string& name, boost::json::object args,
                                       const PythonSettings& settings);

}  // namespace prl::env::python
