#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "config/shared_config.hpp"
#include "monitor/monitor.hpp"
#include "trainer/report.hpp"

/// What becomes of a role's steps beside metrics.jsonl: what outside programs learn over HTTP, and the table of a benchmark.
namespace prl::launch {

class Heartbeat;
class MetricsServer;

/// Heartbeats, and /metrics over HTTP, of one run or of several in one process. They end with the last monitor that they follow and this.
/// A heartbeat is one GET request per step on a thread of its own, 1 s each and at most one waiting; an answer other than 200 is logged as
/// a warning and does not affect training. /metrics are the Prometheus gauges of the newest step of each run that is followed and has not
/// ended, told apart by the label "run" where they have names; beside it is /health.
class StepServices {
 public:
  /// Each may be off. Error{kIo} naming the address if it is taken.
  StepServices(const std::optional<config::HeartbeatConfig>& heartbeat, const std::optional<config::MetricsServerConfig>& metrics_server);
  /// From the monitor's next step until its end.
  void follow(monitor::Monitor& monitor, const std::string& run = {}) const;

 private:
  std::shared_ptr<Heartbeat> heartbeat_;
  std::shared_ptr<MetricsServer> metrics_server_;
};

/// Those of one run. Errors as of StepServices.
void add_heartbeat(monitor::Monitor& monitor, const std::optional<config::HeartbeatConfig>& config);
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

struct NewestStep {
  std::int64_t step = 0;
  double unix_time = 0;  ///< seconds
  monitor::Metrics metrics;
};
/// The text of /metrics, by the names of runs: the gauges whose metrics are there. The name "" gives no label.
std::string trainer_gauges(const std::map<std::string, NewestStep>& runs);

}  // namespace prl::launch
