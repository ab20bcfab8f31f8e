#include "ops/latent.hpp"

#include <algorithm>

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {
namespace {

void check_sizes(ShapeCheck& c, const LatentHeads& heads) {
  const std::int64_t N = heads.plain_dim, R = heads.rotary_dim, V = heads.value_dim, D = heads.head_dim;
  c.require(heads.num_heads > 0 && N >= 0 && R > 0 && V > 0 && N % 8 == 0 && V % 8 == 0 && D % 8 == 0 && R % 16 == 0,
            "heads, and sizes of them that are multiples of 8 and 16");
  c.require(D >= std::max(N + R, V), "heads that hold queries and values");
  const std::int64_t H = heads.num_heads;
  c.extent("E", 3 * H * D, "the heads").extent("Q", H * (N + R), "the heads").extent("U", H * (N + V), "the heads");
  c.extent("R", R, "the heads").extent("HD", H * D, "the heads").extent("HV", H * V, "the heads");
}

}  // namespace

void latent_heads(OpContext& ctx, TensorView qkv_TE, ConstTensorView q_TQ, ConstTensorView up_TU, ConstTensorView rotary_TR,
                  const LatentHeads& heads) {
  ShapeCheck c("latent_heads", ctx);
  check_sizes(c, heads);
  c.check("qkv", qkv_TE, "T E").check("q", q_TQ, "T Q").check("up", up_TU, "T U").check("rotary", rotary_TR, "T R");
  c.floating("qkv", qkv_TE);
  for (const DType t : {q_TQ.dtype, up_TU.dtype, rotary_TR.dtype}) c.same_dtype("an input", t, "qkv", qkv_TE.dtype);
  if (qkv_TE.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->latent_heads, "latent_heads")(ctx, qkv_TE, q_TQ, up_TU, rotary_TR, heads);
}

void latent_heads_backward(OpContext& ctx, TensorView dq_TQ, TensorView dup_TU, TensorView drotary_TR, ConstTensorView dqkv_TE,
                           const LatentHeads& heads) {
  ShapeCheck c("latent_heads_backward", ctx);
  check_sizes(c, heads);
  c.check("dqkv", dqkv_TE, "T E").floating("dqkv", dqkv_TE);
  const auto check = [&](const char* name, const TensorView& view, const char* pattern) {
    if (view.data != nullptr) c.check(name, view, pattern).same_dtype(name, view.dtype, "dqkv", dqkv_TE.dtype);
  };
  check("dq", dq_TQ, "T Q");
  check("dup", dup_TU, "T U");
  check("drotary", drotary_TR, "T R");
  if (dqkv_TE.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->latent_heads_backward, "latent_heads_backward")(ctx, dq_TQ, dup_TU, drotary_TR, dqkv_TE, heads);
}

void narrow_heads(OpContext& ctx, TensorView y_TV, ConstTensorView x_TQ, const LatentHeads& heads) {
  ShapeCheck c("narrow_heads", ctx);
  check_sizes(c, heads);
  c.check("y", y_TV, "T HV").check("x", x_TQ, "T HD").floating("y", y_TV).same_dtype("x", x_TQ.dtype, "y", y_TV.dtype);
  if (y_TV.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->narrow_heads, "narrow_heads")(ctx, y_TV, x_TQ, heads);
}

void narrow_heads_backward(OpContext& ctx, TensorView dx_TQ, ConstTensorView dy_TV, const LatentHeads& heads) {
  ShapeCheck c("narrow_heads_backward", ctx);
  check_sizes(c, heads);
  c.check("dx", dx_TQ, "T HD").check("dy", dy_TV, "T HV").floating("dx", dx_TQ).same_dtype("dy", dy_TV.dtype, "dx", dx_TQ.dtype);
  if (dx_TQ.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->narrow_heads_backward, "narrow_heads_backward")(ctx, dx_TQ, dy_TV, heads);
}

}  // namespace prl::ops
