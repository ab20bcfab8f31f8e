#include "launch/metric_services.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include <filesystem>
#include <limits>
#include <memory>
#include <vector>

#include "base/files.hpp"

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

TEST(OrchestratorBench, WritesATableOfItsOwnRows) {
  const std::filesystem::path path = std::filesystem::path(::testing::TempDir()) / "prl_orchestrator_bench.json";
  std::filesystem::remove(path);
  monitor::MetricSet declared;
  declared.declare(std::vector<monitor::MetricInfo>{{"perf/throughput", "tokens/s", ""}, {"time/step", "seconds", ""}});
  monitor::Monitor monitor(std::move(declared), "orchestrator");
  config::BenchModeConfig config;
  OrchestratorBench(monitor, config).write();
  EXPECT_FALSE(std::filesystem::exists(path));
  config.output_json = path;
  const OrchestratorBench bench(monitor, config);
  for (int step = 1; step <= 3; ++step) monitor.log(step, {{"perf/throughput", 100.0 * step}, {"time/step", 0.5}});
  monitor.log(3, {{"time/step", 9.0}}, "online_eval");
  bench.write();
  const boost::json::value table = boost::json::parse(read_file(path));
  EXPECT_EQ(table.at("steps").as_array().size(), 2u) << "the first warms up";
  EXPECT_EQ(table.at("overall").at("throughput").at("mean").to_number<double>(), 250);
  EXPECT_EQ(table.at("overall").at("step_time").at("max").to_number<double>(), 0.5);
  EXPECT_TRUE(table.at("overall").at("peak_memory").at("gib").is_null());
  EXPECT_TRUE(table.at("steps").at(0).at("mfu").is_null());
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace prl::launch
