#include "ops/vision.hpp"

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {

void layer_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, ConstTensorView b_C, float eps) {
  ShapeCheck c("layer_norm", ctx);
  c.check("y", y_RC, "R C").check("x", x_RC, "R C").check("w", w_C, "C", DType::kF32).check("b", b_C, "C", DType::kF32);
  c.floating("x", x_RC).same_dtype("y", y_RC.dtype, "x", x_RC.dtype);
  if (x_RC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->layer_norm, "layer_norm")(ctx, y_RC, x_RC, w_C, b_C, eps);
}

void gelu(OpContext& ctx, TensorView out_RC, ConstTensorView x_RC, GeluForm form) {
  ShapeCheck c("gelu", ctx);
  c.check("out", out_RC, "R C").check("x", x_RC, "R C").floating("x", x_RC).same_dtype("out", out_RC.dtype, "x", x_RC.dtype);
  if (x_RC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->gelu, "gelu")(ctx, out_RC, x_RC, form);
}

namespace {

void check_dense_heads(ShapeCheck& c, std::string_view name, const ConstTensorView& v, std::int64_t& token_stride) {
  ConstTensorView dense = v;
  dense.row_stride = v.shape.num_cols();  // the token stride is given apart
  c.check(name, dense, "T H D").floating(name, v);
  if (token_stride == 0) token_stride = v.shape[1] * v.shape[2];
  c.require(token_stride >= v.shape[1] * v.shape[2] || v.shape[0] <= 1, "a token stride is smaller than heads * D");
}

}  // namespace

void attention_full(OpContext& ctx, TensorView out_THD, const VarlenAttention& args) {
  ShapeCheck c("attention_full", ctx);
  VarlenAttention a = args;
  check_dense_heads(c, "q", a.q_THD, a.q_token_stride);
  check_dense_heads(c, "k", a.k_TKD, a.k_token_stride);
  check_dense_heads(c, "v", a.v_TKD, a.v_token_stride);
  c.check("out", out_THD, "T H D", a.q_THD.dtype).contiguous("out", out_THD);
  c.same_dtype("k", a.k_TKD.dtype, "q", a.q_THD.dtype).same_dtype("v", a.v_TKD.dtype, "q", a.q_THD.dtype);
  c.require(is_head_dim(a.q_THD.shape[2]), "heads are of a size that no device has attention kernels for");
  c.require(a.window == 0 && a.sinks_H.data == nullptr, "attention without a mask has neither window nor sinks");
  bool good = a.cu_seqlens.size() >= 2 && a.cu_seqlens.front() == 0 && a.cu_seqlens.back() == a.q_THD.shape[0];
  for (std::size_t s = 1; good && s < a.cu_seqlens.size(); ++s) good = a.cu_seqlens[s] >= a.cu_seqlens[s - 1];
  c.require(good, "cu_seqlens must rise from 0 to T");
  if (a.q_THD.shape[0] == 0) return;
  table_entry(ctx, ctx.table->attention_full, "attention_full")(ctx, out_THD, a);
}

void gather_rope_rows(OpContext& ctx, TensorView cos_TR2, TensorView sin_TR2, const RopeTable& table, ConstTensorView positions_3T,
                      RopeSections sections) {
  ShapeCheck c("gather_rope_rows", ctx);
  c.check("cos", cos_TR2, "T P", DType::kF32).check("sin", sin_TR2, "T P", DType::kF32).contiguous("cos", cos_TR2);
  c.contiguous("sin", sin_TR2).extent("P", table.num_pairs(), "table").check("positions", positions_3T, "3 T", DType::kI32);
  c.contiguous("positions", positions_3T).require(sections.height >= 0 && sections.width >= 0, "a section is negative");
  if (cos_TR2.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->gather_rope_rows, "gather_rope_rows")(ctx, cos_TR2, sin_TR2, table, positions_3T, sections);
}

}  // namespace prl::ops
