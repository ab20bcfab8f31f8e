#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "config/optim_config.hpp"
#include "io/tensor_file.hpp"
#include "nn/parameters.hpp"
#include "ops/context.hpp"

namespace prl::trainer {

/// Peak learning rate and clipping norm, which every optimizer has.
double base_lr(const config::OptimConfig& optim);
std::optional<double> max_grad_norm(const config::OptimConfig& optim);

/// Steps all parameters of a model and holds the optimizer's state (fp32, on the parameters' device).
///
/// Weight decay applies to every parameter, norms and biases too. Muon takes matrices other than embeddings and head; the
/// rest of its parameters take AdamW with the same rate and decay.
class Optimizer {
 public:
  /// `parameters` and `ctx` are borrowed and must outlive this; gradients must exist (ensure_grads).
  Optimizer(ops::OpContext& ctx, nn::Parameters& parameters, const config::OptimConfig& optim);
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step at rate `lr`; gradients are first multiplied by `grad_scale` (clipping). Gradients stay as they are. `rounded`, if defined,
  /// receives all_values() in its dtype.
  void step(double lr, double grad_scale, const Tensor& rounded = {});
  std::int64_t num_steps() const noexcept { return num_steps_; }

  /// The state as "<parameter>.<state>" in a fixed order: the tensors themselves, to load into, or copies that a save in the
  /// background can write while training goes on.
  std::vector<io::NamedTensor> state() const;
  std::vector<io::NamedTensor> copy_state() const;
  /// The type's name in the configuration ("adamw", ...), and the step count of a restored state.
  std::string_view type_name() const;
  void restore_num_steps(std::int64_t num_steps) noexcept { num_steps_ = num_steps; }
  std::size_t state_bytes() const noexcept;

 private:
  struct Slot;
  ops::OpContext& ctx_;
  nn::Parameters& parameters_;
  config::OptimConfig optim_;
  std::vector<Slot> slots_;
  std::vector<Tensor> flat_state_;  ///< of element-wise optimizers: what the slots' tensors are parts of
  std::int64_t num_steps_ = 0;
};

/// L2 norm over all gradients; see ops::sum_squares.
double global_grad_norm(ops::OpContext& ctx, const nn::Parameters& parameters);
/// Share of gradient elements that are exactly zero; nullopt unless the gradients lie in host memory.
std::optional<double> zero_grad_ratio(ops::OpContext& ctx, const nn::Parameters& parameters);
/// What clip_grad_norm_ multiplies by: min(1, max_norm / (norm + 1e-6)); 1 without a maximum.
double clip_scale(double norm, std::optional<double> max_norm);

}  // namespace prl::trainer
