// Drafts that a model draws change no bit of what a request gets, and come true where the model agrees. Compiled a second time for a GPU,
// where steps of both models are recorded and enqueued.
#include "engine/draft_model.hpp"

#include <gtest/gtest.h>

#include <bit>

#include "base/rng.hpp"
#include "device/testing/test_runtime.hpp"
#include "engine/engine.hpp"
#include "engine/resolve_request.hpp"
#include "engine/test_support.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"

namespace prl::engine {
namespace {

constexpr std::int64_t kDraftVocab = 40;

nn::ModelConfig draft_lab_config(std::int64_t num_layers, std::int64_t vocab_size = kDraftVocab, const char* family = "qwen3",
                                 std::int64_t head_dim = 16) {
  return nn::make_model_config({.family = family,
                                .vocab_size = vocab_size,
                                .hidden_size = 64,
                                .intermediate_size = 96,
                                .num_layers = num_layers,
                                .num_heads = 4,
                                .num_kv_heads = 2,
                                .head_dim = head_dim,
                                .max_position = 512});
}

struct DraftLab {
  DraftLab() : session(make_test_runtime(), 2) {}
  nn::WeightsPtr weights(std::int64_t num_layers, std::uint64_t seed) { return weights(draft_lab_config(num_layers), seed); }
  nn::WeightsPtr weights(const nn::ModelConfig& config, std::uint64_t seed) {
    nn::Parameters parameters(session.context().runtime, config);
    parameters.init_random(seed, 0.2f);
    return nn::make_weights(session.context(), parameters, DType::kBF16, PolicyVersion{1}, false, nullptr);
  }
  static EngineOptions options(nn::WeightsPtr drafts, std::int64_t num_tokens) {
    EngineOptions options;
    options.max_model_len = 200;
    options.num_blocks = 120;
    options.max_num_seqs = 8;
    options.max_num_batched_tokens = 48;
    options.num_threads = 2;
    options.drafts.num_tokens = drafts != nullptr ? num_tokens : 0;
    options.drafts.adapts = false;  // or times decide how many there are
    options.draft_model = std::move(drafts);
    return options;
  }
  /// Greedy and sampled requests, of prompts that are shared and some that are longer than a step.
  static std::vector<wire::GenerateRequest> requests() {
    std::vector<wire::GenerateRequest> all;
    for (std::uint64_t i = 0; i < 12; ++i) {
      wire::GenerateRequest request;
      Rng rng(i % 4);
      for (std::uint64_t n = 0; n < 5 + (i % 4) * 25; ++n)
        request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(kDraftVocab))));
      wire::SamplingParams& s = request.sampling;
      s.max_tokens = static_cast<std::int32_t>(8 + 5 * i);
      s.seed = i;
      s.temperature = i % 3 == 0 ? 0.0f : 1.0f;
      s.ignore_eos = i % 5 != 0;
      if (i % 4 == 1) s.top_p = 0.9f;
      if (i % 4 == 2) s.logprobs = 2;
      if (i % 6 == 5) s.logit_bias = {{3, 2.5f}};
      if (i == 7) s.repetition_penalty = 1.2f;  // has no drafts
      all.push_back(std::move(request));
    }
    return all;
  }
  struct Run {
    std::vector<wire::GenerateOutput> outputs;
    EngineStats stats;
  };
  Run run(const nn::WeightsPtr& weights, const EngineOptions& options, int num_rounds = 2) {
    Engine engine(session.context().runtime, options, weights);
    Run out;
    for (int round = 0; round < num_rounds; ++round) {
      std::vector<testing::Inbox> inboxes(requests().size());
      std::size_t next = 0;
      for (wire::GenerateRequest request : requests()) {
        *request.sampling.seed += static_cast<std::uint64_t>(50 * round);
        engine.submit(std::move(request), [inbox = &inboxes[next++]](const StepEvent& event) { inbox->push(event); });
      }
      for (testing::Inbox& inbox : inboxes) out.outputs.push_back(inbox.wait().output);
    }
    out.stats = engine.stats();
    return out;
  }
  static void expect_same(const Run& found, const Run& wanted) {
    ASSERT_EQ(found.outputs.size(), wanted.outputs.size());
    for (std::size_t i = 0; i < found.outputs.size(); ++i) {
      SCOPED_TRACE(i);
      const wire::GenerateOutput &a = found.outputs[i], &b = wanted.outputs[i];
      EXPECT_EQ(a.error, "");
      EXPECT_EQ(a.token_ids, b.token_ids);
      ASSERT_EQ(a.logprobs.size(), b.logprobs.size());
      for (std::size_t t = 0; t < a.logprobs.size(); ++t)
        EXPECT_EQ(std::bit_cast<std::uint32_t>(a.logprobs[t]), std::bit_cast<std::uint32_t>(b.logprobs[t])) << t;
      EXPECT_EQ(a.finish_reason, b.finish_reason);
      EXPECT_EQ(a.top_logprobs.size(), b.top_logprobs.size());
    }
  }
  ops::OpSession session;
};

TEST(DraftModel, DraftsOfTheModelItselfComeTrueAtEveryTemperature) {
  DraftLab lab;
  const auto weights = lab.weights(2, 7);
  const auto wanted = lab.run(weights, DraftLab::options(nullptr, 0));
  const auto found = lab.run(weights, DraftLab::options(weights, 4));
  DraftLab::expect_same(found, wanted);
  EXPECT_GT(found.stats.num_accepted_tokens, 200);
  // Texts that end in the middle of their drafts leave some untested.
  EXPECT_GE(found.stats.num_accepted_tokens, found.stats.num_draft_tokens * 9 / 10);
}

TEST(DraftModel, WhatAnotherModelGuessesChangesNoBit) {
  DraftLab lab;
  const auto weights = lab.weights(2, 7), other = lab.weights(1, 8);
  const auto wanted = lab.run(weights, DraftLab::options(nullptr, 0));
  for (const std::int64_t num_drafts : {1, 3, 15}) {
    SCOPED_TRACE(num_drafts);
    const auto found = lab.run(weights, DraftLab::options(other, num_drafts));
    DraftLab::expect_same(found, wanted);
    EXPECT_GT(found.stats.num_draft_tokens, found.stats.num_accepted_tokens);
  }
}

TEST(DraftModel, StatesOfLinearAttentionGoBackBehindDraftsThatFailed) {
  DraftLab lab;
  const auto weights = lab.weights(draft_lab_config(4, kDraftVocab, "qwen3_5_text", 128), 7), other = lab.weights(1, 8);
  ASSERT_FALSE(weights->config.linear.layers.empty());
  const auto wanted = lab.run(weights, DraftLab::options(nullptr, 0));
  EngineOptions looked_up = DraftLab::options(nullptr, 0);
  looked_up.drafts = {.num_tokens = 4, .min_ngram = 1};
  looked_up.num_state_snapshots = 3;
  for (const EngineOptions& options : {DraftLab::options(other, 3), looked_up}) {
    const auto found = lab.run(weights, options);
    DraftLab::expect_same(found, wanted);
    EXPECT_GT(found.stats.num_draft_tokens, found.stats.num_accepted_tokens);
    EXPECT_GT(found.stats.num_accepted_tokens, 0);
  }
}

TEST(DraftModel, AModelThatCannotDraftIsRefusedWithTheReason) {
  const nn::ModelConfig model = draft_lab_config(2);
  EXPECT_NO_THROW(check_draft_model(draft_lab_config(1), model));
  try {
    check_draft_model(draft_lab_config(1, 64), model);
    FAIL() << "was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string_view(error.what()).find("wanted a model of 40 tokens"), std::string_view::npos) << error.what();
    EXPECT_NE(std::string_view(error.what()).find("found 64"), std::string_view::npos) << error.what();
  }
  nn::ModelConfig linear = draft_lab_config(1);
  linear.linear.layers = {0};
  EXPECT_THROW(check_draft_model(linear, model), Error);
}

}  // namespace
}  // namespace prl::engine
