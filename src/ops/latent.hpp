#pragma once

#include "ops/attention.hpp"
#include "ops/linear.hpp"

namespace prl::ops {

/// Sizes of the heads of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434). N, V and D are multiples of 8, R one of 16, D is
/// at least N + R and at least V.
struct LatentHeads {
  std::int64_t num_heads = 0;        ///< H
  std::int64_t head_dim = 0;         ///< D: of the heads that attention computes with, padded by zeros
  std::int64_t plain_dim = 0;        ///< N: elements of a query or key that are not rotated
  std::int64_t rotary_dim = 0;       ///< R: of those that are; keys have the same ones in all heads
  std::int64_t value_dim = 0;        ///< V
  bool are_pairs_neighbours = true;  ///< elements 2i and 2i + 1 of R are rotated together; else i and R / 2 + i
};

/// Lays out heads as attention wants them, the rotated elements first and pairs R / 2 apart; nothing is rotated here.
///
/// Shapes    qkv_TE [T, 3 H D]: heads of queries and of keys: R, N, zeros; then those of values: V, zeros.
///           q_TQ [T, H (N + R)]: of each head N, then R. up_TU [T, H (N + V)]: of each head N of its key, then V. rotary_TR [T, R]: of all
///           keys. kF32 or kBF16, all alike; rows may be strided.
void latent_heads(OpContext& ctx, TensorView qkv_TE, ConstTensorView q_TQ, ConstTensorView up_TU, ConstTensorView rotary_TR,
                  const LatentHeads& heads);
/// The gradients, overwritten: that of rotary_TR is the sum over heads in order, in fp32, rounded once. Those without data are not wanted.
void latent_heads_backward(OpContext& ctx, TensorView dq_TQ, TensorView dup_TU, TensorView drotary_TR, ConstTensorView dqkv_TE,
                           const LatentHeads& heads);
/// y_TV [T, H V]: the first V elements of each head of x_TQ [T, H D].
void narrow_heads(OpContext& ctx, TensorView y_TV, ConstTensorView x_TQ, const LatentHeads& heads);
/// dx_TQ [T, H D]: each head's V of dy_TV [T, H V], and zeros.
void narrow_heads_backward(OpContext& ctx, TensorView dx_TQ, ConstTensorView dy_TV, const LatentHeads& heads);

// Attention to the latents themselves: all heads share one key, R rotated elements and the L of a latent, and these L are its value. The
// rows of `up` [H (N + V), L] that would form a head's keys of latents are applied to its queries instead, and those that would form its
// values to what attention gives (section 2.1.2 of the paper). The sums of heads in another order: the same up to rounding.

/// out_TE [T, H (R + L)]: of each query its R, rotated, then its N times the head's first N rows of `up`, with fp32 sums rounded once.
/// key_TK [T, R + L]: rotary_TR, rotated, and latent_TL. Shapes of the others as in latent_heads(). A row depends on its inputs alone. `up`
/// is of 16 or 32 bits, without bias. L is a multiple of 16.
void latent_queries(OpContext& ctx, TensorView out_TE, TensorView key_TK, ConstTensorView q_TQ, ConstTensorView latent_TL,
                    ConstTensorView rotary_TR, const LinearWeight& up, const LatentHeads& heads, const RopeTable& rope,
                    ConstTensorView positions_T);
/// The same with keys into the cache, at slots in device memory: slot_T [T] int32, -1 skips the token's key. With can_decode_by_index().
void latent_queries_to_cache(OpContext& ctx, TensorView out_TE, const KvLayer& layer, ConstTensorView slot_T, ConstTensorView q_TQ,
                             ConstTensorView latent_TL, ConstTensorView rotary_TR, const LinearWeight& up, const LatentHeads& heads,
                             const RopeTable& rope, ConstTensorView positions_T);
/// y_TV [T, H V]: of each head its L of x_TL [T, H L] times the head's last V rows of `up`, transposed.
void latent_values(OpContext& ctx, TensorView y_TV, ConstTensorView x_TL, const LinearWeight& up, const LatentHeads& heads);

}  // namespace prl::ops
