#include "launch/engine_client.hpp"

#include <gtest/gtest.h>

#include "launch/testing/tiny_engine.hpp"
#include "net/io_runtime.hpp"

namespace prl::launch {
namespace {

using namespace std::chrono_literals;

class EngineClientTest : public ::testing::Test {
 protected:
  wire::GenerateOutput generate(wire::SamplingParams sampling, std::chrono::milliseconds patience = 60s,
                                std::vector<std::int32_t> prompt = {72, 101, 108, 108, 111}) {
    wire::GenerateRequest request;
    request.prompt_ids = std::move(prompt);
    request.sampling = std::move(sampling);
    return io_.run_blocking(client_->generate(std::move(request), net::Clock::now() + patience), 120s);
  }
  static wire::SamplingParams greedy(std::int32_t max_tokens) {
    wire::SamplingParams sampling;
    sampling.temperature = 0;
    sampling.max_tokens = max_tokens;
    sampling.ignore_eos = true;
    return sampling;
  }
  void TearDown() override { host_.engine().shutdown(); }

  testing::TinyModel model_{"client"};
  EngineHost host_{model_.config(), make_cpu_runtime()};
  net::IoRuntime io_{1};
  std::unique_ptr<env::GenerateClient> client_ = make_engine_client(host_.engine(), host_.text().tokenizer);
};

TEST_F(EngineClientTest, GathersTokensLogprobsAndVersionsOfARequest) {
  const wire::GenerateOutput output = generate(greedy(12));
  EXPECT_EQ(output.token_ids.size(), 12u);
  EXPECT_EQ(output.logprobs.size(), 12u);
  EXPECT_EQ(output.versions, std::vector<std::int64_t>(12, 0));
  EXPECT_EQ(output.finish_reason, wire::FinishReason::kLength);
  EXPECT_EQ(output.num_prompt_tokens, 5);
  EXPECT_EQ(generate(greedy(12)).token_ids, output.token_ids) << "greedy decoding repeats itself";
}

TEST_F(EngineClientTest, AStopStringEndsTheRequestWithTheTokenThatCompletedIt) {
  wire::SamplingParams sampling = greedy(24);
  for (std::int32_t id = 0; id < 64; ++id) sampling.allowed_token_ids.push_back(id);  // each a character of its own
  const wire::GenerateOutput whole = generate(sampling);
  const std::size_t place = whole.token_ids.size() / 2;
  sampling.stop = {host_.text().tokenizer->decode(std::vector<std::int32_t>{whole.token_ids[place]}, true)};
  const wire::GenerateOutput cut = generate(sampling);
  EXPECT_EQ(cut.finish_reason, wire::FinishReason::kStop);
  EXPECT_EQ(cut.stop_string, sampling.stop.front());
  EXPECT_LE(cut.token_ids.size(), place + 1);
  EXPECT_EQ(cut.token_ids,
            std::vector<std::int32_t>(whole.token_ids.begin(), whole.token_ids.begin() + static_cast<long>(cut.token_ids.size())));
  EXPECT_EQ(cut.logprobs.size(), cut.token_ids.size());
  EXPECT_EQ(cut.versions.size(), cut.token_ids.size());
}

TEST_F(EngineClientTest, ADeadlineCancelsTheRequestInTheEngine) {
  host_.engine().pause(60s);  // or the answer might be there first
  try {
    generate(greedy(200), 0ms);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_NE(std::string(error.what()).find("in-process engine"), std::string::npos) << error.what();
  }
  host_.engine().resume();
  EXPECT_EQ(generate(greedy(3)).token_ids.size(), 3u) << "the engine serves the next request";
}

TEST_F(EngineClientTest, ARefusedRequestAndAnEngineThatIsGoneAreErrors) {
  EXPECT_THROW(generate(greedy(3), 60s, std::vector<std::int32_t>(300, 1)), Error) << "longer than the model's context";
  EXPECT_NO_THROW(io_.run_blocking(client_->check_health(net::Clock::now() + 10s), 60s));
  host_.engine().shutdown();
  EXPECT_THROW(generate(greedy(3)), Error);
}

}  // namespace
}  // namespace prl::launch
