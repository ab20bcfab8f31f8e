#pragma once

#include "ops/cuda/device.cuh"

// Norm and rotation of a head that neighbouring threads of a warp hold, 8 elements each. Each step is that of norm.cu and
// pointwise.cu, rounding included, so the results are theirs bit for bit.

namespace prl::ops::cuda {

__device__ __forceinline__ float squares_of(const float (&v)[kVec]) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVec; ++i) squares = fmaf(v[i], v[i], squares);
  return squares;
}
/// Not rounded yet.
__device__ __forceinline__ void norm_by(float (&v)[kVec], const float (&w)[kVec], float scale) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = v[i] * scale * w[i];
}
/// v = rms_norm(v) * w. Every thread of the warp calls it; the sum is right for all heads, w may be anything where v is not used.
template <typename T, int kLanes>
__device__ __forceinline__ void norm_head(float (&v)[kVec], const float (&w)[kVec], float inverse_dim, float eps) {
  norm_by(v, w, norm_scale(warp_sum<kLanes>(squares_of(v)), inverse_dim, eps));
  round_all<T>(v);
}

/// Which of kLanes holds the elements that this one's turn with: half of the `rotated` first elements of a head away; itself behind them.
template <int kLanes>
__device__ __forceinline__ int partner_of(int rotated) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, step = rotated / 2 / kVec;
  if (lane * kVec >= rotated) return lane;
  return lane * kVec < rotated / 2 ? lane + step : lane - step;
}
/// Their values. v are T's already; every thread of the warp calls it.
template <typename T, int kLanes>
__device__ __forceinline__ void partners_of(float (&other)[kVec], const float (&v)[kVec], int rotated) {
  Raw<T> own;
  own.pack(v);
  own.template of_lane<kLanes>(partner_of<kLanes>(rotated)).unpack(other);
}

/// Sines with the sign that they have in a half's sum: the first half turns by -sin, the second by sin.
__device__ __forceinline__ void sign_sines(float (&sine)[kVec], bool is_first_half) {
  const std::uint32_t sign = is_first_half ? 0x80000000u : 0u;
#pragma unroll
  for (int i = 0; i < kVec; ++i) sine[i] = __uint_as_float(__float_as_uint(sine[i]) ^ sign);
}
__device__ __forceinline__ void rotate_head(float (&v)[kVec], const float (&other)[kVec], const float (&cosine)[kVec],
                                            const float (&signed_sine)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = fmaf(other[i], signed_sine[i], v[i] * cosine[i]);
}

}  // namespace prl::ops::cuda
