#include "autograd/attention.hpp"

#include <cmath>

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

}  // namespace

Var self_attention(Frame& frame, const Var& qkv, const AttentionParameter& p, const AttentionIndex& index) {
  const std::int64_t T = qkv.value.shape.num_rows();
  const std::int64_t D = p.head_dim, Q = p.num_heads * D, K = p.num_kv_heads * D, W = p.width();
  PRL_CHECK(qkv.value.shape.num_cols() == W, "qkv has {} columns, {} wanted", qkv.value.shape.num_cols(), W);
  const bool has_norm = p.q_norm.weight.data != nullptr;

  const ops::HeadInputs inputs{qkv.value,       p.num_heads,  p.num_kv_heads,    D,     p.q_norm.weight,
                               p.k_norm.weight, p.q_norm.eps, index.positions_T, p.rope};
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  if (index.decode != nullptr) {
    PRL_CHECK(frame.tape == nullptr, "decoding has no backward pass");
    const Var y = frame.variable(frame.take({T, Q}, qkv.value.dtype));
    const TensorView out = y.value.reshaped({T, p.num_heads, D});
    if (ops::attention_decode_fused(frame.ctx, out, inputs, *index.kv_layer, *index.decode, index.decode_plan, scale)) return y;
    const TensorView q = frame.take({T, Q}, qkv.value.dtype);
    ops::norm_rope_to_cache(frame.ctx, q, *index.kv_layer, index.decode->slot_B, inputs);
    ops::attention_decode(frame.ctx, out, q.reshaped({T, p.num_heads, D}), *index.kv_layer, *index.decode, index.decode_plan, scale);
    return y;
  }

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
    ops::attention_paged(frame.ctx, out, args);
    return y;
  }

  const TensorView lse = frame.keep({T, p.num_heads}, DType::kF32);
  const ops::VarlenAttention args{q, k, v, qk_stride, qk_stride, W, index.cu_seqlens, scale};
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
    if (has_norm)
      ops::norm_rope_backward(*ctx, dqkv, norm_weight_target(*tape, p.q_norm), norm_weight_target(*tape, p.k_norm), dqk, inputs);
    else
      ops::rope(*ctx, heads_of(dqk, 0, p.num_heads + p.num_kv_heads, D), stride, index.positions_T, *p.rope, true);
    tape->arena().release(mark);
  });
  return y;
}

}  // namespace prl::autograd
