#include "trainer/loss/batch_loss.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/error.hpp"
#include "trainer/loss/losses.hpp"
#include "wire/packing.hpp"

namespace prl::trainer {

namespace {

bool takes_part(const wire::MicroBatch& b, std::size_t i) {
  return b.loss_mask[i] != 0 || (!b.ce_weights.empty() && b.ce_weights[i] != 0) || (!b.ref_kl_weights.empty() && b.ref_kl_weights[i] != 0);
}

template <typename T>
std::span<const T> part(const std::vector<T>& values, std::size_t first, std::size_t n) {
  return values.empty() ? std::span<const T>{} : std::span<const T>(values).subspan(first, n);
}

/// Names the first token whose numbers cannot be trained on.
void check_finite(const TokenStreams& s, std::span<const double> dlogp, const std::string& env_name) {
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (std::isfinite(s.logp[i]) && std::isfinite(static_cast<float>(dlogp[i]))) continue;
    fail(ErrorCode::kNonFinite,
         "[loss] environment '{}', token {} of its sequence: trainer log-probability {}, sampler log-probability {}, advantage {} give "
         "loss gradient {}: "
         "if the trainer's value is not finite the weights have diverged (lower optim.lr or set optim.max_norm), else the sampler's value "
         "is wrong",
         env_name, i, s.logp[i], s.inference_logp[i], s.advantages[i], dlogp[i]);
  }
}

/// `logp` is of the row's tokens.
TokenStreams streams_of(const wire::MicroBatch& b, std::span<const float> logp, std::size_t first, std::size_t n) {
  TokenStreams s;
  s.logp = logp.subspan(first, n);
  s.inference_logp = part(b.inference_logprobs, first, n);
  s.advantages = part(b.advantages, first, n);
  s.mask = part(b.loss_mask, first, n);
  s.ref_logp = part(b.ref_logprobs, first, n);
  s.rl_weights = part(b.rl_weights, first, n);
  s.ce_weights = part(b.ce_weights, first, n);
  s.ref_kl_weights = part(b.ref_kl_weights, first, n);
  return s;
}

/// The answers of a custom loss for the sequences that have tokens in the rl component; empty for the others, and for all under other
/// losses.
std::vector<SequenceLoss> ask_custom(const config::LossConfig& loss, const LossFunction& function,
                                     std::span<const TokenStreams> sequences) {
  std::vector<SequenceLoss> answers(sequences.size());
  if (!std::holds_alternative<config::CustomLossConfig>(loss)) return answers;
  if (!function) fail(ErrorCode::kInternal, "[loss] type custom without the function that computes it");
  std::vector<TokenStreams> asked;
  std::vector<std::size_t> places;
  for (std::size_t k = 0; k < sequences.size(); ++k)
    if (has_rl(sequences[k])) {
      asked.push_back(sequences[k]);
      places.push_back(k);
    }
  if (asked.empty()) return answers;
  std::vector<SequenceLoss> given = function(asked);
  if (given.size() != asked.size())
    fail(ErrorCode::kInvalidArgument, "[loss] the custom loss answers for {} sequences, wanted {}", given.size(), asked.size());
  for (std::size_t k = 0; k < asked.size(); ++k) {
    if (given[k].dlogp.size() != asked[k].size())
      fail(ErrorCode::kInvalidArgument, "[loss] the custom loss gives {} gradients for a sequence of {} tokens", given[k].dlogp.size(),
           asked[k].size());
    answers[places[k]] = std::move(given[k]);
  }
  return answers;
}

/// What rl_loss does for the losses that are written here. Tokens outside the rl component get no gradient.
double custom_loss(const SequenceLoss& answer, const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  if (answer.dlogp.empty()) return 0;
  if (!std::isfinite(answer.loss)) fail(ErrorCode::kNonFinite, "[loss] the custom loss of a sequence is {}", answer.loss);
  for (std::size_t i = 1; i < s.size(); ++i)
    if (s.in_rl(i)) dlogp[i] += answer.dlogp[i];
  for (const auto& [name, value] : answer.metrics) metrics.add("custom_loss/" + name, value);
  return answer.loss;
}

}  // namespace

LossCounts& LossCounts::operator+=(const LossCounts& other) noexcept {
  rl_tokens += other.rl_tokens;
  ce_tokens += other.ce_tokens;
  ref_kl_tokens += other.ref_kl_tokens;
  rl_sequences += other.rl_sequences;
  micro_batches += other.micro_batches;
  return *this;
}

LossCounts count_losses(const wire::MicroBatch& b) noexcept {
  LossCounts counts;
  const wire::LossTokenCounts tokens = wire::count_loss_tokens(b);
  counts.rl_tokens = tokens.rl;
  counts.ce_tokens = tokens.ce;
  counts.ref_kl_tokens = tokens.ref_kl;
  counts.micro_batches = tokens.rl + tokens.ce + tokens.ref_kl > 0;
  std::size_t first = 0;
  for (const std::int32_t length : b.sequence_lengths) {
    const auto n = static_cast<std::size_t>(length);
    for (std::size_t i = first; i < first + n; ++i)
      if (b.loss_mask[i] != 0 && (b.rl_weights.empty() || b.rl_weights[i] != 0)) {
        ++counts.rl_sequences;
        break;
      }
    first += n;
  }
  return counts;
}

std::vector<std::int32_t> make_targets(const wire::MicroBatch& b) {
  std::vector<std::int32_t> targets(b.input_ids.size(), -1);
  std::size_t first = 0;
  for (const std::int32_t length : b.sequence_lengths) {
    const auto n = static_cast<std::size_t>(length);
    for (std::size_t i = first + 1; i < first + n; ++i)
      if (takes_part(b, i)) targets[i - 1] = b.input_ids[i];
    first += n;
  }
  return targets;
}

BatchLoss compute_batch_loss(const config::LossConfig& loss, const wire::MicroBatch& b, std::span<const float> logp_T,
                             std::span<const float> entropy_T, const LossCounts& counts, MetricPool& metrics, const LossHooks& hooks) {
  PRL_CHECK(logp_T.size() == b.input_ids.size() && entropy_T.size() == b.input_ids.size(), "{} logp and {} entropies for {} tokens",
            logp_T.size(), entropy_T.size(), b.input_ids.size());
  const auto divisor = [](std::int64_t n) { return static_cast<double>(std::max<std::int64_t>(n, 1)); };
  const LossDivisor kind = divisor_of(loss);
  const double rl_divisor = divisor(kind == LossDivisor::kTokens      ? counts.rl_tokens
                                    : kind == LossDivisor::kSequences ? counts.rl_sequences
                                                                      : counts.micro_batches);
  const double ce_divisor = divisor(counts.ce_tokens), ref_divisor = divisor(counts.ref_kl_tokens);

  BatchLoss result;
  result.dlogp_T.assign(b.input_ids.size(), 0.0f);
  // From predicting positions to tokens: token i was predicted at i - 1, and nothing predicts the first of a sequence.
  std::vector<float> logp(b.input_ids.size(), 0.0f);
  std::vector<TokenStreams> sequences;
  for (std::size_t first = 0; const std::int32_t length : b.sequence_lengths) {
    const auto n = static_cast<std::size_t>(length);
    std::copy_n(logp_T.begin() + static_cast<std::ptrdiff_t>(first), n - 1, logp.begin() + static_cast<std::ptrdiff_t>(first) + 1);
    sequences.push_back(streams_of(b, logp, first, n));
    first += n;
  }
  const std::vector<SequenceLoss> custom = ask_custom(loss, hooks.custom, sequences);
  std::vector<double> dlogp, part_dlogp;
  std::size_t first = 0;
  for (std::size_t sequence = 0; sequence < b.sequence_lengths.size(); ++sequence) {
    TokenStreams& s = sequences[sequence];
    const std::size_t n = s.size();
    const std::string& env_name = b.env_names[sequence];
    std::optional<TokenMarks> marks;
    if (hooks.on_sequence) s.marks = &marks.emplace(n);

    dlogp.assign(n, 0.0);
    const auto add = [&](double component_sum, double component_divisor) {
      result.loss += component_sum / component_divisor;
      for (std::size_t i = 0; i < n; ++i) dlogp[i] += part_dlogp[i] / component_divisor;
    };
    part_dlogp.assign(n, 0.0);
    const bool is_custom = std::holds_alternative<config::CustomLossConfig>(loss);
    add(is_custom ? custom_loss(custom[sequence], s, part_dlogp, metrics) : rl_loss(loss, s, part_dlogp, metrics), rl_divisor);
    part_dlogp.assign(n, 0.0);
    add(ce_loss(s, part_dlogp, metrics), ce_divisor);
    part_dlogp.assign(n, 0.0);
    add(ref_kl_loss(s, part_dlogp, metrics), ref_divisor);
    check_finite(s, dlogp, env_name);

    const std::string kl_name = "mismatch_kl/" + env_name, entropy_name = "entropy/" + env_name;
    for (std::size_t i = 1; i < n; ++i) {
      result.dlogp_T[first + i - 1] = static_cast<float>(dlogp[i]);
      const bool is_sampled = s.mask[i] != 0;
      if (!is_sampled && !s.in_ce(i)) continue;
      const double entropy = entropy_T[first + i - 1];
      metrics.add("entropy/all", entropy);
      if (!env_name.empty()) metrics.add(entropy_name, entropy);
      if (!is_sampled) continue;
      const double kl = mismatch_kl(s.log_ratio(i));
      metrics.add("mismatch_kl/all", kl);
      if (!env_name.empty()) metrics.add(kl_name, kl);
    }
    if (hooks.on_sequence) {
      std::vector<float> entropy(n, 0.0f);
      std::copy_n(entropy_T.begin() + static_cast<std::ptrdiff_t>(first), n - 1, entropy.begin() + 1);
      hooks.on_sequence({.row = b, .sequence = sequence, .first = first, .streams = s, .marks = *marks, .entropy = entropy});
    }
    first += n;
  }
  return result;
}

}  // namespace prl::trainer
