#include "launch/engine_client.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fmt/core.h>

#include <filesystem>

#include "engine/core.hpp"
#include "engine/resolve_request.hpp"
#include "engine/test_support.hpp"
#include "net/io_runtime.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::launch {
namespace {
namespace fs = std::filesystem;
using wire::FinishReason;

constexpr auto kLong = std::chrono::seconds(60);

/// An engine whose tokens are known beforehand, and a tokenizer of single bytes.
class ScriptedEngineClientTest : public ::testing::Test {
 protected:
  ScriptedEngineClientTest() {
    folder_ = fs::temp_directory_path() / fmt::format("prl-scripted-engine-client-{}", ::getpid());
    fs::create_directories(folder_);
    ids_ = text::write_byte_level_tokenizer(folder_);
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder_));
    options_.max_model_len = 256;
    config_.vocab_size = kLetters;
    config_.max_position = 256;
    engine::CoreOptions core;
    core.num_blocks = 64;
    core.block_size = 4;
    auto runner = std::make_unique<engine::testing::FakeRunner>(core.num_blocks, core.block_size, kLetters);
    engine_ = std::make_unique<engine::Engine>(options_, config_, std::make_unique<engine::EngineCore>(core, std::move(runner)));
    client_ = make_engine_client(*engine_, tokenizer_);
  }
  ~ScriptedEngineClientTest() override { fs::remove_all(folder_); }

  wire::GenerateRequest request(std::int32_t max_tokens) const {
    wire::GenerateRequest request;
    request.prompt_ids = {1, 2, 3};
    request.sampling.max_tokens = max_tokens;
    request.sampling.seed = 7;
    request.sampling.ignore_eos = true;
    return request;
  }
  /// What the engine draws for it when nothing ends it early.
  std::vector<std::int32_t> drawn(const wire::GenerateRequest& request) const {
    return engine::testing::expected_output(engine::resolve_request(request, options_, config_), 7, PolicyVersion{0}, kLetters);
  }
  std::string text_of(std::int32_t id) const { return std::string(tokenizer_->bytes_of(id)); }
  wire::GenerateOutput generate(wire::GenerateRequest request) {
    net::IoRuntime runtime(1);
    auto call = client_->generate(std::move(request), net::Clock::now() + kLong);
    return runtime.run_blocking(std::move(call), kLong);
  }

  static constexpr std::int32_t kLetters = 90;  ///< ids below are printable bytes of the byte alphabet
  fs::path folder_;
  text::ByteTokenizerIds ids_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  engine::EngineOptions options_;
  nn::ModelConfig config_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<env::GenerateClient> client_;
};

TEST_F(ScriptedEngineClientTest, EndsAtAStopStringAndCutsWhatWasDrawnLater) {
  wire::GenerateRequest r = request(40);
  const auto all = drawn(r);
  const std::string stop = text_of(all[4]) + text_of(all[5]);
  r.sampling.stop = {stop};
  std::size_t end = 6;
  for (std::size_t i = 0; i + 1 < 5; ++i)
    if (text_of(all[i]) + text_of(all[i + 1]) == stop) end = std::min(end, i + 2);
  const wire::GenerateOutput output = generate(r);
  EXPECT_EQ(output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(output.stop_string, stop);
  EXPECT_EQ(output.token_ids, std::vector<std::int32_t>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(end)));
  EXPECT_EQ(output.logprobs.size(), end);
  EXPECT_EQ(output.versions.size(), end);
}

TEST_F(ScriptedEngineClientTest, AStopStringBeforeMinTokensDoesNotEnd) {
  wire::GenerateRequest r = request(30);
  const auto all = drawn(r);
  r.sampling.stop = {text_of(all[2])};
  r.sampling.min_tokens = 10;
  std::size_t end = all.size();
  for (std::size_t i = 10; i < all.size() && end == all.size(); ++i)
    if (all[i] == all[2]) end = i + 1;
  const wire::GenerateOutput output = generate(r);
  EXPECT_GE(output.token_ids.size(), 11u);
  EXPECT_EQ(output.token_ids.size(), end);
  r.sampling.min_tokens = 0;
  EXPECT_LE(generate(r).token_ids.size(), 3u);
}

TEST_F(ScriptedEngineClientTest, AStopStringAtTheLastTokenIsAStop) {
  wire::GenerateRequest r = request(5);
  const auto all = drawn(r);
  ASSERT_EQ(std::count(all.begin(), all.end(), all[4]), 1) << "the seed no longer suits the test";
  r.sampling.stop = {text_of(all[4])};
  const wire::GenerateOutput output = generate(r);
  EXPECT_EQ(output.token_ids, all);
  EXPECT_EQ(output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(output.stop_string, text_of(all[4]));
}

TEST_F(ScriptedEngineClientTest, AnEngineThatEndsTheRequestIsAnError) {
  engine_->pause(kLong);
  net::IoRuntime runtime(1);
  auto call = client_->generate(request(200), net::Clock::now() + std::chrono::milliseconds(20));
  try {
    runtime.run_blocking(std::move(call), kLong);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("in-process engine"));
  }
}

}  // namespace
}  // namespace prl::launch
