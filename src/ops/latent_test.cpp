#include "ops/latent.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "base/error.hpp"
#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class LatentTest : public OpTest {};

/// Rows [T, cols] of a wider matrix, as the columns of a product are.
TensorView columns_of(Tensor& wide, std::int64_t first, std::int64_t cols) { return wide.view().columns(first, cols); }

TEST_P(LatentTest, HeadsAreLaidOutAndTheirGradientsComeBack) {
  Session s(kind());
  for (const bool neighbours : {true, false}) {
    for (const auto& [T, H, D, N, R, V] :
         {std::array<std::int64_t, 6>{1, 1, 32, 16, 16, 32}, {5, 3, 64, 24, 16, 24}, {37, 4, 256, 128, 64, 128}}) {
      const LatentHeads heads{H, D, N, R, V, neighbours};
      const std::int64_t Q = H * (N + R), U = H * (N + V), E = 3 * H * D, extra = 8;
      Tensor q = s.random({T, Q}, dtype(), 1), up = s.random({T, U}, dtype(), 2), down = s.random({T, extra + R}, dtype(), 3);
      Tensor qkv = s.poisoned({T, E}, dtype());
      latent_heads(s.ctx, qkv, q, up, columns_of(down, extra, R), heads);
      Tensor dqkv = s.random({T, E}, dtype(), 4), dq = s.poisoned({T, Q}, dtype()), dup = s.poisoned({T, U}, dtype());
      Tensor ddown = s.poisoned({T, extra + R}, dtype());
      latent_heads_backward(s.ctx, dq, dup, columns_of(ddown, extra, R), dqkv, heads);
      const auto place = [&](std::int64_t i) { return !neighbours ? i : i < R / 2 ? 2 * i : 2 * (i - R / 2) + 1; };
      for (std::int64_t t = 0; t < T; ++t) {
        for (std::int64_t r = 0; r < R; ++r) {
          float sum = 0.0f;
          for (std::int64_t h = 0; h < H; ++h) {
            const std::int64_t in_q = t * E + h * D + r, in_k = in_q + H * D;
            EXPECT_EQ(get(qkv, in_q), get(q, t * Q + h * (N + R) + N + place(r)));
            EXPECT_EQ(get(qkv, in_k), get(down, t * (extra + R) + extra + place(r)));
            EXPECT_EQ(get(dq, t * Q + h * (N + R) + N + place(r)), get(dqkv, in_q));
            sum += get(dqkv, in_k);
          }
          const float got = get(ddown, t * (extra + R) + extra + place(r));
          EXPECT_NEAR(static_cast<double>(got), static_cast<double>(sum), dtype() == DType::kF32 ? 0.0 : std::abs(sum) / 128);
        }
        for (std::int64_t h = 0; h < H; ++h) {
          for (std::int64_t d = 0; d < D; ++d) {
            const std::int64_t in_q = t * E + h * D + d, in_k = in_q + H * D, in_v = in_k + H * D;
            if (d >= R) {
              EXPECT_EQ(get(qkv, in_q), d < R + N ? get(q, t * Q + h * (N + R) + d - R) : 0.0f);
              EXPECT_EQ(get(qkv, in_k), d < R + N ? get(up, t * U + h * (N + V) + d - R) : 0.0f);
            }
            EXPECT_EQ(get(qkv, in_v), d < V ? get(up, t * U + h * (N + V) + N + d) : 0.0f);
            if (d >= R && d < R + N) {
              EXPECT_EQ(get(dq, t * Q + h * (N + R) + d - R), get(dqkv, in_q));
              EXPECT_EQ(get(dup, t * U + h * (N + V) + d - R), get(dqkv, in_k));
            }
            if (d < V) {
              EXPECT_EQ(get(dup, t * U + h * (N + V) + N + d), get(dqkv, in_v));
            }
          }
        }
        for (std::int64_t c = 0; c < extra; ++c) EXPECT_TRUE(std::isnan(get(ddown, t * (extra + R) + c))) << "the gradient of a latent";
      }
      // What nobody wants is left out, and does not change the rest.
      Tensor again = s.poisoned({T, U}, dtype());
      latent_heads_backward(s.ctx, {}, again, {}, dqkv, heads);
      EXPECT_TRUE(same_bits(again, dup));
    }
  }
}

TEST_P(LatentTest, PaddingIsDroppedAndItsGradientIsZero) {
  Session s(kind());
  for (const auto& [T, H, D, V] : {std::array<std::int64_t, 4>{1, 1, 32, 8}, {9, 3, 64, 24}, {33, 5, 256, 128}}) {
    const LatentHeads heads{H, D, 8, 16, V};
    Tensor x = s.random({T, H * D}, dtype(), 1), y = s.poisoned({T, H * V}, dtype()), dx = s.poisoned({T, H * D}, dtype());
    narrow_heads(s.ctx, y, x, heads);
    narrow_heads_backward(s.ctx, dx, y, heads);
    for (std::int64_t i = 0; i < T * H; ++i) {
      for (std::int64_t d = 0; d < V; ++d) EXPECT_EQ(get(y, i * V + d), get(x, i * D + d));
      for (std::int64_t d = 0; d < D; ++d) EXPECT_EQ(get(dx, i * D + d), d < V ? get(x, i * D + d) : 0.0f);
    }
  }
}

TEST_P(LatentTest, SizesThatDoNotFitAreRefused) {
  Session s(kind());
  Tensor qkv = s.filled({2, 96}, dtype(), 0.0f), q = s.filled({2, 24}, dtype(), 0.0f), up = s.filled({2, 40}, dtype(), 0.0f),
         rotary = s.filled({2, 16}, dtype(), 0.0f), other = s.filled({2, 17}, dtype(), 0.0f);
  const LatentHeads fits{1, 32, 8, 16, 32};
  EXPECT_NO_THROW(latent_heads(s.ctx, qkv, q, up, rotary, fits));
  EXPECT_THROW(latent_heads(s.ctx, qkv, q, up, other, fits), Error);
  EXPECT_THROW(latent_heads(s.ctx, qkv, q, up, rotary, LatentHeads{1, 32, 24, 16, 32}), Error) << "a query of 40 elements";
  EXPECT_THROW(latent_heads(s.ctx, qkv, q, up, rotary, LatentHeads{1, 32, 12, 16, 32}), Error) << "no multiple of 8";
  EXPECT_THROW(narrow_heads(s.ctx, q, up, fits), Error);
}

PRL_OP_TEST_KINDS(LatentTest);

}  // namespace
}  // namespace prl::ops
