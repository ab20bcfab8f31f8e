#include "orchestrator/eval_rounds.hpp"

#include <gtest/gtest.h>

#include <map>

#include "monitor/sinks.hpp"
#include "net/deadline.hpp"
#include "net/io_runtime.hpp"
#include "orchestrator/metrics.hpp"
#include "orchestrator/testing/fakes.hpp"

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;
using namespace testing;

struct EvalFixture {
  std::shared_ptr<FakeWeights> weights = std::make_shared<FakeWeights>();
  RunControl control;
  PolicyFollower policy{std::make_shared<FakePolicySource>(weights), {.policy_timeout = 20s}, control};
  net::OffThread files;
  monitor::Monitor monitor;
  std::map<std::int64_t, int> num_rows;  ///< by version
  int num_before = 0;
  std::optional<EvalRounds> rounds;
  net::IoRuntime io{1};

  static monitor::MetricSet declared() {
    monitor::MetricSet set;
    set.declare(metric_infos());
    return set;
  }

  explicit EvalFixture(EvalRoundOptions options, FakeChatOptions chat = {.max_delay = 0us}) : monitor(declared()) {
    monitor.add_sink(monitor::make_callback_sink([this](std::int64_t step, const monitor::Metrics&) { ++num_rows[step]; }));
    rounds.emplace(std::move(options),
                   EvalRounds::Services{.environments = {TrainEnv{tiny_environment(), {}, 10s, 0}},
                                        .chat = std::make_shared<FakeChat>(weights, chat),
                                        .monitor = &monitor,
                                        .files = &files,
                                        .before_evals = [this] { ++num_before; }},
                   policy, control);
  }
  void load(std::int64_t version) {
    weights->published = version;
    io.run_blocking(policy.load_first(PolicyVersion{version}), 60s);
  }
  void run_due() { io.run_blocking(rounds->run_due(), 60s); }
};

OnlineEval online(std::int64_t interval) {
  OnlineEval out;
  out.interval = interval;
  out.task.environment = tiny_environment("held-out");
  out.task.seed = 1;
  return out;
}

TEST(EvalRounds, PlaysEachIntervalOnceFromTheBaseModelOn) {
  EvalFixture f({.evals = {online(2)}});
  f.load(0);
  f.rounds->begin(PolicyVersion{0}, /*is_resumed=*/false);
  for (std::int64_t version = 0; version <= 5; ++version) {
    f.load(version);
    EXPECT_EQ(f.rounds->is_due(), version % 2 == 0) << version;
    f.run_due();
    EXPECT_FALSE(f.rounds->is_due()) << version;
  }
  EXPECT_EQ(f.num_rows, (std::map<std::int64_t, int>{{0, 1}, {2, 1}, {4, 1}}));
  EXPECT_EQ(f.num_before, 3) << "groups in flight may be dropped before each round";
  ASSERT_EQ(f.rounds->results().size(), 1u);
  EXPECT_EQ(f.rounds->results()[0].policy_version_min, 4);
}

TEST(EvalRounds, WhatWasDueBeforeTheStartIsPlayedOnlyIfAskedFor) {
  for (const bool skip : {true, false}) {
    EvalFixture f({.evals = {online(2)}, .eval_base_model = !skip, .skip_eval_on_resume = skip});
    f.load(4);
    for (const bool is_resumed : {true, false}) {
      f.rounds->begin(PolicyVersion{4}, is_resumed);
      EXPECT_EQ(f.rounds->is_due(), !skip) << skip << is_resumed;
    }
  }
}

TEST(EvalRounds, TheLastRoundPlaysEverythingWithTheLastPolicy) {
  EvalFixture f(
      {.evals = {online(100), online(7)}, .eval_base_model = false, .validation = ValidationOptions{.num_examples = 3, .interval = 3}});
  f.load(0);
  f.rounds->begin(PolicyVersion{0}, false);
  f.run_due();
  EXPECT_EQ(f.num_rows, (std::map<std::int64_t, int>{{0, 1}})) << "the first validation is before the first step";
  f.load(3);
  f.io.run_blocking(f.rounds->run_last(PolicyVersion{3}), 60s);
  EXPECT_EQ(f.num_rows, (std::map<std::int64_t, int>{{0, 1}, {3, 2}})) << "validation and both evaluations";
  EXPECT_EQ(f.rounds->results().size(), 2u);
}

TEST(EvalRounds, AStopCutsARoundOffAndItDoesNotCount) {
  EvalFixture f({.evals = {online(2)}}, {.max_delay = 60s});
  f.load(0);
  f.rounds->begin(PolicyVersion{0}, false);
  std::stop_source stop;
  f.control.begin(stop.get_token());
  stop.request_stop();
  f.run_due();
  EXPECT_TRUE(f.num_rows.empty());
  EXPECT_TRUE(f.rounds->results().empty());
}

}  // namespace
}  // namespace prl::orchestrator
