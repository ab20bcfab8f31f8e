#include "ops/vision.hpp"

#include <algorithm>

#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class VisionOpTest : public OpTest {};

TEST_P(VisionOpTest, LayerNormIsThatOfFp64AndOfEachRowAlone) {
  Session s(kind());
  for (const auto& [R, C] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 15}, {40, 768}, {5, 577}}) {
    Tensor x = s.random({R, C}, dtype(), 1, 3.0f), w = s.random({C}, DType::kF32, 2), b = s.random({C}, DType::kF32, 3),
           y = s.poisoned({R, C}, dtype()), last = s.poisoned({1, C}, dtype());
    layer_norm(s.ctx, y, x, w, b, 1e-6f);
    std::vector<double> want;
    for (std::int64_t r = 0; r < R; ++r) {
      double mean = 0, squares = 0;
      for (std::int64_t c = 0; c < C; ++c) mean += get(x, r * C + c);
      mean /= static_cast<double>(C);
      for (std::int64_t c = 0; c < C; ++c) squares += std::pow(get(x, r * C + c) - mean, 2.0);
      const double scale = 1.0 / std::sqrt(squares / static_cast<double>(C) + 1e-6);
      for (std::int64_t c = 0; c < C; ++c) want.push_back((get(x, r * C + c) - mean) * scale * get(w, c) + get(b, c));
    }
    EXPECT_LT(worst_error(values(y), want, 1.0), tolerance(dtype(), 2e-6)) << R << "x" << C;
    layer_norm(s.ctx, last, x.view().rows(R - 1, 1), w, b, 1e-6f);
    for (std::int64_t c = 0; c < C; ++c) EXPECT_EQ(get(last, c), get(y, (R - 1) * C + c));
    layer_norm(s.ctx, x, x, w, b, 1e-6f);
    EXPECT_TRUE(same_bits(x, y)) << "in place";
  }
}

TEST_P(VisionOpTest, BothFormsOfGelu) {
  Session s(kind());
  Tensor x = s.random({7, 37}, dtype(), 1, 2.5f), out = s.poisoned({7, 37}, dtype());
  Session::set(x, 0, -50.0f);
  Session::set(x, 1, 50.0f);
  for (const GeluForm form : {GeluForm::kErf, GeluForm::kTanh}) {
    gelu(s.ctx, out, x, form);
    std::vector<double> want;
    for (std::int64_t i = 0; i < x.num_elements(); ++i) {
      const double v = get(x, i);
      want.push_back(form == GeluForm::kErf ? 0.5 * v * (1 + std::erf(v / std::sqrt(2.0)))
                                            : 0.5 * v * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v))));
    }
    EXPECT_LT(worst_error(values(out), want, 1.0), tolerance(dtype(), 2e-6));
  }
}

/// Sequences of several lengths, longer than a chunk of keys among them; rows of q, k and v that lie side by side.
TEST_P(VisionOpTest, FullAttentionSeesAllOfItsSequenceAndNothingElse) {
  Session s(kind());
  constexpr std::int64_t H = 2, D = 16;
  for (const std::vector<std::int32_t>& cu : {std::vector<std::int32_t>{0, 1, 8, 75}, std::vector<std::int32_t>{0, 1100}}) {
    if (is_watched() && cu.back() > 100) continue;
    const std::int64_t T = cu.back(), stride = 3 * H * D;
    Tensor qkv = s.random({T, stride}, dtype(), 1), out = s.poisoned({T, H, D}, dtype());
    const auto heads = [&](std::int64_t i) {
      TensorView v = qkv.view().columns(i * H * D, H * D);
      v.shape = Shape{T, H, D};
      return v;
    };
    VarlenAttention args{heads(0), heads(1), heads(2), stride, stride, stride, cu, 0.25f};
    attention_full(s.ctx, out, args);
    std::vector<double> want(static_cast<std::size_t>(T * H * D));
    for (std::size_t seq = 0; seq + 1 < cu.size(); ++seq)
      for (std::int64_t h = 0; h < H; ++h)
        for (std::int64_t t = cu[seq]; t<cu[seq + 1]; t += cu.back()> 100 ? 97 : 1) {
          std::vector<double> p;
          double top = -1e300, sum = 0;
          for (std::int64_t k = cu[seq]; k < cu[seq + 1]; ++k) {
            double dot = 0;
            for (std::int64_t d = 0; d < D; ++d)
              dot += static_cast<double>(get(qkv, t * stride + h * D + d)) * get(qkv, k * stride + (H + h) * D + d);
            p.push_back(0.25 * dot);
            top = std::max(top, p.back());
          }
          for (double& v : p) sum += v = std::exp(v - top);
          for (std::int64_t d = 0; d < D; ++d) {
            double mixed = 0;
            for (std::int64_t k = cu[seq]; k < cu[seq + 1]; ++k)
              mixed += p[static_cast<std::size_t>(k - cu[seq])] * get(qkv, k * stride + (2 * H + h) * D + d);
            const std::int64_t at = (t * H + h) * D + d;
            EXPECT_NEAR(get(out, at), mixed / sum, dtype() == DType::kBF16 ? 1e-2 : 2e-5) << "token " << t;
          }
        }
    // The last sequence alone has the same bits.
    const std::int64_t first = cu[cu.size() - 2], n = T - first;
    Tensor alone = s.poisoned({n, H, D}, dtype());
    const std::vector<std::int32_t> own{0, static_cast<std::int32_t>(n)};
    const auto part = [&](ConstTensorView v) {
      v.data = static_cast<const char*>(v.data) + first * stride * static_cast<std::int64_t>(size_of(dtype()));
      v.shape = Shape{n, H, D};
      return v;
    };
    args = {part(args.q_THD), part(args.k_TKD), part(args.v_TKD), stride, stride, stride, own, 0.25f};
    attention_full(s.ctx, alone, args);
    for (std::int64_t i = 0; i < alone.num_elements(); ++i) ASSERT_EQ(get(alone, i), get(out, first * H * D + i));
  }
}

TEST_P(VisionOpTest, RopeRowsTakeEachPairFromTheRowOfItsAxis) {
  Session s(kind());
  constexpr std::int64_t P = 8, N = 50, T = 3;
  RopeTable table{s.random({N, P}, DType::kF32, 1), s.random({N, P}, DType::kF32, 2)};
  Tensor positions = s.ints({7, 0, 49, 7, 20, 1, 7, 3, 2}), cos = s.poisoned({T, P}, DType::kF32), sin = s.poisoned({T, P}, DType::kF32);
  TensorView view = positions.view();
  view.shape = Shape{3, T};
  view.row_stride = T;
  gather_rope_rows(s.ctx, cos, sin, table, view, {.height = 3, .width = 2});
  const int axes[P] = {0, 1, 2, 0, 1, 2, 0, 1};
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t i = 0; i < P; ++i) {
      const std::int64_t row = positions.as<std::int32_t>()[axes[i] * T + t];
      EXPECT_EQ(get(cos, t * P + i), get(table.cos_PR2, row * P + i)) << t << " " << i;
      EXPECT_EQ(get(sin, t * P + i), get(table.sin_PR2, row * P + i)) << t << " " << i;
    }
}

INSTANTIATE_TEST_SUITE_P(Kinds, VisionOpTest, ::testing::ValuesIn(kinds_and_types()), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace prl::ops
