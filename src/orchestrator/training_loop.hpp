#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/run_orders.hpp"
#include "base/spans.hpp"
#include "base/waiting.hpp"
#include "orchestrator/batch_assembler.hpp"
#include "orchestrator/batch_shipper.hpp"
#include "orchestrator/engine_load.hpp"
#include "orchestrator/eval_rounds.hpp"
#include "orchestrator/policy_follower.hpp"
#include "orchestrator/run_control.hpp"
#include "orchestrator/step_recorder.hpp"

namespace prl::orchestrator {

/// The main coroutine of a run: evaluates, opens groups, collects, ships and records, and says what it waits for when it can do nothing.
class TrainingLoop {
 public:
  struct Options {
    RunOrders orders = {};                              ///< pauses and checkpoints that somebody asks for
    std::int64_t batch_size = 128;                      ///< for messages
    std::chrono::milliseconds status_interval{10'000};  ///< time between two lines about the batch in collection
    std::chrono::milliseconds policy_timeout{3'600'000};
    std::optional<std::int64_t> strict_lag;                ///< of PolicyFollower::Options
    std::string rollouts_from;                             ///< the service that plays rollouts, for messages
    bool is_recovered = false;                             ///< goes on in the place of a process that was killed
    std::function<void(monitor::Metrics&)> add_metrics{};  ///< to the row of a step; may be empty
  };
  /// What the loop drives; all borrowed.
  struct Parts {
    RunControl& control;
    PolicyFollower& policy;
    BatchAssembler& assembler;
    BatchShipper& shipper;
    EvalRounds& evals;
    StepRecorder& recorder;
  };
  TrainingLoop(Options options, Parts parts) : options_(std::move(options)), parts_(parts) {}

  /// A reading of the engines' load, for the metrics of the step under way.
  void on_load(const EnginePressure& pressure) { load_.add(pressure, net::Clock::now()); }
  /// Until the last step has shipped or the run is stopped. Error{kDeadline} saying who waits for whom, and errors of the parts.
  asio::awaitable<void> run();
  /// A rollout ended or new weights are in place.
  void on_progress();

 private:
  /// Opens no group and ships nothing while somebody wants that; rollouts in flight end.
  asio::awaitable<void> wait_while_paused();
  asio::awaitable<void> ship();
  /// Says whom a full batch waits for, for as long as it does.
  void check_held(bool is_held);
  void log_status(bool is_gate_closed);
  void check_stall(bool is_gate_closed);
  std::string describe_idle() const;

  Options options_;
  Parts parts_;
  net::TimePoint last_ship_;
  net::TimePoint last_status_;
  double seconds_gate_closed_ = 0;
  double seconds_held_ = 0;
  LoadWindow load_;
  spans::Phases phases_{"orchestrator"};
  /// What the loop waits for when it has nothing to do; begins anew with every progress.
  Waiting idle_{{.who = "the orchestrator", .what = "nothing yet", .detail = [this] { return describe_idle(); }}};
  /// What a full batch waits for. Other rollouts that end are no progress of this wait.
  std::optional<Waiting> held_;
};

}  // namespace prl::orchestrator
