#include "ops/linear.hpp"

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {

LinearWeightPtr pack_linear(OpContext& ctx, ConstTensorView w_NK, ConstTensorView bias_N, DType compute, bool with_backward,
                            WeightUse use) {
  ShapeCheck c("pack_linear", ctx);
  c.check("w", w_NK, "N K").floating("w", w_NK).contiguous("w", w_NK);
  if (bias_N.data != nullptr) c.check("bias", bias_N, "N", DType::kF32);
  c.require(compute == DType::kF32 || compute == DType::kBF16, "compute dtype must be F32 or BF16");
  c.require(w_NK.shape.num_elements() > 0, "w is empty");
  return table_entry(ctx, ctx.table->pack_linear, "pack_linear")(ctx, w_NK, bias_N, compute, with_backward, use);
}

CodeMemory take_code_memory(OpContext& ctx, std::int64_t count, std::int64_t N, std::int64_t K, DType compute) {
  if (ctx.table->take_code_memory == nullptr) return {};
  ShapeCheck c("take_code_memory", ctx);
  c.require(count > 0 && N > 0 && K > 0, "wanted matrices that are not empty");
  return ctx.table->take_code_memory(ctx, count, N, K, compute);
}

LinearWeightPtr share_linear(OpContext& ctx, const Tensor& w_NK, ConstTensorView bias_N, bool with_backward, WeightUse use,
                             const CodeMemory& memory) {
  ShapeCheck c("share_linear", ctx);
  c.check("w", w_NK, "N K").floating("w", w_NK);
  if (bias_N.data != nullptr) c.check("bias", bias_N, "N", DType::kF32);
  c.require(w_NK.num_elements() > 0, "w is empty");
  if (memory.codes.defined())
    c.check("codes", memory.codes, "N K", DType::kU8).check("factors", memory.factors, "N", DType::kF32).contiguous("codes", memory.codes);
  return table_entry(ctx, ctx.table->share_linear, "share_linear")(ctx, w_NK, bias_N, with_backward, use, memory);
}

bool shares_weights(const OpContext& ctx) { return ctx.table->weights_are_row_major; }

void linear(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LinearWeight* next) {
  ShapeCheck c("linear", ctx);
  c.extent("N", w.num_outputs(), "w").extent("K", w.num_inputs(), "w");
  c.check("y", y_TN, "T N").check("x", x_TK, "T K", w.dtype());
  if (y_TN.dtype != DType::kF32) c.same_dtype("y", y_TN.dtype, "w", w.dtype());
  if (x_TK.shape.num_rows() > 0) table_entry(ctx, ctx.table->linear, "linear")(ctx, y_TN, x_TK, w, next);
}

void linear_backward_input(OpContext& ctx, TensorView dx_TK, ConstTensorView dy_TN, const LinearWeight& w, bool accumulate) {
  ShapeCheck c("linear_backward_input", ctx);
  c.extent("N", w.num_outputs(), "w").extent("K", w.num_inputs(), "w");
  c.check("dx", dx_TK, "T K").check("dy", dy_TN, "T N", w.dtype());
  if (dx_TK.dtype != DType::kF32) c.same_dtype("dx", dx_TK.dtype, "w", w.dtype());
  c.require(w.has_backward(), "w was packed without its backward form");
  if (dy_TN.shape.num_rows() == 0) return;
  table_entry(ctx, ctx.table->linear_backward_input, "linear_backward_input")(ctx, dx_TK, dy_TN, w, accumulate);
}

void linear_backward_weight(OpContext& ctx, TensorView dw_NK, TensorView db_N, ConstTensorView dy_TN, ConstTensorView x_TK,
                            bool accumulate) {
  ShapeCheck c("linear_backward_weight", ctx);
  c.check("dw", dw_NK, "N K", DType::kF32).contiguous("dw", dw_NK).check("dy", dy_TN, "T N").check("x", x_TK, "T K");
  c.floating("x", x_TK).same_dtype("dy", dy_TN.dtype, "x", x_TK.dtype);
  if (db_N.data != nullptr) c.check("db", db_N, "N", DType::kF32);
  c.require(accumulate || dy_TN.shape.num_rows() > 0, "no tokens to form dw from");
  if (dy_TN.shape.num_rows() == 0) return;
  table_entry(ctx, ctx.table->linear_backward_weight, "linear_backward_weight")(ctx, dw_NK, db_N, dy_TN, x_TK, accumulate);
}

void matmul_f32(OpContext& ctx, TensorView out_MN, ConstTensorView a_MK, ConstTensorView b, bool transpose_b) {
  ShapeCheck c("matmul_f32", ctx);
  c.check("out", out_MN, "M N", DType::kF32).check("a", a_MK, "M K", DType::kF32).check("b", b, transpose_b ? "N K" : "K N", DType::kF32);
  c.contiguous("out", out_MN).contiguous("a", a_MK).contiguous("b", b);
  if (out_MN.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->matmul_f32, "matmul_f32")(ctx, out_MN, a_MK, b, transpose_b);
}

}  // namespace prl::ops
