#include "trainer/loss/losses.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "trainer/loss/batch_loss.hpp"

namespace prl::trainer {
namespace {

using Vec = std::vector<double>;

/// A random sequence whose ratios reach all sides of every mask. Token 0 is masked, as a prompt is.
struct Sequence {
  std::vector<float> logp, inference_logp, advantages, ref_logp, rl_weights, ce_weights, ref_kl_weights;
  std::vector<std::uint8_t> mask;
  explicit Sequence(std::uint64_t seed, std::size_t n = 40) {
    Rng rng(seed);
    for (std::size_t i = 0; i < n; ++i) {
      logp.push_back(-0.05f - 3.0f * static_cast<float>(rng.next_double()));
      inference_logp.push_back(std::min(-0.01f, logp[i] + 1.2f * static_cast<float>(rng.next_normal())));
      advantages.push_back(i % 5 == 3 ? 0.0f : static_cast<float>(rng.next_normal()));
      ref_logp.push_back(-3.0f * static_cast<float>(rng.next_double()));
      rl_weights.push_back(i % 7 == 2 ? 0.0f : 0.5f + static_cast<float>(rng.next_double()));
      ce_weights.push_back(i > 0 && i % 3 == 0 ? 0.3f : 0.0f);
      ref_kl_weights.push_back(i > 0 && i % 4 == 1 ? 0.7f : 0.0f);
      mask.push_back(i > 0 && i % 6 != 5);
    }
  }
  TokenStreams streams() const {
    TokenStreams s;
    s.logp = logp, s.inference_logp = inference_logp, s.advantages = advantages, s.mask = mask;
    s.ref_logp = ref_logp, s.rl_weights = rl_weights, s.ce_weights = ce_weights, s.ref_kl_weights = ref_kl_weights;
    return s;
  }
};

/// A loss written down once more, literally: `lt` is differentiated, `sg` is the same value behind a stop-gradient.
using Reference = std::function<double(const TokenStreams& s, const Vec& lt, const Vec& sg)>;
using Loss = std::function<double(const TokenStreams& s, std::span<double> dlogp, MetricPool&)>;

void expect_matches(const Loss& loss, const Reference& reference, bool may_be_flat = false) {
  double moved = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Sequence sequence(seed);
    const TokenStreams s = sequence.streams();
    const Vec at(s.logp.begin(), s.logp.end());
    Vec gradient(s.size(), 0.25);  // what was there before must stay
    MetricPool metrics;
    const double value = loss(s, gradient, metrics);
    ASSERT_NEAR(value, reference(s, at, at), 1e-9 * (1 + std::abs(value)));
    for (std::size_t i = 0; i < s.size(); ++i) {
      const double h = 1e-6;
      Vec up = at, down = at;
      up[i] += h;
      down[i] -= h;
      const double numeric = (reference(s, up, at) - reference(s, down, at)) / (2 * h);
      ASSERT_NEAR(gradient[i] - 0.25, numeric, 1e-5 * (1 + std::abs(numeric))) << "seed " << seed << " token " << i;
      moved += std::abs(numeric);
    }
  }
  EXPECT_TRUE(may_be_flat || moved > 1) << "the reference has no gradient: the comparison proves nothing";
}

Loss rl(config::LossConfig config) {
  return [config](const TokenStreams& s, std::span<double> d, MetricPool& m) { return rl_loss(config, s, d, m); };
}

TEST(Losses, DefaultMatchesItsFormula) {
  config::DefaultLossConfig c;
  c.kl_tau = 0.05, c.adv_tau = 1.5;
  expect_matches(rl(c), [c](const TokenStreams& s, const Vec& lt, const Vec& sg) {
    double sum = 0;
    for (std::size_t i = 0; i < lt.size(); ++i) {
      if (s.mask[i] == 0 || s.rl_weights[i] == 0) continue;
      const double li = s.inference_logp[i], a = s.advantages[i], d = std::exp(sg[i]) - std::exp(li), rho = lt[i] - li;
      const bool invalid = a > 0 ? d > c.dppo_mask_high : d < -c.dppo_mask_low;
      sum += s.rl_weights[i] * (-(invalid ? 0.0 : 1.0) * c.adv_tau * a * std::exp(rho) + c.kl_tau * rho * rho);
    }
    return sum;
  });
}

TEST(Losses, IpoMatchesItsFormula) {
  config::IpoLossConfig c;
  expect_matches(rl(c), [c](const TokenStreams& s, const Vec& lt, const Vec& sg) {
    double sum = 0;
    for (std::size_t i = 0; i < lt.size(); ++i) {
      if (s.mask[i] == 0) continue;
      const double li = s.inference_logp[i], rho = lt[i] - li;
      const bool keep = !(std::abs(std::exp(sg[i]) - std::exp(li)) > 0.1);
      sum += s.rl_weights[i] * (-(keep ? 1.0 : 0.0) * s.advantages[i] * std::exp(rho) + 1e-3 * rho * rho);
    }
    return sum;
  });
}

Reference clipped(double clip, double kl) {
  return [=](const TokenStreams& s, const Vec& lt, const Vec&) {
    double sum = 0;
    for (std::size_t i = 0; i < lt.size(); ++i) {
      if (s.mask[i] == 0) continue;
      const double rho = lt[i] - s.inference_logp[i];
      sum += s.rl_weights[i] * (-std::min(std::exp(rho), clip) * s.advantages[i] + kl * rho * rho);
    }
    return sum;
  };
}

TEST(Losses, ClippedRatioFamilyMatchesItsFormula) {
  config::GrpoLossConfig grpo;
  grpo.clip_ratio = 1.7, grpo.kl_tau = 0.1;
  expect_matches(rl(grpo), clipped(1.7, 0.1));
  config::OpoLossConfig opo;
  opo.clip_ratio = 2.0;
  expect_matches(rl(opo), clipped(2.0, 0));
  config::RlooLossConfig rloo;
  expect_matches(rl(rloo), clipped(8.0, 0));
  config::AipoLossConfig aipo;
  aipo.clip_ratio = 1.2;
  expect_matches(rl(aipo), clipped(1.2, 0));
}

TEST(Losses, GspoMatchesItsFormula) {
  for (const double clip : {8.0, 1.05})
    for (const auto normalization : {config::RatioLevel::kToken, config::RatioLevel::kSequence}) {
      config::GspoLossConfig c;
      c.clip_ratio = clip, c.normalization = normalization;
      expect_matches(rl(c), [c](const TokenStreams& s, const Vec& lt, const Vec& sg) {
        double rho = 0, n = 0;
        for (std::size_t i = 0; i < lt.size(); ++i)
          if (s.mask[i] != 0 && s.rl_weights[i] != 0) rho += sg[i] - s.inference_logp[i], n += 1;
        rho /= n;
        double sum = 0;
        for (std::size_t i = 0; i < lt.size(); ++i) {
          if (s.mask[i] == 0 || s.rl_weights[i] == 0) continue;
          const double straight_through = lt[i] - sg[i] + rho;
          sum += s.rl_weights[i] * -std::min(std::exp(std::min(straight_through, c.max_log_ratio)), c.clip_ratio) * s.advantages[i];
        }
        return c.normalization == config::RatioLevel::kSequence ? sum / n : sum;
      });
    }
}

TEST(Losses, CispoMatchesItsFormula) {
  config::CispoLossConfig c;
  c.clip_ratio_low = 0.4, c.clip_ratio_high = 1.3;
  expect_matches(rl(c), [](const TokenStreams& s, const Vec& lt, const Vec& sg) {
    double sum = 0;
    for (std::size_t i = 0; i < lt.size(); ++i)
      if (s.mask[i] != 0) sum -= s.rl_weights[i] * std::clamp(std::exp(sg[i] - s.inference_logp[i]), 0.4, 1.3) * s.advantages[i] * lt[i];
    return sum;
  });
}

TEST(Losses, MaskedMatchesItsFormula) {
  for (const auto type : {config::RatioLevel::kToken, config::RatioLevel::kSequence})
    for (const double geo_high : {10.0, 0.9}) {
      config::MaskedLossConfig c;
      c.ratio_type = type, c.kl_tau = 0.02, c.teacher_tau = 0.3, c.token_mask_low = 0.5, c.token_mask_high = 2.0,
      c.geo_mask_high = geo_high;
      expect_matches(
          rl(c),
          [c](const TokenStreams& s, const Vec& lt, const Vec& sg) {
            double rho_sum = 0, n = 0, low = 1e9, high = 0;
            const auto member = [&](std::size_t i) { return s.mask[i] != 0 && s.rl_weights[i] != 0; };
            for (std::size_t i = 0; i < lt.size(); ++i)
              if (member(i)) {
                const double rho = sg[i] - s.inference_logp[i];
                rho_sum += rho, n += 1, low = std::min(low, std::exp(rho)), high = std::max(high, std::exp(rho));
              }
            const double geo = std::exp(rho_sum / n), sequence = std::min(std::exp(std::min(rho_sum, 10.0)), c.sequence_clip_high);
            if (geo < c.geo_mask_low || geo > c.geo_mask_high || low < c.sequence_mask_low || high > c.sequence_mask_high) return 0.0;
            double sum = 0;
            for (std::size_t i = 0; i < lt.size(); ++i) {
              if (!member(i)) continue;
              const double rho = sg[i] - s.inference_logp[i], r = std::exp(rho);
              if (r < c.token_mask_low || r > c.token_mask_high) continue;
              const double a = s.advantages[i] + c.teacher_tau * (s.ref_logp[i] - sg[i]);
              sum -= s.rl_weights[i] * (c.ratio_type == config::RatioLevel::kSequence ? sequence : r) * (a - c.kl_tau * rho) * lt[i];
            }
            return c.ratio_type == config::RatioLevel::kSequence ? sum / n : sum;
          },
          geo_high < 1);
    }
}

TEST(Losses, RefKlMatchesItsFormula) {
  expect_matches(ref_kl_loss, [](const TokenStreams& s, const Vec& lt, const Vec& sg) {
    double sum = 0;
    for (std::size_t i = 0; i < lt.size(); ++i) {
      const double li = s.inference_logp[i], rho = lt[i] - li;
      const double d = std::exp(sg[i]) - std::exp(li);
      const bool keep = !(s.advantages[i] > 0 ? d > 0.2 : d < -0.2);
      sum += s.ref_kl_weights[i] * (-(keep ? 1.0 : 0.0) * (s.ref_logp[i] - sg[i]) * std::exp(rho) + 1e-3 * rho * rho);
    }
    return sum;
  });
}

TEST(Losses, AStudentThatIsItsTeacherHasNoDistance) {
  const Sequence sequence(3);
  TokenStreams s = sequence.streams();
  s.inference_logp = s.logp, s.ref_logp = s.logp;
  MetricPool metrics;
  Vec gradient(s.size());
  EXPECT_EQ(ref_kl_loss(s, gradient, metrics), 0.0);
  EXPECT_EQ(gradient, Vec(s.size(), 0.0));
  EXPECT_EQ(metrics.mean("ref_kl"), 0.0);
  EXPECT_EQ(metrics.mean("teacher_kl"), 0.0);
}

TEST(Losses, CeMatchesItsFormula) {
  expect_matches(ce_loss, [](const TokenStreams& s, const Vec& lt, const Vec&) {
    double sum = 0;
    for (std::size_t i = 0; i < lt.size(); ++i) sum -= s.ce_weights[i] * lt[i];
    return sum;
  });
}

TEST(Losses, ZeroAdvantageTakesTheLowBranch) {
  // p fell from 0.9 to 0.1: d = -0.8 is beyond the low side, far from the high one.
  const std::vector<float> lt{0, std::log(0.1f)}, li{0, std::log(0.9f)}, zero{0, 0};
  const std::vector<std::uint8_t> mask{0, 1};
  TokenStreams s;
  s.logp = lt, s.inference_logp = li, s.advantages = zero, s.mask = mask;
  MetricPool metrics;
  Vec gradient(2);
  const double rho = static_cast<double>(lt[1]) - static_cast<double>(li[1]);
  EXPECT_DOUBLE_EQ(rl_loss(config::DefaultLossConfig{}, s, gradient, metrics), 1e-3 * rho * rho) << "the rho term stays on dropped tokens";
  EXPECT_DOUBLE_EQ(gradient[1], 2e-3 * rho);
  EXPECT_EQ(metrics.mean("is_masked"), 1.0);
  EXPECT_EQ(metrics.mean("is_masked_low"), 0.0) << "counted for A < 0 only";
  EXPECT_EQ(metrics.mean("masked_advantage_positive"), 0.0);
  EXPECT_NEAR(metrics.mean("masked_mismatch_kl"), std::exp(rho) - rho - 1, 1e-12);
}

TEST(Losses, RefKlWithoutReferenceIsAnError) {
  const Sequence sequence(1);
  TokenStreams s = sequence.streams();
  s.ref_logp = {};
  Vec gradient(40);
  MetricPool metrics;
  EXPECT_THROW(ref_kl_loss(s, gradient, metrics), Error);
}

// Whole rows: shift, normalisation, several sequences.

wire::MicroBatch row_of(std::vector<std::int32_t> lengths) {
  wire::MicroBatch b;
  b.sequence_lengths = lengths;
  for (const std::int32_t n : lengths) {
    b.env_names.push_back(fmt::format("env{}", n));
    for (std::int32_t p = 0; p < n; ++p) {
      b.input_ids.push_back(static_cast<std::int32_t>(100 * b.env_names.size()) + p);
      b.loss_mask.push_back(0);
      b.position_ids.push_back(p);
    }
  }
  b.advantages.assign(b.input_ids.size(), 0);
  b.inference_logprobs.assign(b.input_ids.size(), 0);
  b.temperatures.assign(b.input_ids.size(), 1);
  return b;
}

TEST(BatchLoss, TargetsStayInsideTheirSequence) {
  wire::MicroBatch b = row_of({3, 2});
  b.loss_mask = {0, 1, 1, 0, 0};
  b.ce_weights = {0, 0, 0, 0, 0.1f};
  EXPECT_EQ(make_targets(b), (std::vector<std::int32_t>{101, 102, -1, 201, -1}));
  b.loss_mask = {0, 0, 1, 0, 0};
  EXPECT_EQ(make_targets(b), (std::vector<std::int32_t>{-1, 102, -1, 201, -1})) << "positions that no loss needs are skipped";
}

// The worked examples: a masked NLL of 0.1 and 0.2 is 0.15; a weight scales the loss, never the count.
TEST(BatchLoss, MaskedNllWorkedExamples) {
  wire::MicroBatch b = row_of({4});
  b.ce_weights = {0, 1, 0, 1};
  const std::vector<float> logp{-0.1f, -5.0f, -0.2f, 0}, entropy(4, 1.0f);
  MetricPool metrics;
  BatchLoss loss = compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, count_losses(b), metrics);
  EXPECT_NEAR(loss.loss, 0.15, 1e-7);
  EXPECT_EQ(loss.dlogp_T, (std::vector<float>{-0.5f, 0, -0.5f, 0}));
  EXPECT_NEAR(metrics.mean("nll"), 0.15, 1e-7);
  b.ce_weights = {0, 0.2f, 0, 0.2f};
  loss = compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, count_losses(b), metrics);
  EXPECT_NEAR(loss.loss, 0.03, 1e-7);
  EXPECT_NEAR(metrics.mean("nll"), 0.15, 1e-7) << "the metric has no weights";
}

TEST(BatchLoss, ConstantInputsWorkedExample) {
  // r = 1 everywhere, A = 1: each of the three tokens gives -1, the mean is -1 and each gradient -1/3.
  wire::MicroBatch b = row_of({4});
  b.loss_mask = {0, 1, 1, 1};
  b.advantages = {0, 1, 1, 1};
  b.inference_logprobs = {0, -0.5f, -0.5f, -0.5f};
  const std::vector<float> logp{-0.5f, -0.5f, -0.5f, 9}, entropy{1, 2, 3, 9};
  MetricPool metrics;
  const BatchLoss loss = compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, count_losses(b), metrics);
  EXPECT_DOUBLE_EQ(loss.loss, -1.0);
  for (int i = 0; i < 3; ++i) EXPECT_FLOAT_EQ(loss.dlogp_T[static_cast<std::size_t>(i)], -1.0f / 3);
  EXPECT_EQ(loss.dlogp_T[3], 0.0f);
  EXPECT_EQ(metrics.values("mismatch_kl/all"), (Vec{0, 0, 0})) << "equal log-probabilities give exactly zero";
  EXPECT_EQ(metrics.values("entropy/env4"), (Vec{1, 2, 3}));
}

/// The grpo loss as a function from outside would compute it.
std::vector<SequenceLoss> outside(std::span<const TokenStreams> sequences) {
  std::vector<SequenceLoss> answers;
  for (const TokenStreams& s : sequences) {
    SequenceLoss& answer = answers.emplace_back();
    answer.dlogp.assign(s.size(), 0.0);
    MetricPool unused;
    answer.loss = rl_loss(config::GrpoLossConfig{}, s, answer.dlogp, unused);
    answer.dlogp[0] = 5;  // outside of the component, like any token whose mask is 0: it must not count
    answer.metrics["mean"] = answer.loss;
  }
  return answers;
}

TEST(BatchLoss, CustomLossIsThatOfItsFunction) {
  const Sequence sequence(7, 60);
  wire::MicroBatch b = row_of({30, 10, 20});
  b.loss_mask = sequence.mask, b.advantages = sequence.advantages, b.inference_logprobs = sequence.inference_logp;
  b.rl_weights = sequence.rl_weights, b.ce_weights = sequence.ce_weights;
  for (std::size_t i = 30; i < 40; ++i) b.loss_mask[i] = 0;  // nothing to ask for the second sequence
  std::vector<float> logp(sequence.logp.begin() + 1, sequence.logp.end());
  logp.push_back(0);
  const std::vector<float> entropy(60, 0.0f);
  MetricPool metrics, of_custom;
  const BatchLoss own = compute_batch_loss(config::GrpoLossConfig{}, b, logp, entropy, count_losses(b), metrics);
  const config::CustomLossConfig custom;
  const BatchLoss theirs = compute_batch_loss(custom, b, logp, entropy, count_losses(b), of_custom, {.custom = outside});
  EXPECT_EQ(own.loss, theirs.loss);
  EXPECT_EQ(own.dlogp_T, theirs.dlogp_T);
  EXPECT_EQ(of_custom.values("custom_loss/mean").size(), 2U);
  EXPECT_EQ(of_custom.values("mismatch_kl/all"), metrics.values("mismatch_kl/all"));

  const auto answer_with = [&](LossFunction function) {
    MetricPool unused;
    return compute_batch_loss(custom, b, logp, entropy, count_losses(b), unused, {.custom = std::move(function)});
  };
  EXPECT_THROW(answer_with({}), Error) << "no function";
  EXPECT_THROW(answer_with([](std::span<const TokenStreams>) { return std::vector<SequenceLoss>(1); }), Error) << "one answer for two";
  EXPECT_THROW(answer_with([](std::span<const TokenStreams> s) { return std::vector<SequenceLoss>(s.size()); }), Error) << "no gradients";
}

TEST(BatchLoss, WeightsOfOneEqualNoWeights) {
  const Sequence sequence(3);
  wire::MicroBatch b = row_of({40});
  b.loss_mask = sequence.mask, b.advantages = sequence.advantages, b.inference_logprobs = sequence.inference_logp;
  std::vector<float> logp(sequence.logp.begin() + 1, sequence.logp.end());
  logp.push_back(0);
  const std::vector<float> entropy(40, 0.0f);
  MetricPool metrics;
  const BatchLoss without = compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, count_losses(b), metrics);
  b.rl_weights.assign(40, 1.0f);
  const BatchLoss with = compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, count_losses(b), metrics);
  EXPECT_EQ(without.loss, with.loss);
  EXPECT_EQ(without.dlogp_T, with.dlogp_T);
}

// Components add, overlapping or not, each over its own count.
TEST(BatchLoss, ComponentsAdd) {
  const Sequence sequence(9);
  wire::MicroBatch b = row_of({40});
  b.loss_mask = sequence.mask, b.advantages = sequence.advantages, b.inference_logprobs = sequence.inference_logp,
  b.ref_logprobs = sequence.ref_logp;
  b.rl_weights = sequence.rl_weights, b.ce_weights = sequence.ce_weights, b.ref_kl_weights = sequence.ref_kl_weights;
  std::vector<float> logp(sequence.logp.begin() + 1, sequence.logp.end());
  logp.push_back(0);
  const std::vector<float> entropy(40, 0.0f);
  const LossCounts counts = count_losses(b);
  MetricPool metrics;
  const BatchLoss all = compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, counts, metrics);
  double rl_sum = 0, ce_sum = 0, ref_sum = 0;
  Vec rl_d(40), ce_d(40), ref_d(40);
  const TokenStreams s = sequence.streams();
  rl_sum = rl_loss(config::DefaultLossConfig{}, s, rl_d, metrics);
  ce_sum = ce_loss(s, ce_d, metrics);
  ref_sum = ref_kl_loss(s, ref_d, metrics);
  std::int64_t overlap = 0;
  for (std::size_t i = 1; i < 40; ++i) overlap += s.in_rl(i) && s.in_ce(i) && s.in_ref_kl(i);
  EXPECT_GT(overlap, 0);
  EXPECT_NEAR(all.loss,
              rl_sum / static_cast<double>(counts.rl_tokens) + ce_sum / static_cast<double>(counts.ce_tokens) +
                  ref_sum / static_cast<double>(counts.ref_kl_tokens),
              1e-12);
  for (std::size_t i = 1; i < 40; ++i)
    EXPECT_NEAR(all.dlogp_T[i - 1],
                rl_d[i] / static_cast<double>(counts.rl_tokens) + ce_d[i] / static_cast<double>(counts.ce_tokens) +
                    ref_d[i] / static_cast<double>(counts.ref_kl_tokens),
                1e-6);
}

// Tokens that another model wrote have no sampler here: their entropy is told, their mismatch is not.
TEST(BatchLoss, ImitatedTokensCountForEntropyButNotForMismatch) {
  wire::MicroBatch b = row_of({3});
  b.ce_weights = {0, 1, 1};
  const std::vector<float> logp{-1.0f, -3.0f, 0.0f}, entropy{0.5f, 0.7f, 9.0f};
  MetricPool metrics;
  const BatchLoss loss = compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, count_losses(b), metrics);
  EXPECT_DOUBLE_EQ(loss.loss, 2.0);
  EXPECT_EQ(loss.dlogp_T, (std::vector<float>{-0.5f, -0.5f, 0.0f}));
  EXPECT_NEAR(metrics.mean("entropy/all"), 0.6, 1e-7);
  EXPECT_TRUE(metrics.values("mismatch_kl/all").empty());
  EXPECT_DOUBLE_EQ(metrics.mean("nll"), 2.0);
}

TEST(BatchLoss, EmptyComponentsGiveZeroGradients) {
  wire::MicroBatch b = row_of({3, 1});
  b.rl_weights.assign(4, 0.0f);
  const std::vector<float> logp(4, -1.0f), entropy(4, 1.0f);
  MetricPool metrics;
  const BatchLoss loss = compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, count_losses(b), metrics);
  EXPECT_EQ(loss.loss, 0.0);
  EXPECT_EQ(loss.dlogp_T, std::vector<float>(4, 0.0f));
  EXPECT_TRUE(metrics.values("is_masked").empty());
}

// Two rows normalised by their common count give the same gradients as both sequences in one row.
TEST(BatchLoss, GlobalCountsMakeSplittingInvisible) {
  const Sequence a(4, 30), c(5, 10);
  const auto fill = [](wire::MicroBatch& b, std::size_t at, const Sequence& s) {
    for (std::size_t i = 0; i < s.logp.size(); ++i)
      b.loss_mask[at + i] = s.mask[i], b.advantages[at + i] = s.advantages[i], b.inference_logprobs[at + i] = s.inference_logp[i];
  };
  const auto shifted = [](const Sequence& s) {
    std::vector<float> logp(s.logp.begin() + 1, s.logp.end());
    logp.push_back(-7);  // must not be read
    return logp;
  };
  wire::MicroBatch one = row_of({30}), two = row_of({10}), both = row_of({30, 10});
  fill(one, 0, a), fill(two, 0, c), fill(both, 0, a), fill(both, 30, c);
  LossCounts counts = count_losses(one);
  counts += count_losses(two);
  std::vector<float> logp = shifted(a), logp_two = shifted(c);
  const std::vector<float> entropy(40, 0.0f);
  MetricPool metrics;
  const BatchLoss first = compute_batch_loss(config::GrpoLossConfig{}, one, logp, std::span(entropy).first(30), counts, metrics);
  const BatchLoss second = compute_batch_loss(config::GrpoLossConfig{}, two, logp_two, std::span(entropy).first(10), counts, metrics);
  logp.insert(logp.end(), logp_two.begin(), logp_two.end());
  const BatchLoss whole = compute_batch_loss(config::GrpoLossConfig{}, both, logp, entropy, count_losses(both), metrics);
  EXPECT_NEAR(first.loss + second.loss, whole.loss, 1e-12);
  std::vector<float> joined = first.dlogp_T;
  joined.insert(joined.end(), second.dlogp_T.begin(), second.dlogp_T.end());
  EXPECT_EQ(joined, whole.dlogp_T);
}

TEST(BatchLoss, NonFiniteNamesEnvironmentAndToken) {
  wire::MicroBatch b = row_of({2, 5});
  b.loss_mask[4] = 1;
  b.advantages[4] = 1;
  std::vector<float> logp(7, -1.0f);
  const std::vector<float> entropy(7, 0.0f);
  logp[3] = std::numeric_limits<float>::quiet_NaN();
  MetricPool metrics;
  try {
    compute_batch_loss(config::DefaultLossConfig{}, b, logp, entropy, count_losses(b), metrics);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("'env5'"), ::testing::HasSubstr("token 2")));
  }
}

}  // namespace
}  // namespace prl::trainer
