#include "autograd/latent_attention.hpp"

#include "base/error.hpp"

namespace prl::autograd {
namespace {

/// Columns of what the first product gives, or of its gradient.
template <typename View>
struct DownColumns {
  View q, kv, rotary;
  DownColumns(View all, const LatentParameter& p) {
    const std::int64_t Q = p.q_norm.weight.data != nullptr ? p.q_norm.weight.shape.num_elements() : p.query_width();
    const std::int64_t L = p.kv_norm.weight.shape.num_elements(), R = p.heads.rotary_dim;
    PRL_CHECK(all.shape.num_cols() == Q + L + R, "latents of {} columns, {} wanted", all.shape.num_cols(), Q + L + R);
    q = all.columns(0, Q);
    kv = all.columns(Q, L);
    rotary = all.columns(Q + L, R);
  }
};

/// rms_norm of some columns; their gradient is written where the rule of latent_heads() has written that of the others.
Var norm_columns(Frame& frame, const Var& down, TensorView columns, TensorView DownColumns<TensorView>::*which, const NormParameter& norm,
                 const LatentParameter& p) {
  const Var y = frame.variable(frame.take(columns.shape, columns.dtype));
  frame.run([ctx = &frame.ctx, y = y.value, columns, norm] { ops::rms_norm(*ctx, y, columns, norm.weight, norm.eps); });
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, down, columns, which, y, norm, p] {
      const TensorView dy = tape->grad(y);
      if (dy.data == nullptr || down.id < 0) return;
      const DownColumns<TensorView> out(tape->target(down).view, p);
      norm_backward(*ctx, *tape, norm, {out.*which, false}, dy, columns);
    });
  }
  return y;
}

}  // namespace

Latents norm_latents(Frame& frame, const Var& down, const LatentParameter& p) {
  using Columns = DownColumns<TensorView>;
  const Columns in(down.value, p);
  Latents out;
  if (p.q_norm.weight.data != nullptr) out.q = norm_columns(frame, down, in.q, &Columns::q, p.q_norm, p);
  out.kv = norm_columns(frame, down, in.kv, &Columns::kv, p.kv_norm, p);
  return out;
}

Var latent_heads(Frame& frame, const Var& down, const Var& q, const Var& up, const LatentParameter& p) {
  const DownColumns<TensorView> in(down.value, p);
  const std::int64_t T = down.value.shape.num_rows();
  const Var qkv = frame.variable(frame.take({T, 3 * p.heads.num_heads * p.heads.head_dim}, down.value.dtype));
  const ConstTensorView queries = q.is_defined() ? q.value : in.q;
  frame.run([ctx = &frame.ctx, qkv = qkv.value, queries, up = up.value, rotary = in.rotary, heads = p.heads] {
    ops::latent_heads(*ctx, qkv, queries, up, rotary, heads);
  });
  if (frame.tape == nullptr) return qkv;
  frame.tape->record([tape = frame.tape, ctx = &frame.ctx, down, q, up, qkv, p] {
    const TensorView dqkv = tape->grad(qkv);
    if (dqkv.data == nullptr) return;
    const auto target = [&](const Var& of) {
      if (!of.is_defined() || of.id < 0) return TensorView{};
      const Tape::Target found = tape->target(of);
      PRL_CHECK(!found.accumulate, "the projections of an attention layer have one reader");
      return found.view;
    };
    TensorView dq = target(q), drotary;
    if (const TensorView ddown = target(down); ddown.data != nullptr) {
      const DownColumns<TensorView> out(ddown, p);
      drotary = out.rotary;
      if (!q.is_defined()) dq = out.q;
    }
    ops::latent_heads_backward(*ctx, dq, target(up), drotary, dqkv, p.heads);
  });
  return qkv;
}

Var narrow_heads(Frame& frame, const Var& attended, const LatentParameter& p) {
  if (p.heads.value_dim == p.heads.head_dim) return attended;
  const std::int64_t T = attended.value.shape.num_rows();
  const Var y = frame.variable(frame.take({T, p.heads.num_heads * p.heads.value_dim}, attended.value.dtype));
  frame.run([ctx = &frame.ctx, y = y.value, x = attended.value, heads = p.heads] { ops::narrow_heads(*ctx, y, x, heads); });
  if (frame.tape == nullptr) return y;
  frame.tape->record([tape = frame.tape, ctx = &frame.ctx, attended, y, heads = p.heads] {
    const TensorView dy = tape->grad(y);
    if (dy.data == nullptr || attended.id < 0) return;
    const Tape::Target target = tape->target(attended);
    PRL_CHECK(!target.accumulate, "what attention gives has one reader");
    ops::narrow_heads_backward(*ctx, target.view, dy, heads);
  });
  return y;
}

}  // namespace prl::autograd
