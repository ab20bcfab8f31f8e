#include "monitor/monitor.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "base/error.hpp"
#include "base/files.hpp"
#include "monitor/format.hpp"
#include "monitor/metrics_file.hpp"
#include "monitor/sinks.hpp"

namespace prl::monitor {
namespace {

constexpr MetricInfo kInfos[] = {
    {"optim/lr", "1", "learning rate", false},
    {"entropy/**", "nats", "token entropy per environment", true},
    {"metrics/*/*", "1", "environment metric", false},
};

MetricSet declared() {
  MetricSet set;
  set.declare(kInfos);
  return set;
}

std::filesystem::path temporary(const char* name) {
  return std::filesystem::temp_directory_path() / fmt::format("prl-monitor-{}-{}", ::getpid(), name);
}

/// "<step> <role>" of each row.
std::vector<std::string> keys_of(const std::filesystem::path& path) {
  std::vector<std::string> keys;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    const auto key = parse_row_key(line);
    keys.push_back(key ? fmt::format("{} {}", key->step, key->role) : "damaged: " + line);
  }
  return keys;
}

TEST(MetricSet, MatchesSegmentsAndStats) {
  const MetricSet set = declared();
  EXPECT_NE(set.find("optim/lr"), nullptr);
  EXPECT_EQ(set.find("optim"), nullptr);
  EXPECT_EQ(set.find("optim/lr/mean"), nullptr);
  EXPECT_NE(set.find("entropy/all/mean"), nullptr);
  EXPECT_NE(set.find("entropy/org/reverse-text/median"), nullptr);
  EXPECT_EQ(set.find("entropy/all"), nullptr) << "a metric with statistics is never logged bare";
  EXPECT_EQ(set.find("entropy/mean"), nullptr);
  EXPECT_NE(set.find("metrics/env/score"), nullptr);
  EXPECT_EQ(set.find("metrics/env"), nullptr);
  EXPECT_EQ(set.find("metrics//score"), nullptr);
  EXPECT_EQ(set.nearest("optim/lrr"), "optim/lr");
}

TEST(MetricSet, StatsOfPooledValues) {
  std::vector<double> values{4, 1, 3, 2};
  const Stats stats = summarize(values);
  EXPECT_DOUBLE_EQ(stats.mean, 2.5);
  EXPECT_DOUBLE_EQ(stats.median, 2.0);
  EXPECT_NEAR(stats.std, 1.2909944487358056, 1e-15);
  EXPECT_DOUBLE_EQ(stats.min, 1);
  EXPECT_DOUBLE_EQ(stats.max, 4);
  Metrics metrics;
  put_stats(metrics, "empty", {});
  EXPECT_TRUE(metrics.empty());
  put_stats(metrics, "x", {7});
  EXPECT_EQ(metrics.at("x/std"), 0.0);
}

TEST(Monitor, UndeclaredMetricFails) {
  Monitor monitor(declared());
  int num_calls = 0;
  monitor.add_sink(make_callback_sink([&](std::int64_t, const Metrics&) { ++num_calls; }));
  monitor.log(1, {{"optim/lr", 1e-6}});
  EXPECT_EQ(num_calls, 1);
  try {
    monitor.log(2, {{"optim/lr", 1e-6}, {"optim/lrate", 1.0}});
    FAIL() << "an undeclared metric went through";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("optim/lrate"), ::testing::HasSubstr("'optim/lr'")));
  }
  EXPECT_EQ(num_calls, 1) << "nothing of a bad call may reach a sink";
}

TEST(JsonlSink, AppendsClosesBrokenLinesAndDropsNan) {
  const auto path = temporary("metrics.jsonl");
  { std::ofstream(path) << "{\"step\": 1, \"ti"; }
  {
    Monitor monitor(declared());
    monitor.add_sink(make_jsonl_sink(path));
    monitor.log(2, {{"optim/lr", 0.1}, {"entropy/all/mean", std::numeric_limits<double>::quiet_NaN()}, {"metrics/a\"b/c", -1e-300}});
    monitor.log(3, {{"optim/lr", std::numeric_limits<double>::infinity()}});
  }
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  EXPECT_EQ(line, "{\"step\": 1, \"ti");
  std::getline(in, line);
  EXPECT_THAT(line, ::testing::MatchesRegex("\\{\"step\": 2, \"time\": [0-9.]+, \"metrics/a\\\\\"b/c\": -1e-300, \"optim/lr\": 0.1\\}"));
  std::getline(in, line);
  EXPECT_THAT(line, ::testing::MatchesRegex("\\{\"step\": 3, \"time\": [0-9.]+\\}"));
  EXPECT_FALSE(std::getline(in, line));
  std::filesystem::remove(path);
}

TEST(Monitor, AMetricCannotTakeTheNameOfAField) {
  MetricSet set = declared();
  constexpr MetricInfo kFields[] = {{"step", "steps", "a field of every row"}};
  set.declare(kFields);
  Monitor monitor(set);
  EXPECT_THROW(monitor.log(1, {{"step", 1.0}}), Error) << "the row would hold the key twice";
}

TEST(JsonlSink, RowsSayWhoseTheyAreAndGoOnInAReplacedFile) {
  const auto path = temporary("replaced.jsonl");
  Monitor trainer(declared(), "trainer");
  trainer.add_sink(make_jsonl_sink(path));
  for (int step = 1; step <= 4; ++step) trainer.log(step, {{"optim/lr", 0.5}});
  trainer.log(4, {{"optim/lr", 0.25}}, "online_eval");
  trainer.sync();
  const std::string roles[] = {"trainer"};
  EXPECT_EQ(trim_rows(path, roles, 2).num_late, 2);  // by the resume of another role, which shares the file
  trainer.log(3, {{"optim/lr", 0.125}});
  EXPECT_THAT(keys_of(path), ::testing::ElementsAre("1 trainer", "2 trainer", "4 online_eval", "3 trainer"));
  EXPECT_TRUE(has_rows_of(path, "online_eval"));
  EXPECT_FALSE(has_rows_of(path, "orchestrator"));
  std::filesystem::remove(path);
}

TEST(MetricsFile, AResumeLeavesOneWholeRowPerStepAndRole) {
  const auto path = temporary("trimmed.jsonl"), late = temporary("late.jsonl");
  std::filesystem::remove(late);
  const auto row = [](int step, const char* role, int value) {
    return fmt::format("{{\"step\": {}, \"role\": \"{}\", \"time\": 1.0, \"x\": {}}}\n", step, role, value);
  };
  std::string text = row(1, "trainer", 1) + row(1, "orchestrator", 1) + row(2, "trainer", 1) + row(3, "trainer", 1);
  text += "{\"step\": 3, \"role\": \"orch{\"step\": 2, \"role\": \"trainer\", \"time\": 1.0}\n";  // a killed process's half of a row
  text += std::string(12, '\0') + "\n";                                                           // what a power loss leaves
  text += row(2, "trainer", 2) + row(2, "orchestrator", 1) + row(0, "eval", 1) + row(0, "eval", 2) + row(9, "eval", 1);
  text += "{\"step\": 7, \"role\": \"trainer\"";
  { std::ofstream(path) << text; }
  const std::string roles[] = {"trainer", "orchestrator"};
  const TrimmedRows trimmed = trim_rows(path, roles, 2, late);
  EXPECT_EQ(trimmed.num_late, 1);
  EXPECT_EQ(trimmed.num_doubled, 1);
  EXPECT_EQ(trimmed.num_damaged, 3);
  EXPECT_THAT(keys_of(path),
              ::testing::ElementsAre("1 trainer", "1 orchestrator", "2 trainer", "2 orchestrator", "0 eval", "0 eval", "9 eval"));
  std::ifstream in(path);
  const std::string kept((std::istreambuf_iterator<char>(in)), {});
  EXPECT_THAT(kept, ::testing::HasSubstr(row(2, "trainer", 2))) << "the later one counts";
  EXPECT_THAT(keys_of(late), ::testing::ElementsAre("3 trainer"));
  EXPECT_EQ(trim_rows(path, roles, 2).num_doubled, 0) << "nothing is left to do";
  // The order of a file that an earlier version left: steps 5 and 6 were made twice.
  { std::ofstream(path) << row(5, "trainer", 1) << row(6, "trainer", 1) << row(4, "trainer", 1) << row(5, "trainer", 2); }
  trim_rows(path, roles, 6);
  EXPECT_THAT(keys_of(path), ::testing::ElementsAre("4 trainer", "5 trainer", "6 trainer"));
  std::filesystem::remove(path);
  std::filesystem::remove(late);
}

TEST(JsonlSink, NamesTheFileItCannotOpen) {
  try {
    make_jsonl_sink("/proc/no-such-folder/metrics.jsonl");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("/proc/no-such-folder/metrics.jsonl"));
  }
}

TEST(Format, NumbersAndTimes) {
  EXPECT_EQ(format_num(950), "950");
  EXPECT_EQ(format_num(0.5), "0.50");
  EXPECT_EQ(format_num(12340), "12.34K");
  EXPECT_EQ(format_num(-2500000), "-2.50M");
  EXPECT_EQ(format_num(3e9, 1), "3.0B");
  EXPECT_EQ(format_time(0.1234), "123ms");
  EXPECT_EQ(format_time(12.9), "12s");
  EXPECT_EQ(format_time(303), "5m 3s");
  EXPECT_EQ(format_time(300), "5m");
  EXPECT_EQ(format_time(7500), "2h 5m");
  EXPECT_EQ(format_time(97200), "1d 3h");
  EXPECT_EQ(format_gib(11.73), "11.7 GiB");
}

}  // namespace
}  // namespace prl::monitor
