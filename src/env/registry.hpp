#pragma once

#include <boost/json/object.hpp>

#include <string>
#include <vector>

#include "env/environment.hpp"
#include "env/python/settings.hpp"

namespace prl::env {

/// Which environment, under which name, with which arguments.
struct EnvSpec {
  std::string id;    ///< "reverse-text"; '_' and '-' are the same
  std::string name;  ///< empty: the id
  boost::json::object args;
  python::PythonSettings python = {};
};

/// Ids of the native environments.
std::vector<std::string> environment_ids();
/// The native environment of that id; else, or if spec.python asks for it, the Python environment (env/python/setup.hpp), whose workers
/// start with the first call that needs them. args.num_shots, of any native environment: see env/few_shot.hpp. Error{kNotFound} listing
/// what there is; Error{kInvalidArgument} naming a bad argument or name.
EnvironmentPtr make_environment(const EnvSpec& spec);

}  // namespace prl::env
