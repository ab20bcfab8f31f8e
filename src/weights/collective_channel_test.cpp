#include "weights/collective_channel.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "comm/communicator.hpp"
#include "comm/store.hpp"
#include "weights/held_versions.hpp"
#include "weights/weight_receiver.hpp"

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
    channel_ = make_collective_channel({.folder = folder_, .server = {.timeout = 20s}});
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
    return WeightReceiver().receive(channel_->address(), PolicyVersion{version}, DType::kF32, count, timeout);
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
    WeightReceiver receiver({.engine = "engine", .path = {}, .memory = {}, .patience = 500ms});
    return is_version(receiver.receive(address, PolicyVersion{1}, DType::kF32, 100'003, 60s), 1);
  });
  ASSERT_TRUE(testing::eventually([&] { return comm::make_store(address)->get("weights/ticket/0").has_value(); }));
  lost.reset();
  channel_ = make_collective_channel({.folder = folder_, .server = {.port = port, .timeout = 20s}});
  publish(1);
  EXPECT_TRUE(engine.get());
}

TEST_F(CollectiveChannelTest, SeveralEnginesAtOnceAndOneThatIsLostHarmsNoOther) {
  publish(4, 3'000'000);
  // Draws a ticket, joins and gives up.
  const auto store = comm::make_store(channel_->address());
  store->set("weights/ticket/0", Ask{.version = 4}.to_text());
  store->set("weights/next", "1 test");
  const auto lost = comm::make_gloo_communicator({.rank = 1, .size = 2, .store = store, .group = "weights-0", .timeout = 20s});
  lost->abort("killed by a test");
  std::vector<std::future<bool>> engines;
  for (int i = 0; i < 4; ++i) engines.push_back(std::async(std::launch::async, [this] { return is_version(receive(4, 3'000'000), 4); }));
  for (auto& engine : engines) EXPECT_TRUE(engine.get());
}

TEST_F(CollectiveChannelTest, EnginesThatDieWithATicketInHandHarmNoOther) {
  publish(4);
  // Two have drawn a ticket and said nothing; the second does so late.
  const auto store = comm::make_store(channel_->address());
  store->set("weights/next", "2 test");
  EXPECT_TRUE(is_version(receive(4), 4));
  store->set("weights/ticket/1", Ask{.version = 4}.to_text());
  const auto late = comm::make_gloo_communicator({.rank = 1, .size = 2, .store = store, .group = "weights-1", .timeout = 20s});
  EXPECT_TRUE(Offer::parse(late->gather_bytes("", {.what = "what follows"}).at(0)).has_version);
  late->abort("killed by a test");
  EXPECT_TRUE(is_version(receive(4), 4));
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
    WeightReceiver().receive(address, PolicyVersion{1}, DType::kF32, 1, 300ms);
    FAIL() << "weights of a trainer that has ended";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  }
}

/// Bytes of an adapter, of a size of its own.
Tensor image_of(std::int64_t version, std::int64_t count = 70'001) {
  const Tensor image = Tensor::empty(make_cpu_runtime(), {count + version}, DType::kU8);
  for (std::int64_t i = 0; i < image.num_elements(); ++i) image.as<std::uint8_t>()[i] = static_cast<std::uint8_t>((version + 3) * i % 251);
  return image;
}

bool is_image(const Received& received, std::int64_t version) {
  const Tensor wanted = image_of(version);
  return received.is_adapter && received.values.dtype() == DType::kU8 && received.values.num_elements() == wanted.num_elements() &&
         std::equal(wanted.as<std::uint8_t>(), wanted.as<std::uint8_t>() + wanted.num_elements(), received.values.as<std::uint8_t>());
}

Publication publication_of(std::int64_t version) {
  Publication publication;
  publication.manifest = {
      .version = PolicyVersion{version}, .checksum = 7, .compute_dtype = "F32", .probe_prompt = {1, 2}, .probe_logprobs = {-1.0f}};
  publication.is_adapter = true;
  publication.flat = [version] { return image_of(version); };
  return publication;
}

/// Trainers of adapters, and engines that hold them under a name.
class AdapterTest : public CollectiveChannelTest {
 protected:
  static Acceptable engine_of(const std::string& name, std::int64_t max_bytes = 1'000'000) {
    return {.dtype = DType::kF32, .num_values = 100'003, .adapter = name, .max_adapter_bytes = max_bytes};
  }
  static bool gets(const std::string& address, const std::string& name, std::int64_t version) {
    return is_image(WeightReceiver().receive(address, PolicyVersion{version}, engine_of(name), 20s), version);
  }
  static std::string error_of(const std::string& address, std::int64_t version, const Acceptable& engine, ErrorCode code) {
    try {
      WeightReceiver().receive(address, PolicyVersion{version}, engine, 1s);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    return "no error";
  }
};

TEST_F(AdapterTest, ArrivesBitForBitWhateverItsNameAndSize) {
  WeightReceiver engine;
  for (const std::int64_t version : {0, 1, 2}) {
    channel_->publish(publication_of(version));
    EXPECT_TRUE(is_image(engine.receive(channel_->address(), PolicyVersion{version}, engine_of("alpha"), 20s), version));
    EXPECT_TRUE(is_image(engine.receive(channel_->address(), PolicyVersion{version}, engine_of(""), 20s), version)) << "as the model";
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(entry.is_directory() || name == "STABLE" || name == "manifest.json") << name;
  }
}

TEST_F(AdapterTest, AnEngineThatComesLateOrAgainGetsTheNewest) {
  for (const std::int64_t version : {1, 2, 3, 4}) channel_->publish(publication_of(version));
  EXPECT_TRUE(gets(channel_->address(), "alpha", 4)) << "it has asked for none before";
  EXPECT_TRUE(gets(channel_->address(), "alpha", 4)) << "a process that was started anew";
  const std::string message = error_of(channel_->address(), 1, engine_of("alpha"), ErrorCode::kNotFound);
  EXPECT_THAT(message, ::testing::HasSubstr("no policy v1 of adapter 'alpha' any more; its newest is v4"));
  // The trainer of a resumed run takes the former one's place.
  const std::string address = channel_->address();
  auto waiting = std::async(std::launch::async, [&] {
    WeightReceiver engine({.engine = "engine", .path = {}, .memory = {}, .patience = 500ms});
    return is_image(engine.receive(address, PolicyVersion{5}, engine_of("alpha"), 60s), 5);
  });
  channel_.reset();
  channel_ =
      make_collective_channel({.folder = folder_, .server = {.port = std::stoi(address.substr(address.rfind(':') + 1)), .timeout = 20s}});
  channel_->publish(publication_of(5));
  EXPECT_TRUE(waiting.get());
}

TEST_F(AdapterTest, WhatTheEngineCannotUseIsRefusedWithWhatCame) {
  channel_->publish(publication_of(3));
  EXPECT_THAT(error_of(channel_->address(), 3, engine_of("alpha", 70'003), ErrorCode::kShape),
              ::testing::HasSubstr("an adapter of 70004 values of U8, this engine takes one of at most 70003 bytes"));
  EXPECT_TRUE(is_image(WeightReceiver().receive(channel_->address(), PolicyVersion{3}, engine_of("alpha", 70'004), 20s), 3));
  EXPECT_EQ(refusal(3), ErrorCode::kShape) << "an engine that takes a model alone";
  publish(4);
  EXPECT_THAT(error_of(channel_->address(), 4, engine_of("alpha"), ErrorCode::kShape),
              ::testing::HasSubstr("sends a whole model, wanted adapter 'alpha'"));
  EXPECT_TRUE(is_version(WeightReceiver().receive(channel_->address(), PolicyVersion{4}, engine_of(""), 20s).values, 4));
}

TEST_F(AdapterTest, SeveralPoliciesHaveOneServer) {
  const auto server = std::make_shared<WeightServer>(WeightServerOptions{.timeout = 20s});
  auto alpha = make_adapter_channel(folder_ / "a", server, "alpha", 2), beta = make_adapter_channel(folder_ / "b", server, "beta", 3);
  for (const std::int64_t version : {1, 2, 3}) alpha->publish(publication_of(version));
  for (const std::int64_t version : {7, 8, 9}) beta->publish(publication_of(version));
  const std::string address = server->address();
  EXPECT_TRUE(gets(address, "alpha", 3));
  EXPECT_TRUE(gets(address, "beta", 7));
  EXPECT_THAT(error_of(address, 1, engine_of("alpha"), ErrorCode::kNotFound), ::testing::HasSubstr("its newest is v3"));
  EXPECT_THAT(error_of(address, 1, engine_of("gamma"), ErrorCode::kUnavailable), ::testing::HasSubstr("adapter 'gamma' yet; it has none"));
  EXPECT_EQ(beta->latest()->manifest.version.value, 9);
  // A run that has ended is asked for its last version still, until it is begun anew.
  beta.reset();
  EXPECT_TRUE(gets(address, "beta", 9));
  beta = make_adapter_channel(folder_ / "b", server, "beta", 3);
  EXPECT_THAT(error_of(address, 9, engine_of("beta"), ErrorCode::kUnavailable), ::testing::HasSubstr("it has none"));
  beta->publish(publication_of(4));
  EXPECT_TRUE(gets(address, "beta", 4));
}

TEST_F(AdapterTest, OfPoliciesThatNobodyTrainsAnyMoreOnlySomeAreKept) {
  const auto server = std::make_shared<WeightServer>(WeightServerOptions{.timeout = 20s});
  const auto trained = make_adapter_channel(folder_ / "trained", server, "trained", 1);
  trained->publish(publication_of(1));
  const auto name_of = [](std::size_t i) { return "past-" + std::to_string(i); };
  for (std::size_t i = 0; i < WeightServer::kMaxPastPolicies + 2; ++i)
    make_adapter_channel(folder_ / name_of(i), server, name_of(i), 1)->publish(publication_of(2));
  EXPECT_TRUE(gets(server->address(), "trained", 1));
  EXPECT_TRUE(gets(server->address(), name_of(WeightServer::kMaxPastPolicies + 1), 2));
  EXPECT_TRUE(gets(server->address(), name_of(2), 2));
  EXPECT_THAT(error_of(server->address(), 2, engine_of(name_of(0)), ErrorCode::kUnavailable), ::testing::HasSubstr("it has none"));
}

/// Trainer and engines with devices, which are host memory here, and links over Gloo.
class LinkTest : public CollectiveChannelTest {
 protected:
  void SetUp() override {
    CollectiveChannelTest::SetUp();
    if (comm::has_gloo()) open_channel(0);
  }
  void open_channel(int port, std::chrono::milliseconds join_timeout = 60s, std::size_t max_links = 64) {
    channel_.reset();
    channel_ = make_collective_channel(
        {.folder = folder_,
         .server = {
             .port = port, .timeout = 20s, .join_timeout = join_timeout, .path = path_of("trainer's card"), .max_links = max_links}});
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
  WeightReceiverOptions engine_with(DevicePath path, const std::string& name = "engine") {
    return {.engine = name, .path = std::move(path), .memory = make_cpu_runtime(), .patience = 60s, .join_timeout = 60s};
  }
  bool gets(WeightReceiver& engine, std::int64_t version) {
    return is_version(engine.receive(channel_->address(), PolicyVersion{version}, DType::kF32, 100'003, 60s), version);
  }
  std::atomic<int> num_groups_{0};
};

TEST_F(LinkTest, StaysFromOneVersionToTheNext) {
  WeightReceiver first(engine_with(path_of("card 1"), "first")), second(engine_with(path_of("card 2"), "second"));
  for (const std::int64_t version : {1, 2, 3}) {
    publish(version);
    EXPECT_TRUE(gets(first, version));
    EXPECT_TRUE(gets(second, version));
    EXPECT_EQ(num_groups_, 4) << "two links of two ends";
  }
}

TEST_F(LinkTest, IsNotMadeOnOneDeviceNorForAnEngineWithoutOne) {
  publish(1);
  WeightReceiver same(engine_with(path_of("trainer's card"))), none(engine_with({}));
  EXPECT_TRUE(gets(same, 1));
  EXPECT_TRUE(gets(none, 1));
  EXPECT_EQ(num_groups_, 0);
}

TEST_F(LinkTest, IsMadeAnewForAnEngineThatIsStartedAnew) {
  publish(1);
  auto engine = std::make_unique<WeightReceiver>(engine_with(path_of("card 1")));
  EXPECT_TRUE(gets(*engine, 1));
  engine = std::make_unique<WeightReceiver>(engine_with(path_of("card 1")));
  EXPECT_TRUE(gets(*engine, 1));
  publish(2);
  EXPECT_TRUE(gets(*engine, 2));
  EXPECT_EQ(num_groups_, 4);
}

TEST_F(LinkTest, IsMadeAnewWithATrainerThatTookTheFormersPlace) {
  WeightReceiver engine(engine_with(path_of("card 1")));
  publish(1);
  EXPECT_TRUE(gets(engine, 1));
  const std::string address = channel_->address();
  open_channel(std::stoi(address.substr(address.rfind(':') + 1)));
  publish(2);
  EXPECT_TRUE(gets(engine, 2));
  EXPECT_EQ(num_groups_, 4);
}

TEST_F(LinkTest, ThatFailsTwiceIsGivenUpForHostMemory) {
  open_channel(0, 5s);  // the trainer waits as long for an end that never comes
  publish(1);
  DevicePath broken = path_of("card 1");
  int num_tries = 0;
  broken.make_group = [&num_tries](const comm::CommOptions&) -> std::unique_ptr<comm::Communicator> {
    ++num_tries;
    fail(ErrorCode::kUnavailable, "no way between the cards");
  };
  WeightReceiverOptions options = engine_with(broken);
  options.patience = 10s;
  WeightReceiver engine(std::move(options));
  EXPECT_TRUE(gets(engine, 1));
  publish(2);
  EXPECT_TRUE(gets(engine, 2));
  EXPECT_EQ(num_tries, 2);
}

TEST_F(LinkTest, BeyondTheLimitIsNotMadeUntilAnEngineHasLeft) {
  open_channel(0, 60s, 1);
  WeightReceiver first(engine_with(path_of("card 1"), "first")), second(engine_with(path_of("card 2"), "second"));
  publish(1);
  EXPECT_TRUE(gets(first, 1));
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(gets(second, 1));
  publish(2);
  EXPECT_TRUE(gets(second, 2));
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(num_groups_, 2) << "the first engine's alone";
  const std::size_t warning = said.find("engine second and further ones get their weights through host memory");
  ASSERT_NE(warning, std::string::npos) << said;
  EXPECT_EQ(said.find("further ones", warning + 20), std::string::npos) << "said once";
  // The first engine asks no more.
  publish(20);
  EXPECT_TRUE(gets(second, 20));
  EXPECT_EQ(num_groups_, 4);
  publish(21);
  EXPECT_TRUE(gets(first, 21)) << "it comes back, and gets its values through host memory now";
  EXPECT_EQ(num_groups_, 4);
}

/// A former version leaves the device for host memory, where an engine that lags still finds it.
TEST_F(LinkTest, AFormerVersionComesThroughHostMemory) {
  publish(1);
  publish(2);
  WeightReceiver engine(engine_with(path_of("card 1")));
  EXPECT_TRUE(gets(engine, 1));
  EXPECT_TRUE(gets(engine, 2));
}

TEST(HeldVersionsTest, FormerVersionsAreCopiedToHostMemoryAndTheNewestStays) {
  HeldVersions held(2, make_cpu_runtime());
  const Tensor one = values_of(1, 1000), two = values_of(2, 1000);
  held.hold(1, one);
  EXPECT_EQ(held.find(1)->values.data(), one.data());
  held.hold(2, two);
  ASSERT_TRUE(testing::eventually([&] { return !held.find(1)->is_on_device; }));
  EXPECT_TRUE(is_version(held.find(1)->values, 1));
  EXPECT_NE(held.find(1)->values.data(), one.data());
  EXPECT_EQ(held.find(2)->values.data(), two.data());
  const void* memory = held.find(1)->values.data();
  held.hold(3, values_of(3, 1000));
  EXPECT_EQ(held.find(1), nullptr);
  EXPECT_EQ(held.newest(), 3);
  ASSERT_TRUE(testing::eventually([&] { return !held.find(2)->is_on_device; }));
  EXPECT_TRUE(is_version(held.find(2)->values, 2));
  EXPECT_EQ(held.find(2)->values.data(), memory) << "the pages of a version that is not held any more are used again";
}

TEST(HeldVersionsTest, AVersionThatCannotBeCopiedIsHeldNoMore) {
  class Broken final : public DeviceRuntime {
   public:
    Device device() const noexcept override { return {}; }
    void* allocate(std::size_t bytes) override { return std::malloc(bytes); }
    void deallocate(void* memory, std::size_t) noexcept override { std::free(memory); }
    void copy_from_host(void*, const void*, std::size_t) override {}
    void copy_to_host(void*, const void*, std::size_t) override { fail(ErrorCode::kUnavailable, "the device is gone"); }
    void copy_within(void*, const void*, std::size_t) override {}
    void zero(void*, std::size_t) override {}
    void synchronize() override {}
    std::size_t bytes_in_use() const noexcept override { return 0; }
    std::size_t peak_bytes() const noexcept override { return 0; }
    std::size_t bytes_available() const override { return 0; }
  };
  HeldVersions held(3, std::make_shared<Broken>());
  held.hold(1, values_of(1, 1000));
  held.hold(2, values_of(2, 1000));
  EXPECT_TRUE(testing::eventually([&] { return held.find(1) == nullptr; }));
  EXPECT_NE(held.find(2), nullptr);
}

TEST(HeldVersionsTest, ANewVersionWaitsUntilFormerOnesHaveLeftTheDevice) {
  HeldVersions held(3, make_cpu_runtime(), 60s);
  held.hold(1, values_of(1, 1000));
  auto in_use = held.find(1);
  held.hold(2, values_of(2, 1000));
  auto third = std::async(std::launch::async, [&] { held.hold(3, values_of(3, 1000)); });
  EXPECT_EQ(third.wait_for(100ms), std::future_status::timeout);
  EXPECT_EQ(held.newest(), 2);
  in_use.reset();
  third.get();
  EXPECT_EQ(held.newest(), 3);
  HeldVersions impatient(3, make_cpu_runtime(), 50ms);
  impatient.hold(1, values_of(1, 1000));
  in_use = impatient.find(1);
  impatient.hold(2, values_of(2, 1000));
  impatient.hold(3, values_of(3, 1000));
  EXPECT_EQ(impatient.newest(), 3);
}

}  // namespace
}  // namespace prl::weights
