#include "wire/checks.hpp"

#include <cmath>
#include <numeric>
#include <span>

#include "base/error.hpp"

namespace prl::wire {

namespace {

/// How far above 0 another engine's rounding may put the logarithm of a probability of 1.
constexpr float kLogprobRounding = 1e-5f;

/// The parts that samples and micro-batches share.
struct Checker {
  ErrorCode code;
  const char* what;
  std::size_t num_tokens;
  const std::vector<std::int32_t>* lengths = nullptr;  ///< null: one sequence
  const std::vector<std::string>* env_names = nullptr;
  std::string env_name;

  std::string env_of(std::size_t token) const {
    if (lengths == nullptr) return env_name;
    std::size_t end = 0;
    for (std::size_t s = 0; s < lengths->size(); ++s) {
      end += static_cast<std::size_t>((*lengths)[s]);
      if (token < end) return (*env_names)[s];
    }
    return {};
  }
  void size(const char* field, std::size_t found, bool may_be_empty) const {
    if (found == num_tokens || (may_be_empty && found == 0)) return;
    fail(code, "[{}] field {} has {} entries, input has {} tokens", what, field, found, num_tokens);
  }
  void finite(const char* field, std::span<const float> values) const {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!std::isfinite(values[i]))
        fail(code, "[{}] field {} is {} at token {} of environment '{}': every number must be finite", what, field, values[i], i,
             env_of(i));
  }
  void stream(const char* field, std::span<const float> values, bool may_be_empty) const {
    size(field, values.size(), may_be_empty);
    finite(field, values);
  }
  void not_negative(const char* field, std::span<const std::int32_t> values) const {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i] < 0)
        fail(code, "[{}] field {} is {} at token {} of environment '{}': must not be negative", what, field, values[i], i, env_of(i));
  }
  void log_probabilities(const char* field, std::span<const float> values) const {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i] > kLogprobRounding)
        fail(
            code,
            "[{}] field {} is {} at token {} of environment '{}': a log-probability is at most 0, so this is damaged or no log-probability",
            what, field, values[i], i, env_of(i));
  }
  void experts(const RoutedExperts& found) const {
    if (found.empty()) return;
    size("routed_experts", static_cast<std::size_t>(found.num_tokens()), false);
    if (found.num_tokens() * found.row_size() != static_cast<std::int64_t>(found.ids.size()))
      fail(code, "[{}] field routed_experts has {} numbers, which are no whole rows of {} layers and {} experts", what, found.ids.size(),
           found.num_layers, found.top_k);
  }
  void images(std::span<const PromptImage> found) const {
    std::int64_t before = 0, begin = 0;
    std::size_t sequence = 0;
    const auto end_of = [&](std::size_t s) { return lengths == nullptr ? static_cast<std::int64_t>(num_tokens) : begin + (*lengths)[s]; };
    for (const PromptImage& image : found) {
      const bool has_grid = image.pixels != nullptr && image.rows >= 1 && image.cols >= 1 && image.pixels->height % image.rows == 0 &&
                            image.pixels->width % image.cols == 0 && image.pixels->height / image.rows == image.pixels->width / image.cols;
      if (!has_grid)
        fail(code, "[{}] field images has a grid of {} x {} tokens, which does not divide its picture into squares", what, image.rows,
             image.cols);
      if (image.first < before || image.first >= static_cast<std::int64_t>(num_tokens))
        fail(code, "[{}] field images has one at token {}, after {} and within {} tokens is wanted", what, image.first, before, num_tokens);
      while (image.first >= end_of(sequence)) begin = end_of(sequence++);
      if (image.num_tokens() > end_of(sequence) - image.first)
        fail(code, "[{}] field images has one of {} tokens at token {}, where a sequence of environment '{}' ends before its last", what,
             image.num_tokens(), image.first, env_of(static_cast<std::size_t>(image.first)));
      before = image.end();
    }
  }
  void positive(const char* field, std::span<const float> values) const {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!(values[i] > 0))
        fail(code, "[{}] field {} is {} at token {} of environment '{}': must be above 0", what, field, values[i], i, env_of(i));
  }
};

}  // namespace

void check(const MicroBatch& b) {
  Checker c{ErrorCode::kCorrupt, "micro-batch", b.input_ids.size(), &b.sequence_lengths, &b.env_names, {}};
  if (b.input_ids.empty()) fail(ErrorCode::kCorrupt, "[micro-batch] field input_ids is empty: a micro-batch holds at least one token");
  std::int64_t total = 0;
  for (const std::int32_t n : b.sequence_lengths) {
    if (n <= 0) fail(ErrorCode::kCorrupt, "[micro-batch] field sequence_lengths holds {}: every sequence has at least one token", n);
    total += n;
  }
  if (total != static_cast<std::int64_t>(b.input_ids.size()))
    fail(ErrorCode::kCorrupt, "[micro-batch] field sequence_lengths adds up to {}, input has {} tokens", total, b.input_ids.size());
  if (b.env_names.size() != b.sequence_lengths.size())
    fail(ErrorCode::kCorrupt, "[micro-batch] field env_names has {} entries, there are {} sequences", b.env_names.size(),
         b.sequence_lengths.size());
  c.size("loss_mask", b.loss_mask.size(), false);
  c.size("position_ids", b.position_ids.size(), false);
  c.stream("advantages", b.advantages, false);
  c.stream("inference_logprobs", b.inference_logprobs, false);
  c.stream("temperatures", b.temperatures, false);
  c.stream("ref_logprobs", b.ref_logprobs, true);
  c.stream("rl_weights", b.rl_weights, true);
  c.stream("ce_weights", b.ce_weights, true);
  c.stream("ref_kl_weights", b.ref_kl_weights, true);
  c.experts(b.routed_experts);
  c.images(b.images);
  c.not_negative("input_ids", b.input_ids);
  c.not_negative("position_ids", b.position_ids);
  c.positive("temperatures", b.temperatures);
  c.log_probabilities("inference_logprobs", b.inference_logprobs);
  c.log_probabilities("ref_logprobs", b.ref_logprobs);
  std::size_t first = 0;
  for (std::size_t s = 0; s < b.sequence_lengths.size(); ++s) {
    const bool in_rl = b.loss_mask[first] != 0 && (b.rl_weights.empty() || b.rl_weights[first] != 0);
    const bool in_ce = !b.ce_weights.empty() && b.ce_weights[first] != 0;
    const bool in_ref = !b.ref_kl_weights.empty() && b.ref_kl_weights[first] != 0;
    if (in_rl || in_ce || in_ref)
      fail(ErrorCode::kCorrupt,
           "[micro-batch] the first token of sequence {} (environment '{}') is in the {} loss, but nothing predicts it: mask it", s,
           b.env_names[s],
           in_rl   ? "rl"
           : in_ce ? "ce"
                   : "ref_kl");
    first += static_cast<std::size_t>(b.sequence_lengths[s]);
  }
}

void check(const TrainingSample& s) {
  Checker c{ErrorCode::kInvalidArgument, "training sample", s.token_ids.size(), nullptr, nullptr, s.env_name};
  if (s.token_ids.empty()) fail(ErrorCode::kInvalidArgument, "[training sample] environment '{}' gave a sample without tokens", s.env_name);
  c.size("mask", s.mask.size(), false);
  c.stream("logprobs", s.logprobs, false);
  c.stream("temperatures", s.temperatures, false);
  c.stream("advantages", s.advantages, true);
  c.stream("ref_logprobs", s.ref_logprobs, true);
  c.stream("rl_weights", s.rl_weights, true);
  c.stream("ce_weights", s.ce_weights, true);
  c.stream("ref_kl_weights", s.ref_kl_weights, true);
  c.experts(s.routed_experts);
  c.images(s.images);
  c.not_negative("token_ids", s.token_ids);
  c.positive("temperatures", s.temperatures);
  c.log_probabilities("logprobs", s.logprobs);
  c.log_probabilities("ref_logprobs", s.ref_logprobs);
  const bool in_rl = s.mask[0] != 0 && (s.rl_weights.empty() || s.rl_weights[0] != 0);
  if (in_rl || (!s.ce_weights.empty() && s.ce_weights[0] != 0) || (!s.ref_kl_weights.empty() && s.ref_kl_weights[0] != 0))
    fail(ErrorCode::kInvalidArgument,
         "[training sample] the first token of a sample of environment '{}' is in a loss, but nothing predicts it: mask it", s.env_name);
}

}  // namespace prl::wire
