#include "ops/lm_head.hpp"

#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class LmHeadTest : public OpTest {};

struct Head {
  std::int64_t T, H, V;
  Tensor h, w;
  LinearWeightPtr packed;
  std::vector<std::int32_t> targets;
  std::vector<float> temperatures;

  Head(Session& s, std::int64_t tokens, std::int64_t hidden, std::int64_t vocabulary, DType dtype) : T(tokens), H(hidden), V(vocabulary) {
    h = s.random({T, H}, dtype, 1);
    w = s.random({V, H}, DType::kF32, 2, 0.3f);
    packed = pack_linear(s.ctx, w, {}, dtype, true);
    Rng rng(3);
    for (std::int64_t t = 0; t < T; ++t) {
      targets.push_back(t % 5 == 3 ? -1 : static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(V))));
      temperatures.push_back(t % 3 == 0 ? 1.0f : 0.7f + 0.1f * static_cast<float>(t % 4));
    }
    targets[0] = 0;
    targets[1] = static_cast<std::int32_t>(V - 1);
  }
  double weight(std::int64_t v, std::int64_t i) const {
    return packed->dtype() == DType::kBF16 ? to_f32(to_bf16(w.as<float>()[v * H + i])) : w.as<float>()[v * H + i];
  }
  std::vector<double> scaled_logits(std::int64_t t) const {
    std::vector<double> x;
    for (std::int64_t v = 0; v < V; ++v) {
      double sum = 0;
      for (std::int64_t i = 0; i < H; ++i) sum += static_cast<double>(get(h, t * H + i)) * weight(v, i);
      x.push_back(sum / static_cast<double>(temperatures[static_cast<std::size_t>(t)]));
    }
    return x;
  }
};

struct Outputs {
  Tensor logp, entropy, lse;
  Outputs(Session& s, std::int64_t T)
      : logp(s.poisoned({T}, DType::kF32)), entropy(s.poisoned({T}, DType::kF32)), lse(s.poisoned({T}, DType::kF32)) {}
};

double log_sum_exp(const std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}

TEST_P(LmHeadTest, AgreesWithPlainLogSoftmax) {
  Session s(kind());
  for (const std::int64_t V : {50, 1024, 2500}) {
    Head head(s, 11, 24, V, dtype());
    Outputs o(s, head.T);
    lm_head_logprob(s.ctx, o.logp, o.entropy, o.lse, head.h, *head.packed, head.targets, head.temperatures);
    for (std::int64_t t = 0; t < head.T; ++t) {
      const std::int32_t target = head.targets[static_cast<std::size_t>(t)];
      if (target < 0) {
        EXPECT_EQ(get(o.logp, t), 0.0f);
        EXPECT_EQ(get(o.entropy, t), 0.0f);
        continue;
      }
      const auto x = head.scaled_logits(t);
      const double lse = log_sum_exp(x);
      double entropy = 0;
      for (const double v : x) entropy -= std::exp(v - lse) * (v - lse);
      EXPECT_NEAR(get(o.logp, t), x[static_cast<std::size_t>(target)] - lse, 1e-5);
      EXPECT_NEAR(get(o.lse, t), lse, 1e-5);
      EXPECT_NEAR(get(o.entropy, t), entropy, 1e-5);
    }
  }
}

/// Gradients of a head against sums in double, with all rows kept, where the device can, or none.
void expect_gradient(Session& s, const Head& head, bool keep, double bound) {
  if (keep && !keeps_logits(s.ctx)) return;
  Outputs o(s, head.T);
  Tensor kept;
  if (keep) kept = s.poisoned({head.T, kept_row_bytes(head.packed->dtype(), head.V) / 4}, DType::kF32);
  const TensorView view = kept.defined() ? as_bytes(kept) : TensorView{};
  lm_head_logprob(s.ctx, o.logp, o.entropy, o.lse, head.h, *head.packed, head.targets, head.temperatures, view);
  Tensor dlogp = s.random({head.T}, DType::kF32, 4), dh = s.poisoned({head.T, head.H}, head.packed->dtype()),
         dw = s.filled({head.V, head.H}, DType::kF32, 0.25f);
  Session::set(dlogp, 4, 0.0f);
  lm_head_logprob_backward(s.ctx, dh, dw, dlogp, o.lse, head.h, *head.packed, head.targets, head.temperatures, true, view);
  std::vector<double> want_dh(static_cast<std::size_t>(head.T * head.H)), want_dw(static_cast<std::size_t>(head.V * head.H), 0.25);
  for (std::int64_t t = 0; t < head.T; ++t) {
    const std::int32_t target = head.targets[static_cast<std::size_t>(t)];
    if (target < 0) continue;
    const auto x = head.scaled_logits(t);
    const double lse = log_sum_exp(x);
    for (std::int64_t v = 0; v < head.V; ++v) {
      const double d = static_cast<double>(get(dlogp, t) / head.temperatures[static_cast<std::size_t>(t)]) *
                       ((v == target) - std::exp(x[static_cast<std::size_t>(v)] - lse));
      for (std::int64_t i = 0; i < head.H; ++i) {
        want_dh[static_cast<std::size_t>(t * head.H + i)] += d * head.weight(v, i);
        want_dw[static_cast<std::size_t>(v * head.H + i)] += d * static_cast<double>(get(head.h, t * head.H + i));
      }
    }
  }
  EXPECT_LT(worst_error(values(dh), want_dh, 1.0), bound) << "kept: " << keep;
  EXPECT_LT(worst_error(values(dw), want_dw, 1.0), bound) << "kept: " << keep;
}

TEST_P(LmHeadTest, GradientAgreesWithFormula) {
  Session s(kind());
  for (const std::int64_t V : {70, 1500})
    for (const bool keep : {false, true}) expect_gradient(s, Head(s, 13, 20, V, dtype()), keep, dtype() == DType::kBF16 ? 1e-2 : 5e-6);
}

/// Rows that are sure of their target, and rows that all but rule it out: by e^-100 and less.
TEST_P(LmHeadTest, GradientsOfTargetsThatAreSureOrRuledOut) {
  Session s(kind());
  Head head(s, 13, 20, 1500, dtype());
  for (std::int64_t t = 0; t < head.T; ++t) {
    if (t % 4 == 0) continue;
    for (std::int64_t i = 0; i < head.H; ++i) Session::set(head.h, t * head.H + i, 16.0f * get(head.h, t * head.H + i));
    const auto x = head.scaled_logits(t);
    const auto extreme = t % 4 == 1 ? std::ranges::max_element(x) : std::ranges::min_element(x);
    head.targets[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(extreme - x.begin());
    if (t % 4 != 1) {
      ASSERT_LT(*extreme - log_sum_exp(x), -100.0) << "row " << t;
    }
  }
  // Logits of 150 are known to 1e-5 in fp32, and gradients here to some tens of that.
  for (const bool keep : {false, true}) expect_gradient(s, head, keep, dtype() == DType::kBF16 ? 1e-2 : 1e-3);
}

/// The gradient is that of the function itself: a step along a coordinate changes logp as predicted.
TEST_P(LmHeadTest, GradientAgreesWithFiniteDifferences) {
  if (dtype() == DType::kBF16) return;  // steps would be below bf16 resolution
  Session s(kind());
  Head head(s, 3, 16, 40, dtype());
  head.targets = {7, 39, 0};
  Outputs o(s, 3);
  lm_head_logprob(s.ctx, o.logp, o.entropy, o.lse, head.h, *head.packed, head.targets, head.temperatures);
  Tensor dlogp = s.filled({3}, DType::kF32, 1.0f), dh = s.poisoned({3, 16}, dtype()), dw = s.filled({40, 16}, DType::kF32, 0.0f);
  lm_head_logprob_backward(s.ctx, dh, dw, dlogp, o.lse, head.h, *head.packed, head.targets, head.temperatures);
  constexpr float kStep = 1e-2f;
  for (std::int64_t i = 0; i < 48; ++i) {
    double difference = 0;
    for (const float sign : {1.0f, -1.0f}) {
      Tensor moved = head.h.clone();
      moved.as<float>()[i] += sign * kStep;
      lm_head_logprob(s.ctx, o.logp, o.entropy, o.lse, moved, *head.packed, head.targets, head.temperatures);
      for (std::int64_t t = 0; t < 3; ++t) difference += static_cast<double>(sign * get(o.logp, t));
    }
    EXPECT_NEAR(get(dh, i), difference / (2.0 * static_cast<double>(kStep)), 2e-3) << i;
  }
}

/// What the sampler reports is what the trainer computes, to the last bit, whatever else is in either batch.
TEST_P(LmHeadTest, SampledLogprobEqualsTrainedLogprob) {
  Session trainer(kind(), 1), engine(kind(), 3);
  Head head(trainer, 40, 96, 3000, dtype());
  std::vector<SampleRow> rows(40);
  for (std::size_t t = 0; t < rows.size(); ++t) rows[t] = {.temperature = head.temperatures[t], .seed = 11, .position = t};
  rows[7].temperature = 0.0f;  // greedy reports the distribution at temperature 1
  head.temperatures[7] = 1.0f;
  std::vector<SampleResult> results(40);
  for (const std::int64_t batch : {1, 3, 40}) {
    for (std::int64_t t = 0; t < 40; t += batch) {
      const std::int64_t n = std::min<std::int64_t>(batch, 40 - t);
      Tensor logits = engine.poisoned({n, head.V}, DType::kF32);
      linear(engine.ctx, logits, head.h.slice(t, n), *head.packed);
      sample(engine.ctx, std::span(results).subspan(static_cast<std::size_t>(t), static_cast<std::size_t>(n)), logits,
             std::span(rows).subspan(static_cast<std::size_t>(t), static_cast<std::size_t>(n)));
    }
    for (std::size_t t = 0; t < 40; ++t) head.targets[t] = results[t].token;
    Outputs o(trainer, 40);
    lm_head_logprob(trainer.ctx, o.logp, o.entropy, o.lse, head.h, *head.packed, head.targets, head.temperatures);
    for (std::int64_t t = 0; t < 40; ++t)
      EXPECT_EQ(results[static_cast<std::size_t>(t)].logprob, get(o.logp, t)) << "row " << t << " batch " << batch;
  }
}

TEST_P(LmHeadTest, BitsDoNotDependOnThreadsOrNeighbours) {
  Tensor first_logp, first_dw, first_dh;
  for (const int threads : {1, 2, 3}) {
    Session s(kind(), threads);
    Head head(s, 90, 40, 2100, dtype());
    Outputs o(s, head.T);
    lm_head_logprob(s.ctx, o.logp, o.entropy, o.lse, head.h, *head.packed, head.targets, head.temperatures);
    Tensor dlogp = s.random({head.T}, DType::kF32, 4), dh = s.poisoned({head.T, head.H}, dtype()),
           dw = s.filled({head.V, head.H}, DType::kF32, 0.0f);
    lm_head_logprob_backward(s.ctx, dh, dw, dlogp, o.lse, head.h, *head.packed, head.targets, head.temperatures);
    if (!first_logp.defined()) {
      first_logp = o.logp.clone();
      first_dh = dh.clone();
      first_dw = dw.clone();
    }
    EXPECT_TRUE(same_bits(o.logp, first_logp));
    EXPECT_TRUE(same_bits(dh, first_dh));
    EXPECT_TRUE(same_bits(dw, first_dw));
    // One row alone, and the same row among others that are skipped.
    Outputs alone(s, 1);
    const std::span targets(head.targets);
    const std::span temperatures(head.temperatures);
    lm_head_logprob(s.ctx, alone.logp, alone.entropy, alone.lse, head.h.slice(50, 1), *head.packed, targets.subspan(50, 1),
                    temperatures.subspan(50, 1));
    EXPECT_EQ(get(alone.logp, 0), get(o.logp, 50));
    std::vector<std::int32_t> mostly_skipped(head.targets.size(), -1);
    mostly_skipped[50] = head.targets[50];
    Outputs sparse(s, head.T);
    lm_head_logprob(s.ctx, sparse.logp, sparse.entropy, sparse.lse, head.h, *head.packed, mostly_skipped, head.temperatures);
    EXPECT_EQ(get(sparse.logp, 50), get(o.logp, 50));
    EXPECT_EQ(get(sparse.entropy, 50), get(o.entropy, 50));
  }
}

/// Logits that the forward pass leaves, all or some of them, save products and change nothing.
TEST_P(LmHeadTest, KeptLogitsChangeNoBit) {
  Session s(kind());
  Head head(s, 90, 40, 9000, dtype());
  for (std::int64_t i = 0; i < head.H; ++i)  // rows that rule out their targets
    for (const std::int64_t t : {2, 70}) Session::set(head.h, t * head.H + i, 30.0f * get(head.h, t * head.H + i));
  Tensor dlogp = s.random({head.T}, DType::kF32, 4), first_logp, first_dh, first_dw;
  for (const std::int64_t R : {0, 1, 50, 72, 100}) {  // 72 of the rows have a target
    Outputs o(s, head.T);
    Tensor kept, dh = s.poisoned({head.T, head.H}, dtype()), dw = s.filled({head.V, head.H}, DType::kF32, 0.0f);
    if (R > 0) kept = s.poisoned({R, kept_row_bytes(dtype(), head.V) / 4}, DType::kF32);
    const TensorView view = R > 0 ? as_bytes(kept) : TensorView{};
    const auto forward = [&] {
      lm_head_logprob(s.ctx, o.logp, o.entropy, o.lse, head.h, *head.packed, head.targets, head.temperatures, view);
    };
    if (R > 0 && !keeps_logits(s.ctx)) {
      EXPECT_THROW(forward(), Error);
      continue;
    }
    forward();
    lm_head_logprob_backward(s.ctx, dh, dw, dlogp, o.lse, head.h, *head.packed, head.targets, head.temperatures, true, view);
    if (R == 0) {
      first_logp = o.logp;
      first_dh = dh;
      first_dw = dw;
    }
    EXPECT_TRUE(same_bits(o.logp, first_logp)) << R;
    EXPECT_TRUE(same_bits(dh, first_dh)) << R;
    EXPECT_TRUE(same_bits(dw, first_dw)) << R;
  }
}

TEST_P(LmHeadTest, NothingToDo) {
  Session s(kind());
  Head head(s, 4, 16, 30, dtype());
  std::vector<std::int32_t> none(4, -1);
  Outputs o(s, 4);
  lm_head_logprob(s.ctx, o.logp, o.entropy, o.lse, head.h, *head.packed, none, head.temperatures);
  Tensor dlogp = s.filled({4}, DType::kF32, 1.0f), dh = s.poisoned({4, 16}, dtype()), dw = s.filled({30, 16}, DType::kF32, 3.0f);
  lm_head_logprob_backward(s.ctx, dh, dw, dlogp, o.lse, head.h, *head.packed, none, head.temperatures);
  for (const float v : values(o.logp)) EXPECT_EQ(v, 0.0f);
  for (const float v : values(dh)) EXPECT_EQ(v, 0.0f);
  for (const float v : values(dw)) EXPECT_EQ(v, 3.0f);
  none[0] = 30;
  EXPECT_THROW(lm_head_logprob(s.ctx, o.logp, o.entropy, o.lse, head.h, *head.packed, none, head.temperatures), Error);
}

PRL_OP_TEST_KINDS(LmHeadTest);

}  // namespace
}  // namespace prl::ops
