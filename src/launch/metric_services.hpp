#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/shared_config.hpp"
#include "monitor/monitor.hpp"

/// What outside programs learn of a role's steps over HTTP.
namespace prl::launch {

/// One GET request per step on a thread of its own, 1 s each and at most one waiting; an answer other than 200 is logged as a warning
/// and does not affect training.
void add_heartbeat(monitor::Monitor& monitor, const std::optional<config::HeartbeatConfig>& config);
/// Serves the newest step of the monitor's role as Prometheus gauges on /metrics, and /health. Error{kIo} naming the address if it is
/// taken.
void add_metrics_server(monitor::Monitor& monitor, const std::optional<config::MetricsServerConfig>& config);

/// The text of /metrics: the gauges of a trainer whose metrics are there.
std::string trainer_gauges(std::int64_t step, double unix_time, const monitor::Metrics& metrics);

}  // namespace prl::launch
