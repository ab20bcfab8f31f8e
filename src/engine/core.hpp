#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/adapter_set.hpp"
#include "engine/core_request.hpp"
#include "engine/draft_model.hpp"
#include "engine/engine.hpp"
#include "engine/kv_keys.hpp"
#include "engine/model_runner.hpp"
#include "engine/scheduler.hpp"
#include "engine/steps_under_way.hpp"
#include "engine/tenant_set.hpp"

namespace prl::engine {

struct CoreOptions {
  SchedulerOptions scheduler;
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 16;
  std::int64_t num_host_blocks = 0;  ///< in host memory; 0: what the cache has no room for is lost
  std::int64_t num_disk_blocks = 0;  ///< in files of the runner, for what host memory has no room for; 0: none
  std::shared_ptr<AdapterSet> adapters = std::make_shared<AdapterSet>(0);
};

/// The engine without its thread: requests in, steps, events out. Each accepted request ends with exactly one event that has a
/// finish reason, whatever happens. One thread; sinks are called from within step(), deliver(), cancel(), stop(), update_weights() and
/// abort_all().
///
/// On asynchronous devices step N+1 is enqueued before step N's tokens reach the host, if it only goes on with the same sequences
/// (Scheduler::plan_ahead); what it computes for a sequence that turns out to have ended is dropped. The events of step N are sent while
/// step N+1 computes, but requests with stop strings hear of each token at once. Every call except add() first waits for the step that is
/// in flight.
class EngineCore {
 public:
  /// `drafts`: draws the drafts of a step, if CoreOptions::scheduler says that a model does.
  EngineCore(const CoreOptions& options, std::unique_ptr<ModelRunner> runner, std::unique_ptr<DraftModel> drafts = nullptr);
  ~EngineCore();

  /// `wake` is called from another thread when a token rule has worked out what a sequence waits for. Before the first step.
  void on_rule_news(std::function<void()> wake) { rule_news_ = std::move(wake); }
  void add(RequestId id, ResolvedRequest request, EventSink sink);
  void cancel(RequestId id);
  void stop(RequestId id, std::string stop_string);
  /// Plans a step unless one is in flight, waits for it, emits its tokens or leaves them to be sent by the next call of any of these. False
  /// if there was nothing to do. A failing step ends its requests with kError and leaves the others for the next one.
  bool step();
  /// Waits for the step in flight, and sends all that is left to be sent; for a caller that makes no step soon.
  void deliver();
  /// Error as ModelRunner::set_weights, or {kCorrupt} if the model then gives no numbers on the probe prompt, with nothing changed.
  WeightProof update_weights(nn::WeightsPtr weights);
  /// After deliver() they may be changed.
  TenantSet& tenants() noexcept { return tenants_; }
  ModelRunner& runner() noexcept { return *runner_; }
  void abort_all(wire::FinishReason reason, const std::string& error);

  /// True if the last step() had nothing to do but to wait for token rules.
  bool waits_for_rules() const noexcept { return waits_for_rules_; }
  /// True if there is nothing to compute; requests of paused tenants may be there.
  bool is_idle() const noexcept { return !scheduler_.has_work() && steps_.size() == 0; }
  EngineStats stats() const;
  Scheduler& scheduler() noexcept { return scheduler_; }
  /// Blocks that go to other engines and come from them; nullptr without host memory for blocks.
  KvKeys* kv() noexcept { return kv_.get(); }
  /// Requests that ended since the last call.
  std::vector<RequestId> take_ended();

 private:
  /// Tokens that a step drew and the sequence has accepted, whose event has not been sent yet.
  struct News {
    CoreRequest* request = nullptr;
    StepOutput::Row* output = nullptr;
    std::int64_t num_tokens = 0;  ///< the first ones of `output`
    wire::FinishReason reason = wire::FinishReason::kNone;
  };
  /// False while the sequence's token rule is still at work on what may come next.
  bool may_draw(Sequence& sequence);
  /// Ends the requests whose token rule has given up.
  void end_failed_rules();
  /// Waits for the oldest step and has its sequences accept what it found.
  void settle();
  /// True if the event must be sent before the next step.
  bool accept(const PlanRow& row, StepOutput::Row& output);
  /// Sends the news. Destroys nothing.
  void send_news();
  /// Sends the request's event, which begin_event and the caller have filled in. Unless `reason` is kNone it is the final one.
  void send(CoreRequest& request, wire::FinishReason reason);
  /// The final event of a request without a new token.
  void end(CoreRequest& request, wire::FinishReason reason, const std::string& error);
  void fail_step(const StepPlan& plan, const std::string& error);
  /// Destroys requests that have ended and that no step in flight names; not while plan rows are walked.
  void drop_ended();

  std::shared_ptr<AdapterSet> adapters_;
  std::unique_ptr<DiskBlocks> disk_;  ///< nullptr: none
  std::unique_ptr<HostBlocks> host_;  ///< nullptr: none
  BlockPool pool_;
  Scheduler scheduler_;
  TenantSet tenants_;
  std::unique_ptr<ModelRunner> runner_;
  std::unique_ptr<DraftModel> drafts_;  ///< nullptr: none, or they are looked up
  std::unique_ptr<KvKeys> kv_;          ///< nullptr: none
  StepsUnderWay steps_;
  std::optional<std::chrono::steady_clock::time_point>
      last_settled_;  ///< when the step before ended; none if there was nothing to do since
  std::vector<News> news_;
  std::unordered_map<RequestId, std::unique_ptr<CoreRequest>> requests_;
  std::vector<std::unique_ptr<CoreRequest>> leaving_;  ///< ended, and perhaps named by a step in flight
  std::vector<RequestId> ended_;                       ///< since take_ended()
  std::size_t num_dropped_ = 0;                        ///< of ended_
  std::uint64_t num_arrivals_ = 0;
  PolicyVersion version_;
  EngineStats counters_;
  int num_failures_in_a_row_ = 0;
  std::function<void()> rule_news_;
  std::int64_t num_ruled_ = 0;  ///< requests with a slow token rule
  bool waits_for_rules_ = false, has_failed_rule_ = false;
};

}  // namespace prl::engine
