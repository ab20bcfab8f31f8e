#pragma once

#include "engine/engine.hpp"
#include "engine/step_plan.hpp"

namespace prl::engine {

/// Carries out step plans, in the order in which they are begun. It sees tokens and block tables, never queues or clients. One thread.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  /// Has every row computed and a token drawn for those that are sampled. `plan` and `output` must live until finish(). Where the device
  /// computes beside the host, returns when the work is queued, and a second step may be begun before the first is finished.
  /// An exception means that the step was not begun.
  virtual void begin(const StepPlan& plan, StepOutput& output) = 0;
  /// Waits for the oldest step that was begun, and takes it back even if it fails. output.rows is grown to plan.rows.size() if it is
  /// smaller, and its buffers are reused. A row that fails alone gets an error text; an exception fails the whole step. Rows whose
  /// sequence is gone by now count for nothing.
  virtual void finish(const StepPlan& plan, StepOutput& output) = 0;
  virtual bool works_beside_host() const { return false; }
  /// From the next begin() on; no step is under way. Error{kInvalidArgument} if the weights do not fit the model the runner was made for;
  /// the old ones then stay.
  virtual void set_weights(nn::WeightsPtr weights) = 0;
  virtual nn::WeightsPtr weights() const = 0;
  /// Computed anew from the weights in use at each call.
  virtual WeightProof prove() = 0;
};

}  // namespace prl::engine
