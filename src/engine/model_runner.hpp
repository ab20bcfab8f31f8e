#pragma once

#include <functional>

#include "engine/engine.hpp"
#include "engine/step_plan.hpp"

namespace prl::engine {

/// Carries out step plans. It sees tokens and block tables, never queues or clients. One thread.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  /// Computes every row and draws a token for those that are sampled. output.rows is grown to plan.rows.size() if it is
  /// smaller, and its buffers are reused. A row that fails alone gets an error text; an exception fails the whole step.
  /// `meanwhile` is called at most once, while the device computes and the host has nothing else to do.
  virtual void run(const StepPlan& plan, StepOutput& output, const std::function<void()>& meanwhile) = 0;
  /// Whether the device computes beside the host, so that run() calls `meanwhile` once rows are sampled.
  virtual bool works_beside_host() const { return false; }
  /// From the next run() on. Error{kInvalidArgument} if the weights do not fit the model the runner was made for; the old
  /// ones then stay.
  virtual void set_weights(nn::WeightsPtr weights) = 0;
  virtual nn::WeightsPtr weights() const = 0;
  /// Computed anew from the weights in use at each call.
  virtual WeightProof prove() = 0;
};

}  // namespace prl::engine
