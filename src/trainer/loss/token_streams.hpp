#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace prl::trainer {

/// What a loss decided about each token: whether it gets no advantage term, and which bound of a trust region it is beyond.
struct TokenMarks {
  explicit TokenMarks(std::size_t n) : is_masked(n), is_low(n), is_high(n) {}
  std::vector<std::uint8_t> is_masked, is_low, is_high;
};

/// One packed sequence as the losses see it: host arrays of n tokens; entry i is about token i itself, so logp[i] was
/// predicted at position i - 1. Nothing predicts token 0: it never takes part. Natural logarithms.
struct TokenStreams {
  std::span<const float> logp;            ///< lt: of the trainer, under the sampling temperature
  std::span<const float> inference_logp;  ///< li: of the sampler
  std::span<const float> advantages;      ///< A
  std::span<const std::uint8_t> mask;     ///< m: sampled by the policy
  std::span<const float> ref_logp;        ///< empty: none
  std::span<const float> rl_weights;      ///< empty: 1
  std::span<const float> ce_weights;      ///< empty: 0
  std::span<const float> ref_kl_weights;  ///< empty: 0
  TokenMarks* marks = nullptr;            ///< filled by rl_loss unless null

  std::size_t size() const noexcept { return logp.size(); }
  double rl_weight(std::size_t i) const noexcept { return rl_weights.empty() ? 1.0 : static_cast<double>(rl_weights[i]); }
  bool in_rl(std::size_t i) const noexcept { return i > 0 && mask[i] != 0 && rl_weight(i) != 0; }
  bool in_ce(std::size_t i) const noexcept { return i > 0 && !ce_weights.empty() && ce_weights[i] != 0; }
  bool in_ref_kl(std::size_t i) const noexcept { return i > 0 && !ref_kl_weights.empty() && ref_kl_weights[i] != 0; }
  void mark(std::size_t i, bool is_masked, bool is_low, bool is_high) const noexcept {
    if (marks == nullptr) return;
    marks->is_masked[i] = is_masked ? 1 : 0;
    marks->is_low[i] = is_low ? 1 : 0;
    marks->is_high[i] = is_high ? 1 : 0;
  }
  double log_ratio(std::size_t i) const noexcept { return static_cast<double>(logp[i]) - static_cast<double>(inference_logp[i]); }
};

/// r - rho - 1 with r = exp(rho): never negative, exactly 0 when trainer and sampler agree.
inline double mismatch_kl(double log_ratio) noexcept { return std::exp(log_ratio) - log_ratio - 1.0; }

}  // namespace prl::trainer
