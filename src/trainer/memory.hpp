#pragma once

#include <cstddef>

#include "nn/model_config.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"

namespace prl::trainer {

/// Bytes that a model in training takes, but for activations (nn::activation_bytes): from sizes alone, before anything is made.
struct TrainingBytes {
  std::size_t masters = 0, gradients = 0, weights = 0;  ///< weights: one packed version in the compute dtype
  std::size_t optimizer = 0;                            ///< on the device; with state in host memory, what one visit of it needs there
  std::size_t widened = 0;                              ///< values that a backward pass makes of weights that are codes alone
  std::size_t host_optimizer = 0, host_masters = 0;     ///< what lies in host memory instead
};
TrainingBytes training_bytes(const nn::ModelConfig& model, const PolicyOptions& policy, const GradientStepOptions& step);

}  // namespace prl::trainer
