#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "config/optim_config.hpp"
#include "device/host_link.hpp"
#include "io/tensor_file.hpp"
#include "nn/parameters.hpp"
#include "ops/context.hpp"
#include "trainer/shard_plan.hpp"
#include "trainer/state_files.hpp"

namespace prl::trainer {

/// Peak learning rate and clipping norm, which every optimizer has.
double base_lr(const config::OptimConfig& optim);
std::optional<double> max_grad_norm(const config::OptimConfig& optim);

class HostState;

/// Where an optimizer keeps its state, and in what.
struct OptimizerMemory {
  DType dtype = DType::kF32;            ///< kBF16: AdamW's moments are rounded stochastically after each step; see ops::adamw
  std::shared_ptr<HostLink> host = {};  ///< the state lives there and visits the device in pieces; nullptr: it stays on the device
  /// Of element-wise optimizers; Muon's matrices are never cut. The step's bits do not depend on it.
  std::int64_t piece_elements = std::int64_t{1} << 24;
  bool holds_masters = false;  ///< masters live in host memory too (PolicyOptions::masters_host) and visit with the state; not for Muon
};
/// Bytes of state for the trainable tensors, and of the buffers that it visits the device in (0 unless it lives in host memory).
std::size_t state_bytes_of(const config::OptimConfig& optim, DType dtype, const nn::TensorTable& table);
std::size_t visit_bytes_of(const config::OptimConfig& optim, const OptimizerMemory& memory, const nn::TensorTable& table);

/// Steps all parameters of a model and holds the optimizer's state.
///
/// Weight decay applies to every parameter that is not frozen, norms and biases too. Muon takes matrices other than embeddings and head;
/// the rest of its parameters take AdamW with the same rate and decay.
class Optimizer {
 public:
  /// `parameters` and `ctx` are borrowed and must outlive this; gradients must exist (ensure_grads). Error{kInvalidArgument} for state
  /// in bf16 of an optimizer other than AdamW and SignSGD.
  Optimizer(ops::OpContext& ctx, nn::Parameters& parameters, const config::OptimConfig& optim, OptimizerMemory memory = {})
      : Optimizer(ctx, parameters, optim, std::move(memory), ElementRange{0, parameters.table()->num_master_elements()}) {}
  /// Steps and keeps the state of the elements `own` alone, those of a rank of a ShardPlan (which keeps_whole_blocks(optim)), all of which
  /// `parameters` hold.
  Optimizer(ops::OpContext& ctx, nn::Parameters& parameters, const config::OptimConfig& optim, OptimizerMemory memory, ElementRanges own);
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step at rate `lr`; gradients are first multiplied by `grad_scale` (clipping). Gradients stay as they are. `rounded`, if defined,
  /// receives the stepped values in its dtype, at their place among all values. `grads` [own count] are the gradients of the own
  /// elements; undefined: those of the parameters.
  void step(double lr, double grad_scale, const Tensor& rounded = {}, const Tensor& grads = {});
  std::int64_t num_steps() const noexcept { return num_steps_; }

  /// What is owned of one state of one parameter: elements `range` of all values.
  struct StatePart {
    std::string name;  ///< "<parameter>.<state>"
    ElementRange range;
    Tensor tensor;
  };
  std::vector<StatePart> state_parts() const;
  /// The state as "<parameter>.<state>" in a fixed order: the tensors themselves, or copies that a save in the background can write while
  /// training goes on. Parameters that are owned in part have vectors of that part.
  std::vector<io::NamedTensor> state() const;
  std::vector<io::NamedTensor> copy_state() const;
  /// Takes the own part of a checkpoint's state. Error{kCorrupt} names file and tensor.
  void load_state(StateFiles& files);
  /// The type's name in the configuration ("adamw", ...), and the step count of a restored state.
  std::string_view type_name() const;
  void restore_num_steps(std::int64_t num_steps) noexcept { num_steps_ = num_steps; }
  std::size_t state_bytes() const noexcept;

 private:
  struct Slot;
  struct Step;
  Tensor new_state(Shape shape) const;
  Tensor grad_part(std::int64_t begin, std::int64_t count) const;
  /// One step over `values`, elements [begin, ...) of all values; `state` is of those. Frozen elements stay, and are rounded.
  void step_elements(const Step& step, std::int64_t begin, TensorView values, std::span<const TensorView> state, const Tensor& rounded);
  void step_unfrozen(const Step& step, std::int64_t begin, TensorView values, std::span<const TensorView> state, const Tensor& rounded);
  void step_slot(const Step& step, const Slot& slot, std::span<const TensorView> state);
  void step_in_pieces(const Step& step, const Tensor& rounded);

  ops::OpContext& ctx_;
  nn::Parameters& parameters_;
  config::OptimConfig optim_;
  OptimizerMemory memory_;
  std::unique_ptr<HostState> host_;  ///< if memory_.host
  std::vector<Slot> slots_;
  std::vector<Tensor> flat_state_;  ///< of element-wise optimizers: what the slots' tensors are parts of
  ElementRanges own_;
  Tensor grads_;  ///< of the step in hand
  std::int64_t num_steps_ = 0;
};

/// Muon's matrices must not be divided among ranks.
bool keeps_whole_blocks(const config::OptimConfig& optim) noexcept;

/// L2 norm of the gradient of all ranks, of which `own_grads` are of this rank's elements of `plan`. Sums of the plan's chunks in fp64,
/// added in the order of chunks: the same bits for any number of ranks. Waits for the device.
double global_grad_norm(ops::OpContext& ctx, const Tensor& own_grads, const ShardPlan& plan, comm::Communicator& group);
/// Of one rank, whose gradients are those of the parameters.
double global_grad_norm(ops::OpContext& ctx, const nn::Parameters& parameters);
/// Share of gradient elements that are exactly zero; nullopt unless the gradients lie in host memory.
std::optional<double> zero_grad_ratio(ops::OpContext& ctx, const nn::Parameters& parameters, const Tensor& own_grads, const ShardPlan& plan,
                                      comm::Communicator& group);
/// What clip_grad_norm_ multiplies by: min(1, max_norm / (norm + 1e-6)); 1 without a maximum.
double clip_scale(double norm, std::optional<double> max_norm);

}  // namespace prl::trainer
