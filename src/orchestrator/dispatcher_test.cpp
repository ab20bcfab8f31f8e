#include "orchestrator/dispatcher.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/error.hpp"
#include "base/rng.hpp"

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;

struct Harness {
  explicit Harness(DispatcherOptions options, std::int64_t first_step = 1, std::int64_t version = 0)
      : dispatcher(
            options,
            [this] {
              return TaskRef{0, next_task++};
            },
            first_step, PolicyVersion{version}) {}
  DispatchPlan plan() { return dispatcher.plan(now); }
  void set_num_accepted(std::int64_t count) {
    Backlog backlog;
    backlog.units[dispatcher.version()] = count;
    dispatcher.set_backlog(std::move(backlog));
  }
  std::int64_t next_task = 0;
  net::TimePoint now{};
  Dispatcher dispatcher;
};

DispatcherOptions options(std::int64_t batch_size, std::int64_t group_size, std::int64_t async_level) {
  DispatcherOptions out;
  out.batch_size = batch_size;
  out.group_size = group_size;
  out.max_async_level = async_level;
  return out;
}

TEST(Dispatcher, FillsTheBatchWithWholeGroupsAndStops) {
  Harness h(options(8, 4, 0));
  const DispatchPlan plan = h.plan();
  ASSERT_EQ(plan.start.size(), 8u);
  EXPECT_EQ(plan.start[5].group.value, 1);
  EXPECT_EQ(plan.start[5].rollout_idx, 1);
  EXPECT_EQ(plan.start[5].ordinal, 1);
  EXPECT_EQ(plan.start[5].task.task_idx, 1);
  EXPECT_TRUE(h.plan().start.empty());
  EXPECT_EQ(h.dispatcher.num_inflight(), 8);
}

TEST(Dispatcher, TheNewestGroupsInFlightAreCancelledAndTheirTasksComeFirst) {
  DispatcherOptions o = options(16, 4, 1);
  Harness h(o);
  ASSERT_EQ(h.plan().start.size(), 16u);
  for (int i = 0; i < 4; ++i) h.dispatcher.on_episode_end(GroupId{3});  // finished, not collected yet
  const std::vector<GroupId> cancelled = h.dispatcher.cancel_newest(6);
  ASSERT_EQ(cancelled.size(), 2u);
  EXPECT_EQ(cancelled[0].value, 2);
  EXPECT_EQ(cancelled[1].value, 1);
  EXPECT_EQ(h.dispatcher.num_inflight(), 4);
  EXPECT_EQ(h.dispatcher.unfinished_tasks().size(), 4u) << "no task is lost";
  const DispatchPlan plan = h.plan();
  ASSERT_GE(plan.start.size(), 8u);
  EXPECT_EQ(plan.start[0].task.task_idx, 1);
  EXPECT_EQ(plan.start[4].task.task_idx, 2);
  EXPECT_TRUE(h.dispatcher.cancel_newest(0).empty());
}

TEST(Dispatcher, EachEnvironmentHasGroupsOfItsOwnSize) {
  DispatcherOptions o = options(8, 2, 0);
  o.group_sizes = {2, 4};
  std::int64_t num_drawn = 0;
  Dispatcher dispatcher(
      o,
      [&] {
        return TaskRef{num_drawn++ % 2, 0};
      },
      1, PolicyVersion{0});
  const DispatchPlan plan = dispatcher.plan({});
  ASSERT_EQ(plan.start.size(), 8u) << "groups of 2, 4 and 2 rollouts fill a batch of 8";
  std::map<std::int64_t, std::int64_t> rollouts_of_group;
  for (const EpisodeStart& start : plan.start) {
    EXPECT_EQ(start.group_size, start.task.env_idx == 0 ? 2 : 4);
    EXPECT_LT(start.rollout_idx, start.group_size);
    ++rollouts_of_group[start.group.value];
  }
  EXPECT_EQ(rollouts_of_group, (std::map<std::int64_t, std::int64_t>{{0, 2}, {1, 4}, {2, 2}}));
  EXPECT_TRUE(dispatcher.plan({}).start.empty());
  o.group_sizes = {2, 3};
  EXPECT_THROW(Dispatcher(
                   o, [] { return TaskRef{}; }, 1, PolicyVersion{0}),
               Error)
      << "3 does not divide 8";
}

TEST(Dispatcher, LockStepWaitsForTheVersionOfTheStep) {
  Harness h(options(4, 2, 0));
  static_cast<void>(h.plan());
  h.dispatcher.close_group(GroupId{0});
  h.dispatcher.close_group(GroupId{1});
  h.dispatcher.advance_step();
  EXPECT_TRUE(h.plan().is_gate_closed);
  EXPECT_TRUE(h.plan().start.empty());
  EXPECT_FALSE(h.dispatcher.may_ship());
  h.dispatcher.set_version(PolicyVersion{1});
  const DispatchPlan plan = h.plan();
  EXPECT_FALSE(plan.is_gate_closed);
  ASSERT_EQ(plan.start.size(), 4u);
  EXPECT_EQ(plan.start[0].version.value, 1);
  EXPECT_EQ(plan.start[0].step, 2);
  EXPECT_EQ(plan.start[0].ordinal, 0) << "places count from 0 in each step";
  EXPECT_EQ(plan.start[0].group.value, 2) << "ids never repeat";
}

TEST(Dispatcher, LockStepDropsTheSurplusOfOversampling) {
  DispatcherOptions o = options(4, 2, 0);
  o.oversampling_factor = 2;
  Harness h(o);
  EXPECT_EQ(h.plan().start.size(), 8u);
  h.dispatcher.close_group(GroupId{0});
  h.dispatcher.close_group(GroupId{2});
  h.dispatcher.advance_step();
  const DispatchPlan plan = h.plan();
  ASSERT_EQ(plan.cancel.size(), 2u);
  EXPECT_EQ(plan.cancel[0].value, 1);
  EXPECT_EQ(plan.cancel[1].value, 3);
  EXPECT_EQ(h.dispatcher.num_inflight(), 0);
}

TEST(Dispatcher, AReplacementIsDrawnForAGroupThatGaveNothing) {
  Harness h(options(4, 2, 0));
  static_cast<void>(h.plan());
  h.dispatcher.close_group(GroupId{0});  // rejected: nothing was accepted
  EXPECT_EQ(h.plan().start.size(), 2u);
  h.dispatcher.close_group(GroupId{1});
  h.set_num_accepted(2);
  EXPECT_TRUE(h.plan().start.empty()) << "2 accepted and 2 in flight make a batch";
}

TEST(Dispatcher, AsyncKeepsTheEngineFullUntilTheGateCloses) {
  Harness h(options(4, 2, 1));
  EXPECT_EQ(h.plan().start.size(), 4u);
  h.dispatcher.on_episode_end(GroupId{0});
  h.dispatcher.on_episode_end(GroupId{0});
  EXPECT_EQ(h.plan().start.size(), 2u) << "permits come back one by one";
  h.dispatcher.close_group(GroupId{0});
  h.dispatcher.advance_step();  // batch 2 may start under v0
  EXPECT_FALSE(h.plan().is_gate_closed);
  EXPECT_EQ(h.dispatcher.num_open_groups(), 2) << "groups 1 and 2 fill batch 2, the last that may hold v0";
  h.dispatcher.advance_step();  // batch 3 may not
  h.dispatcher.on_episode_end(GroupId{1});
  EXPECT_TRUE(h.plan().is_gate_closed);
  EXPECT_FALSE(h.dispatcher.may_ship());
  h.dispatcher.set_version(PolicyVersion{1});
  EXPECT_FALSE(h.plan().is_gate_closed);
}

TEST(Dispatcher, StaleGroupsAreDropped) {
  DispatcherOptions o = options(2, 2, 4);
  o.max_off_policy_steps = 2;
  o.max_inflight = 2;
  o.oversampling_factor = 2;
  Harness h(o);
  static_cast<void>(h.plan());  // group 0 under v0
  h.dispatcher.advance_step();
  h.dispatcher.advance_step();
  h.dispatcher.set_version(PolicyVersion{2});
  EXPECT_TRUE(h.plan().cancel.empty()) << "two steps behind is allowed";
  h.dispatcher.advance_step();
  const DispatchPlan plan = h.plan();
  ASSERT_EQ(plan.cancel.size(), 1u);
  EXPECT_EQ(plan.start.size(), 2u) << "its permits are free at once";
}

TEST(Dispatcher, AGroupOpensOnlyWhileAllThatIsOpenAndAcceptedFitsTheBound) {
  DispatcherOptions o = options(4, 2, 1);
  o.max_inflight = 100;
  Harness h(o);
  EXPECT_EQ(h.plan().start.size(), 8u) << "batches 1 and 2 may hold v0";
  h.dispatcher.close_group(GroupId{0});
  h.dispatcher.close_group(GroupId{1});
  h.set_num_accepted(4);
  EXPECT_TRUE(h.plan().start.empty());
  h.dispatcher.advance_step();
  h.set_num_accepted(0);
  EXPECT_TRUE(h.plan().start.empty()) << "groups 2 and 3 are all that batch 2 takes";
  h.dispatcher.set_version(PolicyVersion{1});
  EXPECT_EQ(h.plan().start.size(), 4u) << "batch 3 may hold v1";
}

TEST(Dispatcher, OversamplingOpensNoMoreThanTheBoundHolds) {
  DispatcherOptions o = options(4, 2, 1);
  o.oversampling_factor = 3;
  Harness h(o);
  EXPECT_EQ(h.plan().start.size(), 8u) << "12 may be in flight, batches 1 and 2 hold 8";
  o.ordered = true;
  Harness replayable(o);
  EXPECT_EQ(replayable.plan().start.size(), 12u) << "a surplus for the one batch in collection";
}

TEST(Dispatcher, ABatchWaitsForGroupsThatNoLaterOneMayHold) {
  Harness h(options(4, 2, 1));
  static_cast<void>(h.plan());
  h.dispatcher.close_group(GroupId{0});
  static_cast<void>(h.plan());
  h.dispatcher.advance_step();
  h.dispatcher.set_version(PolicyVersion{1});
  h.dispatcher.on_episode_end(GroupId{1});
  h.dispatcher.on_episode_end(GroupId{1});
  static_cast<void>(h.plan());  // group 3 under v1; groups 1 and 2 are of v0, and batch 2 is the last for them
  h.dispatcher.close_group(GroupId{3});
  h.dispatcher.close_group(GroupId{1});
  Backlog backlog;
  backlog.units = {{PolicyVersion{0}, 2}, {PolicyVersion{1}, 2}};
  h.dispatcher.set_backlog(backlog);
  EXPECT_TRUE(h.dispatcher.waits_for_open_groups());
  EXPECT_FALSE(h.dispatcher.may_ship());
  h.dispatcher.close_group(GroupId{2});
  backlog.units[PolicyVersion{0}] = 4;
  h.dispatcher.set_backlog(backlog);
  EXPECT_TRUE(h.dispatcher.may_ship());
}

TEST(Dispatcher, AZeroOffPolicyBoundMeansLockStep) {
  DispatcherOptions o = options(4, 2, 3);
  o.max_off_policy_steps = 0;
  Harness h(o);
  EXPECT_TRUE(h.dispatcher.is_lock_step());
  h.dispatcher.advance_step();
  EXPECT_TRUE(h.plan().is_gate_closed);
}

TEST(Dispatcher, NeverMoreInFlightThanAllowedAndNoGroupIsCutShort) {
  DispatcherOptions o = options(16, 4, 1);
  o.max_inflight = 6;
  Harness h(o);
  DispatchPlan plan = h.plan();
  EXPECT_EQ(plan.start.size(), 6u);
  for (int i = 0; i < 4; ++i) h.dispatcher.on_episode_end(GroupId{0});
  plan = h.plan();
  ASSERT_EQ(plan.start.size(), 4u);
  EXPECT_EQ(plan.start[0].group.value, 1);
  EXPECT_EQ(plan.start[0].rollout_idx, 2);
  EXPECT_EQ(plan.start[2].group.value, 2);
}

TEST(Dispatcher, TasksPerMinuteLimitsGroups) {
  DispatcherOptions o = options(8, 1, 1);
  o.tasks_per_minute = 60;
  Harness h(o);
  EXPECT_EQ(h.plan().start.size(), 1u);
  EXPECT_EQ(h.plan().start.size(), 0u);
  h.now += 2500ms;
  EXPECT_EQ(h.plan().start.size(), 1u) << "the bucket holds one second's worth";
}

TEST(Dispatcher, PendingTasksComeFirstAndUnfinishedOnesAreKept) {
  Harness h(options(4, 2, 1));
  h.dispatcher.set_pending_tasks({TaskRef{0, 77}});
  const DispatchPlan plan = h.plan();
  EXPECT_EQ(plan.start[0].task.task_idx, 77);
  EXPECT_EQ(plan.start[2].task.task_idx, 0);
  EXPECT_EQ(h.dispatcher.unfinished_tasks(), (std::vector<TaskRef>{{0, 77}, {0, 0}}));
}

TEST(Dispatcher, ContradictionsNameTheKeys) {
  const auto message = [](DispatcherOptions o) {
    try {
      Harness h(o);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message(options(6, 4, 0)).find("multiple of group_size"), std::string::npos);
  DispatcherOptions o = options(8, 4, 0);
  o.max_inflight = 3;
  EXPECT_NE(message(o).find("max_inflight_rollouts"), std::string::npos);
  o = options(8, 4, 0);
  o.oversampling_factor = 0.5;
  EXPECT_NE(message(o).find("oversampling_factor"), std::string::npos);
}

// Random arrivals, versions, ships and failures: bounds hold at every moment and every group is opened and closed once.
TEST(Dispatcher, BoundsHoldUnderRandomEvents) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Rng rng(seed);
    DispatcherOptions o = options(8, 4, static_cast<std::int64_t>(rng.next_below(4)));
    o.max_off_policy_steps = static_cast<std::int64_t>(rng.next_below(5));
    o.oversampling_factor = 1.0 + static_cast<double>(rng.next_below(3)) * 0.5;
    o.max_inflight = 4 + static_cast<std::int64_t>(rng.next_below(12));
    Harness h(o);
    const std::int64_t lag = std::min(o.max_async_level, o.max_off_policy_steps);
    std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> open;  // id -> (started, ended)
    std::set<std::int64_t> seen;
    std::int64_t version = 0;
    std::int64_t accepted = 0;
    for (int round = 0; round < 400; ++round) {
      const std::int64_t step = h.dispatcher.step();
      const DispatchPlan plan = h.plan();
      for (const GroupId id : plan.cancel) ASSERT_EQ(open.erase(id.value), 1u);
      for (const EpisodeStart& start : plan.start) {
        if (start.rollout_idx == 0) {
          ASSERT_TRUE(seen.insert(start.group.value).second);
          ASSERT_LE((step - 1) - start.version.value, lag);
        }
        ++open[start.group.value].first;
      }
      std::int64_t inflight = 0;
      for (const auto& [id, group] : open) inflight += group.first - group.second;
      ASSERT_LE(inflight, o.max_inflight);
      ASSERT_EQ(inflight, h.dispatcher.num_inflight());
      for (auto it = open.begin(); it != open.end();) {
        auto& [started, ended] = it->second;
        if (ended < started && rng.next_below(2) == 0) {
          ++ended;
          h.dispatcher.on_episode_end(GroupId{it->first});
        }
        if (ended == 4) {
          h.dispatcher.close_group(GroupId{it->first});
          if (rng.next_below(4) != 0) accepted += 4;
          it = open.erase(it);
        } else {
          ++it;
        }
      }
      h.set_num_accepted(accepted);
      if (accepted >= 8 && h.dispatcher.may_ship()) {
        accepted -= 8;
        h.dispatcher.advance_step();
        h.set_num_accepted(accepted);
      }
      if (version < h.dispatcher.step() - 1 && rng.next_below(3) == 0) h.dispatcher.set_version(PolicyVersion{++version});
    }
    EXPECT_GT(h.dispatcher.step(), 5) << "seed " << seed << ": no progress";
  }
}

}  // namespace
}  // namespace prl::orchestrator
