#pragma once

#include <string>
#include <vector>

#include "config/problem.hpp"
#include "config/value.hpp"

/// Keys, passwords and tokens given as values: files that this program writes show them as "***".
namespace prl::config {

inline constexpr const char* kMasked = "***";
/// Variable in which a launcher hands the values to the roles it starts from written files: a JSON object by dotted key.
inline constexpr const char* kSecretsVariable = "PRL_SECRETS";

/// Masks every secret of a tree and returns the values, a table by dotted key.
///
/// Secret are the texts at a key `api_key` or `*_api_key`, and the members of `env_vars` and `headers` whose name has one of the
/// words key, token, secret, password, authorization, auth, cookie or credentials. `api_key_var` and `headers_from_env` hold names
/// of variables and stay.
Value mask_secrets(Value& tree);

/// Puts values back where a tree has masks: those of `known` (a table by dotted key). A mask without one is removed, and its key is
/// returned with the place it was written at.
std::vector<Member> restore_secrets(Value& tree, const Value& known);

}  // namespace prl::config
