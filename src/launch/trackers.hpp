#pragma once

#include <boost/json/object.hpp>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "config/rl_config.hpp"
#include "config/sft_config.hpp"

namespace prl::launch {

/// What the processes of a run's trackers are told.
struct TrackerPlan {
  std::filesystem::path run_folder;
  std::vector<std::string> kinds;  ///< "tensorboard", "wandb", ...; empty: there are none
  boost::json::object settings;    ///< of all of them; written to "state" within run_folder, where they keep what a restart needs
};
/// The trackers that a configuration names. One process serves each of them for all roles, in every shape of deployment.
TrackerPlan tracker_plan(const config::RlConfig& config);
TrackerPlan tracker_plan(const config::SftConfig& config);
/// Of a role that was started by itself: its own rows alone, in runs named after it. A trainer of several runs has none: each run has.
TrackerPlan tracker_plan(const config::TrainerConfig& config);
TrackerPlan tracker_plan(const config::OrchestratorConfig& config);

/// Hands the metrics of a run to experiment trackers: a Python process each (python/prl_tracker), which reads metrics.jsonl as a page does.
/// The run never waits for a tracker. One that exits is restarted with increasing delays. Rows that a tracker has not read yet stay in the
/// file, and after a restart it is asked for the last row it has, so that each row arrives once.
class Trackers {
 public:
  /// Starts a thread for each; problems are warnings. `plan.kinds` may be empty.
  explicit Trackers(TrackerPlan plan);
  /// finish(true) if nobody has.
  ~Trackers();
  Trackers(const Trackers&) = delete;
  Trackers& operator=(const Trackers&) = delete;
  /// The run has ended: waits until all is handed over, at most a minute (ten seconds after a failure). Idempotent.
  void finish(bool has_failed);

 private:
  class Process;
  std::vector<std::unique_ptr<Process>> processes_;
};

}  // namespace prl::launch
