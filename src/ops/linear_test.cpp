#include "ops/linear.hpp"

#include "ops/linear_cases.hpp"
#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class LinearTest : public OpTest {};

struct Operands {
  Tensor x, w, bias, dy;
  LinearWeightPtr packed;

  Operands(Session& s, const LinearCase& c, DType dtype)
      : x(s.random({c.T, c.K}, dtype, 1)),
        w(s.random({c.N, c.K}, DType::kF32, 2)),
        bias(s.random({c.N}, DType::kF32, 3)),
        dy(s.random({c.T, c.N}, dtype, 4)) {
    packed = pack_linear(s.ctx, w, c.bias ? ConstTensorView(bias) : ConstTensorView{}, dtype, true);
  }
  /// Weight as the product sees it.
  double weight(std::int64_t n, std::int64_t k) const {
    const float v = w.as<float>()[n * w.shape()[1] + k];
    return packed->dtype() == DType::kBF16 ? to_f32(to_bf16(v)) : v;
  }
};

TEST_P(LinearTest, AgreesWithPlainSums) {
  Session s(kind());
  for (const LinearCase& c : kLinearCases) {
    SCOPED_TRACE(c.name);
    Operands o(s, c, dtype());
    std::vector<double> want;
    for (std::int64_t t = 0; t < c.T; ++t)
      for (std::int64_t n = 0; n < c.N; ++n) {
        double sum = c.bias ? get(o.bias, n) : 0.0;
        for (std::int64_t k = 0; k < c.K; ++k) sum += static_cast<double>(get(o.x, t * c.K + k)) * o.weight(n, k);
        want.push_back(sum);
      }
    for (const DType out : {dtype(), DType::kF32}) {
      Tensor y = s.poisoned({c.T, c.N}, out);
      linear(s.ctx, y, o.x, *o.packed);
      EXPECT_LT(worst_error(values(y), want, std::sqrt(static_cast<double>(c.K))), tolerance(out, 2e-6));
    }
  }
}

TEST_P(LinearTest, InputGradient) {
  Session s(kind());
  for (const LinearCase& c : kLinearCases) {
    SCOPED_TRACE(c.name);
    Operands o(s, c, dtype());
    std::vector<double> want;
    for (std::int64_t t = 0; t < c.T; ++t)
      for (std::int64_t k = 0; k < c.K; ++k) {
        double sum = 0;
        for (std::int64_t n = 0; n < c.N; ++n) sum += static_cast<double>(get(o.dy, t * c.N + n)) * o.weight(n, k);
        want.push_back(sum);
      }
    Tensor dx = s.poisoned({c.T, c.K}, dtype());
    linear_backward_input(s.ctx, dx, o.dy, *o.packed, false);
    EXPECT_LT(worst_error(values(dx), want, std::sqrt(static_cast<double>(c.N))), tolerance(dtype(), 2e-6));
    linear_backward_input(s.ctx, dx, o.dy, *o.packed, true);
    for (double& v : want) v *= 2;
    EXPECT_LT(worst_error(values(dx), want, std::sqrt(static_cast<double>(c.N))), tolerance(dtype(), 2e-6));
  }
}

TEST_P(LinearTest, WeightGradientAccumulates) {
  Session s(kind());
  for (const LinearCase& c : kLinearCases) {
    SCOPED_TRACE(c.name);
    Operands o(s, c, dtype());
    Tensor dw = s.filled({c.N, c.K}, DType::kF32, 1.0f), db = s.filled({c.N}, DType::kF32, 2.0f);
    linear_backward_weight(s.ctx, dw, db, o.dy, o.x);
    std::vector<double> want_dw, want_db;
    for (std::int64_t n = 0; n < c.N; ++n) {
      double column = 2;
      for (std::int64_t t = 0; t < c.T; ++t) column += get(o.dy, t * c.N + n);
      want_db.push_back(column);
      for (std::int64_t k = 0; k < c.K; ++k) {
        double sum = 1;
        for (std::int64_t t = 0; t < c.T; ++t) sum += static_cast<double>(get(o.dy, t * c.N + n)) * get(o.x, t * c.K + k);
        want_dw.push_back(sum);
      }
    }
    const double scale = std::sqrt(static_cast<double>(c.T));
    EXPECT_LT(worst_error(values(dw), want_dw, scale), 2e-6);
    EXPECT_LT(worst_error(values(db), want_db, scale), 2e-6);
  }
}

TEST_P(LinearTest, WeightGradientOfManyTokens) {
  Session s(kind());
  const std::int64_t T = 2100, N = 20, K = 18;
  Tensor x = s.random({T, K}, dtype(), 1), dy = s.random({T, N}, dtype(), 2), dw = s.filled({N, K}, DType::kF32, 0.0f);
  linear_backward_weight(s.ctx, dw, {}, dy, x);
  std::vector<double> want;
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t k = 0; k < K; ++k) {
      double sum = 0;
      for (std::int64_t t = 0; t < T; ++t) sum += static_cast<double>(get(dy, t * N + n)) * get(x, t * K + k);
      want.push_back(sum);
    }
  EXPECT_LT(worst_error(values(dw), want, 45.0), 3e-6);
}

/// What lets the rows of a step be added where their sum is: dw + product has the bits of a product formed elsewhere and then added.
TEST_P(LinearTest, WeightGradientIsCompleteBeforeItIsAdded) {
  Session s(kind());
  for (const std::int64_t T : {1, 5, 300, 1024, 1025, 2100})
    for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{20, 18}, {96, 72}, {300, 200}}) {
      if (N == 300 && T > 300 && T != 1025) continue;  // to make inputs of this size takes the most time
      SCOPED_TRACE(fmt::format("{} tokens, {} x {}", T, N, K));
      const Tensor x = s.random({T, K}, dtype(), 1), dy = s.random({T, N}, dtype(), 2), before = s.random({N, K}, DType::kF32, 3, 100);
      Tensor sum = before.clone(), product = s.poisoned({N, K}, DType::kF32);
      linear_backward_weight(s.ctx, sum, {}, dy, x, true);
      linear_backward_weight(s.ctx, product, {}, dy, x, false);
      for (std::int64_t i = 0; i < N * K; ++i) ASSERT_EQ(get(sum, i), get(before, i) + get(product, i)) << i;
    }
}

/// The contract the whole system rests on: a row of y depends on its row of x and on w alone.
TEST_P(LinearTest, RowsDoNotDependOnTheirNumberOrOnThreads) {
  constexpr std::int64_t kRows = 333, kSmall = 70;
  for (const LinearCase& c : {LinearCase{"", kRows, 200, 576, true}, LinearCase{"", kRows, 75, 300, false}}) {
    Session one(kind(), 1);
    Operands o(one, c, dtype());
    Tensor all = one.poisoned({kRows, c.N}, dtype()), all_dx = one.poisoned({kRows, c.K}, dtype());
    linear(one.ctx, all, o.x, *o.packed);
    linear_backward_input(one.ctx, all_dx, o.dy, *o.packed, false);
    Session two(kind(), 2), three(kind(), 3);
    std::vector<std::int64_t> sizes;
    for (std::int64_t m = 1; m <= kSmall; ++m) sizes.push_back(m);
    sizes.insert(sizes.end(), {128, kRows});
    for (const std::int64_t m : sizes) {
      Session& s = m % 3 == 0 ? one : m % 3 == 1 ? two : three;
      const std::int64_t first = m == kRows ? 0 : (m * 7) % (kRows - m);  // another place, another alignment
      Tensor y = s.poisoned({m, c.N}, dtype()), dx = s.poisoned({m, c.K}, dtype());
      linear(s.ctx, y, o.x.slice(first, m), *o.packed);
      linear_backward_input(s.ctx, dx, o.dy.slice(first, m), *o.packed, false);
      ASSERT_TRUE(same_bits(y, all.slice(first, m))) << m << " rows from " << first;
      ASSERT_TRUE(same_bits(dx, all_dx.slice(first, m))) << m << " rows from " << first;
    }
  }
}

TEST_P(LinearTest, WeightGradientDoesNotDependOnThreads) {
  Tensor first;
  for (const int threads : {1, 2, 3}) {
    Session s(kind(), threads);
    Tensor x = s.random({1100, 130}, dtype(), 5), dy = s.random({1100, 90}, dtype(), 6), dw = s.filled({90, 130}, DType::kF32, 0.5f),
           db = s.filled({90}, DType::kF32, 0.0f);
    linear_backward_weight(s.ctx, dw, db, dy, x);
    if (!first.defined()) first = dw.clone();
    EXPECT_TRUE(same_bits(dw, first)) << threads;
  }
}

TEST_P(LinearTest, StridedViews) {
  Session s(kind());
  const std::int64_t T = 9, N = 20, K = 24;
  Tensor wide_x = s.random({T, 3 * K}, dtype(), 1), w = s.random({N, K}, DType::kF32, 2), wide_y = s.filled({T, 2 * N}, dtype(), 7.0f),
         x = s.poisoned({T, K}, dtype()), y = s.poisoned({T, N}, dtype());
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t k = 0; k < K; ++k) Session::set(x, t * K + k, get(wide_x, t * 3 * K + K + k));
  const auto packed = pack_linear(s.ctx, w, {}, dtype(), true);
  linear(s.ctx, y, x, *packed);
  linear(s.ctx, wide_y.view().columns(N, N), wide_x.view().columns(K, K), *packed);
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t n = 0; n < N; ++n) {
      EXPECT_EQ(get(wide_y, t * 2 * N + N + n), get(y, t * N + n));
      EXPECT_EQ(get(wide_y, t * 2 * N + n), 7.0f);
    }
}

TEST_P(LinearTest, UnpackGivesTheRoundedWeightBack) {
  Session s(kind());
  const LinearCase c{"", 1, 37, 45, false};
  Operands o(s, c, dtype());
  std::vector<float> row(static_cast<std::size_t>(c.K));
  for (std::int64_t n = 0; n < c.N; ++n) {
    o.packed->unpack_row(n, row.data());
    for (std::int64_t k = 0; k < c.K; ++k) EXPECT_EQ(row[static_cast<std::size_t>(k)], o.weight(n, k));
  }
  const std::int64_t copies = kind().is_cuda ? 1 : 2;  // CPU panels serve one direction each
  EXPECT_GE(o.packed->num_bytes(), static_cast<std::size_t>(copies * c.N * c.K) * size_of(dtype()));
}

TEST_P(LinearTest, ARefilledWeightIsOneMadeAnew) {
  Session s(kind());
  const std::int64_t T = 5, N = 37, K = 45;
  const Tensor values = s.random({N, K}, dtype(), 1), others = s.random({N, K}, dtype(), 2), bias = s.random({N}, DType::kF32, 3),
               other_bias = s.random({N}, DType::kF32, 4), x = s.random({T, K}, dtype(), 5), dy = s.random({T, N}, dtype(), 6);
  const LinearWeightPtr wanted = share_linear(s.ctx, others, other_bias.view(), true);
  const auto refilled = std::const_pointer_cast<LinearWeight>(share_linear(s.ctx, values, bias.view(), true));
  // Where memory is shared the tensor itself has taken other values.
  s.ctx.runtime->copy_within(values.data(), others.data(), values.num_bytes());
  refilled->refill(s.ctx, values, other_bias.view());
  Tensor y = s.poisoned({T, N}, dtype()), wanted_y = s.poisoned({T, N}, dtype()), dx = s.poisoned({T, K}, dtype()),
         wanted_dx = s.poisoned({T, K}, dtype());
  linear(s.ctx, y, x, *refilled);
  linear(s.ctx, wanted_y, x, *wanted);
  linear_backward_input(s.ctx, dx, dy, *refilled, false);
  linear_backward_input(s.ctx, wanted_dx, dy, *wanted, false);
  for (std::int64_t i = 0; i < T * N; ++i) EXPECT_EQ(get(y, i), get(wanted_y, i));
  for (std::int64_t i = 0; i < T * K; ++i) EXPECT_EQ(get(dx, i), get(wanted_dx, i));
}

TEST_P(LinearTest, ShapeErrorsNameTheOp) {
  Session s(kind());
  const auto packed = pack_linear(s.ctx, s.random({8, 4}, DType::kF32, 1), {}, dtype(), false);
  Tensor x = s.random({2, 5}, dtype(), 2), good = s.random({2, 4}, dtype(), 2), y = s.poisoned({2, 8}, dtype());
  try {
    linear(s.ctx, y, x, *packed);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kShape);
    EXPECT_STREQ(e.what(), "[linear] x has K = 5, but w has K = 4");
  }
  EXPECT_THROW(linear_backward_input(s.ctx, good, y, *packed, false), Error);  // packed without a backward form
}

TEST_P(LinearTest, MatmulBothWays) {
  Session s(kind());
  const std::int64_t M = 19, N = 35, K = 270;
  Tensor a = s.random({M, K}, DType::kF32, 1), b = s.random({K, N}, DType::kF32, 2), bt = s.poisoned({N, K}, DType::kF32),
         out = s.poisoned({M, N}, DType::kF32), out_t = s.poisoned({M, N}, DType::kF32);
  for (std::int64_t k = 0; k < K; ++k)
    for (std::int64_t n = 0; n < N; ++n) Session::set(bt, n * K + k, get(b, k * N + n));
  matmul_f32(s.ctx, out, a, b, false);
  matmul_f32(s.ctx, out_t, a, bt, true);
  EXPECT_TRUE(same_bits(out, out_t));
  std::vector<double> want;
  for (std::int64_t m = 0; m < M; ++m)
    for (std::int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (std::int64_t k = 0; k < K; ++k) sum += static_cast<double>(get(a, m * K + k)) * get(b, k * N + n);
      want.push_back(sum);
    }
  EXPECT_LT(worst_error(values(out), want, std::sqrt(static_cast<double>(K))), 2e-6);
}

PRL_OP_TEST_KINDS(LinearTest);

}  // namespace
}  // namespace prl::ops
