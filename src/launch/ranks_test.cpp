#include "launch/ranks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.hpp"

namespace prl::launch {
namespace {

using ::testing::HasSubstr;

/// Variables that are gone after the test.
struct Variables {
  explicit Variables(std::initializer_list<std::pair<const char*, const char*>> list) {
    clear();
    for (const auto& [name, value] : list) ::setenv(name, value, 1);
  }
  ~Variables() { clear(); }
  static void clear() {
    for (const char* name : {"PRL_RANK", "PRL_WORLD_SIZE", "PRL_STORE", "PRL_HOST", "PRL_LOCAL_WORLD_SIZE", "PRL_JOIN"}) ::unsetenv(name);
  }
};

std::string error_of_rank_env() {
  try {
    (void)rank_env();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

TEST(RankEnv, OneRankUnlessToldOtherwise) {
  const Variables none({});
  EXPECT_EQ(rank_env().size, 1);
  comm::Mesh mesh = make_mesh(rank_env(), make_cpu_runtime(), std::chrono::seconds(1));
  EXPECT_EQ(mesh.world().backend(), "local");
}

TEST(RankEnv, ReadsTheVariables) {
  const Variables set({{"PRL_RANK", "2"}, {"PRL_WORLD_SIZE", "3"}, {"PRL_STORE", "file:/tmp/x"}, {"PRL_HOST", "10.0.0.7"}});
  const RankEnv env = rank_env();
  EXPECT_EQ(env.rank, 2);
  EXPECT_EQ(env.size, 3);
  EXPECT_EQ(env.store, "file:/tmp/x");
  EXPECT_EQ(env.host, "10.0.0.7");
}

TEST(RankEnv, RanksOfOneMachineShareItsCores) {
  const Variables set({{"PRL_RANK", "0"}, {"PRL_WORLD_SIZE", "4096"}, {"PRL_STORE", "file:/tmp/x"}, {"PRL_LOCAL_WORLD_SIZE", "4096"}});
  config::ComputeConfig compute;
  EXPECT_EQ(rank_compute(rank_env(), compute).num_threads, 1);
  compute.num_threads = 3;
  EXPECT_EQ(rank_compute(rank_env(), compute).num_threads, 3);
  EXPECT_EQ(rank_compute(RankEnv{}, config::ComputeConfig{}).num_threads, 0);
}

TEST(Ranks, HaveMetOnceOneSaysSo) {
  const comm::StoreServer server;
  RankEnv env;
  env.size = 2;
  env.store = server.address();
  EXPECT_FALSE(have_met(server.address()));
  EXPECT_FALSE(was_start_told(env));
  tell_failure(env, "the disk is full");
  EXPECT_FALSE(was_start_told(env));
  tell_start(env, false);
  EXPECT_TRUE(was_start_told(env));
  EXPECT_FALSE(have_met(server.address())) << "that rank 0 has started says nothing of the others";
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([env, rank]() mutable {
      env.rank = rank;
      std::optional<comm::Mesh> mesh;
      EXPECT_NO_THROW(mesh = meet(env, nullptr, std::chrono::seconds(60), {}));
    });
  ranks.clear();
  EXPECT_TRUE(have_met(server.address()));
}

TEST(RankEnv, NamesTheVariableThatIsWrong) {
  {
    const Variables set({{"PRL_WORLD_SIZE", "none"}});
    EXPECT_THAT(error_of_rank_env(), HasSubstr("[PRL_WORLD_SIZE] is 'none'"));
  }
  {
    const Variables set({{"PRL_WORLD_SIZE", "2"}, {"PRL_STORE", "file:/tmp/x"}});
    EXPECT_THAT(error_of_rank_env(), HasSubstr("[PRL_RANK]"));
  }
  {
    const Variables set({{"PRL_WORLD_SIZE", "2"}, {"PRL_RANK", "2"}, {"PRL_STORE", "file:/tmp/x"}});
    EXPECT_THAT(error_of_rank_env(), HasSubstr("from 0 to 1"));
  }
  {
    const Variables set({{"PRL_WORLD_SIZE", "2"}, {"PRL_RANK", "1"}});
    EXPECT_THAT(error_of_rank_env(), HasSubstr("[PRL_STORE]"));
  }
}

TEST(RanksDeathTest, AStopEndsARankThatWaitsForOthers) {
  using namespace std::chrono_literals;
  std::stop_source stop;
  {
    const StopWhileMeeting met(stop.get_token(), 1min);  // the stop comes later, or leads on at once
    stop.request_stop();
  }
  EXPECT_EXIT(
      {
        const StopWhileMeeting waits(stop.get_token(), 20ms);
        std::this_thread::sleep_for(1min);
      },
      ::testing::ExitedWithCode(130), "without the others");
}

}  // namespace
}  // namespace prl::launch
