#pragma once

#include <climits>

#include "ops/cuda/device.cuh"

// The greatest of a row's numbers one after another, by one warp; of equals that of the lower index first.

namespace prl::ops::cuda {

struct Candidate {
  float value = INFINITY;
  int index = -1;
};

__device__ __forceinline__ void take_greater(Candidate& best, Candidate other) {
  if (other.value > best.value || (other.value == best.value && other.index < best.index)) best = other;
}

/// Whether `c` comes behind `last`.
__device__ __forceinline__ bool is_behind(Candidate c, Candidate last) {
  return c.value < last.value || (c.value == last.value && c.index > last.index);
}

/// The greatest of what the lanes have found.
__device__ __forceinline__ Candidate greatest_of_warp(Candidate best) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    take_greater(best, {__shfl_xor_sync(kFullWarp, best.value, step), __shfl_xor_sync(kFullWarp, best.index, step)});
  if (best.index == INT_MAX) best.index = 0;  // only NaN is left
  return best;
}

/// The expert that row `row` of ops::route's `given` names for this lane, for lanes beyond K that of the first; -1 for all if it gives
/// none.
__device__ __forceinline__ int given_expert(const int* given, std::int64_t row, int lane, int num_active, int num_experts) {
  if (given == nullptr) return -1;
  const int mine = given[row + (lane < num_active ? lane : 0)], first = __shfl_sync(kFullWarp, mine, 0);
  if (__any_sync(kFullWarp, mine < 0 || mine >= num_experts)) return -1;
  return num_active > 1 && __all_sync(kFullWarp, mine == first) ? -1 : mine;
}

}  // namespace prl::ops::cuda
