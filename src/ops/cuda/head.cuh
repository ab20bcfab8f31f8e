#pragma once

#include "ops/cuda/device.cuh"

// Norm and rotation of a head that neighbouring threads of a warp hold, 8 elements each. Each step is that of norm.cu and
// pointwise.cu, rounding included, so the results are theirs bit for bit.

namespace prl::ops::cuda {

/// v = rms_norm(v) * w. Every thread of the warp calls it; the sum is right for all heads, w may be anything where v is not used.
template <typename T, int kLanes>
__device__ __forceinline__ void norm_head(float (&v)[kVec], const float (&w)[kVec], int dim, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVec; ++i) squares = fmaf(v[i], v[i], squares);
  const float scale = 1.0f / sqrtf(warp_sum<kLanes>(squares) / static_cast<float>(dim) + eps);
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = rounded<T>(v[i] * scale * w[i]);
}

/// The elements that v's turn with: half a head away. Every thread of the warp calls it.
template <int kLanes>
__device__ __forceinline__ void partners_of(float (&other)[kVec], const float (&v)[kVec], int dim) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, step = dim / 2 / kVec;
  const int partner = lane * kVec < dim / 2 ? lane + step : lane - step;
#pragma unroll
  for (int i = 0; i < kVec; ++i) other[i] = __shfl_sync(kFullWarp, v[i], partner, kLanes);
}

__device__ __forceinline__ void rotate_head(float (&v)[kVec], const float (&other)[kVec], const float (&cosine)[kVec],
                                            const float (&sine)[kVec], bool is_first_half) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float first = is_first_half ? v[i] : other[i], second = is_first_half ? other[i] : v[i];
    v[i] = is_first_half ? fmaf(-second, sine[i], first * cosine[i]) : fmaf(first, sine[i], second * cosine[i]);
  }
}

}  // namespace prl::ops::cuda
