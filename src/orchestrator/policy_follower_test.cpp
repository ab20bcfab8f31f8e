#include "orchestrator/policy_follower.hpp"

#include <gtest/gtest.h>

#include "base/testing/eventually.hpp"
#include "net/io_runtime.hpp"
#include "net/task_group.hpp"
#include "orchestrator/testing/fakes.hpp"

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;
using namespace testing;

/// A follower on a thread of its own; what the tests read from outside is atomic in FakeWeights.
struct FollowerFixture {
  std::shared_ptr<FakeWeights> weights = std::make_shared<FakeWeights>();
  RunControl control;
  PolicyFollower follower;
  net::IoRuntime io{1};
  std::atomic<std::int64_t> num_updates{0};
  std::atomic<std::int64_t> version{-1};

  explicit FollowerFixture(PolicyFollower::Options options = {})
      : follower(std::make_shared<FakePolicySource>(weights), options, control) {}
  void load_first(std::int64_t first) { io.run_blocking(follower.load_first(PolicyVersion{first}), 60s); }
  void follow() {
    std::function<void()> on_update = [this] {
      version = follower.version().value;
      ++num_updates;
    };
    io.spawn("follower", control.guard(follower.follow(std::move(on_update))));
  }
};

TEST(PolicyFollower, LoadsEachNewerVersionAndSaysSo) {
  FollowerFixture f;
  f.load_first(0);
  EXPECT_EQ(f.weights->loaded, 0);
  f.follow();
  for (const std::int64_t version : {1, 2, 5}) {
    f.weights->published = version;
    ASSERT_TRUE(prl::testing::eventually([&] { return f.version == version; })) << version;
    EXPECT_EQ(f.weights->loaded, version);
  }
  EXPECT_EQ(f.num_updates, 3) << "the first policy is no update";
}

asio::awaitable<void> allow(FollowerFixture* f, std::int64_t version) {
  f->follower.allow(PolicyVersion{version});
  co_return;
}

TEST(PolicyFollower, AStrictLagLoadsEachVersionInItsTurnAndNoneBeforeItIsAllowed) {
  PolicyFollower::Options options;
  options.strict_lag = 2;
  FollowerFixture f(options);
  f.load_first(0);
  f.follow();
  f.weights->published = 3;
  f.io.run_blocking(allow(&f, 1), 60s);
  ASSERT_TRUE(prl::testing::eventually([&] { return f.version == 1; }));
  f.io.run_blocking(allow(&f, 3), 60s);
  ASSERT_TRUE(prl::testing::eventually([&] { return f.version == 3; }));
  EXPECT_EQ(f.num_updates, 3) << "2 was not left out";
}

asio::awaitable<void> pause_then_resume(FollowerFixture* f) {
  auto pausing = f->follower.pause();
  co_await std::move(pausing);
  f->weights->published = 1;
  for (int i = 0; i < 50; ++i) co_await net::sleep_for(1ms);
  EXPECT_EQ(f->weights->loaded, 0) << "weights changed during a pause";
  f->follower.resume();
}

TEST(PolicyFollower, APauseKeepsTheWeightsAndResumeLoadsTheNewest) {
  FollowerFixture f;
  f.load_first(0);
  f.follow();
  f.io.run_blocking(pause_then_resume(&f), 60s);
  EXPECT_TRUE(prl::testing::eventually([&] { return f.weights->loaded == 1; }));
}

TEST(PolicyFollower, AFirstPolicyThatIsNewerThanTheRunIsOutOfSync) {
  FollowerFixture f;
  f.weights->published = 5;
  try {
    f.load_first(3);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfSync);
    EXPECT_NE(std::string(error.what()).find("already offers v5"), std::string::npos) << error.what();
  }
}

asio::awaitable<bool> wait_for(FollowerFixture* f, std::int64_t version) {
  auto waiting = f->follower.wait_for(PolicyVersion{version});
  co_return co_await std::move(waiting);
}

TEST(PolicyFollower, TheLastPolicyIsWaitedForAsLongAsItMayTake) {
  FollowerFixture late({.policy_timeout = 20ms});
  late.load_first(0);
  EXPECT_FALSE(late.io.run_blocking(wait_for(&late, 1), 60s));
  EXPECT_TRUE(late.io.run_blocking(wait_for(&late, 0), 60s));
}

TEST(PolicyFollower, RefusesTokensOfVersionsThatItNeverSent) {
  FollowerFixture f;
  f.weights->published = 2;
  f.load_first(2);
  env::Episode episode;
  env::TrajectoryStep turn;
  turn.has_versions = true;
  turn.version_start = turn.version_end = PolicyVersion{2};
  turn.tokens.versions = {2, 2};
  episode.trajectory = {turn};
  EXPECT_NO_THROW(f.follower.check_versions(episode, PolicyVersion{2}));
  episode.trajectory[0].tokens.versions = {2, 3};
  EXPECT_THROW(f.follower.check_versions(episode, PolicyVersion{2}), Error) << "newer than any that was sent";
  episode.trajectory[0].tokens.versions = {1, 2};
  EXPECT_THROW(f.follower.check_versions(episode, PolicyVersion{2}), Error) << "older than the opening of its group";
}

}  // namespace
}  // namespace prl::orchestrator
