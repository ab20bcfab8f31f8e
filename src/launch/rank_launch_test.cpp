#include "launch/rank_launch.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"

namespace prl::launch {
namespace {

using ::testing::HasSubstr;

TEST(RankChildren, EachHasItsNumberItsGpuAndItsLog) {
  ChildSpec base;
  base.name = "trainer";
  base.argv = {"/bin/true"};
  base.env = {{"KEY", "value"}};
  base.log_file = "/run/logs/trainer.log";
  base.echo = true;
  RankLayout layout;
  layout.num_nodes = layout.ranks_per_node = 2;
  layout.store = "tcp://10.0.0.1:29500";
  layout.host = "10.0.0.7";
  layout.gpu_ids = std::vector<int>{4, 6};
  const std::vector<ChildSpec> first = rank_children(layout, base, "/run/logs/trainer");
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0].name, "trainer");
  EXPECT_EQ(first[0].log_file, "/run/logs/trainer.log");
  EXPECT_TRUE(first[0].echo);
  EXPECT_EQ(first[0].env.at("PRL_RANK"), "0");
  EXPECT_EQ(first[0].env.at("CUDA_VISIBLE_DEVICES"), "4");
  EXPECT_EQ(first[1].name, "trainer_rank_1");
  EXPECT_EQ(first[1].log_file, "/run/logs/trainer/rank_1.log");
  EXPECT_FALSE(first[1].echo);
  EXPECT_EQ(first[1].env.at("CUDA_VISIBLE_DEVICES"), "6");
  EXPECT_EQ(first[1].env.at("KEY"), "value");
  layout.node_rank = 1;
  const std::vector<ChildSpec> second = rank_children(layout, base, "/run/logs/trainer");
  EXPECT_EQ(second[0].name, "trainer_rank_2");
  EXPECT_EQ(second[1].env.at("PRL_RANK"), "3");
  EXPECT_EQ(second[1].env.at("PRL_WORLD_SIZE"), "4");
  EXPECT_EQ(second[1].env.at("PRL_LOCAL_WORLD_SIZE"), "2");
  EXPECT_EQ(second[1].env.at("PRL_STORE"), "tcp://10.0.0.1:29500");
  EXPECT_EQ(second[1].env.at("PRL_HOST"), "10.0.0.7");
}

TEST(RankChildren, TooFewGpusAreRefusedAndCpusNeedNone) {
  RankLayout layout;
  layout.ranks_per_node = 3;
  layout.gpu_ids = std::vector<int>{0, 1};
  try {
    (void)rank_children(layout, {}, "logs");
    ADD_FAILURE() << "three ranks on two GPUs";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("3 ranks need a GPU each, but there are 2"));
  }
  layout.gpu_ids.reset();
  layout.uses_gpus = false;
  EXPECT_FALSE(rank_children(layout, {}, "logs").front().env.contains("CUDA_VISIBLE_DEVICES"));
}

}  // namespace
}  // namespace prl::launch
