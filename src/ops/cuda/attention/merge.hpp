#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/attention/unit.hpp"

namespace prl::ops::cuda {

/// Chunks of split units as the forward kernels leave them; see ForwardParams.
struct MergeParams {
  const MergeUnit* units;
  const std::int32_t* num_units_at;  ///< device memory, or nullptr: num_units
  std::int32_t num_units;
  RowPacking packing;
  std::int32_t num_q_heads, head_dim;  ///< the latter of values
  void* out;
  const float* state_out;
  const float2* state_sums;
  std::int32_t state_rows;
  const float* sinks;  ///< [num_q_heads] or nullptr
};
/// Merges the chunks of split units in order, with the arithmetic of a unit that is not split. T is float or __nv_bfloat16.
template <typename T>
void launch_merge(const MergeParams& p, int num_blocks, cudaStream_t stream);

}  // namespace prl::ops::cuda
