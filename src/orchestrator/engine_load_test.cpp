#include "orchestrator/engine_load.hpp"

#include <gtest/gtest.h>

#include <chrono>

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;

EnginePressure reading(double running, double queries, double hits, double tokens) {
  EnginePressure pressure;
  pressure.num_running = running;
  pressure.num_waiting = 2 * running;
  pressure.kv_usage = running / 10;
  pressure.num_prefix_queries = queries;
  pressure.num_prefix_hits = hits;
  pressure.num_generation_tokens = tokens;
  pressure.num_draft_tokens = tokens / 10;
  pressure.num_accepted_tokens = tokens / 20;
  return pressure;
}

TEST(LoadWindow, MeansMaximaAndRatesOfAStep) {
  LoadWindow window;
  monitor::Metrics metrics;
  window.take(metrics);
  EXPECT_TRUE(metrics.empty()) << "nothing is known";
  const net::TimePoint start{};
  window.add(reading(2, 100, 50, 1000), start);
  window.add(reading(4, 200, 75, 1500), start + 1s);
  window.take(metrics);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/num_requests_running/mean"), 3);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/num_requests_running/max"), 4);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/num_requests_waiting/max"), 8);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/kv_cache_usage/mean"), 0.3);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/prefix_cache_hit_rate"), 0.25);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/generation_tokens:rate"), 500);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/draft_acceptance_rate"), 0.5);
  metrics.clear();
  window.add(reading(4, 300, 75, 1500), start + 2s);
  window.take(metrics);
  EXPECT_FALSE(metrics.contains("inference/all/draft_acceptance_rate")) << "there were no drafts";
}

TEST(LoadWindow, AShortStepHasTheLastReadingAndARestartedEngineNoNegativeRate) {
  LoadWindow window;
  monitor::Metrics metrics;
  window.add(reading(6, 100, 50, 1000), {});
  window.take(metrics);
  metrics.clear();
  window.take(metrics);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/num_requests_running/mean"), 6);
  EXPECT_FALSE(metrics.contains("inference/all/generation_tokens:rate"));
  window.add(reading(1, 10, 10, 40), net::TimePoint{} + 2s);
  window.take(metrics);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/generation_tokens:rate"), 20);
  EXPECT_DOUBLE_EQ(metrics.at("inference/all/prefix_cache_hit_rate"), 1);
}

}  // namespace
}  // namespace prl::orchestrator
