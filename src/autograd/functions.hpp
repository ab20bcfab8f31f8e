#pragma once

#include "autograd/tape.hpp"
#include "ops/linear.hpp"
#include "ops/pointwise.hpp"

namespace prl::autograd {

// One function per differentiable op: it takes its output from the frame's arena, runs the op, and records the rule if the frame
// has a tape. Parameters' gradients (fp32, += unless it is said) are views of the caller; data == nullptr leaves a gradient out. Views and
// weights must outlive the tape. Where an `out` is asked for, a defined view is written instead of fresh memory.
// Legend: T tokens, H hidden, V vocabulary, F MLP width.

/// A matrix with its gradients. db.data == nullptr where there is no bias. Unless `accumulate`, dw is overwritten.
struct LinearParameter {
  const ops::LinearWeight* weight = nullptr;
  TensorView dw, db;
  bool accumulate = true;
  const ops::LinearWeight* next = nullptr;  ///< of the product after this one, if that is known: a hint
};
/// A norm's weight (fp32) with its gradient; dweight.data == nullptr drops it.
struct NormParameter {
  ConstTensorView weight;
  TensorView dweight;
  float eps = 1e-6f;
};

/// Rows ids_T of table_VH.
Var embedding(Frame& frame, ConstTensorView table_VH, TensorView dtable_VH, const ops::TokenIds& ids);

/// x W^T + b. In a recomputation `is_block_output` skips the product, which nothing will read.
Var linear(Frame& frame, const Var& x_TK, const LinearParameter& p, TensorView out = {}, bool is_block_output = false);

Var rms_norm(Frame& frame, const Var& x_TH, const NormParameter& p);
/// Where the gradient of a norm's weight goes: `p.dweight`, or memory that nobody reads.
TensorView norm_weight_target(Tape& tape, const NormParameter& p);

/// sum = residual + delta and its norm in one pass over memory. The gradient of `sum` is handed on to both inputs by alias. A frame that
/// remakes does so with the norm; the sum is kept.
struct NormedSum {
  Var normed, sum;
};
NormedSum add_rms_norm(Frame& frame, const Var& delta_TH, const Var& residual_TH, const NormParameter& p, TensorView sum_out = {});

/// a + b; the gradient is handed on to both by alias.
Var add(Frame& frame, const Var& a, const Var& b, TensorView out = {});

/// silu(gate) * up of [T, 2F].
Var swiglu(Frame& frame, const Var& gate_up_T2F);

}  // namespace prl::autograd
