#pragma once

#include "config/command.hpp"
#include "config/problem.hpp"
#include "config/value.hpp"

namespace prl::config {

/// Renames the keys of other versions to ours, in one layer (one file, the flags, the environment) before layers are
/// merged, so that an old name in a file and the new name on the command line meet as the same key.
///
/// Both spellings in one layer with different values are a problem. Keys that have no counterpart become problems that say
/// what to use instead.
void canonicalize(Value& layer, Command command, Report& report);

/// Top-level names that canonicalize understands besides a command's own keys, for the environment.
std::vector<std::string> alias_roots(Command command);

}  // namespace prl::config
