// Drafts of a model's own head for multi-token prediction change no bit of what a request gets, and are those that the head makes of the
// model's hidden states. Compiled a second time for a GPU, where steps of both are recorded and enqueued.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "base/rng.hpp"
#include "device/testing/test_runtime.hpp"
#include "engine/engine.hpp"
#include "engine/resolve_request.hpp"
#include "engine/test_support.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"
#include "nn/mtp_head.hpp"

namespace prl::engine {
namespace {

/// Of few tokens, so that guesses come true by chance.
constexpr std::int64_t kHeadVocab = 6;

nn::ModelConfig model_with_head(const std::string& family) {
  const bool has_linear = family.starts_with("qwen3_5");
  nn::ModelConfig config = nn::make_model_config({.family = family.substr(0, family.find("_latents")),
                                                  .vocab_size = kHeadVocab,
                                                  .hidden_size = 64,
                                                  .intermediate_size = 96,
                                                  .num_layers = has_linear ? 4 : 2,
                                                  .num_heads = 4,
                                                  .num_kv_heads = 2,
                                                  .head_dim = has_linear ? 128 : 32,
                                                  .max_position = 512,
                                                  .num_experts = 4,
                                                  .expert_size = 32});
  config.mtp = nn::MtpConfig{};
  config.attends_to_latents = family.ends_with("_latents");
  return config;
}

struct HeadLab {
  HeadLab() : session(make_test_runtime(), 2) {}
  ops::OpContext& ctx() { return session.context(); }
  nn::WeightsPtr weights(const nn::ModelConfig& config, std::uint64_t seed, bool has_head = true) {
    nn::Parameters parameters(ctx().runtime, config);
    parameters.init_random(seed, 0.2f);
    const nn::WeightsPtr model =
        nn::make_weights(ctx(), parameters, DType::kBF16, PolicyVersion{static_cast<std::int64_t>(seed)}, false, nullptr);
    if (!has_head) return model;
    nn::Parameters of_head(ctx().runtime, nn::mtp_head_config(config));
    of_head.init_random(seed + 1, 0.2f);
    return nn::with_mtp_head(model, nn::make_mtp_head(ctx(), of_head, *model, false));
  }
  static EngineOptions options(std::int64_t num_tokens) {
    EngineOptions options;
    options.max_model_len = 200;
    options.num_blocks = 120;
    options.max_num_seqs = 8;
    options.max_num_batched_tokens = 48;
    options.num_threads = 2;
    options.drafts.num_tokens = num_tokens;
    options.drafts.adapts = false;  // or times decide how many there are
    options.drafts.from_head = true;
    return options;
  }
  /// Greedy and sampled requests, of prompts that are shared and end at the ends of blocks, and some that are longer than a step.
  static std::vector<wire::GenerateRequest> requests() {
    std::vector<wire::GenerateRequest> all;
    for (std::uint64_t i = 0; i < 12; ++i) {
      wire::GenerateRequest request;
      Rng rng(i % 3);
      for (std::uint64_t n = 0; n < 16 + (i % 3) * 32 + (i == 11 ? 1 : 0); ++n)
        request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(kHeadVocab))));
      wire::SamplingParams& s = request.sampling;
      s.max_tokens = static_cast<std::int32_t>(8 + 5 * i);
      s.seed = i;
      s.temperature = i % 4 == 0 ? 0.0f : 1.0f;
      s.ignore_eos = true;
      if (i % 4 == 2) s.logprobs = 2;
      if (i == 7) s.repetition_penalty = 1.2f;  // has no drafts
      all.push_back(std::move(request));
    }
    return all;
  }
  struct Run {
    std::vector<wire::GenerateOutput> outputs;
    EngineStats stats;
  };
  Run run(const nn::WeightsPtr& weights, const EngineOptions& options) {
    Engine engine(ctx().runtime, options, weights);
    Run out;
    for (int round = 0; round < 2; ++round) {
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
    }
  }
  ops::OpSession session;
};

class MtpFamilies : public ::testing::TestWithParam<const char*> {};

TEST_P(MtpFamilies, ChangeNoBit) {
  HeadLab lab;
  const nn::WeightsPtr weights = lab.weights(model_with_head(GetParam()), 7);
  const HeadLab::Run wanted = lab.run(weights, HeadLab::options(0));
  for (const std::int64_t num_drafts : {1, 3}) {
    SCOPED_TRACE(num_drafts);
    const HeadLab::Run found = lab.run(weights, HeadLab::options(num_drafts));
    HeadLab::expect_same(found, wanted);
    EXPECT_GT(found.stats.num_accepted_tokens, 20);
    EXPECT_GT(found.stats.num_draft_tokens, found.stats.num_accepted_tokens);
  }
}
INSTANTIATE_TEST_SUITE_P(Families, MtpFamilies, ::testing::Values("qwen3", "qwen3_5_text", "glm4_moe"));

/// The first of two devices that share the layers has the head.
TEST_P(MtpFamilies, ChangeNoBitOnSeveralDevices) {
  HeadLab lab;
  ops::OpSession second(make_test_device(1), 1);
  ops::OpContext* const devices[] = {&lab.ctx(), &second.context()};
  const nn::ModelConfig config = model_with_head(GetParam());
  nn::Parameters parameters(lab.ctx().runtime, config), of_head(lab.ctx().runtime, nn::mtp_head_config(config));
  parameters.init_random(7, 0.2f);
  of_head.init_random(8, 0.2f);
  const nn::WeightsPtr parts =
      nn::load_shared_weights(devices, config, nn::flat_values(lab.ctx(), parameters, DType::kBF16), PolicyVersion{7}, nullptr);
  const HeadLab::Run wanted = lab.run(lab.weights(config, 7), HeadLab::options(3));
  const HeadLab::Run found = lab.run(nn::with_mtp_head(parts, nn::make_mtp_head(lab.ctx(), of_head, *parts, false)), HeadLab::options(3));
  HeadLab::expect_same(found, wanted);
  EXPECT_GT(found.stats.num_accepted_tokens, 20);
}

TEST(MtpDrafts, NorWhereSequencesArePreempted) {
  HeadLab lab;
  const nn::WeightsPtr weights = lab.weights(model_with_head("qwen3"), 7);
  const HeadLab::Run wanted = lab.run(weights, HeadLab::options(0));
  EngineOptions options = HeadLab::options(3);
  options.num_blocks = 15;
  options.max_num_batched_tokens = 20;
  const HeadLab::Run found = lab.run(weights, options);
  HeadLab::expect_same(found, wanted);
  EXPECT_GT(found.stats.num_preemptions, 0);
  EXPECT_GT(found.stats.num_accepted_tokens, 20);
}

TEST(MtpDrafts, HiddenStatesComeBackFromHostMemoryWithTheirBlocks) {
  HeadLab lab;
  const nn::WeightsPtr weights = lab.weights(model_with_head("qwen3"), 7);
  // Prompts one after the other, of which the cache holds one or two at a time, and all of them again.
  const auto run = [&](std::int64_t num_blocks, std::int64_t num_host_blocks) {
    EngineOptions options = HeadLab::options(1);
    options.num_blocks = num_blocks;
    options.num_host_blocks = num_host_blocks;
    Engine engine(lab.ctx().runtime, options, weights);
    std::vector<std::vector<std::int32_t>> tokens;
    for (std::uint64_t i = 0; i < 8; ++i) {
      wire::GenerateRequest request;
      Rng rng(i % 4);
      for (int n = 0; n < 80; ++n)
        request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(kHeadVocab))));
      request.sampling.max_tokens = 30;
      request.sampling.seed = i;
      request.sampling.ignore_eos = true;
      testing::Inbox inbox;
      engine.submit(std::move(request), [&](const StepEvent& event) { inbox.push(event); });
      tokens.push_back(inbox.wait().output.token_ids);
    }
    engine.proof(std::chrono::seconds(60));  // between two steps: what the last one did is counted
    return std::pair(tokens, engine.stats());
  };
  const auto roomy = run(200, 0), small = run(14, 100);
  EXPECT_EQ(small.first, roomy.first);
  EXPECT_GT(small.second.num_host_hit_tokens, 0);
  EXPECT_EQ(small.second.num_accepted_tokens, roomy.second.num_accepted_tokens) << "the drafts are the same, too";
  EXPECT_GT(roomy.second.num_accepted_tokens, 20);
}

/// The tokens of a greedy request, and the drafts that a head makes for it one after the other, by passes over all of it.
struct Replayed {
  std::int64_t num_drafts = 0, num_accepted = 0;
};
Replayed replay(HeadLab& lab, const nn::Weights& weights, std::span<const std::int32_t> tokens, std::int64_t num_prompt_tokens,
                std::int64_t most_drafts) {
  const auto length = static_cast<std::int64_t>(tokens.size());
  nn::InferenceModel model(lab.ctx()), head(lab.ctx());
  std::vector<std::int32_t> positions;
  for (std::int32_t i = 0; i < length; ++i) positions.push_back(i);
  const std::vector<std::int32_t> whole{0, static_cast<std::int32_t>(length)};
  const TensorView h_TH = model.forward_packed(weights, {tokens, positions, whole});
  const std::int64_t H = h_TH.shape.num_cols();
  const std::size_t row_bytes = static_cast<std::size_t>(H) * size_of(h_TH.dtype);
  const Tensor hidden = Tensor::empty(lab.ctx().runtime, {length + most_drafts, H}, h_TH.dtype);
  const auto row = [&](std::int64_t i) { return hidden.as<std::byte>() + static_cast<std::size_t>(i) * row_bytes; };
  Replayed out;
  // The first token behind the prompt is drawn without drafts.
  for (std::int64_t n = num_prompt_tokens + 1; n < length;) {
    lab.ctx().runtime->copy_within(row(0), h_TH.data, static_cast<std::size_t>(n) * row_bytes);
    std::vector<std::int32_t> ids(tokens.begin() + 1, tokens.begin() + n);
    const std::int64_t count = std::min(most_drafts, length - n - 1);
    std::int64_t accepted = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::vector<std::int32_t> seqlens{0, static_cast<std::int32_t>(ids.size())};
      std::vector<std::int32_t> at(positions.begin(), positions.begin() + static_cast<std::ptrdiff_t>(ids.size()));
      nn::PackedBatch batch{ids, at, seqlens};
      const auto num_pairs = static_cast<std::int64_t>(ids.size());
      batch.hidden_TH = hidden.view().rows(0, num_pairs);
      const TensorView out_TH = head.forward_packed(*weights.mtp, batch);
      lab.ctx().runtime->copy_within(row(num_pairs), out_TH.rows(num_pairs - 1, 1).data, row_bytes);
      const TensorView logits = head.logits(*weights.mtp, out_TH.rows(num_pairs - 1, 1));
      std::vector<float> values(static_cast<std::size_t>(kHeadVocab));
      lab.ctx().runtime->copy_to_host(values.data(), logits.data, values.size() * sizeof(float));
      ids.push_back(static_cast<std::int32_t>(std::ranges::max_element(values) - values.begin()));
      if (accepted == i && ids.back() == tokens[static_cast<std::size_t>(n + i)]) ++accepted;
    }
    out.num_drafts += count;
    out.num_accepted += accepted;
    n += accepted + 1;
  }
  return out;
}

TEST(MtpDrafts, AreThoseOfTheHeadOverTheModelsHiddenStates) {
  HeadLab lab;
  std::int64_t num_accepted = 0;
  for (const std::uint64_t seed : {11, 12, 13}) {
    const nn::WeightsPtr weights = lab.weights(model_with_head("qwen3"), seed);
    for (const std::int64_t num_drafts : {1, 3}) {
      SCOPED_TRACE(num_drafts);
      Engine engine(lab.ctx().runtime, HeadLab::options(num_drafts), weights);
      wire::GenerateRequest request;
      Rng rng(seed);
      for (int i = 0; i < 60; ++i)  // more than a step takes
        request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(kHeadVocab))));
      request.sampling.max_tokens = 60;
      request.sampling.temperature = 0.0f;
      request.sampling.ignore_eos = true;
      testing::Inbox inbox;
      engine.submit(request, [&](const StepEvent& event) { inbox.push(event); });
      std::vector<std::int32_t> tokens = request.prompt_ids;
      const std::vector<std::int32_t> drawn = inbox.wait().output.token_ids;
      tokens.insert(tokens.end(), drawn.begin(), drawn.end());
      const Replayed wanted = replay(lab, *weights, tokens, std::ssize(request.prompt_ids), num_drafts);
      engine.proof(std::chrono::seconds(60));  // between two steps: what the last one did is counted
      const EngineStats stats = engine.stats();
      EXPECT_EQ(stats.num_draft_tokens, wanted.num_drafts);
      EXPECT_EQ(stats.num_accepted_tokens, wanted.num_accepted);
      num_accepted += wanted.num_accepted;
    }
  }
  EXPECT_GT(num_accepted, 20);
}

TEST(MtpDrafts, NewWeightsTakeTheHeadAlongOrBringTheirOwn) {
  HeadLab lab;
  const nn::ModelConfig config = model_with_head("qwen3");
  const nn::WeightsPtr first = lab.weights(config, 7);
  const auto run = [&](std::int64_t num_drafts, bool brings_head) {
    Engine engine(lab.ctx().runtime, HeadLab::options(num_drafts), first);
    std::vector<testing::Inbox> inboxes(HeadLab::requests().size());
    std::vector<std::vector<std::int32_t>> tokens;
    const auto serve = [&] {
      std::size_t next = 0;
      for (wire::GenerateRequest request : HeadLab::requests())
        engine.submit(std::move(request), [inbox = &inboxes[next++]](const StepEvent& event) { inbox->push(event); });
    };
    serve();
    for (testing::Inbox& inbox : inboxes) tokens.push_back(inbox.wait().output.token_ids);
    EXPECT_EQ(engine.update_weights(lab.weights(config, 20, brings_head), std::chrono::seconds(60)).version, PolicyVersion{20});
    EXPECT_NE(engine.weights()->mtp, nullptr);
    inboxes = std::vector<testing::Inbox>(inboxes.size());
    serve();
    for (testing::Inbox& inbox : inboxes) tokens.push_back(inbox.wait().output.token_ids);
    return std::pair(tokens, engine.stats().num_accepted_tokens);
  };
  const auto wanted = run(0, true);
  for (const bool brings_head : {false, true}) {
    const auto found = run(3, brings_head);
    EXPECT_EQ(found.first, wanted.first);
    EXPECT_GT(found.second, 20);
  }
}

TEST(MtpDrafts, AModelWithoutAHeadIsRefusedByName) {
  HeadLab lab;
  try {
    Engine engine(lab.ctx().runtime, HeadLab::options(2), lab.weights(model_with_head("qwen3"), 7, /*has_head=*/false));
    FAIL() << "was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string_view(error.what()).find("wanted a model with a head for multi-token prediction"), std::string_view::npos);
  }
}

}  // namespace
}  // namespace prl::engine
