#include "base/run_orders.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

namespace prl {
namespace {
namespace fs = std::filesystem;

TEST(RunOrders, AreSeenByOtherRolesAndEndWithTheRun) {
  const fs::path folder = fs::temp_directory_path() / ("orders_" + std::to_string(::getpid()));
  fs::remove_all(folder);
  EXPECT_FALSE(RunOrders::of(folder).is_taken());
  EXPECT_FALSE(RunOrders::of(folder).is_paused());
  const RunOrders mine = RunOrders::open(folder), others = RunOrders::of(folder);
  EXPECT_TRUE(others.is_taken());
  EXPECT_FALSE(others.is_paused());
  mine.set_paused(true);
  EXPECT_TRUE(others.is_paused());
  mine.set_paused(false);
  mine.set_paused(false);
  EXPECT_FALSE(others.is_paused());
  mine.ask_for_checkpoint();
  EXPECT_TRUE(others.wants_checkpoint());
  EXPECT_EQ(mine.checkpoint_step(), std::nullopt);
  others.set_checkpoint_step(12);
  EXPECT_FALSE(mine.wants_checkpoint()) << "it is fulfilled";
  EXPECT_EQ(mine.checkpoint_step(), 12);
  mine.set_paused(true);
  RunOrders::open(folder);
  EXPECT_FALSE(mine.is_paused()) << "a new run begins without orders";
  RunOrders::close(folder);
  EXPECT_FALSE(RunOrders::of(folder).is_taken());
  fs::remove_all(folder);
}

}  // namespace
}  // namespace prl
