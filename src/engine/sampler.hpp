#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "engine/sequence.hpp"
#include "engine/step_plan.hpp"
#include "ops/lm_head.hpp"
#include "ops/logit_edits.hpp"

namespace prl::engine {

/// A token to be drawn.
struct Draw {
  Sequence* sequence = nullptr;
  std::int64_t output_idx = 0;  ///< of the token; beyond the sequence's newest token by one if that is not known yet,
  std::int32_t drawn_row = -1;  ///< but lies in this row of drawn_B,
  std::int64_t num_drafts = 0;  ///< and by as many as it has drafts before it
};

/// True if the logits of the token must be changed before it is drawn.
bool needs_edit(const Draw& draw) noexcept;
/// Adds what the request asks for to the edits of row `row`: bias, then repetition, presence and frequency penalties, then stop tokens
/// masked until min_tokens, and the last tokens of bad sequences that the output has begun. With allowed tokens all others are masked. A
/// token rule masks what it does not allow next: stop tokens are allowed where the text may end, and otherwise only if nothing else is; if
/// no token is allowed at all, which needs output that was not drawn under the rule, the row becomes NaN. Cost: linear in the sequence's
/// distinct tokens, with a token rule also in the vocabulary's bits.
void add_edits(ops::LogitEdits& edits, const Draw& draw, std::int32_t row, std::int64_t vocab_size);

/// Draws tokens from logits as each sequence asks. The draw of a token depends on its logits, the sequence's seed and the
/// index of the token in its output, on nothing else of the batch.
class Sampler {
 public:
  /// `sequences`: held while what sequences remember of their tokens is read and kept up, if others do it beside this one.
  explicit Sampler(ops::OpContext& ctx, std::mutex* sequences = nullptr) : ctx_(ctx), sequences_(sequences) {}
  /// One token per row, as ops::begin_sample. logits_BV: fp32, on the device of the context; rows that need editing are overwritten.
  /// drawn_B has the step's tokens in the end and those of the step before until then, which draws may refer to.
  void begin(TensorView logits_BV, std::span<const Draw> draws_B, TensorView drawn_B, ops::PendingSamples& pending);
  /// The same from hidden rows, as ops::begin_sample_head: false, and nothing is done, where logits are wanted.
  bool begin_head(ConstTensorView h_BH, const ops::LinearWeight& lm_head, std::span<const Draw> draws_B, TensorView drawn_B,
                  ops::PendingSamples& pending);
  /// results_B[i] is for draws_B[i]. A row without a finite maximum (the model produced NaN or infinity) gets a NaN log-probability.
  void finish(std::span<ops::SampleResult> results_B, ops::PendingSamples& pending);
  /// The `num_top` likeliest tokens of each row at temperature 1, best first.
  void top_logprobs(TensorView logits_BV, std::int32_t num_top, std::span<ops::SampleResult> results_B);

 private:
  void set_rows(std::span<const Draw> draws_B);
  void set_edits(std::span<const Draw> draws_B, std::int64_t vocab_size);

  ops::OpContext& ctx_;
  std::mutex* sequences_;
  ops::LogitEdits edits_;
  std::vector<ops::SampleRow> rows_;
  ops::PendingSamples pending_top_;
};

}  // namespace prl::engine
