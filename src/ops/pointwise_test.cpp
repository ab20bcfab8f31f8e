#include "ops/pointwise.hpp"

#include <functional>
#include <limits>
#include <map>
#include <numbers>

#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class PointwiseTest : public OpTest {};

/// Odd widths, one below and one above the vector length, several rows.
struct Size {
  std::int64_t rows, cols;
};
constexpr Size kSizes[] = {{1, 1}, {3, 15}, {2, 17}, {150, 64}, {5, 576}, {300, 100}};

double sigmoid_in_fp64(double x) { return 1.0 / (1.0 + std::exp(-x)); }

TEST_P(PointwiseTest, RmsNormForwardAndBackward) {
  Session s(kind());
  for (const auto [R, C] : kSizes) {
    Tensor x = s.random({R, C}, dtype(), 1), w = s.random({C}, DType::kF32, 2), dy = s.random({R, C}, dtype(), 3),
           y = s.poisoned({R, C}, dtype()), dx = s.poisoned({R, C}, dtype());
    Tensor dw = s.filled({C}, DType::kF32, 0.5f);
    rms_norm(s.ctx, y, x, w, 1e-5f);
    rms_norm_backward(s.ctx, dx, dw, dy, x, w, 1e-5f, false);
    std::vector<double> want_y, want_dx, want_dw(static_cast<std::size_t>(C), 0.5);
    for (std::int64_t r = 0; r < R; ++r) {
      double squares = 0, dot = 0;
      for (std::int64_t c = 0; c < C; ++c) squares += std::pow(get(x, r * C + c), 2.0);
      const double scale = 1.0 / std::sqrt(squares / static_cast<double>(C) + 1e-5);
      for (std::int64_t c = 0; c < C; ++c) dot += static_cast<double>(get(dy, r * C + c)) * get(w, c) * get(x, r * C + c);
      for (std::int64_t c = 0; c < C; ++c) {
        const double a = get(x, r * C + c), g = get(dy, r * C + c);
        want_y.push_back(a * scale * get(w, c));
        want_dx.push_back(scale * g * get(w, c) - dot * scale * scale * scale / static_cast<double>(C) * a);
        want_dw[static_cast<std::size_t>(c)] += g * a * scale;
      }
    }
    EXPECT_LT(worst_error(values(y), want_y, 1.0), tolerance(dtype(), 1e-6));
    EXPECT_LT(worst_error(values(dx), want_dx, 1.0), tolerance(dtype(), 4e-6));
    EXPECT_LT(worst_error(values(dw), want_dw, 10.0), 3e-6);
    Tensor twice = dx.clone();
    rms_norm_backward(s.ctx, twice, dw, dy, x, w, 1e-5f, true);
    for (double& v : want_dx) v *= 2;
    EXPECT_LT(worst_error(values(twice), want_dx, 1.0), tolerance(dtype(), 4e-6));
  }
}

TEST_P(PointwiseTest, AddRmsNormEqualsItsParts) {
  Session s(kind());
  const std::int64_t R = 7, C = 77;
  Tensor x = s.random({R, C}, dtype(), 1), residual = s.random({R, C}, dtype(), 2), w = s.random({C}, DType::kF32, 3);
  Tensor y = s.poisoned({R, C}, dtype()), sum = s.poisoned({R, C}, dtype()), want_sum = s.poisoned({R, C}, dtype()),
         want = s.poisoned({R, C}, dtype());
  add_rms_norm(s.ctx, y, sum, x, residual, w, 1e-6f);
  add(s.ctx, want_sum, x, residual);
  rms_norm(s.ctx, want, want_sum, w, 1e-6f);
  EXPECT_TRUE(same_bits(sum, want_sum));
  EXPECT_TRUE(same_bits(y, want));
}

TEST_P(PointwiseTest, RmsNormOfStridedHeads) {
  Session s(kind());
  Tensor wide = s.random({10, 96}, dtype(), 1), w = s.random({32}, DType::kF32, 2), dense = s.poisoned({10, 32}, dtype()),
         y = s.poisoned({10, 32}, dtype());
  for (std::int64_t r = 0; r < 10; ++r)
    for (std::int64_t c = 0; c < 32; ++c) Session::set(dense, r * 32 + c, get(wide, r * 96 + 32 + c));
  rms_norm(s.ctx, y, dense, w, 1e-6f);
  const TensorView slice = wide.view().columns(32, 32);
  rms_norm(s.ctx, slice, slice, w, 1e-6f);  // in place
  for (std::int64_t r = 0; r < 10; ++r)
    for (std::int64_t c = 0; c < 32; ++c) EXPECT_EQ(get(wide, r * 96 + 32 + c), get(y, r * 32 + c));
}

/// Heads inside wider tokens: what rms_norm gives for each head's rows, and nothing outside of them is touched.
TEST_P(PointwiseTest, HeadNormIsRmsNormOfEachHead) {
  Session s(kind());
  for (const std::int64_t T : {2, 37}) {
    const std::int64_t heads = 5, D = 32, width = heads * D + 24, first = 8;
    Tensor x = s.random({T, width}, dtype(), 1), w = s.random({D}, DType::kF32, 2), dy = s.random({T, heads, D}, dtype(), 3);
    Tensor y = s.filled({T, width}, dtype(), 7.0f), dx = s.filled({T, width}, dtype(), 7.0f), dw = s.filled({D}, DType::kF32, 0.25f);
    const auto heads_of = [&](const Tensor& t) {
      return TensorView{t.as<char>() + first * static_cast<std::int64_t>(size_of(dtype())), {T, heads, D}, dtype(), s.runtime->device(), D};
    };
    head_norm(s.ctx, heads_of(y), width, heads_of(x), width, w, 1e-5f);
    head_norm_backward(s.ctx, heads_of(dx), width, dw, dy, 0, heads_of(x), width, w, 1e-5f);
    std::vector<double> want_dw(static_cast<std::size_t>(D), 0.25);
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t h = 0; h < heads; ++h) {
        Tensor row = s.poisoned({1, D}, dtype()), want = s.poisoned({1, D}, dtype()), want_dx = s.poisoned({1, D}, dtype());
        Tensor row_dw = s.filled({D}, DType::kF32, 0.0f);
        for (std::int64_t c = 0; c < D; ++c) Session::set(row, c, get(x, t * width + first + h * D + c));
        rms_norm(s.ctx, want, row, w, 1e-5f);
        rms_norm_backward(s.ctx, want_dx, row_dw, dy.slice(t, 1).reshaped({heads, D}).slice(h, 1), row, w, 1e-5f, false);
        for (std::int64_t c = 0; c < D; ++c) {
          EXPECT_EQ(get(y, t * width + first + h * D + c), get(want, c));
          EXPECT_EQ(get(dx, t * width + first + h * D + c), get(want_dx, c));
          want_dw[static_cast<std::size_t>(c)] += get(row_dw, c);
        }
      }
    EXPECT_LT(worst_error(values(dw), want_dw, 10.0), 3e-6);
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t c = 0; c < width; ++c) {
        if (c >= first && c < first + heads * D) continue;
        EXPECT_EQ(get(y, t * width + c), 7.0f);
        EXPECT_EQ(get(dx, t * width + c), 7.0f);
      }
  }
}

TEST_P(PointwiseTest, SwigluForwardAndBackward) {
  Session s(kind());
  for (const auto [T, F] : kSizes) {
    Tensor gu = s.random({T, 2 * F}, dtype(), 1, 3.0f), dout = s.random({T, F}, dtype(), 2), out = s.poisoned({T, F}, dtype()),
           dgu = s.poisoned({T, 2 * F}, dtype());
    swiglu(s.ctx, out, gu);
    swiglu_backward(s.ctx, dgu, dout, gu);
    std::vector<double> want, want_d(static_cast<std::size_t>(T * 2 * F));
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t f = 0; f < F; ++f) {
        const double g = get(gu, t * 2 * F + f), u = get(gu, t * 2 * F + F + f), d = get(dout, t * F + f), sg = sigmoid_in_fp64(g);
        want.push_back(g * sg * u);
        want_d[static_cast<std::size_t>(t * 2 * F + f)] = d * u * sg * (1 + g * (1 - sg));
        want_d[static_cast<std::size_t>(t * 2 * F + F + f)] = d * g * sg;
      }
    EXPECT_LT(worst_error(values(out), want, 1.0), tolerance(dtype(), 2e-6));
    EXPECT_LT(worst_error(values(dgu), want_d, 1.0), tolerance(dtype(), 3e-6));
  }
}

TEST_P(PointwiseTest, SwigluAtTheExtremes) {
  Session s(kind());
  Tensor gu = s.poisoned({1, 6}, dtype()), out = s.poisoned({1, 3}, dtype());
  const float gates[] = {-300.0f, 300.0f, std::numeric_limits<float>::quiet_NaN()};
  for (int i = 0; i < 3; ++i) {
    Session::set(gu, i, gates[i]);
    Session::set(gu, 3 + i, 1.0f);
  }
  swiglu(s.ctx, out, gu);
  EXPECT_NEAR(get(out, 0), 0.0, 1e-30);
  EXPECT_NEAR(get(out, 1), 300.0, 1.0);
  EXPECT_TRUE(std::isnan(get(out, 2)));
}

double gelu_in_fp64(double x) { return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x))); }
double gelu_slope_in_fp64(double x) {
  const double c = std::sqrt(2.0 / std::numbers::pi), t = std::tanh(c * (x + 0.044715 * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x);
}

TEST_P(PointwiseTest, GegluForwardAndBackward) {
  Session s(kind());
  for (const auto [T, F] : kSizes) {
    Tensor gu = s.random({T, 2 * F}, dtype(), 1, 3.0f), dout = s.random({T, F}, dtype(), 2), out = s.poisoned({T, F}, dtype()),
           dgu = s.poisoned({T, 2 * F}, dtype());
    geglu(s.ctx, out, gu);
    geglu_backward(s.ctx, dgu, dout, gu);
    std::vector<double> want, want_d(static_cast<std::size_t>(T * 2 * F));
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t f = 0; f < F; ++f) {
        const double g = get(gu, t * 2 * F + f), u = get(gu, t * 2 * F + F + f), d = get(dout, t * F + f);
        want.push_back(gelu_in_fp64(g) * u);
        want_d[static_cast<std::size_t>(t * 2 * F + f)] = d * u * gelu_slope_in_fp64(g);
        want_d[static_cast<std::size_t>(t * 2 * F + F + f)] = d * gelu_in_fp64(g);
      }
    EXPECT_LT(worst_error(values(out), want, 1.0), tolerance(dtype(), 2e-6));
    EXPECT_LT(worst_error(values(dgu), want_d, 1.0), tolerance(dtype(), 3e-6));
  }
}

// The cube of a large gate is no finite number.
TEST_P(PointwiseTest, GegluAtTheExtremes) {
  Session s(kind());
  const float gates[] = {-1e30f, -300.0f, 300.0f, 1e30f, std::numeric_limits<float>::quiet_NaN()};
  Tensor gu = s.poisoned({1, 10}, dtype()), out = s.poisoned({1, 5}, dtype()), dgu = s.poisoned({1, 10}, dtype()),
         dout = s.filled({1, 5}, dtype(), 1.0f);
  for (int i = 0; i < 5; ++i) {
    Session::set(gu, i, gates[i]);
    Session::set(gu, 5 + i, 1.0f);
  }
  geglu(s.ctx, out, gu);
  geglu_backward(s.ctx, dgu, dout, gu);
  for (int i = 0; i < 4; ++i) {
    const double slope = gates[i] > 0 ? 1.0 : 0.0, gelu = slope * get(gu, i);
    EXPECT_NEAR(get(out, i), gelu, 1e-30) << gates[i];
    EXPECT_NEAR(get(dgu, i), slope, 1e-30) << gates[i];
    EXPECT_NEAR(get(dgu, 5 + i), gelu, 1e-30) << gates[i];
  }
  for (const Tensor* t : {&out, &dgu}) EXPECT_TRUE(std::isnan(get(*t, 4)));
}

RopeTable rope_table(Session& s, std::int64_t positions, std::int64_t half) {
  RopeTable t{s.poisoned({positions, half}, DType::kF32), s.poisoned({positions, half}, DType::kF32)};
  for (std::int64_t p = 0; p < positions; ++p)
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
      t.cos_PR2.as<float>()[p * half + i] = static_cast<float>(std::cos(angle));
      t.sin_PR2.as<float>()[p * half + i] = static_cast<float>(std::sin(angle));
    }
  return t;
}

TEST_P(PointwiseTest, RopeRotatesHalvesAndBack) {
  Session s(kind());
  for (const auto& [D, half] : {std::pair<std::int64_t, std::int64_t>{16, 8}, {80, 40}, {128, 64}, {128, 32}, {32, 8}, {96, 3}}) {
    const std::int64_t T = 9, heads = 3, stride = heads * D + 8;
    const RopeTable table = rope_table(s, 50, half);
    Tensor x = s.random({T, stride}, dtype(), 1), ids = s.ints({0, 1, 2, 3, 10, 49, 0, 5, 5});
    const Tensor before = x.clone();
    const TensorView view{x.data(), {T, heads, D}, dtype(), s.runtime->device(), D};
    rope(s.ctx, view, stride, ids, table, false);
    for (std::int64_t t = 0; t < T; ++t) {
      const std::int64_t p = ids.as<std::int32_t>()[t];
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t i = 0; i < half; ++i) {
          const std::int64_t at = t * stride + h * D + i;
          const double c = get(table.cos_PR2, p * half + i), sn = get(table.sin_PR2, p * half + i), a = get(before, at),
                       b = get(before, at + half);
          EXPECT_NEAR(get(x, at), a * c - b * sn, tolerance(dtype(), 1e-6) * 4);
          EXPECT_NEAR(get(x, at + half), b * c + a * sn, tolerance(dtype(), 1e-6) * 4);
        }
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t i = h * D + 2 * half; i < (h + 1) * D; ++i) EXPECT_EQ(get(x, t * stride + i), get(before, t * stride + i));
      for (std::int64_t i = heads * D; i < stride; ++i) EXPECT_EQ(get(x, t * stride + i), get(before, t * stride + i));
    }
    rope(s.ctx, view, stride, ids, table, true);
    for (std::int64_t i = 0; i < x.num_elements(); ++i) EXPECT_NEAR(get(x, i), get(before, i), tolerance(dtype(), 1e-6) * 6);
  }
  Tensor x = s.random({1, 1, 16}, dtype(), 1), outside = s.ints({50});
  EXPECT_THROW(rope(s.ctx, x, 0, outside, rope_table(s, 50, 8), false), Error);
  EXPECT_THROW(rope(s.ctx, x, 0, s.ints({0}), rope_table(s, 50, 9), false), Error) << "18 of 16 elements";
}

/// Norm and rotation in one pass: bit for bit head_norm and then rope, and back as good as they. The GPU has a pass of its own for many
/// tokens, in which a block comes round several times.
TEST_P(PointwiseTest, NormRopeIsNormThenRope) {
  Session s(kind());
  struct Case {
    std::int64_t T, heads, kv_heads, D, num_pairs = D / 2;
  };
  std::vector<Case> cases = {{5, 6, 2, 64}, {37, 4, 4, 80}, {70, 2, 1, 16}, {21, 4, 2, 128, 32}, {6, 3, 1, 32, 8}};
  if (kind().is_cuda && dtype() == DType::kBF16)
    cases.insert(
        cases.end(),
        {{is_watched() ? 2000 : 16400, 4, 4, 80}, {1500, 16, 8, 128}, {1100, 6, 2, 128}, {1100, 8, 4, 64}, {1500, 12, 4, 128, 32}});
  for (const auto [T, heads, kv_heads, D, num_pairs] : cases) {
    SCOPED_TRACE(::testing::Message() << T << " tokens, heads " << heads << " and " << kv_heads << " of " << D << ", pairs " << num_pairs);
    const std::int64_t Q = heads * D, QK = Q + kv_heads * D, W = QK + kv_heads * D;
    const auto repeated = [&, T = T](std::int64_t width, std::uint64_t seed) {
      const std::int64_t period = std::min<std::int64_t>(T, 331);
      const Tensor once = s.random({period, width}, dtype(), seed);
      Tensor all = Tensor::empty(s.runtime, {T, width}, dtype());
      for (std::int64_t t = 0; t < T; t += period) {
        const std::int64_t n = std::min(period, T - t);
        std::memcpy(all.slice(t, n).data(), once.data(), once.slice(0, n).num_bytes());
      }
      return all;
    };
    const auto heads_of = [&, T = T, D = D](const Tensor& t, std::int64_t first, std::int64_t count) {
      return TensorView{t.as<char>() + first * static_cast<std::int64_t>(size_of(dtype())), {T, count, D}, dtype(), s.runtime->device(), D};
    };
    std::vector<std::int32_t> places;
    for (std::int64_t t = 0; t < T; ++t) places.push_back(static_cast<std::int32_t>(t % 50));
    const RopeTable table = rope_table(s, 50, num_pairs);
    const Tensor x = repeated(W, 1), q_norm = s.random({D}, DType::kF32, 2), k_norm = s.random({D}, DType::kF32, 3), ids = s.ints(places);
    const HeadInputs in{x, heads, kv_heads, D, q_norm, k_norm, 1e-6f, ids, &table};
    Tensor got = s.poisoned({T, QK}, dtype()), want = s.poisoned({T, QK}, dtype());
    norm_rope(s.ctx, got, in);
    head_norm(s.ctx, heads_of(want, 0, heads), QK, heads_of(x, 0, heads), W, q_norm, 1e-6f);
    head_norm(s.ctx, heads_of(want, Q, kv_heads), QK, heads_of(x, Q, kv_heads), W, k_norm, 1e-6f);
    rope(s.ctx, heads_of(want, 0, heads + kv_heads), QK, ids, table, false);
    EXPECT_TRUE(same_bits(got, want));

    Tensor dqk = repeated(QK, 4), turned = dqk.clone(), dqkv = s.filled({T, W}, dtype(), 7.0f), want_dqkv = dqkv.clone();
    Tensor dq_norm = s.filled({D}, DType::kF32, 0.25f), dk_norm = dq_norm.clone(), want_dq = dq_norm.clone(), want_dk = dq_norm.clone();
    norm_rope_backward(s.ctx, dqkv, dq_norm, dk_norm, dqk, in);
    rope(s.ctx, heads_of(turned, 0, heads + kv_heads), QK, ids, table, true);
    head_norm_backward(s.ctx, heads_of(want_dqkv, 0, heads), W, want_dq, heads_of(turned, 0, heads), QK, heads_of(x, 0, heads), W, q_norm,
                       1e-6f);
    head_norm_backward(s.ctx, heads_of(want_dqkv, Q, kv_heads), W, want_dk, heads_of(turned, Q, kv_heads), QK, heads_of(x, Q, kv_heads), W,
                       k_norm, 1e-6f);
    const auto error = [](const Tensor& a, const Tensor& b, double scale) {
      const std::vector<float> right = values(b);
      return worst_error(values(a), {right.begin(), right.end()}, scale);
    };
    EXPECT_LT(error(dqkv, want_dqkv, 1.0), tolerance(dtype(), 4e-6));
    const double many = std::sqrt(static_cast<double>(T * heads));
    EXPECT_LT(error(dq_norm, want_dq, many), 1e-5);
    EXPECT_LT(error(dk_norm, want_dk, many), 1e-5);
  }
}

TEST_P(PointwiseTest, EmbeddingAndItsGradient) {
  Session s(kind());
  const std::int64_t V = 11, H = 70;
  Tensor table = s.random({V, H}, dtype(), 1), ids = s.ints({3, 0, 3, 10, 3}), out = s.poisoned({5, H}, dtype()),
         dout = s.random({5, H}, dtype(), 2), dtable = s.filled({V, H}, DType::kF32, 1.0f);
  embedding(s.ctx, out, table, ids);
  embedding_backward(s.ctx, dtable, dout, ids);
  std::vector<double> want(static_cast<std::size_t>(V * H), 1.0);
  for (std::int64_t t = 0; t < 5; ++t)
    for (std::int64_t h = 0; h < H; ++h) {
      const std::int64_t id = ids.as<std::int32_t>()[t];
      EXPECT_EQ(get(out, t * H + h), get(table, id * H + h));
      want[static_cast<std::size_t>(id * H + h)] += get(dout, t * H + h);
    }
  EXPECT_LT(worst_error(values(dtable), want, 1.0), 1e-6);
  Tensor again = s.poisoned({5, H}, dtype());
  embedding(s.ctx, again, table, TokenIds(s.ints({3, -2, -1, 10, -1}), s.ints({3, 0})));
  for (std::int64_t i = 0; i < 5 * H; ++i) EXPECT_EQ(get(again, i), get(out, i)) << "drawn tokens are read where they lie";
  EXPECT_THROW(embedding(s.ctx, out, table, s.ints({0, 1, 2, 3, 11})), Error);
  EXPECT_THROW(embedding(s.ctx, out, table, s.ints({0, 1, 2, 3, -1})), Error);
  EXPECT_THROW(embedding(s.ctx, out, table, TokenIds(s.ints({0, 1, 2, 3, -3}), s.ints({3, 0}))), Error);
}

TEST_P(PointwiseTest, RowsAreStoredInTheirSlots) {
  Session s(kind());
  const std::int64_t C = 70;
  Tensor rows = s.random({4, C}, dtype(), 1), to = s.filled({6, C}, dtype(), 0.5f);
  store_rows(s.ctx, to, rows, s.ints({5, -1, 0, 2}));
  const std::vector<std::int64_t> row_of_slot{2, -1, 3, -1, -1, 0};
  for (std::int64_t slot = 0; slot < 6; ++slot)
    for (std::int64_t c = 0; c < C; ++c) {
      const std::int64_t row = row_of_slot[static_cast<std::size_t>(slot)];
      EXPECT_EQ(get(to, slot * C + c), row < 0 ? 0.5f : get(rows, row * C + c));
    }
  // A GPU leaves out what is in no slot: it writes nothing else, and says nothing.
  for (const std::int32_t none : {6, -2}) {
    const Tensor slots = s.ints({5, none, 0, 2});
    if (s.runtime->device().kind == DeviceKind::kCpu)
      EXPECT_THROW(store_rows(s.ctx, to, rows, slots), Error);
    else
      store_rows(s.ctx, to, rows, slots);
    for (const std::int64_t slot : {1, 3, 4}) EXPECT_EQ(get(to, slot * C), 0.5f) << none;
  }
}

TEST_P(PointwiseTest, AddMayAliasAndCastRounds) {
  Session s(kind());
  Tensor a = s.random({5, 33}, dtype(), 1), b = s.random({5, 33}, dtype(), 2), want = s.poisoned({5, 33}, dtype());
  add(s.ctx, want, a, b);
  for (std::int64_t i = 0; i < a.num_elements(); ++i)
    EXPECT_EQ(get(want, i), dtype() == DType::kBF16 ? to_f32(to_bf16(get(a, i) + get(b, i))) : get(a, i) + get(b, i));
  add(s.ctx, a, a, b);
  EXPECT_TRUE(same_bits(a, want));
  Tensor f = s.random({9001}, DType::kF32, 3), h = s.poisoned({9001}, DType::kBF16), back = s.poisoned({9001}, DType::kF32);
  f.as<float>()[5] = std::numeric_limits<float>::quiet_NaN();
  f.as<float>()[6] = 1.00390625f;  // ties
  f.as<float>()[7] = 1.01171875f;
  cast(s.ctx, h, f);
  cast(s.ctx, back, h);
  for (std::int64_t i = 0; i < 9001; ++i) {
    if (i == 5)
      EXPECT_TRUE(std::isnan(back.as<float>()[i]));  // which NaN is the device's choice
    else
      EXPECT_EQ(h.as<BFloat16>()[i].bits, to_bf16(f.as<float>()[i]).bits) << i;
    EXPECT_TRUE(i == 5 || back.as<float>()[i] == to_f32(h.as<BFloat16>()[i]));
  }
}

TEST_P(PointwiseTest, CastOfHalfPrecision) {
  Session s(kind());
  Tensor half = Tensor::empty(s.runtime, {65536}, DType::kF16), wide = s.poisoned({65536}, DType::kF32),
         back = Tensor::empty(s.runtime, {65536}, DType::kF16);
  for (std::uint32_t i = 0; i < 65536; ++i) half.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
  cast(s.ctx, wide, half);
  cast(s.ctx, back, wide);
  EXPECT_EQ(wide.as<float>()[0x3c00], 1.0f);
  EXPECT_EQ(wide.as<float>()[0x0001], 0x1.0p-24f);
  EXPECT_EQ(wide.as<float>()[0x7bff], 65504.0f);
  EXPECT_TRUE(std::isinf(wide.as<float>()[0xfc00]));
  for (std::uint32_t i = 0; i < 65536; ++i) {
    if (std::isnan(wide.as<float>()[i])) continue;
    ASSERT_EQ(back.as<std::uint16_t>()[i], i);
  }
}

TEST_P(PointwiseTest, SumOfSquaresAndScale) {
  Session s(kind());
  Tensor x = s.random({9000}, DType::kF32, 1);
  double want = 0;
  for (const float v : values(x)) want += static_cast<double>(v) * v;
  EXPECT_NEAR(sum_squares(s.ctx, x), want, want * 1e-6);
  scale(s.ctx, x, 0.5f);
  EXPECT_NEAR(sum_squares(s.ctx, x), want / 4, want * 1e-6);
  const Tensor y = s.random({5}, DType::kF32, 2), none = s.random({0, 3}, DType::kF32, 3);
  const ConstTensorView several[] = {x, none, y};
  EXPECT_NEAR(sum_squares(s.ctx, several), sum_squares(s.ctx, x) + sum_squares(s.ctx, y), want * 1e-9);
}

TEST_P(PointwiseTest, ChunkSquaresDependOnTheirElementsAlone) {
  Session s(kind());
  const std::int64_t n = 2 * kSquaresChunk + 100;
  const Tensor x = s.random({n}, DType::kF32, 1);
  std::vector<float> whole(3), last(2), none;
  const ConstTensorView all[] = {x}, rest[] = {x.slice(kSquaresChunk, n - kSquaresChunk)}, empty[] = {s.random({0}, DType::kF32, 1)};
  chunk_squares(s.ctx, whole, all);
  chunk_squares(s.ctx, last, rest);
  EXPECT_EQ(whole[1], last[0]);
  EXPECT_EQ(whole[2], last[1]);
  double sum = 0;
  for (const float square : whole) sum += static_cast<double>(square);
  EXPECT_NEAR(sum, sum_squares(s.ctx, x), sum * 1e-9);
  chunk_squares(s.ctx, none, empty);
  EXPECT_THROW(chunk_squares(s.ctx, last, all), Error);
  // Many tensors, short and long, at once: each has the sums that it has alone.
  const Tensor large = s.random({70 * kSquaresChunk + 5}, DType::kF32, 2);
  std::vector<ConstTensorView> several{x, empty[0], large};
  for (std::int64_t i = 1; i < 40; ++i) several.push_back(large.slice(i * 4000 + 4 * i, 2 * kSquaresChunk - 7 * i));
  std::vector<float> alone;
  for (const ConstTensorView& one : several) {
    std::vector<float> own(static_cast<std::size_t>((one.shape.num_elements() + kSquaresChunk - 1) / kSquaresChunk));
    chunk_squares(s.ctx, own, std::span(&one, 1));
    alone.insert(alone.end(), own.begin(), own.end());
  }
  std::vector<float> together(alone.size());
  chunk_squares(s.ctx, together, several);
  EXPECT_EQ(together, alone);
}

TEST_P(PointwiseTest, TheFirstElementThatIsNotFiniteIsFound) {
  Session s(kind());
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::int64_t n = 100'003;
  const auto with = [&](std::map<std::int64_t, float> odd) {
    Tensor x = s.filled({n}, dtype(), 3e38f);
    for (const auto& [at, value] : odd) Session::set(x, at, value);
    return x;
  };
  EXPECT_EQ(find_not_finite(s.ctx, with({})), -1);
  for (const std::int64_t at : {std::int64_t{0}, std::int64_t{5}, std::int64_t{4096}, n - 1})
    for (const float value : {kInf, -kInf, kNaN, -kNaN}) EXPECT_EQ(find_not_finite(s.ctx, with({{at, value}})), at);
  const Tensor two = with({{77'777, kNaN}, {99'999, kInf}});
  EXPECT_EQ(find_not_finite(s.ctx, two), 77'777);
  EXPECT_EQ(find_not_finite(s.ctx, two.slice(77'778, n - 77'778)), 99'999 - 77'778);  // from an odd address
  EXPECT_EQ(find_not_finite(s.ctx, two.slice(1, 77'776)), -1);
  EXPECT_EQ(find_not_finite(s.ctx, s.random({0}, dtype(), 1)), -1);
}

/// Rows and threads leave no trace in any of these.
TEST_P(PointwiseTest, BitsDoNotDependOnThreadsOrRows) {
  const std::int64_t R = 700, C = 130;
  std::vector<Tensor> first;
  for (const int threads : {1, 2, 3}) {
    Session s(kind(), threads);
    Tensor x = s.random({R, 2 * C}, dtype(), 1), half = s.random({R, C}, dtype(), 4), w = s.random({C}, DType::kF32, 2),
           dw = s.filled({C}, DType::kF32, 0.0f), grad = s.filled({50, C}, DType::kF32, 0.0f);
    std::vector<Tensor> out;
    for (int i = 0; i < 3; ++i) out.push_back(s.poisoned({R, C}, dtype()));
    for (int i = 0; i < 2; ++i) out.push_back(s.poisoned({R, 2 * C}, dtype()));
    out.push_back(s.poisoned({R, C}, dtype()));
    rms_norm(s.ctx, out[0], half, w, 1e-6f);
    swiglu(s.ctx, out[1], x);
    rms_norm_backward(s.ctx, out[2], dw, out[1], half, w, 1e-6f, false);
    swiglu_backward(s.ctx, out[3], half, x);
    geglu_backward(s.ctx, out[4], half, x);
    geglu(s.ctx, out[5], x);
    std::vector<std::int32_t> ids;
    for (std::int32_t t = 0; t < R; ++t) ids.push_back(t * 13 % 50);
    embedding_backward(s.ctx, grad, half, s.ints(ids));
    Tensor squares = s.filled({1}, DType::kF32, static_cast<float>(sum_squares(s.ctx, s.random({100000}, DType::kF32, 5))));
    out.insert(out.end(), {dw, grad, squares});
    if (first.empty()) first = out;
    for (std::size_t i = 0; i < out.size(); ++i)
      EXPECT_TRUE(same_bits(out[i], first[i])) << "output " << i << ", " << threads << " threads";
    Tensor row = s.poisoned({1, C}, dtype()), act = s.poisoned({1, C}, dtype());
    rms_norm(s.ctx, row, half.slice(333, 1), w, 1e-6f);
    swiglu(s.ctx, act, x.slice(333, 1));
    EXPECT_TRUE(same_bits(row, out[0].slice(333, 1)));
    EXPECT_TRUE(same_bits(act, out[1].slice(333, 1)));
    geglu(s.ctx, act, x.slice(333, 1));
    EXPECT_TRUE(same_bits(act, out[5].slice(333, 1)));
  }
}

PRL_OP_TEST_KINDS(PointwiseTest);

}  // namespace
}  // namespace prl::ops
