// SmolLM2-135M shape, random weights: make bench runs it once; times are for two cores unless the machine has more.
#include <benchmark/benchmark.h>

#include "nn/decoder.hpp"
#include "nn/init_model.hpp"

namespace prl::nn {
namespace {

struct Bench {
  Bench() : session(make_cpu_runtime(), 0) {
    InitModelOptions o;
    o.family = "llama";
    o.vocab_size = 49152;
    o.hidden_size = 576;
    o.intermediate_size = 1536;
    o.num_layers = 30;
    o.num_heads = 9;
    o.num_kv_heads = 3;
    o.head_dim = 64;
    o.max_position = 8192;
    parameters = std::make_unique<Parameters>(session.context().runtime, make_model_config(o));
    parameters->init_random(1);
  }
  static Bench& get() {
    static Bench bench;
    return bench;
  }
  WeightsPtr weights(DType compute, bool with_backward) {
    return make_weights(session.context(), *parameters, compute, PolicyVersion{0}, with_backward, nullptr);
  }
  ops::OpSession session;
  std::unique_ptr<Parameters> parameters;
};

DType dtype_of(const benchmark::State& state) { return state.range(0) == 0 ? DType::kF32 : DType::kBF16; }

void BM_MakeWeights(benchmark::State& state) {
  Bench& b = Bench::get();
  WeightsPtr previous = b.weights(dtype_of(state), true);
  for (auto _ : state) previous = make_weights(b.session.context(), *b.parameters, dtype_of(state), PolicyVersion{1}, true, previous);
}
BENCHMARK(BM_MakeWeights)->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond)->UseRealTime();

void BM_Checksum(benchmark::State& state) {
  Bench& b = Bench::get();
  const WeightsPtr weights = b.weights(dtype_of(state), false);
  for (auto _ : state) benchmark::DoNotOptimize(checksum(b.session.context(), *weights).combined);
}
BENCHMARK(BM_Checksum)->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond)->UseRealTime();

/// range(1) tokens in sequences of 512, range(2) = checkpointing frequency.
void BM_TrainStep(benchmark::State& state) {
  Bench& b = Bench::get();
  const WeightsPtr weights = b.weights(dtype_of(state), true);
  const auto T = static_cast<std::size_t>(state.range(1));
  std::vector<std::int32_t> ids(T), positions(T), targets(T), cu_seqlens;
  for (std::size_t i = 0; i < T; ++i) {
    ids[i] = static_cast<std::int32_t>(i * 7919 % 49152);
    targets[i] = static_cast<std::int32_t>((i + 1) * 7919 % 49152);
    positions[i] = static_cast<std::int32_t>(i % 512);
  }
  for (std::size_t i = 0; i <= T; i += 512) cu_seqlens.push_back(static_cast<std::int32_t>(i));
  const std::vector<float> temperatures(T, 1.0f), dlogp(T, -1.0f / static_cast<float>(T));
  TrainableModel model(b.session.context(), *b.parameters, {static_cast<int>(state.range(2))});
  b.parameters->zero_grads();
  for (auto _ : state) {
    benchmark::DoNotOptimize(model.forward(weights, {ids, positions, cu_seqlens}, targets, temperatures).logp_T[0]);
    model.backward(dlogp);
  }
  state.counters["tok/s"] = benchmark::Counter(static_cast<double>(T), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_TrainStep)
    ->Args({0, 1024, 0})
    ->Args({1, 1024, 0})
    ->Args({1, 4096, 0})
    ->Args({1, 4096, 1})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

/// One token of each of range(1) sequences with 128 tokens of context, logits included.
void BM_Decode(benchmark::State& state) {
  Bench& b = Bench::get();
  const WeightsPtr weights = b.weights(dtype_of(state), false);
  const auto B = static_cast<std::int32_t>(state.range(1));
  KvCache cache(b.session.context().runtime, b.parameters->config(), weights->compute, B * 9, 16);
  InferenceModel model(b.session.context());
  std::vector<std::int32_t> ids, positions, slots, query_start{0}, context, table, rows;
  for (std::int32_t s = 0; s < B; ++s) {
    ids.push_back(s + 1);
    positions.push_back(128);
    slots.push_back((s * 9 + 8) * 16);
    query_start.push_back(s + 1);
    context.push_back(129);
    for (std::int32_t j = 0; j < 9; ++j) table.push_back(s * 9 + j);
    rows.push_back(s);
  }
  for (auto _ : state) {
    const TensorView h = model.forward_paged(*weights, cache, {ids, positions, slots, query_start, context, table, 9});
    benchmark::DoNotOptimize(model.logits(*weights, h, rows).data);
  }
  state.counters["tok/s"] = benchmark::Counter(static_cast<double>(B), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Decode)->Args({0, 1})->Args({1, 1})->Args({0, 32})->Args({1, 32})->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace prl::nn
