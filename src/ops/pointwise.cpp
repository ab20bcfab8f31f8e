#include "ops/pointwise.hpp"

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {

void embedding(OpContext& ctx, TensorView out_TH, ConstTensorView table_VH, const TokenIds& ids) {
  ShapeCheck c("embedding", ctx);
  c.check("out", out_TH, "T H").check("table", table_VH, "V H").check("ids", ids.ids_T, "T", DType::kI32);
  if (ids.drawn_B.data != nullptr) c.check("drawn", ids.drawn_B, "B", DType::kI32);
  c.floating("out", out_TH).same_dtype("out", out_TH.dtype, "table", table_VH.dtype);
  if (ids.ids_T.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->embedding, "embedding")(ctx, out_TH, table_VH, ids);
}

void store_rows(OpContext& ctx, TensorView to_SC, ConstTensorView rows_TC, ConstTensorView slot_T) {
  ShapeCheck c("store_rows", ctx);
  c.check("to", to_SC, "S C").check("rows", rows_TC, "T C").check("slots", slot_T, "T", DType::kI32);
  c.floating("to", to_SC).same_dtype("rows", rows_TC.dtype, "to", to_SC.dtype).contiguous("slots", slot_T);
  if (rows_TC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->store_rows, "store_rows")(ctx, to_SC, rows_TC, slot_T);
}

void embedding_backward(OpContext& ctx, TensorView dtable_VH, ConstTensorView dout_TH, ConstTensorView ids_T) {
  ShapeCheck c("embedding_backward", ctx);
  c.check("dtable", dtable_VH, "V H", DType::kF32)
      .check("dout", dout_TH, "T H")
      .check("ids", ids_T, "T", DType::kI32)
      .floating("dout", dout_TH);
  if (ids_T.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->embedding_backward, "embedding_backward")(ctx, dtable_VH, dout_TH, ids_T);
}

void rms_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, float eps) {
  ShapeCheck c("rms_norm", ctx);
  c.check("y", y_RC, "R C")
      .check("x", x_RC, "R C")
      .check("w", w_C, "C", DType::kF32)
      .floating("x", x_RC)
      .same_dtype("y", y_RC.dtype, "x", x_RC.dtype);
  if (x_RC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->rms_norm, "rms_norm")(ctx, y_RC, x_RC, w_C, eps);
}

void add_rms_norm(OpContext& ctx, TensorView y_RC, TensorView sum_RC, ConstTensorView x_RC, ConstTensorView residual_RC,
                  ConstTensorView w_C, float eps) {
  ShapeCheck c("add_rms_norm", ctx);
  c.check("y", y_RC, "R C")
      .check("sum", sum_RC, "R C")
      .check("x", x_RC, "R C")
      .check("residual", residual_RC, "R C")
      .check("w", w_C, "C", DType::kF32);
  c.floating("x", x_RC)
      .same_dtype("y", y_RC.dtype, "x", x_RC.dtype)
      .same_dtype("sum", sum_RC.dtype, "x", x_RC.dtype)
      .same_dtype("residual", residual_RC.dtype, "x", x_RC.dtype);
  if (x_RC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->add_rms_norm, "add_rms_norm")(ctx, y_RC, sum_RC, x_RC, residual_RC, w_C, eps);
}

void rms_norm_backward(OpContext& ctx, TensorView dx_RC, TensorView dw_C, ConstTensorView dy_RC, ConstTensorView x_RC, ConstTensorView w_C,
                       float eps, bool accumulate) {
  ShapeCheck c("rms_norm_backward", ctx);
  c.check("dx", dx_RC, "R C")
      .check("dy", dy_RC, "R C")
      .check("x", x_RC, "R C")
      .check("w", w_C, "C", DType::kF32)
      .check("dw", dw_C, "C", DType::kF32);
  c.floating("x", x_RC).same_dtype("dx", dx_RC.dtype, "x", x_RC.dtype).same_dtype("dy", dy_RC.dtype, "x", x_RC.dtype);
  if (x_RC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->rms_norm_backward, "rms_norm_backward")(ctx, dx_RC, dw_C, dy_RC, x_RC, w_C, eps, accumulate);
}

namespace {

/// Views of [tokens, heads, D] whose heads lie next to each other; tokens may be further apart. Gives a dense stride for 0.
void check_heads(ShapeCheck& c, std::string_view name, const ConstTensorView& v, std::int64_t& token_stride) {
  ConstTensorView dense = v;
  dense.row_stride = v.shape.num_cols();  // the token stride is given apart
  c.check(name, dense, "T Hd D").floating(name, v);
  if (token_stride == 0) token_stride = v.shape[1] * v.shape[2];
  c.require(token_stride >= v.shape[1] * v.shape[2] || v.shape[0] <= 1, "a token stride is smaller than heads * D");
}

}  // namespace

void head_norm(OpContext& ctx, TensorView y_THD, std::int64_t y_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride,
               ConstTensorView w_D, float eps) {
  ShapeCheck c("head_norm", ctx);
  check_heads(c, "y", y_THD, y_token_stride);
  check_heads(c, "x", x_THD, x_token_stride);
  c.check("w", w_D, "D", DType::kF32).same_dtype("y", y_THD.dtype, "x", x_THD.dtype);
  if (x_THD.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->head_norm, "head_norm")(ctx, y_THD, y_token_stride, x_THD, x_token_stride, w_D, eps);
}

void head_norm_backward(OpContext& ctx, TensorView dx_THD, std::int64_t dx_token_stride, TensorView dw_D, ConstTensorView dy_THD,
                        std::int64_t dy_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride, ConstTensorView w_D, float eps) {
  ShapeCheck c("head_norm_backward", ctx);
  check_heads(c, "dx", dx_THD, dx_token_stride);
  check_heads(c, "dy", dy_THD, dy_token_stride);
  check_heads(c, "x", x_THD, x_token_stride);
  c.check("w", w_D, "D", DType::kF32).check("dw", dw_D, "D", DType::kF32);
  c.same_dtype("dx", dx_THD.dtype, "x", x_THD.dtype).same_dtype("dy", dy_THD.dtype, "x", x_THD.dtype);
  if (x_THD.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->head_norm_backward, "head_norm_backward")(ctx, dx_THD, dx_token_stride, dw_D, dy_THD, dy_token_stride, x_THD,
                                                                        x_token_stride, w_D, eps);
}

void add(OpContext& ctx, TensorView out, ConstTensorView a, ConstTensorView b) {
  ShapeCheck c("add", ctx);
  c.check("out", out, "R C")
      .check("a", a, "R C")
      .check("b", b, "R C")
      .floating("a", a)
      .same_dtype("out", out.dtype, "a", a.dtype)
      .same_dtype("b", b.dtype, "a", a.dtype);
  if (out.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->add, "add")(ctx, out, a, b);
}

namespace {

void check_gated(const char* op, OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F) {
  ShapeCheck c(op, ctx);
  c.check("out", out_TF, "T F").check("gate_up", gate_up_T2F, "T 2F").extent("2F", 2 * out_TF.shape.num_cols(), "out");
  c.floating("out", out_TF).same_dtype("out", out_TF.dtype, "gate_up", gate_up_T2F.dtype);
}

void check_gated_backward(const char* op, OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F) {
  ShapeCheck c(op, ctx);
  c.check("dout", dout_TF, "T F")
      .check("gate_up", gate_up_T2F, "T 2F")
      .check("dgate_up", dgate_up_T2F, "T 2F")
      .extent("2F", 2 * dout_TF.shape.num_cols(), "dout");
  c.floating("dout", dout_TF)
      .same_dtype("dout", dout_TF.dtype, "gate_up", gate_up_T2F.dtype)
      .same_dtype("dout", dout_TF.dtype, "dgate_up", dgate_up_T2F.dtype);
}

}  // namespace

void swiglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F) {
  check_gated("swiglu", ctx, out_TF, gate_up_T2F);
  if (out_TF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->swiglu, "swiglu")(ctx, out_TF, gate_up_T2F);
}

void swiglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F) {
  check_gated_backward("swiglu_backward", ctx, dgate_up_T2F, dout_TF, gate_up_T2F);
  if (dout_TF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->swiglu_backward, "swiglu_backward")(ctx, dgate_up_T2F, dout_TF, gate_up_T2F);
}

void geglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F) {
  check_gated("geglu", ctx, out_TF, gate_up_T2F);
  if (out_TF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->geglu, "geglu")(ctx, out_TF, gate_up_T2F);
}

void geglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F) {
  check_gated_backward("geglu_backward", ctx, dgate_up_T2F, dout_TF, gate_up_T2F);
  if (dout_TF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->geglu_backward, "geglu_backward")(ctx, dgate_up_T2F, dout_TF, gate_up_T2F);
}

namespace {
void check_squared_relu(ShapeCheck& c, const ConstTensorView& rows_TF, const ConstTensorView& x_TF, const ConstTensorView& factors_T) {
  c.check("rows", rows_TF, "T F").check("x", x_TF, "T F").floating("x", x_TF).same_dtype("rows", rows_TF.dtype, "x", x_TF.dtype);
  if (factors_T.data != nullptr) c.check("factors", factors_T, "T", DType::kF32).contiguous("factors", factors_T);
}
}  // namespace

void squared_relu(OpContext& ctx, TensorView out_TF, ConstTensorView x_TF, ConstTensorView factors_T) {
  ShapeCheck c("squared_relu", ctx);
  check_squared_relu(c, out_TF, x_TF, factors_T);
  if (out_TF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->squared_relu, "squared_relu")(ctx, out_TF, x_TF, factors_T);
}

void squared_relu_backward(OpContext& ctx, TensorView dx_TF, TensorView dfactors_T, ConstTensorView dout_TF, ConstTensorView x_TF,
                           ConstTensorView factors_T) {
  ShapeCheck c("squared_relu_backward", ctx);
  check_squared_relu(c, dout_TF, x_TF, factors_T);
  c.check("dx", dx_TF, "T F").same_dtype("dx", dx_TF.dtype, "x", x_TF.dtype);
  if (factors_T.data != nullptr) c.check("dfactors", dfactors_T, "T", DType::kF32).contiguous("dfactors", dfactors_T);
  if (dout_TF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->squared_relu_backward, "squared_relu_backward")(ctx, dx_TF, dfactors_T, dout_TF, x_TF, factors_T);
}

void rope(OpContext& ctx, TensorView x_THD, std::int64_t token_stride, ConstTensorView positions_T, const RopeTable& table, bool inverse) {
  ShapeCheck c("rope", ctx);
  TensorView dense = x_THD;
  dense.row_stride = x_THD.shape.num_cols();  // the token stride is given apart
  c.check("x", dense, "T Hd D").check("positions", positions_T, "T", DType::kI32).floating("x", x_THD);
  c.check("cos", table.cos_PR2, "P R/2", DType::kF32).check("sin", table.sin_PR2, "P R/2", DType::kF32);
  c.require(2 * table.num_pairs() <= x_THD.shape[2], "a head has no more than D elements to rotate");
  if (token_stride == 0) token_stride = x_THD.shape[1] * x_THD.shape[2];
  c.require(token_stride >= x_THD.shape[1] * x_THD.shape[2] || x_THD.shape[0] <= 1, "token_stride is smaller than heads * D");
  if (x_THD.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->rope, "rope")(ctx, x_THD, token_stride, positions_T, table, inverse);
}

void cast(OpContext& ctx, TensorView out, ConstTensorView x) {
  ShapeCheck c("cast", ctx);
  c.check("out", out, "R C").check("x", x, "R C");
  const auto is_float = [](DType t) { return t == DType::kF32 || t == DType::kBF16 || t == DType::kF16; };
  c.require(is_float(out.dtype) && is_float(x.dtype), "only F32, BF16 and F16 are converted");
  if (out.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->cast, "cast")(ctx, out, x);
}

double sum_squares(OpContext& ctx, std::span<const ConstTensorView> xs) {
  bool is_empty = true;
  for (const ConstTensorView& x : xs) {
    ShapeCheck c("sum_squares", ctx);
    c.check("x", x, "R C", DType::kF32).contiguous("x", x);
    is_empty = is_empty && x.shape.num_elements() == 0;
  }
  return is_empty ? 0.0 : table_entry(ctx, ctx.table->sum_squares, "sum_squares")(ctx, xs);
}

void chunk_squares(OpContext& ctx, std::span<float> out_C, std::span<const ConstTensorView> xs) {
  std::int64_t num_chunks = 0;
  for (const ConstTensorView& x : xs) {
    ShapeCheck c("chunk_squares", ctx);
    c.check("x", x, "R C", DType::kF32).contiguous("x", x);
    num_chunks += (x.shape.num_elements() + kSquaresChunk - 1) / kSquaresChunk;
  }
  ShapeCheck("chunk_squares", ctx).require(static_cast<std::int64_t>(out_C.size()) == num_chunks, "one sum per chunk is wanted");
  if (num_chunks > 0) table_entry(ctx, ctx.table->chunk_squares, "chunk_squares")(ctx, out_C, xs);
}

std::int64_t find_not_finite(OpContext& ctx, ConstTensorView x) {
  ShapeCheck c("find_not_finite", ctx);
  c.check("x", x, "R C").contiguous("x", x);
  c.require(x.dtype == DType::kF32 || x.dtype == DType::kBF16, "only F32 and BF16 are looked at");
  if (x.shape.num_elements() == 0) return -1;
  return table_entry(ctx, ctx.table->find_not_finite, "find_not_finite")(ctx, x);
}

void scale(OpContext& ctx, TensorView x, float factor) {
  ShapeCheck c("scale", ctx);
  c.check("x", x, "R C", DType::kF32).contiguous("x", x);
  if (x.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->scale, "scale")(ctx, x, factor);
}

namespace {

/// Columns [first, first + heads * D) of a matrix as [T, heads, D].
template <typename View>
View heads_of(const View& matrix, std::int64_t first, std::int64_t heads, std::int64_t head_dim) {
  View view = matrix.columns(first, heads * head_dim);
  view.shape = Shape{matrix.shape.num_rows(), heads, head_dim};
  view.row_stride = head_dim;
  return view;
}

}  // namespace

void norm_rope(OpContext& ctx, TensorView qk_TE, const HeadInputs& in) {
  const std::int64_t D = in.head_dim, Q = in.num_heads * D, K = in.num_kv_heads * D, T = in.qkv_TE.shape.num_rows();
  ShapeCheck c("norm_rope", ctx);
  c.check("qk", qk_TE, "T QK").check("qkv", in.qkv_TE, "T W").same_dtype("qk", qk_TE.dtype, "qkv", in.qkv_TE.dtype).floating("qk", qk_TE);
  c.extent("QK", Q + K, "num_heads, num_kv_heads").extent("W", Q + 2 * K, "num_heads, num_kv_heads");
  c.check("q_norm", in.q_norm_D, "D", DType::kF32).check("k_norm", in.k_norm_D, "D", DType::kF32).extent("D", D, "head_dim");
  c.check("positions", in.positions_T, "T", DType::kI32)
      .require(in.rope != nullptr && 2 * in.rope->num_pairs() <= D, "a rotary table of heads is wanted");
  if (T == 0) return;
  if (ctx.table->norm_rope != nullptr && ctx.table->norm_rope(ctx, qk_TE, in)) return;
  head_norm(ctx, heads_of(qk_TE, 0, in.num_heads, D), qk_TE.row_stride, heads_of(in.qkv_TE, 0, in.num_heads, D), in.qkv_TE.row_stride,
            in.q_norm_D, in.eps);
  head_norm(ctx, heads_of(qk_TE, Q, in.num_kv_heads, D), qk_TE.row_stride, heads_of(in.qkv_TE, Q, in.num_kv_heads, D), in.qkv_TE.row_stride,
            in.k_norm_D, in.eps);
  rope(ctx, heads_of(qk_TE, 0, in.num_heads + in.num_kv_heads, D), qk_TE.row_stride, in.positions_T, *in.rope, false);
}

void norm_rope_backward(OpContext& ctx, TensorView dqkv_TE, TensorView dq_norm_D, TensorView dk_norm_D, TensorView dqk_TE,
                        const HeadInputs& in) {
  const std::int64_t D = in.head_dim, Q = in.num_heads * D, K = in.num_kv_heads * D, T = in.qkv_TE.shape.num_rows();
  ShapeCheck c("norm_rope_backward", ctx);
  c.check("dqkv", dqkv_TE, "T W").check("dqk", dqk_TE, "T QK").check("qkv", in.qkv_TE, "T W").floating("dqk", dqk_TE);
  c.same_dtype("dqkv", dqkv_TE.dtype, "qkv", in.qkv_TE.dtype).same_dtype("dqk", dqk_TE.dtype, "qkv", in.qkv_TE.dtype);
  c.extent("QK", Q + K, "num_heads, num_kv_heads").extent("W", Q + 2 * K, "num_heads, num_kv_heads");
  c.check("q_norm", in.q_norm_D, "D", DType::kF32).check("k_norm", in.k_norm_D, "D", DType::kF32).extent("D", D, "head_dim");
  c.check("dq_norm", dq_norm_D, "D", DType::kF32).check("dk_norm", dk_norm_D, "D", DType::kF32);
  c.check("positions", in.positions_T, "T", DType::kI32)
      .require(in.rope != nullptr && 2 * in.rope->num_pairs() <= D, "a rotary table of heads is wanted");
  if (T == 0) return;
  if (ctx.table->norm_rope_backward != nullptr && ctx.table->norm_rope_backward(ctx, dqkv_TE, dq_norm_D, dk_norm_D, dqk_TE, in)) return;
  rope(ctx, heads_of(dqk_TE, 0, in.num_heads + in.num_kv_heads, D), dqk_TE.row_stride, in.positions_T, *in.rope, true);
  const auto norm = [&](std::int64_t first, std::int64_t heads, TensorView dw, ConstTensorView w) {
    head_norm_backward(ctx, heads_of(dqkv_TE, first, heads, D), dqkv_TE.row_stride, dw, heads_of(dqk_TE, first, heads, D),
                       dqk_TE.row_stride, heads_of(in.qkv_TE, first, heads, D), in.qkv_TE.row_stride, w, in.eps);
  };
  norm(0, in.num_heads, dq_norm_D, in.q_norm_D);
  norm(Q, in.num_kv_heads, dk_norm_D, in.k_norm_D);
}

}  // namespace prl::ops
