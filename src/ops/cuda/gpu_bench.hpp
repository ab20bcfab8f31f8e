#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "base/normal_draws.hpp"
#include "device/cuda/check.hpp"
#include "ops/cuda/launch.hpp"
#include "ops/op_table.hpp"

namespace prl::ops {

/// What benchmarks of ops on a GPU share.
struct GpuBench {
  std::shared_ptr<DeviceRuntime> runtime = make_cuda_runtime(0);
  OpSession session{runtime, 1};
  OpContext& ctx = session.context();

  /// bf16, about normal.
  Tensor random(Shape shape) {
    Tensor t = Tensor::empty(runtime, shape, DType::kBF16);
    Rng rng(1);
    const std::vector<float> values = normal_draws(rng, 1 << 20);
    std::vector<BFloat16> host(values.size());
    std::ranges::transform(values, host.begin(), [](float x) { return to_bf16(x); });
    for (std::size_t at = 0; at < t.num_bytes(); at += host.size() * 2 - 254)  // shifted, so that rows do not repeat
      runtime->copy_from_host(t.as<char>() + at, host.data(), std::min(host.size() * 2, t.num_bytes() - at));
    return t;
  }
  /// Of one call, the median over groups of calls between events; `work` gets the number of the call. Groups hide what the host does
  /// between calls, as a training step does.
  double milliseconds(const std::function<void(int)>& work, int calls_of_group = 5) {
    const cudaStream_t stream = cuda::stream_of(ctx);
    cudaEvent_t begin, end;
    PRL_CUDA_CHECK(cudaEventCreate(&begin));
    PRL_CUDA_CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 16; ++i) {
      PRL_CUDA_CHECK(cudaEventRecord(begin, stream));
      for (int j = 0; j < calls_of_group; ++j) work(i * calls_of_group + j);
      PRL_CUDA_CHECK(cudaEventRecord(end, stream));
      PRL_CUDA_CHECK(cudaEventSynchronize(end));
      float ms = 0;
      PRL_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 2) times.push_back(ms / static_cast<float>(calls_of_group));
    }
    std::ranges::sort(times);
    PRL_CUDA_CHECK(cudaEventDestroy(begin));
    PRL_CUDA_CHECK(cudaEventDestroy(end));
    return static_cast<double>(times[times.size() / 2]);
  }
};

}  // namespace prl::ops
