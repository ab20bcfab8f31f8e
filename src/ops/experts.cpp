#include "ops/experts.hpp"

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {
namespace {

void check_routing(ShapeCheck& c, const ConstTensorView& logits_TE, const ConstTensorView& ids_TK, const ConstTensorView& weights_TK) {
  c.check("logits", logits_TE, "T E", DType::kF32)
      .check("ids", ids_TK, "T K", DType::kI32)
      .check("weights", weights_TK, "T K", DType::kF32);
  const std::int64_t num_experts = logits_TE.shape.num_cols(), num_active = ids_TK.shape.num_cols();
  c.require(num_active >= 1 && num_active <= num_experts && num_active <= kMaxActiveExperts && num_experts <= kMaxExperts,
            "wanted 1 to 32 experts of a token, and at most 1024 in all");
}

void check_given(ShapeCheck& c, const ConstTensorView& given_TK) {
  if (given_TK.data != nullptr) c.check("given", given_TK, "T K", DType::kI32);
}

void check_rule(ShapeCheck& c, const ConstTensorView& logits_TE, const ConstTensorView& ids_TK, const ScoreRule& rule) {
  const std::int64_t num_experts = logits_TE.shape.num_cols(), num_groups = rule.num_groups;
  c.require(num_groups >= 1 && num_experts % num_groups == 0 && num_experts / num_groups >= 2, "wanted groups of two experts or more each");
  c.require(rule.num_active_groups >= 1 && rule.num_active_groups <= num_groups &&
                ids_TK.shape.num_cols() <= rule.num_active_groups * (num_experts / num_groups),
            "wanted active groups that have the experts of a token");
}

}  // namespace

void route(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE, bool renormalize,
           ConstTensorView given_TK) {
  ShapeCheck c("route", ctx);
  check_routing(c, logits_TE, ids_TK, weights_TK);
  check_given(c, given_TK);
  c.check("mass", mass_T, "T", DType::kF32);
  if (logits_TE.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->route, "route")(ctx, ids_TK, weights_TK, mass_T, logits_TE, renormalize, given_TK);
}

void route_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE, ConstTensorView ids_TK,
                    ConstTensorView weights_TK, bool renormalize) {
  ShapeCheck c("route_backward", ctx);
  check_routing(c, logits_TE, ids_TK, weights_TK);
  c.check("dlogits", dlogits_TE, "T E").check("dweights", dweights_TK, "T K", DType::kF32).floating("dlogits", dlogits_TE);
  if (logits_TE.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->route_backward, "route_backward")(ctx, dlogits_TE, dweights_TK, logits_TE, ids_TK, weights_TK, renormalize);
}

void route_by_score(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE,
                    ConstTensorView bias_PE, const ScoreRule& rule, ConstTensorView given_TK) {
  ShapeCheck c("route_by_score", ctx);
  check_routing(c, logits_TE, ids_TK, weights_TK);
  check_given(c, given_TK);
  check_rule(c, logits_TE, ids_TK, rule);
  c.check("mass", mass_T, "T", DType::kF32).check("bias", bias_PE, "P E", DType::kF32).contiguous("bias", bias_PE);
  if (logits_TE.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->route_by_score, "route_by_score")(ctx, ids_TK, weights_TK, mass_T, logits_TE, bias_PE, rule, given_TK);
}

void route_by_score_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE,
                             ConstTensorView ids_TK, const ScoreRule& rule) {
  ShapeCheck c("route_by_score_backward", ctx);
  check_routing(c, logits_TE, ids_TK, dweights_TK);
  check_rule(c, logits_TE, ids_TK, rule);
  c.check("dlogits", dlogits_TE, "T E").floating("dlogits", dlogits_TE);
  if (logits_TE.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->route_by_score_backward, "route_by_score_backward")(ctx, dlogits_TE, dweights_TK, logits_TE, ids_TK, rule);
}

void log_route(OpContext& ctx, TensorView log_SB, ConstTensorView ids_TK, ConstTensorView slot_T, std::int64_t first_entry) {
  ShapeCheck c("log_route", ctx);
  c.check("ids", ids_TK, "T K", DType::kI32).check("slots", slot_T, "T", DType::kI32).check("log", log_SB, "S B", DType::kU8);
  c.contiguous("log", log_SB).contiguous("slots", slot_T);
  c.require(first_entry >= 0 && 2 * (first_entry + ids_TK.shape.num_cols()) <= log_SB.shape.num_cols(),
            "wanted entries that a row of the log has");
  if (ids_TK.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->log_route, "log_route")(ctx, log_SB, ids_TK, slot_T, first_entry);
}

void place_rows(OpContext& ctx, TensorView begin_P, TensorView token_R, TensorView weight_R, TensorView slot_TK, ConstTensorView ids_TK,
                ConstTensorView weights_TK) {
  ShapeCheck c("place_rows", ctx);
  c.check("ids", ids_TK, "T K", DType::kI32).check("weights", weights_TK, "T K", DType::kF32).check("slots", slot_TK, "T K", DType::kI32);
  c.check("begin", begin_P, "P", DType::kI32).check("token", token_R, "R", DType::kI32).check("weight", weight_R, "R", DType::kF32);
  c.contiguous("ids", ids_TK).contiguous("weights", weights_TK).contiguous("slots", slot_TK);
  const std::int64_t num_rows = ids_TK.shape.num_elements(), num_experts = begin_P.shape.num_elements() - 1;
  c.require(token_R.shape.num_elements() == num_rows, "wanted a row for each of a token's experts");
  c.require(num_experts >= 1 && num_experts <= kMaxExperts && num_rows < (std::int64_t{1} << 31), "wanted 1 to 1024 experts");
  if (num_rows == 0) return;
  table_entry(ctx, ctx.table->place_rows, "place_rows")(ctx, begin_P, token_R, weight_R, slot_TK, ids_TK, weights_TK);
}

void swiglu_rows(OpContext& ctx, TensorView out_RF, ConstTensorView gate_up_R2F, ConstTensorView factors_R) {
  ShapeCheck c("swiglu_rows", ctx);
  c.check("out", out_RF, "R F").check("gate_up", gate_up_R2F, "R G").check("factors", factors_R, "R", DType::kF32);
  c.extent("G", 2 * out_RF.shape.num_cols(), "out");
  c.floating("gate_up", gate_up_R2F).same_dtype("out", out_RF.dtype, "gate_up", gate_up_R2F.dtype);
  if (out_RF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->swiglu_rows, "swiglu_rows")(ctx, out_RF, gate_up_R2F, factors_R);
}

void swiglu_rows_backward(OpContext& ctx, TensorView dgate_up_R2F, TensorView dfactors_R, ConstTensorView dout_RF,
                          ConstTensorView gate_up_R2F, ConstTensorView factors_R) {
  ShapeCheck c("swiglu_rows_backward", ctx);
  c.check("dout", dout_RF, "R F").check("gate_up", gate_up_R2F, "R G").check("dgate_up", dgate_up_R2F, "R G");
  c.check("factors", factors_R, "R", DType::kF32).check("dfactors", dfactors_R, "R", DType::kF32);
  c.extent("G", 2 * dout_RF.shape.num_cols(), "dout");
  c.floating("gate_up", gate_up_R2F).same_dtype("dout", dout_RF.dtype, "gate_up", gate_up_R2F.dtype);
  c.same_dtype("dgate_up", dgate_up_R2F.dtype, "gate_up", gate_up_R2F.dtype);
  if (dout_RF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->swiglu_rows_backward, "swiglu_rows_backward")(ctx, dgate_up_R2F, dfactors_R, dout_RF, gate_up_R2F, factors_R);
}

namespace {

void check_row_gates(ShapeCheck& c, const ConstTensorView& gates_T, const ConstTensorView& x_TH, const ConstTensorView& w_H) {
  c.check("x", x_TH, "T H").floating("x", x_TH).check("gates", gates_T, "T", DType::kF32).check("w", w_H, "H", DType::kF32);
  c.contiguous("gates", gates_T).contiguous("w", w_H);
}

}  // namespace

void row_gates(OpContext& ctx, TensorView gates_T, ConstTensorView x_TH, ConstTensorView w_H) {
  ShapeCheck c("row_gates", ctx);
  check_row_gates(c, gates_T, x_TH, w_H);
  if (x_TH.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->row_gates, "row_gates")(ctx, gates_T, x_TH, w_H);
}

void row_gates_backward(OpContext& ctx, TensorView dx_TH, TensorView dw_H, ConstTensorView dgates_T, ConstTensorView gates_T,
                        ConstTensorView x_TH, ConstTensorView w_H, bool accumulate) {
  ShapeCheck c("row_gates_backward", ctx);
  check_row_gates(c, gates_T, x_TH, w_H);
  c.check("dgates", dgates_T, "T", DType::kF32).contiguous("dgates", dgates_T);
  if (dx_TH.data != nullptr) c.check("dx", dx_TH, "T H").same_dtype("dx", dx_TH.dtype, "x", x_TH.dtype);
  if (dw_H.data != nullptr) c.check("dw", dw_H, "H", DType::kF32).contiguous("dw", dw_H);
  if (x_TH.shape.num_elements() == 0 || (dx_TH.data == nullptr && dw_H.data == nullptr)) return;
  table_entry(ctx, ctx.table->row_gates_backward, "row_gates_backward")(ctx, dx_TH, dw_H, dgates_T, gates_T, x_TH, w_H, accumulate);
}

namespace {

void check_gate(ShapeCheck& c, const ConstTensorView& rows_RF, const ConstTensorView& pairs_RG, const ConstTensorView& factors_R,
                const ClampedGate& gate) {
  c.check("rows", rows_RF, "R F").check("pairs", pairs_RG, "R G").check("factors", factors_R, "R", DType::kF32);
  c.extent("G", 2 * rows_RF.shape.num_cols(), "rows")
      .floating("pairs", pairs_RG)
      .same_dtype("rows", rows_RF.dtype, "pairs", pairs_RG.dtype);
  c.require(gate.limit > 0, "the limit is not positive");
}

void check_biases(ShapeCheck& c, const ConstTensorView& rows_RN, const ConstTensorView& biases_V, const ConstTensorView& begin_P) {
  c.check("rows", rows_RN, "R N").floating("rows", rows_RN).check("begin", begin_P, "P", DType::kI32);
  c.check("biases", biases_V, "V", DType::kF32).contiguous("biases", biases_V).contiguous("begin", begin_P);
  c.extent("V", (begin_P.shape.num_elements() - 1) * rows_RN.shape.num_cols(), "rows");
}

}  // namespace

void clamped_swiglu(OpContext& ctx, TensorView out_RF, ConstTensorView pairs_RG, ConstTensorView factors_R, const ClampedGate& gate) {
  ShapeCheck c("clamped_swiglu", ctx);
  check_gate(c, out_RF, pairs_RG, factors_R, gate);
  if (out_RF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->clamped_swiglu, "clamped_swiglu")(ctx, out_RF, pairs_RG, factors_R, gate);
}

void clamped_swiglu_backward(OpContext& ctx, TensorView dpairs_RG, TensorView dfactors_R, ConstTensorView dout_RF, ConstTensorView pairs_RG,
                             ConstTensorView factors_R, const ClampedGate& gate) {
  ShapeCheck c("clamped_swiglu_backward", ctx);
  check_gate(c, dout_RF, pairs_RG, factors_R, gate);
  c.check("dpairs", dpairs_RG, "R G", pairs_RG.dtype).check("dfactors", dfactors_R, "R", DType::kF32);
  if (dout_RF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->clamped_swiglu_backward, "clamped_swiglu_backward")(ctx, dpairs_RG, dfactors_R, dout_RF, pairs_RG, factors_R,
                                                                                  gate);
}

void add_expert_biases(OpContext& ctx, TensorView y_RN, ConstTensorView biases_V, ConstTensorView begin_P, ConstTensorView factors_R) {
  ShapeCheck c("add_expert_biases", ctx);
  check_biases(c, y_RN, biases_V, begin_P);
  if (factors_R.data != nullptr) c.check("factors", factors_R, "R", DType::kF32);
  if (y_RN.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->add_expert_biases, "add_expert_biases")(ctx, y_RN, biases_V, begin_P, factors_R);
}

void expert_biases_backward(OpContext& ctx, TensorView dbiases_V, ConstTensorView dy_RN, ConstTensorView begin_P, ConstTensorView token_R,
                            ConstTensorView factors_R, const TokenRange& tokens) {
  ShapeCheck c("expert_biases_backward", ctx);
  check_biases(c, dy_RN, dbiases_V, begin_P);
  c.check("token", token_R, "R", DType::kI32);
  if (factors_R.data != nullptr) c.check("factors", factors_R, "R", DType::kF32);
  if (dy_RN.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->expert_biases_backward, "expert_biases_backward")(ctx, dbiases_V, dy_RN, begin_P, token_R, factors_R, tokens);
}

void add_bias_dots(OpContext& ctx, TensorView dfactors_R, ConstTensorView dy_RN, ConstTensorView biases_V, ConstTensorView begin_P) {
  ShapeCheck c("add_bias_dots", ctx);
  check_biases(c, dy_RN, biases_V, begin_P);
  c.check("dfactors", dfactors_R, "R", DType::kF32);
  if (dy_RN.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->add_bias_dots, "add_bias_dots")(ctx, dfactors_R, dy_RN, biases_V, begin_P);
}

void sum_rows(OpContext& ctx, TensorView out_TC, ConstTensorView x_RC, ConstTensorView rows_TK, bool accumulate) {
  ShapeCheck c("sum_rows", ctx);
  c.check("out", out_TC, "T C").check("x", x_RC, "R C").check("rows", rows_TK, "T K", DType::kI32);
  c.floating("x", x_RC).same_dtype("out", out_TC.dtype, "x", x_RC.dtype);
  c.require(rows_TK.shape.num_cols() <= kMaxActiveExperts, "at most 32 rows are added");
  if (out_TC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->sum_rows, "sum_rows")(ctx, out_TC, x_RC, rows_TK, accumulate);
}

namespace {

/// What all products of groups have in common: rows of x or dx, and of y or dy.
void check_groups(ShapeCheck& c, const ConstTensorView& rows_RN, const ConstTensorView& rows_RK, const ConstTensorView& begin_P) {
  c.check("rows of outputs", rows_RN, "R N").check("rows of inputs", rows_RK, "R K").check("begin", begin_P, "P", DType::kI32);
  c.floating("rows of inputs", rows_RK).same_dtype("rows of outputs", rows_RN.dtype, "rows of inputs", rows_RK.dtype);
  c.contiguous("begin", begin_P);
}
void check_weights(ShapeCheck& c, std::span<const LinearWeight* const> weights, const ConstTensorView& begin_P) {
  c.require(!weights.empty() && begin_P.shape.num_elements() > 1 &&
                (begin_P.shape.num_elements() - 1) % static_cast<std::int64_t>(weights.size()) == 0,
            "wanted the begin of each group, as many for each rank, and the end");
  for (const LinearWeight* w : weights) c.extent("N", w->num_outputs(), "weight").extent("K", w->num_inputs(), "weight");
}

}  // namespace

bool grouped_linear(OpContext& ctx, TensorView y_RN, ConstTensorView x_RK, std::span<const LinearWeight* const> weights,
                    ConstTensorView begin_P) {
  if (ctx.table->grouped_linear == nullptr) return false;
  ShapeCheck c("grouped_linear", ctx);
  check_groups(c, y_RN, x_RK, begin_P);
  check_weights(c, weights, begin_P);
  return x_RK.shape.num_elements() == 0 || ctx.table->grouped_linear(ctx, y_RN, x_RK, weights, begin_P);
}

bool grouped_linear_backward_input(OpContext& ctx, TensorView dx_RK, ConstTensorView dy_RN, std::span<const LinearWeight* const> weights,
                                   ConstTensorView begin_P) {
  if (ctx.table->grouped_linear_backward_input == nullptr) return false;
  ShapeCheck c("grouped_linear_backward_input", ctx);
  check_groups(c, dy_RN, dx_RK, begin_P);
  check_weights(c, weights, begin_P);
  return dx_RK.shape.num_elements() == 0 || ctx.table->grouped_linear_backward_input(ctx, dx_RK, dy_RN, weights, begin_P);
}

bool grouped_linear_backward_weight(OpContext& ctx, std::span<const TensorView> dw, ConstTensorView dy_RN, ConstTensorView x_RK,
                                    ConstTensorView begin_P, bool accumulate) {
  if (ctx.table->grouped_linear_backward_weight == nullptr) return false;
  ShapeCheck c("grouped_linear_backward_weight", ctx);
  check_groups(c, dy_RN, x_RK, begin_P);
  c.require(static_cast<std::int64_t>(dw.size()) + 1 == begin_P.shape.num_elements(), "wanted the begin of each group, and the end");
  for (const TensorView& view : dw)
    if (view.data != nullptr) c.check("dw", view, "N K", DType::kF32).contiguous("dw", view);
  return ctx.table->grouped_linear_backward_weight(ctx, dw, dy_RN, x_RK, begin_P, accumulate);
}

bool can_mix_experts(OpContext& ctx, std::int64_t num_tokens, std::int64_t num_active, const ExpertMatrices& experts) {
  return ctx.table->can_mix_experts != nullptr && ctx.table->can_mix_experts(ctx, num_tokens, num_active, experts);
}

bool mix_experts(OpContext& ctx, TensorView out_TH, ConstTensorView x_TH, ConstTensorView ids_TK, ConstTensorView weights_TK,
                 const ExpertMatrices& experts, const SharedLayers& shared) {
  if (ctx.table->mix_experts == nullptr) return false;
  ShapeCheck c("mix_experts", ctx);
  c.require(!experts.gate_up.empty() && experts.gate_up.size() == experts.down.size(), "wanted two matrices of each expert");
  const LinearWeight &gate_up = *experts.gate_up[0], &down = *experts.down[0];
  const std::int64_t num_shards = shared.group != nullptr ? shared.group->size() : 1;
  c.extent("H", gate_up.num_inputs(), "gate_up").extent("H", num_shards * down.num_outputs(), "down");
  c.extent("F", num_shards * gate_up.num_outputs() / (experts.is_squared ? 1 : 2), "gate_up").extent("F", down.num_inputs(), "down");
  c.extent("P", down.num_outputs(), "down");
  c.check("out", out_TH, "T P", gate_up.dtype()).check("x", x_TH, "T H", gate_up.dtype());
  c.check("ids", ids_TK, "T K", DType::kI32).check("weights", weights_TK, "T K", DType::kF32);
  c.contiguous("ids", ids_TK).contiguous("weights", weights_TK);
  if (const BiasedExperts* biased = experts.biased; biased != nullptr) {
    const auto E = static_cast<std::int64_t>(experts.down.size());
    c.check("gate_up biases", biased->gate_up_V, "V", DType::kF32).extent("V", E * gate_up.num_outputs(), "gate_up");
    c.check("down biases", biased->down_V, "U", DType::kF32).extent("U", E * down.num_outputs(), "down");
  }
  c.require(!experts.is_squared || experts.biased == nullptr, "experts without gates have no biases");
  return x_TH.shape.num_elements() == 0 || ctx.table->mix_experts(ctx, out_TH, x_TH, ids_TK, weights_TK, experts, shared);
}

}  // namespace prl::ops
