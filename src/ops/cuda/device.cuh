#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ops/cuda/launch.hpp"

// What kernels share: values in storage types, 8 of them at a time, and sums over a warp or block in one fixed order.
// BFloat16 of tensor/ is used for storage on both sides; its bits are those of __nv_bfloat16.

namespace prl::ops::cuda {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
/// The value after a round trip through storage.
template <typename T>
__device__ __forceinline__ float rounded(float v) {
  return to_float(from_float<T>(v));
}

/// Two numbers rounded to bf16, the first in the lower half.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

/// Of RMSNorm, to two units in the last place, in every kernel that norms: 1 / sqrt(mean of squares + eps). Exact roots and divisions
/// branch for numbers that no row of a network has, and a row's only scale is what all of its elements wait for.
__device__ __forceinline__ float norm_scale(float sum_of_squares, float inverse_width, float eps) {
  return rsqrtf(sum_of_squares * inverse_width + eps);
}
/// 1 / x as exact, without a branch: an inverse that would be subnormal is zero.
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2e = 1.44269504088896341f;
/// 2^x by one instruction, to a few 2^-24 of itself; what would be subnormal is zero.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// A number that is known here, and not only where it is used: the compiler puts off what it can, behind what others wait for.
__device__ __forceinline__ std::int64_t known_here(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

/// Elements a thread handles at a time, in every kernel and for every type: it is part of the order of summation.
constexpr int kVec = 8;

/// Of two bf16 that share a word, the first is its lower half. One instruction each: left to itself the compiler takes two.
template <typename T>
__device__ __forceinline__ float unpacked(const std::uint32_t* words, int i) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  else
    return to_float(reinterpret_cast<const T*>(words)[i]);
}

/// kVec values after a round trip through storage; bf16 in pairs, since a conversion alone takes many times as long as of two.
template <typename T>
__device__ __forceinline__ void round_all(float (&v)[kVec]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {
      const std::uint32_t pair = pack_bf16(v[i], v[i + 1]);
      v[i] = unpacked<T>(&pair, 0);
      v[i + 1] = unpacked<T>(&pair, 1);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = rounded<T>(v[i]);
  }
}

/// kVec values as they lie in memory: of bf16 half of the registers that a load's floats take.
template <typename T>
struct Raw {
  static constexpr int kWords = static_cast<int>(sizeof(T)) * kVec / 4;
  alignas(16) std::uint32_t words[kWords];
  /// `p` is 16-byte aligned and all kVec are there.
  __device__ __forceinline__ void read(const T* p) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) reinterpret_cast<uint4*>(words)[i / 4] = reinterpret_cast<const uint4*>(p)[i / 4];
  }
  __device__ __forceinline__ float operator[](int i) const { return unpacked<T>(words, i); }
  __device__ __forceinline__ void unpack(float (&v)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = (*this)[i];
  }
  /// Values that are T's already.
  __device__ __forceinline__ void pack(const float (&v)[kVec]) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = __float_as_uint(v[i]);
    }
  }
  /// Those of lane `from` of each `kLanes`. Every thread of the warp calls it.
  template <int kLanes>
  __device__ __forceinline__ Raw of_lane(int from) const {
    Raw other;
#pragma unroll
    for (int i = 0; i < kWords; ++i) other.words[i] = __shfl_sync(kFullWarp, words[i], from, kLanes);
    return other;
  }
};

/// Loads `count` (at most kVec) elements; the others are 0. `kWide`: all kVec of them are there and p is 16-byte aligned.
template <bool kWide, typename T>
__device__ __forceinline__ void load(float (&out)[kVec], const T* p, int count) {
  if constexpr (kWide) {
    if constexpr (sizeof(T) == 4) {
      const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
      out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    } else {
      const uint4 raw = *reinterpret_cast<const uint4*>(p);
      const std::uint32_t words[kVec / 2] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < kVec; ++i) out[i] = unpacked<T>(words, i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[i] = i < count ? to_float(p[i]) : 0.0f;
  }
}

template <bool kWide, typename T>
__device__ __forceinline__ void store(T* p, const float (&v)[kVec], int count) {
  if constexpr (kWide) {
    if constexpr (sizeof(T) == 4) {
      reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
      reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
      uint4 raw;
      T* out = reinterpret_cast<T*>(&raw);
#pragma unroll
      for (int i = 0; i < kVec; ++i) out[i] = from_float<T>(v[i]);
      *reinterpret_cast<uint4*>(p) = raw;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (i < count) p[i] = from_float<T>(v[i]);
  }
}

/// Sum over groups of `kWidth` neighbouring lanes, the same in all of them: a butterfly, so one tree for every lane.
template <int kWidth = kWarp, typename V>
__device__ __forceinline__ V warp_sum(V v) {
#pragma unroll
  for (int step = kWidth / 2; step > 0; step /= 2) v += __shfl_xor_sync(kFullWarp, v, step, kWidth);
  return v;
}
/// One, two or four numbers, added in pairs.
template <int kCount>
__device__ __forceinline__ float pair_sum(const float (&v)[kCount]) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  if constexpr (kCount == 1)
    return v[0];
  else if constexpr (kCount == 2)
    return v[0] + v[1];
  else
    return (v[0] + v[1]) + (v[2] + v[3]);
}
template <int kWidth = kWarp>
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int step = kWidth / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, step, kWidth));
  return v;
}

/// Sum over the block, the same in every thread; warps are added in order. `scratch` holds one V per warp and is free for another
/// use only after the next barrier.
template <typename V>
__device__ __forceinline__ V block_sum(V v, V* scratch) {
  v = warp_sum(v);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, num_warps = static_cast<int>(blockDim.x) / kWarp;
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[warp] = v;
  __syncthreads();
  V total = scratch[0];
  for (int i = 1; i < num_warps; ++i) total += scratch[i];
  return total;
}
__device__ __forceinline__ float block_max(float v, float* scratch) {
  v = warp_max(v);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, num_warps = static_cast<int>(blockDim.x) / kWarp;
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[warp] = v;
  __syncthreads();
  float top = scratch[0];
  for (int i = 1; i < num_warps; ++i) top = fmaxf(top, scratch[i]);
  return top;
}

/// Calls body(T{}) with the storage type of `dtype`, kF32 or kBF16.
template <typename Body>
void with_type(DType dtype, Body&& body) {
  if (dtype == DType::kBF16)
    body(__nv_bfloat16{});
  else
    body(float{});
}
/// Calls body(std::bool_constant) so that kernels are made for both values.
template <typename Body>
void with_bool(bool value, Body&& body) {
  if (value)
    body(std::true_type{});
  else
    body(std::false_type{});
}

/// True if rows of the view can be read 8 elements at a time.
inline bool is_wide(const ConstTensorView& v) {
  return is_aligned(v.data, 16) && v.shape.num_cols() % kVec == 0 &&
         (v.shape.num_rows() <= 1 || v.row_stride * static_cast<std::int64_t>(size_of(v.dtype)) % 16 == 0);
}

}  // namespace prl::ops::cuda
