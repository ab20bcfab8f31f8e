#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>

#include "ops/cuda/attention/bodies.hpp"
#include "ops/cuda/gpu_bench.hpp"

// Attention on one GPU: TFLOP/s of training shapes, GB/s of decode. Times are medians over groups of calls between events; work
// counts the keys that are seen. bench/peer_attention.py measures PyTorch at the same shapes.

namespace prl::ops {
namespace {

struct Bench : GpuBench {
  cuda::AttentionFamily family = cuda::chosen_attention_family(ctx);

  std::int32_t window = 0;  ///< keys that queries see at most; 0: all before them
  /// Keys that the queries at [first, end) see, all together.
  double keys_seen(std::int64_t first, std::int64_t end) const {
    const auto up_to = [&](std::int64_t n) {
      const double all = static_cast<double>(n), w = window == 0 ? all : std::min(all, static_cast<double>(window));
      return w * (w + 1) / 2 + (all - w) * w;
    };
    return up_to(end) - up_to(first);
  }
  void print_window() const {
    if (window > 0) std::printf("   window %d", window);
    std::printf("\n");
  }

  void train(std::int64_t Hq, std::int64_t Hkv, std::int64_t D, std::int32_t sequences, std::int32_t length) {
    const std::int64_t T = static_cast<std::int64_t>(sequences) * length;
    std::vector<std::int32_t> cu;
    for (std::int32_t s = 0; s <= sequences; ++s) cu.push_back(s * length);
    const Tensor q = random({T, Hq, D}), k = random({T, Hkv, D}), v = random({T, Hkv, D}), dout = random({T, Hq, D});
    const Tensor out = Tensor::empty(runtime, {T, Hq, D}, DType::kBF16), lse = Tensor::empty(runtime, {T, Hq}, DType::kF32);
    const Tensor dq = Tensor::empty(runtime, {T, Hq, D}, DType::kBF16), dk = Tensor::empty(runtime, {T, Hkv, D}, DType::kBF16),
                 dv = Tensor::empty(runtime, {T, Hkv, D}, DType::kBF16);
    const VarlenAttention args{.q_THD = q,
                               .k_TKD = k,
                               .v_TKD = v,
                               .q_token_stride = Hq * D,
                               .k_token_stride = Hkv * D,
                               .v_token_stride = Hkv * D,
                               .cu_seqlens = cu,
                               .scale = 0.0884f,
                               .window = window};
    const double flops = 4.0 * static_cast<double>(Hq * D) * sequences * keys_seen(0, length);
    const double forward = milliseconds([&](int) { cuda::attention_varlen(ctx, family, out, lse, args); });
    const double backward = milliseconds(
        [&](int) { cuda::attention_varlen_backward(ctx, family, dq, dk, dv, Hq * D, Hkv * D, Hkv * D, dout, out, lse, args); });
    std::printf("train   Hq %2d Hkv %2d D %3d  %3d x %6d   forward %8.3f ms %6.1f TFLOP/s   backward %8.3f ms %6.1f TFLOP/s",
                static_cast<int>(Hq), static_cast<int>(Hkv), static_cast<int>(D), sequences, length, forward, flops / forward * 1e-9,
                backward, 2.5 * flops / backward * 1e-9);
    print_window();
  }

  /// `new_tokens` of each sequence over `context` cached ones, themselves included.
  void paged(std::int64_t Hq, std::int64_t Hkv, std::int64_t D, std::int32_t sequences, std::int32_t context, std::int32_t new_tokens,
             std::int64_t block_size = 16) {
    const std::int64_t blocks = (context + block_size - 1) / block_size;
    const std::int32_t num_read = window == 0 ? context : std::min(context, window + new_tokens - 1);
    const double bytes = 2.0 * static_cast<double>(sequences) * num_read * static_cast<double>(Hkv * D * 2);
    const int copies = static_cast<int>(std::clamp(300e6 / bytes, 1.0, 16.0));  // so that small caches do not stay in L2
    std::vector<Tensor> ks, vs;
    for (int i = 0; i < copies; ++i) {
      ks.push_back(random({sequences * blocks, Hkv, block_size, D}));
      vs.push_back(random({sequences * blocks, Hkv, block_size, D}));
    }
    const std::int64_t T = static_cast<std::int64_t>(sequences) * new_tokens;
    const Tensor q = random({T, Hq, D}), out = Tensor::empty(runtime, {T, Hq, D}, DType::kBF16);
    std::vector<std::int32_t> start, lens(static_cast<std::size_t>(sequences), context),
        table(static_cast<std::size_t>(sequences * blocks));
    for (std::int32_t s = 0; s <= sequences; ++s) start.push_back(s * new_tokens);
    std::iota(table.begin(), table.end(), 0);
    Rng rng(3);
    for (std::size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[rng.next_u32() % i]);
    const double host = milliseconds([&](int i) {
      const auto c = static_cast<std::size_t>(i % copies);
      cuda::attention_paged(ctx, family, out,
                            {.q_THD = q,
                             .q_token_stride = Hq * D,
                             .layer = {ks[c], vs[c]},
                             .query_start = start,
                             .context_len = lens,
                             .block_table = table,
                             .max_blocks = static_cast<std::int32_t>(blocks),
                             .scale = 0.0884f,
                             .window = window});
    });
    const double flops = 4.0 * static_cast<double>(Hq * D) * sequences * keys_seen(context - new_tokens, context);
    std::printf("paged   Hq %2d Hkv %2d D %3d  %3d x %6d, %5d new, blocks of %3d   %8.1f us %6.0f GB/s %6.1f TFLOP/s", static_cast<int>(Hq),
                static_cast<int>(Hkv), static_cast<int>(D), sequences, context, new_tokens, static_cast<int>(block_size), host * 1e3,
                bytes / host * 1e-6, flops / host * 1e-9);
    if (new_tokens == 1) {
      const auto ints = [&](const std::vector<std::int32_t>& v) {
        Tensor t = Tensor::empty(runtime, {static_cast<std::int64_t>(v.size())}, DType::kI32);
        runtime->copy_from_host(t.data(), v.data(), v.size() * 4);
        return t;
      };
      const Tensor d_lens = ints(lens), d_table = ints(table);
      cuda::DecodeAttention decode{.q_THD = q,
                                   .q_token_stride = 0,
                                   .layer = {ks[0], vs[0]},
                                   .context_len = d_lens.as<std::int32_t>(),
                                   .block_table = d_table.as<std::int32_t>(),
                                   .num_sequences = sequences,
                                   .max_blocks = static_cast<std::int32_t>(blocks),
                                   .scale = 0.0884f,
                                   .window = window};
      const Tensor plan =
          Tensor::empty(runtime, {static_cast<std::int64_t>(cuda::decode_plan_bytes(sequences, blocks * block_size))}, DType::kU8);
      cuda::plan_decode(ctx, family, plan.data(), decode);
      // 28 layers in a graph, as a decode step has them.
      constexpr int kLayers = 28;
      const auto layers = [&] {
        for (int i = 0; i < kLayers; ++i) {
          decode.layer = {ks[static_cast<std::size_t>(i % copies)], vs[static_cast<std::size_t>(i % copies)]};
          cuda::attention_decode(ctx, family, out, plan.data(), decode);
        }
      };
      layers();
      const cudaStream_t stream = cuda::stream_of(ctx);
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      PRL_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      layers();
      PRL_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
      PRL_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
      const double ms = milliseconds([&](int) { PRL_CUDA_CHECK(cudaGraphLaunch(exec, stream)); }) / kLayers;
      std::printf("   in a graph %8.1f us %6.0f GB/s", ms * 1e3, bytes / ms * 1e-6);
      PRL_CUDA_CHECK(cudaGraphExecDestroy(exec));
      PRL_CUDA_CHECK(cudaGraphDestroy(graph));
    }
    print_window();
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
  std::printf("%s kernels\n", b.family == prl::ops::cuda::AttentionFamily::kHopper ? "hopper" : "plain");
  b.train(16, 8, 128, 1, 16384);
  b.train(16, 8, 128, 1, 8192);
  b.train(32, 8, 128, 1, 8192);
  b.train(16, 8, 128, 16, 1024);
  b.train(16, 16, 64, 1, 16384);
  b.train(8, 8, 256, 1, 8192);
  b.paged(16, 8, 128, 128, 1024, 1);
  b.paged(16, 8, 128, 128, 200, 1);
  b.paged(32, 8, 128, 128, 1024, 1);
  b.paged(16, 8, 128, 1, 200, 1);
  b.paged(16, 8, 128, 1, 1024, 1);
  b.paged(16, 8, 128, 8, 1024, 1);
  b.paged(16, 8, 128, 1, 16384, 1);
  b.paged(16, 8, 128, 1, 8192, 2048);
  for (const int block_size : {32, 64, 128}) {
    b.paged(16, 8, 128, 128, 1024, 1, block_size);
    b.paged(16, 8, 128, 1, 1024, 1, block_size);
    b.paged(16, 8, 128, 1, 8192, 2048, block_size);
  }
  for (const int window : {0, 4096, 1024, 128}) {
    b.window = window;
    b.train(32, 8, 128, 1, 32768);
    b.paged(32, 8, 128, 32, 16384, 1, 32);
    b.paged(32, 8, 128, 1, 32768, 2048, 32);
  }
  return 0;
}
