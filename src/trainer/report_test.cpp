#include "trainer/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

namespace prl::trainer {
namespace {

monitor::Metrics sample_metrics() {
  return {{"time/step", 1.234},          {"loss/mean", -0.00123},  {"entropy/all/mean", 0.5},
          {"mismatch_kl/all/mean", 0.0}, {"optim/grad_norm", 1.5}, {"optim/lr", 1e-6},
          {"perf/throughput", 1234.4},   {"perf/mfu", 1.23},       {"perf/peak_memory", 1.24}};
}

TEST(StepLine, HasTheFieldsThatParsersLookFor) {
  const std::string line = rl_step_line(7, sample_metrics());
  EXPECT_EQ(line,
            "Step 7 | Time: 1.23s | Loss: -0.0012 | Entropy: 0.5000 | Mismatch KL: 0.0000 | Grad. Norm: 1.5000 | LR: 1.00e-06 | "
            "Throughput: 1234 tokens/s | MFU: 1.2% | Peak Mem.: 1.2 GiB");
  std::smatch match;
  EXPECT_TRUE(std::regex_search(line, match, std::regex("Mismatch KL:?\\s+(\\d+\\.\\d{4})")));
}

TEST(StepLine, AbsentMetricsLeaveNoField) {
  monitor::Metrics metrics = sample_metrics();
  metrics.erase("optim/grad_norm");
  metrics.erase("perf/mfu");
  EXPECT_THAT(rl_step_line(1, metrics), ::testing::Not(::testing::HasSubstr("Grad")));
  EXPECT_THAT(rl_step_line(1, metrics), ::testing::HasSubstr("MFU: n/a")) << "the peak is not known";
  metrics.erase("perf/throughput");
  EXPECT_THAT(rl_step_line(1, metrics), ::testing::Not(::testing::HasSubstr("MFU")));
  EXPECT_THAT(sft_step_line(1, metrics, 10, StepEstimate(std::nullopt)), ::testing::EndsWith("Peak Mem.: 1.2/10.0 GiB (12.4%)"));
}

TEST(StepLine, OfFineTuningSaysWhenItEnds) {
  StepEstimate estimate(20);
  estimate.add(2);
  const std::string line = sft_step_line(5, sample_metrics(), 10, estimate);
  EXPECT_THAT(line, ::testing::StartsWith("Step 5/20 | Time: 1.23s | Loss: -0.0012"));
  EXPECT_THAT(line, ::testing::EndsWith(" | ETA 30s"));
}

TEST(Throughput, OfSeveralRanksIsTheSumAndOfOneGpuAShare) {
  PeakFlops peak(0);
  monitor::Metrics metrics;
  put_throughput(metrics, 1200, 0, peak, 4);
  EXPECT_EQ(metrics.at("perf/throughput"), 1200);
  EXPECT_EQ(metrics.at("perf/throughput_per_gpu"), 300);
}

TEST(ThroughputWindow, LeavesOutTheStepThatWarmsUp) {
  ThroughputWindow window;
  window.add(100, 10);
  EXPECT_DOUBLE_EQ(window.tokens_per_s(), 10) << "all that is known";
  window.add(100, 1);
  EXPECT_DOUBLE_EQ(window.tokens_per_s(), 100);
  window.add(200, 1);
  EXPECT_DOUBLE_EQ(window.tokens_per_s(), 150);
}

TEST(ThroughputWindow, CoversTenSteps) {
  ThroughputWindow window;
  EXPECT_EQ(window.tokens_per_s(), 0);
  window.add(1, 1);  // warms up
  window.add(1000000, 1);
  for (int i = 0; i < 10; ++i) window.add(100, 2);
  EXPECT_DOUBLE_EQ(window.tokens_per_s(), 50);
}

TEST(PeakFlops, IsRaisedByWhatIsReached) {
  PeakFlops peak(1e9);
  EXPECT_DOUBLE_EQ(peak.utilization(0.5e9).value(), 50);
  EXPECT_DOUBLE_EQ(peak.utilization(4e9).value(), 100) << "never above 100: the peak was measured too low";
  EXPECT_DOUBLE_EQ(peak.utilization(1e9).value(), 25);
  EXPECT_FALSE(PeakFlops(0).utilization(1e9));
}

TEST(BenchTable, AnUnknownPeakIsNotZero) {
  BenchTable table(64);
  for (int step = 1; step <= 3; ++step) {
    monitor::Metrics metrics = sample_metrics();
    metrics.erase("perf/mfu");
    table.add(step, metrics);
  }
  EXPECT_THAT(table.render(), ::testing::AllOf(::testing::HasSubstr("n/a"), ::testing::Not(::testing::HasSubstr("nan"))));
  EXPECT_THAT(table.to_json(), ::testing::AllOf(::testing::HasSubstr("\"mfu\": null"), ::testing::HasSubstr("\"mfu\": {\"mean\": null")));
}

TEST(BenchTable, LeavesTheWarmUpOut) {
  BenchTable table(64);
  for (int step = 1; step <= 4; ++step) {
    monitor::Metrics metrics = sample_metrics();
    metrics["perf/throughput"] = step == 1 ? 1 : 10000.0 * step;
    metrics["perf/mfu"] = step == 1 ? 90 : 10.0 + step;
    table.add(step, metrics);
  }
  const std::string text = table.render();
  EXPECT_THAT(text, ::testing::HasSubstr("Benchmark"));
  EXPECT_THAT(text, ::testing::HasSubstr("13.00% ± 1.00% [12.00%, 14.00%]"));
  EXPECT_THAT(text, ::testing::HasSubstr("30.00K ± 10.00K [20.00K, 40.00K]"));
  EXPECT_THAT(text, ::testing::HasSubstr("1.2 GiB (1.9%)"));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("90.00%")));
  EXPECT_THAT(table.to_json(), ::testing::HasSubstr("\"throughput\": {\"mean\": 30000"));
}

}  // namespace
}  // namespace prl::trainer
