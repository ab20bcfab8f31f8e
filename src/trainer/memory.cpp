#include "trainer/memory.hpp"

#include "nn/tensor_table.hpp"

namespace prl::trainer {

TrainingBytes training_bytes(const nn::ModelConfig& model, const PolicyOptions& policy, const GradientStepOptions& step) {
  const nn::TensorTablePtr table = trained_tensors(policy, model);
  const OptimizerMemory& optimizer = step.optimizer_memory;
  const std::size_t state = state_bytes_of(step.optim, optimizer.dtype, *table);
  const bool is_in_host = optimizer.host != nullptr;
  TrainingBytes bytes;
  bytes.masters = sizeof(float) * static_cast<std::size_t>(table->num_trainable());
  // Beside the gradient of a row there is the sum of those before it.
  bytes.gradients = step.reduce == Reduce::kExact ? 2 * bytes.masters : bytes.masters;
  const std::int64_t num_packed = model.num_parameters() + (policy.lora ? table->num_trainable() : 0);
  bytes.weights = static_cast<std::size_t>(num_packed) * size_of(policy.compute);
  bytes.optimizer = is_in_host ? visit_bytes_of(step.optim, optimizer, *table) : state;
  bytes.host_optimizer = is_in_host ? state : 0;
  return bytes;
}

}  // namespace prl::trainer
