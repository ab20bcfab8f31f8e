#include "ops/cuda/attention/stats.hpp"

#include "device/cuda/check.hpp"
#include "ops/cuda/attention/rows.cuh"

namespace prl::ops::cuda {
namespace {

constexpr int kStatsThreads = 256;

__device__ __forceinline__ float dot16(const uint4& a, const uint4& b, const float*) {
  const auto part = [](std::uint32_t x, std::uint32_t y, float sum) { return fmaf(__uint_as_float(x), __uint_as_float(y), sum); };
  return part(a.w, b.w, part(a.z, b.z, part(a.y, b.y, part(a.x, b.x, 0.0f))));
}
__device__ __forceinline__ float dot16(const uint4& a, const uint4& b, const __nv_bfloat16*) {
  float sum = 0.0f;
  const std::uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(__uint_as_float(x[i] << 16), __uint_as_float(y[i] << 16), sum);
    sum = fmaf(__uint_as_float(x[i] & 0xffff0000u), __uint_as_float(y[i] & 0xffff0000u), sum);
  }
  return sum;
}

/// A block of threads per block of rows and head; 16 lanes per row, 16 bytes at a time.
template <typename T>
__global__ void __launch_bounds__(kStatsThreads) stats_kernel(const __grid_constant__ StatsParams p) {
  const StatsBlock block = p.blocks[blockIdx.x];
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 16;
  float2* to = p.stats + (static_cast<std::int64_t>(head) * p.num_blocks + blockIdx.x) * kStatsRows;
  for (int row = static_cast<int>(threadIdx.x) / 16; row < kStatsRows; row += kStatsThreads / 16) {
    const bool exists = row < block.num_tokens;
    const std::int64_t at = static_cast<std::int64_t>(block.token + row) * p.num_heads + head;
    float sum = 0.0f;
    if (exists)
      for (int i = lane; i < p.head_dim * static_cast<int>(sizeof(T)) / 16; i += 16)
        sum += dot16(reinterpret_cast<const uint4*>(static_cast<const T*>(p.out) + at * p.head_dim)[i],
                     reinterpret_cast<const uint4*>(static_cast<const T*>(p.dout) + at * p.head_dim)[i], static_cast<const T*>(nullptr));
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) to[row] = exists ? make_float2(p.lse[at] * kLog2e, sum) : make_float2(-kMinusInfinity, 0.0f);
  }
}

/// A block of threads per part of the tokens and head; 16 lanes per row, as in stats_kernel.
template <typename T>
__global__ void __launch_bounds__(kStatsThreads) sink_parts_kernel(const __grid_constant__ SinkParams p) {
  __shared__ float scratch[kStatsThreads / kWarp];
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 16;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kSinkTokens, end = min(p.num_tokens, first + kSinkTokens);
  const float sink = p.sinks[head];
  float total = 0.0f;
  // Of a row that is not there 0: all lanes of a warp take part in its sums.
  for (std::int64_t row = first + static_cast<int>(threadIdx.x) / 16; row < first + kSinkTokens; row += kStatsThreads / 16) {
    const std::int64_t at = row * p.num_heads + head;
    float sum = 0.0f;
    if (row < end)
      for (int i = lane; i < p.head_dim * static_cast<int>(sizeof(T)) / 16; i += 16)
        sum += dot16(reinterpret_cast<const uint4*>(static_cast<const T*>(p.out) + at * p.head_dim)[i],
                     reinterpret_cast<const uint4*>(static_cast<const T*>(p.dout) + at * p.head_dim)[i], static_cast<const T*>(nullptr));
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane == 0 && row < end) total = fmaf(power_of_two_for<T>((sink - p.lse[at]) * kLog2e), sum, total);
  }
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) p.partial[static_cast<std::int64_t>(blockIdx.x) * p.num_heads + head] = total;
}

__global__ void __launch_bounds__(kStatsThreads) sink_sums_kernel(const __grid_constant__ SinkParams p, std::int64_t num_parts) {
  const int head = static_cast<int>(blockIdx.x * kStatsThreads + threadIdx.x);
  if (head >= p.num_heads) return;
  float sum = 0.0f;
  for (std::int64_t i = 0; i < num_parts; ++i) sum += p.partial[i * p.num_heads + head];
  p.dsinks[head] -= sum;
}

}  // namespace

template <typename T>
void launch_sink_gradients(const SinkParams& p, cudaStream_t stream) {
  const std::int64_t parts = (p.num_tokens + kSinkTokens - 1) / kSinkTokens;
  sink_parts_kernel<T><<<dim3(static_cast<unsigned>(parts), static_cast<unsigned>(p.num_heads)), kStatsThreads, 0, stream>>>(p);
  PRL_CUDA_CHECK(cudaGetLastError());
  sink_sums_kernel<<<static_cast<unsigned>((p.num_heads + kStatsThreads - 1) / kStatsThreads), kStatsThreads, 0, stream>>>(p, parts);
  PRL_CUDA_CHECK(cudaGetLastError());
}
template void launch_sink_gradients<float>(const SinkParams&, cudaStream_t);
template void launch_sink_gradients<__nv_bfloat16>(const SinkParams&, cudaStream_t);

template <typename T>
void launch_stats(const StatsParams& p, cudaStream_t stream) {
  stats_kernel<T><<<dim3(static_cast<unsigned>(p.num_blocks), static_cast<unsigned>(p.num_heads)), kStatsThreads, 0, stream>>>(p);
  PRL_CUDA_CHECK(cudaGetLastError());
}
template void launch_stats<float>(const StatsParams&, cudaStream_t);
template void launch_stats<__nv_bfloat16>(const StatsParams&, cudaStream_t);

}  // namespace prl::ops::cuda
