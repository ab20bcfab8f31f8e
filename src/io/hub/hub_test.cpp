#include "io/hub/hub_client.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "io/copy_file.hpp"
#include "io/hub/hub_model.hpp"
#include "io/hub/test_support.hpp"

namespace prl::io {
namespace {
namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using testing_support::FakeHub;
using testing_support::git_hash;
using testing_support::hex_digest;
using testing_support::kCommit;

class HubTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("prl-hub-" + std::to_string(::getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    settings_.cache_dir = folder_ / "hub";
    settings_.first_pause = std::chrono::milliseconds(1);
    settings_.head_timeout = settings_.stall_timeout = std::chrono::seconds(5);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void start(const std::function<void(FakeHub&)>& fill = {}) {
    weights_ = std::string(300'000, 'w');
    for (std::size_t i = 0; i < weights_.size(); i += 97) weights_[i] = static_cast<char>(i);
    hub_.add("config.json", R"({"model_type":"llama"})");
    hub_.add("tokenizer.json", "{}");
    hub_.add("chat_template.jinja", "x");
    hub_.add("model.safetensors", weights_, true);
    hub_.add("pytorch_model.bin", "never wanted", true);
    if (fill) fill(hub_);
    hub_.start();
    settings_.endpoint = hub_.endpoint();
  }
  void expect_error(const std::function<void()>& body, ErrorCode code, const std::vector<std::string>& parts) {
    try {
      body();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
    }
  }
  fs::path find(ModelParts parts = ModelParts::kAll) { return find_model("org/tiny", parts, settings_); }

  fs::path folder_;
  HubSettings settings_;
  FakeHub hub_;
  std::string weights_;
};

TEST_F(HubTest, DownloadsIntoTheLayoutThatOthersRead) {
  start();
  const fs::path snapshot = find();
  const fs::path repo = settings_.cache_dir / "models--org--tiny";
  EXPECT_EQ(snapshot, repo / "snapshots" / kCommit);
  EXPECT_EQ(read_file(repo / "refs" / "main"), kCommit);
  EXPECT_EQ(read_file(snapshot / "model.safetensors"), weights_);
  EXPECT_EQ(fs::read_symlink(snapshot / "model.safetensors"), fs::path("../../blobs") / hex_digest(net::DigestKind::kSha256, weights_));
  EXPECT_EQ(fs::read_symlink(snapshot / "tokenizer.json"), fs::path("../../blobs") / git_hash("{}"));
  EXPECT_TRUE(fs::exists(snapshot / "chat_template.jinja"));
  EXPECT_FALSE(fs::exists(snapshot / "pytorch_model.bin"));
  EXPECT_EQ(hub_.count("HEAD", "model.safetensors"), 1u);
  // Now it is there: no more questions, with the hub or without.
  const std::size_t asked = hub_.seen().size();
  EXPECT_EQ(find(), snapshot);
  settings_.is_offline = true;
  EXPECT_EQ(find(), snapshot);
  EXPECT_EQ(hub_.seen().size(), asked);
}

// Kimi K2 and Moonlight publish their vocabulary so.
TEST_F(HubTest, RanksOfTokensStandInPlaceOfATokenizer) {
  start([](FakeHub& hub) {
    std::erase(hub.state->files, "tokenizer.json");
    hub.add("tiktoken.model", "AA== 0\n");
  });
  const fs::path snapshot = find(ModelParts::kText);
  EXPECT_EQ(read_file(snapshot / "tiktoken.model"), "AA== 0\n");
  EXPECT_TRUE(missing_model_files(snapshot, ModelParts::kText).empty());
  EXPECT_EQ(find(), snapshot);
  EXPECT_TRUE(missing_model_files(snapshot, ModelParts::kAll).empty());
}

TEST_F(HubTest, AFolderWinsAndTextAloneLeavesWeights) {
  start();
  EXPECT_EQ(find_model(folder_.string(), ModelParts::kAll, settings_), folder_);
  const fs::path snapshot = find(ModelParts::kText);
  EXPECT_TRUE(fs::exists(snapshot / "tokenizer.json"));
  EXPECT_FALSE(fs::exists(snapshot / "model.safetensors"));
  EXPECT_EQ(missing_model_files(snapshot, ModelParts::kAll), (std::vector<std::string>{"config.json", "model.safetensors"}));
  settings_.is_offline = true;
  EXPECT_EQ(find(ModelParts::kText), snapshot);
  expect_error([&] { find(); }, ErrorCode::kNotFound, {"lacks config.json, model.safetensors", "HF_HUB_OFFLINE"});
  settings_.is_offline = false;
  EXPECT_EQ(find(), snapshot);
  EXPECT_EQ(hub_.count("GET", "tokenizer.json"), 1u) << "what was there is not fetched again";
}

TEST_F(HubTest, GoesOnWhereAnEarlierDownloadStopped) {
  start();
  const std::string etag = hex_digest(net::DigestKind::kSha256, weights_);
  const fs::path blobs = settings_.cache_dir / "models--org--tiny" / "blobs";
  fs::create_directories(blobs);
  std::ofstream(blobs / (etag + ".incomplete"), std::ios::binary) << weights_.substr(0, 100'000);
  EXPECT_EQ(read_file(find() / "model.safetensors"), weights_);
  const auto seen = hub_.seen();
  const auto it = std::find_if(seen.begin(), seen.end(), [](const auto& s) { return s.path == "/blob/model.safetensors"; });
  ASSERT_NE(it, seen.end());
  EXPECT_EQ(it->range, "bytes=100000-");
  EXPECT_FALSE(fs::exists(blobs / (etag + ".incomplete")));
}

TEST_F(HubTest, BrokenConnectionsAreResumed) {
  hub_.state->num_breaks = 3;
  start();
  EXPECT_EQ(read_file(find() / "model.safetensors"), weights_);
  std::vector<std::string> ranges;
  for (const auto& s : hub_.seen())
    if (s.path == "/blob/model.safetensors") ranges.push_back(s.range);
  EXPECT_THAT(ranges, ElementsAre("", "bytes=150000-", "bytes=225000-", "bytes=262500-"));
}

TEST_F(HubTest, ServersWithoutRangesStartOver) {
  hub_.state->num_breaks = 2;
  hub_.state->knows_ranges = false;
  start();
  EXPECT_EQ(read_file(find() / "model.safetensors"), weights_);
}

TEST_F(HubTest, WrongBytesAreRefusedTwiceAndLeaveNothing) {
  hub_.state->corrupt = true;
  start();
  expect_error([&] { find(); }, ErrorCode::kCorrupt, {"model org/tiny", "model.safetensors", "hash"});
  EXPECT_EQ(hub_.count("GET", "/blob/"), 2u);
  for (const auto& entry : fs::directory_iterator(settings_.cache_dir / "models--org--tiny" / "blobs"))
    EXPECT_THAT(entry.path().filename().string(), ::testing::Not(HasSubstr("incomplete")));
  // A longer leftover of something else is thrown away as well.
  hub_.state->corrupt = false;
  std::ofstream(settings_.cache_dir / "models--org--tiny" / "blobs" / (hex_digest(net::DigestKind::kSha256, weights_) + ".incomplete"),
                std::ios::binary)
      << std::string(weights_.size(), 'z');
  EXPECT_EQ(read_file(find() / "model.safetensors"), weights_);
}

TEST_F(HubTest, TokenGoesToTheHubOnly) {
  hub_.state->needed_token = "hf_secret";
  start();
  expect_error([&] { find(); }, ErrorCode::kNotFound, {"org/tiny", "HF_TOKEN"});
  settings_.token = "hf_secret";
  find();
  for (const auto& s : hub_.seen()) {
    if (s.path.starts_with("/blob/")) {
      EXPECT_EQ(s.bearer, "") << "the CDN must not see it";
    }
  }
}

TEST_F(HubTest, ShardsOfTheIndexAreFetched) {
  hub_.add("config.json", "{}");
  hub_.add("tokenizer.json", "{}");
  hub_.add("model.safetensors.index.json", R"({"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  hub_.add("model-1.safetensors", "one", true);
  hub_.add("model-2.safetensors", "two", true);
  hub_.add("model-3.safetensors", "of something else", true);
  hub_.start();
  settings_.endpoint = hub_.endpoint();
  const fs::path snapshot = find();
  EXPECT_EQ(read_file(snapshot / "model-2.safetensors"), "two");
  EXPECT_FALSE(fs::exists(snapshot / "model-3.safetensors"));
  fs::remove(snapshot / "model-1.safetensors");
  EXPECT_THAT(missing_model_files(snapshot, ModelParts::kAll), ElementsAre("model-1.safetensors"));
}

TEST_F(HubTest, AnswersOfTheHubBecomeAdvice) {
  start([](FakeHub& hub) {
    hub.route(
        "/api/models/org/gated/revision/main", 200, {},
        R"({"sha":"0123456789abcdef0123456789abcdef01234567","siblings":[{"rfilename":"config.json"},{"rfilename":"tokenizer.json"},{"rfilename":"model.safetensors"}]})");
    hub.route(std::string("/org/gated/resolve/") + kCommit + "/config.json", 403,
              {{"X-Error-Code", "GatedRepo"}, {"X-Error-Message", "ask first"}});
    hub.route("/api/models/org/gguf/revision/main", 200, {},
              R"({"sha":"0123456789abcdef0123456789abcdef01234567","siblings":[{"rfilename":"config.json"},{"rfilename":"x.gguf"}]})");
    hub.route("/api/models/org/evil/revision/main", 200, {},
              R"({"sha":"0123456789abcdef0123456789abcdef01234567","siblings":[{"rfilename":"../../x"}]})");
    hub.route("/api/models/org/junk/revision/main", 200, {}, "<html>");
    hub.route("/api/models/org/nosha/revision/main", 200, {}, R"({"siblings":[]})");
    hub.route("/api/models/org/norev/revision/main", 404, {{"X-Error-Code", "RevisionNotFound"}});
    hub.route("/api/models/org/busy/revision/main", 429, {});
    hub.route("/api/models/org/loop/revision/main", 307, {{"Location", "/api/models/org/loop/revision/main"}});
  });
  const auto find_id = [&](const std::string& id) { return [this, id] { find_model(id, ModelParts::kAll, settings_); }; };
  expect_error(find_id("org/gated"), ErrorCode::kUnauthorized, {"org/gated is gated", "accept its terms", "ask first"});
  expect_error(find_id("org/absent"), ErrorCode::kNotFound, {"no folder of that name", "there is no model org/absent on http://127.0.0.1"});
  expect_error(find_id("org/gguf"), ErrorCode::kNotFound, {"no model.safetensors", "x.gguf", "prl convert"});
  expect_error(find_id("org/evil"), ErrorCode::kCorrupt, {"../../x"});
  expect_error(find_id("org/junk"), ErrorCode::kCorrupt, {"no JSON object"});
  expect_error(find_id("org/nosha"), ErrorCode::kCorrupt, {"'sha'"});
  expect_error(find_id("org/norev"), ErrorCode::kNotFound, {"no revision 'main'"});
  expect_error(find_id("org/busy"), ErrorCode::kOverloaded, {"org/busy"});
  expect_error(find_id("org/loop"), ErrorCode::kUnavailable, {"redirects"});
  expect_error(find_id("no/such/folder"), ErrorCode::kNotFound, {"no such folder"});
  settings_.endpoint = "http://127.0.0.1:1";
  expect_error(find_id("org/tiny"), ErrorCode::kUnavailable, {"no copy in the cache", "127.0.0.1:1"});
  settings_.is_offline = true;
  expect_error(find_id("org/tiny"), ErrorCode::kNotFound, {"HF_HUB_OFFLINE", settings_.cache_dir.string()});
}

TEST_F(HubTest, RelativeRedirectsOfRenamedRepositoriesAreFollowed) {
  start([](FakeHub& hub) {
    hub.route("/api/models/old/name/revision/main", 307, {{"Location", "/api/models/org/tiny/revision/main"}});
    for (const char* file : {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"})
      hub.route(std::string("/old/name/resolve/") + kCommit + "/" + file, 307,
                {{"Location", std::string("/org/tiny/resolve/") + kCommit + "/" + file}});
  });
  const fs::path snapshot = find_model("old/name", ModelParts::kAll, settings_);
  EXPECT_EQ(read_file(snapshot / "model.safetensors"), weights_);
  EXPECT_EQ(snapshot.parent_path().parent_path().filename(), "models--old--name");
}

TEST_F(HubTest, DatasetsHaveRoutesOfTheirOwn) {
  hub_.set_prefix("/datasets/org/set");
  hub_.add("data/train-00000-of-00001.jsonl", "{}\n", true);
  hub_.add("README.md", "---\n---\n");
  hub_.start("org/set", "datasets");
  settings_.endpoint = hub_.endpoint();
  HubClient client(settings_);
  const HubRepo repo{HubKind::kDataset, "org/set", "main"};
  const HubListing listing = client.list(repo);
  EXPECT_EQ(listing.commit, kCommit);
  const fs::path folder = client.fetch(repo, listing.commit, listing.files);
  EXPECT_EQ(read_file(folder / "data/train-00000-of-00001.jsonl"), "{}\n");
  EXPECT_EQ(fs::read_symlink(folder / "data/train-00000-of-00001.jsonl").parent_path(), "../../../blobs");
  EXPECT_EQ(folder.parent_path().parent_path().filename(), "datasets--org--set");
}

TEST(HubIds, AreRecognised) {
  for (const char* good : {"gpt2", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b_c.d"})
    EXPECT_TRUE(is_hub_id(good)) << good;
  for (const char* bad :
       {"", "/abs/path", "./x", "../x", "a/b/c", "a/", "/a", "a b", "x/-y", "x/y.", "a--b/c", "a/b..c", "x/y.git", "~/x", "a\\b"})
    EXPECT_FALSE(is_hub_id(bad)) << bad;
  EXPECT_FALSE(is_hub_id(std::string(97, 'a')));
}

TEST(HubSettings, FollowTheVariablesOfHuggingFace) {
  std::map<std::string, std::string> env{{"HOME", "/home/u"}};
  const auto settings = [&] {
    return HubSettings::from_environment([&](const char* name) -> std::optional<std::string> {
      const auto it = env.find(name);
      return it == env.end() ? std::nullopt : std::optional(it->second);
    });
  };
  EXPECT_EQ(settings().cache_dir, "/home/u/.cache/huggingface/hub");
  EXPECT_EQ(settings().endpoint, "https://huggingface.co");
  EXPECT_FALSE(settings().is_offline);
  env["XDG_CACHE_HOME"] = "/xdg";
  EXPECT_EQ(settings().cache_dir, "/xdg/huggingface/hub");
  env["HF_HOME"] = "~/hf";
  EXPECT_EQ(settings().cache_dir, "/home/u/hf/hub");
  env["HUGGINGFACE_HUB_CACHE"] = "/old";
  EXPECT_EQ(settings().cache_dir, "/old");
  env["HF_HUB_CACHE"] = "/new";
  EXPECT_EQ(settings().cache_dir, "/new");
  env["HF_HUB_OFFLINE"] = "true";
  EXPECT_TRUE(settings().is_offline);
  env["HF_HUB_OFFLINE"] = "0";
  EXPECT_FALSE(settings().is_offline);
  env["HF_ENDPOINT"] = "http://mirror:8080/hf/";
  EXPECT_EQ(settings().endpoint, "http://mirror:8080/hf");
  env["HF_ENDPOINT"] = "mirror";
  EXPECT_THROW(settings(), Error);
  env.erase("HF_ENDPOINT");
  env["HF_TOKEN"] = " hf_x\n";
  EXPECT_EQ(settings().token, "hf_x");
  env.erase("HF_TOKEN");
  const fs::path token = fs::temp_directory_path() / ("prl-hub-token-" + std::to_string(::getpid()));
  std::ofstream(token) << "hf_file\n";
  env["HF_TOKEN_PATH"] = token.string();
  EXPECT_EQ(settings().token, "hf_file");
  env["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1";
  EXPECT_EQ(settings().token, "");
  fs::remove(token);
  env["HF_HUB_ETAG_TIMEOUT"] = "7";
  EXPECT_EQ(settings().head_timeout, std::chrono::seconds(7));
  env["HF_HUB_DOWNLOAD_TIMEOUT"] = "soon";
  EXPECT_THROW(settings(), Error);
}

TEST(CopyFile, AFullDiskIsNamedAndNothingIsLeft) {
  const fs::path folder = fs::temp_directory_path() / ("prl-copy-" + std::to_string(::getpid()));
  fs::remove_all(folder);
  const std::string bytes(3 << 20, 'b');
  write_file_atomic(folder / "blob", bytes);
  io::copy_file(folder / "blob", folder / "whole");
  EXPECT_EQ(read_file(folder / "whole"), bytes);
  EXPECT_THROW(io::copy_file(folder / "blob", folder / "whole"), Error) << "it is there";
  EXPECT_EQ(read_file(folder / "whole"), bytes);
  EXPECT_THROW(io::copy_file(folder / "absent", folder / "other"), Error);
  EXPECT_FALSE(fs::exists(folder / "other"));
  // Files of this process may grow to a megabyte: the disk of this test.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto ignored = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string why;
  try {
    io::copy_file(folder / "blob", folder / "torn");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    why = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, ignored);
  EXPECT_THAT(why, HasSubstr("torn: File too large"));
  EXPECT_FALSE(fs::exists(folder / "torn"));
  fs::remove_all(folder);
}

TEST(HubPaths, StayInside) {
  for (const char* good : {"a", "a/b.txt", "data/train-00000-of-00001.parquet", "..a/b"})
    EXPECT_NO_THROW(check_hub_path(good, "x")) << good;
  for (const char* bad : {"", "/a", "a//b", "../a", "a/../b", "a/.", "a\\b", "a\n"}) EXPECT_THROW(check_hub_path(bad, "x"), Error) << bad;
}

}  // namespace
}  // namespace prl::io
