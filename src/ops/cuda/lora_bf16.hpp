#pragma once

#include <span>

#include "ops/lora.hpp"

// Low-rank adapters in bf16 beside bf16 activations, by matrix instructions (compute capability 8.0). A x is summed over inputs in order,
// 16 at a time, as products are (few_rows.hpp); sums over ranks run in order, 16 at a time. Neither depends on anything but the adapter's
// shapes, so that training, prefill and decode, whatever kernel they take, give a row the same bits.

namespace prl::ops::cuda {

/// Whether these kernels compute `w` beside activations of `dtype`: a rule of the adapter alone.
bool is_bf16_lora(const OpContext& ctx, const LoraWeight& w, DType dtype);

/// y += scale * B (A x) for rows of adapters that are all is_bf16_lora().
void add_bf16_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, std::span<const LoraRows> groups);
/// lora_backward for such an adapter.
void bf16_lora_backward(OpContext& ctx, TensorView dx_TK, TensorView da_RK, std::span<const TensorView> db, ConstTensorView dy_TN,
                        ConstTensorView x_TK, const LoraWeight& w, bool accumulate_dx, bool accumulate);

}  // namespace prl::ops::cuda
