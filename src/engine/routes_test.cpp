// Which experts tokens had: the engine's log of them is what the trainer's routers choose, and what it can train with in their place.
// Compiled a second time for a GPU, where steps of decoding are recorded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>

#include "base/rng.hpp"
#include "base/testing/eventually.hpp"
#include "device/testing/test_runtime.hpp"
#include "engine/engine.hpp"
#include "engine/memory.hpp"
#include "engine/test_support.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"

namespace prl::engine {
namespace {
using prl::testing::kPatience;
using testing::Inbox;

constexpr std::int64_t kRoutesVocab = 300, kRoutesBlock = 16;

struct RoutesCase {
  const char* family;
  DType compute;
};

class Routes : public ::testing::TestWithParam<RoutesCase> {
 protected:
  Routes() : session_(make_test_runtime(), 2) {
    config_ = nn::make_model_config({.family = GetParam().family,
                                     .vocab_size = kRoutesVocab,
                                     .hidden_size = 128,
                                     .intermediate_size = 96,
                                     .num_layers = 3,
                                     .num_heads = 4,
                                     .num_kv_heads = 2,
                                     .head_dim = 64,
                                     .max_position = 512,
                                     // A tied head would be sure of repeating a token whose row enters scaled.
                                     .tie_word_embeddings = std::string_view(GetParam().family) != "afmoe",
                                     .num_experts = 8,
                                     .num_active_experts = 2,
                                     .expert_size = 64});
    parameters_ = std::make_unique<nn::Parameters>(session_.context().runtime, config_);
    parameters_->init_random(7, 0.2f);
    trainable_ = std::make_unique<nn::TrainableModel>(session_.context(), *parameters_, nn::ActivationCheckpointing{});
    weights_ = nn::make_weights(session_.context(), *parameters_, GetParam().compute, PolicyVersion{1}, false, nullptr);
  }
  std::unique_ptr<Engine> engine(EngineOptions options = {}) {
    options.max_model_len = 256;
    options.block_size = kRoutesBlock;
    if (options.num_blocks == 0) options.num_blocks = 128;
    options.max_num_seqs = 16;
    options.num_threads = 2;
    options.logs_routes = true;
    options.num_state_snapshots = default_state_snapshots(config_, options.max_num_seqs, options.enable_prefix_caching);
    return std::make_unique<Engine>(session_.context().runtime, options, weights_);
  }
  /// Some begin alike, so that they find each other's blocks.
  static std::vector<wire::GenerateRequest> requests() {
    std::vector<wire::GenerateRequest> all;
    for (std::uint64_t i = 0; i < 8; ++i) {
      wire::GenerateRequest request;
      Rng rng(i % 3);
      for (std::uint64_t n = 0; n < 20 + (i * 29) % 60; ++n)
        request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(kRoutesVocab))));
      request.sampling.max_tokens = static_cast<std::int32_t>(1 + (i * 11) % 40);
      request.sampling.seed = i;
      request.sampling.ignore_eos = true;
      request.sampling.routed_experts_start = 0;
      all.push_back(std::move(request));
    }
    return all;
  }
  static std::vector<wire::GenerateOutput> run(Engine& engine, const std::vector<wire::GenerateRequest>& requests) {
    engine.pause(kPatience);
    std::vector<std::shared_ptr<Inbox>> inboxes;
    for (const wire::GenerateRequest& request : requests) {
      inboxes.push_back(std::make_shared<Inbox>());
      engine.submit(request, [inbox = inboxes.back()](const StepEvent& event) { inbox->push(event); });
    }
    engine.resume();
    std::vector<wire::GenerateOutput> outputs;
    for (const auto& inbox : inboxes) outputs.push_back(inbox->wait().output);
    return outputs;
  }
  /// The trainer's log-probabilities of an output whose tokens have these experts; none: those of the routers.
  std::vector<std::uint32_t> evaluate(const wire::GenerateRequest& request, const wire::GenerateOutput& output,
                                      const wire::RoutedExperts& experts) {
    std::vector<std::int32_t> ids = request.prompt_ids;
    ids.insert(ids.end(), output.token_ids.begin(), output.token_ids.end());
    const std::size_t T = ids.size(), L = static_cast<std::size_t>(config_.num_layers),
                      K = static_cast<std::size_t>(config_.num_active_experts);
    std::vector<std::int32_t> positions(T), targets(ids.begin() + 1, ids.end()), given;
    for (std::size_t i = 0; i < T; ++i) positions[i] = static_cast<std::int32_t>(i);
    targets.push_back(-1);
    if (!experts.empty()) given.assign(L * T * K, -1);
    for (std::size_t t = 0; t < static_cast<std::size_t>(experts.num_tokens()); ++t)
      for (std::size_t l = 0; l < L; ++l)
        for (std::size_t k = 0; k < K; ++k) given[(l * T + t) * K + k] = experts.ids[(t * L + l) * K + k];
    const std::vector<float> temperatures(T, 1.0f);
    const std::vector<std::int32_t> cu_seqlens = {0, static_cast<std::int32_t>(T)};
    const nn::PackedBatch batch{.ids_T = ids, .positions_T = positions, .cu_seqlens = cu_seqlens, .experts_LTK = given};
    const auto stats = trainable_->evaluate(weights_, batch, targets, temperatures);
    return bits({stats.logp_T.begin() + static_cast<std::ptrdiff_t>(request.prompt_ids.size()) - 1, stats.logp_T.end() - 1});
  }
  static std::vector<std::uint32_t> bits(const std::vector<float>& values) {
    std::vector<std::uint32_t> out;
    for (const float value : values) out.push_back(std::bit_cast<std::uint32_t>(value));
    return out;
  }

  ops::OpSession session_;
  nn::ModelConfig config_;
  std::unique_ptr<nn::Parameters> parameters_;
  std::unique_ptr<nn::TrainableModel> trainable_;
  nn::WeightsPtr weights_;
};

TEST_P(Routes, BlocksThatComeBackFromHostMemoryBringTheirExperts) {
  if (!config_.linear.layers.empty()) GTEST_SKIP() << "no blocks in host memory";
  const auto all = requests();
  const auto wanted = run(*engine(), all);
  EngineOptions options;
  options.num_blocks = 17;  // of 256 tokens and one more: each prompt takes the places of others
  options.num_host_blocks = 200;
  const auto small = engine(options);
  for (int round = 0; round < 2; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(fmt::format("round {}, request {}", round, i));
      EXPECT_EQ(run(*small, {all[i]}).front().routed_experts.ids, wanted[i].routed_experts.ids);
    }
  EXPECT_GT(small->stats().num_blocks_restored, 0);
}

TEST_P(Routes, TheTrainerComputesWithTheLoggedExpertsAsWithItsOwn) {
  const auto all = requests();
  const auto outputs = run(*engine(), all);
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    const wire::RoutedExperts& experts = outputs[i].routed_experts;
    ASSERT_EQ(experts.num_tokens(), static_cast<std::int64_t>(all[i].prompt_ids.size() + outputs[i].token_ids.size()) - 1)
        << outputs[i].error;
    EXPECT_EQ(experts.num_layers, 3);
    EXPECT_EQ(experts.top_k, 2);
    const auto sampled = bits(outputs[i].logprobs);
    EXPECT_EQ(evaluate(all[i], outputs[i], {}), sampled);
    EXPECT_EQ(evaluate(all[i], outputs[i], experts), sampled);
    wire::RoutedExperts others = experts;
    for (std::uint16_t& id : others.ids) id = static_cast<std::uint16_t>((id + 1) % 8);
    EXPECT_NE(evaluate(all[i], outputs[i], others), sampled) << "given experts are not taken";
  }
}

TEST_P(Routes, TheLogIsTheSameHoweverTokensCameIntoTheCache) {
  const auto all = requests();
  const auto wanted = run(*engine({.enable_prefix_caching = false}), all);
  const auto expect = [&](Engine& engine, const char* what) {
    for (const int round : {0, 1}) {  // the second finds prompts in the cache
      const auto outputs = run(engine, all);
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_EQ(outputs[i].token_ids, wanted[i].token_ids) << what << round << i;
        EXPECT_EQ(outputs[i].routed_experts, wanted[i].routed_experts) << what << ", round " << round << ", request " << i;
      }
    }
  };
  const auto cached = engine();
  expect(*cached, "prefixes");
  EXPECT_GT(cached->stats().num_prefix_hit_tokens, 0);
  expect(*engine({.max_num_batched_tokens = 24}), "prompts in pieces");
  if (config_.linear.layers.empty()) {
    const auto guessing = engine({.drafts = {.num_tokens = 4}});
    expect(*guessing, "guesses");
    EXPECT_GT(guessing->stats().num_accepted_tokens, 0);
  }
  const auto small = engine({.num_blocks = 18});
  expect(*small, "too few blocks");
  EXPECT_GT(small->stats().num_preemptions, 0);
}

TEST_P(Routes, ARequestSaysFromWhichTokenOn) {
  auto all = requests();
  const auto wanted = run(*engine(), all);
  for (auto& request : all) request.sampling.routed_experts_start = static_cast<std::int64_t>(request.prompt_ids.size()) - 3;
  all[0].sampling.routed_experts_start.reset();
  const auto outputs = run(*engine(), all);
  EXPECT_TRUE(outputs[0].routed_experts.empty()) << "nobody asked";
  for (std::size_t i = 1; i < all.size(); ++i) {
    wire::RoutedExperts joined = wanted[i].routed_experts;
    joined.resize(*all[i].sampling.routed_experts_start);
    joined.append(outputs[i].routed_experts);
    EXPECT_EQ(outputs[i].routed_experts.start, *all[i].sampling.routed_experts_start);
    EXPECT_EQ(joined, wanted[i].routed_experts) << i;
  }
}

TEST_P(Routes, WhatCannotBeToldIsRefused) {
  const auto error_of = [&](Engine& engine, std::int64_t start) {
    wire::GenerateRequest request = requests()[0];
    request.sampling.routed_experts_start = start;
    try {
      engine.submit(request, [](const StepEvent&) {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(error_of(*engine(), 21), ::testing::HasSubstr("between 0 and the 20 tokens"));
  EXPECT_THAT(error_of(*engine(), -1), ::testing::HasSubstr("got -1"));
  EngineOptions options;
  options.num_blocks = 32;
  options.max_model_len = 256;
  Engine silent(session_.context().runtime, options, weights_);
  EXPECT_THAT(error_of(silent, 0), ::testing::HasSubstr("enable_return_routed_experts"));
}

INSTANTIATE_TEST_SUITE_P(
    Families, Routes,
    ::testing::Values(RoutesCase{"qwen3_moe", DType::kF32}, RoutesCase{"qwen3_moe", DType::kBF16}, RoutesCase{"glm4_moe", DType::kF32},
                      RoutesCase{"glm4_moe", DType::kBF16}, RoutesCase{"gpt_oss", DType::kF32}, RoutesCase{"gpt_oss", DType::kBF16},
                      RoutesCase{"qwen3_next", DType::kF32}, RoutesCase{"qwen3_5_moe_text", DType::kBF16},
                      RoutesCase{"minimax_m2", DType::kBF16}, RoutesCase{"afmoe", DType::kBF16}, RoutesCase{"deepseek_v3", DType::kBF16}),
    [](const auto& kind) { return std::string(kind.param.family) + (kind.param.compute == DType::kBF16 ? "_bf16" : "_f32"); });

}  // namespace
}  // namespace prl::engine
