#include "launch/metric_services.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>

namespace prl::launch {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(TrainerGauges, AreThoseOfTheMetricsThatAreThere) {
  const std::string text =
      trainer_gauges(7, 1700000000.5, {{"loss/mean", -0.25}, {"optim/grad_norm", std::numeric_limits<double>::infinity()}});
  EXPECT_THAT(text, HasSubstr("# TYPE trainer_step gauge\ntrainer_step 7\n"));
  EXPECT_THAT(text, HasSubstr("\ntrainer_last_step_timestamp_seconds 1700000000.5\n"));
  EXPECT_THAT(text, HasSubstr("\ntrainer_loss -0.25\n"));
  EXPECT_THAT(text, HasSubstr("\ntrainer_grad_norm +Inf\n"));
  EXPECT_THAT(text, Not(HasSubstr("trainer_entropy")));
}

}  // namespace
}  // namespace prl::launch
