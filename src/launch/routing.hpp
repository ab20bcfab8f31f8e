#pragma once

#include "config/transport_config.hpp"
#include "router/router.hpp"

namespace prl::launch {

/// How a router chooses engines, as the configuration has it.
router::RouterOptions router_options(const config::RoutingConfig& config);

}  // namespace prl::launch
