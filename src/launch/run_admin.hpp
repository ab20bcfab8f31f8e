#pragma once

#include <string>

#include "config/tool_config.hpp"

namespace prl::launch {

/// `prl runs`: looks at the runs of a trainer that serves several, or changes what their control files ask for; trainer and orchestrators
/// follow within a second. Returns what to print. Error{kNotFound} naming the runs there are; {kAlreadyExists} for one that is added twice.
std::string run_admin(const config::RunsToolConfig& config);

}  // namespace prl::launch
