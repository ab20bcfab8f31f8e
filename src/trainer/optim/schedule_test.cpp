#include "trainer/optim/schedule.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.hpp"

namespace prl::trainer {
namespace {

TEST(LrSchedule, Constant) {
  const LrSchedule schedule(config::ConstantScheduler{}, 3e-4, std::nullopt);
  EXPECT_EQ(schedule.at(0), 3e-4);
  EXPECT_EQ(schedule.at(1000000), 3e-4);
}

// Values of torch.optim.lr_scheduler: SequentialLR of LinearLR(0.1, 1, 4), ConstantLR(1), LinearLR(1, 0.1, 2).
TEST(LrSchedule, LinearWarmsUpHoldsAndDecays) {
  config::LinearScheduler linear;
  linear.warmup_steps = 4, linear.decay_steps = 3, linear.min_lr = 0.1;
  const LrSchedule schedule(linear, 1.0, 10);
  const double wanted[] = {0.1, 0.325, 0.55, 0.775, 1, 1, 1, 1, 0.55, 0.1};
  for (int i = 0; i < 10; ++i) EXPECT_NEAR(schedule.at(i), wanted[i], 1e-12) << i;
  EXPECT_NEAR(schedule.at(10), 0.1, 1e-12) << "logged after the last step";
}

TEST(LrSchedule, LinearWithoutMaxStepsNeverDecays) {
  config::LinearScheduler linear;
  linear.warmup_steps = 2;
  const LrSchedule schedule(linear, 2.0, std::nullopt);
  EXPECT_NEAR(schedule.at(0), 2e-8, 1e-20);
  EXPECT_NEAR(schedule.at(1), 2 * (1e-8 + (1 - 1e-8) / 2), 1e-12);
  EXPECT_EQ(schedule.at(2), 2.0);
  EXPECT_EQ(schedule.at(100000), 2.0);
}

TEST(LrSchedule, LinearEdgeLengths) {
  config::LinearScheduler linear;
  linear.warmup_steps = 0, linear.decay_steps = 1, linear.min_lr = 0.5;
  const LrSchedule one(linear, 1.0, 3);
  EXPECT_EQ(one.at(0), 1.0);
  EXPECT_EQ(one.at(1), 1.0);
  EXPECT_EQ(one.at(2), 0.5);
  linear.decay_steps = 0;
  EXPECT_EQ(LrSchedule(linear, 1.0, 3).at(2), 1.0);
}

TEST(LrSchedule, Cosine) {
  config::CosineScheduler cosine;
  cosine.warmup_steps = 2, cosine.min_lr = 0.2;
  const LrSchedule schedule(cosine, 1.0, 6);
  EXPECT_NEAR(schedule.at(0), 0.2, 1e-12);
  EXPECT_NEAR(schedule.at(1), 0.6, 1e-12);
  EXPECT_NEAR(schedule.at(2), 1.0, 1e-12);
  EXPECT_NEAR(schedule.at(3), 0.2 + 0.8 * (1 + std::sqrt(0.5)) / 2, 1e-12);
  EXPECT_NEAR(schedule.at(4), 0.6, 1e-12);
  EXPECT_NEAR(schedule.at(6), 0.2, 1e-12);
}

TEST(LrSchedule, ImpossibleLengthsNameTheKeys) {
  EXPECT_THROW(LrSchedule(config::CosineScheduler{}, 1.0, std::nullopt), Error);
  EXPECT_THROW(LrSchedule(config::CosineScheduler{}, 1.0, 10), Error);
  EXPECT_THROW(LrSchedule(config::LinearScheduler{}, 1.0, 19), Error);
  EXPECT_NO_THROW(LrSchedule(config::LinearScheduler{}, 1.0, 20));
}

}  // namespace
}  // namespace prl::trainer
