#include "engine/resolve_request.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "base/error.hpp"

namespace prl::engine {
namespace {

nn::ModelConfig config() {
  nn::ModelConfig config;
  config.vocab_size = 100;
  config.max_position = 64;
  config.eos_ids = {7, 3};
  return config;
}

EngineOptions options() {
  EngineOptions options;
  options.max_model_len = 16;
  options.num_blocks = 1;
  return options;
}

wire::GenerateRequest prompt_of(std::size_t length) {
  wire::GenerateRequest request;
  request.prompt_ids.assign(length, 5);
  return request;
}

Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorCode::kInternal, "");
}

TEST(ResolveRequest, FillsInLimitsAndStopTokens) {
  auto request = prompt_of(6);
  request.sampling.stop_token_ids = {9, 7};
  const auto resolved = resolve_request(request, options(), config());
  EXPECT_EQ(resolved.max_new_tokens, 10);
  EXPECT_EQ(resolved.stop_ids, (std::vector<std::int32_t>{3, 7, 9}));
  EXPECT_FALSE(resolved.edits_logits);

  request.sampling.ignore_eos = true;
  request.sampling.max_tokens = 4;
  request.sampling.seed = 12;
  request.sampling.presence_penalty = 0.5f;
  const auto other = resolve_request(request, options(), config());
  EXPECT_EQ(other.max_new_tokens, 4);
  EXPECT_EQ(other.stop_ids, (std::vector<std::int32_t>{7, 9}));
  EXPECT_EQ(other.seed, 12u);
  EXPECT_TRUE(other.edits_logits);
}

TEST(ResolveRequest, TooManyNewTokensAreClampedAndTooLongAPromptIsRefused) {
  auto request = prompt_of(15);
  request.sampling.max_tokens = 100;
  EXPECT_EQ(resolve_request(request, options(), config()).max_new_tokens, 1);
  const Error error = error_of([] { resolve_request(prompt_of(16), options(), config()); });
  EXPECT_EQ(error.code(), ErrorCode::kOverlong);
  EXPECT_STREQ(error.what(),
               "This model's maximum context length is 16 tokens. However, your request has 16 input tokens. Please reduce the length of "
               "the input messages.");
}

TEST(ResolveRequest, BadWordsOfSeveralTokensNeedEveryTokenBeforeTheNext) {
  auto request = prompt_of(4);
  request.sampling.bad_sequences = {{1}, {2}};
  EXPECT_TRUE(resolve_request(request, options(), config()).edits_logits);
  EXPECT_FALSE(resolve_request(request, options(), config()).needs_every_token);
  request.sampling.bad_sequences.push_back({3, 4});
  EXPECT_TRUE(resolve_request(request, options(), config()).needs_every_token);
}

TEST(ResolveRequest, NamesTheFieldThatIsWrong) {
  const std::vector<std::pair<const char*, std::function<void(wire::GenerateRequest&)>>> cases = {
      {"prompt is empty", [](auto& r) { r.prompt_ids.clear(); }},
      {"token id 100", [](auto& r) { r.prompt_ids.back() = 100; }},
      {"token id -1", [](auto& r) { r.prompt_ids.back() = -1; }},
      {"temperature", [](auto& r) { r.sampling.temperature = 2.5f; }},
      {"temperature", [](auto& r) { r.sampling.temperature = std::numeric_limits<float>::quiet_NaN(); }},
      {"temperature", [](auto& r) { r.sampling.temperature = 1e-30f; }},
      {"top_p", [](auto& r) { r.sampling.top_p = 0.0f; }},
      {"top_k", [](auto& r) { r.sampling.top_k = -2; }},
      {"min_p", [](auto& r) { r.sampling.min_p = 1.5f; }},
      {"repetition_penalty", [](auto& r) { r.sampling.repetition_penalty = 0.0f; }},
      {"presence_penalty", [](auto& r) { r.sampling.presence_penalty = 3.0f; }},
      {"frequency_penalty", [](auto& r) { r.sampling.frequency_penalty = -3.0f; }},
      {"max_tokens", [](auto& r) { r.sampling.max_tokens = 0; }},
      {"min_tokens", [](auto& r) { r.sampling.min_tokens = -1; }},
      {"min_tokens", [](auto& r) { r.sampling.min_tokens = 5, r.sampling.max_tokens = 4; }},
      {"n must", [](auto& r) { r.sampling.n = 0; }},
      {"n must", [](auto& r) { r.sampling.n = 2; }},
      {"logprobs", [](auto& r) { r.sampling.logprobs = 21; }},
      {"prompt_logprobs", [](auto& r) { r.sampling.prompt_logprobs = -1; }},
      {"stop_token_ids", [](auto& r) { r.sampling.stop_token_ids = {100}; }},
      {"stop_token_ids", [](auto& r) { r.sampling.stop_token_ids.assign(kMaxStopTokens + 1, 1); }},
      {"logit_bias", [](auto& r) { r.sampling.logit_bias[100] = 1.0f; }},
      {"logit_bias", [](auto& r) { r.sampling.logit_bias[1] = 101.0f; }},
      {"allowed_token_ids",
       [](auto& r) {
         r.sampling.allowed_token_ids = {1, 100};
       }},
      {"exclude every one of the 1 tokens", [](auto& r) { r.sampling.allowed_token_ids = {3}, r.sampling.bad_sequences = {{3}}; }},
      {"exclude every one", [](auto& r) { r.sampling.allowed_token_ids = r.sampling.stop_token_ids = {3}, r.sampling.min_tokens = 1; }},
      {"bad_words",
       [](auto& r) {
         r.sampling.bad_sequences = {{1}, {}};
       }},
      {"bad_words", [](auto& r) { r.sampling.bad_sequences.assign(kMaxBadSequences + 1, {1}); }},
  };
  for (const auto& [text, change] : cases) {
    auto request = prompt_of(4);
    change(request);
    const Error error = error_of([&] { resolve_request(request, options(), config()); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << text;
    EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    // Clients take this phrase, anywhere in a message, for a prompt that is too long.
    EXPECT_THAT(error.what(), ::testing::Not(::testing::HasSubstr("context length")));
  }
}

TEST(CheckOptions, NamesTheOptionThatIsWrong) {
  const std::vector<std::pair<const char*, std::function<void(EngineOptions&)>>> cases = {
      {"block_size", [](auto& o) { o.block_size = 0; }},
      {"block_size", [](auto& o) { o.block_size = 24; }},
      {"max_num_seqs", [](auto& o) { o.max_num_seqs = 0; }},
      {"max_num_batched_tokens", [](auto& o) { o.max_num_batched_tokens = 0; }},
      {"max_model_len", [](auto& o) { o.max_model_len = 1; }},
      {"max_model_len", [](auto& o) { o.max_model_len = 65; }},
      {"num_blocks", [](auto& o) { o.num_blocks = -1; }},
      {"max_queued_requests", [](auto& o) { o.max_queued_requests = -1; }},
      {"chunked", [](auto& o) { o.enable_chunked_prefill = false, o.max_num_batched_tokens = 15; }},
  };
  check_options(options(), config());
  for (const auto& [text, change] : cases) {
    auto changed = options();
    change(changed);
    const Error error = error_of([&] { check_options(changed, config()); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << text;
    EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
  }
}

TEST(CheckOptions, DraftsHaveBounds) {
  auto drafts = options();
  drafts.drafts.num_tokens = 4;
  check_options(drafts, config());
  drafts.drafts.num_tokens = 16;
  EXPECT_THAT(error_of([&] { check_options(drafts, config()); }).what(),
              ::testing::HasSubstr("speculative.num_tokens must be between 0 and 15"));
  drafts.drafts = {.num_tokens = 4, .min_ngram = 5, .max_ngram = 4};
  EXPECT_THAT(error_of([&] { check_options(drafts, config()); }).what(),
              ::testing::HasSubstr("speculative.min_ngram must be between 1 and 4"));
}

TEST(ResolveRequest, WhereATokenDependsOnOthersByMoreThanItsLogitsThereAreNoDrafts) {
  const auto may_draft = [](const std::function<void(wire::SamplingParams&)>& change) {
    wire::GenerateRequest request;
    request.prompt_ids = {1, 2};
    request.sampling.max_tokens = 8;
    change(request.sampling);
    return resolve_request(request, options(), config()).may_draft;
  };
  EXPECT_TRUE(may_draft([](wire::SamplingParams& s) {
    s.top_p = 0.9f;
    s.logprobs = 2;
    s.min_tokens = 3;
    s.logit_bias = {{3, 1.0f}};
    s.bad_sequences = {{5}};
    s.stop = {"END"};
  }));
  EXPECT_FALSE(may_draft([](wire::SamplingParams& s) { s.repetition_penalty = 1.1f; }));
  EXPECT_FALSE(may_draft([](wire::SamplingParams& s) { s.presence_penalty = 0.1f; }));
  EXPECT_FALSE(may_draft([](wire::SamplingParams& s) { s.frequency_penalty = 0.1f; }));
  EXPECT_FALSE(may_draft([](wire::SamplingParams& s) { s.bad_sequences = {{5, 6}}; }));
  EXPECT_FALSE(may_draft([](wire::SamplingParams& s) { s.max_tokens = 1; })) << "there is nothing behind its token";
}

}  // namespace
}  // namespace prl::engine
