#pragma once

#include "autograd/attention.hpp"
#include "ops/latent.hpp"

namespace prl::autograd {

/// Parameters of a layer of multi-head latent attention (ops/latent.hpp) but for its matrices. Legend: T tokens, H heads, D, N, R and V as
/// in ops::LatentHeads, Lq and Lkv the sizes of latents. What the first product gives, `down`, is [T, Lq + Lkv + R], or [T, H (N + R) + Lkv
/// + R] where queries have no latent.
struct LatentParameter {
  ops::LatentHeads heads;
  NormParameter q_norm;  ///< no weight: queries have no latent
  NormParameter kv_norm;
  std::int64_t query_width() const noexcept { return heads.num_heads * (heads.plain_dim + heads.rotary_dim); }
};

/// Normed latents: q [T, Lq], undefined where queries have none, and kv [T, Lkv].
struct Latents {
  Var q, kv;
};
/// `down` has this and latent_heads() as its readers.
Latents norm_latents(Frame& frame, const Var& down, const LatentParameter& p);
/// Projections qkv [T, 3 H D] for self_attention(), whose heads have norms no more, from products of the latents: q [T, H (N + R)],
/// undefined where `down` has the queries, and up [T, H (N + V)].
Var latent_heads(Frame& frame, const Var& down, const Var& q, const Var& up, const LatentParameter& p);
/// Attention to latents (ops/latent.hpp) in place of latent_heads(), self_attention() and narrow_heads(): [T, H V] from the latents and,
/// where they have some, the queries that came of them. `up` is the matrix that forms keys and values, which are not formed here: the
/// product is what its gradient says. Packed, paged and decoded rows agree bit for bit. The backward pass forms heads anew and is theirs;
/// rows that ranks share have none. `down` as in norm_latents().
Var latent_attention(Frame& frame, const Var& down, const Latents& latents, const Var& q, const LinearParameter& up,
                     const LatentParameter& p, const AttentionParameter& attention, const AttentionIndex& index);
/// What attention gives, [T, H D], without what pads its heads: [T, H V]; itself where nothing does.
Var narrow_heads(Frame& frame, const Var& attended, const LatentParameter& p);

}  // namespace prl::autograd
