#include <cmath>

#include "ops/delta_rule.hpp"
#include "ops/pointwise.hpp"
#include "ops/test_support.hpp"

// State spaces and what Nemotron-H has beside them: the rule, biases of the convolution, the norm behind its gate, squares of what is above
// 0.

namespace prl::ops {
namespace {

using namespace testing;

class StateSpaceTest : public OpTest {};

using Starts = std::vector<std::int32_t>;
using Reals = std::vector<double>;

Reals reals_in(const Tensor& t) {
  const std::vector<float> v = values(t);
  return {v.begin(), v.end()};
}
double open_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }

struct SpaceCase {
  std::int64_t M, N, K, D;
  Starts starts;
  float min_step = 0.0f, max_step = std::numeric_limits<float>::infinity();
};
const std::vector<SpaceCase>& space_cases() {
  static const std::vector<SpaceCase> all = {{1, 1, 16, 16, {0, 1}},
                                             {2, 4, 32, 48, {0, 37, 37, 40}},
                                             {2, 2, 128, 64, {0, 5, 45}, 0.4f, 1.5f},
                                             {1, 3, 256, 32, {0, 20}},
                                             {1, 2, 64, 80, {0, 300, 317}, 0.1f}};
  return all;
}

/// All that a call needs.
struct Space {
  const SpaceCase& z;
  Tensor xbc, a, rate, bias, skip;
  Space(Session& s, const SpaceCase& c, DType dtype)
      : z(c),
        xbc(s.random({c.starts.back(), c.N * c.D + 2 * c.M * c.K}, dtype, 1, 0.5f)),
        a(s.random({c.starts.back(), c.N}, dtype, 2, 1.5f)),
        rate(s.random({c.N}, DType::kF32, 3)),
        bias(s.random({c.N}, DType::kF32, 4)),
        skip(s.random({c.N}, DType::kF32, 5)) {}
  DeltaRule in() const { return in(xbc, a); }
  DeltaRule in(const Tensor& xbc_TC, const Tensor& a_TN) const {
    return {.qkv_TC = xbc_TC,
            .b_TN = {},
            .a_TN = a_TN,
            .decay_rate_N = rate,
            .decay_bias_N = bias,
            .num_key_heads = z.M,
            .num_value_heads = z.N,
            .key_dim = z.K,
            .value_dim = z.D,
            .kind = RuleKind::kStateSpace,
            .skip_N = skip,
            .min_step = z.min_step,
            .max_step = z.max_step};
  }
};

struct SpaceResult {
  Reals out, dxbc, da, drate, dbias, dskip;
};
/// The definition and the gradients of sum(dout * out), with all states in memory.
SpaceResult space_result(const Space& space, const Reals& dout) {
  const SpaceCase& z = space.z;
  const std::int64_t T = z.starts.back(), C = z.N * z.D + 2 * z.M * z.K, first_key = z.N * z.D, first_query = first_key + z.M * z.K;
  const Reals x = reals_in(space.xbc), a = reals_in(space.a), rate = reals_in(space.rate), bias = reals_in(space.bias),
              skip = reals_in(space.skip);
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  SpaceResult r{Reals(size(T * z.N * z.D)), Reals(size(T * C)), Reals(size(T * z.N)), Reals(size(z.N)), Reals(size(z.N)), Reals(size(z.N))};
  for (std::size_t s = 0; s + 1 < z.starts.size(); ++s)
    for (std::int64_t n = 0; n < z.N; ++n) {
      const std::int64_t begin = z.starts[s], count = z.starts[s + 1] - begin, m = n / (z.N / z.M), states = z.K * z.D;
      Reals all(size((count + 1) * states)), decay(size(count)), step(size(count)), dstate(size(states));
      const auto slope = -std::exp(rate[size(n)]);
      for (std::int64_t t = 0; t < count; ++t) {
        const double free = std::log1p(std::exp(a[size((begin + t) * z.N + n)] + bias[size(n)]));
        step[size(t)] = std::min<double>(z.max_step, std::max<double>(z.min_step, free));
        decay[size(t)] = std::exp(slope * step[size(t)]);
        const double* row = &x[size((begin + t) * C)];
        for (std::int64_t j = 0; j < z.D; ++j) {
          double o = skip[size(n)] * row[n * z.D + j];
          for (std::int64_t i = 0; i < z.K; ++i) {
            double& to = all[size((t + 1) * states + i * z.D + j)];
            to = decay[size(t)] * all[size(t * states + i * z.D + j)] + row[first_key + m * z.K + i] * step[size(t)] * row[n * z.D + j];
            o += to * row[first_query + m * z.K + i];
          }
          r.out[size(((begin + t) * z.N + n) * z.D + j)] = o;
        }
      }
      for (std::int64_t t = count - 1; t >= 0; --t) {
        const double* row = &x[size((begin + t) * C)];
        double* drow = &r.dxbc[size((begin + t) * C)];
        double dstep = 0, dlog = 0;
        for (std::int64_t j = 0; j < z.D; ++j) {
          const double g = dout[size(((begin + t) * z.N + n) * z.D + j)], v = row[n * z.D + j];
          r.dskip[size(n)] += g * v;
          drow[n * z.D + j] += g * skip[size(n)];
          for (std::int64_t i = 0; i < z.K; ++i) {
            double& ds = dstate[size(i * z.D + j)];
            const double key = row[first_key + m * z.K + i];
            ds += g * row[first_query + m * z.K + i];
            drow[first_query + m * z.K + i] += g * all[size((t + 1) * states + i * z.D + j)];
            drow[first_key + m * z.K + i] += ds * step[size(t)] * v;
            drow[n * z.D + j] += ds * key * step[size(t)];
            dstep += ds * key * v;
            ds *= decay[size(t)];
            dlog += ds * all[size(t * states + i * z.D + j)];
          }
        }
        const double input = a[size((begin + t) * z.N + n)] + bias[size(n)], free = std::log1p(std::exp(input));
        const bool is_free = free > static_cast<double>(z.min_step) && free < static_cast<double>(z.max_step);
        const double dinput = is_free ? (dstep + dlog * slope) * open_of(input) : 0.0;
        r.da[size((begin + t) * z.N + n)] = dinput;
        r.drate[size(n)] += dlog * slope * step[size(t)];
        r.dbias[size(n)] += dinput;
      }
    }
  return r;
}

TEST_P(StateSpaceTest, FollowsItsDefinitionForwardAndBack) {
  for (const SpaceCase& c : space_cases()) {
    Session s(kind());
    const Space space(s, c, dtype());
    const std::int64_t T = c.starts.back(), V = c.N * c.D;
    Tensor out = s.poisoned({T, V}, dtype()), dout = s.random({T, V}, dtype(), 6), dxbc = s.poisoned(space.xbc.shape(), dtype()),
           da = s.poisoned({T, c.N}, dtype());
    std::vector<Tensor> sums;
    for (int i = 0; i < 3; ++i) sums.push_back(s.filled({c.N}, DType::kF32, 0.5f));
    const StateRows rows{.start_S = c.starts};
    delta_rule(s.ctx, out, {}, space.in(), rows);
    delta_rule_backward(s.ctx, {dxbc, {}, da, sums[0], sums[1], sums[2]}, dout, space.in(), rows);
    const SpaceResult want = space_result(space, reals_in(dout));
    const std::string what = std::to_string(c.K) + " by " + std::to_string(c.D);
    const auto scale = [](const Reals& v) {
      double most = 1;
      for (const double x : v) most = std::max(most, std::abs(x));
      return most;
    };
    EXPECT_LT(worst_error(values(out), want.out, scale(want.out)), tolerance(dtype(), 4e-6)) << what;
    EXPECT_LT(worst_error(values(dxbc), want.dxbc, scale(want.dxbc)), tolerance(dtype(), 1e-5)) << what;
    EXPECT_LT(worst_error(values(da), want.da, scale(want.da)), tolerance(dtype(), 2e-5)) << what;
    for (std::size_t i = 0; i < 3; ++i) {
      const Reals& wanted = i == 0 ? want.drate : i == 1 ? want.dbias : want.dskip;
      for (std::int64_t n = 0; n < c.N; ++n) sums[i].as<float>()[n] -= 0.5f;  // it was added to
      EXPECT_LT(worst_error(values(sums[i]), wanted, scale(wanted)), 5e-5) << what << ", parameter " << i;
    }
  }
}

TEST_P(StateSpaceTest, PartsAndStepsHaveTheSameBits) {
  const SpaceCase c{2, 4, 32, 48, {0, 70}};
  for (const int threads : {1, 3}) {
    Session s(kind(), threads);
    const Space space(s, c, dtype());
    const std::int64_t T = c.starts.back(), V = c.N * c.D, C = space.xbc.shape()[1];
    Tensor whole = s.poisoned({T, V}, dtype());
    delta_rule(s.ctx, whole, {}, space.in(), {.start_S = c.starts});
    const std::int64_t F = delta_rule_state_size(s.ctx.runtime->device().kind, dtype(), c.M, c.N, c.K, c.D, RuleKind::kStateSpace);
    for (const std::int64_t part : {70, 33, 7, 1}) {
      Tensor state = s.poisoned({3, F}, DType::kF32);
      for (std::int64_t first = 0; first < T; first += part) {
        const auto count = static_cast<std::int32_t>(std::min(part, T - first));
        Tensor xbc = s.poisoned({count, C}, dtype()), a = s.poisoned({count, c.N}, dtype()), out = s.poisoned({count, V}, dtype());
        for (std::int64_t i = 0; i < count * C; ++i) Session::set(xbc, i, get(space.xbc, first * C + i));
        for (std::int64_t i = 0; i < count * c.N; ++i) Session::set(a, i, get(space.a, first * c.N + i));
        const Starts starts = {0, count}, slots = {1}, begins = {static_cast<std::int32_t>(first)};
        delta_rule(s.ctx, out, state, space.in(xbc, a), {.start_S = starts, .slot_S = slots, .begin_S = begins});
        std::int64_t different = 0;
        for (std::int64_t i = 0; i < count * V; ++i) different += get(out, i) == get(whole, first * V + i) ? 0 : 1;
        EXPECT_EQ(different, 0) << "in parts of " << part << ", from " << first;
      }
      EXPECT_TRUE(std::isnan(get(state, 0)) && std::isnan(get(state, 2 * F))) << "slots that are nobody's";
    }
  }
}

TEST_P(StateSpaceTest, ConvolutionAddsItsBias) {
  Session s(kind());
  const Starts starts = {0, 70, 70, 75, 200};
  const std::int64_t T = 200, C = 48, W = 4;
  const Tensor x = s.random({T, C}, dtype(), 1), weight = s.random({C, W}, DType::kF32, 2), bias = s.random({C}, DType::kF32, 3),
               dy = s.random({T, C}, dtype(), 4);
  Tensor y = s.poisoned({T, C}, dtype()), dx = s.poisoned({T, C}, dtype()), dweight = s.filled({C, W}, DType::kF32, 0.0f),
         dbias = s.filled({C}, DType::kF32, 0.5f);
  causal_conv(s.ctx, y, x, weight, {}, {.start_S = starts}, bias);
  causal_conv_backward(s.ctx, dx, dweight, dy, x, weight, {.start_S = starts}, bias, dbias);
  Reals want(static_cast<std::size_t>(T * C)), wanted_bias(static_cast<std::size_t>(C), 0.5),
      wanted_weight(static_cast<std::size_t>(C * W));
  for (std::size_t q = 0; q + 1 < starts.size(); ++q)
    for (std::int64_t t = starts[q]; t < starts[q + 1]; ++t)
      for (std::int64_t c = 0; c < C; ++c) {
        double sum = static_cast<double>(get(bias, c));
        for (std::int64_t w = 0; w < W; ++w)
          if (const std::int64_t from = t - (W - 1) + w; from >= starts[q])
            sum += static_cast<double>(get(weight, c * W + w)) * static_cast<double>(get(x, from * C + c));
        const double open = open_of(sum), d = static_cast<double>(get(dy, t * C + c)) * (open + sum * open * (1 - open));
        want[static_cast<std::size_t>(t * C + c)] = sum * open;
        wanted_bias[static_cast<std::size_t>(c)] += d;
        for (std::int64_t w = 0; w < W; ++w)
          if (const std::int64_t from = t - (W - 1) + w; from >= starts[q])
            wanted_weight[static_cast<std::size_t>(c * W + w)] += d * static_cast<double>(get(x, from * C + c));
      }
  EXPECT_LT(worst_error(values(y), want, 1.0), tolerance(dtype(), 2e-6));
  EXPECT_LT(worst_error(values(dbias), wanted_bias, 1.0), 1e-4);
  EXPECT_LT(worst_error(values(dweight), wanted_weight, 1.0), 1e-4);
  // Token by token, as in decoding.
  Tensor state = s.poisoned({1, W - 1, C}, dtype());
  const Starts one = {0, 1}, slot = {0};
  for (std::int64_t t = 0; t < 70; ++t) {
    const Starts begin = {static_cast<std::int32_t>(t)};
    Tensor row = s.poisoned({1, C}, dtype());
    causal_conv(s.ctx, row, x.view().rows(t, 1), weight, state, {.start_S = one, .slot_S = slot, .begin_S = begin}, bias);
    for (std::int64_t c = 0; c < C; ++c) EXPECT_EQ(get(row, c), get(y, t * C + c)) << t << ", " << c;
  }
}

TEST_P(StateSpaceTest, NormIsOfWhatItsGateLetsThrough) {
  for (const auto& [T, G, D] : {std::array<std::int64_t, 3>{300, 2, 40}, {5, 3, 160}, {1, 1, 1280}}) {
    Session s(kind());
    const std::int64_t V = G * D;
    const Tensor x = s.random({T, V}, dtype(), 1), gate = s.random({T, V}, dtype(), 2), w = s.random({V}, DType::kF32, 3),
                 dy = s.random({T, V}, dtype(), 4);
    Tensor y = s.poisoned({T, V}, dtype()), dx = s.poisoned({T, V}, dtype()), dgate = s.poisoned({T, V}, dtype()),
           dw = s.filled({V}, DType::kF32, 0.0f);
    gated_group_norm(s.ctx, y, x, gate, w, G, 1e-3f);
    gated_group_norm_backward(s.ctx, dx, dgate, dw, dy, x, gate, w, G, 1e-3f);
    const Reals xs = reals_in(x), gates = reals_in(gate), ws = reals_in(w), dys = reals_in(dy);
    Reals want(xs.size()), want_dx(xs.size()), want_dgate(xs.size()), want_dw(ws.size());
    for (std::size_t first = 0; first < xs.size(); first += static_cast<std::size_t>(D)) {
      double squares = 0, dot = 0;
      const auto opened = [&](std::size_t i) { return xs[i] * gates[i] * open_of(gates[i]); };
      const auto column = [&](std::size_t i) { return i % static_cast<std::size_t>(V); };
      const std::size_t last = first + static_cast<std::size_t>(D);
      for (std::size_t i = first; i < last; ++i) squares += opened(i) * opened(i), dot += dys[i] * ws[column(i)] * opened(i);
      const double count = static_cast<double>(D), scale = 1 / std::sqrt(squares / count + 1e-3);
      for (std::size_t i = first; i < last; ++i) {
        const double open = open_of(gates[i]), silu = gates[i] * open;
        const double dh = scale * (dys[i] * ws[column(i)] - opened(i) * scale * scale * dot / count);
        want[i] = opened(i) * scale * ws[column(i)];
        want_dx[i] = dh * silu;
        want_dgate[i] = dh * xs[i] * (open + silu * (1 - open));
        want_dw[column(i)] += dys[i] * opened(i) * scale;
      }
    }
    EXPECT_LT(worst_error(values(y), want, 1.0), tolerance(dtype(), 2e-6)) << D;
    EXPECT_LT(worst_error(values(dx), want_dx, 1.0), tolerance(dtype(), 1e-5)) << D;
    EXPECT_LT(worst_error(values(dgate), want_dgate, 1.0), tolerance(dtype(), 1e-5)) << D;
    EXPECT_LT(worst_error(values(dw), want_dw, 1.0), 1e-4) << D;
  }
}

TEST_P(StateSpaceTest, SquaresAreOfWhatIsAboveZero) {
  Session s(kind());
  for (const bool has_factors : {false, true}) {
    const std::int64_t T = 9, F = 203;
    const Tensor x = s.random({T, F}, dtype(), 1), dout = s.random({T, F}, dtype(), 2), factors = s.random({T}, DType::kF32, 3);
    Tensor out = s.poisoned({T, F}, dtype()), dx = s.poisoned({T, F}, dtype()), dfactors = s.poisoned({T}, DType::kF32);
    const ConstTensorView by = has_factors ? ConstTensorView(factors) : ConstTensorView{};
    squared_relu(s.ctx, out, x, by);
    squared_relu_backward(s.ctx, dx, has_factors ? dfactors.view() : TensorView{}, dout, x, by);
    Reals want, want_dx, want_dfactors(static_cast<std::size_t>(T));
    for (std::int64_t i = 0; i < T * F; ++i) {
      const double v = std::max(0.0, static_cast<double>(get(x, i))), d = static_cast<double>(get(dout, i));
      const double f = has_factors ? static_cast<double>(get(factors, i / F)) : 1.0;
      want.push_back(f * v * v);
      want_dx.push_back(f * d * 2 * v);
      want_dfactors[static_cast<std::size_t>(i / F)] += d * v * v;
    }
    EXPECT_LT(worst_error(values(out), want, 1.0), tolerance(dtype(), 1e-6));
    EXPECT_LT(worst_error(values(dx), want_dx, 1.0), tolerance(dtype(), 1e-6));
    if (!has_factors) continue;
    EXPECT_LT(worst_error(values(dfactors), want_dfactors, 4.0), tolerance(dtype(), 1e-4));
  }
}

TEST_P(StateSpaceTest, RefusesWhatDoesNotFit) {
  Session s(kind());
  const SpaceCase c{2, 4, 32, 48, {0, 3}};
  const Space space(s, c, dtype());
  Tensor out = s.poisoned({3, c.N * c.D}, dtype());
  const StateRows rows{.start_S = c.starts};
  DeltaRule bad = space.in();
  bad.skip_N = s.random({3}, DType::kF32, 1);
  EXPECT_THROW(delta_rule(s.ctx, out, {}, bad, rows), Error);
  bad = space.in();
  bad.min_step = 2.0f, bad.max_step = 1.0f;
  EXPECT_THROW(delta_rule(s.ctx, out, {}, bad, rows), Error);
  EXPECT_THROW(gated_group_norm(s.ctx, out, out, out, s.random({c.N * c.D}, DType::kF32, 1), 5, 1e-6f), Error) << "192 columns";
  EXPECT_THROW(squared_relu(s.ctx, out, space.xbc, {}), Error);
}

PRL_OP_TEST_KINDS(StateSpaceTest);

}  // namespace
}  // namespace prl::ops
