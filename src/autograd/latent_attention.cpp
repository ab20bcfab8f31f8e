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

namespace {

/// What the backward pass of latent_attention() reads.
struct AttendedLatents {
  Var down, kv, q, y;
  LinearParameter up;
  LatentParameter p;
  AttentionParameter attention;
  AttentionIndex index;
  ConstTensorView queries;
  TensorView lse;
};

/// Columns [first, first + H D) of rows of heads.
TensorView heads_in(TensorView qkv, std::int64_t first, const ops::LatentHeads& h) {
  TensorView view = qkv.columns(first * h.num_heads * h.head_dim, h.num_heads * h.head_dim);
  view.shape = Shape{qkv.shape.num_rows(), h.num_heads, h.head_dim};
  view.row_stride = h.head_dim;
  return view;
}

/// Heads [T, H V] as those of D elements; themselves where they have as many.
TensorView widened_heads(ops::OpContext& ctx, Arena& arena, TensorView y, const ops::LatentHeads& h) {
  if (h.value_dim == h.head_dim) return y;
  const TensorView wide = arena.take({y.shape.num_rows(), h.num_heads * h.head_dim}, y.dtype);
  ops::narrow_heads_backward(ctx, wide, y, h);
  return wide;
}

/// The gradients of q and of the latents, by way of the heads that these would have formed.
void latents_backward(ops::OpContext& ctx, Tape& tape, const AttendedLatents& a) {
  const TensorView dy = tape.grad(a.y);
  if (dy.data == nullptr) return;
  const ops::LatentHeads& h = a.p.heads;
  const std::int64_t T = dy.shape.num_rows(), H = h.num_heads, D = h.head_dim, W = 3 * H * D;
  const auto target = [&](const Var& of) {
    if (!of.is_defined() || of.id < 0) return TensorView{};
    const Tape::Target found = tape.target(of);
    PRL_CHECK(!found.accumulate, "the projections of an attention layer have one reader");
    return found.view;
  };
  TensorView dq = target(a.q), drotary;
  if (const TensorView ddown = target(a.down); ddown.data != nullptr) {
    const DownColumns<TensorView> out(ddown, a.p);
    drotary = out.rotary;
    if (!a.q.is_defined()) dq = out.q;
  }
  const Tape::Target dkv = a.kv.id >= 0 ? tape.target(a.kv) : Tape::Target{};

  Arena& arena = tape.arena();
  const Arena::Mark mark = arena.mark();
  const TensorView up = arena.take({T, H * (h.plain_dim + h.value_dim)}, dy.dtype);
  const TensorView qkv = arena.take({T, W}, dy.dtype), dqkv = arena.take({T, W}, dy.dtype);
  const Shape heads{T, H, D};
  const auto rotate = [&](TensorView of, bool inverse) {
    TensorView both = heads_in(of, 0, h);
    both.shape = Shape{T, 2 * H, D};
    ops::rope(ctx, both, W, a.index.positions_T, *a.attention.rope, inverse);
  };
  ops::linear(ctx, up, a.kv.value, *a.up.weight);
  ops::latent_heads(ctx, qkv, a.queries, up, DownColumns<TensorView>(a.down.value, a.p).rotary, h);
  rotate(qkv, /*inverse=*/false);
  const ops::VarlenAttention args{heads_in(qkv, 0, h), heads_in(qkv, 1, h), heads_in(qkv, 2, h), W, W, W,
                                  a.index.cu_seqlens,  a.attention.scale};
  ops::attention_varlen_backward(ctx, heads_in(dqkv, 0, h), heads_in(dqkv, 1, h), heads_in(dqkv, 2, h), W, W, W,
                                 widened_heads(ctx, arena, dy, h).reshaped(heads), widened_heads(ctx, arena, a.y.value, h).reshaped(heads),
                                 a.lse, args);
  rotate(dqkv, /*inverse=*/true);
  const TensorView dup = up;
  ops::latent_heads_backward(ctx, dq, dup, drotary, dqkv, h);
  if (a.up.dw.data != nullptr) weight_backward(ctx, tape, a.up, dup, a.kv.value);
  if (dkv.view.data != nullptr) ops::linear_backward_input(ctx, dkv.view, dup, *a.up.weight, dkv.accumulate);
  arena.release(mark);
}

}  // namespace

Var latent_attention(Frame& frame, const Var& down, const Latents& latents, const Var& q, const LinearParameter& up,
                     const LatentParameter& p, const AttentionParameter& attention, const AttentionIndex& index) {
  PRL_CHECK(
      up.lora == nullptr && attention.scale > 0 && attention.window == 0 && attention.sinks_H.data == nullptr && index.exchange == nullptr,
      "attention to latents with an adapter of their matrix, windows, sinks or rows that ranks share");
  const DownColumns<TensorView> in(down.value, p);
  const ops::LatentHeads& h = p.heads;
  const std::int64_t T = down.value.shape.num_rows(), H = h.num_heads, L = up.weight->num_inputs(), E = h.rotary_dim + L;
  const DType dtype = down.value.dtype;
  const ConstTensorView queries = q.is_defined() ? q.value : in.q;
  const Var y = frame.variable(frame.keep({T, H * h.value_dim}, dtype));
  const TensorView lse = frame.tape != nullptr ? frame.keep({T, H}, DType::kF32) : TensorView{};

  const Arena::Mark mark = frame.arena.mark();
  const TensorView of_heads = frame.arena.take({T, H * E}, dtype);
  const TensorView attended = frame.arena.take({T, H * L}, dtype);
  const TensorView out = attended.reshaped({T, H, L});
  const ConstTensorView q_THD = of_heads.reshaped({T, H, E});
  const auto form = [&] {
    const TensorView key = frame.arena.take({T, E}, dtype);
    ops::latent_queries(frame.ctx, of_heads, key, queries, latents.kv.value, in.rotary, *up.weight, h, *attention.rope, index.positions_T);
    return ConstTensorView(key.reshaped({T, 1, E}));
  };
  if (index.decode != nullptr) {
    ops::latent_queries_to_cache(frame.ctx, of_heads, *index.kv_layer, index.decode->slot_B, queries, latents.kv.value, in.rotary,
                                 *up.weight, h, *attention.rope, index.positions_T);
    ops::attention_decode(frame.ctx, out, q_THD, *index.kv_layer, *index.decode, index.decode_plan, attention.scale);
  } else if (index.paged != nullptr) {
    PRL_CHECK(frame.tape == nullptr, "paged attention has no backward pass");
    const ConstTensorView k_TKD = form();
    ops::kv_write(frame.ctx, *index.kv_layer, k_TKD, E, {}, 0, index.slot_T);
    ops::PagedAttention args = *index.paged;
    args.q_THD = q_THD;
    args.layer = *index.kv_layer;
    args.scale = attention.scale;
    ops::attention_paged(frame.ctx, out, args);
  } else {
    ops::attention_varlen(frame.ctx, out, lse, {q_THD, form(), {}, H * E, E, 0, index.cu_seqlens, attention.scale});
  }
  ops::latent_values(frame.ctx, y.value, attended, *up.weight, h);
  frame.arena.release(mark);
  if (frame.tape != nullptr)
    frame.tape->record(
        [tape = frame.tape, ctx = &frame.ctx, a = AttendedLatents{down, latents.kv, q, y, up, p, attention, index, queries, lse}] {
          latents_backward(*ctx, *tape, a);
        });
  return y;
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
