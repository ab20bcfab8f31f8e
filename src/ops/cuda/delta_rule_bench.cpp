#include <fmt/format.h>

#include "ops/cuda/gpu_bench.hpp"
#include "ops/delta_rule.hpp"

// What the parts of a layer of linear attention cost on a GPU, in shapes of Qwen 3.5.

namespace prl::ops {
namespace {

struct LayerShape {
  const char* name;
  std::int64_t M, N;  ///< key heads, value heads of 128 each
};
constexpr std::int64_t kDim = 128, kTaps = 4;

Tensor floats(GpuBench& bench, Shape shape) { return Tensor::zeros(bench.runtime, shape, DType::kF32); }

void bench_layer(GpuBench& bench, const LayerShape& z, std::int64_t length, std::int64_t sequences, bool is_step) {
  const std::int64_t T = length * sequences, C = 2 * z.M * kDim + z.N * kDim, V = z.N * kDim;
  Tensor x = bench.random({T, C}), y = bench.random({T, C}), dy = bench.random({T, C}), gates = bench.random({T, 2 * z.N}),
         dgates = bench.random({T, 2 * z.N}), out = bench.random({T, V}), gate = bench.random({T, V}), dout = bench.random({T, V});
  Tensor taps = floats(bench, {C, kTaps}), dtaps = floats(bench, {C, kTaps}), rate = floats(bench, {z.N}), bias = floats(bench, {z.N}),
         drate = floats(bench, {z.N}), dbias = floats(bench, {z.N}), norm = floats(bench, {kDim}), dnorm = floats(bench, {kDim});
  const std::int64_t slots = is_step ? sequences : 1;
  Tensor inputs = bench.random({slots, kTaps - 1, C}),
         states = floats(bench, {slots, delta_rule_state_size(DeviceKind::kCuda, DType::kBF16, z.M, z.N, kDim, kDim)});
  std::vector<std::int32_t> start = {0}, slot, begin;
  for (std::int64_t s = 0; s < sequences; ++s) {
    start.push_back(static_cast<std::int32_t>((s + 1) * length));
    if (!is_step) continue;
    slot.push_back(static_cast<std::int32_t>(s));
    begin.push_back(static_cast<std::int32_t>(64 * 5 + s * 2 % 63));
  }
  const StateRows rows{.start_S = start, .slot_S = slot, .begin_S = begin};
  const auto half = [&](Tensor& t, std::int64_t i) { return t.view().columns(i * z.N, z.N); };
  const DeltaRule in{y, half(gates, 0), half(gates, 1), rate, bias, z.M, z.N, kDim, kDim};
  const auto report = [&](const char* what, const std::function<void()>& work) {
    const double ms = bench.milliseconds([&](int) { work(); }, is_step ? 50 : 3);
    fmt::print("{:5} {:5} x {:<3} {:24} {:9.1f} us\n", z.name, length, sequences, what, ms * 1e3);
  };
  report("causal_conv", [&] { causal_conv(bench.ctx, y, x, taps, inputs, rows); });
  bench.runtime->copy_within(y.data(), x.data(), y.num_bytes());
  report("delta_rule", [&] { delta_rule(bench.ctx, out, states, in, rows); });
  report("gated_head_norm", [&] { gated_head_norm(bench.ctx, out, dout, gate, norm, 1e-6f); });
  if (is_step) return;
  report("gated_head_norm_backward", [&] { gated_head_norm_backward(bench.ctx, dout, gate, dnorm, dout, out, gate, norm, 1e-6f); });
  report("delta_rule_backward", [&] {
    delta_rule_backward(bench.ctx, {dy, half(dgates, 0), half(dgates, 1), drate, dbias}, out, in, rows);
  });
  report("causal_conv_backward", [&] { causal_conv_backward(bench.ctx, dy, dtaps, dy, x, taps, rows); });
}

}  // namespace
}  // namespace prl::ops

int main() {
  prl::ops::GpuBench bench;
  for (const auto& shape : {prl::ops::LayerShape{"0.8B", 16, 16}, prl::ops::LayerShape{"4B", 16, 32}}) {
    for (const std::int64_t sequences : {1, 8, 32, 128}) prl::ops::bench_layer(bench, shape, 1, sequences, true);
    for (const auto& [length, sequences] : {std::pair{2048, 4}, {8192, 1}, {64, 128}, {16384, 1}})
      prl::ops::bench_layer(bench, shape, length, sequences, false);
  }
}
