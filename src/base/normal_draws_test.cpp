#include "base/normal_draws.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace prl {
namespace {

TEST(NormalDraws, ManyAreTheBitsOfOneAtATime) {
  for (const std::uint64_t first : {0UL, 4UL, 3UL, 0x3fffffff8UL})
    for (const std::int64_t count : {0, 1, 15, 16, 17, 63, 64, 65, 200, 1000}) {
      Rng one(7, 0x123456789abcULL), many = one;
      one.seek(first);
      many.seek(first);
      std::vector<float> wanted;
      for (std::int64_t i = 0; i < count; ++i) wanted.push_back(0.3f * static_cast<float>(one.next_normal()));
      ASSERT_EQ(normal_draws(many, count, 0.3f), wanted) << count << " from " << first;
      ASSERT_EQ(many.position(), one.position());
    }
}

TEST(NormalDraws, FollowBoxAndMuller) {
  Rng rng(1, 2), uniform(1, 2);
  double greatest = 0, sum = 0, squares = 0;
  constexpr int kCount = 100000;
  for (int i = 0; i < kCount; ++i) {
    const double drawn = rng.next_normal();
    const double u = 1.0 - uniform.next_double(), v = uniform.next_double();
    const double wanted = std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
    greatest = std::max(greatest, std::fabs(drawn - wanted));
    sum += drawn;
    squares += drawn * drawn;
  }
  EXPECT_LT(greatest, 1e-14);
  EXPECT_NEAR(sum / kCount, 0.0, 0.01);
  EXPECT_NEAR(squares / kCount, 1.0, 0.02);
}

TEST(NormalDraws, AreTheSameOnEveryMachine) {
  Rng rng(42);
  std::vector<double> drawn(4);
  for (double& value : drawn) value = rng.next_normal();
  EXPECT_THAT(drawn, ::testing::ElementsAre(0x1.3c0aeec8cec66p+0, -0x1.7a3f3026c1af2p+1, -0x1.7e53e248ceffap+0, -0x1.6281b23a42becp+0));
}

}  // namespace
}  // namespace prl
