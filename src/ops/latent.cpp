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

void check_up(ShapeCheck& c, const LinearWeight& up, const LatentHeads& h, DType dtype) {
  const std::int64_t L = up.num_inputs();
  c.require(up.num_outputs() == h.num_heads * (h.plain_dim + h.value_dim), "a matrix that forms all heads");
  c.require(L % 16 == 0 && !up.has_bias() && !up.rounds_inputs(),
            "a matrix of a multiple of 16 inputs, without bias, whose inputs are not rounded");
  c.extent("L", L, "the matrix")
      .extent("HL", h.num_heads * L, "the matrix")
      .extent("QK", h.num_heads * (h.rotary_dim + L), "the matrix")
      .extent("K", h.rotary_dim + L, "the matrix");
  c.same_dtype("the matrix", up.dtype(), "rows", dtype);
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

namespace {

struct LatentQueries {
  ConstTensorView q_TQ, latent_TL, rotary_TR;
  const LinearWeight& up;
  const LatentHeads& heads;
  const RopeTable& rope;
  ConstTensorView positions_T;
};
void check_queries(ShapeCheck& c, const TensorView& out_TE, const LatentQueries& in) {
  check_sizes(c, in.heads);
  check_up(c, in.up, in.heads, out_TE.dtype);
  c.check("out", out_TE, "T QK").check("q", in.q_TQ, "T Q").check("latent", in.latent_TL, "T L").check("rotary", in.rotary_TR, "T R");
  c.floating("out", out_TE).contiguous("out", out_TE).check("positions", in.positions_T, "T", DType::kI32);
  for (const DType t : {in.q_TQ.dtype, in.latent_TL.dtype, in.rotary_TR.dtype}) c.same_dtype("an input", t, "out", out_TE.dtype);
  c.require(2 * in.rope.num_pairs() == in.heads.rotary_dim, "a rotary table of the rotated elements");
}

}  // namespace

void latent_queries(OpContext& ctx, TensorView out_TE, TensorView key_TK, ConstTensorView q_TQ, ConstTensorView latent_TL,
                    ConstTensorView rotary_TR, const LinearWeight& up, const LatentHeads& heads, const RopeTable& rope,
                    ConstTensorView positions_T) {
  ShapeCheck c("latent_queries", ctx);
  check_queries(c, out_TE, {q_TQ, latent_TL, rotary_TR, up, heads, rope, positions_T});
  c.check("key", key_TK, "T K", out_TE.dtype).contiguous("key", key_TK);
  if (out_TE.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->latent_queries, "latent_queries")(ctx, out_TE, key_TK, q_TQ, latent_TL, rotary_TR, up, heads, rope,
                                                                positions_T);
}

void latent_queries_to_cache(OpContext& ctx, TensorView out_TE, const KvLayer& layer, ConstTensorView slot_T, ConstTensorView q_TQ,
                             ConstTensorView latent_TL, ConstTensorView rotary_TR, const LinearWeight& up, const LatentHeads& heads,
                             const RopeTable& rope, ConstTensorView positions_T) {
  ShapeCheck c("latent_queries_to_cache", ctx);
  check_queries(c, out_TE, {q_TQ, latent_TL, rotary_TR, up, heads, rope, positions_T});
  c.check("cache k", layer.k, "B Hkv S K", out_TE.dtype).contiguous("cache k", layer.k).extent("Hkv", 1, "one key for all heads");
  c.check("slot", slot_T, "T", DType::kI32).require(layer.v.data == nullptr, "keys that hold values");
  if (out_TE.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->latent_queries_to_cache, "latent_queries_to_cache")(ctx, out_TE, layer, slot_T, q_TQ, latent_TL, rotary_TR,
                                                                                  up, heads, rope, positions_T);
}

void latent_values(OpContext& ctx, TensorView y_TV, ConstTensorView x_TL, const LinearWeight& up, const LatentHeads& heads) {
  ShapeCheck c("latent_values", ctx);
  check_sizes(c, heads);
  check_up(c, up, heads, y_TV.dtype);
  c.check("y", y_TV, "T HV").check("x", x_TL, "T HL").floating("y", y_TV).same_dtype("x", x_TL.dtype, "y", y_TV.dtype);
  if (y_TV.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->latent_values, "latent_values")(ctx, y_TV, x_TL, up, heads);
}

}  // namespace prl::ops
