#include "ops/logit_edits.hpp"

#include <algorithm>

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {

void LogitEdits::clear() {
  rows.clear();
  biases.clear();
  seen.clear();
  masked.clear();
  allowed.clear();
}

void edit_logits(OpContext& ctx, TensorView logits_BV, ConstTensorView drawn_B, const LogitEdits& edits) {
  ShapeCheck c("edit_logits", ctx);
  c.check("logits", logits_BV, "B V", DType::kF32);
  if (drawn_B.data != nullptr) c.check("drawn", drawn_B, "D", DType::kI32);
  const std::int64_t B = logits_BV.shape.num_rows(), V = logits_BV.shape.num_cols();
  const std::int64_t D = drawn_B.data != nullptr ? drawn_B.shape.num_elements() : 0;
  std::int64_t num_biases = 0, num_seen = 0, num_masked = 0, num_words = 0;
  for (const LogitEdits::Row& row : edits.rows) {
    c.require(row.row >= 0 && row.row < B, "a row to edit is none of the logits'");
    c.require(row.drawn_row >= -1 && row.drawn_row < D, "a drawn row lies outside drawn");
    c.require(row.num_biases >= 0 && row.num_seen >= 0 && row.num_masked >= 0, "a row has fewer than no entries");
    num_biases += row.num_biases, num_seen += row.num_seen, num_masked += row.num_masked;
    if (row.has_allowed) num_words += LogitEdits::words_per_row(V);
  }
  c.extent("biases", num_biases, "rows").extent("biases", static_cast<std::int64_t>(edits.biases.size()), "biases");
  c.extent("seen", num_seen, "rows").extent("seen", static_cast<std::int64_t>(edits.seen.size()), "seen");
  c.extent("masked", num_masked, "rows").extent("masked", static_cast<std::int64_t>(edits.masked.size()), "masked");
  c.extent("allowed", num_words, "rows").extent("allowed", static_cast<std::int64_t>(edits.allowed.size()), "allowed");
  const auto is_token = [&](std::int32_t id) { return id >= 0 && id < V; };
  c.require(std::ranges::all_of(edits.biases, is_token, &LogitEdits::Bias::id) && std::ranges::all_of(edits.masked, is_token) &&
                std::ranges::all_of(edits.seen, is_token, &LogitEdits::Seen::id),
            "a token lies outside the vocabulary");
  if (!edits.rows.empty()) table_entry(ctx, ctx.table->edit_logits, "edit_logits")(ctx, logits_BV, drawn_B, edits);
}

}  // namespace prl::ops
