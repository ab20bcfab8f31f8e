#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "config/shared_config.hpp"
#include "monitor/monitor.hpp"
#include "trainer/report.hpp"

/// What becomes of a role's steps beside metrics.jsonl: what outside programs learn over HTTP, and the table of a benchmark.
namespace prl::launch {

/// One GET request per step on a thread of its own, 1 s each and at most one waiting; an answer other than 200 is logged as a warning
/// and does not affect training.
void add_heartbeat(monitor::Monitor& monitor, const std::optional<config::HeartbeatConfig>& config);
/// Serves the newest step of the monitor's role as Prometheus gauges on /metrics, and /health. Error{kIo} naming the address if it is
/// taken.
void add_metrics_server(monitor::Monitor& monitor, const std::optional<config::MetricsServerConfig>& config);

/// The table of an orchestrator with `bench`: the sampler's tokens per second and the time of each step, beside what the trainer measures.
class OrchestratorBench {
 public:
  /// Follows the rows of the monitor's own role from here on. `config` may be off.
  OrchestratorBench(monitor::Monitor& monitor, const std::optional<config::BenchModeConfig>& config);
  /// Writes output_json, if there is one, as the trainer writes its own, with null for mfu and peak_memory. After the last step.
  void write() const;

 private:
  std::optional<std::filesystem::path> path_;
  std::shared_ptr<trainer::BenchTable> table_;
};

/// The text of /metrics: the gauges of a trainer whose metrics are there.
std::string trainer_gauges(std::int64_t step, double unix_time, const monitor::Metrics& metrics);

}  // namespace prl::launch
