#include "engine/sampler.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "base/normal_draws.hpp"

namespace prl::engine {
namespace {

/// A sequence with `prompt` and `output` under given settings.
struct Case {
  Case(std::vector<std::int32_t> prompt, std::vector<std::int32_t> output) {
    request.prompt_ids = prompt;
    sequence.request = &request;
    sequence.num_prompt_tokens = static_cast<std::int64_t>(prompt.size());
    sequence.tokens = prompt;
    sequence.tokens.insert(sequence.tokens.end(), output.begin(), output.end());
  }
  Case(const Case&) = delete;
  Draw next() { return {&sequence, sequence.num_output_tokens()}; }
  std::vector<float> edit(std::vector<float> logits) { return edit(std::move(logits), next(), {}); }
  std::vector<float> edit(std::vector<float> logits, const Draw& draw, ConstTensorView drawn) {
    ops::OpSession session(make_cpu_runtime(), 1);
    const auto vocab_size = static_cast<std::int64_t>(logits.size());
    ops::LogitEdits edits;
    add_edits(edits, draw, 0, vocab_size);
    const Tensor row = Tensor::empty(session.context().runtime, {1, vocab_size}, DType::kF32);
    std::ranges::copy(logits, row.as<float>());
    ops::edit_logits(session.context(), row, drawn, edits);
    std::copy_n(row.as<float>(), logits.size(), logits.begin());
    return logits;
  }
  ResolvedRequest request;
  Sequence sequence;
};

TEST(EditLogits, RepetitionCoversPromptAndOutputOnce) {
  Case c({0, 1, 1}, {2, 2, 1});
  c.request.sampling.repetition_penalty = 2.0f;
  EXPECT_EQ(c.edit({4.0f, -4.0f, 4.0f, 4.0f}), (std::vector<float>{2.0f, -8.0f, 2.0f, 4.0f}));
}

TEST(EditLogits, PresenceAndFrequencyCoverTheOutput) {
  Case c({0, 1}, {2, 2, 1});
  c.request.sampling.presence_penalty = 0.5f;
  EXPECT_EQ(c.edit({1.0f, 1.0f, 1.0f, 1.0f}), (std::vector<float>{1.0f, 0.5f, 0.5f, 1.0f}));
  c.request.sampling.frequency_penalty = 0.25f;
  EXPECT_EQ(c.edit({1.0f, 1.0f, 1.0f, 1.0f}), (std::vector<float>{1.0f, 0.25f, 0.0f, 1.0f}));
}

TEST(EditLogits, BiasComesBeforePenalties) {
  Case c({0}, {1});
  c.request.sampling.logit_bias = {{1, 3.0f}, {2, -1.0f}};
  c.request.sampling.repetition_penalty = 2.0f;
  EXPECT_EQ(c.edit({1.0f, 1.0f, 1.0f}), (std::vector<float>{0.5f, 2.0f, 0.0f}));
}

TEST(EditLogits, StopTokensAreMaskedUntilMinTokens) {
  Case c({0}, {1});
  c.request.stop_ids = {2};
  c.request.sampling.min_tokens = 2;
  EXPECT_TRUE(needs_edit(c.next()));
  EXPECT_EQ(c.edit({1.0f, 1.0f, 1.0f})[2], ops::kMaskedLogit);
  EXPECT_FALSE(needs_edit({&c.sequence, 2, 0})) << "the token before it is on its way";
  c.sequence.tokens.push_back(1);
  EXPECT_FALSE(needs_edit(c.next()));
  EXPECT_EQ(c.edit({1.0f, 1.0f, 1.0f})[2], 1.0f);
}

TEST(EditLogits, AllowedTokensAndBadWords) {
  Case c({0, 3}, {1, 2});
  c.request.sampling.allowed_token_ids = {1, 3};
  EXPECT_EQ(c.edit({5, 4, 3, 2}), (std::vector<float>{ops::kMaskedLogit, 4, ops::kMaskedLogit, 2}));
  c.request.sampling.allowed_token_ids.clear();
  // The last token alone; behind 1, 2; behind 3, which only the prompt has.
  c.request.sampling.bad_sequences = {{0}, {1, 2, 3}, {3, 1}, {2, 0}};
  EXPECT_EQ(c.edit({5, 4, 3, 2}), (std::vector<float>{ops::kMaskedLogit, 4, 3, ops::kMaskedLogit}));
  c.request.sampling.bad_sequences = {{1, 3}};
  EXPECT_EQ(c.edit({5, 4, 3, 2}), (std::vector<float>{5, 4, 3, 2}));
}

TEST(EditLogits, ATokenOnItsWayCountsAsIfItWereKnown) {
  const auto runtime = make_cpu_runtime();
  const Tensor drawn = Tensor::empty(runtime, {3}, DType::kI32);
  std::ranges::copy(std::vector<std::int32_t>{0, 3, 0}, drawn.as<std::int32_t>());
  const std::vector<float> logits{1.0f, -2.0f, 3.0f, -4.0f, 5.0f, -6.0f};
  for (const std::int32_t token : {0, 1, 2, 3, 4, 5}) {
    Case ahead({0, 1, 1}, {2, 2, 1}), known({0, 1, 1}, {2, 2, 1, token});
    for (Case* const c : {&ahead, &known}) {
      c->request.sampling.repetition_penalty = 1.5f;
      c->request.sampling.presence_penalty = 0.5f;
      c->request.sampling.frequency_penalty = 0.25f;
      c->request.sampling.logit_bias = {{4, 0.5f}};
      c->request.stop_ids = {5};
      c->request.sampling.min_tokens = 5;
    }
    drawn.as<std::int32_t>()[1] = token;
    // Twice: the second time what was counted is found again.
    for (int i = 0; i < 2; ++i) EXPECT_EQ(ahead.edit(logits, {&ahead.sequence, 4, 1}, drawn), known.edit(logits)) << token;
    ahead.sequence.tokens.push_back(token);
    EXPECT_EQ(ahead.edit(logits), known.edit(logits)) << token;
  }
}

class SamplerTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kVocabSize = 1025;  // one token alone in the last chunk of the vocabulary
  SamplerTest() : session_(make_cpu_runtime(), 2), sampler_(session_.context()) {}
  void sample(TensorView logits, std::span<Sequence* const> sequences, std::span<ops::SampleResult> results) {
    std::vector<Draw> draws;
    for (Sequence* const sequence : sequences) draws.push_back({sequence, sequence->num_output_tokens()});
    sampler_.begin(logits, draws, {}, pending_);
    sampler_.finish(results, pending_);
  }
  Tensor random_logits(std::int64_t rows) {
    Tensor logits = Tensor::empty(session_.context().runtime, {rows, kVocabSize}, DType::kF32);
    Rng rng(3);
    draw_normals(rng, {logits.as<float>(), static_cast<std::size_t>(logits.num_elements())});
    return logits;
  }
  ops::OpSession session_;
  Sampler sampler_;
  ops::PendingSamples pending_;
};

TEST_F(SamplerTest, AMaskedTokenIsNeitherDrawnNorReported) {
  Tensor logits = random_logits(1);
  logits.as<float>()[1024] = 50.0f;
  Case c({0}, {});
  c.request.stop_ids = {1024};
  c.request.sampling.min_tokens = 1;
  c.request.sampling.logprobs = 20;
  Sequence* const sequences[] = {&c.sequence};
  std::vector<ops::SampleResult> results(1);
  sample(logits, sequences, results);
  EXPECT_NE(results[0].token, 1024);
  EXPECT_TRUE(std::isfinite(results[0].logprob));
  ASSERT_EQ(results[0].top_logprobs.size(), 20u);
  for (const auto& [id, logprob] : results[0].top_logprobs) EXPECT_TRUE(id != 1024 && std::isfinite(logprob));
}

TEST_F(SamplerTest, NamedTokensComeInPlaceOfTheLikeliest) {
  Tensor logits = random_logits(1);
  Case c({0}, {});
  c.request.sampling.logprobs = 20;
  c.request.sampling.logprob_token_ids = {900, 3};
  Sequence* const sequences[] = {&c.sequence};
  std::vector<ops::SampleResult> results(1);
  sample(logits, sequences, results);
  EXPECT_TRUE(results[0].top_logprobs.empty());
  ASSERT_EQ(results[0].named_logprobs.size(), 2u);
  const float* x = logits.as<float>();
  EXPECT_FLOAT_EQ(results[0].named_logprobs[0] - results[0].named_logprobs[1], x[900] - x[3]);
  EXPECT_FLOAT_EQ(results[0].logprob - results[0].named_logprobs[1], x[results[0].token] - x[3]);
}

/// Even tokens below 10 may follow; the text may end after two tokens, and must after three.
class EvenTokens final : public wire::TokenRule {
 public:
  bool allow(std::span<const std::int32_t> output, wire::TokenRuleCursor&, std::span<std::uint64_t> words) const override {
    std::fill(words.begin(), words.end(), 0);
    if (output.size() < 3) words[0] = 0b0101010101;
    return output.size() >= 2;
  }
};

TEST_F(SamplerTest, ATokenRuleLeavesOnlyWhatMayFollow) {
  Tensor logits = random_logits(1);
  Case c({0}, {});
  c.request.stop_ids = {4, 1024};  // a stop token that the rule would allow as text, and one it knows nothing of
  c.request.sampling.token_rule = std::make_shared<EvenTokens>();
  c.request.edits_logits = true;
  c.request.sampling.logprobs = 20;
  Sequence* const sequences[] = {&c.sequence};
  const auto open_tokens = [&] {
    std::vector<ops::SampleResult> results(1);
    logits = random_logits(1);
    sample(logits, sequences, results);
    EXPECT_TRUE(std::isfinite(results[0].logprob));
    std::vector<std::int32_t> ids;
    for (const auto& [id, logprob] : results[0].top_logprobs) ids.push_back(id);
    std::sort(ids.begin(), ids.end());
    EXPECT_TRUE(std::binary_search(ids.begin(), ids.end(), results[0].token));
    return ids;
  };
  EXPECT_EQ(open_tokens(), (std::vector<std::int32_t>{0, 2, 6, 8}));
  c.sequence.tokens.insert(c.sequence.tokens.end(), {2, 2});
  EXPECT_EQ(open_tokens(), (std::vector<std::int32_t>{0, 2, 4, 6, 8, 1024}));
  c.sequence.tokens.push_back(2);
  EXPECT_EQ(open_tokens(), (std::vector<std::int32_t>{4, 1024}));
  // The bias of the request counts among the tokens that are left.
  c.sequence.tokens.resize(1);
  c.request.sampling.logit_bias = {{7, 100.0f}, {8, 100.0f}};
  std::vector<ops::SampleResult> results(1);
  logits = random_logits(1);
  sample(logits, sequences, results);
  EXPECT_EQ(results[0].token, 8);
}

TEST(EditLogits, AStopTokenThatTheTextNeedsStaysOpenAndADeadEndIsNotDrawnFrom) {
  class OnlyOne final : public wire::TokenRule {
   public:
    bool allow(std::span<const std::int32_t> output, wire::TokenRuleCursor&, std::span<std::uint64_t> words) const override {
      words[0] = output.empty() ? 2 : 0;
      return false;
    }
  };
  Case c({0}, {});
  c.request.stop_ids = {1};
  c.request.sampling.token_rule = std::make_shared<OnlyOne>();
  EXPECT_EQ(c.edit({1.0f, 2.0f, 3.0f}), (std::vector<float>{ops::kMaskedLogit, 2.0f, ops::kMaskedLogit}));
  c.sequence.tokens.push_back(1);
  for (const float logit : c.edit({1.0f, 2.0f, 3.0f})) EXPECT_TRUE(std::isnan(logit));
}

TEST_F(SamplerTest, ADrawDependsOnSeedAndIndexNotOnItsNeighbours) {
  Case a({0}, {}), b({0}, {}), c({0}, {});
  a.sequence.seed = 1;
  b.sequence.seed = 2;
  c.sequence.seed = 3;
  c.request.sampling.top_p = 0.5f;
  Tensor logits = random_logits(3);
  std::vector<ops::SampleResult> together(3), alone(1);
  Sequence* const all[] = {&a.sequence, &b.sequence, &c.sequence};
  sample(logits, all, together);
  for (std::size_t i = 0; i < 3; ++i) {
    sample(logits.view().rows(static_cast<std::int64_t>(i), 1), std::span(all).subspan(i, 1), alone);
    EXPECT_EQ(alone[0].token, together[i].token);
    EXPECT_EQ(alone[0].logprob, together[i].logprob);
  }
  // Another index draws anew: over 50 indices more than one token appears.
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < 50; ++i) {
    sample(logits.view().rows(0, 1), std::span(all).subspan(0, 1), alone);
    tokens.push_back(alone[0].token);
    a.sequence.tokens.push_back(0);
  }
  std::sort(tokens.begin(), tokens.end());
  EXPECT_GT(std::unique(tokens.begin(), tokens.end()) - tokens.begin(), 10);
}

TEST_F(SamplerTest, ARowThatIsNotFiniteLeavesTheOthersAlone) {
  for (const float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const std::int64_t where : {0, 700, 1024}) {
      Case a({0}, {}), b({0}, {}), c({0}, {});
      b.request.sampling.top_k = 5;
      std::vector<ops::SampleResult> clean(3), results(3);
      Sequence* const all[] = {&a.sequence, &b.sequence, &c.sequence};
      sample(random_logits(3), all, clean);
      Tensor logits = random_logits(3);
      logits.as<float>()[kVocabSize + where] = poison;
      sample(logits, all, results);
      EXPECT_FALSE(std::isfinite(results[1].logprob)) << poison << " at " << where;
      for (const std::size_t i : {0, 2}) {
        EXPECT_EQ(results[i].token, clean[i].token);
        EXPECT_EQ(results[i].logprob, clean[i].logprob);
      }
    }
  }
}

}  // namespace
}  // namespace prl::engine
