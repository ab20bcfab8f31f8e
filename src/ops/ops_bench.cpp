#include <benchmark/benchmark.h>

#include <fmt/core.h>

#include <cmath>

#include "base/rng.hpp"
#include "ops/attention.hpp"
#include "ops/cpu/table.hpp"
#include "ops/delta_rule.hpp"
#include "ops/linear_cases.hpp"
#include "ops/lm_head.hpp"
#include "ops/measure.hpp"
#include "ops/pointwise.hpp"

// GFLOP/s and GB/s of the ops at the shapes of real models. PRL_CPU picks the kind. Run with the machine otherwise idle.

namespace prl::ops {
namespace {

OpSession& session() {
  static OpSession s(make_cpu_runtime(), 0);
  return s;
}
OpContext& context() { return session().context(); }

Tensor random(Shape shape, DType dtype, float scale = 1.0f) {
  Tensor t = Tensor::empty(context().runtime, shape, dtype);
  Rng rng(1);
  for (std::int64_t i = 0; i < t.num_elements(); ++i) {
    const float v = scale * (static_cast<float>(rng.next_u32()) * 0x1.0p-31f - 1.0f);
    if (dtype == DType::kBF16)
      t.as<BFloat16>()[i] = to_bf16(v);
    else
      t.as<float>()[i] = v;
  }
  return t;
}

void report(benchmark::State& state, double flops, double bytes) {
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

void bench_linear(benchmark::State& state, LinearCase c, DType dtype, std::int64_t T) {
  // Enough copies of the weight that small products stream from memory as a whole model's do.
  const auto weight_bytes = static_cast<double>(c.N * c.K) * static_cast<double>(size_of(dtype));
  const std::int64_t copies = T <= 64 ? std::max<std::int64_t>(1, static_cast<std::int64_t>(256e6 / weight_bytes)) : 1;
  std::vector<LinearWeightPtr> weights;
  const Tensor w = random({c.N, c.K}, dtype);
  for (std::int64_t i = 0; i < copies; ++i) weights.push_back(pack_linear(context(), w, {}, dtype, false));
  Tensor x = random({T, c.K}, dtype), y = random({T, c.N}, dtype);
  std::size_t i = 0;
  for (auto _ : state) linear(context(), y, x, *weights[i++ % weights.size()]);
  report(state, 2.0 * static_cast<double>(T * c.N * c.K), weight_bytes);
}

void bench_linear_backward(benchmark::State& state, LinearCase c, DType dtype, std::int64_t T) {
  const auto w = pack_linear(context(), random({c.N, c.K}, dtype), {}, dtype, true);
  Tensor x = random({T, c.K}, dtype), dy = random({T, c.N}, dtype), dx = random({T, c.K}, dtype), dw = random({c.N, c.K}, DType::kF32);
  for (auto _ : state) {
    linear_backward_input(context(), dx, dy, *w, false);
    linear_backward_weight(context(), dw, {}, dy, x);
  }
  report(state, 4.0 * static_cast<double>(T * c.N * c.K), 0);
}

void bench_attention(benchmark::State& state, DType dtype, std::int64_t Hq, std::int64_t Hkv, std::int64_t D, std::int64_t length,
                     std::int64_t sequences, bool backward) {
  const std::int64_t T = length * sequences;
  Tensor q = random({T, Hq, D}, dtype), k = random({T, Hkv, D}, dtype), v = random({T, Hkv, D}, dtype), out = random({T, Hq, D}, dtype),
         lse = random({T, Hq}, DType::kF32);
  Tensor dq = random({T, Hq, D}, dtype), dk = random({T, Hkv, D}, dtype), dv = random({T, Hkv, D}, dtype), dout = random({T, Hq, D}, dtype);
  std::vector<std::int32_t> cu;
  for (std::int64_t s = 0; s <= sequences; ++s) cu.push_back(static_cast<std::int32_t>(s * length));
  VarlenAttention a{.q_THD = q, .k_TKD = k, .v_TKD = v, .cu_seqlens = cu, .scale = 1.0f / std::sqrt(static_cast<float>(D))};
  attention_varlen(context(), out, lse, a);
  for (auto _ : state) {
    if (backward)
      attention_varlen_backward(context(), dq, dk, dv, 0, 0, 0, dout, out, lse, a);
    else
      attention_varlen(context(), out, lse, a);
  }
  const double pairs = static_cast<double>(sequences) * static_cast<double>(length) * static_cast<double>(length + 1) / 2.0;
  report(state, (backward ? 10.0 : 4.0) * pairs * static_cast<double>(Hq * D), 0);
}

void bench_decode(benchmark::State& state, DType dtype, std::int64_t Hq, std::int64_t Hkv, std::int64_t D, std::int64_t length,
                  std::int64_t sequences) {
  constexpr std::int64_t kBlock = 64;
  const std::int64_t blocks = (length + kBlock - 1) / kBlock;
  Tensor k = random({sequences * blocks, Hkv, kBlock, D}, dtype), v = random({sequences * blocks, Hkv, kBlock, D}, dtype),
         q = random({sequences, Hq, D}, dtype), out = random({sequences, Hq, D}, dtype);
  std::vector<std::int32_t> start = {0}, context_len, table;
  for (std::int64_t s = 0; s < sequences; ++s) {
    start.push_back(static_cast<std::int32_t>(s + 1));
    context_len.push_back(static_cast<std::int32_t>(length));
    for (std::int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<std::int32_t>(b * sequences + s));
  }
  const PagedAttention a{.q_THD = q,
                         .layer = {k, v},
                         .query_start = start,
                         .context_len = context_len,
                         .block_table = table,
                         .max_blocks = static_cast<std::int32_t>(blocks),
                         .scale = 0.125f};
  for (auto _ : state) attention_paged(context(), out, a);
  report(state, 4.0 * static_cast<double>(sequences * length * Hq * D),
         static_cast<double>(2 * sequences * length * Hkv * D) * static_cast<double>(size_of(dtype)));
}

/// `sequences` of `length` tokens each, with states in slots (decoding) or without. Sizes of Qwen3-Next, and for state spaces of Nemotron 3
/// Nano.
void bench_delta_rule(benchmark::State& state, DType dtype, std::int64_t length, std::int64_t sequences, bool has_slots, bool backward,
                      RuleKind kind) {
  constexpr std::int64_t K = 128;
  const bool is_space = kind == RuleKind::kStateSpace;
  const std::int64_t M = is_space ? 8 : 16, N = is_space ? 64 : 32, D = is_space ? 64 : 128, C = 2 * M * K + N * D;
  const std::int64_t T = length * sequences;
  Tensor qkv = random({T, C}, dtype), b = random({T, N}, dtype), a = random({T, N}, dtype), rate = random({N}, DType::kF32),
         bias = random({N}, DType::kF32), out = random({T, N * D}, dtype), skip = random({N}, DType::kF32);
  Tensor dqkv = random({T, C}, dtype), db = random({T, N}, dtype), da = random({T, N}, dtype);
  Tensor states =
      random({has_slots ? sequences : 1, delta_rule_state_size(context().runtime->device().kind, dtype, M, N, K, D, kind)}, DType::kF32);
  std::vector<std::int32_t> start = {0}, slots, begins;
  for (std::int64_t s = 0; s < sequences; ++s) {
    start.push_back(static_cast<std::int32_t>((s + 1) * length));
    if (!has_slots) continue;
    slots.push_back(static_cast<std::int32_t>(s));
    begins.push_back(static_cast<std::int32_t>(100 + s));
  }
  const StateRows rows{.start_S = start, .slot_S = slots, .begin_S = begins};
  const DeltaRule in{.qkv_TC = qkv,
                     .b_TN = b,
                     .a_TN = a,
                     .decay_rate_N = rate,
                     .decay_bias_N = bias,
                     .num_key_heads = M,
                     .num_value_heads = N,
                     .key_dim = K,
                     .value_dim = D,
                     .kind = kind,
                     .skip_N = skip};
  for (auto _ : state) {
    if (backward)
      delta_rule_backward(context(), {.dqkv_TC = dqkv, .db_TN = db, .da_TN = da}, out, in, rows);
    else
      delta_rule(context(), out, states, in, rows);
  }
  // Forward: decay, two products with the state and its update; of a state space one.
  report(state,
         (backward   ? 25.0
          : is_space ? 5.0
                     : 7.0) *
             static_cast<double>(T * N * K * D),
         has_slots ? 2.0 * static_cast<double>(states.num_bytes()) : static_cast<double>(qkv.num_bytes() + out.num_bytes()));
}

void bench_lm_head(benchmark::State& state, DType dtype, std::int64_t T, bool backward) {
  constexpr std::int64_t kV = 49152, kH = 576;
  const auto w = pack_linear(context(), random({kV, kH}, dtype), {}, dtype, true);
  Tensor h = random({T, kH}, dtype), logp = random({T}, DType::kF32), entropy = random({T}, DType::kF32), lse = random({T}, DType::kF32),
         dh = random({T, kH}, dtype), dw = random({kV, kH}, DType::kF32);
  std::vector<std::int32_t> targets(static_cast<std::size_t>(T), 7);
  std::vector<float> temperatures(static_cast<std::size_t>(T), 1.0f);
  lm_head_logprob(context(), logp, entropy, lse, h, *w, targets, temperatures);
  for (auto _ : state) {
    if (backward)
      lm_head_logprob_backward(context(), dh, dw, logp, lse, h, *w, targets, temperatures);
    else
      lm_head_logprob(context(), logp, entropy, lse, h, *w, targets, temperatures);
  }
  report(state, (backward ? 6.0 : 2.0) * static_cast<double>(T * kV * kH), 0);
}

void bench_sample(benchmark::State& state, std::int64_t B, float top_p) {
  Tensor logits = random({B, 49152}, DType::kF32, 8.0f);
  std::vector<SampleRow> rows(static_cast<std::size_t>(B));
  for (auto& r : rows) r.top_p = top_p;
  std::vector<SampleResult> out(static_cast<std::size_t>(B));
  PendingSamples pending;
  for (auto _ : state) {
    begin_sample(context(), pending, {}, logits, rows);
    finish_sample(context(), out, pending);
  }
}

void bench_rows(benchmark::State& state, DType dtype, std::int64_t T) {
  Tensor x = random({T, 576}, dtype), y = random({T, 576}, dtype), w = random({576}, DType::kF32), gu = random({T, 3072}, dtype),
         out = random({T, 1536}, dtype);
  for (auto _ : state) {
    rms_norm(context(), y, x, w, 1e-5f);
    swiglu(context(), out, gu);
  }
  report(state, 0, static_cast<double>(x.num_bytes() + y.num_bytes() + gu.num_bytes() + out.num_bytes()));
}

void bench_machine(benchmark::State& state) {
  for (auto _ : state) {
    const MachinePeak p = measure_machine(context());
    state.counters["f32 GFLOP/s"] = p.f32_flops * 1e-9;
    state.counters["bf16 GFLOP/s"] = p.bf16_flops * 1e-9;
    state.counters["read GB/s"] = p.read_bytes_per_second * 1e-9;
  }
}

template <typename Function, typename... Args>
void add(const std::string& name, Function function, Args... args) {
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { function(state, args...); })
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond)
      ->MinTime(0.2);
}

const bool kRegistered = [] {
  benchmark::AddCustomContext(
      "cpu", fmt::format("{}, {}, {} threads", cpu_features().name, context().table->name, session().pool().num_threads()));
  benchmark::RegisterBenchmark("machine", bench_machine)->Iterations(1)->UseRealTime();
  for (const DType t : {DType::kF32, DType::kBF16}) {
    for (const LinearCase& c : kLinearBenchCases)
      for (const std::int64_t T : {1, 8, 32, 128, 1024})
        add(fmt::format("linear/{}/{}/T{}", to_string(t), c.name, T), bench_linear, c, t, T);
    for (const LinearCase& c : kLinearBenchCases)
      add(fmt::format("linear_backward/{}/{}/T1024", to_string(t), c.name), bench_linear_backward, c, t, std::int64_t{1024});
    for (const bool backward : {false, true}) {
      add(fmt::format("attention{}/{}/135M/L256x8", backward ? "_backward" : "", to_string(t)), bench_attention, t, std::int64_t{9},
          std::int64_t{3}, std::int64_t{64}, std::int64_t{256}, std::int64_t{8}, backward);
      add(fmt::format("attention{}/{}/0.6B/L1024x2", backward ? "_backward" : "", to_string(t)), bench_attention, t, std::int64_t{16},
          std::int64_t{8}, std::int64_t{128}, std::int64_t{1024}, std::int64_t{2}, backward);
      add(fmt::format("lm_head{}/{}/T512", backward ? "_backward" : "", to_string(t)), bench_lm_head, t, std::int64_t{512}, backward);
    }
    add(fmt::format("decode/{}/135M/L512x32", to_string(t)), bench_decode, t, std::int64_t{9}, std::int64_t{3}, std::int64_t{64},
        std::int64_t{512}, std::int64_t{32});
    add(fmt::format("decode/{}/0.6B/L4096x1", to_string(t)), bench_decode, t, std::int64_t{16}, std::int64_t{8}, std::int64_t{128},
        std::int64_t{4096}, std::int64_t{1});
    for (const RuleKind kind : {RuleKind::kGatedDelta, RuleKind::kStateSpace}) {
      const char* const name = kind == RuleKind::kStateSpace ? "state_space" : "delta_rule";
      for (const bool backward : {false, true})
        add(fmt::format("{}{}/{}/L2048x1", name, backward ? "_backward" : "", to_string(t)), bench_delta_rule, t, std::int64_t{2048},
            std::int64_t{1}, false, backward, kind);
      add(fmt::format("{}/{}/decode64", name, to_string(t)), bench_delta_rule, t, std::int64_t{1}, std::int64_t{64}, true, false, kind);
    }
    add(fmt::format("rows/{}/T1024", to_string(t)), bench_rows, t, std::int64_t{1024});
  }
  add("sample/all/B32", bench_sample, std::int64_t{32}, 1.0f);
  add("sample/top_p/B32", bench_sample, std::int64_t{32}, 0.9f);
  return true;
}();

}  // namespace
}  // namespace prl::ops
