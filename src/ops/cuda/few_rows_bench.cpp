#include <algorithm>
#include <cstdio>
#include <functional>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "ops/cuda/few_rows.hpp"
#include "ops/cuda/gpu_bench.hpp"
#include "ops/cuda/linear_weight.hpp"

// Products of few rows on one GPU, recorded one after another as in a step of decoding, with weights of 16 and of 8 bits that are not in
// the second-level cache, and of inputs of 8 bits too, whose rounding is a kernel more: microseconds of one. Times are medians of replays
// between events.

namespace prl::ops {
namespace {

struct Bench : GpuBench {
  static constexpr std::size_t kBytes = std::size_t{400} << 20;
  bool tries_tiles = false;

  double microseconds(std::size_t num_products, const std::function<void(std::size_t)>& product) {
    const auto all = [&] {
      for (std::size_t i = 0; i < num_products; ++i) product(i);
    };
    all();
    const auto recorded = runtime->record(all);
    PRL_CHECK(recorded != nullptr, "not recorded");
    return 1e3 * milliseconds([&](int) { recorded->run(); }, 2) / static_cast<double>(num_products);
  }
  double microseconds(const std::vector<LinearWeightPtr>& weights, TensorView y, ConstTensorView x, const LinearFusion& fusion) {
    return microseconds(weights.size(), [&](std::size_t i) { (void)linear_fused(ctx, y, x, *weights[i], fusion); });
  }
  /// By the tile that is the fastest for codes.
  void print_best(const std::vector<LinearWeightPtr>& weights, TensorView y, ConstTensorView x, const cuda::FewRowsFusion& fusion) {
    constexpr int kMostBytes = 220 * 1024;
    double best = 0;
    cuda::FewRowsTile of_best;
    int rows = 8;
    while (rows < x.shape.num_rows()) rows *= 2;
    const int steps = static_cast<int>(weights[0]->num_inputs() / 128);
    for (int columns = 16; columns <= 64; columns += 16)
      for (int slots = 2; slots <= std::min(8, steps); slots *= 2)
        for (int code_slots = 2; code_slots <= std::min(16, steps); code_slots *= 2) {
          const int row_bytes = 256 * rows * (fusion.norm != nullptr ? steps : slots);
          if (slots * 256 * columns + row_bytes + code_slots * 128 * columns + 4096 > kMostBytes) continue;
          const cuda::FewRowsTile tile{.rows = rows, .columns = columns, .slots = slots, .code_slots = code_slots};
          const double time = microseconds(weights.size(), [&](std::size_t i) {
            cuda::few_rows_product(ctx, cuda::linear_product(cuda::dense(ctx, *weights[i]), y, x), tile, fusion);
          });
          if (best > 0 && time >= best) continue;
          best = time;
          of_best = tile;
        }
    std::printf("  best: %6.2f us in %d columns, %d slots, %d of codes\n", best, of_best.columns, of_best.slots, of_best.code_slots);
  }

  void run(const char* what, std::int64_t N, std::int64_t K, bool swiglu, bool has_norm) {
    std::vector<LinearWeightPtr> plain, eight, both;
    const Tensor w = random({N, K}), norm = Tensor::zeros(runtime, {K}, DType::kF32);
    for (std::size_t i = 0; i < kBytes / w.num_bytes() + 1; ++i) {
      plain.push_back(pack_linear(ctx, w, {}, DType::kBF16, false));
      eight.push_back(pack_linear(ctx, w, {}, DType::kBF16, false, WeightUse::kEightBit));
      both.push_back(pack_linear(ctx, w, {}, DType::kBF16, false, WeightUse::kEightBitProduct));
    }
    for (const std::int64_t rows : {1, 8, 32, 64}) {
      const Tensor x = random({rows, K}), y = Tensor::empty(runtime, {rows, swiglu ? N / 2 : N}, DType::kBF16);
      LinearFusion fusion;
      fusion.swiglu = swiglu;
      if (has_norm && rows <= cuda::kMaxNormRows && K <= cuda::kMaxNormColumns) fusion.norm_K = norm;
      if (!linear_fused(ctx, y, x, *plain[0], fusion)) continue;  // a product of the library
      const double of_plain = microseconds(plain, y, x, fusion), of_eight = microseconds(eight, y, x, fusion);
      LinearFusion without_norm;
      without_norm.swiglu = swiglu;
      const double of_both = microseconds(both, y, x, without_norm);
      std::printf("%-14s [%5d, %5d] %3d rows: 16 bits %6.2f us, 8 bits %6.2f us, %.2fx, of inputs too %6.2f us, %.2fx\n", what,
                  static_cast<int>(N), static_cast<int>(K), static_cast<int>(rows), of_plain, of_eight, of_plain / of_eight, of_both,
                  of_plain / of_both);
      (void)std::fflush(stdout);
      if (tries_tiles)
        print_best(eight, y, x,
                   {.norm = fusion.norm_K.as<float>(), .eps = fusion.eps, .residual = nullptr, .residual_stride = 0, .swiglu = swiglu});
      (void)std::fflush(stdout);
    }
  }
};

}  // namespace
}  // namespace prl::ops

// usage: cuda_few_rows_bench [--tiles]      --tiles: the fastest tile for codes, too
int main(int argc, char** argv) {
  if (const prl::CudaDevices found = prl::list_cuda_devices(); found.devices.empty()) {
    std::printf("no GPU: %s\n", found.missing.c_str());
    return 77;
  }
  prl::ops::Bench b;
  b.tries_tiles = argc > 1 && std::string_view(argv[1]) == "--tiles";
  b.run("0.6B qkv", 4096, 1024, false, true);
  b.run("0.6B o", 1024, 2048, false, false);
  b.run("0.6B gate, up", 6144, 1024, true, true);
  b.run("0.6B down", 1024, 3072, false, false);
  b.run("4B qkv", 6144, 2560, false, false);
  b.run("4B o", 2560, 4096, false, false);
  b.run("4B gate, up", 19456, 2560, true, false);
  b.run("4B down", 2560, 9728, false, false);
  b.run("8B gate, up", 24576, 4096, true, false);
  b.run("8B down", 4096, 12288, false, false);
  return 0;
}
