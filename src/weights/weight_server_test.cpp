#include "weights/weight_server.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <future>
#include <limits>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "comm/communicator.hpp"
#include "weights/collective_channel.hpp"
#include "weights/weight_receiver.hpp"

namespace prl::weights {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kCount = 100'003;

TEST(Share, PartsAreTheWholeAndTheRestIsWhatNobodyTook) {
  for (const int num_parts : {1, 2, 3, 7}) {
    std::int64_t end = 0;
    std::vector<Share> all;
    for (int i = 0; i < num_parts; ++i) {
      const ValueRange part = part_of(kCount, num_parts, i, 64);
      EXPECT_EQ(part.begin, end);
      EXPECT_EQ(part.begin % 64, 0);
      EXPECT_NEAR(static_cast<double>(part.count()), static_cast<double>(kCount) / num_parts, 64);
      end = part.end;
      all.push_back({"", {part}});
    }
    EXPECT_EQ(end, kCount);
    EXPECT_TRUE(without(kCount, all).empty());
  }
  EXPECT_EQ(part_of(10, 4, 3, 64).count() + part_of(10, 4, 2, 64).count() + part_of(10, 4, 1, 64).count() + part_of(10, 4, 0, 64).count(),
            10);
  const ValueRanges rest = without(100, {{"b", {{50, 60}, {90, 100}}}, {"a", {{10, 20}, {20, 30}}}});
  EXPECT_EQ(rest, (ValueRanges{{0, 10}, {30, 50}, {60, 90}}));
  EXPECT_TRUE(contains(rest, {{5, 10}, {60, 61}}));
  EXPECT_FALSE(contains(rest, {{5, 11}}));
  EXPECT_EQ(place_of(rest, {61, 62}), 31);
}

TEST(Share, RangesThatAreNoneAreRefused) {
  const Ask ask{.version = 3, .engine = "e", .device = "", .link = "", .ranges = {{0, 5}, {7, 9}}};
  EXPECT_EQ(Ask::parse(ask.to_text()).ranges, ask.ranges);
  const Offer offer{.has_version = true, .newest = 3, .num_values = 9, .link = "", .ranges = {{0, 5}}, .others = {{"tcp://a:1", {{5, 9}}}}};
  EXPECT_EQ(Offer::parse(offer.to_text()).others, offer.others);
  for (const ValueRanges& wrong :
       {ValueRanges{{3, 3}}, ValueRanges{{3, 2}}, ValueRanges{{0, 5}, {4, 9}}, ValueRanges{{-1, 5}}, ValueRanges{{5, 10}}}) {
    Offer broken = offer;
    broken.others[0].ranges = wrong;
    EXPECT_THROW(Offer::parse(broken.to_text()), Error);
    broken = offer;
    broken.ranges = wrong;
    EXPECT_THROW(Offer::parse(broken.to_text()), Error);
  }
}

/// A trainer of several ranks: the first has the channel, each further one a server with its part. What the first holds of the others'
/// parts is spoilt, so that values which are right have come from the rank whose they are.
class PartsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!comm::has_gloo()) GTEST_SKIP() << "this build has no Gloo";
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override {
    channel_.reset();
    std::filesystem::remove_all(folder_);
  }
  /// Over devices, which are host memory here, or through host memory.
  void open(int num_ranks, bool has_first_device = false, bool has_device = false) {
    channel_ = make_collective_channel({.folder = folder_, .server = options_of("rank 0", has_first_device)});
    for (int rank = 1; rank < num_ranks; ++rank)
      servers_.push_back(std::make_unique<WeightServer>(options_of("rank " + std::to_string(rank), has_device)));
    for (const auto& server : servers_) addresses_.push_back(server->address());
  }
  WeightServerOptions options_of(const std::string& device, bool has_device) {
    return {.timeout = 20s, .join_timeout = 60s, .path = has_device ? path_of(device) : DevicePath{}};
  }
  DevicePath path_of(const std::string& device) {
    return {.make_stream = [] { return make_cpu_runtime(); },
            .device = device,
            .make_group =
                [this](comm::CommOptions options) {
                  options.runtime = nullptr;
                  ++num_groups_;
                  return comm::make_gloo_communicator(std::move(options));
                }};
  }
  WeightReceiverOptions engine_with(DevicePath path) {
    return {.engine = "engine", .path = std::move(path), .memory = make_cpu_runtime(), .patience = 60s, .join_timeout = 60s};
  }
  ValueRange part(std::size_t rank) const {
    const int num_empty = is_first_empty_ ? 1 : 0, num_parts = static_cast<int>(addresses_.size()) + 1 - num_empty;
    if (rank == 0 && is_first_empty_) return {};
    return part_of(kCount, num_parts, static_cast<int>(rank) - num_empty, 64);
  }
  static float value_of(std::int64_t version, std::int64_t i) { return static_cast<float>(version * 1000 + i % 997); }
  static Tensor values_of(std::int64_t version, ValueRange range) {
    const Tensor values = Tensor::empty(make_cpu_runtime(), {range.count()}, DType::kF32);
    for (std::int64_t i = 0; i < range.count(); ++i) values.as<float>()[i] = value_of(version, range.begin + i);
    return values;
  }
  void hold(std::size_t rank, std::int64_t version) {
    servers_[rank - 1]->versions().hold(version, values_of(version, part(rank)), {part(rank)}, kCount);
  }
  void publish(std::int64_t version, bool spoils = true) {
    Publication publication;
    publication.manifest = {
        .version = PolicyVersion{version}, .checksum = 7, .compute_dtype = "F32", .probe_prompt = {1, 2}, .probe_logprobs = {-1.0f}};
    publication.flat = [this, version, spoils] {
      const Tensor values = values_of(version, {0, kCount});
      for (std::int64_t i = part(0).end; i < kCount && spoils; ++i) values.as<float>()[i] = -1;
      return values;
    };
    for (std::size_t i = 0; i < addresses_.size(); ++i) publication.others.push_back({addresses_[i], {part(i + 1)}});
    channel_->publish(std::move(publication));
  }
  /// The first rank holds its own part alone.
  void publish_own(std::int64_t version) {
    Publication publication;
    publication.manifest = {
        .version = PolicyVersion{version}, .checksum = 7, .compute_dtype = "F32", .probe_prompt = {1, 2}, .probe_logprobs = {-1.0f}};
    publication.flat = [this, version] { return values_of(version, part(0)); };
    publication.ranges.emplace();
    if (!is_first_empty_) publication.ranges->push_back(part(0));
    for (std::size_t i = 0; i < addresses_.size(); ++i) publication.others.push_back({addresses_[i], {part(i + 1)}});
    channel_->publish(std::move(publication));
  }
  bool gets(WeightReceiver& engine, std::int64_t version) {
    const Tensor values = engine.receive(channel_->address(), PolicyVersion{version}, DType::kF32, kCount, 60s);
    for (std::int64_t i = 0; i < kCount; ++i)
      if (values.as<float>()[i] != value_of(version, i)) return false;
    return true;
  }

  std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("prl_parts_" + std::to_string(::getpid()));
  std::shared_ptr<CollectiveChannel> channel_;
  std::vector<std::unique_ptr<WeightServer>> servers_;
  std::vector<std::string> addresses_;
  std::atomic<int> num_groups_{0};
  bool is_first_empty_ = false;  ///< the others send all
};

TEST_F(PartsTest, EachRankSendsItsOwn) {
  open(3);
  WeightReceiver first, second;
  for (const std::int64_t version : {1, 2}) {
    hold(1, version);
    hold(2, version);
    publish(version);
    auto other = std::async(std::launch::async, [&] { return gets(second, version); });
    EXPECT_TRUE(gets(first, version));
    EXPECT_TRUE(other.get());
  }
  EXPECT_TRUE(gets(first, 1)) << "a former version";
}

TEST_F(PartsTest, ARankThatIsLateIsWaitedFor) {
  open(2);
  hold(1, 1);
  publish(2);
  WeightReceiver engine;
  auto got = std::async(std::launch::async, [&] { return gets(engine, 2); });
  const auto store = comm::make_store(addresses_[0]);
  ASSERT_TRUE(testing::eventually([&] { return store->get("weights/ticket/1").has_value(); })) << "it was told not yet, and asks again";
  hold(1, 2);
  EXPECT_TRUE(got.get());
}

TEST_F(PartsTest, TheFirstRankSendsWhatAnotherDoesNot) {
  open(4);
  WeightReceiver engine;
  hold(1, 1);
  hold(3, 1);
  servers_[1].reset();  // lost
  publish(1, false);
  EXPECT_TRUE(gets(engine, 1));
  servers_[2]->versions().hold(3, values_of(3, part(3)), {part(3)}, kCount);  // holds newer ones alone
  servers_[2]->versions().hold(4, values_of(4, part(3)), {part(3)}, kCount);
  hold(1, 2);
  publish(2, false);
  EXPECT_TRUE(gets(engine, 2));
}

TEST_F(PartsTest, WhereNoRankHoldsAllALostOneLeavesAnErrorUntilThePartsAreOthers) {
  open(3);
  WeightReceiver engine;
  hold(1, 1);
  hold(2, 1);
  publish_own(1);
  EXPECT_TRUE(gets(engine, 1));
  servers_[1].reset();
  hold(1, 2);
  publish_own(2);
  try {
    gets(engine, 2);
    FAIL() << "weights that nobody holds";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable) << error.what();
  }
  servers_.pop_back();
  addresses_.pop_back();
  hold(1, 2);
  publish_own(2);
  EXPECT_TRUE(gets(engine, 2));
}

// A model with fewer values than would give each rank some.
TEST_F(PartsTest, TheFirstRankMayHaveNothingToSend) {
  is_first_empty_ = true;
  open(3, true, true);
  WeightReceiver by_host, by_link(engine_with(path_of("card")));
  for (const std::int64_t version : {1, 2}) {
    hold(1, version);
    hold(2, version);
    publish_own(version);
    EXPECT_TRUE(gets(by_host, version));
    EXPECT_TRUE(gets(by_link, version));
  }
}

TEST_F(PartsTest, LinksOfAllRanksStay) {
  open(3, true, true);
  WeightReceiver engine(engine_with(path_of("card")));
  for (const std::int64_t version : {1, 2, 3}) {
    hold(1, version);
    hold(2, version);
    publish(version);
    EXPECT_TRUE(gets(engine, version));
    EXPECT_EQ(num_groups_, 6) << "three links of two ends";
  }
}

TEST_F(PartsTest, MayComeOnDifferentWays) {
  open(2, true, false);  // the second rank's part goes through host memory to where the first's lies
  WeightReceiver engine(engine_with(path_of("card")));
  hold(1, 1);
  publish(1);
  EXPECT_TRUE(gets(engine, 1));
  EXPECT_EQ(num_groups_, 2);
}

TEST_F(PartsTest, ComeThroughHostMemoryWhereTheFirstsDo) {
  open(2, false, true);
  WeightReceiver engine(engine_with(path_of("card")));
  hold(1, 1);
  publish(1);
  EXPECT_TRUE(gets(engine, 1));
  EXPECT_EQ(num_groups_, 0);
}

}  // namespace
}  // namespace prl::weights
