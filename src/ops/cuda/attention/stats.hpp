#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// What the backward pass knows about each query before it starts.

namespace prl::ops::cuda {

/// Sequences start at multiples of this in the table of row statistics; the rows up to the next sequence hold (inf, 0), which
/// makes every weight zero.
constexpr int kStatsRows = 64;
/// kStatsRows consecutive rows of the table.
struct StatsBlock {
  std::int32_t token;       ///< of the first one
  std::int32_t num_tokens;  ///< that exist
};
struct StatsParams {
  const StatsBlock* blocks;
  std::int32_t num_blocks;
  std::int32_t num_heads, head_dim;
  const void *out, *dout;  ///< [T][num_heads][head_dim]
  const float* lse;        ///< [T][num_heads]
  float2* stats;           ///< [num_heads][num_blocks * kStatsRows]: lse in powers of two, sum over columns of dout * out
};
/// Queues dsinks[h] -= the sum over tokens of exp(sinks[h] - lse) * (dout . out), in parts of kSinkTokens tokens each, whose sums `partial`
/// [parts, num_heads] holds in between.
constexpr int kSinkTokens = 512;
struct SinkParams {
  const void *out, *dout;    ///< [num_tokens][num_heads][head_dim]
  const float *lse, *sinks;  ///< [num_tokens][num_heads], [num_heads]
  float *partial, *dsinks;
  std::int64_t num_tokens;
  std::int32_t num_heads, head_dim;
};
template <typename T>
void launch_sink_gradients(const SinkParams& p, cudaStream_t stream);

/// T is float or __nv_bfloat16.
template <typename T>
void launch_stats(const StatsParams& p, cudaStream_t stream);

}  // namespace prl::ops::cuda
