#include "ops/cpu/bodies.hpp"

namespace prl::ops::cpu {
namespace {

void penalise(float* logits_V, const LogitEdits::Row& row, const LogitEdits::Seen* seen, const std::int32_t* drawn) {
  bool is_drawn_seen = false;
  for (std::int32_t i = 0; i < row.num_seen; ++i) {
    const bool is_drawn = drawn != nullptr && seen[i].id == *drawn;
    is_drawn_seen |= is_drawn;
    logits_V[seen[i].id] = penalised(logits_V[seen[i].id], seen[i].count + (is_drawn ? 1 : 0), row);
  }
  if (drawn != nullptr && !is_drawn_seen) logits_V[*drawn] = penalised(logits_V[*drawn], 1, row);
}

}  // namespace

void edit_logits(OpContext&, TensorView logits_BV, ConstTensorView drawn_B, const LogitEdits& edits) {
  const std::int64_t V = logits_BV.shape.num_cols();
  const LogitEdits::Bias* bias = edits.biases.data();
  const LogitEdits::Seen* seen = edits.seen.data();
  const std::int32_t* masked = edits.masked.data();
  const std::uint64_t* allowed = edits.allowed.data();
  for (const LogitEdits::Row& row : edits.rows) {
    float* const logits_V = logits_BV.as<float>() + row.row * logits_BV.row_stride;
    for (std::int32_t i = 0; i < row.num_biases; ++i, ++bias) logits_V[bias->id] += bias->value;
    penalise(logits_V, row, seen, row.drawn_row >= 0 ? drawn_B.as<std::int32_t>() + row.drawn_row : nullptr);
    seen += row.num_seen;
    for (std::int32_t i = 0; i < row.num_masked; ++i) logits_V[*masked++] = kMaskedLogit;
    if (!row.has_allowed) continue;
    for (std::int64_t id = 0; id < V; ++id)
      if ((allowed[id / 64] >> (id % 64) & 1) == 0) logits_V[id] = row.not_allowed;
    allowed += LogitEdits::words_per_row(V);
  }
}

}  // namespace prl::ops::cpu
