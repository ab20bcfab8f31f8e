#include "weights/collective_channel.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include <filesystem>
#include <future>
#include <numeric>
#include <vector>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "comm/communicator.hpp"
#include "comm/store.hpp"

namespace prl::weights {
namespace {

using namespace std::chrono_literals;

Tensor values_of(std::int64_t version, std::int64_t count) {
  const Tensor values = Tensor::empty(make_cpu_runtime(), {count}, DType::kF32);
  for (std::int64_t i = 0; i < count; ++i) values.as<float>()[i] = static_cast<float>(version * 1000 + i % 997);
  return values;
}

bool is_version(const Tensor& values, std::int64_t version) {
  const Tensor wanted = values_of(version, values.num_elements());
  return std::equal(values.as<float>(), values.as<float>() + values.num_elements(), wanted.as<float>());
}

class CollectiveChannelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!comm::has_gloo()) GTEST_SKIP() << "this build has no Gloo";
    std::filesystem::remove_all(folder_);
    channel_ = make_collective_channel({.folder = folder_, .port = 0, .timeout = 20s});
  }
  void TearDown() override {
    channel_.reset();
    std::filesystem::remove_all(folder_);
  }
  void publish(std::int64_t version, std::int64_t count = 100'003) {
    Publication publication;
    publication.manifest = {
        .version = PolicyVersion{version}, .checksum = 7, .compute_dtype = "F32", .probe_prompt = {1, 2}, .probe_logprobs = {-1.0f}};
    publication.flat = [version, count] { return values_of(version, count); };
    channel_->publish(std::move(publication));
  }
  Tensor receive(std::int64_t version, std::int64_t count = 100'003, std::chrono::milliseconds timeout = 20s) {
    return receive_weights(channel_->address(), PolicyVersion{version}, DType::kF32, count, timeout);
  }
  ErrorCode refusal(std::int64_t version, std::int64_t count = 100'003, std::chrono::milliseconds timeout = 20s) {
    try {
      receive(version, count, timeout);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  }

  std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("prl_collective_" + std::to_string(::getpid()));
  std::shared_ptr<CollectiveChannel> channel_;
};

TEST_F(CollectiveChannelTest, EnginesGetTheVersionsThatAreHeldAndAFolderAnnouncesThem) {
  publish(1);
  publish(2);
  EXPECT_TRUE(is_version(receive(2), 2));
  EXPECT_TRUE(is_version(receive(1), 1));
  publish(3);
  EXPECT_TRUE(is_version(receive(3), 3));
  EXPECT_EQ(refusal(1), ErrorCode::kNotFound);               // the two newest are held
  EXPECT_EQ(refusal(9, 100'003, 2s), ErrorCode::kNotFound);  // waited for, but it does not come
  EXPECT_EQ(refusal(3, 100'004), ErrorCode::kShape);
  const auto latest = channel_->latest();
  ASSERT_TRUE(latest.has_value());
  EXPECT_EQ(latest->manifest.version.value, 3);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "step_3/STABLE"));
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "step_3")) EXPECT_NE(entry.path().extension(), ".safetensors");
}

/// As after the loss of a trainer's rank 0: the folder says v2, and the trainer is about to compute it again.
TEST_F(CollectiveChannelTest, AVersionThatTheTrainerDoesNotHaveYetIsWaitedFor) {
  publish(1);
  auto engine = std::async(std::launch::async, [this] { return is_version(receive(2), 2); });
  const auto store = comm::make_store(channel_->address());
  ASSERT_TRUE(testing::eventually([&] { return store->get("weights/ticket/1").has_value(); }));  // it was refused once, and asks again
  publish(2);
  EXPECT_TRUE(engine.get());
}

/// The trainer dies when the engine has drawn its ticket; the next rank serves at the same address, from a store that is new.
TEST_F(CollectiveChannelTest, ATrainerThatWasLostBeforeItCameIsAskedAgain) {
  auto lost = std::make_optional<comm::StoreServer>();
  const int port = lost->port();
  const std::string address = lost->address();
  auto engine = std::async(std::launch::async, [&] {
    return is_version(receive_weights(address, PolicyVersion{1}, DType::kF32, 100'003, 60s, /*patience=*/500ms), 1);
  });
  ASSERT_TRUE(testing::eventually([&] { return comm::make_store(address)->get("weights/ticket/0").has_value(); }));
  lost.reset();
  channel_ = make_collective_channel({.folder = folder_, .port = port, .timeout = 20s});
  publish(1);
  EXPECT_TRUE(engine.get());
}

TEST_F(CollectiveChannelTest, SeveralEnginesAtOnceAndOneThatIsLostHarmsNoOther) {
  publish(4, 3'000'000);
  // Draws a ticket, joins and gives up.
  const auto store = comm::make_store(channel_->address());
  store->set("weights/ticket/0", "4");
  store->set("weights/next", "1 test");
  const auto lost = comm::make_gloo_communicator({.rank = 1, .size = 2, .store = store, .group = "weights-0", .timeout = 20s});
  lost->abort("killed by a test");
  std::vector<std::future<bool>> engines;
  for (int i = 0; i < 4; ++i) engines.push_back(std::async(std::launch::async, [this] { return is_version(receive(4, 3'000'000), 4); }));
  for (auto& engine : engines) EXPECT_TRUE(engine.get());
}

TEST_F(CollectiveChannelTest, TheTrainerWaitsForTheOrchestratorsWord) {
  publish(1);
  auto waiting = std::async(std::launch::async, [this] { channel_->wait_until_released({}); });
  EXPECT_TRUE(is_version(receive(1), 1));  // served meanwhile
  release_weights(channel_->address());
  EXPECT_EQ(waiting.wait_for(20s), std::future_status::ready);
  const std::string address = channel_->address();
  channel_.reset();
  release_weights(address);  // no trainer any more: nothing to do
  try {
    receive_weights(address, PolicyVersion{1}, DType::kF32, 1, 300ms);
    FAIL() << "weights of a trainer that has ended";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  }
}

}  // namespace
}  // namespace prl::weights
