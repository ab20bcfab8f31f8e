#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <limits>

#include "base/files.hpp"
#include "base/testing/eventually.hpp"
#include "io/safetensors.hpp"
#include "net/io_runtime.hpp"
#include "weights/weight_channel.hpp"

namespace prl::weights {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

WeightManifest make_manifest(std::int64_t version) {
  WeightManifest m;
  m.version.value = version;
  m.checksum = 0xfedcba9876543210ull + static_cast<std::uint64_t>(version);
  m.compute_dtype = "BF16";
  m.probe_prompt = {1, 2, 3, 151935};
  m.probe_logprobs = {-0.1f, -1.17549435e-38f, -11.931123f};
  return m;
}

WeightProof proof_of(const WeightManifest& m) { return {m.version, m.checksum, m.probe_logprobs}; }

TEST(Manifest, JsonKeepsEveryBit) {
  const WeightManifest m = make_manifest(12);
  const WeightManifest again = parse_manifest(to_json(m), "test");
  EXPECT_EQ(again.version, m.version);
  EXPECT_EQ(again.checksum, m.checksum);
  EXPECT_EQ(again.compute_dtype, m.compute_dtype);
  EXPECT_EQ(again.probe_prompt, m.probe_prompt);
  EXPECT_EQ(again.probe_logprobs, m.probe_logprobs);
}

TEST(Manifest, DamageNamesFileAndKey) {
  const std::string good = to_json(make_manifest(1));
  for (std::size_t n = 0; n + 2 < good.size(); n += 7) EXPECT_THROW(parse_manifest(good.substr(0, n), "m"), Error);
  const auto reason = [](std::string_view text) -> std::string {
    try {
      parse_manifest(text, "broadcasts/step_1/manifest.json");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(reason("{\"version\": -1}"), ::testing::AllOf(HasSubstr("step_1/manifest.json"), HasSubstr("'version'")));
  EXPECT_THAT(reason("{\"version\": 1, \"checksum\": \"xyz\"}"), HasSubstr("'checksum'"));
  EXPECT_THAT(reason("[1]"), HasSubstr("object"));
  EXPECT_THAT(reason(R"({"version":1,"checksum":"0000000000000001","compute_dtype":"F32","probe_prompt":[1,2],"probe_logprobs":[]})"),
              HasSubstr("'probe_logprobs'"));
}

TEST(VerifyProof, EqualPasses) { EXPECT_FALSE(verify_proof(make_manifest(3), proof_of(make_manifest(3))).has_value()); }

TEST(VerifyProof, SaysWhatDiffers) {
  const WeightManifest m = make_manifest(3);
  WeightProof proof = proof_of(m);
  proof.version.value = 2;
  auto error = verify_proof(m, proof);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kOutOfSync);
  EXPECT_THAT(error->what(), ::testing::AllOf(HasSubstr("update to version 3"), HasSubstr("holds version 2")));

  proof = proof_of(m);
  proof.checksum ^= 1;
  error = verify_proof(m, proof);
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->what(), ::testing::AllOf(HasSubstr("fedcba9876543212, wanted fedcba9876543213"), HasSubstr("0 nats")));

  proof = proof_of(m);
  proof.probe_logprobs[2] += 0.25f;
  error = verify_proof(m, proof);
  ASSERT_TRUE(error.has_value()) << "a probe that differs is out of sync even with an equal checksum";
  EXPECT_THAT(error->what(), HasSubstr("0.25 nats"));

  proof.probe_logprobs.pop_back();
  EXPECT_THAT(verify_proof(m, proof)->what(), HasSubstr("2 probe log-probabilities, wanted 3"));
  proof = proof_of(m);
  proof.probe_logprobs[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(verify_proof(m, proof).has_value());
}

TEST(VerifyProof, ToleranceIsForOtherKernels) {
  const WeightManifest m = make_manifest(3);
  WeightProof proof = proof_of(m);
  proof.checksum = 0;
  proof.probe_logprobs[0] += 0.01f;
  EXPECT_FALSE(verify_proof(m, proof, 0.02).has_value());
  EXPECT_TRUE(verify_proof(m, proof, 0.001).has_value());
  proof.version.value = 9;
  EXPECT_TRUE(verify_proof(m, proof, 0.02).has_value());
}

struct Scratch {
  fs::path path = fs::temp_directory_path() / fmt::format("prl-weights-{}", ::getpid());
  Scratch() { fs::remove_all(path); }
  ~Scratch() { fs::remove_all(path); }
};

Publication file_publication(std::int64_t version) {
  Publication p;
  p.manifest = make_manifest(version);
  p.save = [version](const fs::path& folder) {
    fs::create_directories(folder);
    const std::int64_t value[] = {version};
    io::SafetensorsWriter writer(folder / "model.safetensors", {{"w", io::StoredType::kI64, {1}}}, {});
    writer.append(std::as_bytes(std::span(value)));
    writer.finish();
  };
  return p;
}

std::int64_t weights_in(const fs::path& folder) {
  const auto file = io::SafetensorsFile::open(folder / "model.safetensors");
  std::int64_t value = -1;
  std::memcpy(&value, file.bytes(file.at("w")).data(), sizeof value);
  return value;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

/// What a coroutine gets that awaits the feed for so long.
std::optional<PublishedWeights> wait_newer(VersionFeed& feed, std::int64_t after, std::chrono::milliseconds patience) {
  net::IoRuntime io(1);
  return io.run_blocking(feed.wait_newer(PolicyVersion{after}, net::Clock::now() + patience), 120s);
}

TEST(FileChannel, ReadersSeeOnlyWholeVersions) {
  Scratch scratch;
  const auto channel = make_file_channel({.folder = scratch.path, .keep_interval = {}});
  EXPECT_FALSE(channel->latest().has_value());
  channel->publish(file_publication(0));
  EXPECT_EQ(names_in(scratch.path / "step_0"), (std::vector<std::string>{"STABLE", "manifest.json", "model.safetensors"}));
  // A trainer killed before STABLE, and one killed before anything.
  fs::create_directories(scratch.path / "step_5");
  std::ofstream(scratch.path / "step_5" / "model.safetensors") << "half";
  fs::create_directories(scratch.path / "step_6.tmp");
  const auto found = wait_newer(*channel->follow(), -1, 60s);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->manifest.version.value, 0);
  EXPECT_EQ(found->folder, scratch.path / "step_0");
  EXPECT_EQ(found->manifest.probe_logprobs, make_manifest(0).probe_logprobs);
  EXPECT_FALSE(wait_newer(*channel->follow(), 0, 100ms).has_value());
  // The half-written version is published again after a resume: nothing of the old folder stays.
  channel->publish(file_publication(5));
  EXPECT_EQ(weights_in(scratch.path / "step_5"), 5);
  EXPECT_EQ(channel->latest()->manifest.version.value, 5);
}

// A resumed trainer publishes its starting version again while an engine may be loading it.
TEST(FileChannel, TheSameWeightsAreLeftInPlace) {
  Scratch scratch;
  const auto channel = make_file_channel({.folder = scratch.path, .keep_interval = {}});
  channel->publish(file_publication(5));
  Publication again = file_publication(5);
  again.save = [](const fs::path&) { FAIL() << "written twice"; };
  channel->publish(again);
  EXPECT_EQ(weights_in(scratch.path / "step_5"), 5);
  // Other weights under the same version replace it, and so do damaged ones.
  Publication other = file_publication(5);
  other.manifest.checksum ^= 1;
  channel->publish(other);
  EXPECT_EQ(channel->latest()->manifest.checksum, other.manifest.checksum);
  write_file_atomic(scratch.path / "step_5" / "manifest.json", "{");
  channel->publish(file_publication(5));
  EXPECT_EQ(channel->latest()->manifest, make_manifest(5));
}

// Otherwise no resume from this version would ever get past the engine's proof.
TEST(FileChannel, DamagedFilesAreWrittenAnew) {
  Scratch scratch;
  const auto channel = make_file_channel({.folder = scratch.path, .keep_interval = {}});
  channel->publish(file_publication(5));
  const fs::path file = scratch.path / "step_5" / "model.safetensors";
  std::string bytes = read_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file_atomic(file, bytes);
  EXPECT_THROW(weights_in(scratch.path / "step_5"), Error);
  channel->publish(file_publication(5));
  EXPECT_EQ(weights_in(scratch.path / "step_5"), 5);
  EXPECT_TRUE(channel->latest().has_value());
}

TEST(FileChannel, OldVersionsGoUnlessOnTheInterval) {
  Scratch scratch;
  const auto channel = make_file_channel({.folder = scratch.path, .keep_interval = 3});
  for (std::int64_t v = 0; v <= 7; ++v) channel->publish(file_publication(v));
  EXPECT_EQ(names_in(scratch.path), (std::vector<std::string>{"step_0", "step_3", "step_6", "step_7"}));
  remove_broadcasts_after(scratch.path, 3);
  EXPECT_EQ(names_in(scratch.path), (std::vector<std::string>{"step_0", "step_3"}));
  remove_broadcasts_after(scratch.path, -1);
  EXPECT_TRUE(names_in(scratch.path).empty());
}

TEST(FileChannel, VersionsOfCheckpointsGoWithThese) {
  Scratch scratch;
  const auto channel = make_file_channel({.folder = scratch.path, .keep_interval = 2, .retention = {.keep_last = 2, .keep_interval = 6}});
  for (std::int64_t v = 0; v <= 13; ++v) channel->publish(file_publication(v));
  EXPECT_EQ(names_in(scratch.path), (std::vector<std::string>{"step_0", "step_10", "step_12", "step_13", "step_6"}));
}

TEST(FileChannel, FailedSaveLeavesNothingStable) {
  Scratch scratch;
  const auto channel = make_file_channel({.folder = scratch.path, .keep_interval = {}});
  channel->publish(file_publication(1));
  Publication broken = file_publication(2);
  broken.save = [](const fs::path& folder) {
    fs::create_directories(folder);
    fail(ErrorCode::kIo, "disk full");
  };
  EXPECT_THROW(channel->publish(broken), Error);
  EXPECT_EQ(channel->latest()->manifest.version.value, 1);
}

TEST(FileChannel, ManifestOfAnotherVersionIsCorrupt) {
  Scratch scratch;
  const auto channel = make_file_channel({.folder = scratch.path, .keep_interval = {}});
  channel->publish(file_publication(1));
  fs::rename(scratch.path / "step_1", scratch.path / "step_2");
  EXPECT_THROW(channel->latest(), Error);
}

TEST(LocalChannel, HandsOverThePointer) {
  const auto channel = make_local_channel();
  const auto weights = std::make_shared<int>(7);
  Publication p;
  p.manifest = make_manifest(4);
  p.handle = weights;
  channel->publish(p);
  const auto found = wait_newer(*channel->follow(), 3, 0ms);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->handle.get(), weights.get());
  EXPECT_FALSE(wait_newer(*channel->follow(), 4, 1ms).has_value());
  EXPECT_NO_THROW(channel->publish(p)) << "the same weights again";
  p.manifest.checksum ^= 1;
  EXPECT_THROW(channel->publish(p), Error) << "other weights under the same version";
}

TEST(VersionFeed, KeptVersionsComeInTheirTurn) {
  VersionFeed feed("test");
  const auto push = [&](std::int64_t version) { feed.push({make_manifest(version), nullptr, {}}); };
  const auto next = [&](std::int64_t after) {
    const auto found = wait_newer(feed, after, 1ms);
    return found ? found->manifest.version.value : -1;
  };
  push(0);
  push(1);
  EXPECT_EQ(next(-1), 1) << "the newest alone";
  feed.keep(3);
  for (const std::int64_t version : {2, 3}) push(version);
  EXPECT_EQ(next(1), 2);
  EXPECT_EQ(next(1), 2) << "asking takes nothing away";
  EXPECT_EQ(next(2), 3);
  EXPECT_EQ(next(3), -1);
  for (const std::int64_t version : {4, 5, 6, 7}) push(version);
  EXPECT_EQ(next(3), 5) << "of four only three are kept";
}

/// Several looks of a source that find more than one version lose none.
TEST(VersionFeed, VersionsThatComeTogetherAreAllKept) {
  std::atomic<std::int64_t> last_published{-1};
  PollingFeed feed("test", 1ms, [&](PolicyVersion after) -> std::optional<PublishedWeights> {
    if (after.value >= last_published) return std::nullopt;
    return PublishedWeights{make_manifest(after.value + 1), nullptr, {}};
  });
  feed.keep(4);
  last_published = 2;
  for (const std::int64_t after : {-1, 0, 1}) {
    const auto found = wait_newer(feed, after, 60s);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->manifest.version.value, after + 1);
  }
}

asio::awaitable<void> wait_for_two(std::shared_ptr<VersionFeed> feed, std::atomic<std::int64_t>* seen) {
  for (const std::int64_t after : {-1, 0}) {
    auto waiting = feed->wait_newer(PolicyVersion{after}, net::Clock::now() + 60s);
    const auto found = co_await std::move(waiting);
    *seen = found ? found->manifest.version.value : -2;
  }
}

TEST(VersionFeed, AWaiterWakesForEachVersionOfEitherChannel) {
  Scratch scratch;
  for (const auto& channel : {make_local_channel(), make_file_channel({.folder = scratch.path, .keep_interval = {}})}) {
    std::atomic<std::int64_t> seen{-1};
    net::IoRuntime io(1);
    io.spawn("follower", wait_for_two(channel->follow(), &seen));
    for (const std::int64_t version : {0, 3}) {
      channel->publish(file_publication(version));
      EXPECT_TRUE(prl::testing::eventually([&] { return seen == version; })) << version << " of " << channel->describe();
    }
  }
}

TEST(VersionFeed, DamageIsThrownByTheWaitAndACancelledWaitEnds) {
  Scratch scratch;
  const auto channel = make_file_channel({.folder = scratch.path, .keep_interval = {}});
  channel->publish(file_publication(1));
  fs::rename(scratch.path / "step_1", scratch.path / "step_2");
  EXPECT_THROW(wait_newer(*channel->follow(), -1, 60s), Error);
  std::atomic<std::int64_t> seen{-1};
  net::IoRuntime io(1);
  io.spawn("follower", wait_for_two(make_local_channel()->follow(), &seen));
  io.stop(10s);
  EXPECT_EQ(seen, -1) << "the wait was cancelled, and nothing came";
}

TEST(Proof, AServersReplyIsReadWholeOrRefused) {
  const WeightProof proof =
      parse_proof(R"({"status": "ok", "policy_version": 3, "checksum": "00000000000000ff", "probe_logprobs": [-0.5]})", "s");
  EXPECT_EQ(proof.version.value, 3);
  EXPECT_EQ(proof.checksum, 255u);
  EXPECT_EQ(proof.probe_logprobs, (std::vector<float>{-0.5f}));
  for (const char* bad : {"", "[]", R"({"checksum": "00000000000000ff", "probe_logprobs": []})",
                          R"({"policy_version": -1, "checksum": "00000000000000ff", "probe_logprobs": []})",
                          R"({"policy_version": 1, "checksum": "ff", "probe_logprobs": []})",
                          R"({"policy_version": 1, "checksum": "00000000000000ff", "probe_logprobs": [null]})"})
    EXPECT_THROW(parse_proof(bad, "http://localhost:8000"), Error) << bad;
}

}  // namespace
}  // namespace prl::weights
