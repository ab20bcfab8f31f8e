#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/sequence.hpp"
#include "engine/step_plan.hpp"
#include "ops/lm_head.hpp"

namespace prl::engine {

/// Logit of a token that must not be drawn. Finite, so that a vocabulary chunk of only such tokens adds nothing instead of NaN.
inline constexpr float kMaskedLogit = -1e30f;

/// Changes the logits_V of the next token as the request asks: bias, then repetition, presence and frequency penalties,
/// then stop tokens masked until min_tokens. The order and the formulas are vLLM's.
///
/// `counts_V` is scratch: all zero before and after. Cost is that of the sequence's length, not of the vocabulary.
void edit_logits(std::span<float> logits_V, const Sequence& sequence, std::span<std::int32_t> counts_V);
/// Masks all tokens but those that the request's token rule (which must be there) lets come next. Stop tokens are open where the
/// text may end, and masked elsewhere unless nothing else could come. If no token may come at all, which takes output that
/// was not drawn under the rule, the row becomes NaN. `words` is scratch of at least logits_V.size() bits.
void apply_token_rule(std::span<float> logits_V, Sequence& sequence, std::span<std::uint64_t> words);
/// True if the logits of the sequence's next token must be changed before it is drawn.
bool needs_edit(const Sequence& sequence) noexcept;

/// A token to be drawn.
struct Draw {
  Sequence* sequence = nullptr;
  std::int64_t output_idx = 0;  ///< of the token; beyond the sequence's newest token by one if that is not known yet
};

/// Draws tokens from logits as each sequence asks. The draw of a token depends on its logits, the sequence's seed and the
/// index of the token in its output, on nothing else of the batch.
class Sampler {
 public:
  Sampler(ops::OpContext& ctx, std::int64_t vocab_size);
  /// One token per row, as ops::begin_sample. logits_BV: fp32, on the device of the context; rows that need editing are waited for and
  /// overwritten, and the tokens of their sequences must be known.
  void begin(TensorView logits_BV, std::span<const Draw> draws_B, TensorView drawn_B, ops::PendingSamples& pending);
  /// The same from hidden rows, as ops::begin_sample_head: false, and nothing is done, where logits are wanted.
  bool begin_head(ConstTensorView h_BH, const ops::LinearWeight& lm_head, std::span<const Draw> draws_B, TensorView drawn_B,
                  ops::PendingSamples& pending);
  /// results_B[i] is for draws_B[i]. A row without a finite maximum (the model produced NaN or infinity) gets a NaN log-probability.
  void finish(std::span<ops::SampleResult> results_B, ops::PendingSamples& pending);
  /// The `num_top` likeliest tokens of each row at temperature 1, best first.
  void top_logprobs(TensorView logits_BV, std::int32_t num_top, std::span<ops::SampleResult> results_B);

 private:
  void edit_row(TensorView logits_BV, std::int64_t row, Sequence& sequence);
  void set_rows(std::span<const Draw> draws_B);

  ops::OpContext& ctx_;
  std::vector<std::int32_t> counts_V_;
  std::vector<float> logits_V_;
  std::vector<std::uint64_t> rule_words_;
  std::vector<ops::SampleRow> rows_;
  ops::PendingSamples pending_top_;
};

}  // namespace prl::engine
