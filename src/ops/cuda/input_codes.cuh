#pragma once

#include <cuda_fp8.h>

#include "ops/cuda/device.cuh"
#include "ops/cuda/input_codes.hpp"
#include "ops/eight_bit.hpp"

namespace prl::ops::cuda {

/// Magnitudes as bits: those of NaN are greater than all others.
__device__ __forceinline__ std::uint32_t greatest_of(const float (&v)[kVec], std::uint32_t greatest) {
#pragma unroll
  for (const float value : v) greatest = max(greatest, __float_as_uint(value) & 0x7fffffffu);
  return greatest;
}

/// The greatest of a block of whole warps, at most kMostThreads threads.
template <int kMostThreads>
__device__ __forceinline__ std::uint32_t greatest_of_block(std::uint32_t bits) {
  __shared__ std::uint32_t of_warps[kMostThreads / kWarp];
  bits = __reduce_max_sync(kFullWarp, bits);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = bits;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; ++i) bits = max(bits, of_warps[i]);
  return bits;
}

/// What codes of a row are multiplied by, and what gives them, from the greatest of its magnitudes.
struct CodeScale {
  float factor, inverse;
};
__device__ __forceinline__ CodeScale code_scale(std::uint32_t greatest) {
  if (greatest >= 0x7f800000u) return {__uint_as_float(0x7fc00000u), 1.0f};
  const int n = eight_bit_exponent(__uint_as_float(greatest), kMaxInputExponent);
  return {power_of_two(n), power_of_two(-n)};
}

/// The codes of kVec neighbours.
__device__ __forceinline__ uint2 codes_of(const float (&v)[kVec], float inverse) {
  union {
    __nv_fp8x2_storage_t pairs[kVec / 2];
    uint2 all;
  } made;
#pragma unroll
  for (int i = 0; i < kVec; i += 2)
    made.pairs[i / 2] = __nv_cvt_float2_to_fp8x2({v[i] * inverse, v[i + 1] * inverse}, __NV_SATFINITE, __NV_E4M3);
  return made.all;
}
__device__ __forceinline__ void store_codes(const InputCodes& to, std::int64_t row, int column, const float (&v)[kVec], float inverse) {
  *reinterpret_cast<uint2*>(to.codes + row * to.stride + column) = codes_of(v, inverse);
}

}  // namespace prl::ops::cuda
