#include "ops/delta_rule.hpp"

#include <algorithm>
#include <array>

#include "ops/attention.hpp"
#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {
namespace {

/// Whether some slot below num_slots is named twice. Called for every layer of every step: a bit per slot, a few thousand at a time.
bool is_some_slot_twice(std::span<const std::int32_t> slots, std::int64_t num_slots) {
  constexpr std::int64_t kAtOnce = 4096;
  for (std::int64_t first = 0; first < num_slots; first += kAtOnce) {
    std::array<std::uint64_t, kAtOnce / 64> seen{};
    for (const std::int32_t slot : slots) {
      const std::int64_t i = slot - first;
      if (i < 0 || i >= kAtOnce) continue;
      std::uint64_t& word = seen[static_cast<std::size_t>(i / 64)];
      const std::uint64_t bit = std::uint64_t{1} << (i % 64);
      if ((word & bit) != 0) return true;
      word |= bit;
    }
  }
  return false;
}

void check_sequences(ShapeCheck& c, const OpContext& ctx, const StateRows& rows, std::int64_t num_tokens) {
  if (rows.is_by_index()) {
    c.require(can_decode_by_index(ctx), "this device takes no sequences from its own memory");
    c.check("slot", rows.slot_B, "S", DType::kI32).check("context_len", rows.context_len_B, "S", DType::kI32);
    c.require(rows.slot_B.shape[0] == num_tokens && rows.start_S.empty(), "each sequence has one row");
    return;
  }
  c.require(!rows.start_S.empty() && rows.start_S.front() == 0 && rows.start_S.back() == num_tokens,
            "start_S must start at 0 and end at T");
  c.require(std::ranges::is_sorted(rows.start_S), "start_S must not fall");
  c.require(rows.slot_S.empty() || rows.slot_S.size() + 1 == rows.start_S.size(), "slot_S must have a slot for every sequence");
  c.require(rows.begin_S.size() == rows.slot_S.size(), "begin_S must be as long as slot_S");
}
/// `states`: [slots, ...], looked at where there are slots.
void check_slots(ShapeCheck& c, const StateRows& rows, const ConstTensorView& states) {
  if (rows.slot_S.empty()) return;
  c.contiguous("state", states);
  const std::int64_t num_slots = states.shape[0];
  c.require(std::ranges::all_of(rows.slot_S, [&](std::int32_t s) { return s >= 0 && s < num_slots; }),
            "slot_S names a slot outside the states");
  c.require(!is_some_slot_twice(rows.slot_S, num_slots), "two sequences have one slot");
  c.require(std::ranges::all_of(rows.begin_S, [](std::int32_t b) { return b >= 0; }), "an entry of begin_S is negative");
}
void check_anew(ShapeCheck& c, const StateRows& rows) {
  c.require(rows.slot_S.empty() && !rows.is_by_index(), "gradients are of sequences that begin anew: slot_S must be empty");
}

void check_conv(ShapeCheck& c, const ConstTensorView& x_TC, const ConstTensorView& weight_CW) {
  c.check("x", x_TC, "T C").floating("x", x_TC).check("weight", weight_CW, "C W", DType::kF32).contiguous("weight", weight_CW);
  c.require(weight_CW.shape[1] >= 2 && weight_CW.shape[1] <= 8, "a convolution has 2 to 8 taps");
}
void check_conv_bias(ShapeCheck& c, const ConstTensorView& bias_C) {
  if (bias_C.data != nullptr) c.check("bias", bias_C, "C", DType::kF32).contiguous("bias", bias_C);
}

void check_rule(ShapeCheck& c, const DeltaRule& in) {
  const std::int64_t M = in.num_key_heads, N = in.num_value_heads, K = in.key_dim, D = in.value_dim;
  const auto is_size = [](std::int64_t n) { return n >= 16 && n <= 256 && n % 16 == 0; };
  c.require(M > 0 && N > 0 && N % M == 0, "the number of value heads must be a multiple of that of key heads");
  c.require(is_size(K) && is_size(D), "sizes of keys and values must be multiples of 16 up to 256");
  c.extent("C", 2 * M * K + N * D, "the heads").extent("N", N, "num_value_heads").extent("V", N * D, "the value heads");
  c.check("qkv", in.qkv_TC, "T C").floating("qkv", in.qkv_TC).check("a", in.a_TN, "T N");
  c.same_dtype("a", in.a_TN.dtype, "qkv", in.qkv_TC.dtype);
  if (in.is_state_space()) {
    c.check("skip", in.skip_N, "N", DType::kF32);
    c.require(in.min_step >= 0 && in.min_step <= in.max_step, "steps must have limits of which the lower one is 0 or more");
  } else {
    c.check("b", in.b_TN, "T N").same_dtype("b", in.b_TN.dtype, "qkv", in.qkv_TC.dtype);
  }
  c.check("decay_rate", in.decay_rate_N, "N", DType::kF32).check("decay_bias", in.decay_bias_N, "N", DType::kF32);
}

/// Columns of queries and gates, and of the rest.
void check_gated_heads(ShapeCheck& c, const ConstTensorView& in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  c.check("in", in_TE, "T E").floating("in", in_TE);
  c.require(num_heads > 0 && head_dim > 0 && 2 * num_heads * head_dim <= in_TE.shape.num_cols(),
            "in has fewer columns than queries and gates");
}

}  // namespace

void causal_conv(OpContext& ctx, TensorView y_TC, ConstTensorView x_TC, ConstTensorView weight_CW, TensorView state_SWC,
                 const StateRows& rows, ConstTensorView bias_C) {
  ShapeCheck c("causal_conv", ctx);
  check_conv(c, x_TC, weight_CW);
  check_conv_bias(c, bias_C);
  c.check("y", y_TC, "T C").same_dtype("y", y_TC.dtype, "x", x_TC.dtype);
  check_sequences(c, ctx, rows, x_TC.shape[0]);
  if (!rows.slot_S.empty()) {
    c.extent("W-1", weight_CW.shape[1] - 1, "weight").check("state", state_SWC, "slots W-1 C");
    c.same_dtype("state", state_SWC.dtype, "x", x_TC.dtype);
  }
  check_slots(c, rows, state_SWC);
  if (x_TC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->causal_conv, "causal_conv")(ctx, y_TC, x_TC, weight_CW, state_SWC, rows, bias_C);
}

void causal_conv_backward(OpContext& ctx, TensorView dx_TC, TensorView dweight_CW, ConstTensorView dy_TC, ConstTensorView x_TC,
                          ConstTensorView weight_CW, const StateRows& rows, ConstTensorView bias_C, TensorView dbias_C) {
  ShapeCheck c("causal_conv_backward", ctx);
  check_conv(c, x_TC, weight_CW);
  check_conv_bias(c, bias_C);
  if (bias_C.data != nullptr) check_conv_bias(c.check("dbias", dbias_C, "C", DType::kF32), dbias_C);
  c.check("dx", dx_TC, "T C").check("dy", dy_TC, "T C").check("dweight", dweight_CW, "C W", DType::kF32).contiguous("dweight", dweight_CW);
  c.same_dtype("dx", dx_TC.dtype, "x", x_TC.dtype).same_dtype("dy", dy_TC.dtype, "x", x_TC.dtype);
  check_sequences(c, ctx, rows, x_TC.shape[0]);
  check_anew(c, rows);
  if (x_TC.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->causal_conv_backward, "causal_conv_backward")(ctx, dx_TC, dweight_CW, dy_TC, x_TC, weight_CW, rows, bias_C,
                                                                            dbias_C);
}

bool delta_rule_goes_in_chunks(DeviceKind device, DType dtype, std::int64_t key_dim, std::int64_t value_dim, RuleKind kind) noexcept {
  return kind == RuleKind::kGatedDelta && device == DeviceKind::kCuda && dtype == DType::kBF16 && key_dim == 128 && value_dim == 128;
}

std::int64_t delta_rule_state_size(DeviceKind device, DType dtype, std::int64_t num_key_heads, std::int64_t num_value_heads,
                                   std::int64_t key_dim, std::int64_t value_dim, RuleKind kind) noexcept {
  const std::int64_t state = num_value_heads * key_dim * value_dim;
  if (!delta_rule_goes_in_chunks(device, dtype, key_dim, value_dim, kind)) return state;
  const std::int64_t of_token =
      num_key_heads * (key_dim / 2 + 1) + num_value_heads * (value_dim + 1);  // a bfloat16 key, its scale; U, decay
  return state + kRuleChunk * of_token;
}

std::size_t delta_rule_backward_bytes(DType dtype, std::int64_t num_value_heads, std::int64_t key_dim, std::int64_t value_dim,
                                      std::int64_t num_tokens, RuleKind kind) noexcept {
  const std::int64_t width = num_value_heads * value_dim, of_gates = 8 * num_value_heads;
  std::int64_t floats = 0;
  if (delta_rule_goes_in_chunks(DeviceKind::kCuda, dtype, key_dim, value_dim, kind)) {
    const std::int64_t chunks = num_tokens * 5 / 4 / kRuleChunk + 1;  // some end with their sequences
    floats = (2 * key_dim + 2 * kRuleChunk) * chunks * width;
  } else {
    constexpr std::int64_t kWindow = 256, kBlocks = 264, kColumns = 32;
    const std::int64_t places = std::min(num_tokens, kWindow * std::max<std::int64_t>(1, kBlocks * kColumns / width));
    floats = (num_tokens / kWindow + 1 + places / 3) * key_dim * width;
  }
  return static_cast<std::size_t>(floats + num_tokens * of_gates) * sizeof(float);
}

void delta_rule(OpContext& ctx, TensorView out_TV, TensorView state_SF, const DeltaRule& in, const StateRows& rows) {
  ShapeCheck c("delta_rule", ctx);
  check_rule(c, in);
  c.check("out", out_TV, "T V").same_dtype("out", out_TV.dtype, "qkv", in.qkv_TC.dtype);
  check_sequences(c, ctx, rows, in.qkv_TC.shape[0]);
  if (!rows.slot_S.empty() || rows.is_by_index())
    c.extent("F",
             delta_rule_state_size(ctx.runtime->device().kind, in.qkv_TC.dtype, in.num_key_heads, in.num_value_heads, in.key_dim,
                                   in.value_dim, in.kind),
             "delta_rule_state_size")
        .check("state", state_SF, "slots F", DType::kF32);
  check_slots(c, rows, state_SF);
  if (out_TV.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->delta_rule, "delta_rule")(ctx, out_TV, state_SF, in, rows);
}

void delta_rule_backward(OpContext& ctx, const DeltaRuleGrads& grads, ConstTensorView dout_TV, const DeltaRule& in, const StateRows& rows) {
  ShapeCheck c("delta_rule_backward", ctx);
  check_rule(c, in);
  c.check("dout", dout_TV, "T V").check("dqkv", grads.dqkv_TC, "T C").check("da", grads.da_TN, "T N");
  if (!in.is_state_space()) c.check("db", grads.db_TN, "T N").same_dtype("db", grads.db_TN.dtype, "qkv", in.qkv_TC.dtype);
  for (const ConstTensorView& v : {dout_TV, ConstTensorView(grads.dqkv_TC), ConstTensorView(grads.da_TN)})
    c.same_dtype("a gradient", v.dtype, "qkv", in.qkv_TC.dtype);
  c.require((grads.ddecay_rate_N.data == nullptr) == (grads.ddecay_bias_N.data == nullptr),
            "both gradients of the decay are wanted, or none");
  c.require(!in.is_state_space() || (grads.dskip_N.data == nullptr) == (grads.ddecay_rate_N.data == nullptr),
            "the gradient of the skip is wanted with those of the decay, or none");
  if (grads.dskip_N.data != nullptr) c.check("dskip", grads.dskip_N, "N", DType::kF32);
  if (grads.ddecay_rate_N.data != nullptr)
    c.check("ddecay_rate", grads.ddecay_rate_N, "N", DType::kF32).check("ddecay_bias", grads.ddecay_bias_N, "N", DType::kF32);
  check_sequences(c, ctx, rows, in.qkv_TC.shape[0]);
  check_anew(c, rows);
  if (dout_TV.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->delta_rule_backward, "delta_rule_backward")(ctx, grads, dout_TV, in, rows);
}

void gated_head_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps) {
  ShapeCheck c("gated_head_norm", ctx);
  c.check("y", y_TV, "T V").check("x", x_TV, "T V").check("gate", gate_TV, "T V").check("w", w_D, "D", DType::kF32).floating("x", x_TV);
  c.same_dtype("y", y_TV.dtype, "x", x_TV.dtype).same_dtype("gate", gate_TV.dtype, "x", x_TV.dtype);
  c.require(w_D.shape[0] > 0 && x_TV.shape.num_cols() % w_D.shape[0] == 0, "rows must be heads of D columns");
  if (x_TV.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->gated_head_norm, "gated_head_norm")(ctx, y_TV, x_TV, gate_TV, w_D, eps);
}

void gated_head_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_D, ConstTensorView dy_TV,
                              ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps) {
  ShapeCheck c("gated_head_norm_backward", ctx);
  c.check("dx", dx_TV, "T V")
      .check("dgate", dgate_TV, "T V")
      .check("dy", dy_TV, "T V")
      .check("x", x_TV, "T V")
      .check("gate", gate_TV, "T V");
  c.check("w", w_D, "D", DType::kF32).check("dw", dw_D, "D", DType::kF32).floating("x", x_TV);
  for (const DType t : {dx_TV.dtype, dgate_TV.dtype, dy_TV.dtype, gate_TV.dtype}) c.same_dtype("an activation", t, "x", x_TV.dtype);
  c.require(w_D.shape[0] > 0 && x_TV.shape.num_cols() % w_D.shape[0] == 0, "rows must be heads of D columns");
  if (x_TV.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->gated_head_norm_backward, "gated_head_norm_backward")(ctx, dx_TV, dgate_TV, dw_D, dy_TV, x_TV, gate_TV, w_D,
                                                                                    eps);
}

namespace {
void check_group_norm(ShapeCheck& c, const ConstTensorView& x_TV, const ConstTensorView& gate_TV, const ConstTensorView& w_V,
                      std::int64_t num_groups) {
  c.check("x", x_TV, "T V").check("gate", gate_TV, "T V").check("w", w_V, "V", DType::kF32).floating("x", x_TV);
  c.same_dtype("gate", gate_TV.dtype, "x", x_TV.dtype).contiguous("w", w_V);
  c.require(num_groups > 0 && w_V.shape[0] > 0 && w_V.shape[0] % num_groups == 0, "rows must be groups of the same size");
}
}  // namespace

void gated_group_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_V,
                      std::int64_t num_groups, float eps) {
  ShapeCheck c("gated_group_norm", ctx);
  check_group_norm(c, x_TV, gate_TV, w_V, num_groups);
  c.check("y", y_TV, "T V").same_dtype("y", y_TV.dtype, "x", x_TV.dtype);
  if (x_TV.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->gated_group_norm, "gated_group_norm")(ctx, y_TV, x_TV, gate_TV, w_V, num_groups, eps);
}

void gated_group_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_V, ConstTensorView dy_TV,
                               ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_V, std::int64_t num_groups, float eps) {
  ShapeCheck c("gated_group_norm_backward", ctx);
  check_group_norm(c, x_TV, gate_TV, w_V, num_groups);
  c.check("dx", dx_TV, "T V").check("dgate", dgate_TV, "T V").check("dy", dy_TV, "T V").check("dw", dw_V, "V", DType::kF32);
  for (const DType t : {dx_TV.dtype, dgate_TV.dtype, dy_TV.dtype}) c.same_dtype("an activation", t, "x", x_TV.dtype);
  if (x_TV.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->gated_group_norm_backward, "gated_group_norm_backward")(ctx, dx_TV, dgate_TV, dw_V, dy_TV, x_TV, gate_TV, w_V,
                                                                                      num_groups, eps);
}

void drop_gates(OpContext& ctx, TensorView out_TF, ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  ShapeCheck c("drop_gates", ctx);
  check_gated_heads(c, in_TE, num_heads, head_dim);
  c.extent("E - H D", in_TE.shape.num_cols() - num_heads * head_dim, "in").extent("E - H D", out_TF.shape.num_cols(), "out");
  c.check("out", out_TF, "T F").same_dtype("out", out_TF.dtype, "in", in_TE.dtype);
  if (out_TF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->drop_gates, "drop_gates")(ctx, out_TF, in_TE, num_heads, head_dim);
}

void drop_gates_backward(OpContext& ctx, TensorView din_TE, ConstTensorView dout_TF, std::int64_t num_heads, std::int64_t head_dim) {
  ShapeCheck c("drop_gates_backward", ctx);
  check_gated_heads(c, din_TE, num_heads, head_dim);
  c.extent("E - H D", din_TE.shape.num_cols() - num_heads * head_dim, "din").extent("E - H D", dout_TF.shape.num_cols(), "dout");
  c.check("dout", dout_TF, "T F").same_dtype("dout", dout_TF.dtype, "din", din_TE.dtype);
  if (dout_TF.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->drop_gates_backward, "drop_gates_backward")(ctx, din_TE, dout_TF, num_heads, head_dim);
}

void gate_heads(OpContext& ctx, TensorView y_TQ, ConstTensorView x_TQ, ConstTensorView in_TE, std::int64_t num_heads,
                std::int64_t head_dim) {
  ShapeCheck c("gate_heads", ctx);
  check_gated_heads(c, in_TE, num_heads, head_dim);
  c.extent("Q", num_heads * head_dim, "the heads").check("y", y_TQ, "T Q").check("x", x_TQ, "T Q");
  c.same_dtype("y", y_TQ.dtype, "in", in_TE.dtype).same_dtype("x", x_TQ.dtype, "in", in_TE.dtype);
  if (x_TQ.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->gate_heads, "gate_heads")(ctx, y_TQ, x_TQ, in_TE, num_heads, head_dim);
}

void gate_heads_backward(OpContext& ctx, TensorView dx_TQ, TensorView din_TE, ConstTensorView dy_TQ, ConstTensorView x_TQ,
                         ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  ShapeCheck c("gate_heads_backward", ctx);
  check_gated_heads(c, in_TE, num_heads, head_dim);
  c.extent("Q", num_heads * head_dim, "the heads").check("dx", dx_TQ, "T Q").check("dy", dy_TQ, "T Q").check("x", x_TQ, "T Q");
  c.check("din", din_TE, "T E");
  for (const DType t : {dx_TQ.dtype, din_TE.dtype, dy_TQ.dtype, x_TQ.dtype}) c.same_dtype("an activation", t, "in", in_TE.dtype);
  if (x_TQ.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->gate_heads_backward, "gate_heads_backward")(ctx, dx_TQ, din_TE, dy_TQ, x_TQ, in_TE, num_heads, head_dim);
}

}  // namespace prl::ops
