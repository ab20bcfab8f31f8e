#include "ops/delta_rule.hpp"

#include <functional>
#include <numeric>

#include "ops/delta_rule_golden.hpp"
#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class DeltaRuleTest : public OpTest {};

using Ints = std::vector<std::int32_t>;

double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double silu_of(double x) { return x * logistic(x); }

/// [0, l0, l0 + l1, ...]
Ints starts_of(const Ints& lengths) {
  Ints out = {0};
  for (const std::int32_t n : lengths) out.push_back(out.back() + n);
  return out;
}

/// Inputs as numbers, each of which a test may move.
using Numbers = std::vector<std::vector<double>>;
std::vector<double> numbers_in(const Tensor& t) {
  const std::vector<float> v = values(t);
  return {v.begin(), v.end()};
}
double weighted_sum(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Compares every `step`-th element of `grad` with the slope of `loss` over input `which`.
void expect_slopes(const Tensor& grad, const Numbers& inputs, std::size_t which, std::size_t step, double limit,
                   const std::function<double(const Numbers&)>& loss, const std::string& what) {
  constexpr double kMove = 1e-5;
  for (std::size_t i = 0; i < inputs[which].size(); i += step) {
    Numbers moved = inputs;
    moved[which][i] += kMove;
    const double above = loss(moved);
    moved[which][i] -= 2 * kMove;
    const double want = (above - loss(moved)) / (2 * kMove), got = static_cast<double>(get(grad, static_cast<std::int64_t>(i)));
    EXPECT_LE(std::abs(got - want), limit * (1.0 + std::abs(want)))
        << what << " of input " << which << ", element " << i << ": " << got << ", " << want;
  }
}

// The convolution.

std::vector<double> conv_of(const std::vector<double>& x, const std::vector<double>& weight, const Ints& starts, std::int64_t C,
                            std::int64_t W) {
  std::vector<double> y(x.size());
  for (std::size_t s = 0; s + 1 < starts.size(); ++s)
    for (std::int64_t t = starts[s]; t < starts[s + 1]; ++t)
      for (std::int64_t c = 0; c < C; ++c) {
        double sum = 0;
        for (std::int64_t w = 0; w < W; ++w)
          if (const std::int64_t from = t - (W - 1) + w; from >= starts[s])
            sum += weight[static_cast<std::size_t>(c * W + w)] * x[static_cast<std::size_t>(from * C + c)];
        y[static_cast<std::size_t>(t * C + c)] = silu_of(sum);
      }
  return y;
}

TEST_P(DeltaRuleTest, ConvolutionFollowsItsDefinition) {
  Session s(kind());
  const Ints starts = starts_of({9, 0, 1, 3, 30});
  const std::int64_t T = starts.back();
  for (const std::int64_t W : {2, 4, 8})
    for (const std::int64_t C : {1, 37, 144}) {
      // Columns of something wider.
      Tensor wide = s.random({T, C + 11}, dtype(), 1), weight = s.random({C, W}, DType::kF32, 2), dy = s.random({T, C}, dtype(), 3);
      Tensor y = s.poisoned({T, C}, dtype()), dx = s.poisoned({T, C}, dtype()), dweight = s.filled({C, W}, DType::kF32, 0.5f);
      const TensorView x = wide.view().columns(11, C);
      causal_conv(s.ctx, y, x, weight, {}, {.start_S = starts});
      causal_conv_backward(s.ctx, dx, dweight, dy, x, weight, {.start_S = starts});
      Numbers inputs = {{}, numbers_in(weight)};
      for (std::int64_t t = 0; t < T; ++t)
        for (std::int64_t c = 0; c < C; ++c) inputs[0].push_back(static_cast<double>(get(wide, t * (C + 11) + 11 + c)));
      EXPECT_LT(worst_error(values(y), conv_of(inputs[0], inputs[1], starts, C, W), 1.0), tolerance(dtype(), 2e-6)) << W << ", " << C;
      const auto loss = [&](const Numbers& in) { return weighted_sum(conv_of(in[0], in[1], starts, C, W), numbers_in(dy)); };
      expect_slopes(dx, inputs, 0, C == 1 ? 1 : 211, tolerance(dtype(), 1e-5), loss, "dx");
      for (std::int64_t i = 0; i < C * W; ++i) dweight.as<float>()[i] -= 0.5f;  // it was added to
      expect_slopes(dweight, inputs, 1, C == 1 ? 1 : 53, 1e-4, loss, "dweight");
    }
}

/// How the tokens of some sequences are cut into calls: of each call, tokens per sequence.
const std::vector<Ints>& cuts() {
  static const std::vector<Ints> all = {
      {70, 5, 33}, {1, 1, 1}, {0, 1, 2}, {64, 0, 1}, {1, 3, 20}, {4, 1, 9},
  };
  return all;
}
const Ints kLengths = {70, 5, 33};
const Ints kSlots = {4, 0, 2};
constexpr std::int64_t kNumSlots = 6;

/// Rows of a call, in memory of their own: rows [done, done + count) of each sequence.
struct Batch {
  Ints starts = {0}, slots, begins;
  std::vector<std::int64_t> rows;
};
/// Cuts the sequences by `cut`, call after call, the last of whose entries repeats until all is done.
std::vector<Batch> batches_of(const std::vector<Ints>& cut) {
  std::vector<Batch> out;
  const Ints starts = starts_of(kLengths);
  Ints done(kLengths.size(), 0);
  for (std::size_t call = 0; done != kLengths; ++call) {
    Batch b;
    for (std::size_t s = 0; s < kLengths.size(); ++s) {
      const std::int32_t count = std::min(cut[std::min(call, cut.size() - 1)][s], kLengths[s] - done[s]);
      if (count == 0 && call % 2 == 1) continue;  // left out, and at other times there with no rows
      for (std::int32_t t = 0; t < count; ++t) b.rows.push_back(starts[s] + done[s] + t);
      b.starts.push_back(b.starts.back() + count);
      b.slots.push_back(kSlots[s]);
      b.begins.push_back(done[s]);
      done[s] += count;
    }
    out.push_back(std::move(b));
  }
  return out;
}
Tensor rows_of(Session& s, const Tensor& all, const std::vector<std::int64_t>& rows) {
  const std::int64_t C = all.shape()[1];
  Tensor out = Tensor::empty(s.runtime, {static_cast<std::int64_t>(rows.size()), C}, all.dtype());
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (std::int64_t c = 0; c < C; ++c) Session::set(out, static_cast<std::int64_t>(i) * C + c, get(all, rows[i] * C + c));
  return out;
}
/// Puts rows where they were taken from.
void put_rows(Tensor& all, const Tensor& part, const std::vector<std::int64_t>& rows) {
  const std::int64_t C = all.shape()[1];
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (std::int64_t c = 0; c < C; ++c) Session::set(all, rows[i] * C + c, get(part, static_cast<std::int64_t>(i) * C + c));
}
/// Every way to cut: as one, in pieces, token by token.
std::vector<std::vector<Ints>> all_cuts() { return {{cuts()[0]}, {cuts()[1]}, {cuts()[2], cuts()[3], cuts()[4], cuts()[5]}, {{64, 5, 7}}}; }

TEST_P(DeltaRuleTest, ConvolutionInPartsHasTheSameBits) {
  const std::int64_t C = 80, W = 4;
  const Ints starts = starts_of(kLengths);
  const std::int64_t T = starts.back();
  for (const int threads : {1, 3}) {
    Session s(kind(), threads);
    Tensor x = s.random({T, C}, dtype(), 1), weight = s.random({C, W}, DType::kF32, 2), whole = s.poisoned({T, C}, dtype());
    causal_conv(s.ctx, whole, x, weight, {}, {.start_S = starts});
    for (const std::vector<Ints>& cut : all_cuts()) {
      Tensor y = s.poisoned({T, C}, dtype()), state = s.poisoned({kNumSlots, W - 1, C}, dtype());
      for (const Batch& b : batches_of(cut)) {
        const Tensor part = rows_of(s, x, b.rows);
        Tensor out = s.poisoned(part.shape(), dtype());
        causal_conv(s.ctx, out, part, weight, state, {.start_S = b.starts, .slot_S = b.slots, .begin_S = b.begins});
        put_rows(y, out, b.rows);
      }
      EXPECT_TRUE(same_bits(y, whole));
      for (std::size_t i = 0; i < kLengths.size(); ++i)
        for (std::int64_t w = 0; w < W - 1; ++w)
          for (std::int64_t c = 0; c < C; ++c)
            EXPECT_EQ(get(state, (kSlots[i] * (W - 1) + w) * C + c), get(x, (starts[i + 1] - (W - 1) + w) * C + c)) << i << ", " << w;
      EXPECT_TRUE(std::isnan(get(state, 1 * (W - 1) * C))) << "a slot that is nobody's";
    }
  }
}

// The rule.

struct RuleCase {
  std::int64_t M, N, K, D;
  Ints lengths;
};
const std::vector<RuleCase>& rule_cases() {
  static const std::vector<RuleCase> all = {
      {1, 1, 16, 16, {1}},   {2, 4, 16, 48, {37, 0, 3}},      {1, 3, 48, 80, {70}}, {2, 2, 128, 128, {5, 40}}, {1, 2, 32, 256, {20}},
      {1, 1, 256, 32, {20}}, {1, 2, 128, 128, {64, 200, 17}},
  };
  return all;
}

/// All that a call needs.
struct Rule {
  Tensor qkv, b, a, rate, bias;
  std::int64_t M, N, K, D;
  Rule(Session& s, const RuleCase& c, std::int64_t T, DType dtype)
      : qkv(s.random({T, 2 * c.M * c.K + c.N * c.D}, dtype, 11)),
        b(s.random({T, c.N}, dtype, 12)),
        a(s.random({T, c.N}, dtype, 13, 2.0f)),
        rate(s.random({c.N}, DType::kF32, 14)),
        bias(s.random({c.N}, DType::kF32, 15)),
        M(c.M),
        N(c.N),
        K(c.K),
        D(c.D) {
    if (T > 2) Session::set(a, 2 * N, 25.0f);  // where softplus is the identity, and nothing is left of the state
  }
  DeltaRule in() const { return in(qkv, b, a); }
  DeltaRule in(const Tensor& qkv_TC, const Tensor& b_TN, const Tensor& a_TN) const {
    return {.qkv_TC = qkv_TC,
            .b_TN = b_TN,
            .a_TN = a_TN,
            .decay_rate_N = rate,
            .decay_bias_N = bias,
            .num_key_heads = M,
            .num_value_heads = N,
            .key_dim = K,
            .value_dim = D};
  }
  Numbers numbers() const { return {numbers_in(qkv), numbers_in(b), numbers_in(a), numbers_in(rate), numbers_in(bias)}; }
};

/// The definition.
std::vector<double> rule_of(const Numbers& in, const RuleCase& z, const Ints& starts) {
  const std::int64_t C = 2 * z.M * z.K + z.N * z.D, T = starts.back();
  const auto at = [](const std::vector<double>& v, std::int64_t i) { return v[static_cast<std::size_t>(i)]; };
  const auto unit = [&](std::int64_t first) {
    std::vector<double> v(static_cast<std::size_t>(z.K));
    double squares = 1e-6;
    for (std::int64_t i = 0; i < z.K; ++i) squares += at(in[0], first + i) * at(in[0], first + i);
    for (std::int64_t i = 0; i < z.K; ++i) v[static_cast<std::size_t>(i)] = at(in[0], first + i) / std::sqrt(squares);
    return v;
  };
  std::vector<double> out(static_cast<std::size_t>(T * z.N * z.D));
  for (std::size_t s = 0; s + 1 < starts.size(); ++s)
    for (std::int64_t n = 0; n < z.N; ++n) {
      std::vector<double> state(static_cast<std::size_t>(z.K * z.D));
      for (std::int64_t t = starts[s]; t < starts[s + 1]; ++t) {
        const std::int64_t m = n / (z.N / z.M);
        const std::vector<double> q = unit(t * C + m * z.K), k = unit(t * C + (z.M + m) * z.K);
        const double x = at(in[2], t * z.N + n) + at(in[4], n), beta = logistic(at(in[1], t * z.N + n));
        const double decay = std::exp(-std::exp(at(in[3], n)) * std::log1p(std::exp(x)));
        for (std::int64_t j = 0; j < z.D; ++j) {
          double r = 0, o = 0;
          for (std::int64_t i = 0; i < z.K; ++i) r += (state[static_cast<std::size_t>(i * z.D + j)] *= decay) * at(k, i);
          const double d = beta * (at(in[0], t * C + 2 * z.M * z.K + n * z.D + j) - r);
          for (std::int64_t i = 0; i < z.K; ++i) o += (state[static_cast<std::size_t>(i * z.D + j)] += at(k, i) * d) * at(q, i);
          out[static_cast<std::size_t>((t * z.N + n) * z.D + j)] = o / std::sqrt(static_cast<double>(z.K));
        }
      }
    }
  return out;
}

TEST_P(DeltaRuleTest, RuleFollowsItsDefinition) {
  Session s(kind());
  for (const RuleCase& c : rule_cases()) {
    const Ints starts = starts_of(c.lengths);
    const Rule rule(s, c, starts.back(), dtype());
    Tensor out = s.poisoned({starts.back(), c.N * c.D}, dtype());
    delta_rule(s.ctx, out, {}, rule.in(), {.start_S = starts});
    EXPECT_LT(worst_error(values(out), rule_of(rule.numbers(), c, starts), 1.0), tolerance(dtype(), 4e-6)) << c.K << " by " << c.D;
  }
}

TEST_P(DeltaRuleTest, RuleInPartsHasTheSameBits) {
  const Ints starts = starts_of(kLengths);
  const std::int64_t T = starts.back();
  for (const RuleCase& c : {RuleCase{2, 4, 32, 48, {}}, RuleCase{1, 2, 128, 128, {}}}) {
    Tensor first, first_state;
    for (const int threads : {1, 2, 3}) {
      Session s(kind(), threads);
      const Rule rule(s, c, T, dtype());
      const std::int64_t size = delta_rule_state_size(s.runtime->device().kind, dtype(), c.M, c.N, c.K, c.D);
      Tensor whole = s.poisoned({T, c.N * c.D}, dtype());
      delta_rule(s.ctx, whole, {}, rule.in(), {.start_S = starts});
      if (threads == 1) first = whole;
      EXPECT_TRUE(same_bits(whole, first)) << threads;
      for (const std::vector<Ints>& cut : all_cuts()) {
        Tensor out = s.poisoned({T, c.N * c.D}, dtype()), state = s.filled({kNumSlots, size}, DType::kF32, 1e30f);
        for (const Batch& b : batches_of(cut)) {
          const Tensor qkv = rows_of(s, rule.qkv, b.rows), gate = rows_of(s, rule.b, b.rows), step = rows_of(s, rule.a, b.rows);
          Tensor part = s.poisoned({qkv.shape()[0], c.N * c.D}, dtype());
          delta_rule(s.ctx, part, state, rule.in(qkv, gate, step), {.start_S = b.starts, .slot_S = b.slots, .begin_S = b.begins});
          put_rows(out, part, b.rows);
        }
        EXPECT_TRUE(same_bits(out, whole)) << threads << ", " << c.K;
        // What lies behind a state may be of tokens that a chunk had before.
        if (!first_state.defined()) first_state = state;
        for (std::int64_t slot = 0; slot < kNumSlots; ++slot)
          for (std::int64_t i = 0; i < c.N * c.K * c.D; ++i)
            ASSERT_EQ(get(state, slot * size + i), get(first_state, slot * size + i))
                << threads << ", " << c.K << ", " << slot << ", " << i;
        EXPECT_EQ(get(state, 1 * size), 1e30f) << "a slot that is nobody's";
      }
    }
  }
}

TEST_P(DeltaRuleTest, LongRulesInPartsHaveTheSameBits) {
  // Parts that end within chunks, at their ends and behind several, with steps of one token between; a second sequence at other positions.
  const RuleCase c{1, 2, 128, 128, {}};
  const Ints parts = {1, 62, 1, 1, 5, 130, 1, 15, 1, 64, 40, 1, 1, 1, 200};
  const std::int64_t T = std::accumulate(parts.begin(), parts.end(), std::int64_t{0}), other = 97;
  Session s(kind());
  const Rule rule(s, c, T + other, dtype());
  Tensor whole = s.poisoned({T + other, c.N * c.D}, dtype()), out = s.poisoned(whole.shape(), dtype());
  delta_rule(s.ctx, whole, {}, rule.in(), {.start_S = Ints{0, static_cast<std::int32_t>(T), static_cast<std::int32_t>(T + other)}});
  EXPECT_LT(
      worst_error(values(whole), rule_of(rule.numbers(), c, {0, static_cast<std::int32_t>(T), static_cast<std::int32_t>(T + other)}), 1.0),
      tolerance(dtype(), 4e-6));
  Tensor state = s.filled({2, delta_rule_state_size(s.runtime->device().kind, dtype(), c.M, c.N, c.K, c.D)}, DType::kF32, NAN);
  std::int32_t done[2] = {};
  const auto end = [&](std::int32_t i) { return static_cast<std::int32_t>(i == 0 ? T : other); };
  for (std::size_t call = 0; done[0] < end(0) || done[1] < end(1); ++call) {
    Ints starts = {0}, slots, begins;
    std::vector<std::int64_t> rows;
    for (const std::int32_t i : {0, 1}) {
      const std::int32_t count = std::min(i == 0 && call < parts.size() ? parts[call] : call % 4 == 3 ? 31 : 1, end(i) - done[i]);
      if (count == 0) continue;
      for (std::int32_t t = 0; t < count; ++t) rows.push_back((i == 0 ? 0 : T) + done[i] + t);
      starts.push_back(starts.back() + count), slots.push_back(1 - i), begins.push_back(done[i]);
      done[i] += count;
    }
    const Tensor qkv = rows_of(s, rule.qkv, rows), gate = rows_of(s, rule.b, rows), step = rows_of(s, rule.a, rows);
    Tensor part = s.poisoned({qkv.shape()[0], c.N * c.D}, dtype());
    delta_rule(s.ctx, part, state, rule.in(qkv, gate, step), {.start_S = starts, .slot_S = slots, .begin_S = begins});
    put_rows(out, part, rows);
    for (const std::int64_t row : rows)
      for (std::int64_t i = 0; i < c.N * c.D; ++i)
        ASSERT_EQ(get(out, row * c.N * c.D + i), get(whole, row * c.N * c.D + i)) << "call " << call << ", row " << row << ", column " << i;
  }
}

/// Gradients of weighted_sum(rule_of(in), dout) in the order of Rule::numbers(), by the chain rule token by token.
Numbers rule_gradients_of(const Numbers& in, const RuleCase& z, const Ints& starts, const std::vector<double>& dout) {
  const std::int64_t K = z.K, D = z.D, N = z.N, C = 2 * z.M * K + N * D;
  Numbers grads;
  for (const std::vector<double>& v : in) grads.emplace_back(v.size());
  const auto index = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  /// Of a vector of length 1, to that of the one it was made from.
  const auto add_to_vector = [&](std::int64_t first, const std::vector<double>& d, double scale) {
    double squares = 1e-6, dot = 0;
    for (std::int64_t i = 0; i < K; ++i) {
      squares += in[0][index(first + i)] * in[0][index(first + i)];
      dot += in[0][index(first + i)] * d[index(i)];
    }
    for (std::int64_t i = 0; i < K; ++i)
      grads[0][index(first + i)] += scale / std::sqrt(squares) * (d[index(i)] - in[0][index(first + i)] * dot / squares);
  };
  for (std::size_t s = 0; s + 1 < starts.size(); ++s)
    for (std::int64_t n = 0; n < N; ++n) {
      const std::int64_t m = n / (N / z.M), begin = starts[s], size = K * D;
      // Of each token: its vectors, decay and beta, its decayed state, what it misses (e) and the state behind it.
      const auto unit = [&](std::int64_t first, std::int64_t i) {
        double squares = 1e-6;
        for (std::int64_t j = 0; j < K; ++j) squares += in[0][index(first + j)] * in[0][index(first + j)];
        return in[0][index(first + i)] / std::sqrt(squares);
      };
      struct Token {
        std::vector<double> q, k, decayed, e, behind;
        double decay, beta;
      };
      std::vector<Token> tokens;
      for (std::int64_t t = begin; t < starts[s + 1]; ++t) {
        Token x;
        for (std::int64_t i = 0; i < K; ++i) {
          x.q.push_back(unit(t * C + m * K, i) / std::sqrt(static_cast<double>(K)));
          x.k.push_back(unit(t * C + (z.M + m) * K, i));
        }
        x.decay = std::exp(-std::exp(in[3][index(n)]) * std::log1p(std::exp(in[2][index(t * N + n)] + in[4][index(n)])));
        x.beta = logistic(in[1][index(t * N + n)]);
        x.decayed = tokens.empty() ? std::vector<double>(index(size)) : tokens.back().behind;
        for (double& v : x.decayed) v *= x.decay;
        x.behind = x.decayed;
        for (std::int64_t j = 0; j < D; ++j) {
          double e = in[0][index(t * C + 2 * z.M * K + n * D + j)];
          for (std::int64_t i = 0; i < K; ++i) e -= x.decayed[index(i * D + j)] * x.k[index(i)];
          for (std::int64_t i = 0; i < K; ++i) x.behind[index(i * D + j)] += x.k[index(i)] * x.beta * e;
          x.e.push_back(e);
        }
        tokens.push_back(std::move(x));
      }
      std::vector<double> dstate(index(size));
      for (std::int64_t t = starts[s + 1] - 1; t >= begin; --t) {
        const Token& x = tokens[index(t - begin)];
        std::vector<double> dq(index(K)), dk(index(K));
        double dbeta = 0, dlog = 0;
        for (std::int64_t j = 0; j < D; ++j) {
          const double g = dout[index((t * N + n) * D + j)], e = x.e[index(j)];
          double dd = 0;
          for (std::int64_t i = 0; i < K; ++i) {
            dq[index(i)] += x.behind[index(i * D + j)] * g;
            dstate[index(i * D + j)] += x.q[index(i)] * g;
            dd += dstate[index(i * D + j)] * x.k[index(i)];
          }
          for (std::int64_t i = 0; i < K; ++i) {
            const std::size_t at = index(i * D + j);
            dk[index(i)] += dstate[at] * x.beta * e - x.decayed[at] * x.beta * dd;
            dstate[at] -= x.k[index(i)] * x.beta * dd;
            dlog += dstate[at] * x.decayed[at];
            dstate[at] *= x.decay;
          }
          dbeta += dd * e;
          grads[0][index(t * C + 2 * z.M * K + n * D + j)] = x.beta * dd;
        }
        add_to_vector(t * C + m * K, dq, 1 / std::sqrt(static_cast<double>(K)));
        add_to_vector(t * C + (z.M + m) * K, dk, 1.0);
        const double of_step = in[2][index(t * N + n)] + in[4][index(n)], slope = -std::exp(in[3][index(n)]);
        grads[1][index(t * N + n)] = dbeta * x.beta * (1 - x.beta);
        grads[2][index(t * N + n)] = dlog * slope * logistic(of_step);
        grads[3][index(n)] += dlog * slope * std::log1p(std::exp(of_step));
        grads[4][index(n)] += dlog * slope * logistic(of_step);
      }
    }
  return grads;
}

struct RuleGrads {
  Tensor dqkv, db, da, drate, dbias;
  RuleGrads(Session& s, const Rule& rule)
      : dqkv(s.poisoned(rule.qkv.shape(), rule.qkv.dtype())),
        db(s.poisoned(rule.b.shape(), rule.b.dtype())),
        da(s.poisoned(rule.a.shape(), rule.a.dtype())),
        drate(s.filled(rule.rate.shape(), DType::kF32, 0.0f)),
        dbias(s.filled(rule.bias.shape(), DType::kF32, 0.0f)) {}
  DeltaRuleGrads views() { return {.dqkv_TC = dqkv, .db_TN = db, .da_TN = da, .ddecay_rate_N = drate, .ddecay_bias_N = dbias}; }
  std::vector<const Tensor*> all() const { return {&dqkv, &db, &da, &drate, &dbias}; }
};

TEST_P(DeltaRuleTest, GradientsOfTheRuleAreItsSlopes) {
  for (const RuleCase& c : {RuleCase{1, 1, 16, 16, {3}}, RuleCase{2, 6, 16, 48, {39, 0, 5}}, RuleCase{1, 2, 48, 80, {34, 1}},
                            RuleCase{1, 1, 16, 16, {300, 230}}}) {
    const Ints starts = starts_of(c.lengths);
    Session s(kind());
    const Rule rule(s, c, starts.back(), dtype());
    const Tensor dout = s.random({starts.back(), c.N * c.D}, dtype(), 16);
    RuleGrads grads(s, rule);
    delta_rule_backward(s.ctx, grads.views(), dout, rule.in(), {.start_S = starts});
    const Numbers inputs = rule.numbers();
    const std::vector<double> weights = numbers_in(dout);
    const auto loss = [&](const Numbers& in) { return weighted_sum(rule_of(in, c, starts), weights); };
    const std::size_t steps[] = {c.lengths.size() == 1 ? 1u : 1009u, 17, 13, 1, 1};
    for (std::size_t i = 0; i < inputs.size(); ++i)
      expect_slopes(*grads.all()[i], inputs, i, steps[i], i < 3 ? tolerance(dtype(), 3e-5) : 3e-5, loss, "gradient");
  }
}

TEST_P(DeltaRuleTest, GradientsOfLongRulesFollowTheChainRule) {
  // Every element: of chunks that are complete, of one token and of no others, and where a device has not all columns of values at a time.
  for (const RuleCase& c :
       {RuleCase{1, 2, 128, 128, {70, 5, 130, 64, 0, 1}}, RuleCase{2, 2, 128, 128, {90}}, RuleCase{1, 1, 48, 160, {129}}})
    for (const bool is_long : {false, true}) {  // a state that stays, and keys that are alike
      const Ints starts = starts_of(c.lengths);
      Session s(kind());
      Rule rule(s, c, starts.back(), dtype());
      if (is_long) {
        const std::int64_t C = rule.qkv.shape()[1];
        for (std::int64_t i = 0; i < rule.qkv.num_elements(); ++i)
          if (i % C < 2 * c.M * c.K) Session::set(rule.qkv, i, get(rule.qkv, i) + 1.0f);
        for (std::int64_t i = 0; i < rule.a.num_elements(); ++i) Session::set(rule.a, i, get(rule.a, i) - 6.0f);
      }
      const Tensor dout = s.random({starts.back(), c.N * c.D}, dtype(), 16);
      RuleGrads grads(s, rule);
      delta_rule_backward(s.ctx, grads.views(), dout, rule.in(), {.start_S = starts});
      const Numbers want = rule_gradients_of(rule.numbers(), c, starts, numbers_in(dout));
      for (std::size_t i = 0; i < want.size(); ++i)
        EXPECT_LT(worst_error(values(*grads.all()[i]), want[i], 0.02), i < 3 ? tolerance(dtype(), 3e-4) : 3e-4)
            << "gradient " << i << ", D " << c.D << (is_long ? ", long" : "");
    }
}

TEST_P(DeltaRuleTest, GradientsOfTheRuleHaveTheSameBits) {
  // The second sequence alone, and with others beside it, which move the borders of the pieces that it is cut into.
  for (const RuleCase& c : {RuleCase{2, 4, 32, 80, {3, 600, 33}}, RuleCase{1, 2, 128, 128, {3, 150, 33}}}) {
    const std::int32_t length = c.lengths[1];
    const Ints starts = starts_of(c.lengths), own = {0, length};
    std::vector<Tensor> first;
    for (const int threads : {1, 2, 3}) {
      Session s(kind(), threads);
      const Rule rule(s, c, starts.back(), dtype());
      const Tensor dout = s.random({starts.back(), c.N * c.D}, dtype(), 16);
      RuleGrads grads(s, rule), alone(s, rule);
      delta_rule_backward(s.ctx, grads.views(), dout, rule.in(), {.start_S = starts});
      const std::vector<const Tensor*> all = grads.all();
      if (threads == 1)
        for (const Tensor* t : all) first.push_back(t->clone());
      for (std::size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(same_bits(*all[i], first[i])) << threads << ": " << i;
      const auto part = [&](const Tensor& t) { return t.slice(3, length); };
      delta_rule_backward(s.ctx,
                          {.dqkv_TC = alone.dqkv.view().rows(3, length),
                           .db_TN = alone.db.view().rows(3, length),
                           .da_TN = alone.da.view().rows(3, length)},
                          part(dout), rule.in(part(rule.qkv), part(rule.b), part(rule.a)), {.start_S = own});
      EXPECT_TRUE(same_bits(part(alone.dqkv), part(grads.dqkv)) && same_bits(part(alone.db), part(grads.db)) &&
                  same_bits(part(alone.da), part(grads.da)));
      // Again, added to what is there.
      delta_rule_backward(s.ctx, grads.views(), dout, rule.in(), {.start_S = starts});
      for (std::int64_t n = 0; n < c.N; ++n)
        EXPECT_NEAR(get(grads.drate, n), 2 * get(first[3], n), 1e-5 * std::abs(get(first[3], n)) + 1e-6) << n;
    }
  }
}

// What stands behind.

std::vector<double> gated_norm_of(const Numbers& in, std::int64_t D) {
  std::vector<double> y(in[0].size());
  for (std::size_t first = 0; first < y.size(); first += static_cast<std::size_t>(D)) {
    double squares = 0;
    for (std::size_t i = first; i < first + static_cast<std::size_t>(D); ++i) squares += in[0][i] * in[0][i];
    for (std::size_t i = first; i < first + static_cast<std::size_t>(D); ++i)
      y[i] = in[0][i] / std::sqrt(squares / static_cast<double>(D) + 1e-6) * in[2][i - first] * silu_of(in[1][i]);
  }
  return y;
}

TEST_P(DeltaRuleTest, GatedNormFollowsItsDefinition) {
  for (const auto& [T, heads, D] : {std::array<std::int64_t, 3>{1, 1, 1}, {3, 5, 19}, {270, 3, 32}, {2, 4, 128}, {2, 2, 256}}) {
    Session s(kind());
    const std::int64_t V = heads * D;
    Tensor x = s.random({T, V}, dtype(), 1), gate = s.random({T, V}, dtype(), 2), w = s.random({D}, DType::kF32, 3),
           dy = s.random({T, V}, dtype(), 4);
    Tensor y = s.poisoned({T, V}, dtype()), dx = s.poisoned({T, V}, dtype()), dgate = s.poisoned({T, V}, dtype()),
           dw = s.filled({D}, DType::kF32, 0.0f);
    gated_head_norm(s.ctx, y, x, gate, w, 1e-6f);
    gated_head_norm_backward(s.ctx, dx, dgate, dw, dy, x, gate, w, 1e-6f);
    const Numbers inputs = {numbers_in(x), numbers_in(gate), numbers_in(w)};
    EXPECT_LT(worst_error(values(y), gated_norm_of(inputs, D), 1.0), tolerance(dtype(), 3e-6)) << D;
    const std::vector<double> weights = numbers_in(dy);
    const auto loss = [&](const Numbers& in) { return weighted_sum(gated_norm_of(in, D), weights); };
    const std::size_t step = static_cast<std::size_t>(T * V / 40 + 1);
    expect_slopes(dx, inputs, 0, step, tolerance(dtype(), 2e-5), loss, "dx");
    expect_slopes(dgate, inputs, 1, step, tolerance(dtype(), 2e-5), loss, "dgate");
    expect_slopes(dw, inputs, 2, step > 40 ? 7 : 1, 2e-5, loss, "dw");
    // In place, and a row alone.
    Tensor row = x.slice(T - 1, 1).clone();
    gated_head_norm(s.ctx, row, row, gate.slice(T - 1, 1), w, 1e-6f);
    EXPECT_TRUE(same_bits(row, y.slice(T - 1, 1))) << D;
    Session three(kind(), 3);
    Tensor again = s.filled({D}, DType::kF32, 0.0f);
    gated_head_norm_backward(three.ctx, dx, dgate, again, dy, x, gate, w, 1e-6f);
    EXPECT_TRUE(same_bits(again, dw)) << D;
  }
}

TEST_P(DeltaRuleTest, GatesOfAttentionHeads) {
  Session s(kind());
  for (const auto& [T, H, D, rest] : {std::array<std::int64_t, 4>{1, 1, 1, 0}, {5, 3, 24, 7}, {33, 2, 64, 128}}) {
    const std::int64_t E = 2 * H * D + rest, Q = H * D;
    Tensor in = s.random({T, E}, dtype(), 1), x = s.random({T, Q}, dtype(), 2), dy = s.random({T, Q}, dtype(), 3);
    Tensor plain = s.poisoned({T, E - Q}, dtype()), y = s.poisoned({T, Q}, dtype()), dx = s.poisoned({T, Q}, dtype());
    Tensor din = s.poisoned({T, E}, dtype());
    drop_gates(s.ctx, plain, in, H, D);
    gate_heads(s.ctx, y, x, in, H, D);
    gate_heads_backward(s.ctx, dx, din, dy, x, in, H, D);
    EXPECT_TRUE(std::isnan(get(din, 0))) << "the gradient of a query";
    drop_gates_backward(s.ctx, din, plain, H, D);
    const double limit = tolerance(dtype(), 1e-6);
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t i = 0; i < Q; ++i) {
        const std::int64_t h = i / D, query = t * E + 2 * h * D + i % D, of_gate = query + D;
        const double open = logistic(static_cast<double>(get(in, of_gate))), v = get(x, t * Q + i), d = get(dy, t * Q + i);
        EXPECT_EQ(get(plain, t * (E - Q) + i), get(in, query));
        EXPECT_EQ(get(din, query), get(in, query));
        EXPECT_NEAR(static_cast<double>(get(y, t * Q + i)), v * open, limit * (1 + std::abs(v)));
        EXPECT_NEAR(static_cast<double>(get(dx, t * Q + i)), d * open, limit * (1 + std::abs(d)));
        EXPECT_NEAR(static_cast<double>(get(din, of_gate)), d * v * open * (1 - open), limit * (1 + std::abs(d * v)));
      }
      for (std::int64_t i = 0; i < rest; ++i) {
        EXPECT_EQ(get(plain, t * (E - Q) + Q + i), get(in, t * E + 2 * Q + i));
        EXPECT_EQ(get(din, t * E + 2 * Q + i), get(in, t * E + 2 * Q + i));
      }
    }
    const Tensor out = y.clone(), slope = dx.clone();
    gate_heads(s.ctx, x, x, in, H, D);
    EXPECT_TRUE(same_bits(x, out)) << "in place";
    Tensor fresh = s.random({T, Q}, dtype(), 2);
    gate_heads_backward(s.ctx, dy, din, dy, fresh, in, H, D);
    EXPECT_TRUE(same_bits(dy, slope)) << "in place";
  }
}

// Against transformers.

/// The formula of tools/make_delta_rule_golden.py.
Tensor golden_values(Session& s, Shape shape, std::uint32_t seed, float scale, float offset = 0.0f) {
  Tensor t = Tensor::empty(s.runtime, shape, DType::kF32);
  for (std::int64_t i = 0; i < t.num_elements(); ++i) {
    std::uint32_t u = static_cast<std::uint32_t>(i) * 2654435761u + seed * 40503u + 12345u;
    u ^= u >> 15;
    u *= 2246822519u;
    u ^= u >> 13;
    t.as<float>()[i] = (static_cast<float>(u >> 8) * 0x1.0p-23f - 1.0f) * scale + offset;
  }
  return t;
}
template <std::size_t kCount>
void expect_golden(const Tensor& got, const double (&want)[kCount], int step, const char* what, double limit = 2e-5) {
  ASSERT_EQ((got.num_elements() + step - 1) / step, static_cast<std::int64_t>(kCount)) << what;
  for (std::size_t i = 0; i < kCount; ++i)
    EXPECT_NEAR(static_cast<double>(get(got, static_cast<std::int64_t>(i) * step)), want[i], limit * (1.0 + std::abs(want[i])))
        << what << ' ' << i;
}

TEST_P(DeltaRuleTest, AgreesWithTransformers) {
  if (dtype() != DType::kF32) return;  // the numbers are of fp32
  Session s(kind());
  const Ints starts = starts_of({70, 5});
  const std::int64_t T = 75, W = 4, D = 32;
  const RuleCase c{2, 4, 16, D, {}};
  const std::int64_t C = 2 * c.M * c.K + c.N * D, V = c.N * D;
  Tensor x = golden_values(s, {T, C}, 1, 2.0f), weight = golden_values(s, {C, W}, 2, 1.0f), gate = golden_values(s, {T, V}, 7, 2.0f),
         w = golden_values(s, {D}, 8, 1.0f, 1.0f), dy = golden_values(s, {T, V}, 9, 1.0f);
  Rule rule(s, c, T, DType::kF32);
  rule.b = golden_values(s, {T, c.N}, 3, 2.0f), rule.a = golden_values(s, {T, c.N}, 4, 2.0f);
  rule.rate = golden_values(s, {c.N}, 5, 1.0f), rule.bias = golden_values(s, {c.N}, 6, 1.0f);
  Tensor out = s.poisoned({T, V}, DType::kF32), y = s.poisoned({T, V}, DType::kF32);
  const StateRows rows{.start_S = starts};
  causal_conv(s.ctx, rule.qkv, x, weight, {}, rows);
  delta_rule(s.ctx, out, {}, rule.in(), rows);
  gated_head_norm(s.ctx, y, out, gate, w, 1e-6f);
  expect_golden(rule.qkv, golden::kConv, golden::kConvStep, "convolution");
  expect_golden(out, golden::kRule, golden::kRuleStep, "rule");
  expect_golden(y, golden::kNorm, golden::kNormStep, "norm");
  Tensor dout = s.poisoned({T, V}, DType::kF32), dgate = s.poisoned({T, V}, DType::kF32), dw = s.filled({D}, DType::kF32, 0.0f);
  Tensor dx = s.poisoned({T, C}, DType::kF32), dweight = s.filled({C, W}, DType::kF32, 0.0f);
  RuleGrads grads(s, rule);
  gated_head_norm_backward(s.ctx, dout, dgate, dw, dy, out, gate, w, 1e-6f);
  delta_rule_backward(s.ctx, grads.views(), dout, rule.in(), rows);
  causal_conv_backward(s.ctx, dx, dweight, grads.dqkv, x, weight, rows);
  expect_golden(dout, golden::kNormDx, golden::kNormDxStep, "gradient of the norm's input");
  expect_golden(dgate, golden::kNormDgate, golden::kNormDgateStep, "gradient of the norm's gate");
  expect_golden(dw, golden::kNormDw, golden::kNormDwStep, "gradient of the norm's weight");
  expect_golden(grads.dqkv, golden::kRuleDqkv, golden::kRuleDqkvStep, "gradient of queries, keys and values");
  expect_golden(grads.db, golden::kRuleDb, golden::kRuleDbStep, "gradient of b");
  expect_golden(grads.da, golden::kRuleDa, golden::kRuleDaStep, "gradient of a");
  expect_golden(grads.drate, golden::kRuleDrate, golden::kRuleDrateStep, "gradient of the rate", 1e-4);
  expect_golden(grads.dbias, golden::kRuleDbias, golden::kRuleDbiasStep, "gradient of the bias", 1e-4);
  expect_golden(dx, golden::kConvDx, golden::kConvDxStep, "gradient of the convolution's input");
  expect_golden(dweight, golden::kConvDweight, golden::kConvDweightStep, "gradient of the convolution's weight");
}

TEST_P(DeltaRuleTest, BadShapesAreErrors) {
  Session s(kind());
  const RuleCase c{2, 4, 16, 32, {}};
  const std::int64_t T = 6, C = 2 * c.M * c.K + c.N * c.D;
  const Rule rule(s, c, T, dtype());
  Tensor out = s.poisoned({T, c.N * c.D}, dtype()), state = s.poisoned({3, c.N * c.K * c.D}, DType::kF32),
         weight = s.random({C, 4}, DType::kF32, 1), inputs = s.poisoned({3, 3, C}, dtype()), y = s.poisoned({T, C}, dtype());
  const auto run = [&](const DeltaRule& in, const StateRows& rows) { delta_rule(s.ctx, out, state, in, rows); };
  const auto with = [&](auto change) {
    DeltaRule in = rule.in();
    change(in);
    return in;
  };
  const Ints starts = {0, 2, 6}, slots = {2, 0}, begins = {0, 4};
  EXPECT_NO_THROW(run(rule.in(), {.start_S = starts, .slot_S = slots, .begin_S = Ints{0, 0}}));
  EXPECT_THROW(run(with([](DeltaRule& in) { in.num_key_heads = 3; }), {.start_S = starts}), Error);
  EXPECT_THROW(run(with([](DeltaRule& in) { in.num_value_heads = 2; }), {.start_S = starts}), Error);
  EXPECT_THROW(run(with([](DeltaRule& in) { in.key_dim = 24, in.value_dim = 28; }), {.start_S = starts}), Error);
  EXPECT_THROW(run(with([](DeltaRule& in) { in.b_TN = in.decay_rate_N; }), {.start_S = starts}), Error);
  for (const Ints& bad : {Ints{}, Ints{0, 5}, Ints{1, 6}, Ints{0, 4, 2, 6}}) {
    EXPECT_THROW(run(rule.in(), {.start_S = bad}), Error);
    EXPECT_THROW(causal_conv(s.ctx, y, rule.qkv, weight, inputs, {.start_S = bad}), Error);
  }
  for (const auto& [bad_slots, bad_begins] : std::vector<std::pair<Ints, Ints>>{
           {{2}, {0}}, {{2, 0}, {0}}, {{2, 2}, {0, 0}}, {{0, 3}, {0, 0}}, {{-1, 0}, {0, 0}}, {{0, 1}, {0, -1}}}) {
    const StateRows rows{.start_S = starts, .slot_S = bad_slots, .begin_S = bad_begins};
    EXPECT_THROW(run(rule.in(), rows), Error);
    EXPECT_THROW(causal_conv(s.ctx, y, rule.qkv, weight, inputs, rows), Error);
  }
  RuleGrads grads(s, rule);
  const StateRows going_on{.start_S = starts, .slot_S = slots, .begin_S = begins};
  EXPECT_THROW(delta_rule_backward(s.ctx, grads.views(), out, rule.in(), going_on), Error);
  DeltaRuleGrads one = grads.views();
  one.ddecay_bias_N = {};
  EXPECT_THROW(delta_rule_backward(s.ctx, one, out, rule.in(), {.start_S = starts}), Error);
  EXPECT_THROW(causal_conv_backward(s.ctx, y, weight, y, rule.qkv, weight, going_on), Error);
  EXPECT_THROW(causal_conv(s.ctx, y, rule.qkv, s.random({C, 9}, DType::kF32, 1), {}, {.start_S = starts}), Error);
  EXPECT_THROW(causal_conv(s.ctx, y, rule.qkv, weight, s.poisoned({3, 2, C}, dtype()), going_on), Error);
  EXPECT_THROW(gated_head_norm(s.ctx, out, out, out, s.random({33}, DType::kF32, 1), 1e-6f), Error);
  EXPECT_THROW(drop_gates(s.ctx, y, rule.qkv, 2, 16), Error);
  EXPECT_THROW(gate_heads(s.ctx, y, y, rule.qkv, 2, 16), Error);
}

PRL_OP_TEST_KINDS(DeltaRuleTest);

}  // namespace
}  // namespace prl::ops
