#include "dashboard/terminal.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "dashboard/testing/run_files.hpp"
#include "text/utf8.hpp"

namespace prl::dashboard {
namespace {

using ::testing::HasSubstr;
using testing::metrics_row;
using ::testing::Not;
using testing::RunFiles;

std::string drawn(const RunFiles& files, const TerminalOptions& options) {
  RunView run(files.folder(), "run");
  run.read_metrics();
  return draw_run(run, options);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) lines.push_back(text.substr(at, end - at));
  return lines;
}

TEST(Sparkline, GoesFromTheLowestToTheHighestValue) {
  EXPECT_EQ(sparkline(std::vector<double>{0, 1, 2, 3, 4, 5, 6, 7}, 8, true), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(sparkline(std::vector<double>{7, 0}, 8, false), "#_");
  EXPECT_EQ(sparkline(std::vector<double>{2, 2, 2}, 8, false), "~~~") << "no range: the middle";
  EXPECT_EQ(sparkline({}, 8, true), "");
}

TEST(Sparkline, MoreValuesThanCharactersBecomeMeans) {
  EXPECT_EQ(sparkline(std::vector<double>{0, 0, 0, 7, 7, 7}, 2, false), "_#");
  EXPECT_EQ(sparkline(std::vector<double>{0, 2, 8, 10}, 2, false), "_#");
  EXPECT_EQ(sparkline(std::vector<double>(1000, 1.0), 30, false).size(), 30u);
}

TEST(Sparkline, WhatIsNotFiniteIsMarkedAndDoesNotStretchTheRest) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(sparkline(std::vector<double>{0, nan, 1, inf}, 4, false), "_!#!");
}

TEST(Top, ShowsProgressPaceAndTheNewestValues) {
  const RunFiles files("top");
  files.write("configs/rl.json", R"({"max_steps": 40})");
  std::string rows;
  for (int step = 1; step <= 10; ++step) rows += metrics_row(step, "orchestrator", "reward/all/mean", 0.05 * step);
  files.write("metrics.jsonl", rows);
  const std::string text = drawn(files, {.columns = 120, .now = 1070});
  EXPECT_THAT(text, HasSubstr("run  rl  step 10 of 40 (25%)  ETA 30 s  1.00 s a step  updated 1m 00s ago"));
  EXPECT_THAT(text, HasSubstr("reward/all/mean (orchestrator)"));
  EXPECT_THAT(text, HasSubstr(" 0.5000      0.0500      0.5000  ▁")) << text;
  files.append("metrics.jsonl", metrics_row(40, "orchestrator", "reward/all/mean", 1));
  EXPECT_THAT(drawn(files, {}), HasSubstr("step 40 of 40 (100%)  finished"));
}

TEST(Top, ChosenMetricsComeFirstAndOnce) {
  const RunFiles files("top_first");
  files.write("metrics.jsonl", metrics_row(1, "trainer", "loss/mean", 2) + metrics_row(1, "trainer", "optim/lr", 1e-5));
  const auto lines = lines_of(drawn(files, {.metrics = {"optim/lr", "loss"}}));
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_THAT(lines[2], HasSubstr("optim/lr (trainer)"));
  EXPECT_THAT(lines[2], HasSubstr("1.00e-05"));
  EXPECT_THAT(lines[3], HasSubstr("loss/mean (trainer)"));
}

TEST(Top, FitsTheTerminalAndLetsNoFileMoveTheCursor) {
  const RunFiles files("top_hostile");
  std::string rows, log;
  for (int i = 0; i < 50; ++i)
    rows += metrics_row(1, "trainer", "loss/mean", i),
        log += "10:00:00 WARNING [trainer] \x1b[2J\xff\xe2\x80\xae" + std::string(500, 'x') + "\n";
  files.write("metrics.jsonl", rows);
  files.write("logs/trainer.log", log);
  for (const std::size_t columns : {20u, 60u, 200u})
    for (const std::size_t num_rows : {2u, 5u, 60u}) {
      const std::string text = drawn(files, {.columns = columns, .rows = num_rows});
      EXPECT_LE(lines_of(text).size(), num_rows);
      for (const std::string& line : lines_of(text)) EXPECT_LE(text::count_code_points(line), columns) << line;
      EXPECT_THAT(text, Not(HasSubstr("\x1b")));
      EXPECT_TRUE(text::is_valid_utf8(text));
    }
  EXPECT_THAT(drawn(files, {}), HasSubstr("newest warnings and errors"));
}

TEST(Top, ARunWithoutStepsSaysSo) {
  const RunFiles files("top_empty");
  files.write("run.json", "{}");
  EXPECT_THAT(drawn(files, {}), HasSubstr("no step has been recorded yet"));
}

}  // namespace
}  // namespace prl::dashboard
