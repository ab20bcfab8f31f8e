#pragma once

#include "engine/engine.hpp"
#include "engine/kv/block_memory.hpp"
#include "engine/kv/disk_blocks.hpp"
#include "engine/step_plan.hpp"
#include "nn/peft.hpp"

namespace prl::engine {

/// Executes step plans, in the order in which they are begun. It sees tokens and block tables, never queues or clients. One thread.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  /// Computes every row and draws a token for those that are sampled. `plan`, its sequences and `output` must live until finish(). On
  /// asynchronous devices it returns when the work is enqueued, and a second step may be begun before the first is finished.
  /// An exception means that the step was not begun.
  virtual void begin(const StepPlan& plan, StepOutput& output) = 0;
  /// Waits for the oldest step that was begun, which is over then even if it failed. output.rows is grown to plan.rows.size() if it is
  /// smaller, and its buffers are reused. A row that fails alone gets an error text; an exception fails the whole step. What it says of
  /// sequences that have ended meanwhile is ignored.
  virtual void finish(const StepPlan& plan, StepOutput& output) = 0;
  /// True on asynchronous devices.
  virtual bool works_beside_host() const { return false; }
  /// From the next begin() on; no step may be in flight. Error{kInvalidArgument} if the weights do not fit the model the runner was made
  /// for; the old ones then stay.
  virtual void set_weights(nn::WeightsPtr weights) = 0;
  virtual nn::WeightsPtr weights() const = 0;
  /// Which kernels compute, in words (ops::kernels_of).
  virtual std::string kernels() const { return "scripted"; }
  /// Computed afresh from the weights in use at each call.
  virtual WeightProof prove() = 0;

  /// Which experts the tokens in slots [begin, end) of these blocks had (EngineOptions::logs_routes); start is `begin`. Waits for what is
  /// in flight.
  virtual wire::RoutedExperts routes_of(std::span<const BlockLease> blocks, std::int64_t begin, std::int64_t end);

  /// Files for blocks of host memory, if the runner was made with them. They live as long as it.
  virtual BlockFiles* block_files() { return nullptr; }
  /// Blocks of host memory, if the runner was made with them. They live as long as it.
  virtual BlockMemory* block_memory() { return nullptr; }

  // Runners without adapters leave these as they are.
  /// An adapter ready to compute with on the runner's device. Error{kOutOfMemory}.
  virtual nn::AdapterPtr make_adapter(const nn::StoredAdapter& stored);
  /// prove() of the weights in use with another adapter than theirs.
  virtual WeightProof prove_with(const nn::AdapterPtr& adapter);
};

}  // namespace prl::engine
