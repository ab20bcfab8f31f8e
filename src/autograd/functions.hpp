#pragma once

#include <optional>

#include "autograd/tape.hpp"
#include "ops/linear.hpp"
#include "ops/lora.hpp"
#include "ops/pointwise.hpp"

namespace prl::autograd {

// One function per differentiable op: it allocates its output in the frame's arena, runs the op, and records the backward rule if the frame
// has a tape. Parameters' gradients (fp32, accumulated unless stated otherwise) are views of the caller; data == nullptr skips a gradient.
// Views and weights must outlive the tape. A defined `out` is written instead of freshly allocated memory.
// Legend: T tokens, H hidden, V vocabulary, F MLP width.

/// Adapters that a product adds, each to its rows, with the gradients of the first group's, whose rows are then all rows.
struct LoraParameter {
  std::vector<ops::LoraRows> groups;
  std::optional<ops::LoraIndex> index = {};  ///< in place of groups, without gradients
  TensorView da = {};                        ///< data == nullptr: no gradients
  std::vector<TensorView> db = {};           ///< per part
  bool accumulate = true;
  ops::DropoutMask dropout = {};  ///< of what A reads
};

/// A matrix with its gradients. db.data == nullptr where there is no bias. Unless `accumulate`, dw is overwritten.
struct LinearParameter {
  const ops::LinearWeight* weight = nullptr;
  TensorView dw, db;
  bool accumulate = true;
  const ops::LinearWeight* next = nullptr;  ///< weight of the product after this one, if known: a prefetch hint
  std::shared_ptr<const LoraParameter> lora = {};
};
/// A norm's weight (fp32) with its gradient; dweight.data == nullptr drops it.
struct NormParameter {
  ConstTensorView weight;
  TensorView dweight;
  float eps = 1e-6f;
};

/// A vector or small matrix (fp32) with its gradient; grad.data == nullptr drops it.
struct VectorParameter {
  ConstTensorView value;
  TensorView grad;
};

/// Rows ids_T of table_VH, times `scale`: fp32 products, rounded once.
Var embedding(Frame& frame, ConstTensorView table_VH, TensorView dtable_VH, const ops::TokenIds& ids, float scale = 1.0f);

/// x W^T + b, and what adapters add. When a block is recomputed, `is_block_output` skips the product: nothing reads it.
Var linear(Frame& frame, const Var& x_TK, const LinearParameter& p, TensorView out = {}, bool is_block_output = false);

Var rms_norm(Frame& frame, const Var& x_TH, const NormParameter& p, TensorView out = {});
/// [norm(a), norm(b)] [T, 2H]. Neither input gets a gradient: they are leaves.
Var normed_pair(Frame& frame, ConstTensorView a_TH, const NormParameter& of_a, ConstTensorView b_TH, const NormParameter& of_b);
/// Projections qkv [T, Q + 2K] with rms_norm of the columns of q, all heads at once, and of those of k. Without a tape in place. `qkv_TE`
/// is read by the backward pass, and has no other reader.
Var norm_projections(Frame& frame, const Var& qkv_TE, const NormParameter& q, const NormParameter& k);
/// Where the gradient of a norm's weight is written: `p.dweight`, or scratch memory.
TensorView norm_weight_target(Tape& tape, const NormParameter& p);
/// Gradients of a norm's weight, as a tree over blocks of tokens, and of its input.
void norm_backward(ops::OpContext& ctx, Tape& tape, const NormParameter& p, const Tape::Target& dx, ConstTensorView dy, ConstTensorView x);
/// Gradients of a matrix and its bias, as a tree over blocks of tokens.
void weight_backward(ops::OpContext& ctx, Tape& tape, const LinearParameter& p, ConstTensorView dy, ConstTensorView x);

/// sum = residual + delta and its norm in one pass over memory. Both inputs alias the gradient of `sum`. A recomputing frame recomputes the
/// norm and saves the sum.
struct NormedSum {
  Var normed, sum;
};
NormedSum add_rms_norm(Frame& frame, const Var& delta_TH, const Var& residual_TH, const NormParameter& p, TensorView sum_out = {});

/// a + b; both inputs alias the gradient. `is_block_output` as in linear().
Var add(Frame& frame, const Var& a, const Var& b, TensorView out = {}, bool is_block_output = true);

/// silu(gate) * up of [T, 2F].
Var swiglu(Frame& frame, const Var& gate_up_T2F);
/// gelu(gate) * up of [T, 2F]: ops::geglu.
Var geglu(Frame& frame, const Var& gate_up_T2F);
/// max(x, 0)^2.
Var squared_relu(Frame& frame, const Var& x_TF);

}  // namespace prl::autograd
