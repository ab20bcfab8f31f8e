#pragma once

#include <stop_token>

#include "config/tool_config.hpp"

namespace prl::tools {

/// `prl router`: serves until `stop`. Returns the exit status.
int run_router(const config::RouterToolConfig& config, std::stop_token stop);

}  // namespace prl::tools
