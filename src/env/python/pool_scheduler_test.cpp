#include "env/python/pool_scheduler.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace prl::env::python {
namespace {

using namespace std::chrono_literals;

/// A scheduler with a clock of the test's own, whose workers come up when they are told to.
struct Pool {
  explicit Pool(SchedulerOptions options) : scheduler(options) {}
  PoolPlan plan() { return scheduler.plan(now); }
  /// Starts everything that may start.
  void bring_up() {
    for (const int worker : plan().start) scheduler.on_ready(worker, now);
  }
  void submit(int first, int count, const std::string& group = "") {
    for (int i = first; i < first + count; ++i) scheduler.submit(RunId{i}, "task " + std::to_string(i), group);
  }
  net::TimePoint now{};
  PoolScheduler scheduler;
};

SchedulerOptions options(int num_workers, std::int64_t max_inflight) {
  SchedulerOptions out;
  out.num_workers = num_workers;
  out.max_inflight = max_inflight;
  return out;
}

std::map<int, std::set<std::int64_t>> by_worker(const PoolPlan& plan) {
  std::map<int, std::set<std::int64_t>> out;
  for (const auto& assign : plan.assign) out[assign.worker].insert(assign.run.value);
  return out;
}

TEST(PoolScheduler, GivesRolloutsToTheWorkerWithTheFewest) {
  Pool pool(options(2, 3));
  pool.submit(0, 8);
  EXPECT_TRUE(pool.plan().assign.empty()) << "no worker is up";
  pool.scheduler.on_ready(0, pool.now);
  pool.scheduler.on_ready(1, pool.now);
  const auto given = by_worker(pool.plan());
  EXPECT_EQ(given.at(0), (std::set<std::int64_t>{0, 2, 4}));
  EXPECT_EQ(given.at(1), (std::set<std::int64_t>{1, 3, 5}));
  EXPECT_EQ(pool.scheduler.counts().num_queued, 2);
  pool.scheduler.on_finished(RunId{3});
  EXPECT_EQ(by_worker(pool.plan()).at(1), (std::set<std::int64_t>{6}));
}

TEST(PoolScheduler, SuspectsPlayAloneAndBystandersGoOn) {
  Pool pool(options(2, 4));
  pool.bring_up();
  pool.submit(0, 10);
  EXPECT_EQ(by_worker(pool.plan()).at(0), (std::set<std::int64_t>{0, 2, 4, 6}));
  pool.scheduler.set_waiting(RunId{2}, true);
  pool.scheduler.set_waiting(RunId{6}, true);
  pool.scheduler.on_lost(0, "killed", pool.now);
  EXPECT_TRUE(pool.plan().fail.empty());
  for (const int run : {1, 3, 5, 7}) pool.scheduler.on_finished(RunId{run});
  const PoolPlan plan = pool.plan();
  EXPECT_EQ(by_worker(plan).at(1), (std::set<std::int64_t>{0})) << "alone; 4 must wait, and 2 as long as there is one worker";
  EXPECT_EQ(plan.assign.front().attempt, 1);
  pool.now += 1s;
  pool.bring_up();
  EXPECT_EQ(by_worker(pool.plan()).at(0), (std::set<std::int64_t>{4}));
  pool.scheduler.on_finished(RunId{0});
  pool.scheduler.on_finished(RunId{4});
  EXPECT_EQ(pool.plan().assign.size(), 4u);
}

TEST(PoolScheduler, ATaskThatKillsTwoWorkersIsNotTriedAgain) {
  Pool pool(options(2, 4));
  pool.bring_up();
  pool.submit(0, 4);
  pool.plan();
  // Task 0 kills worker 0, where 2 plays too; at the same time task 3 kills worker 1, where 1 plays too.
  pool.scheduler.on_lost(0, "exited", pool.now);
  EXPECT_TRUE(pool.plan().assign.empty()) << "1 and 3 are at the other worker";
  pool.scheduler.on_lost(1, "exited", pool.now);
  std::set<std::int64_t> failed;
  std::set<std::int64_t> finished;
  std::vector<std::set<std::int64_t>> places(2);
  for (int step = 0; step < 100 && failed.size() + finished.size() < 4; ++step) {
    pool.now += 500ms;
    const PoolPlan plan = pool.plan();
    for (const auto& failure : plan.fail) {
      failed.insert(failure.run.value);
      EXPECT_EQ(failure.type, "WorkerDied");
      EXPECT_FALSE(failure.is_transient);
    }
    for (const int worker : plan.start) pool.scheduler.on_ready(worker, pool.now);
    for (const auto& assign : plan.assign) {
      const std::int64_t id = assign.run.value;
      if (id == 0 || id == 3) {
        pool.scheduler.on_lost(assign.worker, "exited", pool.now);
      } else {
        pool.scheduler.on_finished(assign.run);
        finished.insert(id);
      }
    }
  }
  EXPECT_EQ(failed, (std::set<std::int64_t>{0, 3}));
  EXPECT_EQ(finished, (std::set<std::int64_t>{1, 2})) << "those beside them are innocent";
  EXPECT_EQ(pool.scheduler.counts().num_deaths, 4) << "two of each";
  pool.scheduler.submit(RunId{50}, "task 0", "");
  EXPECT_EQ(pool.plan().fail.size(), 1u) << "refused from now on";
}

TEST(PoolScheduler, ASuspectThatFinishesIsNoneAnyMore) {
  Pool pool(options(1, 2));
  for (int death = 0; death < 6; ++death) {
    pool.now += 100s;
    pool.bring_up();
    pool.scheduler.submit(RunId{death}, "task", "");
    EXPECT_EQ(pool.plan().assign.size(), 1u);
    pool.scheduler.on_lost(0, "killed", pool.now);
    pool.now += 100s;
    pool.bring_up();
    EXPECT_EQ(pool.plan().assign.size(), 1u);
    pool.scheduler.on_finished(RunId{death});
  }
}

TEST(PoolScheduler, WorkersThatAnswerNoPingOrHaveABlockedLoopAreKilled) {
  Pool pool(options(2, 4));
  pool.bring_up();
  pool.submit(0, 2);
  pool.plan();
  std::vector<PoolPlan::Kill> kills;
  for (int beat = 0; beat < 4; ++beat) {
    pool.now += 5s;
    const PoolPlan plan = pool.plan();
    for (const auto& kill : plan.kill) kills.push_back(kill);
    pool.scheduler.on_pong(1, 0, pool.now);
  }
  ASSERT_EQ(kills.size(), 1u);
  EXPECT_EQ(kills[0].worker, 0);
  EXPECT_NE(kills[0].reason.find("none of 3 pings"), std::string::npos) << kills[0].reason;

  kills.clear();
  for (const double lag : {6000.0, 10.0, 6000.0, 6000.0, 6000.0}) {
    EXPECT_TRUE(pool.plan().kill.empty());
    pool.scheduler.on_pong(1, lag, pool.now);
  }
  const PoolPlan plan = pool.plan();
  ASSERT_EQ(plan.kill.size(), 1u);
  EXPECT_NE(plan.kill[0].reason.find("event loop"), std::string::npos);
}

TEST(PoolScheduler, StartsAgainWithBackOffAndGivesUp) {
  SchedulerOptions o = options(1, 4);
  o.max_failed_starts = 4;
  Pool pool(o);
  pool.submit(0, 2);
  std::vector<std::int64_t> waits;
  for (int i = 0; i < 4; ++i) {
    const auto before = pool.now;
    while (pool.plan().start.empty()) pool.now += 100ms;
    waits.push_back((pool.now - before) / 100ms);
    pool.scheduler.on_start_failed(0, "no module named verifiers", false, pool.now);
  }
  EXPECT_EQ(waits, (std::vector<std::int64_t>{0, 5, 10, 20}));
  const PoolPlan plan = pool.plan();
  ASSERT_EQ(plan.fail.size(), 2u);
  EXPECT_EQ(plan.fail[0].type, "EnvironmentUnavailable");
  EXPECT_NE(plan.fail[0].message.find("no module named verifiers"), std::string::npos);
  pool.submit(7, 1);
  EXPECT_EQ(pool.plan().fail.size(), 1u);
  EXPECT_TRUE(pool.plan().start.empty());
}

/// Answers pings and starts what may start for `time`, and lets each of those starts fail. Returns how many there were.
int fail_starts(Pool& pool, std::chrono::seconds time) {
  int count = 0;
  for (const auto end = pool.now + time; pool.now < end; pool.now += 100ms) {
    const PoolPlan plan = pool.plan();
    for (const int worker : plan.ping) pool.scheduler.on_pong(worker, 0, pool.now);
    for (const int worker : plan.start) {
      pool.scheduler.on_start_failed(worker, "connection refused", false, pool.now);
      ++count;
    }
  }
  return count;
}

TEST(PoolScheduler, WorkersThatAreUpGoOnWhileAnotherCannotStart) {
  Pool pool(options(2, 4));
  pool.bring_up();
  pool.scheduler.on_lost(1, "its machine is off", pool.now);
  EXPECT_GT(fail_starts(pool, 600s), 10);
  EXPECT_EQ(pool.scheduler.broken(), "");
  pool.submit(0, 2);
  const PoolPlan plan = pool.plan();
  EXPECT_TRUE(plan.fail.empty());
  EXPECT_EQ(by_worker(plan).at(0).size(), 2u);
}

TEST(PoolScheduler, AServerOfManyWorkersMayBeAwayForAMinute) {
  SchedulerOptions o = options(16, 4);
  o.max_failed_restarts = 10;
  Pool pool(o);
  pool.bring_up();
  for (int worker = 0; worker < 16; ++worker) pool.scheduler.on_lost(worker, "killed", pool.now);
  EXPECT_GT(fail_starts(pool, 60s), 16 * 5);
  EXPECT_EQ(pool.scheduler.broken(), "");
  pool.submit(0, 1);
  pool.now += 60s;
  pool.bring_up();
  EXPECT_EQ(pool.plan().assign.size(), 1u);
  for (int worker = 0; worker < 16; ++worker) pool.scheduler.on_lost(worker, "killed", pool.now);
  fail_starts(pool, 1200s);
  EXPECT_NE(pool.scheduler.broken().find("connection refused"), std::string::npos) << "not for ever";
}

TEST(PoolScheduler, AStartThatTakesTooLongIsAFailedOne) {
  Pool pool(options(1, 4));
  EXPECT_EQ(pool.plan().start.size(), 1u);
  pool.now += 601s;
  const PoolPlan plan = pool.plan();
  ASSERT_EQ(plan.kill.size(), 1u);
  EXPECT_NE(plan.kill[0].reason.find("not ready"), std::string::npos);
}

TEST(PoolScheduler, GroupsStayAtOneWorker) {
  Pool pool(options(3, 8));
  pool.bring_up();
  pool.submit(0, 4, "a");
  pool.submit(4, 4, "b");
  const auto given = by_worker(pool.plan());
  ASSERT_EQ(given.size(), 2u);
  const int a = *pool.scheduler.worker_of_group("a");
  EXPECT_EQ(given.at(a), (std::set<std::int64_t>{0, 1, 2, 3}));
  for (int i = 0; i < 3; ++i) pool.scheduler.set_waiting(RunId{i}, true);
  pool.scheduler.on_lost(a, "killed", pool.now);
  EXPECT_FALSE(pool.scheduler.worker_of_group("a"));
  pool.plan();
  EXPECT_NE(pool.scheduler.worker_of_group("a"), a) << "another one takes it over";
}

TEST(PoolScheduler, CancelledRolloutsKeepTheirPlaceUntilTheyEnd) {
  Pool pool(options(1, 2));
  pool.bring_up();
  pool.submit(0, 3);
  pool.plan();
  pool.scheduler.cancel(RunId{2});
  EXPECT_EQ(pool.scheduler.counts().num_queued, 0) << "one that waits goes at once";
  pool.scheduler.cancel(RunId{0});
  const PoolPlan plan = pool.plan();
  ASSERT_EQ(plan.cancel.size(), 1u);
  EXPECT_TRUE(pool.plan().cancel.empty()) << "told once";
  EXPECT_EQ(pool.scheduler.num_inflight(0), 2);
  pool.now += 16s;
  pool.scheduler.on_pong(0, 0, pool.now);
  const PoolPlan late = pool.plan();
  ASSERT_EQ(late.kill.size(), 1u) << "it does not end it";
  EXPECT_NE(late.kill[0].reason.find("cancelled rollout"), std::string::npos);
  pool.now += 10s;
  pool.bring_up();
  EXPECT_EQ(pool.plan().assign.size(), 1u) << "the other one only";
}

TEST(PoolScheduler, FullQueueIsAnAnswer) {
  SchedulerOptions o = options(1, 1);
  o.max_queued = 2;
  Pool pool(o);
  pool.submit(0, 3);
  const PoolPlan plan = pool.plan();
  ASSERT_EQ(plan.fail.size(), 1u);
  EXPECT_EQ(plan.fail[0].type, "PoolOverloaded");
  EXPECT_TRUE(plan.fail[0].is_transient);
}

/// Random arrivals, ends, cancels, deaths and failed starts: every rollout leaves exactly once, none is at two workers.
TEST(PoolScheduler, EveryRolloutLeavesOnceWhateverHappens) {
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 rng(seed);
    const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(rng() % n); };
    SchedulerOptions o = options(3, 4);
    o.max_failed_starts = 1000;
    Pool pool(o);
    std::map<std::int64_t, int> place;  ///< of rollouts at a worker
    std::set<std::int64_t> cancelled;
    std::map<std::int64_t, int> ends;
    std::set<int> starting;
    std::int64_t next = 0;
    const auto drop_worker = [&](int worker) {
      std::erase_if(place, [&](const auto& item) {
        if (item.second != worker) return false;
        if (cancelled.contains(item.first)) ++ends[item.first];
        return true;
      });
      starting.erase(worker);
    };
    for (int step = 0; step < 3000 || static_cast<std::int64_t>(ends.size()) < next; ++step) {
      ASSERT_LT(step, 40'000) << "rollouts are stuck";
      pool.now += 200ms;
      if (step < 3000 && pick(3) == 0) {
        pool.scheduler.submit(RunId{next}, "task " + std::to_string(next % 40), pick(2) != 0 ? "g" + std::to_string(next / 4) : "");
        ++next;
      }
      if (!place.empty() && pick(2) == 0) {
        const auto it = std::next(place.begin(), static_cast<std::ptrdiff_t>(pick(place.size())));
        pool.scheduler.on_finished(RunId{it->first});
        ++ends[it->first];
        place.erase(it);
      }
      if (step < 3000 && pick(40) == 0 && next > 0) {
        const auto id = static_cast<std::int64_t>(pick(static_cast<std::size_t>(next)));
        if (!ends.contains(id) && cancelled.insert(id).second) {
          pool.scheduler.cancel(RunId{id});
          if (!place.contains(id)) ++ends[id];
        }
      }
      if (step < 3000 && pick(60) == 0) {
        const int worker = static_cast<int>(pick(3));
        if (pool.scheduler.is_ready(worker)) {
          pool.scheduler.on_lost(worker, "test", pool.now);
          drop_worker(worker);
        }
      }
      const PoolPlan plan = pool.plan();
      for (const auto& kill : plan.kill) drop_worker(kill.worker);
      for (const int worker : plan.start) starting.insert(worker);
      for (const auto& failure : plan.fail) {
        ++ends[failure.run.value];
        ASSERT_FALSE(place.contains(failure.run.value));
      }
      for (const auto& assign : plan.assign) {
        ASSERT_TRUE(place.emplace(assign.run.value, assign.worker).second) << "at two workers";
        ASSERT_FALSE(ends.contains(assign.run.value));
      }
      for (int worker = 0; worker < 3; ++worker) ASSERT_LE(pool.scheduler.num_inflight(worker), 4);
      if (!starting.empty() && pick(3) == 0) {
        const int worker = *starting.begin();
        starting.erase(starting.begin());
        if (step < 3000 && pick(4) == 0)
          pool.scheduler.on_start_failed(worker, "test", false, pool.now);
        else
          pool.scheduler.on_ready(worker, pool.now);
      }
      for (int worker = 0; worker < 3; ++worker) pool.scheduler.on_pong(worker, 0, pool.now);
    }
    for (const auto& [id, count] : ends) ASSERT_EQ(count, 1) << "rollout " << id << " of seed " << seed;
    EXPECT_EQ(pool.scheduler.counts().num_queued, 0);
  }
}

}  // namespace
}  // namespace prl::env::python
