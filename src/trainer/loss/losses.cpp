#include "trainer/loss/losses.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace prl::trainer {

namespace {

// Fixed by the published form of the distillation loss; no configuration key exists for them.
constexpr double kRefMask = 0.2;
constexpr double kRefKlTau = 1e-3;

/// A mean over the values that a condition selects; 0 of none.
struct SafeMean {
  double sum = 0, count = 0;
  void add(double value, bool is_member = true) {
    if (!is_member) return;
    sum += value;
    count += 1;
  }
  double value() const { return count == 0 ? 0 : sum / count; }
};

double prob_gap(const TokenStreams& s, std::size_t i) {
  return std::exp(static_cast<double>(s.logp[i])) - std::exp(static_cast<double>(s.inference_logp[i]));
}

/// What default and ipo share: a trust region on the probability gap d decides which tokens keep the advantage term.
struct TrustRegionMetrics {
  SafeMean masked_kl, unmasked_kl, is_masked, is_masked_low, is_masked_high, positive, negative;
};

double loss_of(const config::DefaultLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  double sum = 0;
  TrustRegionMetrics t;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_rl(i)) continue;
    const double advantage = s.advantages[i], rho = s.log_ratio(i), r = std::exp(rho), d = prob_gap(s, i), w = s.rl_weight(i);
    const bool is_low = d < -c.dppo_mask_low;
    const bool is_high = d > c.dppo_mask_high;
    const bool is_dropped = advantage > 0 ? is_high : is_low;
    const double gain = is_dropped ? 0.0 : c.adv_tau * advantage * r;
    sum += w * (-gain + c.kl_tau * rho * rho);
    dlogp[i] += w * (-gain + 2 * c.kl_tau * rho);
    s.mark(i, is_dropped, advantage < 0 && is_low, advantage > 0 && is_high);
    t.masked_kl.add(mismatch_kl(rho), is_dropped);
    t.unmasked_kl.add(mismatch_kl(rho), !is_dropped);
    t.is_masked.add(is_dropped);
    t.is_masked_low.add(advantage < 0 && is_low);
    t.is_masked_high.add(advantage > 0 && is_high);
    t.positive.add(advantage > 0, is_dropped);
    t.negative.add(advantage < 0, is_dropped);
  }
  metrics.add("masked_mismatch_kl", t.masked_kl.value());
  metrics.add("unmasked_mismatch_kl", t.unmasked_kl.value());
  metrics.add("is_masked", t.is_masked.value());
  metrics.add("is_masked_low", t.is_masked_low.value());
  metrics.add("is_masked_high", t.is_masked_high.value());
  metrics.add("masked_advantage_positive", t.positive.value());
  metrics.add("masked_advantage_negative", t.negative.value());
  return sum;
}

double loss_of(const config::IpoLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  double sum = 0;
  TrustRegionMetrics t;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_rl(i)) continue;
    const double rho = s.log_ratio(i), w = s.rl_weight(i);
    const bool is_dropped = std::abs(prob_gap(s, i)) > c.ipo_threshold;
    const double gain = is_dropped ? 0.0 : c.adv_tau * s.advantages[i] * std::exp(rho);
    sum += w * (-gain + c.kl_tau * rho * rho);
    dlogp[i] += w * (-gain + 2 * c.kl_tau * rho);
    s.mark(i, is_dropped, prob_gap(s, i) < -c.ipo_threshold, prob_gap(s, i) > c.ipo_threshold);
    t.masked_kl.add(mismatch_kl(rho), is_dropped);
    t.unmasked_kl.add(mismatch_kl(rho), !is_dropped);
    t.is_masked.add(is_dropped);
  }
  metrics.add("masked_mismatch_kl", t.masked_kl.value());
  metrics.add("unmasked_mismatch_kl", t.unmasked_kl.value());
  metrics.add("is_masked", t.is_masked.value());
  return sum;
}

/// -min(r, clip) A + kl rho^2: grpo, opo, rloo and (kl 0) aipo. Like a clamp, a ratio above the clip has no gradient.
double clipped_ratio_loss(double clip_ratio, double adv_tau, double kl_tau, const TokenStreams& s, std::span<double> dlogp,
                          MetricPool& metrics) {
  double sum = 0;
  SafeMean clipped;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_rl(i)) continue;
    const double rho = s.log_ratio(i), r = std::exp(rho), w = s.rl_weight(i), scaled = adv_tau * s.advantages[i];
    const bool is_clipped = r > clip_ratio;
    sum += w * (-scaled * std::min(r, clip_ratio) + kl_tau * rho * rho);
    dlogp[i] += w * ((is_clipped ? 0.0 : -scaled * r) + 2 * kl_tau * rho);
    s.mark(i, is_clipped, false, is_clipped);
    clipped.add(is_clipped);
  }
  metrics.add("is_clipped", clipped.value());
  return sum;
}

double loss_of(const config::GrpoLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& m) {
  return clipped_ratio_loss(c.clip_ratio, c.adv_tau, c.kl_tau, s, dlogp, m);
}
double loss_of(const config::OpoLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& m) {
  return clipped_ratio_loss(c.clip_ratio, c.adv_tau, c.kl_tau, s, dlogp, m);
}
double loss_of(const config::RlooLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& m) {
  return clipped_ratio_loss(c.clip_ratio, c.adv_tau, c.kl_tau, s, dlogp, m);
}
double loss_of(const config::AipoLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& m) {
  return clipped_ratio_loss(c.clip_ratio, c.adv_tau, 0.0, s, dlogp, m);
}

double loss_of(const config::GspoLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  SafeMean mean_rho;
  for (std::size_t i = 1; i < s.size(); ++i) mean_rho.add(s.log_ratio(i), s.in_rl(i));
  const double sequence_rho = mean_rho.value();
  // Per token the value is stopgrad(sequence rho) with the gradient of lt, then clamp, exp and clamp: both clamps stop it.
  const double ratio = std::exp(std::min(sequence_rho, c.max_log_ratio));
  const bool is_clipped = sequence_rho > c.max_log_ratio || ratio > c.clip_ratio;
  const double norm = c.normalization == config::RatioLevel::kSequence ? 1.0 / mean_rho.count : 1.0;
  double sum = 0;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_rl(i)) continue;
    const double rho = s.log_ratio(i), w = s.rl_weight(i) * norm, scaled = c.adv_tau * s.advantages[i];
    sum += w * (-scaled * std::min(ratio, c.clip_ratio) + c.kl_tau * rho * rho);
    dlogp[i] += w * ((is_clipped ? 0.0 : -scaled * ratio) + 2 * c.kl_tau * rho);
    s.mark(i, is_clipped, false, is_clipped);
  }
  metrics.add("is_clipped", is_clipped);
  metrics.add("sequence_ratio", ratio);
  return sum;
}

double loss_of(const config::CispoLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  double sum = 0;
  SafeMean clipped;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_rl(i)) continue;
    const double rho = s.log_ratio(i), r = std::exp(rho), w = s.rl_weight(i);
    const double weight = std::clamp(r, std::min(c.clip_ratio_low, c.clip_ratio_high), c.clip_ratio_high) * c.adv_tau * s.advantages[i];
    sum += w * (-weight * s.logp[i] + c.kl_tau * rho * rho);
    dlogp[i] += w * (-weight + 2 * c.kl_tau * rho);
    s.mark(i, false, r<c.clip_ratio_low, r> c.clip_ratio_high);
    clipped.add(r < c.clip_ratio_low || r > c.clip_ratio_high);
  }
  metrics.add("is_clipped", clipped.value());
  return sum;
}

double loss_of(const config::MaskedLossConfig& c, const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  SafeMean mean_rho, masked_kl, unmasked_kl;
  double min_ratio = 0, max_ratio = 0;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_rl(i)) continue;
    const double r = std::exp(s.log_ratio(i));
    min_ratio = mean_rho.count == 0 ? r : std::min(min_ratio, r);
    max_ratio = mean_rho.count == 0 ? r : std::max(max_ratio, r);
    mean_rho.add(s.log_ratio(i));
  }
  const double geo_ratio = std::exp(mean_rho.value());
  // The sum is capped before the exponential so that a long sequence cannot overflow it.
  const double sequence_ratio = std::min(std::exp(std::min(mean_rho.sum, 10.0)), c.sequence_clip_high);
  const bool is_geo_low = geo_ratio<c.geo_mask_low, is_geo_high = geo_ratio> c.geo_mask_high;
  const bool is_sequence_low = min_ratio<c.sequence_mask_low, is_sequence_high = max_ratio> c.sequence_mask_high;
  const bool is_sequence_dropped = is_geo_low || is_geo_high || is_sequence_low || is_sequence_high;
  const bool is_sequence_type = c.ratio_type == config::RatioLevel::kSequence;
  const double norm = is_sequence_type ? 1.0 / mean_rho.count : 1.0;
  double sum = 0;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_rl(i)) continue;
    const double rho = s.log_ratio(i), r = std::exp(rho);
    const bool is_low = r<c.token_mask_low, is_high = r> c.token_mask_high;
    const bool is_dropped = is_low || is_high || is_sequence_dropped;
    masked_kl.add(mismatch_kl(rho), is_dropped);
    unmasked_kl.add(mismatch_kl(rho), !is_dropped);
    s.mark(i, is_dropped, is_low, is_high);
    metrics.add("is_masked", is_dropped);
    metrics.add("is_masked_low", is_low);
    metrics.add("is_masked_high", is_high);
    if (is_dropped) continue;
    double advantage = c.adv_tau * s.advantages[i];
    if (!s.ref_logp.empty()) {
      const double teacher_kl = static_cast<double>(s.ref_logp[i]) - static_cast<double>(s.logp[i]);
      advantage += c.teacher_tau * teacher_kl;
      metrics.add("teacher_kl", teacher_kl);
    }
    const double coefficient = s.rl_weight(i) * norm * (is_sequence_type ? sequence_ratio : r) * (advantage - c.kl_tau * rho);
    sum -= coefficient * s.logp[i];
    dlogp[i] -= coefficient;
  }
  metrics.add("masked_mismatch_kl", masked_kl.value());
  metrics.add("unmasked_mismatch_kl", unmasked_kl.value());
  metrics.add("sequence_masked_low", is_sequence_low);
  metrics.add("sequence_masked_high", is_sequence_high);
  metrics.add("geo_masked_low", is_geo_low);
  metrics.add("geo_masked_high", is_geo_high);
  metrics.add("geo_seq_ratio", geo_ratio);
  return sum;
}

double loss_of(const config::CustomLossConfig& c, const TokenStreams&, std::span<double>, MetricPool&) {
  fail(ErrorCode::kInternal, "[trainer.loss] the loss {} is of whole rows", c.import_path.value_or("custom"));
}

}  // namespace

bool has_rl(const TokenStreams& s) noexcept {
  for (std::size_t i = 1; i < s.size(); ++i)
    if (s.in_rl(i)) return true;
  return false;
}

LossDivisor divisor_of(const config::LossConfig& loss) noexcept {
  if (const auto* gspo = std::get_if<config::GspoLossConfig>(&loss))
    return gspo->normalization == config::RatioLevel::kSequence ? LossDivisor::kSequences : LossDivisor::kTokens;
  if (const auto* masked = std::get_if<config::MaskedLossConfig>(&loss))
    return masked->ratio_type == config::RatioLevel::kSequence ? LossDivisor::kMicroBatches : LossDivisor::kTokens;
  return LossDivisor::kTokens;
}

double rl_loss(const config::LossConfig& loss, const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  if (!has_rl(s)) return 0;
  return std::visit([&](const auto& c) { return loss_of(c, s, dlogp, metrics); }, loss);
}

double ref_kl_loss(const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  double sum = 0;
  SafeMean masked_kl, unmasked_kl, is_masked, ref_kl;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_ref_kl(i)) continue;
    if (s.ref_logp.empty())
      fail(ErrorCode::kInvalidArgument,
           "[loss] tokens carry ref_kl weights but the sample has no reference log-probabilities: the algorithm must ask its teacher for "
           "them");
    const double w = s.ref_kl_weights[i], rho = s.log_ratio(i), r = std::exp(rho);
    const double signal = static_cast<double>(s.ref_logp[i]) - static_cast<double>(s.logp[i]);
    const bool is_dropped = s.advantages[i] > 0 ? prob_gap(s, i) > kRefMask : prob_gap(s, i) < -kRefMask;
    const double gain = is_dropped ? 0.0 : signal * r;
    sum += w * (-gain + kRefKlTau * rho * rho);
    dlogp[i] += w * (-gain + 2 * kRefKlTau * rho);
    ref_kl.add(-signal);
    masked_kl.add(mismatch_kl(rho), is_dropped);
    unmasked_kl.add(mismatch_kl(rho), !is_dropped);
    is_masked.add(is_dropped);
  }
  if (is_masked.count == 0) return 0;
  metrics.add("ref_kl", ref_kl.value());
  metrics.add("teacher_kl", -ref_kl.value());
  metrics.add("ref_kl/is_masked", is_masked.value());
  metrics.add("ref_kl/masked_mismatch_kl", masked_kl.value());
  metrics.add("ref_kl/unmasked_mismatch_kl", unmasked_kl.value());
  return sum;
}

double ce_loss(const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics) {
  double sum = 0;
  SafeMean nll;
  for (std::size_t i = 1; i < s.size(); ++i) {
    if (!s.in_ce(i)) continue;
    sum -= static_cast<double>(s.ce_weights[i]) * s.logp[i];
    dlogp[i] -= s.ce_weights[i];
    nll.add(-static_cast<double>(s.logp[i]));
  }
  if (nll.count > 0) metrics.add("nll", nll.value());
  return sum;
}

}  // namespace prl::trainer
