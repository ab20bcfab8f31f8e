#pragma once

#include "ops/attention.hpp"
#include "ops/linear.hpp"
#include "ops/lora.hpp"

namespace prl::ops {

// Fused ops: adjacent ops in one pass over memory. Each equals the separate ops bit for bit, and returns false and does nothing if the
// device has no such kernel for these sizes.

/// What is fused before and after a product.
struct LinearFusion {
  ConstTensorView norm_K;  ///< x is rms_norm(x, norm_K, eps) first; data == nullptr for none
  float eps = 1e-6f;
  ConstTensorView residual_TN;  ///< y is add(residual, linear(x)); data == nullptr for none
  bool swiglu = false;          ///< y [T, N / 2] is swiglu(linear(x)); not with a residual
  /// linear(x) is linear_lora(x): its adapters are added before anything after the product. Null for none.
  const LoraIndex* lora = nullptr;
};
/// `linear` with the ops of `fusion`. `y_TN` may be the residual.
bool linear_fused(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LinearFusion& fusion);

/// norm_rope_to_cache and attention_decode of an index without has_next_tokens; q of a token without a slot sees its own key all the same.
/// In recorded work at least `embedding` stands between plan_decode and this.
bool attention_decode_fused(OpContext& ctx, TensorView out_BHD, const HeadInputs& in, const KvLayer& layer, const DecodeIndex& index,
                            ConstTensorView plan, float scale, std::int64_t window = 0, ConstTensorView sinks_H = {});

}  // namespace prl::ops
