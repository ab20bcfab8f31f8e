#pragma once

#include <cstdint>

#include "ops/attention.hpp"
#include "ops/context.hpp"
#include "ops/pointwise.hpp"

namespace prl::ops {

// What a vision tower needs beside the decoder's ops. Activations are kF32 or kBF16 (both sides alike); arithmetic is fp32, rounded once
// when stored. A row depends on its own row and the weights, in attention_full on those of its image. Forward only: towers are not trained.

/// y_RC = (x_RC - mean(x)) / sqrt(mean((x - mean)^2) + eps) * w_C + b_C, the means over a row; w and b fp32. y may be x.
void layer_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, ConstTensorView b_C, float eps);

/// The two forms of GELU (Hendrycks and Gimpel 2016): x / 2 (1 + erf(x / sqrt(2))), and the one of geglu().
enum class GeluForm : std::uint8_t { kErf, kTanh };
/// out_RC = gelu(x_RC); out may be x.
void gelu(OpContext& ctx, TensorView out_RC, ConstTensorView x_RC, GeluForm form);

/// Softmax attention of each token to all tokens of its sequence, without a mask.
///
/// Shapes    as of attention_varlen, without lse. `args` has neither window nor sinks.
/// Numerics  as of attention_varlen: tiles and chunks of keys at fixed positions of the sequence, merged in their order.
void attention_full(OpContext& ctx, TensorView out_THD, const VarlenAttention& args);

/// Which of three axes (time, height, width) the pairs of a head's elements turn with: pair i with the height if i % 3 == 1 and i is
/// below 3 * height, with the width if i % 3 == 2 and i is below 3 * width, else with time (interleaved M-RoPE, Qwen3-VL).
struct RopeSections {
  std::int64_t height = 0, width = 0;
  bool operator==(const RopeSections&) const = default;
};
/// Row t of `out` (fp32 [T, R/2] each) = for each pair its entry in the row of `table` that its axis has: positions_3T (int32 [3, T], in
/// [0, max_position)). A copy, so that a token with three like positions has the bits of the table's row.
void gather_rope_rows(OpContext& ctx, TensorView cos_TR2, TensorView sin_TR2, const RopeTable& table, ConstTensorView positions_3T,
                      RopeSections sections);

}  // namespace prl::ops
