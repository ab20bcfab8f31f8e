#include "engine/sampler.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"

namespace prl::engine {
namespace {

bool masks_stop_tokens(const Sequence& sequence) noexcept {
  return sequence.num_output_tokens() < sequence.request->sampling.min_tokens && !sequence.request->stop_ids.empty();
}

void apply_penalties(std::span<float> logits_V, const Sequence& sequence, std::span<std::int32_t> counts_V) {
  const wire::SamplingParams& s = sequence.request->sampling;
  // First the tokens of the output with their counts, then those of the prompt that did not occur in it. A visited token's
  // count becomes -1, so that each is handled once.
  const auto output = sequence.output();
  for (const std::int32_t id : output) ++counts_V[static_cast<std::size_t>(id)];
  const auto visit = [&](std::int32_t id, bool is_output) {
    std::int32_t& count = counts_V[static_cast<std::size_t>(id)];
    if (count < 0) return;
    float& logit = logits_V[static_cast<std::size_t>(id)];
    logit = logit > 0.0f ? logit / s.repetition_penalty : logit * s.repetition_penalty;
    if (is_output) logit -= s.frequency_penalty * static_cast<float>(count) + s.presence_penalty;
    count = -1;
  };
  for (const std::int32_t id : output) visit(id, true);
  if (s.repetition_penalty != 1.0f) {
    for (const std::int32_t id : sequence.request->prompt_ids) visit(id, false);
  }
  for (const std::int32_t id : sequence.tokens) counts_V[static_cast<std::size_t>(id)] = 0;
}

}  // namespace

bool needs_edit(const Sequence& sequence) noexcept { return sequence.request->edits_logits || masks_stop_tokens(sequence); }

void edit_logits(std::span<float> logits_V, const Sequence& sequence, std::span<std::int32_t> counts_V) {
  const wire::SamplingParams& s = sequence.request->sampling;
  for (const auto& [id, bias] : s.logit_bias) logits_V[static_cast<std::size_t>(id)] += bias;
  if (s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f)
    apply_penalties(logits_V, sequence, counts_V);
  if (masks_stop_tokens(sequence)) {
    for (const std::int32_t id : sequence.request->stop_ids) logits_V[static_cast<std::size_t>(id)] = kMaskedLogit;
  }
}

void apply_token_rule(std::span<float> logits_V, Sequence& sequence, std::span<std::uint64_t> words) {
  const ResolvedRequest& request = *sequence.request;
  const bool may_end = request.sampling.token_rule->allow(sequence.output(), sequence.rule_cursor, words);
  const auto word_of = [&](std::int32_t id) -> std::uint64_t& { return words[static_cast<std::size_t>(id) / 64]; };
  const auto bit_of = [](std::int32_t id) { return std::uint64_t{1} << (id % 64); };
  const auto is_any_open = [&] { return std::any_of(words.begin(), words.end(), [](std::uint64_t word) { return word != 0; }); };
  std::vector<std::int32_t> closed;
  for (const std::int32_t id : request.stop_ids) {
    if (may_end) word_of(id) |= bit_of(id);
    if (may_end || (word_of(id) & bit_of(id)) == 0) continue;
    word_of(id) &= ~bit_of(id);
    closed.push_back(id);
  }
  if (!closed.empty() && !is_any_open())
    for (const std::int32_t id : closed) word_of(id) |= bit_of(id);
  const float masked = is_any_open() ? kMaskedLogit : std::numeric_limits<float>::quiet_NaN();
  for (std::size_t id = 0; id < logits_V.size(); ++id)
    if ((words[id / 64] >> (id % 64) & 1) == 0) logits_V[id] = masked;
}

Sampler::Sampler(ops::OpContext& ctx, std::int64_t vocab_size)
    : ctx_(ctx),
      counts_V_(static_cast<std::size_t>(vocab_size), 0),
      logits_V_(static_cast<std::size_t>(vocab_size)),
      rule_words_((static_cast<std::size_t>(vocab_size) + 63) / 64) {}

void Sampler::edit_row(TensorView logits_BV, std::int64_t row, Sequence& sequence) {
  float* const device_row = logits_BV.as<float>() + row * logits_BV.row_stride;
  const std::size_t num_bytes = logits_V_.size() * sizeof(float);
  ctx_.runtime->copy_to_host(logits_V_.data(), device_row, num_bytes);
  edit_logits(logits_V_, sequence, counts_V_);
  if (sequence.request->sampling.token_rule) apply_token_rule(logits_V_, sequence, rule_words_);
  ctx_.runtime->copy_from_host(device_row, logits_V_.data(), num_bytes);
}

void Sampler::begin(TensorView logits_BV, std::span<const Draw> draws_B, TensorView drawn_B, ops::PendingSamples& pending) {
  PRL_CHECK(logits_BV.shape.num_rows() == static_cast<std::int64_t>(draws_B.size()), "{} rows of logits for {} sequences",
            logits_BV.shape.num_rows(), draws_B.size());
  for (std::size_t i = 0; i < draws_B.size(); ++i) {
    Sequence& sequence = *draws_B[i].sequence;
    if (!needs_edit(sequence)) continue;
    PRL_CHECK(draws_B[i].output_idx == sequence.num_output_tokens(), "logits are edited by tokens that are not known");
    edit_row(logits_BV, static_cast<std::int64_t>(i), sequence);
  }
  set_rows(draws_B);
  ops::begin_sample(ctx_, pending, drawn_B, logits_BV, rows_);
}

bool Sampler::begin_head(ConstTensorView h_BH, const ops::LinearWeight& lm_head, std::span<const Draw> draws_B, TensorView drawn_B,
                         ops::PendingSamples& pending) {
  if (std::ranges::any_of(draws_B, [](const Draw& draw) { return needs_edit(*draw.sequence); })) return false;
  set_rows(draws_B);
  return ops::begin_sample_head(ctx_, pending, drawn_B, h_BH, lm_head, rows_);
}

void Sampler::set_rows(std::span<const Draw> draws_B) {
  rows_.clear();
  for (const Draw& draw : draws_B) {
    const wire::SamplingParams& s = draw.sequence->request->sampling;
    ops::SampleRow row;
    row.temperature = s.temperature;
    row.top_p = s.top_p;
    row.min_p = s.min_p;
    row.top_k = s.top_k;
    row.seed = draw.sequence->seed;
    row.position = static_cast<std::uint64_t>(draw.output_idx);
    row.num_top_logprobs = s.logprobs.value_or(0);
    rows_.push_back(row);
  }
}

void Sampler::finish(std::span<ops::SampleResult> results_B, ops::PendingSamples& pending) {
  ops::finish_sample(ctx_, results_B, pending);
  // Masked tokens may fill up a short list of alternatives; nobody could draw them.
  for (ops::SampleResult& result : results_B) {
    std::erase_if(result.top_logprobs, [](const auto& entry) { return !(entry.second > kMaskedLogit * 1e-3f); });
  }
}

void Sampler::top_logprobs(TensorView logits_BV, std::int32_t num_top, std::span<ops::SampleResult> results_B) {
  ops::SampleRow row;
  row.temperature = 0.0f;
  row.num_top_logprobs = num_top;
  rows_.assign(results_B.size(), row);
  ops::begin_sample(ctx_, pending_top_, {}, logits_BV, rows_);
  ops::finish_sample(ctx_, results_B, pending_top_);
}

}  // namespace prl::engine
