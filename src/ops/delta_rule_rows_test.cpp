#include <cmath>
#include <numeric>

#include "ops/delta_rule.hpp"
#include "ops/test_support.hpp"

// What stands around the delta rule, over more rows, channels and heads than a GPU takes at a time, in rows that begin at 16 bytes, which a
// GPU reads several elements at a time, and in rows that do not. Both give the same bits.

namespace prl::ops {
namespace {

using namespace testing;

class DeltaRuleRowsTest : public OpTest {};

using Ints = std::vector<std::int32_t>;
using Doubles = std::vector<double>;

constexpr std::int64_t kOtherColumns = 16;

double logistic_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }
Doubles doubles_in(const Tensor& t) {
  const std::vector<float> v = values(t);
  return {v.begin(), v.end()};
}

/// A matrix as columns [first, first + C) of one that is wider by kOtherColumns; the others are NaN.
class ColumnsOf {
 public:
  ColumnsOf(Session& s, const Tensor& from, std::int64_t first)
      : first_(first), num_rows_(from.shape()[0]), num_cols_(from.shape()[1]), all_(s.poisoned({num_rows_, width()}, from.dtype())) {
    for (std::int64_t i = 0; i < from.num_elements(); ++i) Session::set(all_, at(i), get(from, i));
  }
  TensorView view() { return all_.view().columns(first_, num_cols_); }
  Tensor copy(Session& s) const {
    Tensor out = s.poisoned({num_rows_, num_cols_}, all_.dtype());
    for (std::int64_t i = 0; i < out.num_elements(); ++i) Session::set(out, i, get(all_, at(i)));
    return out;
  }
  /// Whether the other columns are as they were.
  bool others_are_untouched() const {
    std::int64_t untouched = 0;
    for (std::int64_t i = 0; i < all_.num_elements(); ++i) {
      const std::int64_t c = i % width() - first_;
      if (c < 0 || c >= num_cols_) untouched += std::isnan(get(all_, i)) ? 1 : 0;
    }
    return untouched == num_rows_ * kOtherColumns;
  }

 private:
  std::int64_t width() const { return num_cols_ + kOtherColumns; }
  std::int64_t at(std::int64_t i) const { return i / num_cols_ * width() + first_ + i % num_cols_; }
  std::int64_t first_, num_rows_, num_cols_;
  Tensor all_;
};

struct ConvResult {
  Doubles y, dx, dweight;
};
/// The definition, and the gradients of sum(dy * y).
ConvResult conv_result(const Doubles& x, const Doubles& weight, const Doubles& dy, const Ints& starts, std::int64_t C, std::int64_t W) {
  ConvResult r{Doubles(x.size()), Doubles(x.size()), Doubles(weight.size())};
  for (std::size_t s = 0; s + 1 < starts.size(); ++s)
    for (std::int64_t t = starts[s]; t < starts[s + 1]; ++t)
      for (std::int64_t c = 0; c < C; ++c) {
        const std::int64_t first = std::max<std::int64_t>(0, W - 1 - (t - starts[s]));  // the first tap with an input
        const auto from = [&](std::int64_t w) { return static_cast<std::size_t>((t - (W - 1) + w) * C + c); };
        const auto tap = [&](std::int64_t w) { return static_cast<std::size_t>(c * W + w); };
        double sum = 0;
        for (std::int64_t w = first; w < W; ++w) sum += weight[tap(w)] * x[from(w)];
        const double open = logistic_of(sum), d = dy[from(W - 1)] * (open + sum * open * (1 - open));
        r.y[from(W - 1)] = sum * open;
        for (std::int64_t w = first; w < W; ++w) {
          r.dx[from(w)] += d * weight[tap(w)];
          r.dweight[tap(w)] += d * x[from(w)];
        }
      }
  return r;
}

TEST_P(DeltaRuleRowsTest, ConvolutionHasTheSameBitsAnywhere) {
  const Ints starts = {0, 70, 70, 70, 200, 201, 203, 267, 270};
  const std::int64_t T = starts.back(), C = 520;
  Session s(kind());
  const Tensor x = s.random({T, C}, dtype(), 1), dy = s.random({T, C}, dtype(), 3), none = s.poisoned({T, C}, dtype());
  for (const std::int64_t W : {2, 3, 4, 5}) {
    const Tensor weight = s.random({C, W}, DType::kF32, 2);
    Tensor y, dx, dweight;
    for (const std::int64_t first : {8, 16, 3}) {
      ColumnsOf in(s, x, first), din(s, dy, first), out(s, none, first), slope(s, none, first);
      Tensor sums = s.filled({C, W}, DType::kF32, 0.0f);
      causal_conv(s.ctx, out.view(), in.view(), weight, {}, {.start_S = starts});
      causal_conv_backward(s.ctx, slope.view(), sums, din.view(), in.view(), weight, {.start_S = starts});
      if (!y.defined()) y = out.copy(s), dx = slope.copy(s), dweight = sums.clone();
      EXPECT_TRUE(same_bits(out.copy(s), y)) << W << ", " << first;
      EXPECT_TRUE(same_bits(slope.copy(s), dx) && same_bits(sums, dweight)) << W << ", " << first;
      EXPECT_TRUE(out.others_are_untouched() && slope.others_are_untouched()) << W << ", " << first;
    }
    const ConvResult want = conv_result(doubles_in(x), doubles_in(weight), doubles_in(dy), starts, C, W);
    EXPECT_LT(worst_error(values(y), want.y, 1.0), tolerance(dtype(), 2e-6)) << W;
    EXPECT_LT(worst_error(values(dx), want.dx, 1.0), tolerance(dtype(), 1e-5)) << W;
    EXPECT_LT(worst_error(values(dweight), want.dweight, 1.0), 1e-4) << W;
  }
}

struct GatedNormResult {
  Doubles y, dx, dgate, dw;
};
GatedNormResult gated_norm_result(const Doubles& x, const Doubles& gate, const Doubles& w, const Doubles& dy) {
  const std::size_t D = w.size();
  GatedNormResult r{Doubles(x.size()), Doubles(x.size()), Doubles(x.size()), Doubles(D)};
  for (std::size_t first = 0; first < x.size(); first += D) {
    double squares = 0, dot = 0;
    for (std::size_t i = first; i < first + D; ++i) {
      squares += x[i] * x[i];
      dot += dy[i] * gate[i] * logistic_of(gate[i]) * w[i - first] * x[i];
    }
    const double count = static_cast<double>(D), scale = 1 / std::sqrt(squares / count + 1e-6);
    for (std::size_t i = first; i < first + D; ++i) {
      const double open = logistic_of(gate[i]), silu = gate[i] * open, normed = x[i] * scale;
      r.y[i] = normed * w[i - first] * silu;
      r.dx[i] = scale * (dy[i] * silu * w[i - first] - normed * dot * scale / count);
      r.dgate[i] = dy[i] * normed * w[i - first] * (open + silu * (1 - open));
      r.dw[i - first] += dy[i] * silu * normed;
    }
  }
  return r;
}

TEST_P(DeltaRuleRowsTest, GatedNormHasTheSameBitsAnywhere) {
  // The first: more heads than a GPU has places for, and a number of them in a row that divides no number of places.
  for (const auto& [T, heads, D] : {std::array<std::int64_t, 3>{is_watched() ? 300 : 4700, 3, 32}, {90, 5, 128}, {40, 3, 200}}) {
    Session s(kind());
    const std::int64_t V = heads * D;
    const Tensor x = s.random({T, V}, dtype(), 1), gate = s.random({T, V}, dtype(), 2), w = s.random({D}, DType::kF32, 3),
                 dy = s.random({T, V}, dtype(), 4), none = s.poisoned({T, V}, dtype());
    Tensor y, dx, dgate, dw;
    for (const std::int64_t first : {8, 16, 3}) {
      ColumnsOf in(s, x, first), gates(s, gate, first), din(s, dy, first), out(s, none, first), slope(s, none, first),
          gate_slope(s, none, first);
      Tensor sums = s.filled({D}, DType::kF32, 0.0f);
      gated_head_norm(s.ctx, out.view(), in.view(), gates.view(), w, 1e-6f);
      gated_head_norm_backward(s.ctx, slope.view(), gate_slope.view(), sums, din.view(), in.view(), gates.view(), w, 1e-6f);
      if (!y.defined()) y = out.copy(s), dx = slope.copy(s), dgate = gate_slope.copy(s), dw = sums.clone();
      EXPECT_TRUE(same_bits(out.copy(s), y)) << D << ", " << first;
      EXPECT_TRUE(same_bits(slope.copy(s), dx) && same_bits(gate_slope.copy(s), dgate) && same_bits(sums, dw)) << D << ", " << first;
      EXPECT_TRUE(out.others_are_untouched() && slope.others_are_untouched() && gate_slope.others_are_untouched()) << D << ", " << first;
    }
    const GatedNormResult want = gated_norm_result(doubles_in(x), doubles_in(gate), doubles_in(w), doubles_in(dy));
    EXPECT_LT(worst_error(values(y), want.y, 1.0), tolerance(dtype(), 3e-6)) << D;
    EXPECT_LT(worst_error(values(dx), want.dx, 1.0), tolerance(dtype(), 2e-5)) << D;
    EXPECT_LT(worst_error(values(dgate), want.dgate, 1.0), tolerance(dtype(), 2e-5)) << D;
    EXPECT_LT(worst_error(values(dw), want.dw, 1.0), 1e-4) << D;
    for (const std::int64_t t : {std::int64_t{0}, T / 2, T - 1}) {
      Tensor row = s.poisoned({1, V}, dtype());
      gated_head_norm(s.ctx, row, x.slice(t, 1), gate.slice(t, 1), w, 1e-6f);
      EXPECT_TRUE(same_bits(row, y.slice(t, 1))) << D << ", row " << t;
    }
  }
}

PRL_OP_TEST_KINDS(DeltaRuleRowsTest);

}  // namespace
}  // namespace prl::ops
