#pragma once

#include <concepts>
#include <span>

#include "ops/context.hpp"

namespace prl::ops {

// Legend: T tokens, H hidden, V vocabulary, F MLP width, D head dim, R rows (product of leading dims), C columns.
// Activations are kF32 or kBF16 (both sides alike); arithmetic is fp32, rounded once when stored. All are batch-invariant:
// a row depends on its own row and the weights. Gradients of parameters are fp32 and accumulate (+=), in a fixed order.

/// Ids of tokens, of which some may still lie where begin_sample() leaves them.
struct TokenIds {
  ConstTensorView ids_T;    ///< int32, in [0, V), or -1 - i for drawn_B[i]
  ConstTensorView drawn_B;  ///< int32, in [0, V); data == nullptr for none
  /// Of ids that are all known.
  template <std::convertible_to<ConstTensorView> Ids>
  TokenIds(const Ids& ids) : ids_T(ids) {}
  TokenIds(ConstTensorView ids, ConstTensorView drawn) : ids_T(ids), drawn_B(drawn) {}
};
/// out_TH[t] = table_VH[id of t]; ids are checked: a GPU reports a bad one at the next call that waits for it, and leaves zeros until
/// then. table and out share a dtype.
void embedding(OpContext& ctx, TensorView out_TH, ConstTensorView table_VH, const TokenIds& ids);
/// to_SC[slot_T[t]] = rows_TC[t]; slot_T int32 in [-1, S) on the device, each once; -1, and on a GPU any other, skips the row. One dtype.
void store_rows(OpContext& ctx, TensorView to_SC, ConstTensorView rows_TC, ConstTensorView slot_T);
/// dtable_VH (fp32) += rows of dout_TH at ids_T, in token order.
void embedding_backward(OpContext& ctx, TensorView dtable_VH, ConstTensorView dout_TH, ConstTensorView ids_T);

/// y_RC = x_RC / sqrt(mean(x^2) + eps) * w_C; w fp32. Rows may be strided (QK-norm over [T*heads, D] slices); y may be x.
void rms_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, float eps);
/// sum_RC = x + residual (rounded to the dtype), y = rms_norm(sum). Equal bit for bit to add followed by rms_norm.
void add_rms_norm(OpContext& ctx, TensorView y_RC, TensorView sum_RC, ConstTensorView x_RC, ConstTensorView residual_RC,
                  ConstTensorView w_C, float eps);
/// dx_RC = gradient (or += if accumulate); dw_C (fp32) += gradient of w.
void rms_norm_backward(OpContext& ctx, TensorView dx_RC, TensorView dw_C, ConstTensorView dy_RC, ConstTensorView x_RC, ConstTensorView w_C,
                       float eps, bool accumulate);

/// rms_norm of every head of [T, heads, D], tokens *_token_stride elements apart (0: dense); w_D fp32. In place allowed.
void head_norm(OpContext& ctx, TensorView y_THD, std::int64_t y_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride,
               ConstTensorView w_D, float eps);
/// dx overwritten, dw_D (fp32) +=.
void head_norm_backward(OpContext& ctx, TensorView dx_THD, std::int64_t dx_token_stride, TensorView dw_D, ConstTensorView dy_THD,
                        std::int64_t dy_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride, ConstTensorView w_D, float eps);

/// out = a + b, element by element; out may alias a or b.
void add(OpContext& ctx, TensorView out, ConstTensorView a, ConstTensorView b);

/// out_TF = silu(gate) * up with gate = gate_up[:, :F], up = gate_up[:, F:].
void swiglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F);
void swiglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F);

/// out_TF = gelu(gate) * up, halves as in swiglu, with the tanh form of GELU (Hendrycks and Gimpel 2016): x / 2 (1 + tanh(sqrt(2 / pi)
/// (x + 0.044715 x^3))). Formed as x times the sigmoid of twice that argument, which is the same number.
void geglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F);
void geglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F);

/// out_TF = max(x, 0)^2 (Nemotron-H), times the row's factor (fp32), before which it is rounded as if it were stored first; factors_T
/// without data: without them.
void squared_relu(OpContext& ctx, TensorView out_TF, ConstTensorView x_TF, ConstTensorView factors_T);
/// Gradients of x and of the factors (fp32; no data where there are none), whose sums over F have one order that depends on F alone. dx may
/// be dout, not x.
void squared_relu_backward(OpContext& ctx, TensorView dx_TF, TensorView dfactors_T, ConstTensorView dout_TF, ConstTensorView x_TF,
                           ConstTensorView factors_T);

/// Rotary table: cos and sin of position * inverse frequency, fp32, [max_position, R/2] each, made once per model; R <= D elements of a
/// head are rotated, its first ones.
struct RopeTable {
  Tensor cos_PR2;
  Tensor sin_PR2;
  std::int64_t num_pairs() const noexcept { return cos_PR2.shape()[1]; }  ///< R / 2
};
/// Rotates x_THD [T, heads, D] in place (rows of one token may be strided: row_stride counts from head row to head row only
/// if contiguous; pass token_stride elements between tokens). Pairs are (i, i + R/2), the order of the Llama checkpoints.
/// `inverse` rotates back (the backward pass). positions_T int32 in [0, max_position). Source: Su et al. 2021, RoFormer.
void rope(OpContext& ctx, TensorView x_THD, std::int64_t token_stride, ConstTensorView positions_T, const RopeTable& table, bool inverse);

/// What stands between the projections of an attention layer and its scores. Legend: Q = Hq * D, K = Hkv * D.
struct HeadInputs {
  ConstTensorView qkv_TE;  ///< [T, Q + 2K]: heads of q, of k, of v; rows may be strided
  std::int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  ConstTensorView q_norm_D, k_norm_D;  ///< fp32; both, or none (data == nullptr)
  float eps = 1e-6f;
  ConstTensorView positions_T;
  const RopeTable* rope = nullptr;
};
/// qk_TE [T, Q + K] = rope(head_norm(q and k heads)); equal bit for bit to head_norm followed by rope. Norms are wanted.
void norm_rope(OpContext& ctx, TensorView qk_TE, const HeadInputs& in);
/// Its gradient: dqkv's columns of q and k (those of v stay as they are), dw (fp32) +=. dqk_TE may be overwritten.
void norm_rope_backward(OpContext& ctx, TensorView dqkv_TE, TensorView dq_norm_D, TensorView dk_norm_D, TensorView dqk_TE,
                        const HeadInputs& in);

/// out = x converted to out.dtype.
void cast(OpContext& ctx, TensorView out, ConstTensorView x);

/// Sum of squares of all elements of the tensors (fp32, contiguous): fixed chunks of 4,096 elements, whose sums are added in fp64 in
/// an order that depends on the sizes alone. Waits for the device once.
double sum_squares(OpContext& ctx, std::span<const ConstTensorView> xs);
inline double sum_squares(OpContext& ctx, ConstTensorView x) { return sum_squares(ctx, std::span(&x, 1)); }
/// Elements of a chunk of chunk_squares.
inline constexpr std::int64_t kSquaresChunk = 4096;
/// out_C (host) = sums of squares of elements [c, c + 1) * kSquaresChunk of each tensor (fp32, contiguous), whose last chunk may be
/// shorter, those of one tensor after those of another. A chunk's sum depends on its elements alone. Waits for the device once.
void chunk_squares(OpContext& ctx, std::span<float> out_C, std::span<const ConstTensorView> xs);
/// Index of the first element of x (F32 or BF16, contiguous) that is NaN or infinite; -1 if there is none. Waits for the device.
std::int64_t find_not_finite(OpContext& ctx, ConstTensorView x);
/// x *= factor, fp32.
void scale(OpContext& ctx, TensorView x, float factor);

}  // namespace prl::ops
