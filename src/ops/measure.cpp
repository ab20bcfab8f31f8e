#include "ops/measure.hpp"

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/normal_draws.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/table.hpp"
#include "ops/linear.hpp"
#include "ops/pointwise.hpp"

namespace prl::ops {
namespace {

/// Best time of one call of `body` within the time given: the machine's peak, not its average under load.
template <typename Body>
double best_seconds(OpContext& ctx, double budget, const Body& body) {
  using Clock = std::chrono::steady_clock;
  const auto elapsed = [](Clock::time_point from) { return std::chrono::duration<double>(Clock::now() - from).count(); };
  body();  // warm-up: workspace, caches, clock speed
  ctx.runtime->synchronize();
  const auto start = Clock::now();
  double best = 1e300;
  do {
    const auto begin = Clock::now();
    body();
    ctx.runtime->synchronize();
    best = std::min(best, elapsed(begin));
  } while (elapsed(start) < budget);
  return best;
}

/// Values of a normal distribution: on zeros a GPU draws less power and runs faster than it ever will.
Tensor random_f32(OpContext& ctx, std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kDrawn = 1 << 16;
  static const std::vector<float> values = [] {  // drawn once: a start measures several times
    Rng rng(1);
    return normal_draws(rng, kDrawn);
  }();
  Tensor t = Tensor::empty(ctx.runtime, {rows, cols}, DType::kF32);
  for (std::int64_t at = 0; at < t.num_elements(); at += kDrawn)
    ctx.runtime->copy_from_host(t.as<float>() + at, values.data(),
                                static_cast<std::size_t>(std::min(kDrawn, t.num_elements() - at)) * sizeof(float));
  return t;
}

double product_flops(OpContext& ctx, DType dtype, std::int64_t rows, double budget) {
  const bool is_gpu = ctx.runtime->device().kind == DeviceKind::kCuda;
  const std::int64_t M = rows, N = is_gpu ? M : 1024, K = N;
  const Tensor w = random_f32(ctx, N, K), wide_x = random_f32(ctx, M, K), x = Tensor::empty(ctx.runtime, {M, K}, dtype),
               y = Tensor::empty(ctx.runtime, {M, N}, dtype);
  cast(ctx, x, wide_x);
  const LinearWeightPtr packed = pack_linear(ctx, w, {}, dtype, false);
  return 2.0 * static_cast<double>(M * N * K) / best_seconds(ctx, budget, [&] { linear(ctx, y, x, *packed); });
}

/// The best of several products. On a CPU short ones are among them: beside other work only those find all threads at once.
double best_product_flops(OpContext& ctx, DType dtype, double budget) {
  if (ctx.runtime->device().kind == DeviceKind::kCuda) return product_flops(ctx, dtype, dtype == DType::kBF16 ? 8192 : 2048, budget);
  return std::max(product_flops(ctx, dtype, 512, budget / 2), product_flops(ctx, dtype, 128, budget / 2));
}

double read_bandwidth(OpContext& ctx, double budget) {
  constexpr std::int64_t kFloats = std::int64_t{64} << 20;  // 256 MiB, beyond any last-level cache
  constexpr std::int64_t kPiece = std::int64_t{256} << 10;
  Tensor x = Tensor::zeros(ctx.runtime, {kFloats}, DType::kF32);
  if (ctx.runtime->device().kind != DeviceKind::kCpu) {
    Tensor y = Tensor::empty(ctx.runtime, {kFloats}, DType::kF32);
    return 2.0 * static_cast<double>(x.num_bytes()) /
           best_seconds(ctx, budget, [&] { ctx.runtime->copy_within(y.data(), x.data(), x.num_bytes()); });
  }
  const auto& kernels = cpu::kernels(ctx);
  std::atomic<int> sink{0};
  const double seconds = best_seconds(ctx, budget, [&] {
    cpu::parallel(ctx, kFloats / kPiece, [&](std::int64_t i) {
      if (kernels.read_sum(x.as<float>() + i * kPiece, kPiece) != 0.0f) sink = 1;
    });
  });
  return static_cast<double>(x.num_bytes()) / seconds;
}

}  // namespace

double measure_flops(OpContext& ctx, DType dtype, double seconds) { return best_product_flops(ctx, dtype, seconds); }
double measure_read(OpContext& ctx, double seconds) { return read_bandwidth(ctx, seconds); }

MachinePeak measure_machine(OpContext& ctx, double seconds) {
  return {.f32_flops = best_product_flops(ctx, DType::kF32, seconds * 0.3),
          .bf16_flops = best_product_flops(ctx, DType::kBF16, seconds * 0.3),
          .read_bytes_per_second = read_bandwidth(ctx, seconds * 0.4)};
}

}  // namespace prl::ops
