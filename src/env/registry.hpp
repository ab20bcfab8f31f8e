#pragma once

#include <boost/json/object.hpp>

#include <string>
#include <vector>

#include "env/environment.hpp"

namespace prl::env {

/// Which environment, under which name, with which arguments.
struct EnvSpec {
  std::string id;    ///< "reverse-text"; '_' and '-' are the same
  std::string name;  ///< empty: the id
  boost::json::object args;
};

/// Ids of the native environments.
std::vector<std::string> environment_ids();
/// Error{kNotFound} listing the known ids; Error{kNotImplemented} for "org/name" (environments of the verifiers hub);
/// Error{kInvalidArgument} naming a bad argument or name. args.num_shots, of any environment: see env/few_shot.hpp.
EnvironmentPtr make_environment(const EnvSpec& spec);

}  // namespace prl::env
