// Decode and prefill speed of the engine on a random model of SmolLM2-135M's shape. items_per_second is tokens per second.
#include <benchmark/benchmark.h>

#include <memory>

#include "base/rng.hpp"
#include "engine/core.hpp"
#include "engine/paged_runner.hpp"
#include "engine/resolve_request.hpp"
#include "nn/init_model.hpp"

namespace prl::engine {
namespace {

constexpr std::int64_t kPromptTokens = 128;
constexpr std::int64_t kMaxModelLen = 2048;

struct Bench {
  static nn::ModelConfig smollm2_135m() {
    nn::InitModelOptions options;
    options.family = "llama";
    options.vocab_size = 49152;
    options.hidden_size = 576;
    options.intermediate_size = 1536;
    options.num_layers = 30;
    options.num_heads = 9;
    options.num_kv_heads = 3;
    options.head_dim = 64;
    options.max_position = kMaxModelLen;
    options.tie_word_embeddings = true;
    return nn::make_model_config(options);
  }
  Bench() : runtime(make_cpu_runtime()), config(smollm2_135m()) {
    ops::OpSession session(runtime, 0);
    nn::Parameters parameters(runtime, config);
    parameters.init_random(1);
    weights = nn::make_weights(session.context(), parameters, DType::kBF16, PolicyVersion{0}, false, nullptr);
  }
  std::unique_ptr<EngineCore> make_core(std::int64_t num_sequences) const {
    EngineOptions options = engine_options(num_sequences);
    CoreOptions core;
    core.num_blocks = options.num_blocks;
    core.block_size = options.block_size;
    core.scheduler.max_num_seqs = num_sequences;
    core.scheduler.max_num_batched_tokens = options.max_num_batched_tokens;
    core.scheduler.enable_prefix_caching = false;
    return std::make_unique<EngineCore>(core, std::make_unique<PagedRunner>(runtime, options, weights));
  }
  static EngineOptions engine_options(std::int64_t num_sequences) {
    EngineOptions options;
    options.max_model_len = kMaxModelLen;
    options.max_num_seqs = num_sequences;
    options.num_blocks = num_sequences * kMaxModelLen / options.block_size;
    options.max_num_batched_tokens = 2048;
    return options;
  }
  ResolvedRequest request(std::uint64_t seed, std::int32_t max_tokens) const {
    Rng rng(seed);
    wire::GenerateRequest request;
    for (std::int64_t i = 0; i < kPromptTokens; ++i)
      request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(config.vocab_size))));
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = true;
    request.sampling.seed = seed;
    return resolve_request(std::move(request), engine_options(1), config);
  }

  std::shared_ptr<DeviceRuntime> runtime;
  nn::ModelConfig config;
  nn::WeightsPtr weights;
};

const Bench& bench() {
  static const Bench made;
  return made;
}

void decode(benchmark::State& state) {
  const std::int64_t num_sequences = state.range(0);
  const auto core = bench().make_core(num_sequences);
  std::int64_t num_tokens = 0;
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    core->add(RequestId{static_cast<std::uint64_t>(i + 1)}, bench().request(static_cast<std::uint64_t>(i), 1900),
              [&](const StepEvent& event) { num_tokens += static_cast<std::int64_t>(event.delta.token_ids.size()); });
  }
  while (num_tokens < 2 * num_sequences) core->step();
  num_tokens = 0;
  for (auto _ : state) core->step();
  state.SetItemsProcessed(num_tokens);
}
BENCHMARK(decode)->Arg(1)->Arg(8)->Arg(32)->MinTime(3.0)->UseRealTime()->Unit(benchmark::kMillisecond);

/// A step of the whole token budget, from prompts.
void prefill(benchmark::State& state) {
  const auto core = bench().make_core(16);
  std::uint64_t id = 0;
  for (auto _ : state) {
    for (int i = 0; i < 16; ++i) {
      ++id;
      core->add(RequestId{id}, bench().request(id, 1), [](const StepEvent&) {});
    }
    core->step();
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(id) * kPromptTokens);
}
BENCHMARK(prefill)->MinTime(2.0)->UseRealTime()->Unit(benchmark::kMillisecond);

/// Checksum and probe, as after each weight update.
void prove(benchmark::State& state) {
  const auto core = bench().make_core(1);
  for (auto _ : state) benchmark::DoNotOptimize(core->runner().prove());
}
BENCHMARK(prove)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace prl::engine
