#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine.hpp"
#include "engine/model_runner.hpp"
#include "engine/scheduler.hpp"

namespace prl::engine {

struct CoreOptions {
  SchedulerOptions scheduler;
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 16;
};

/// The engine without its thread: requests in, steps, events out. Each accepted choice ends with exactly one event that has a
/// finish reason, whatever happens. One thread; sinks are called from within step(), deliver(), cancel(), stop(), update_weights() and
/// abort_all().
///
/// Where the device computes beside the host, a step's events are sent while the next step computes: what a step needs of the one before is
/// its tokens, not that somebody has heard of them. Requests that end at strings hear of each token at once.
class EngineCore {
 public:
  EngineCore(const CoreOptions& options, std::unique_ptr<ModelRunner> runner);
  ~EngineCore();

  void add(RequestId id, ResolvedRequest request, EventSink sink);
  void cancel(RequestId id);
  void stop(RequestId id, std::int32_t choice_idx, std::string stop_string);
  /// Plans a step, runs it, emits its tokens or leaves them to be sent by the next call of any of these. False if there was nothing to do.
  /// A failing step ends its requests with kError and leaves the others for the next one.
  bool step();
  /// Sends what the last step left to be sent; for a caller that makes no step soon.
  void deliver();
  /// Error as ModelRunner::set_weights, with nothing changed.
  WeightProof update_weights(nn::WeightsPtr weights);
  WeightProof prove() { return runner_->prove(); }
  nn::WeightsPtr weights() const { return runner_->weights(); }
  void reset_prefix_cache() { scheduler_.reset_prefix_cache(); }
  void abort_all(wire::FinishReason reason, const std::string& error);

  bool is_idle() const noexcept { return scheduler_.num_running() == 0 && scheduler_.num_waiting() == 0; }
  /// Steps that failed since the last one that did not.
  int num_failures_in_a_row() const noexcept { return num_failures_in_a_row_; }
  EngineStats stats() const;
  const Scheduler& scheduler() const noexcept { return scheduler_; }
  /// Requests whose last choice ended since clear_ended().
  const std::vector<RequestId>& ended() const noexcept { return ended_; }
  void clear_ended() noexcept {
    ended_.clear();
    num_dropped_ = 0;
  }

 private:
  struct Request;
  /// What a step found for a sequence, which has its token already, and nobody was told.
  struct News {
    Request* request = nullptr;
    Sequence* sequence = nullptr;
    StepOutput::Row* output = nullptr;
    wire::FinishReason reason = wire::FinishReason::kNone;
  };
  /// True if its request wants to hear of it before the next step.
  bool accept(const PlanRow& row, StepOutput::Row& output);
  /// The sequence gets its token. kNone if it goes on.
  wire::FinishReason accept_token(Sequence& sequence, const ops::SampleResult& sample);
  /// Sends the news. Destroys nothing.
  void send_news();
  /// Takes the sequence out and sends its final event, which begin_event and the caller have begun.
  void finish(Request& request, Sequence& sequence, wire::FinishReason reason);
  void fail_step(const StepPlan& plan, const std::string& error);
  /// Clears the request's event and fills in what every event of this choice says.
  void begin_event(Request& request, const Sequence& sequence);
  void emit(Request& request);
  /// Destroys requests whose choices have all ended; not while plan rows that point to them are walked.
  void drop_ended();

  BlockPool pool_;
  Scheduler scheduler_;
  std::unique_ptr<ModelRunner> runner_;
  std::array<StepOutput, 2> outputs_;  ///< of the step that computes and of the one before
  std::size_t output_ = 0;
  std::vector<News> news_;
  std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
  std::vector<RequestId> ended_;
  std::size_t num_dropped_ = 0;  ///< of ended_
  std::uint64_t num_arrivals_ = 0;
  PolicyVersion version_;
  EngineStats counters_;
  int num_failures_in_a_row_ = 0;
};

}  // namespace prl::engine
