#include "ops/lm_head.hpp"

#include <algorithm>
#include <cmath>

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {
namespace {

void check_rows(ShapeCheck& c, const LinearWeight& w, std::span<const std::int32_t> targets, std::span<const float> temperatures) {
  c.extent("T", static_cast<std::int64_t>(targets.size()), "targets")
      .extent("T", static_cast<std::int64_t>(temperatures.size()), "temperatures");
  for (const std::int32_t t : targets) c.require(t >= -1 && t < w.num_outputs(), "a target lies outside the vocabulary");
  for (const float t : temperatures) c.require(t > 0.0f && std::isfinite(t), "a temperature is not above 0");
  c.require(!w.has_bias(), "a head with a bias is not supported");
}

void check_kept(ShapeCheck& c, const OpContext& ctx, const LinearWeight& w, const ConstTensorView& kept) {
  if (kept.data == nullptr) return;
  c.require(keeps_logits(ctx), "this device keeps no logits");
  c.extent("B", kept_row_bytes(w.dtype(), w.num_outputs()), "kept_row_bytes()");
  c.check("kept", kept, "R B", DType::kU8).contiguous("kept", kept);
  c.require(reinterpret_cast<std::uintptr_t>(kept.data) % 16 == 0, "kept is not 16-byte aligned");
}

void check_draws(ShapeCheck& c, const TensorView& drawn_B, std::span<const SampleRow> rows_B) {
  const auto num_rows = static_cast<std::int64_t>(rows_B.size());
  c.extent("B", num_rows, "rows");
  if (drawn_B.data != nullptr) {
    c.check("drawn", drawn_B, "D", DType::kI32);
    c.require(drawn_B.shape.num_elements() >= num_rows, "drawn has no room for all rows");
  }
  for (const SampleRow& r : rows_B) {
    c.require(r.temperature >= 0.0f && std::isfinite(r.temperature), "a temperature is negative or not finite");
    c.require(r.top_p > 0.0f && r.top_p <= 1.0f, "top_p lies outside (0, 1]");
    c.require(r.min_p >= 0.0f && r.min_p <= 1.0f, "min_p lies outside [0, 1]");
  }
}

}  // namespace

void lm_head_logprob(OpContext& ctx, TensorView logp_T, TensorView entropy_T, TensorView lse_T, ConstTensorView h_TH, const LinearWeight& w,
                     std::span<const std::int32_t> targets_T, std::span<const float> temperatures_T, TensorView kept_RB) {
  ShapeCheck c("lm_head_logprob", ctx);
  c.extent("H", w.num_inputs(), "w").extent("V", w.num_outputs(), "w").check("h", h_TH, "T H", w.dtype());
  c.check("logp", logp_T, "T", DType::kF32).check("entropy", entropy_T, "T", DType::kF32).check("lse", lse_T, "T", DType::kF32);
  check_rows(c, w, targets_T, temperatures_T);
  check_kept(c, ctx, w, kept_RB);
  if (targets_T.empty()) return;
  table_entry(ctx, ctx.table->lm_head_logprob, "lm_head_logprob")(ctx, logp_T, entropy_T, lse_T, h_TH, w, targets_T, temperatures_T,
                                                                  kept_RB);
}

void lm_head_logprob_backward(OpContext& ctx, TensorView dh_TH, TensorView dw_VH, ConstTensorView dlogp_T, ConstTensorView lse_T,
                              ConstTensorView h_TH, const LinearWeight& w, std::span<const std::int32_t> targets_T,
                              std::span<const float> temperatures_T, bool accumulate, ConstTensorView kept_RB) {
  ShapeCheck c("lm_head_logprob_backward", ctx);
  c.extent("H", w.num_inputs(), "w")
      .extent("V", w.num_outputs(), "w")
      .check("h", h_TH, "T H", w.dtype())
      .check("dh", dh_TH, "T H", w.dtype());
  if (dw_VH.data != nullptr) c.check("dw", dw_VH, "V H", DType::kF32).contiguous("dw", dw_VH);
  c.check("dlogp", dlogp_T, "T", DType::kF32).check("lse", lse_T, "T", DType::kF32);
  c.require(w.has_backward(), "w was packed without its backward form");
  check_rows(c, w, targets_T, temperatures_T);
  check_kept(c, ctx, w, kept_RB);
  c.require(accumulate || !targets_T.empty(), "no tokens to form dw from");
  if (targets_T.empty()) return;
  table_entry(ctx, ctx.table->lm_head_logprob_backward, "lm_head_logprob_backward")(ctx, dh_TH, dw_VH, dlogp_T, lse_T, h_TH, w, targets_T,
                                                                                    temperatures_T, accumulate, kept_RB);
}

bool keeps_logits(const OpContext& ctx) noexcept { return ctx.table != nullptr && ctx.table->keeps_logits; }
std::int64_t kept_row_bytes(DType dtype, std::int64_t vocab_size) noexcept {
  return whole_chunks(vocab_size) * static_cast<std::int64_t>(size_of(dtype));
}

void sample(OpContext& ctx, std::span<SampleResult> out_B, ConstTensorView logits_BV, std::span<const SampleRow> rows_B) {
  PendingSamples pending;
  begin_sample(ctx, pending, {}, logits_BV, rows_B);
  finish_sample(ctx, out_B, pending);
}

void begin_sample(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView logits_BV,
                  std::span<const SampleRow> rows_B) {
  ShapeCheck c("sample", ctx);
  c.check("logits", logits_BV, "B V", DType::kF32);
  check_draws(c, drawn_B, rows_B);
  const std::int64_t V = logits_BV.shape.num_cols();
  c.require(V > 0, "the vocabulary is empty");
  for (const SampleRow& row : rows_B)
    c.require(std::ranges::all_of(row.named_ids, [V](std::int32_t id) { return id >= 0 && id < V; }), "a named token lies outside [0, V)");
  pending.num_rows = static_cast<std::int64_t>(rows_B.size());
  if (pending.num_rows > 0) table_entry(ctx, ctx.table->begin_sample, "begin_sample")(ctx, pending, drawn_B, logits_BV, rows_B);
}

bool begin_sample_head(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView h_BH, const LinearWeight& lm_head,
                       std::span<const SampleRow> rows_B) {
  if (ctx.table->begin_sample_head == nullptr || rows_B.empty()) return false;
  ShapeCheck c("sample_head", ctx);
  c.extent("H", lm_head.num_inputs(), "lm_head").check("h", h_BH, "B H", lm_head.dtype());
  check_draws(c, drawn_B, rows_B);
  if (!ctx.table->begin_sample_head(ctx, pending, drawn_B, h_BH, lm_head, rows_B)) return false;
  pending.num_rows = static_cast<std::int64_t>(rows_B.size());
  return true;
}

void finish_sample(OpContext& ctx, std::span<SampleResult> out_B, PendingSamples& pending) {
  const auto wanted = static_cast<std::int64_t>(out_B.size());
  if (wanted != pending.num_rows)
    fail(ErrorCode::kShape, "[sample] {} rows were drawn, results for {} are wanted", pending.num_rows, wanted);
  if (wanted > 0) table_entry(ctx, ctx.table->finish_sample, "finish_sample")(out_B, pending);
}

}  // namespace prl::ops
