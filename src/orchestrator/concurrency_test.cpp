#include "orchestrator/concurrency.hpp"

#include <gtest/gtest.h>

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;

/// A controller with a clock that moves from poll to poll.
struct Steps {
  ConcurrencyController controller;
  net::TimePoint now{};
  void poll(EnginePressure pressure, std::int64_t num_inflight) {
    now += 5s;
    controller.on_poll(pressure, num_inflight, now);
  }
  void complete(std::int64_t times) {
    for (std::int64_t i = 0; i < times; ++i) controller.on_completion(controller.cap() - 1, now);
  }
};

TEST(Concurrency, BeginsWithWhatTheCachesHoldAtFullLength) {
  Steps run{ConcurrencyController({.initial = {}, .min = 4, .max = 100})};
  EXPECT_EQ(run.controller.cap(), 4);
  run.poll({.num_cache_tokens = 64'000, .max_model_len = 2'000}, 4);
  EXPECT_EQ(run.controller.cap(), 32);
  Steps given{ConcurrencyController({.initial = 10, .min = 4, .max = 100})};
  given.poll({.num_cache_tokens = 64'000, .max_model_len = 2'000}, 4);
  EXPECT_EQ(given.controller.cap(), 10);
}

TEST(Concurrency, GrowsByAQuarterPerRoundOfCompletionsWhileTheEnginesHaveRoom) {
  Steps run{ConcurrencyController({.initial = 40, .min = 1, .max = 60})};
  run.complete(100);
  EXPECT_EQ(run.controller.cap(), 40) << "nothing is known of the engines yet";
  run.poll({.kv_usage = 0.3, .num_running = 40}, 40);
  run.complete(39);
  EXPECT_NEAR(static_cast<double>(run.controller.cap()), 50, 1);
  run.controller.on_completion(10, run.now);
  EXPECT_NEAR(static_cast<double>(run.controller.cap()), 50, 1) << "so few in flight say nothing about more";
  run.now += 16s;
  run.complete(100);
  EXPECT_NEAR(static_cast<double>(run.controller.cap()), 50, 1) << "the poll is too old";
  run.poll({.kv_usage = 0.3, .num_running = 50}, 50);
  run.complete(200);
  EXPECT_EQ(run.controller.cap(), 60);
}

TEST(Concurrency, SoftPressureStopsTheGrowth) {
  Steps run{ConcurrencyController({.initial = 40, .min = 1, .max = 1000})};
  run.poll({.kv_usage = 0.65, .num_running = 40}, 40);
  EXPECT_EQ(run.controller.signal(), PressureSignal::kSoft);
  run.complete(50);
  EXPECT_EQ(run.controller.cap(), 40);
  run.poll({.kv_usage = 0.2, .num_running = 40, .num_waiting = 1}, 40);
  EXPECT_EQ(run.controller.signal(), PressureSignal::kClear);
  run.complete(50);
  EXPECT_EQ(run.controller.cap(), 40) << "a queue that is not empty";
  run.poll({.kv_usage = 0.2, .num_running = 40, .num_waiting = 1}, 40);
  EXPECT_EQ(run.controller.signal(), PressureSignal::kSoft) << "twice in a row";
}

TEST(Concurrency, ACacheThatIsAllButFullCancelsWhatIsAboveTheCapOnce) {
  ConcurrencyController controller({.initial = 100, .min = 4, .max = 200});
  const net::TimePoint now = net::Clock::now();
  controller.on_poll({.num_cache_tokens = 8000, .max_model_len = 100, .kv_usage = 0.85, .num_running = 100}, 100, now);
  EXPECT_EQ(controller.cap(), 82) << "100 * 0.7 / 0.85";
  EXPECT_EQ(controller.take_num_to_cancel(), 0) << "below 0.9 they end by themselves";
  EXPECT_EQ(controller.capacity(), 80);
  for (int poll = 1; poll <= 6; ++poll) controller.on_poll({.kv_usage = 0.5, .num_running = 90}, 90, now);
  controller.on_poll({.kv_usage = 0.95, .num_running = 90}, 90, now);
  EXPECT_EQ(controller.cap(), 66) << "90 * 0.7 / 0.95";
  EXPECT_EQ(controller.take_num_to_cancel(), 24);
  EXPECT_EQ(controller.take_num_to_cancel(), 0) << "once";
  controller.on_poll({.kv_usage = 0.95, .num_running = 90}, 90, now);
  EXPECT_EQ(controller.take_num_to_cancel(), 0) << "at most every six polls";
}

TEST(Concurrency, TurnoverCountsWhatEnded) {
  ConcurrencyController controller({.initial = 10, .min = 1, .max = 20});
  const net::TimePoint now = net::Clock::now();
  EXPECT_EQ(controller.take_turnover(now), 0);
  for (int i = 0; i < 6; ++i) controller.on_completion(5, now);
  EXPECT_EQ(controller.take_turnover(now + std::chrono::seconds(3)), 2);
  EXPECT_EQ(controller.take_turnover(now + std::chrono::seconds(4)), 0);
}

TEST(Concurrency, PreemptionsCutOnceUntilTheRestHasEnded) {
  Steps run{ConcurrencyController({.initial = 100, .min = 1, .max = 1000})};
  run.poll({.kv_usage = 0.5, .num_running = 100, .num_preemptions = 7}, 100);
  EXPECT_EQ(run.controller.cap(), 100) << "those from before the run";
  run.poll({.kv_usage = 0.5, .num_running = 100, .num_preemptions = 9}, 100);
  EXPECT_EQ(run.controller.cap(), 80);
  EXPECT_EQ(run.controller.signal(), PressureSignal::kHard);
  run.poll({.kv_usage = 0.5, .num_running = 95, .num_preemptions = 12}, 95);
  EXPECT_EQ(run.controller.cap(), 80) << "the rest still drains";
  run.poll({.kv_usage = 0.5, .num_running = 78, .num_preemptions = 12}, 78);
  run.poll({.kv_usage = 0.5, .num_running = 80, .num_preemptions = 13}, 80);
  EXPECT_EQ(run.controller.cap(), 40) << "again, right after it had drained";
}

TEST(Concurrency, AQueueThatStaysIsCutAndAFullCacheTrimmed) {
  Steps run{ConcurrencyController({.initial = 100, .min = 1, .max = 1000})};
  for (int i = 0; i < 5; ++i) run.poll({.kv_usage = 0.5, .num_running = 50, .num_waiting = 50}, 100);
  EXPECT_EQ(run.controller.cap(), 100);
  run.poll({.kv_usage = 0.5, .num_running = 50, .num_waiting = 50}, 100);
  EXPECT_EQ(run.controller.cap(), 90);
  Steps full{ConcurrencyController({.initial = 100, .min = 80, .max = 1000})};
  full.poll({.kv_usage = 0.84, .num_running = 100}, 100);
  EXPECT_EQ(full.controller.cap(), 83);
  full.poll({.kv_usage = 0.84, .num_running = 83}, 83);
  EXPECT_EQ(full.controller.cap(), 83) << "not at every poll";
  for (int i = 0; i < 6; ++i) full.poll({.kv_usage = 0.95, .num_running = 83}, 83);
  EXPECT_EQ(full.controller.cap(), 80) << "never below the least";
}

}  // namespace
}  // namespace prl::orchestrator
