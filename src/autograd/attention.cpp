#include "autograd/attention.hpp"

#include <cmath>
#include <utility>
#include <vector>

#include "autograd/token_blocks.hpp"
#include "base/error.hpp"
#include "ops/fused.hpp"

namespace prl::autograd {
namespace {

/// Columns [first, first + heads * D) of a [T, width] matrix as [T, heads, D]; tokens are width elements apart.
template <typename View>
View heads_of(View matrix, std::int64_t first, std::int64_t heads, std::int64_t head_dim) {
  View view = matrix.columns(first, heads * head_dim);
  view.shape = Shape{matrix.shape.num_rows(), heads, head_dim};
  view.row_stride = head_dim;
  return view;
}

/// From the gradients of normed and rotated heads to those of the projections; `dqkv` has those of v already.
void heads_backward(ops::OpContext& ctx, Tape& tape, const AttentionParameter& p, const ops::HeadInputs& inputs, TensorView dqkv,
                    TensorView dqk, std::int64_t stride) {
  if (p.q_norm.weight.data == nullptr)
    return ops::rope(ctx, heads_of(dqk, 0, p.num_heads + p.num_kv_heads, p.head_dim), stride, inputs.positions_T, *p.rope, true);
  const TensorView outs[] = {norm_weight_target(tape, p.q_norm), norm_weight_target(tape, p.k_norm)};
  sum_over_blocks(ctx, tape.arena(), {.outs = outs}, dqkv.shape.num_rows(), tape.num_token_blocks(),
                  [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool) {
                    ops::HeadInputs part = inputs;
                    part.qkv_TE = inputs.qkv_TE.rows(begin, count);
                    part.positions_T = part_of_vector(inputs.positions_T, begin, count);
                    ops::norm_rope_backward(ctx, dqkv.rows(begin, count), to[0], to[1], dqk.rows(begin, count), part);
                  });
}

struct Sinks {
  ConstTensorView value_H;
  TensorView gradient_H;
};
/// Adds the gradient of sinks, as a tree over blocks of tokens.
void sinks_backward(ops::OpContext& ctx, Tape& tape, const Sinks& sinks, ConstTensorView dout_THD, ConstTensorView out_THD,
                    ConstTensorView lse_TH, int num_blocks) {
  if (sinks.gradient_H.data == nullptr) return;
  const auto tokens = [](ConstTensorView view, std::int64_t begin, std::int64_t count) {
    const Shape shape = view.shape;
    const std::int64_t row = shape.num_elements() / shape[0];
    const ConstTensorView part = view.reshaped({shape[0], row}).rows(begin, count);
    return shape.num_dims() == 3 ? part.reshaped({count, shape[1], shape[2]}) : part;
  };
  sum_over_blocks(ctx, tape.arena(), {.outs = std::span(&sinks.gradient_H, 1)}, dout_THD.shape[0], num_blocks,
                  [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool) {
                    ops::attention_sinks_backward(ctx, to[0], tokens(dout_THD, begin, count), tokens(out_THD, begin, count),
                                                  tokens(lse_TH, begin, count), sinks.value_H);
                  });
}

/// Columns of a matrix that lie apart, each part of them in contiguous memory of its own: parts_CTE[c] = columns of part c. Part c has,
/// one after another, the c-th share of each of the groups of columns that `widths` names.
class ColumnParts {
 public:
  ColumnParts(int num_parts, std::vector<std::int64_t> widths) : num_parts_(num_parts), widths_(std::move(widths)) {
    for (const std::int64_t width : widths_) {
      PRL_CHECK(width % num_parts == 0, "{} columns in {} parts", width, num_parts);
      part_width_ += width / num_parts;
    }
  }
  std::int64_t part_width() const noexcept { return part_width_; }
  /// Views of `memory` [parts, T, part width], and those of one part as columns of the groups.
  void split(ops::OpContext& ctx, TensorView parts, const std::vector<TensorView>& groups) const {
    each(parts, groups, [&](TensorView part, TensorView columns) { ops::cast(ctx, part, columns); });
  }
  void join(ops::OpContext& ctx, const std::vector<TensorView>& groups, TensorView parts) const {
    each(parts, groups, [&](TensorView part, TensorView columns) { ops::cast(ctx, columns, part); });
  }

 private:
  /// `groups` are matrices [T, width], rows may be strided.
  template <typename Move>
  void each(TensorView parts, const std::vector<TensorView>& groups, const Move& move) const {
    const std::int64_t T = groups.front().shape.num_rows();
    for (int c = 0; c < num_parts_; ++c) {
      const TensorView part = parts.rows(c * T, T);
      std::int64_t first = 0;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        const std::int64_t width = widths_[g] / num_parts_;
        move(part.columns(first, width), groups[g].columns(c * width, width));
        first += width;
      }
    }
  }

  int num_parts_;
  std::vector<std::int64_t> widths_;
  std::int64_t part_width_ = 0;
};

/// Part r of `in` [size * T, E] goes to rank r, and part r of `out` comes from it.
void exchange(HeadExchange& ranks, TensorView out, ConstTensorView in) {
  const std::int64_t T = in.shape.num_rows() / ranks.size();
  std::vector<TensorView> outs;
  std::vector<ConstTensorView> ins;
  for (int r = 0; r < ranks.size(); ++r) {
    outs.push_back(out.rows(r * T, T));
    ins.push_back(in.rows(r * T, T));
  }
  ranks.all_to_all(outs, ins);
}

struct SharedAttention {
  Var qkv, y;
  TensorView qk;  ///< normed and rotated heads of q and k
  ops::HeadInputs inputs;
  AttentionParameter p;
  AttentionIndex index;
  float scale = 1;
};

/// Attention over a row that ranks share: part of the heads for all tokens here, the others' elsewhere.
void shared_attention(Frame& frame, const SharedAttention& a) {
  const AttentionParameter& p = a.p;
  HeadExchange& ranks = *a.index.exchange;
  const int size = ranks.size();
  const std::int64_t T = a.qkv.value.shape.num_rows(), D = p.head_dim, Q = p.num_heads * D, K = p.num_kv_heads * D;
  const std::int64_t heads = p.num_heads / size, kv_heads = p.num_kv_heads / size, row = size * T;
  const DType dtype = a.qkv.value.dtype;
  const ColumnParts inputs(size, {Q, K, K}), outputs(size, {Q});
  const std::int64_t E = inputs.part_width();
  const auto groups_of = [=](TensorView qk, TensorView qkv) {
    return std::vector<TensorView>{qk.columns(0, Q), qk.columns(Q, K), qkv.columns(Q + K, K)};
  };
  // Of this rank's heads.
  const auto own = [=, rank = ranks.rank()](auto sinks_H) {
    return sinks_H.data != nullptr ? sinks_H.reshaped({size, heads}).rows(rank, 1).reshaped({heads}) : sinks_H;
  };
  const auto args_of = [=, cu_seqlens = a.index.cu_seqlens, scale = a.scale, window = p.window, sinks = own(p.sinks_H)](TensorView mine) {
    return ops::VarlenAttention{heads_of(mine, 0, heads, D),
                                heads_of(mine, heads * D, kv_heads, D),
                                heads_of(mine, (heads + kv_heads) * D, kv_heads, D),
                                E,
                                E,
                                E,
                                cu_seqlens,
                                scale,
                                window,
                                sinks};
  };
  // What the backward pass reads is kept: it would have to be exchanged once more.
  const TensorView mine = frame.keep({row, E}, dtype), out = frame.keep({row, heads * D}, dtype);
  const TensorView lse = frame.keep({row, heads}, DType::kF32);
  {
    const Arena::Mark mark = frame.arena.mark();
    const TensorView parts = frame.arena.take({row, E}, dtype);
    inputs.split(frame.ctx, parts, groups_of(a.qk, a.qkv.value));
    exchange(ranks, mine, parts);
    ops::attention_varlen(frame.ctx, out.reshaped({row, heads, D}), lse, args_of(mine));
    const TensorView received = frame.arena.take({row, heads * D}, dtype);
    exchange(ranks, received, out);
    outputs.join(frame.ctx, {a.y.value}, received);
    frame.arena.release(mark);
  }
  if (frame.tape == nullptr) return;
  frame.tape->record([tape = frame.tape, ctx = &frame.ctx, group = a.index.exchange, a, mine, out, lse, inputs, outputs, groups_of, args_of,
                      own, size, T, Q, K, E, row, heads, kv_heads, D] {
    const TensorView dy = tape->grad(a.y);
    if (dy.data == nullptr || a.qkv.id < 0) return;
    const Tape::Target target = tape->target(a.qkv);
    PRL_CHECK(!target.accumulate, "the projections of an attention layer have one reader");
    const TensorView dqkv = target.view;
    const bool has_norm = a.p.q_norm.weight.data != nullptr;
    Arena& arena = tape->arena();
    const Arena::Mark mark = arena.mark();
    const TensorView dqk = has_norm ? arena.take({T, Q + K}, dqkv.dtype) : dqkv;
    const TensorView dmine = arena.take({row, E}, dqkv.dtype), dparts = arena.take({row, E}, dqkv.dtype);
    const TensorView parts = arena.take({row, heads * D}, dqkv.dtype), dout = arena.take({row, heads * D}, dqkv.dtype);
    outputs.split(*ctx, parts, {dy});
    exchange(*group, dout, parts);
    ops::attention_varlen_backward(*ctx, heads_of(dmine, 0, heads, D), heads_of(dmine, heads * D, kv_heads, D),
                                   heads_of(dmine, (heads + kv_heads) * D, kv_heads, D), E, E, E, dout.reshaped({row, heads, D}),
                                   out.reshaped({row, heads, D}), lse, args_of(mine));
    // Of the whole row, as one tree; other ranks have other heads.
    sinks_backward(*ctx, *tape, {own(a.p.sinks_H), own(a.p.dsinks_H)}, dout.reshaped({row, heads, D}), out.reshaped({row, heads, D}), lse,
                   size * tape->num_token_blocks());
    exchange(*group, dparts, dmine);
    inputs.join(*ctx, groups_of(dqk, dqkv), dparts);
    heads_backward(*ctx, *tape, a.p, a.inputs, dqkv, dqk, has_norm ? Q + K : a.p.width());
    arena.release(mark);
  });
}

/// self_attention() of new tokens by indices on the device.
Var decode_attention(Frame& frame, const AttentionParameter& p, const ops::HeadInputs& inputs, const AttentionIndex& index, float scale) {
  PRL_CHECK(frame.tape == nullptr, "decoding has no backward pass");
  const std::int64_t T = inputs.qkv_TE.shape.num_rows(), Q = p.num_heads * p.head_dim;
  const DType dtype = inputs.qkv_TE.dtype;
  const Var y = frame.variable(frame.take({T, Q}, dtype));
  const Shape heads{T, p.num_heads, p.head_dim};
  const TensorView out = y.value.reshaped(heads);
  const ConstTensorView plan = p.window > 0 ? index.window_plan : index.decode_plan;
  if (!index.decode->has_next_tokens &&
      ops::attention_decode_fused(frame.ctx, out, inputs, *index.kv_layer, *index.decode, plan, scale, p.window, p.sinks_H))
    return y;
  const TensorView q = frame.take({T, Q}, dtype);
  ops::norm_rope_to_cache(frame.ctx, q, *index.kv_layer, index.decode->slot_B, inputs);
  ops::attention_decode(frame.ctx, out, q.reshaped(heads), *index.kv_layer, *index.decode, plan, scale, p.window, p.sinks_H);
  return y;
}

}  // namespace

Var self_attention(Frame& frame, const Var& qkv, const AttentionParameter& p, const AttentionIndex& index) {
  const std::int64_t T = qkv.value.shape.num_rows();
  const std::int64_t D = p.head_dim, Q = p.num_heads * D, K = p.num_kv_heads * D, W = p.width();
  PRL_CHECK(qkv.value.shape.num_cols() == W, "qkv has {} columns, {} wanted", qkv.value.shape.num_cols(), W);
  const bool has_norm = p.q_norm.weight.data != nullptr;

  const ops::HeadInputs inputs{qkv.value,       p.num_heads,  p.num_kv_heads,    D,     p.q_norm.weight,
                               p.k_norm.weight, p.q_norm.eps, index.positions_T, p.rope};
  const float scale = p.scale > 0 ? p.scale : 1.0f / std::sqrt(static_cast<float>(D));
  if (index.decode != nullptr) return decode_attention(frame, p, inputs, index, scale);

  // With norms q and k get a matrix of their own, [T, Q + K]; the raw projections stay for the backward pass.
  TensorView qk = qkv.value;
  if (has_norm) {
    qk = frame.take({T, Q + K}, qkv.value.dtype);
    frame.run([ctx = &frame.ctx, qk, inputs] { ops::norm_rope(*ctx, qk, inputs); });
  } else {
    frame.run([ctx = &frame.ctx, heads = heads_of(qk, 0, p.num_heads + p.num_kv_heads, D), W, positions = index.positions_T,
               rope = p.rope] { ops::rope(*ctx, heads, W, positions, *rope, false); });
  }
  const std::int64_t qk_stride = has_norm ? Q + K : W;
  const TensorView q = heads_of(qk, 0, p.num_heads, D);
  const TensorView k = heads_of(qk, Q, p.num_kv_heads, D);
  const TensorView v = heads_of(qkv.value, Q + K, p.num_kv_heads, D);

  const Var y = frame.variable(frame.keep({T, Q}, qkv.value.dtype));
  const TensorView out = y.value.reshaped({T, p.num_heads, D});
  if (index.paged != nullptr) {
    PRL_CHECK(frame.tape == nullptr, "paged attention has no backward pass");
    ops::kv_write(frame.ctx, *index.kv_layer, k, qk_stride, v, W, index.slot_T);
    ops::PagedAttention args = *index.paged;
    args.q_THD = q;
    args.q_token_stride = qk_stride;
    args.layer = *index.kv_layer;
    args.scale = scale;
    args.window = p.window;
    args.sinks_H = p.sinks_H;
    ops::attention_paged(frame.ctx, out, args);
    return y;
  }

  if (index.exchange != nullptr) {
    shared_attention(frame, {qkv, y, qk, inputs, p, index, scale});
    return y;
  }

  const TensorView lse = frame.keep({T, p.num_heads}, DType::kF32);
  const ops::VarlenAttention args{q, k, v, qk_stride, qk_stride, W, index.cu_seqlens, scale, p.window, p.sinks_H};
  ops::attention_varlen(frame.ctx, out, lse, args);
  if (frame.tape == nullptr) return y;

  frame.tape->record([tape = frame.tape, ctx = &frame.ctx, qkv, y, out, lse, args, inputs, p, index, T, D, Q, K, W, has_norm] {
    const TensorView dy = tape->grad(y);
    if (dy.data == nullptr || qkv.id < 0) return;
    const Tape::Target target = tape->target(qkv);
    PRL_CHECK(!target.accumulate, "the projections of an attention layer have one reader");
    const TensorView dqkv = target.view;
    const Arena::Mark mark = tape->arena().mark();
    const TensorView dqk = has_norm ? tape->arena().take({T, Q + K}, dqkv.dtype) : dqkv;
    const std::int64_t stride = has_norm ? Q + K : W;
    ops::attention_varlen_backward(*ctx, heads_of(dqk, 0, p.num_heads, D), heads_of(dqk, Q, p.num_kv_heads, D),
                                   heads_of(dqkv, Q + K, p.num_kv_heads, D), stride, stride, W, dy.reshaped({T, p.num_heads, D}), out, lse,
                                   args);
    sinks_backward(*ctx, *tape, {p.sinks_H, p.dsinks_H}, dy.reshaped({T, p.num_heads, D}), out, lse, tape->num_token_blocks());
    heads_backward(*ctx, *tape, p, inputs, dqkv, dqk, stride);
    tape->arena().release(mark);
  });
  return y;
}

}  // namespace prl::autograd
