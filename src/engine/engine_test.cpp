// The engine over a real model: its log-probabilities are the trainer's, bit for bit, whatever the engine did to get them.
#include "engine/engine.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#include "base/rng.hpp"
#include "base/testing/eventually.hpp"
#include "engine/core.hpp"
#include "engine/paged_runner.hpp"
#include "engine/resolve_request.hpp"
#include "engine/test_support.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"

namespace {
std::atomic<std::int64_t> num_allocations{0};
}

// Counts every allocation of this test program. Sanitizers have their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // inlining shows the compiler the free() of the pair
void* operator new(std::size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* pointer = std::malloc(size == 0 ? 1 : size)) return pointer;
  throw std::bad_alloc();
}
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { std::free(pointer); }
#endif

namespace prl::engine {
namespace {
using namespace std::chrono_literals;
using testing::Collected;
using testing::Inbox;
using wire::FinishReason;

using prl::testing::kPatience;
constexpr std::int64_t kVocabSize = 1100;  // two chunks of the vocabulary, the second not full

/// One small model, held as the trainer holds it.
struct Model {
  explicit Model(const std::string& family, DType compute_dtype, bool tied = true, std::int64_t window = 0)
      : session(make_cpu_runtime(), 2), compute(compute_dtype) {
    config =
        nn::make_model_config({.family = family.substr(0, family.find("_latents")),
                               .vocab_size = kVocabSize,
                               .hidden_size = 64,
                               .intermediate_size = 96,
                               .num_layers = family == "nemotron_h" ? 5 : 2,  // of each kind
                               .num_heads = 4,
                               .num_kv_heads = 2,
                               .head_dim = family == "qwen3_5_text" || family == "qwen3_next" ? 64 : 16,  // of which it rotates a quarter
                               .max_position = 512,
                               .sliding_window = window,
                               .tie_word_embeddings = tied});
    config.attends_to_latents = family.ends_with("_latents");
    parameters = std::make_unique<nn::Parameters>(session.context().runtime, config);
    parameters->init_random(7, 0.2f);
    trainable = std::make_unique<nn::TrainableModel>(session.context(), *parameters, nn::ActivationCheckpointing{});
  }
  nn::WeightsPtr weights(std::int64_t version = 1) {
    return nn::make_weights(session.context(), *parameters, compute, PolicyVersion{version}, false, nullptr);
  }
  /// The trainer's log-probabilities of `continuation` after `prompt`.
  std::vector<float> evaluate(const nn::WeightsPtr& weights_now, const std::vector<std::int32_t>& prompt,
                              const std::vector<std::int32_t>& continuation, float temperature) {
    std::vector<std::int32_t> ids = prompt;
    ids.insert(ids.end(), continuation.begin(), continuation.end());
    std::vector<std::int32_t> positions(ids.size()), targets(ids.begin() + 1, ids.end());
    for (std::size_t i = 0; i < ids.size(); ++i) positions[i] = static_cast<std::int32_t>(i);
    targets.push_back(-1);
    const std::vector<float> temperatures(ids.size(), temperature);
    const std::vector<std::int32_t> cu_seqlens = {0, static_cast<std::int32_t>(ids.size())};
    const auto stats = trainable->evaluate(weights_now, {ids, positions, cu_seqlens}, targets, temperatures);
    return {stats.logp_T.begin() + static_cast<std::ptrdiff_t>(prompt.size()) - 1, stats.logp_T.end() - 1};
  }

  ops::OpSession session;
  DType compute;
  nn::ModelConfig config;
  std::unique_ptr<nn::Parameters> parameters;
  std::unique_ptr<nn::TrainableModel> trainable;
};

std::shared_ptr<Inbox> submit(Engine& engine, const wire::GenerateRequest& request) {
  auto inbox = std::make_shared<Inbox>();
  engine.submit(request, [inbox](const StepEvent& event) { inbox->push(event); });
  return inbox;
}
wire::GenerateOutput generate(Engine& engine, const wire::GenerateRequest& request) { return submit(engine, request)->wait().output; }

std::vector<std::int32_t> random_prompt(std::size_t length, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<std::int32_t> prompt(length);
  for (auto& id : prompt) id = static_cast<std::int32_t>(rng.next_below(kVocabSize));
  return prompt;
}

wire::GenerateRequest request_of(std::vector<std::int32_t> prompt, std::int32_t max_tokens, std::uint64_t seed, float temperature = 1.0f) {
  wire::GenerateRequest request;
  request.prompt_ids = std::move(prompt);
  request.sampling.max_tokens = max_tokens;
  request.sampling.seed = seed;
  request.sampling.temperature = temperature;
  request.sampling.ignore_eos = true;
  return request;
}

EngineOptions small_options() {
  EngineOptions options;
  options.max_model_len = 256;
  options.num_blocks = 128;
  options.max_num_seqs = 16;
  options.num_state_snapshots = 16;
  options.num_threads = 2;
  return options;
}

std::vector<std::uint32_t> bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> out;
  for (const float value : values) out.push_back(std::bit_cast<std::uint32_t>(value));
  return out;
}

struct Kind {
  const char* family;
  DType compute;
  std::int64_t window = 0;
};

class Exactness : public ::testing::TestWithParam<Kind> {
 protected:
  Exactness() : model_(GetParam().family, GetParam().compute, true, GetParam().window), weights_(model_.weights()) {}
  void make(const EngineOptions& options) { engine_ = std::make_unique<Engine>(model_.session.context().runtime, options, weights_); }
  void expect_exact(const wire::GenerateRequest& request, const wire::GenerateOutput& output) {
    const float temperature = request.sampling.temperature == 0.0f ? 1.0f : request.sampling.temperature;
    ASSERT_EQ(output.token_ids.size(), static_cast<std::size_t>(*request.sampling.max_tokens)) << output.error;
    EXPECT_EQ(bits(output.logprobs), bits(model_.evaluate(weights_, request.prompt_ids, output.token_ids, temperature)));
  }
  /// Requests of many shapes, a few with equal beginnings.
  static std::vector<wire::GenerateRequest> mixed() {
    std::vector<wire::GenerateRequest> requests;
    const float temperatures[] = {1.0f, 0.7f, 0.0f, 1.3f};
    for (std::uint64_t i = 0; i < 12; ++i) {
      auto prompt = random_prompt(1 + (i * 37) % 90, i % 3);
      if (i >= 9) prompt.push_back(static_cast<std::int32_t>(i));
      requests.push_back(request_of(prompt, static_cast<std::int32_t>(5 + (i * 11) % 60), i, temperatures[i % 4]));
    }
    return requests;
  }
  std::vector<wire::GenerateOutput> run_together(const std::vector<wire::GenerateRequest>& requests) {
    engine_->pause(kPatience);  // so that they meet in one batch
    std::vector<std::shared_ptr<Inbox>> inboxes;
    for (const auto& request : requests) inboxes.push_back(submit(*engine_, request));
    engine_->resume();
    std::vector<wire::GenerateOutput> outputs;
    for (auto& inbox : inboxes) outputs.push_back(inbox->wait().output);
    return outputs;
  }
  void expect_all_exact(const std::vector<wire::GenerateRequest>& requests, const std::vector<wire::GenerateOutput>& outputs) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(i);
      expect_exact(requests[i], outputs[i]);
    }
  }

  Model model_;
  nn::WeightsPtr weights_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(Exactness, ARequestAlone) {
  make(small_options());
  for (const auto& request : {request_of(random_prompt(33, 1), 70, 1), request_of(random_prompt(1, 2), 20, 2, 0.6f),
                              request_of(random_prompt(64, 3), 20, 3, 0.0f)}) {
    expect_exact(request, generate(*engine_, request));
  }
}

TEST_P(Exactness, AMixedBatchDrawsTheTokensOfRequestsAlone) {
  make(small_options());
  const auto requests = mixed();
  const auto together = run_together(requests);
  expect_all_exact(requests, together);
  engine_->reset_prefix_cache();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto alone = generate(*engine_, requests[i]);
    EXPECT_EQ(alone.token_ids, together[i].token_ids) << i;
    EXPECT_EQ(bits(alone.logprobs), bits(together[i].logprobs)) << i;
  }
}

TEST_P(Exactness, ChunkedPrefill) {
  auto options = small_options();
  options.max_num_batched_tokens = 7;
  make(options);
  const auto requests = mixed();
  expect_all_exact(requests, run_together(requests));
}

TEST_P(Exactness, PrefixHit) {
  make(small_options());
  const auto request = request_of(random_prompt(77, 1), 30, 1);
  const auto first = generate(*engine_, request);
  const auto second = generate(*engine_, request);
  EXPECT_EQ(first.num_cached_tokens, 0);
  EXPECT_EQ(second.num_cached_tokens, 64);
  EXPECT_EQ(second.token_ids, first.token_ids);
  expect_exact(request, second);
}

TEST_P(Exactness, AfterPreemption) {
  auto options = small_options();
  options.max_model_len = 160;
  options.num_blocks = 12;
  make(options);
  const auto requests = mixed();
  const auto outputs = run_together(requests);
  EXPECT_GT(engine_->stats().num_preemptions, 0);
  expect_all_exact(requests, outputs);
}

TEST_P(Exactness, TinyBlocksWithoutCache) {
  auto options = small_options();
  options.block_size = 1;
  options.num_blocks = 256;
  options.enable_prefix_caching = false;
  options.max_num_batched_tokens = 33;
  make(options);
  const auto requests = mixed();
  expect_all_exact(requests, run_together(requests));
}

TEST_P(Exactness, AConversationResumedFromTheCache) {
  make(small_options());
  auto request = request_of(random_prompt(20, 1), 30, 1);
  for (int turn = 0; turn < 3; ++turn) {
    const auto output = generate(*engine_, request);
    if (turn > 0) {
      EXPECT_GT(output.num_cached_tokens, 0);
    }
    expect_exact(request, output);
    request.prompt_ids.insert(request.prompt_ids.end(), output.token_ids.begin(), output.token_ids.end());
    for (const auto id : random_prompt(9, 50)) request.prompt_ids.push_back(id);
  }
}

TEST_P(Exactness, PromptLogprobs) {
  for (const std::int64_t budget : {2048, 7}) {
    auto options = small_options();
    options.max_num_batched_tokens = budget;
    make(options);
    auto request = request_of(random_prompt(70, 1), 3, 1, 0.5f);
    generate(*engine_, request);  // a prefix that must not be used
    request.sampling.prompt_logprobs = 2;
    request.sampling.prompt_ranks = true;
    const auto output = generate(*engine_, request);
    ASSERT_EQ(output.prompt_logprobs.size(), 70u);
    EXPECT_EQ(output.prompt_logprobs[0], 0.0f);
    const std::vector<std::int32_t> first(request.prompt_ids.begin(), request.prompt_ids.begin() + 1),
        rest(request.prompt_ids.begin() + 1, request.prompt_ids.end());
    EXPECT_EQ(bits({output.prompt_logprobs.begin() + 1, output.prompt_logprobs.end()}), bits(model_.evaluate(weights_, first, rest, 1.0f)));
    ASSERT_EQ(output.prompt_top_logprobs.size(), 70u);
    EXPECT_TRUE(output.prompt_top_logprobs[0].empty());
    for (std::size_t i = 1; i < 70; ++i) {
      ASSERT_EQ(output.prompt_top_logprobs[i].size(), 2u);
      EXPECT_GE(output.prompt_top_logprobs[i][0].logprob, output.prompt_top_logprobs[i][1].logprob);
      EXPECT_GE(output.prompt_top_logprobs[i][0].logprob, output.prompt_logprobs[i]);
      for (const auto& top : output.prompt_top_logprobs[i]) {
        if (top.id == request.prompt_ids[i]) {
          EXPECT_EQ(top.logprob, output.prompt_logprobs[i]);
        }
      }
    }
    // The rank says how many of all tokens are likelier, inside the list and outside. Each of them is a pass of the trainer.
    ASSERT_EQ(output.prompt_ranks.size(), 70u);
    EXPECT_EQ(output.prompt_ranks[0], 0);
    for (const std::size_t i : budget == 7 ? std::vector<std::size_t>{} : std::vector<std::size_t>{1, 47}) {
      std::int32_t likelier = 0;
      const std::vector<std::int32_t> before(request.prompt_ids.begin(), request.prompt_ids.begin() + static_cast<std::ptrdiff_t>(i));
      for (std::int32_t id = 0; id < model_.config.vocab_size; ++id) {
        const float other = model_.evaluate(weights_, before, {id}, 1.0f)[0];
        likelier += other > output.prompt_logprobs[i] || (other == output.prompt_logprobs[i] && id < request.prompt_ids[i]);
      }
      EXPECT_EQ(output.prompt_ranks[i], likelier + 1) << i;
    }
    request.sampling.prompt_logprobs = 0;
    EXPECT_EQ(generate(*engine_, request).prompt_ranks, output.prompt_ranks) << "without a list too";
    request.sampling.prompt_logprobs = 2;
    expect_exact(request, output);
  }
}

TEST_P(Exactness, AlternativesHoldTheDrawnTokensLogprob) {
  make(small_options());
  auto request = request_of(random_prompt(40, 1), 12, 1);
  request.sampling.logprobs = 20;
  const auto output = generate(*engine_, request);
  expect_exact(request, output);
  ASSERT_EQ(output.top_logprobs.size(), output.token_ids.size());
  for (std::size_t i = 0; i < output.token_ids.size(); ++i) {
    ASSERT_EQ(output.top_logprobs[i].size(), 20u);
    for (const auto& top : output.top_logprobs[i]) {
      if (top.id == output.token_ids[i]) {
        EXPECT_EQ(top.logprob, output.logprobs[i]);
      }
    }
  }
}

TEST_P(Exactness, AnUpdateShowsInVersionsProofAndCache) {
  make(small_options());
  const auto request = request_of(random_prompt(40, 1), 10, 1);
  EXPECT_EQ(generate(*engine_, request).versions, std::vector<std::int64_t>(10, 1));
  const WeightProof before = engine_->proof(kPatience);
  EXPECT_EQ(before.version, PolicyVersion{1});
  EXPECT_EQ(before.checksum, nn::checksum(*weights_).combined);

  // One weight of one matrix.
  model_.parameters->value(nn::Block::kO, 1).as<float>()[5] += 0.25f;
  const nn::WeightsPtr changed = model_.weights(2);
  const WeightProof after = engine_->update_weights(changed, kPatience);
  EXPECT_EQ(after.version, PolicyVersion{2});
  EXPECT_NE(after.checksum, before.checksum);
  EXPECT_NE(bits(after.probe_logprobs), bits(before.probe_logprobs));
  const auto prompt = nn::probe_prompt(kVocabSize);
  const std::vector<std::int32_t> first(prompt.begin(), prompt.begin() + 1), rest(prompt.begin() + 1, prompt.end());
  EXPECT_EQ(bits(after.probe_logprobs), bits(model_.evaluate(changed, first, rest, 1.0f)));

  weights_ = changed;
  const auto output = generate(*engine_, request);
  EXPECT_EQ(output.num_cached_tokens, 0);
  EXPECT_EQ(output.versions, std::vector<std::int64_t>(10, 2));
  expect_exact(request, output);
}

INSTANTIATE_TEST_SUITE_P(
    Models, Exactness,
    ::testing::Values(Kind{"llama", DType::kF32}, Kind{"llama", DType::kBF16}, Kind{"qwen3", DType::kF32}, Kind{"qwen3", DType::kBF16},
                      Kind{"smollm3", DType::kBF16}, Kind{"olmo2", DType::kBF16}, Kind{"phi3", DType::kBF16},
                      Kind{"mistral", DType::kBF16, 10}, Kind{"qwen3", DType::kF32, 10}, Kind{"qwen3_5_text", DType::kF32},
                      Kind{"qwen3_5_text", DType::kBF16}, Kind{"qwen3_next", DType::kF32}, Kind{"qwen3_next", DType::kBF16},
                      Kind{"minimax_m2", DType::kF32}, Kind{"minimax_m2", DType::kBF16}, Kind{"deepseek_v3", DType::kF32},
                      Kind{"deepseek_v3", DType::kBF16}, Kind{"deepseek_v3_latents", DType::kF32},
                      Kind{"deepseek_v3_latents", DType::kBF16}, Kind{"gemma3_text", DType::kBF16}, Kind{"gemma3_text", DType::kF32, 10},
                      Kind{"gemma3_text", DType::kBF16, 10}, Kind{"afmoe", DType::kF32, 10}, Kind{"afmoe", DType::kBF16, 10},
                      Kind{"afmoe", DType::kBF16}, Kind{"gpt_oss", DType::kF32, 10}, Kind{"gpt_oss", DType::kBF16, 10},
                      Kind{"gpt_oss", DType::kBF16}, Kind{"nemotron_h", DType::kF32}, Kind{"nemotron_h", DType::kBF16}),
    [](const auto& kind) {
      return std::string(kind.param.family) + (kind.param.compute == DType::kF32 ? "F32" : "BF16") +
             (kind.param.window > 0 ? "Window" : "");
    });

TEST(Engine, AnUpdateInFlightKeepsTheRequestAndMarksItsTokens) {
  Model model("llama", DType::kF32);
  Engine engine(model.session.context().runtime, small_options(), model.weights(1));
  const auto request = request_of(random_prompt(20, 1), 12, 1);
  auto inbox = std::make_shared<Inbox>();
  std::mutex mutex;
  std::condition_variable changed;
  int num_tokens = 0;
  bool may_go_on = false;
  engine.submit(request, [&](const StepEvent& event) {
    inbox->push(event);
    std::unique_lock lock(mutex);
    if (++num_tokens != 5) return;
    changed.notify_all();
    PRL_CHECK(changed.wait_for(lock, kPatience, [&] { return may_go_on; }), "never let go");
  });
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, kPatience, [&] { return num_tokens == 5; }));
  }
  std::thread pauser([&] { engine.pause(kPatience); });
  EXPECT_TRUE(prl::testing::eventually([&] { return engine.stats().is_paused; }));
  {
    std::lock_guard lock(mutex);
    may_go_on = true;
    changed.notify_all();
  }
  pauser.join();
  model.parameters->value(nn::Block::kDown, 0).as<float>()[3] += 0.5f;
  engine.update_weights(model.weights(2), kPatience);
  engine.resume();
  const auto output = inbox->wait().output;
  EXPECT_EQ(output.versions, (std::vector<std::int64_t>{1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(output.version_start, PolicyVersion{1});
  EXPECT_EQ(output.version_end, PolicyVersion{2});
}

TEST(Engine, NonFiniteLogitsEndTheirRequestOnly) {
  Model model("llama", DType::kF32, false);
  const std::int64_t H = model.config.hidden_size;
  for (std::int64_t i = 0; i < H; ++i)
    model.parameters->value(nn::Block::kEmbedding).as<float>()[13 * H + i] = std::numeric_limits<float>::quiet_NaN();
  const auto weights = model.weights();
  Engine engine(model.session.context().runtime, small_options(), weights);
  auto bad = request_of({1, 2, 13, 4}, 10, 1);
  bad.sampling.prompt_logprobs = 0;
  auto good = request_of({1, 2, 3, 4}, 10, 1);
  good.sampling.logit_bias[13] = -100.0f;
  engine.pause(kPatience);
  const auto bad_inbox = submit(engine, bad), worse_inbox = submit(engine, request_of({13}, 10, 1)), good_inbox = submit(engine, good);
  engine.resume();
  for (const auto& inbox : {bad_inbox, worse_inbox}) {
    const auto& choice = inbox->wait().output;
    EXPECT_EQ(choice.finish_reason, FinishReason::kError);
    EXPECT_THAT(choice.error, ::testing::HasSubstr("not finite"));
    EXPECT_TRUE(choice.token_ids.empty());
  }
  const auto& choice = good_inbox->wait().output;
  EXPECT_EQ(choice.finish_reason, FinishReason::kLength);
  for (const float logprob : choice.logprobs) EXPECT_TRUE(std::isfinite(logprob));
}

TEST(Engine, BiasForcesAndBansTokens) {
  Model model("qwen3", DType::kF32);
  Engine engine(model.session.context().runtime, small_options(), model.weights());
  auto request = request_of(random_prompt(10, 1), 6, 1);
  request.sampling.logit_bias[42] = 100.0f;
  EXPECT_EQ(generate(engine, request).token_ids, std::vector<std::int32_t>(6, 42));
  request.sampling.stop_token_ids = {42};
  request.sampling.min_tokens = 3;
  const auto output = generate(engine, request);
  EXPECT_EQ(output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(output.stop_token_id, 42);
  ASSERT_EQ(output.token_ids.size(), 4u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NE(output.token_ids[i], 42);
}

TEST(Engine, RefusesWhatCannotWorkWithNumbers) {
  Model model("llama", DType::kF32);
  auto options = small_options();
  options.num_blocks = 15;
  try {
    Engine engine(model.session.context().runtime, options, model.weights());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(),
                ::testing::AllOf(::testing::HasSubstr("256"), ::testing::HasSubstr("16 KV blocks"), ::testing::HasSubstr("has 15")));
  }
  options.num_blocks = 1'000'000'000;
  try {
    Engine engine(model.session.context().runtime, options, model.weights());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("KV cache of 1000000000 blocks"));
  }
  Engine engine(model.session.context().runtime, small_options(), model.weights());
  const auto other = Model("llama", DType::kBF16).weights();
  EXPECT_THROW(engine.update_weights(other, kPatience), Error);
  EXPECT_EQ(engine.weights()->compute, DType::kF32);
}

/// Allocations per step of steady decoding with `num_sequences`, after warm-up.
std::int64_t allocations_per_step(Model& model, std::int64_t num_sequences) {
  auto options = small_options();
  options.max_num_seqs = num_sequences;
  options.num_blocks = num_sequences * 16;
  CoreOptions core_options;
  core_options.num_blocks = options.num_blocks;
  core_options.block_size = options.block_size;
  core_options.scheduler.max_num_seqs = num_sequences;
  EngineCore core(core_options, std::make_unique<PagedRunner>(model.session.context().runtime, options, model.weights()));
  std::int64_t num_tokens = 0;
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    auto request = request_of(random_prompt(10, static_cast<std::uint64_t>(i)), 200, 1);
    core.add(RequestId{static_cast<std::uint64_t>(i + 1)}, resolve_request(request, options, model.config),
             [&](const StepEvent& event) { num_tokens += static_cast<std::int64_t>(event.delta.token_ids.size()); });
  }
  for (int i = 0; i < 70; ++i) core.step();
  const std::int64_t before = num_allocations.load();
  constexpr int kSteps = 100;
  for (int i = 0; i < kSteps; ++i) core.step();
  EXPECT_EQ(num_tokens, num_sequences * 170);
  return (num_allocations.load() - before) / kSteps;
}

TEST(Engine, TimesStepsByKindWhenAsked) {
  Model model("qwen3", DType::kF32);
  EngineOptions options = small_options();
  options.times = std::make_shared<StepTimes>();
  Engine engine(model.session.context().runtime, options, model.weights());
  generate(engine, request_of(random_prompt(20, 2), 5, 1));
  options.times->start();
  const auto started = std::chrono::steady_clock::now();
  generate(engine, request_of(random_prompt(33, 1), 10, 1));
  engine.shutdown();
  const double total_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  const StepTimes::Kinds sums = options.times->take();
  EXPECT_EQ(sums.prompt.num_steps, 1);
  EXPECT_EQ(sums.decode.num_steps, 9);
  double sum_s = 0;
  for (const StepTimes::Parts& parts : {sums.prompt, sums.decode}) {
    for (const double part_s : {parts.layers_s, parts.head_s, parts.draw_s}) EXPECT_GT(part_s, 0.0);
    sum_s += parts.wait_s + parts.layers_s + parts.head_s + parts.draw_s;
  }
  EXPECT_LT(sum_s, total_s) << "no part is counted twice";
  EXPECT_FALSE(options.times->is_on());
  EXPECT_EQ(options.times->take().decode.num_steps, 0);
}

TEST(Engine, SteadyDecodingAllocatesNoMoreForMoreSequences) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "allocations are not counted under a sanitizer";
#endif
  Model model("llama", DType::kF32);
  const std::int64_t few = allocations_per_step(model, 2), many = allocations_per_step(model, 32);
  EXPECT_LE(many, few + 2) << "2 sequences: " << few << " allocations a step";
  RecordProperty("allocations_per_step", std::to_string(many));
  EXPECT_LT(many, 200);
}

}  // namespace
}  // namespace prl::engine
