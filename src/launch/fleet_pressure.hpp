#pragma once

#include <memory>

#include "net/http_client.hpp"
#include "orchestrator/concurrency.hpp"
#include "router/fleet.hpp"

namespace prl::launch {

/// The load of a fleet's engines, from their /metrics pages and from the requests that wait for one of them.
std::shared_ptr<orchestrator::PressureSource> make_fleet_pressure(std::shared_ptr<router::Fleet> fleet,
                                                                  std::shared_ptr<net::HttpClient> client);

}  // namespace prl::launch
