#include "base/log_progress.hpp"

#include <gtest/gtest.h>

#include <string>

namespace prl::log {
namespace {

TEST(LogProgress, ColoursAreForTerminalsThatWantThem) {
  EXPECT_TRUE(is_colored(true, nullptr, "xterm-256color"));
  EXPECT_TRUE(is_colored(true, "", nullptr));
  EXPECT_FALSE(is_colored(true, "1", "xterm"));
  EXPECT_FALSE(is_colored(true, nullptr, "dumb"));
  EXPECT_FALSE(is_colored(false, nullptr, "xterm"));
}

TEST(LogProgress, FieldsThatDoNotFitAreLeftOutAndTheLastStays) {
  const std::string line = "Step 1/9 | Reward: 0.5000 | Loss: 0.1000 | ETA 3s";
  EXPECT_EQ(fit_fields(line, 0), line);
  EXPECT_EQ(fit_fields(line, line.size()), line);
  EXPECT_EQ(fit_fields(line, line.size() - 1), "Step 1/9 | Reward: 0.5000 | ETA 3s");
  EXPECT_EQ(fit_fields(line, 20), "Step 1/9 | ETA 3s");
  EXPECT_EQ(fit_fields(line, 3), "Step 1/9 | ETA 3s");
  EXPECT_EQ(fit_fields("no fields at all", 3), "no fields at all");
}

}  // namespace
}  // namespace prl::log
