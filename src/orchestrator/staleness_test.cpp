#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "base/rng.hpp"
#include "orchestrator/batch_collector.hpp"
#include "orchestrator/dispatcher.hpp"
#include "orchestrator/testing/fakes.hpp"

// Dispatcher and collector under random schedules: which batches train which versions. No threads and no clock: a schedule is a
// sequence of drawn events.
namespace prl::orchestrator {
namespace {

/// How often each event happens, of 16; low for a role that is slow.
struct Speeds {
  std::uint64_t sampler = 8;
  std::uint64_t trainer = 8;
};

struct Outcome {
  std::int64_t num_shipped = 0;
  std::int64_t num_removed = 0;  ///< rollouts cancelled or dropped for their age
  std::int64_t max_age = 0;
  std::int64_t max_inflight = 0;
  std::int64_t num_rounds = 0;
};

/// Plays the orchestrator's loop until `num_steps` batches have shipped.
class Schedule {
 public:
  Schedule(DispatcherOptions dispatch, CollectorOptions collect, Speeds speeds, double failure_rate, std::uint64_t seed)
      : options_(dispatch),
        speeds_(speeds),
        failure_rate_(failure_rate),
        rng_(seed),
        collector_(std::move(collect)),
        dispatcher_(
            dispatch,
            [this] {
              return TaskRef{0, num_tasks_++};
            },
            1, PolicyVersion{0}) {}

  Outcome run(std::int64_t num_steps) {
    while (outcome_.num_shipped < num_steps && !::testing::Test::HasFatalFailure()) {
      if (++outcome_.num_rounds > 2'000 * num_steps) {
        ADD_FAILURE() << "no progress at batch " << dispatcher_.step() << " with policy v" << dispatcher_.version().value << ", "
                      << collector_.num_queued() << " rollouts accepted and " << open_.size() << " groups open";
        break;
      }
      plan();
      if (!act()) advance_others();
    }
    return outcome_;
  }

 private:
  struct OpenGroup {
    EpisodeStart info;
    std::int64_t num_started = 0;
    std::vector<PolicyVersion> ended;  ///< the version at each end
  };

  void plan() {
    const DispatchPlan plan = dispatcher_.plan(net::TimePoint{});
    for (const GroupId id : plan.cancel) {
      outcome_.num_removed += options_.group_size;
      open_.erase(id.value);
    }
    for (const EpisodeStart& start : plan.start) {
      OpenGroup& group = open_[start.group.value];
      group.info = start;
      ++group.num_started;
    }
    outcome_.max_inflight = std::max(outcome_.max_inflight, dispatcher_.num_inflight());
  }

  /// What the orchestrator does without waiting; false when there is nothing.
  bool act() {
    const bool is_ready = collector_.is_ready();
    if (is_ready && dispatcher_.may_ship()) {
      ship();
      return true;
    }
    if (is_ready && !dispatcher_.waits_for_open_groups()) return false;
    for (auto& [id, group] : open_) {
      if (static_cast<std::int64_t>(group.ended.size()) < options_.group_size) {
        if (options_.ordered) return false;
        continue;
      }
      FinishedGroup finished;
      finished.id = GroupId{id};
      finished.task = group.info.task;
      finished.version = group.info.version;
      for (const PolicyVersion end : group.ended) finished.episodes.push_back(episode(group.info.version, end));
      collector_.add(std::move(finished), *environment_);
      dispatcher_.close_group(GroupId{id});
      open_.erase(id);
      drop_stale();
      return true;
    }
    return false;
  }

  void ship() {
    const std::int64_t step = dispatcher_.step();
    for (const ReadyRollout& rollout : collector_.take().rollouts) {
      ASSERT_GE(rollout.version_start.value, step - 1 - std::min(options_.max_async_level, options_.max_off_policy_steps));
      ASSERT_LE(rollout.version_end.value, step - 1);
      if (options_.strict_async_level) {
        ASSERT_EQ(rollout.version_start.value, std::max<std::int64_t>(0, step - 1 - options_.max_async_level));
        ASSERT_EQ(rollout.version_end.value, rollout.version_start.value);
      }
      outcome_.max_age = std::max(outcome_.max_age, (step - 1) - rollout.version_start.value);
    }
    ++outcome_.num_shipped;
    dispatcher_.advance_step();
    drop_stale();
  }

  void drop_stale() {
    outcome_.num_removed += collector_.drop_stale([this](PolicyVersion version) { return dispatcher_.is_stale(version); });
    dispatcher_.set_backlog(collector_.backlog());
  }

  /// A rollout ends, or the trainer publishes: each at its speed.
  void advance_others() {
    if (num_published_ < dispatcher_.step() - 1 && rng_.next_below(16) < speeds_.trainer) ++num_published_;
    // What the follower lets the engines run.
    const std::int64_t allowed =
        options_.strict_async_level ? std::max<std::int64_t>(0, dispatcher_.step() - 1 - options_.max_async_level) : num_published_;
    dispatcher_.set_version(PolicyVersion{std::min(num_published_, allowed)});
    if (rng_.next_below(16) >= speeds_.sampler) return;
    std::vector<OpenGroup*> running;
    for (auto& [id, group] : open_)
      if (static_cast<std::int64_t>(group.ended.size()) < group.num_started) running.push_back(&group);
    if (running.empty()) return;
    OpenGroup& group = *running[rng_.next_below(running.size())];
    group.ended.push_back(dispatcher_.version());
    dispatcher_.on_episode_end(group.info.group);
  }

  env::Episode episode(PolicyVersion start, PolicyVersion end) {
    env::Episode out;
    out.env_name = environment_->name();
    out.reward = rng_.next_below(2) == 0 ? 0 : 1;
    if (static_cast<double>(rng_.next_below(1'000)) < 1'000 * failure_rate_) {
      out.error = env::EpisodeError{"ModelError", "drawn"};
      return out;
    }
    env::TrajectoryStep turn;
    turn.has_tokens = turn.has_versions = true;
    turn.version_start = start;
    turn.version_end = end;
    turn.tokens.prompt_ids = {1};
    turn.tokens.completion_ids.assign(1 + rng_.next_below(8), 2);
    turn.tokens.logprobs.assign(turn.tokens.completion_ids.size(), -0.5f);
    turn.num_prompt_tokens = 1;
    turn.num_completion_tokens = static_cast<std::int64_t>(turn.tokens.completion_ids.size());
    out.trajectory.push_back(std::move(turn));
    return out;
  }

  DispatcherOptions options_;
  Speeds speeds_;
  double failure_rate_;
  Rng rng_;
  env::EnvironmentPtr environment_ = testing::tiny_environment();
  std::int64_t num_tasks_ = 0;
  std::int64_t num_published_ = 0;  ///< the trainer's newest version
  BatchCollector collector_;
  Dispatcher dispatcher_;
  std::map<std::int64_t, OpenGroup> open_;
  Outcome outcome_;
};

constexpr Speeds kSpeeds[] = {{8, 8}, {16, 1}, {1, 16}, {4, 2}, {2, 4}};

DispatcherOptions dispatch_options(std::int64_t async_level) {
  DispatcherOptions options;
  options.batch_size = 16;
  options.group_size = 4;
  options.max_async_level = async_level;
  return options;
}

CollectorOptions collect_options() {
  CollectorOptions options;
  options.batch_size = 16;
  return options;
}

TEST(Staleness, WithoutOversamplingNothingIsEverTooOldNorDropped) {
  for (std::int64_t level = 0; level <= 4; ++level)
    for (const Speeds& speeds : kSpeeds)
      for (std::uint64_t seed = 0; seed < 4; ++seed) {
        SCOPED_TRACE(fmt::format("level {}, speeds {}/{}, seed {}", level, speeds.sampler, speeds.trainer, seed));
        DispatcherOptions options = dispatch_options(level);
        options.ordered = level == 0;
        if (seed >= 2) options.max_inflight = 64;  // more than one batch in flight
        const Outcome outcome = Schedule(options, collect_options(), speeds, 0, seed).run(40);
        EXPECT_EQ(outcome.num_shipped, 40);
        EXPECT_EQ(outcome.num_removed, 0);
      }
}

TEST(Staleness, AStrictLagIsExact) {
  for (std::int64_t level = 0; level <= 4; ++level)
    for (const Speeds& speeds : kSpeeds)
      for (std::uint64_t seed = 0; seed < 4; ++seed) {
        SCOPED_TRACE(fmt::format("level {}, speeds {}/{}, seed {}", level, speeds.sampler, speeds.trainer, seed));
        DispatcherOptions options = dispatch_options(level);
        options.strict_async_level = true;
        options.ordered = level == 0;
        const Outcome outcome = Schedule(options, collect_options(), speeds, 0, seed).run(40);
        EXPECT_EQ(outcome.num_shipped, 40);
        EXPECT_EQ(outcome.max_age, level);
        EXPECT_EQ(outcome.num_removed, 0);
      }
}

TEST(Staleness, BoundsHoldWithFailuresOversamplingAndLimitsOfBothKinds) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(seed);
    DispatcherOptions options = dispatch_options(static_cast<std::int64_t>(rng.next_below(5)));
    options.max_off_policy_steps = static_cast<std::int64_t>(rng.next_below(5));
    options.ordered = options.max_async_level == 0 || options.max_off_policy_steps == 0;
    options.oversampling_factor = 1.0 + 0.5 * static_cast<double>(rng.next_below(3));
    if (rng.next_below(2) == 0) options.max_inflight = 4 + static_cast<std::int64_t>(rng.next_below(80));
    const Speeds speeds = kSpeeds[rng.next_below(std::size(kSpeeds))];
    const Outcome outcome = Schedule(options, collect_options(), speeds, 0.2, seed).run(30);
    EXPECT_EQ(outcome.num_shipped, 30);
  }
}

TEST(Staleness, BoundsHoldForBatchesOfTokens) {
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    DispatcherOptions options = dispatch_options(static_cast<std::int64_t>(1 + seed % 3));
    options.max_inflight = 48;
    CollectorOptions collect = collect_options();
    collect.token_batch_size = 100;
    collect.max_rollout_tokens = 64;
    const Outcome outcome = Schedule(options, collect, kSpeeds[seed % std::size(kSpeeds)], 0.1, seed).run(30);
    EXPECT_EQ(outcome.num_shipped, 30);
  }
}

// The bound costs no more than it must: a sampler that is the slower role keeps a whole batch in flight, and a slow trainer always
// finds the next batch waiting for it.
TEST(Staleness, TheSlowerRoleIsNeverWithoutWork) {
  for (const Speeds& speeds : kSpeeds) {
    SCOPED_TRACE(fmt::format("speeds {}/{}", speeds.sampler, speeds.trainer));
    const Outcome outcome = Schedule(dispatch_options(1), collect_options(), speeds, 0, 7).run(60);
    EXPECT_EQ(outcome.max_inflight, 16);
    // A batch is 16 rollouts, at sampler / 16 per round; the trainer needs 16 / trainer rounds per step.
    const double by_sampler = 16.0 * 16 / static_cast<double>(speeds.sampler);
    const double by_trainer = 16.0 / static_cast<double>(speeds.trainer);
    const double actual = static_cast<double>(outcome.num_rounds) / 60;
    EXPECT_LT(actual, 1.5 * (std::max(by_sampler, by_trainer) + 5)) << "rounds per batch; 5 of them are the loop's own";
    if (speeds.trainer < 16) {
      EXPECT_EQ(outcome.max_age, 1) << "the bound was not reached";
    }
  }
}

}  // namespace
}  // namespace prl::orchestrator
