#include "engine/sampler.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"

namespace prl::engine {
namespace {

bool masks_stop_tokens(const Draw& draw) noexcept {
  return draw.output_idx < draw.sequence->request->sampling.min_tokens && !draw.sequence->request->stop_ids.empty();
}

bool has_penalties(const wire::SamplingParams& s) noexcept {
  return s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
}

const std::vector<ops::LogitEdits::Seen>& seen_tokens(Sequence& sequence) {
  SeenTokens& seen = sequence.seen;
  if (seen.num_tokens == 0) {
    // Only repetition looks at the prompt.
    if (sequence.request->sampling.repetition_penalty != 1.0f) {
      std::vector<std::int32_t> ids(sequence.tokens.begin(), sequence.tokens.begin() + sequence.num_prompt_tokens);
      std::ranges::sort(ids);
      ids.erase(std::ranges::unique(ids).begin(), ids.end());
      for (const std::int32_t id : ids) seen.by_id.push_back({id, 0});
    }
    seen.num_tokens = sequence.num_prompt_tokens;
  }
  for (; seen.num_tokens < sequence.num_tokens(); ++seen.num_tokens) {
    const std::int32_t id = sequence.tokens[static_cast<std::size_t>(seen.num_tokens)];
    auto at = std::ranges::lower_bound(seen.by_id, id, {}, &ops::LogitEdits::Seen::id);
    if (at == seen.by_id.end() || at->id != id) at = seen.by_id.insert(at, {id, 0});
    ++at->count;
  }
  return seen.by_id;
}

void add_token_rule(ops::LogitEdits& edits, ops::LogitEdits::Row& row, Sequence& sequence, std::int64_t vocab_size) {
  const ResolvedRequest& request = *sequence.request;
  const std::size_t begin = edits.allowed.size();
  edits.allowed.resize(begin + static_cast<std::size_t>(ops::LogitEdits::words_per_row(vocab_size)));
  const std::span words = std::span(edits.allowed).subspan(begin);
  bool may_end = false;
  if (const auto& answer = sequence.rule_answer; answer && answer->is_ready.load(std::memory_order_acquire)) {
    std::ranges::fill(words, 0);
    std::copy_n(answer->allowed_words.begin(), std::min(answer->allowed_words.size(), words.size()), words.begin());
    may_end = answer->may_end;
    sequence.rule_cursor = answer->cursor;
  } else {
    may_end = request.sampling.token_rule->allow(sequence.output(), sequence.rule_cursor, words);
  }
  const auto word_of = [&](std::int32_t id) -> std::uint64_t& { return words[static_cast<std::size_t>(id) / 64]; };
  const auto bit_of = [](std::int32_t id) { return std::uint64_t{1} << (id % 64); };
  const auto is_any_open = [&] { return std::ranges::any_of(words, [](std::uint64_t word) { return word != 0; }); };
  std::vector<std::int32_t> closed;
  for (const std::int32_t id : request.stop_ids) {
    if (may_end) word_of(id) |= bit_of(id);
    if (may_end || (word_of(id) & bit_of(id)) == 0) continue;
    word_of(id) &= ~bit_of(id);
    closed.push_back(id);
  }
  if (!closed.empty() && !is_any_open())
    for (const std::int32_t id : closed) word_of(id) |= bit_of(id);
  row.has_allowed = true;
  if (!is_any_open()) row.not_allowed = std::numeric_limits<float>::quiet_NaN();
}

/// Last tokens of bad sequences whose other tokens the output ends with.
void append_bad_tokens(std::vector<std::int32_t>& out, const Sequence& sequence) {
  const std::span<const std::int32_t> output = sequence.output();
  for (const auto& bad : sequence.request->sampling.bad_sequences) {
    const std::span<const std::int32_t> before = std::span(bad).first(bad.size() - 1);
    if (before.size() <= output.size() && std::ranges::equal(before, output.last(before.size()))) out.push_back(bad.back());
  }
}

void add_allowed_tokens(ops::LogitEdits& edits, ops::LogitEdits::Row& row, const std::vector<std::int32_t>& ids, std::int64_t vocab_size) {
  const std::size_t begin = edits.allowed.size();
  edits.allowed.resize(begin + static_cast<std::size_t>(ops::LogitEdits::words_per_row(vocab_size)));
  for (const std::int32_t id : ids) edits.allowed[begin + static_cast<std::size_t>(id) / 64] |= std::uint64_t{1} << (id % 64);
  row.has_allowed = true;
}

/// Takes bad tokens out of what a token rule lets come; where it lets nothing else come, the rule wins.
void close_bad_tokens(std::span<std::uint64_t> words, const Sequence& sequence) {
  std::vector<std::int32_t> bad;
  append_bad_tokens(bad, sequence);
  std::vector<std::int32_t> closed;
  for (const std::int32_t id : bad) {
    std::uint64_t& word = words[static_cast<std::size_t>(id) / 64];
    const std::uint64_t bit = std::uint64_t{1} << (id % 64);
    if (word & bit) closed.push_back(id);
    word &= ~bit;
  }
  if (std::ranges::any_of(words, [](std::uint64_t word) { return word != 0; })) return;
  for (const std::int32_t id : closed) words[static_cast<std::size_t>(id) / 64] |= std::uint64_t{1} << (id % 64);
}

}  // namespace

bool needs_edit(const Draw& draw) noexcept { return draw.sequence->request->edits_logits || masks_stop_tokens(draw); }

void add_edits(ops::LogitEdits& edits, const Draw& draw, std::int32_t row_idx, std::int64_t vocab_size) {
  Sequence& sequence = *draw.sequence;
  const wire::SamplingParams& s = sequence.request->sampling;
  PRL_CHECK(draw.output_idx == sequence.num_output_tokens() + (draw.drawn_row >= 0 ? 1 : 0) + draw.num_drafts,
            "logits are edited by tokens that are not known");
  PRL_CHECK(draw.num_drafts == 0 || (!has_penalties(s) && !sequence.request->needs_every_token), "what may come next depends on a draft");
  PRL_CHECK(draw.drawn_row < 0 || !sequence.request->needs_every_token, "what may come next depends on a token that is not known");
  ops::LogitEdits::Row row;
  row.row = row_idx;
  row.num_biases = static_cast<std::int32_t>(s.logit_bias.size());
  for (const auto& [id, bias] : s.logit_bias) edits.biases.push_back({id, bias});
  if (has_penalties(s)) {
    const auto& seen = seen_tokens(sequence);
    edits.seen.insert(edits.seen.end(), seen.begin(), seen.end());
    row.num_seen = static_cast<std::int32_t>(seen.size());
    row.drawn_row = draw.drawn_row;
    row.repetition = s.repetition_penalty;
    row.frequency = s.frequency_penalty;
    row.presence = s.presence_penalty;
  }
  const auto masked_begin = static_cast<std::ptrdiff_t>(edits.masked.size());
  if (masks_stop_tokens(draw)) {
    const auto& stop_ids = sequence.request->stop_ids;
    edits.masked.insert(edits.masked.end(), stop_ids.begin(), stop_ids.end());
  }
  if (!s.bad_sequences.empty() && !s.token_rule) {
    append_bad_tokens(edits.masked, sequence);
    std::sort(edits.masked.begin() + masked_begin, edits.masked.end());  // each id once in a row
    edits.masked.erase(std::unique(edits.masked.begin() + masked_begin, edits.masked.end()), edits.masked.end());
  }
  row.num_masked = static_cast<std::int32_t>(std::ssize(edits.masked) - masked_begin);
  if (s.token_rule) {
    const std::size_t begin = edits.allowed.size();
    add_token_rule(edits, row, sequence, vocab_size);
    if (!s.bad_sequences.empty()) close_bad_tokens(std::span(edits.allowed).subspan(begin), sequence);
  } else if (!s.allowed_token_ids.empty()) {
    add_allowed_tokens(edits, row, s.allowed_token_ids, vocab_size);
  }
  edits.rows.push_back(row);
}

void Sampler::begin(TensorView logits_BV, std::span<const Draw> draws_B, TensorView drawn_B, ops::PendingSamples& pending) {
  PRL_CHECK(logits_BV.shape.num_rows() == static_cast<std::int64_t>(draws_B.size()), "{} rows of logits for {} sequences",
            logits_BV.shape.num_rows(), draws_B.size());
  set_edits(draws_B, logits_BV.shape.num_cols());
  ops::edit_logits(ctx_, logits_BV, drawn_B, edits_);
  set_rows(draws_B);
  ops::begin_sample(ctx_, pending, drawn_B, logits_BV, rows_);
}

bool Sampler::begin_head(ConstTensorView h_BH, const ops::LinearWeight& lm_head, std::span<const Draw> draws_B, TensorView drawn_B,
                         ops::PendingSamples& pending) {
  if (std::ranges::any_of(draws_B, needs_edit)) return false;
  set_rows(draws_B);
  return ops::begin_sample_head(ctx_, pending, drawn_B, h_BH, lm_head, rows_);
}

void Sampler::set_edits(std::span<const Draw> draws_B, std::int64_t vocab_size) {
  const auto lock = sequences_ != nullptr ? std::unique_lock(*sequences_) : std::unique_lock<std::mutex>();
  edits_.clear();
  for (std::size_t i = 0; i < draws_B.size(); ++i)
    if (needs_edit(draws_B[i])) add_edits(edits_, draws_B[i], static_cast<std::int32_t>(i), vocab_size);
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
    row.named_ids = s.logprob_token_ids;
    row.num_top_logprobs = row.named_ids.empty() ? s.logprobs.value_or(0) : 0;
    rows_.push_back(row);
  }
}

void Sampler::finish(std::span<ops::SampleResult> results_B, ops::PendingSamples& pending) {
  ops::finish_sample(ctx_, results_B, pending);
  // Masked tokens may fill up a short list of alternatives; they cannot be drawn.
  for (ops::SampleResult& result : results_B) {
    std::erase_if(result.top_logprobs, [](const auto& entry) { return !(entry.second > ops::kMaskedLogit * 1e-3f); });
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
