#pragma once

#include "ops/attention.hpp"
#include "ops/linear.hpp"

namespace prl::ops {

// Ops that stand side by side, in one pass over memory. Each is equal bit for bit to the ops one after another, and returns false, with
// nothing done, where the device has no such pass for these sizes.

/// What goes before and after a product.
struct LinearFusion {
  ConstTensorView norm_K;  ///< x is rms_norm(x, norm_K, eps) first; data == nullptr for none
  float eps = 1e-6f;
  ConstTensorView residual_TN;  ///< y is add(residual, linear(x)); data == nullptr for none
  bool swiglu = false;          ///< y [T, N / 2] is swiglu(linear(x)); not with a residual
};
/// `linear` with its neighbours. `y_TN` may be the residual.
bool linear_fused(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LinearFusion& fusion);

/// norm_rope_to_cache and attention_decode; q of a token without a slot sees its own key all the same. In recorded work at least
/// `embedding` stands between plan_decode and this.
bool attention_decode_fused(OpContext& ctx, TensorView out_BHD, const HeadInputs& in, const KvLayer& layer, const DecodeIndex& index,
                            ConstTensorView plan, float scale);

}  // namespace prl::ops
