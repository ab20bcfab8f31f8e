#include "launch/transports.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/error.hpp"

namespace prl::launch {
namespace {

namespace fs = std::filesystem;

class TransportsTest : public ::testing::Test {
 protected:
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_ = fs::temp_directory_path() / ("prl-transports-" + std::to_string(::getpid()));

  template <typename Make>
  static std::string refusal(ErrorCode code, Make make) {
    try {
      make();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return {};
  }
};

TEST_F(TransportsTest, FilesConnectSenderAndReceiverUnderTheRunsFolder) {
  const auto sender = make_sample_sender(config::FilesystemRollouts{}, folder_, 1, 3);
  const auto receiver = make_sample_receiver(config::FilesystemRollouts{}, folder_, 3);
  wire::TrainingBatch batch;
  batch.step = 3;
  batch.ranks.resize(1);
  ASSERT_TRUE(sender->push(batch, std::chrono::seconds(10)));
  const auto taken = receiver->pop(std::chrono::seconds(60));
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->step, 3);
  EXPECT_TRUE(fs::exists(folder_ / "rollouts"));
  const auto channel = make_weight_channel(config::FilesystemBroadcast{}, folder_, {});
  EXPECT_FALSE(channel->latest().has_value());
  EXPECT_TRUE(fs::exists(folder_ / "broadcasts"));
}

TEST_F(TransportsTest, WhatCannotCrossProcessesNamesTheKeyAndWhatToUse) {
  const std::string rollouts = refusal(ErrorCode::kInvalidArgument, [&] { make_sample_sender(config::LocalRollouts{}, folder_, 1, 1); });
  EXPECT_NE(rollouts.find("rollout_transport.type"), std::string::npos) << rollouts;
  EXPECT_NE(rollouts.find("\"zmq\""), std::string::npos) << rollouts;
  refusal(ErrorCode::kInvalidArgument, [&] { make_sample_receiver(config::LocalRollouts{}, folder_, 1); });
  const std::string weights = refusal(ErrorCode::kInvalidArgument, [&] { make_weight_channel(config::LocalBroadcast{}, folder_, {}); });
  EXPECT_NE(weights.find("weight_broadcast.type"), std::string::npos) << weights;
  EXPECT_EQ(weights.find("\"zmq\""), std::string::npos) << weights;
  refusal(ErrorCode::kNotImplemented, [&] { make_weight_channel(config::NixlBroadcast{}, folder_, {}); });
}

}  // namespace
}  // namespace prl::launch
