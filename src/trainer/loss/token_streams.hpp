#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

namespace prl::trainer {

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

  std::size_t size() const noexcept { return logp.size(); }
  double rl_weight(std::size_t i) const noexcept { return rl_weights.empty() ? 1.0 : static_cast<double>(rl_weights[i]); }
  bool in_rl(std::size_t i) const noexcept { return i > 0 && mask[i] != 0 && rl_weight(i) != 0; }
  bool in_ce(std::size_t i) const noexcept { return i > 0 && !ce_weights.empty() && ce_weights[i] != 0; }
  bool in_ref_kl(std::size_t i) const noexcept { return i > 0 && !ref_kl_weights.empty() && ref_kl_weights[i] != 0; }
  double log_ratio(std::size_t i) const noexcept { return static_cast<double>(logp[i]) - static_cast<double>(inference_logp[i]); }
};

/// r - rho - 1 with r = exp(rho): never negative, exactly 0 when trainer and sampler agree.
inline double mismatch_kl(double log_ratio) noexcept { return std::exp(log_ratio) - log_ratio - 1.0; }

}  // namespace prl::trainer
