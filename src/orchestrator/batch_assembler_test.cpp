#include "orchestrator/batch_assembler.hpp"

#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>

#include "base/testing/eventually.hpp"
#include "orchestrator/testing/fakes.hpp"

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;
using namespace testing;

struct AssemblerFixture {
  boost::asio::io_context context{1};
  std::shared_ptr<FakeWeights> weights = std::make_shared<FakeWeights>();
  std::function<void(const env::Episode&, PolicyVersion)> check = [](const env::Episode&, PolicyVersion) {};
  std::int64_t num_ended = 0;
  std::optional<BatchAssembler> assembler;

  explicit AssemblerFixture(FakeChatOptions chat = {.max_delay = 0us}) {
    weights->loaded = 0;
    BatchAssembler::Options options;
    options.dispatch.batch_size = options.collect.batch_size = 8;
    options.dispatch.group_size = 4;
    options.dispatch.max_async_level = 1;
    options.runner.retry_wait = 1ms;
    assembler.emplace(context.get_executor(), options,
                      BatchAssembler::Services{.environments = {TrainEnv{tiny_environment(), {}, 10s, 0}},
                                               .chat = std::make_shared<FakeChat>(weights, chat),
                                               .teacher = nullptr,
                                               .on_episode_end = [this] { ++num_ended; },
                                               .check_episode = [this](const env::Episode& e, PolicyVersion v) { check(e, v); }});
    assembler->begin(PolicyVersion{0});
  }
  ~AssemblerFixture() {
    assembler->drop_groups(true);
    context.run_for(10s);
  }
  /// Opens, plays and collects until the batch is full.
  [[nodiscard]] bool fill() {
    return prl::testing::eventually([this] {
      assembler->open_groups(net::Clock::now());
      context.restart();
      context.run_for(1ms);
      while (assembler->collect_one()) {
      }
      return assembler->is_ready();
    });
  }
};

TEST(BatchAssembler, FillsBatchesAndCountsTheirAge) {
  AssemblerFixture f;
  ASSERT_TRUE(f.fill());
  const auto first = f.assembler->take();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->rollouts.size(), 8u);
  EXPECT_EQ(f.assembler->max_staleness(), 0);
  f.assembler->advance_step();
  ASSERT_TRUE(f.fill());
  EXPECT_EQ(f.assembler->dispatcher().step(), 2);
  ASSERT_NE(f.assembler->take(), nullptr);
  EXPECT_EQ(f.assembler->max_staleness(), 1) << "batch 2 of version 0";
  EXPECT_EQ(f.num_ended, 16);
  EXPECT_EQ(f.assembler->counts().num_processed, 16);
}

TEST(BatchAssembler, ABatchThatWasNotSentIsTakenAgain) {
  AssemblerFixture f;
  ASSERT_TRUE(f.fill());
  const auto batch = f.assembler->take();
  std::vector<std::string> ids;
  for (const ReadyRollout& rollout : batch->rollouts) ids.push_back(rollout.episode.trajectory_id);
  EXPECT_EQ(f.assembler->num_queued(), 0);
  f.assembler->put_back(std::move(batch->rollouts));
  ASSERT_TRUE(f.assembler->is_ready());
  const auto again = f.assembler->take();
  for (std::size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(again->rollouts[i].episode.trajectory_id, ids[i]);
}

TEST(BatchAssembler, BatchesWithoutASignalEndTheRunAfterSome) {
  AssemblerFixture f({.max_delay = 0us, .always_wrong = true});
  std::int64_t num_empty = 0;
  try {
    for (; num_empty < 100; ++num_empty) {
      ASSERT_TRUE(f.fill());
      EXPECT_EQ(f.assembler->take(), nullptr);
    }
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_EQ(num_empty, kMaxEmptyBatches - 1);
  }
}

TEST(BatchAssembler, DroppedGroupsAreForgottenOrKeptForACheckpoint) {
  for (const bool keep : {true, false}) {
    AssemblerFixture f({.max_delay = 60s});
    EXPECT_TRUE(f.assembler->open_groups(net::Clock::now()).has_started);
    f.assembler->drop_groups(keep);
    EXPECT_EQ(f.assembler->state().unfinished_tasks.size(), keep ? 2u : 0u);
    EXPECT_EQ(f.assembler->counts().num_cancelled, 8);
    StepFacts facts;
    monitor::Metrics pools;
    f.assembler->take_metrics(facts, pools);
    EXPECT_EQ(facts.num_cancelled, 8);
    EXPECT_TRUE(pools.contains("pool/reverse-text/normal"));
    f.assembler->take_metrics(facts, pools);
    EXPECT_EQ(facts.num_cancelled, 0) << "counted twice";
  }
}

TEST(BatchAssembler, EachEpisodeIsCheckedWithTheVersionOfItsGroup) {
  AssemblerFixture f;
  std::int64_t num_checked = 0;
  f.check = [&](const env::Episode&, PolicyVersion opened) {
    EXPECT_EQ(opened.value, 0);
    if (++num_checked == 3) fail(ErrorCode::kOutOfSync, "another run's server");
  };
  EXPECT_THROW((void)f.fill(), Error);
  EXPECT_EQ(num_checked, 3);
}

}  // namespace
}  // namespace prl::orchestrator
