#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/attention/unit.hpp"

namespace prl::ops::cuda {

/// A plan of split units of one token each, in device memory.
struct DecodePlan {
  static constexpr int kNumCounts = 4;
  std::int32_t* counts;  ///< units, merges; then hopper::ForwardParams::next_item
  AttentionUnit* units;
  MergeUnit* merges;
};
/// Fills the plan from the lengths of the sequences, full chunks first, of keys within the window. Unit s reads row s and block table
/// row s.
void launch_decode_plan(const DecodePlan& plan, const std::int32_t* context_len, int num_sequences, int max_blocks, int tile,
                        std::int32_t window, cudaStream_t stream);

}  // namespace prl::ops::cuda
