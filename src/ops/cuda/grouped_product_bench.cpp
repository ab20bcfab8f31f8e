#include <cstdio>
#include <functional>
#include <vector>

#include "base/error.hpp"
#include "ops/cuda/gpu_bench.hpp"
#include "ops/experts.hpp"

// Products of experts on one GPU, all at once and one expert after another: TFLOP/s. Times are medians of calls between events.

namespace prl::ops {
namespace {

struct Bench : GpuBench {
  /// E matrices [N, K]; rows of experts differ by up to `spread` of the mean.
  void run(std::int64_t E, std::int64_t N, std::int64_t K, std::int32_t mean, double spread) {
    Rng rng(7);
    std::vector<std::int32_t> begin{0};
    for (std::int64_t e = 0; e < E; ++e)
      begin.push_back(begin.back() +
                      static_cast<std::int32_t>(mean * (1 + spread * (2 * static_cast<double>(rng.next_u32()) * 0x1.0p-32 - 1))));
    const std::int64_t R = begin.back();
    Tensor begin_P = Tensor::empty(runtime, {E + 1}, DType::kI32);
    runtime->copy_from_host(begin_P.data(), begin.data(), begin_P.num_bytes());
    const Tensor w = random({E, N * K}), x = random({R, K}), dy = random({R, N});
    Tensor y = Tensor::empty(runtime, {R, N}, DType::kBF16), dx = Tensor::empty(runtime, {R, K}, DType::kBF16),
           dw = Tensor::empty(runtime, {E, N * K}, DType::kF32);
    const Tensor rounded = w.clone();
    const CodeMemory memory = take_code_memory(ctx, E, N, K, DType::kBF16);
    std::vector<LinearWeightPtr> packed;
    std::vector<const LinearWeight*> weights, eight;
    std::vector<TensorView> to;
    for (std::int64_t e = 0; e < E; ++e) {
      packed.push_back(share_linear(ctx, rounded.slice(e, 1).reshaped({N, K}), {}, true, WeightUse::kEightBitProduct, memory.of(e, N)));
      eight.push_back(packed.back().get());
      packed.push_back(share_linear(ctx, w.slice(e, 1).reshaped({N, K}), {}, true));
      weights.push_back(packed.back().get());
      to.push_back(dw.slice(e, 1).view().reshaped({N, K}));
    }
    const auto each = [&](const auto& work) {
      for (std::size_t e = 0; e < weights.size(); ++e) work(e, begin[e], begin[e + 1] - begin[e]);
    };
    const double flops = 2.0 * static_cast<double>(R * N) * static_cast<double>(K);
    const auto report = [&](const char* what, const std::function<void(int)>& grouped, const std::function<void(int)>& apart) {
      const double together = milliseconds(grouped, 3), one_by_one = milliseconds(apart, 3);
      std::printf("%3d x [%4d, %4d], %6d rows, %-15s grouped %7.3f ms %6.1f TFLOP/s   one by one %7.3f ms %6.1f TFLOP/s\n",
                  static_cast<int>(E), static_cast<int>(N), static_cast<int>(K), static_cast<int>(R), what, together,
                  flops / together * 1e-9, one_by_one, flops / one_by_one * 1e-9);
    };
    report(
        "forward", [&](int) { PRL_CHECK(grouped_linear(ctx, y, x, weights, begin_P), "refused"); },
        [&](int) {
          each([&](std::size_t e, auto first, auto count) { linear(ctx, y.slice(first, count), x.slice(first, count), *weights[e]); });
        });
    report(
        "of 8 bits", [&](int) { PRL_CHECK(grouped_linear(ctx, y, x, eight, begin_P), "refused"); },
        [&](int) {
          each([&](std::size_t e, auto first, auto count) { linear(ctx, y.slice(first, count), x.slice(first, count), *eight[e]); });
        });
    report(
        "input gradient", [&](int) { PRL_CHECK(grouped_linear_backward_input(ctx, dx, dy, weights, begin_P), "refused"); },
        [&](int) {
          each([&](std::size_t e, auto first, auto count) {
            linear_backward_input(ctx, dx.slice(first, count), dy.slice(first, count), *weights[e], false);
          });
        });
    report(
        "weight gradient", [&](int) { PRL_CHECK(grouped_linear_backward_weight(ctx, to, dy, x, begin_P, false), "refused"); },
        [&](int) {
          each([&](std::size_t e, auto first, auto count) {
            linear_backward_weight(ctx, to[e], {}, dy.slice(first, count), x.slice(first, count), false);
          });
        });
  }
};

}  // namespace
}  // namespace prl::ops

int main() {
  if (const prl::CudaDevices found = prl::list_cuda_devices(); found.devices.empty()) {
    std::printf("no GPU: %s\n", found.missing.c_str());
    return 77;
  }
  prl::ops::Bench b;
  for (const double spread : {0.05, 0.9}) {
    b.run(128, 1536, 2048, 1024, spread);  // Qwen3-30B-A3B, 16,384 tokens
    b.run(128, 2048, 768, 1024, spread);
    b.run(8, 28672, 4096, 4096, spread);  // Mixtral 8x7B
  }
  return 0;
}
