#include "ops/eight_bit.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/rng.hpp"
#include "ops/linear.hpp"
#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

/// Magnitudes of E4M3 without its subnormals and NaN.
std::vector<float> magnitudes() {
  std::vector<float> all{0.0f};
  for (int exponent = -6; exponent <= 8; ++exponent)
    for (int mantissa = 0; mantissa < 8; ++mantissa)
      if (exponent < 8 || mantissa < 7) all.push_back(std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent));
  return all;
}

TEST(EightBit, CodesAreTheNearestNumbersOfE4M3) {
  const std::vector<float> all = magnitudes();
  EXPECT_EQ(all.back(), 448.0f);
  Rng rng(3);
  for (int trial = 0; trial < 20000; ++trial) {
    const int n = static_cast<int>(rng.next_below(60)) - 50;
    const float w = std::ldexp(static_cast<float>(rng.next_normal()), n + static_cast<int>(rng.next_below(18)) - 9);
    if (std::fabs(w) > std::ldexp(448.0f, n)) continue;
    const float got = eight_bit_rounded(w, n);
    double best = std::numeric_limits<double>::infinity();
    for (const float m : all) best = std::min(best, std::fabs(std::ldexp(static_cast<double>(m), n) - std::fabs(static_cast<double>(w))));
    ASSERT_EQ(std::fabs(static_cast<double>(got) - w), best) << w << " * 2^" << n;
    ASSERT_EQ(std::signbit(got), std::signbit(w));
    ASSERT_EQ(eight_bit_rounded(got, n), got);
  }
  EXPECT_EQ(eight_bit_value(0x7e, 0), 448.0f);
  EXPECT_EQ(eight_bit_value(0x88, 0), -0.015625f);
  EXPECT_EQ(eight_bit_rounded(17.0f, 0), 16.0f) << "ties go to even";
  EXPECT_EQ(eight_bit_rounded(1e9f, kMaxEightBitExponent), 57344.0f);
  EXPECT_TRUE(std::isnan(eight_bit_rounded(std::numeric_limits<float>::quiet_NaN(), 0)));
}

TEST(EightBit, TheExponentIsTheSmallestThatHoldsTheGreatest) {
  Rng rng(4);
  for (int trial = 0; trial < 20000; ++trial) {
    const float greatest = std::fabs(std::ldexp(static_cast<float>(rng.next_normal()), static_cast<int>(rng.next_below(60)) - 50));
    const int n = eight_bit_exponent(greatest);
    ASSERT_LE(greatest, std::ldexp(448.0, n)) << greatest;
    ASSERT_GT(greatest, std::ldexp(448.0, n - 1)) << greatest;
    // What has been rounded comes to itself again, under its own exponent.
    const float rounded = eight_bit_rounded(greatest, n), small = eight_bit_rounded(greatest / 300.0f, n);
    const int again = eight_bit_exponent(rounded);
    ASSERT_EQ(eight_bit_rounded(rounded, again), rounded);
    ASSERT_EQ(eight_bit_rounded(small, again), small);
  }
  EXPECT_EQ(eight_bit_exponent(448.0f), 0);
  EXPECT_EQ(eight_bit_exponent(0.0f), kMinEightBitExponent);
}

/// The values that `w` stands for, once rounded to the dtype.
Tensor rounded_rows(const Tensor& w, DType compute) {
  const std::int64_t N = w.shape().num_rows(), K = w.shape().num_cols();
  const Tensor out = Tensor::empty(make_cpu_runtime(), {N, K}, compute);
  for (std::int64_t n = 0; n < N; ++n) {
    const auto value = [&](std::int64_t k) { return compute == DType::kBF16 ? to_f32(to_bf16(get(w, n * K + k))) : get(w, n * K + k); };
    float greatest = 0;
    for (std::int64_t k = 0; k < K; ++k) greatest = std::max(greatest, std::fabs(value(k)));
    const int exponent = eight_bit_exponent(greatest);
    for (std::int64_t k = 0; k < K; ++k) {
      const float x = eight_bit_rounded(value(k), exponent);
      if (compute == DType::kBF16)
        out.as<BFloat16>()[n * K + k] = to_bf16(x);
      else
        out.as<float>()[n * K + k] = x;
    }
  }
  return out;
}

class EightBitTest : public OpTest {
 protected:
  /// On the session's device.
  static Tensor moved(Session& s, const Tensor& host) {
    const Tensor out = Tensor::empty(s.ctx.runtime, host.shape(), host.dtype());
    s.ctx.runtime->copy_from_host(out.data(), host.data(), host.num_bytes());
    return out;
  }
};

TEST_P(EightBitTest, ProductsHaveTheBitsOfRoundedWeights) {
  Session s(kind(), 2);
  const std::int64_t kRows = 130;
  for (const auto& [N, K, has_bias] :
       {std::tuple{208, 576, true}, {75, 300, false}, {37, 45, true}, {96, 1040, false}, {4112, 128, true}}) {
    if (N > kMinOutputsOfCodes && !kind().is_cuda) continue;  // CPUs read codes of all sizes
    SCOPED_TRACE(K);
    // Rows of magnitudes far apart, and one of zeros.
    const Tensor host = Tensor::empty(make_cpu_runtime(), {N, K}, DType::kF32);
    Rng rng(9);
    for (std::int64_t n = 0; n < N; ++n)
      for (std::int64_t k = 0; k < K; ++k)
        host.as<float>()[n * K + k] = n == 3 ? 0.0f : std::ldexp(static_cast<float>(rng.next_normal()), static_cast<int>(n % 13) - 9);
    const Tensor bias = s.random({N}, DType::kF32, 2), x = s.random({kRows, K}, dtype(), 5), dy = s.random({kRows, N}, dtype(), 6);
    const ConstTensorView b = has_bias ? ConstTensorView(bias.view()) : ConstTensorView{};
    const LinearWeightPtr eight = pack_linear(s.ctx, moved(s, host).view(), b, dtype(), true, WeightUse::kEightBit),
                          plain = pack_linear(s.ctx, moved(s, rounded_rows(host, dtype())).view(), b, dtype(), true);
    std::vector<float> row(static_cast<std::size_t>(K)), wanted_row(static_cast<std::size_t>(K));
    for (std::int64_t n = 0; n < N; ++n) {
      eight->unpack_row(n, row.data());
      plain->unpack_row(n, wanted_row.data());
      ASSERT_EQ(row, wanted_row) << n;
    }
    for (const std::int64_t m : {1, 2, 5, 13, 14, 15, 16, 17, 29, 33, 70, 128, 130}) {
      Tensor y = s.poisoned({m, N}, dtype()), wanted = s.poisoned({m, N}, dtype()), dx = s.poisoned({m, K}, dtype()),
             wanted_dx = s.poisoned({m, K}, dtype()), y32 = s.poisoned({m, N}, DType::kF32), wanted32 = s.poisoned({m, N}, DType::kF32);
      linear(s.ctx, y, x.slice(0, m), *eight);
      linear(s.ctx, wanted, x.slice(0, m), *plain);
      linear(s.ctx, y32, x.slice(0, m), *eight);
      linear(s.ctx, wanted32, x.slice(0, m), *plain);
      linear_backward_input(s.ctx, dx, dy.slice(0, m), *eight, false);
      linear_backward_input(s.ctx, wanted_dx, dy.slice(0, m), *plain, false);
      ASSERT_TRUE(same_bits(y, wanted)) << m << " rows";
      ASSERT_TRUE(same_bits(y32, wanted32)) << m << " rows";
      ASSERT_TRUE(same_bits(dx, wanted_dx)) << m << " rows";
    }
  }
}

/// All magnitudes of E4M3 but NaN.
std::vector<float> input_magnitudes() {
  std::vector<float> all = magnitudes();
  for (int steps = 1; steps < 8; ++steps) all.push_back(std::ldexp(static_cast<float>(steps), -9));
  std::ranges::sort(all);
  return all;
}

TEST(EightBit, InputsAreTheNearestNumbersOfE4M3) {
  const std::vector<float> all = input_magnitudes();
  Rng rng(7);
  for (int trial = 0; trial < 20000; ++trial) {
    const float x = std::ldexp(static_cast<float>(rng.next_normal()), static_cast<int>(rng.next_below(20)) - 12);
    if (std::fabs(x) > 448.0f) continue;
    const float got = nearest_eight_bit(x);
    const auto distance = [&](float m) { return std::fabs(static_cast<double>(m) - std::fabs(static_cast<double>(x))); };
    const double best = distance(*std::ranges::min_element(all, {}, distance));
    ASSERT_EQ(distance(std::fabs(got)), best) << x;
    ASSERT_EQ(std::signbit(got), std::signbit(x));
    ASSERT_TRUE(std::ranges::binary_search(all, std::fabs(got))) << got;
  }
  for (const auto& [x, wanted] : {std::pair{0x3p-10f, 0x2p-9f}, {0x1p-10f, 0.0f}, {0x5p-10f, 0x2p-9f}, {-17.0f, -16.0f}, {1e6f, 448.0f}})
    EXPECT_EQ(nearest_eight_bit(x), wanted) << "ties go to even";
}

/// x [M, K] as products of 8-bit numbers read it.
Tensor rounded_inputs(const Tensor& x) {
  const std::int64_t M = x.shape().num_rows(), K = x.shape().num_cols();
  const Tensor out = Tensor::empty(make_cpu_runtime(), {M, K}, x.dtype());
  const std::vector<float> all = input_magnitudes();
  for (std::int64_t m = 0; m < M; ++m) {
    double greatest = 0;
    for (std::int64_t k = 0; k < K; ++k) greatest = std::max(greatest, std::fabs(static_cast<double>(get(x, m * K + k))));
    double factor = 1;
    while (greatest > 0 && greatest > 448 * factor) factor *= 2;
    while (greatest > 0 && greatest <= 224 * factor) factor /= 2;
    for (std::int64_t k = 0; k < K; ++k) {
      const double v = std::fabs(get(x, m * K + k)) / factor;
      // Of two that are as near the one with the even mantissa, which is every second.
      const auto above = std::ranges::lower_bound(all, v, {}, [](float value) { return static_cast<double>(value); });
      double nearest = *above;
      if (above != all.begin()) {
        const double below = *(above - 1);
        const bool is_tie = v - below == nearest - v, is_even = (above - 1 - all.begin()) % 2 == 0;
        if (v - below < nearest - v || (is_tie && is_even)) nearest = below;
      }
      const auto value = static_cast<float>(std::copysign(nearest * factor, get(x, m * K + k)));
      if (x.dtype() == DType::kBF16)
        out.as<BFloat16>()[m * K + k] = to_bf16(value);
      else
        out.as<float>()[m * K + k] = value;
    }
  }
  return out;
}

TEST_P(EightBitTest, ProductsOfTwoRoundedMatricesDependOnTheirRowsAlone) {
  Session s(kind(), 2);
  const std::int64_t kRows = kind().is_cuda ? 300 : 70;
  for (const auto& [N, K, has_bias] : {std::tuple{208, 512, true}, {96, 576, false}, {75, 300, true}, {64, 1088, true}}) {
    SCOPED_TRACE(K);
    Tensor host = Tensor::empty(make_cpu_runtime(), {kRows, K}, dtype());
    Rng rng(9);
    for (std::int64_t i = 0; i < kRows * K; ++i)
      Session::set(host, i, i / K == 3 ? 0.0f : std::ldexp(static_cast<float>(rng.next_normal()), static_cast<int>(i % 11) - 9));
    const Tensor x = moved(s, host), rounded = moved(s, rounded_inputs(host)), w = s.random({N, K}, dtype(), 5),
                 bias = s.random({N}, DType::kF32, 2), dy = s.random({kRows, N}, dtype(), 6);
    const ConstTensorView b = has_bias ? ConstTensorView(bias.view()) : ConstTensorView{};
    const LinearWeightPtr both = pack_linear(s.ctx, w.view(), b, dtype(), true, WeightUse::kEightBitProduct),
                          alone = pack_linear(s.ctx, w.view(), b, dtype(), true, WeightUse::kEightBit);
    EXPECT_TRUE(both->rounds_inputs());
    EXPECT_FALSE(alone->rounds_inputs());
    Tensor all = s.poisoned({kRows, N}, dtype()), all32 = s.poisoned({kRows, N}, DType::kF32),
           wanted32 = s.poisoned({kRows, N}, DType::kF32);
    linear(s.ctx, all, x, *both);
    linear(s.ctx, all32, x, *both);
    linear(s.ctx, wanted32, rounded, *alone);
    // Tensor cores keep 14 bits of sums over 8-bit numbers.
    const double tolerance = kind().is_cuda && dtype() == DType::kBF16 ? 1e-3 : 0;
    double greatest = 0, difference = 0;
    for (std::int64_t i = 0; i < kRows * N; ++i) {
      const double wanted = get(wanted32, i), got = get(all32, i);
      greatest = std::max(greatest, std::fabs(wanted));
      difference = std::max(difference, std::fabs(wanted - got));
    }
    EXPECT_LE(difference, tolerance * greatest);
    for (const std::int64_t m : {1, 2, 8, 13, 17, 33, 65, 130, 257}) {
      if (m > kRows) continue;
      for (const std::int64_t first : {std::int64_t{0}, kRows - m}) {
        Tensor y = s.poisoned({m, N}, dtype()), y32 = s.poisoned({m, N}, DType::kF32), dx = s.poisoned({m, K}, dtype()),
               wanted_dx = s.poisoned({m, K}, dtype());
        linear(s.ctx, y, x.slice(first, m), *both);
        linear(s.ctx, y32, x.slice(first, m), *both);
        ASSERT_TRUE(same_bits(y, all.slice(first, m))) << m << " rows from " << first;
        ASSERT_TRUE(same_bits(y32, all32.slice(first, m))) << m << " rows from " << first;
        linear_backward_input(s.ctx, dx, dy.slice(first, m), *both, false);
        linear_backward_input(s.ctx, wanted_dx, dy.slice(first, m), *alone, false);
        ASSERT_TRUE(same_bits(dx, wanted_dx)) << m << " rows: gradients are not rounded";
      }
    }
  }
}

TEST_P(EightBitTest, ARowWithWhatIsNoNumberBecomesThat) {
  Session s(kind());
  const std::int64_t T = 4, N = 32, K = 128;
  Tensor x = s.filled({T, K}, dtype(), 1.0f);
  Session::set(x, 5, std::numeric_limits<float>::quiet_NaN());
  Session::set(x, 2 * K + 9, -std::numeric_limits<float>::infinity());
  Session::set(x, 3 * K + 1, 3e38f);  // a number
  const Tensor w = s.random({N, K}, dtype(), 5);
  Tensor y = s.poisoned({T, N}, dtype());
  linear(s.ctx, y, x, *pack_linear(s.ctx, w.view(), {}, dtype(), false, WeightUse::kEightBitProduct));
  for (std::int64_t i = 0; i < T * N; ++i) EXPECT_EQ(std::isnan(get(y, i)), i / N == 0 || i / N == 2) << i;
}

TEST_P(EightBitTest, AWeightThatIsNoNumberIsSeenInItsOutputs) {
  Session s(kind());
  const std::int64_t T = 3;
  // Of the larger kind a GPU reads codes.
  for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{32, 128}, {4160, 128}}) {
    const Tensor x = s.random({T, K}, dtype(), 5);
    Tensor w = s.random({N, K}, dtype(), 6);
    Session::set(w, 2 * K + 5, std::numeric_limits<float>::quiet_NaN());
    Session::set(w, 20 * K + 9, -std::numeric_limits<float>::infinity());
    for (const WeightUse use : {WeightUse::kEightBit, WeightUse::kEightBitProduct}) {
      const LinearWeightPtr packed = pack_linear(s.ctx, w.view(), {}, dtype(), false, use);
      Tensor y = s.poisoned({T, N}, dtype());
      linear(s.ctx, y, x, *packed);
      std::vector<float> row(static_cast<std::size_t>(K));
      for (std::int64_t n = 0; n < N; ++n) {
        packed->unpack_row(n, row.data());
        ASSERT_EQ(std::ranges::all_of(row, [](float v) { return std::isnan(v); }), n == 2 || n == 20) << n;
        for (std::int64_t t = 0; t < T; ++t) ASSERT_EQ(std::isnan(get(y, t * N + n)), n == 2 || n == 20) << t << ", " << n;
      }
    }
  }
}

TEST_P(EightBitTest, SharedAndRefilledWeightsAreThoseMadeAnew) {
  Session s(kind());
  for (const auto& [use, N, K] :
       {std::tuple{WeightUse::kEightBit, 37, 45}, {WeightUse::kEightBitProduct, 37, 45}, {WeightUse::kEightBitProduct, 48, 160}}) {
    const std::int64_t T = 5;
    const Tensor first = s.random({N, K}, dtype(), 1), second = s.random({N, K}, dtype(), 2), x = s.random({T, K}, dtype(), 5);
    const LinearWeightPtr wanted = pack_linear(s.ctx, second.view(), {}, dtype(), true, use);
    const Tensor given = first.clone();
    const auto weight = std::const_pointer_cast<LinearWeight>(share_linear(s.ctx, given, {}, true, use));
    s.ctx.runtime->copy_within(given.data(), second.data(), given.num_bytes());
    weight->refill(s.ctx, given, {});
    Tensor y = s.poisoned({T, N}, dtype()), wanted_y = s.poisoned({T, N}, dtype());
    linear(s.ctx, y, x, *weight);
    linear(s.ctx, wanted_y, x, *wanted);
    EXPECT_TRUE(same_bits(y, wanted_y));
    // A second time changes nothing.
    weight->refill(s.ctx, given, {});
    linear(s.ctx, y, x, *weight);
    EXPECT_TRUE(same_bits(y, wanted_y));
  }
}

TEST_P(EightBitTest, CpusKeepTheCodesAloneAndGpusBesideTheValuesIfAtAll) {
  Session s(kind());
  const std::int64_t N = kMinOutputsOfCodes, K = 64;
  const Tensor w = s.random({N, K}, dtype(), 1);
  const auto bytes = static_cast<std::int64_t>(pack_linear(s.ctx, w.view(), {}, dtype(), false, WeightUse::kEightBit)->num_bytes());
  const std::int64_t values = N * K * static_cast<std::int64_t>(size_of(dtype()));
  if (kind().is_cuda)
    EXPECT_THAT(bytes, ::testing::AnyOf(values, values + N * (K + 2)));
  else
    EXPECT_EQ(bytes, N * (K + 4));
  const LinearWeightPtr products = pack_linear(s.ctx, w.view(), {}, dtype(), false, WeightUse::kEightBitProduct);
  const auto product_bytes = static_cast<std::int64_t>(products->num_bytes());
  if (kind().is_cuda)
    EXPECT_THAT(product_bytes, ::testing::AnyOf(values, values + eight_bit_product_bytes(N, K)));
  else
    EXPECT_EQ(product_bytes, bytes);
}

PRL_OP_TEST_KINDS(EightBitTest);

}  // namespace
}  // namespace prl::ops
