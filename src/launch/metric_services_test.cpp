#include "launch/metric_services.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/files.hpp"
#include "net/http_client.hpp"

namespace prl::launch {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(TrainerGauges, AreThoseOfTheMetricsThatAreThere) {
  const std::string text =
      trainer_gauges({{"", {7, 1700000000.5, {{"loss/mean", -0.25}, {"optim/grad_norm", std::numeric_limits<double>::infinity()}}}}});
  EXPECT_THAT(text, HasSubstr("# TYPE trainer_step gauge\ntrainer_step 7\n"));
  EXPECT_THAT(text, HasSubstr("\ntrainer_last_step_timestamp_seconds 1700000000.5\n"));
  EXPECT_THAT(text, HasSubstr("\ntrainer_loss -0.25\n"));
  EXPECT_THAT(text, HasSubstr("\ntrainer_grad_norm +Inf\n"));
  EXPECT_THAT(text, Not(HasSubstr("trainer_entropy")));
}

TEST(TrainerGauges, OfSeveralRunsHaveLabels) {
  const std::string text = trainer_gauges({{"run_a", {2, 0, {{"loss/mean", 1.0}}}}, {"run_\"b\\", {5, 0, {}}}});
  EXPECT_THAT(text, HasSubstr("# TYPE trainer_step gauge\ntrainer_step{run=\"run_\\\"b\\\\\"} 5\ntrainer_step{run=\"run_a\"} 2\n# HELP "))
      << "a name is said once, and quotes within a label are escaped";
  EXPECT_THAT(text, HasSubstr("# TYPE trainer_loss gauge\ntrainer_loss{run=\"run_a\"} 1\n"));
  EXPECT_THAT(trainer_gauges({}), ::testing::IsEmpty());
}

TEST(StepServices, FollowRunsUntilTheyEnd) {
  config::MetricsServerConfig config;
  config.host = "127.0.0.1";
  config.port = 0;
  monitor::MetricSet declared;
  declared.declare(std::vector<monitor::MetricInfo>{{"loss/mean", "", ""}});
  monitor::Monitor a(declared, "trainer"), b(declared, "trainer");
  ::testing::internal::CaptureStderr();
  std::optional<StepServices> services(std::in_place, std::nullopt, config);
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::size_t at = log.find("http://127.0.0.1:");
  ASSERT_NE(at, std::string::npos) << log;
  const std::string url = log.substr(at, log.find("/metrics", at) - at) + "/metrics";
  services->follow(a, "run_a");
  services->follow(b, "run_b");
  services.reset();
  a.log(3, {{"loss/mean", 0.5}});
  const auto page = [&] {
    net::BlockingHttpClient client({});
    net::HttpCall call;
    call.url = url;
    call.max_retries = 0;
    return client.call(std::move(call)).body;
  };
  EXPECT_THAT(page(), AllOf(HasSubstr("trainer_loss{run=\"run_a\"} 0.5\n"), HasSubstr("trainer_step{run=\"run_b\"} 0\n")));
  a.finish();
  EXPECT_THAT(page(), AllOf(Not(HasSubstr("run_a")), HasSubstr("run_b")));
  b.finish();
  EXPECT_ANY_THROW(page()) << "nobody is followed any more";
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
