#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "tensor/dtype.hpp"

// Four fp32 lanes in GCC/Clang vector types: SSE2 on any x86-64, NEON on arm64.
#define PRL_SIMD portable

namespace prl::ops::cpu::portable {

typedef float Lanes __attribute__((vector_size(16)));
typedef std::int32_t IntLanes __attribute__((vector_size(16)));

struct Vec {
  static constexpr int kLanes = 4;
  Lanes v;
};

inline Vec zero() { return {Lanes{0, 0, 0, 0}}; }
inline Vec set1(float x) { return {Lanes{x, x, x, x}}; }
inline Vec load(const float* p) {
  Vec r;
  __builtin_memcpy(&r.v, p, sizeof r.v);
  return r;
}
inline Vec load_n(const float* p, int n, float fill = 0.0f) {
  Vec r = set1(fill);
  for (int i = 0; i < 4; ++i)
    if (i < n) r.v[i] = p[i];
  return r;
}
inline void store(float* p, Vec a) { __builtin_memcpy(p, &a.v, sizeof a.v); }
inline void store_n(float* p, Vec a, int n) {
  for (int i = 0; i < 4; ++i)
    if (i < n) p[i] = a.v[i];
}
inline Vec load(const BFloat16* p) { return {Lanes{to_f32(p[0]), to_f32(p[1]), to_f32(p[2]), to_f32(p[3])}}; }
/// Codes of eight_bit.hpp, times 2^-120.
inline Vec load_codes(const std::uint8_t* p) {
  const IntLanes code{p[0], p[1], p[2], p[3]};
  return {reinterpret_cast<Lanes>((code << 20 & 0x07f00000) | (code << 24 & INT32_MIN))};
}
inline Vec load_n(const BFloat16* p, int n) {
  Vec r = zero();
  for (int i = 0; i < 4; ++i)
    if (i < n) r.v[i] = to_f32(p[i]);
  return r;
}
inline void store_n(BFloat16* p, Vec a, int n) {
  for (int i = 0; i < 4; ++i)
    if (i < n) p[i] = to_bf16(a.v[i]);
}
inline void store(BFloat16* p, Vec a) { store_n(p, a, 4); }

inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
/// a * b + c; rounded once where every CPU of the kind can, twice elsewhere.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
  return {reinterpret_cast<Lanes>(
      vfmaq_f32(reinterpret_cast<float32x4_t>(c.v), reinterpret_cast<float32x4_t>(a.v), reinterpret_cast<float32x4_t>(b.v)))};
#else
  return {a.v * b.v + c.v};
#endif
}
/// c - a * b.
inline Vec fnma(Vec a, Vec b, Vec c) { return fma({-a.v}, b, c); }
inline Vec blend(IntLanes mask, Vec x, Vec y) {
  return {reinterpret_cast<Lanes>((reinterpret_cast<IntLanes>(x.v) & mask) | (reinterpret_cast<IntLanes>(y.v) & ~mask))};
}
/// The larger; b if either is NaN.
inline Vec max(Vec a, Vec b) { return blend(a.v > b.v, a, b); }
inline Vec min(Vec a, Vec b) { return blend(a.v < b.v, a, b); }
inline Vec sqrt(Vec a) { return {Lanes{std::sqrt(a.v[0]), std::sqrt(a.v[1]), std::sqrt(a.v[2]), std::sqrt(a.v[3])}}; }
/// Nearest whole number, ties to even; |a| < 2^22.
inline Vec round(Vec a) {
  const Lanes magic = set1(12582912.0f).v;  // 1.5 * 2^23
  return {(a.v + magic) - magic};
}
/// 2^n for whole n in [-126, 127].
inline Vec pow2(Vec n) {
  const Lanes biased = n.v + set1(12582912.0f + 127.0f).v;  // the low bits of the sum hold n + 127
  return {reinterpret_cast<Lanes>(reinterpret_cast<IntLanes>(biased) << 23)};
}
/// a < b ? x : y, lane by lane.
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) { return blend(a.v < b.v, x, y); }
/// The first n lanes of x, then those of y; any n.
inline Vec select_first(int n, Vec x, Vec y) { return blend(IntLanes{0, 1, 2, 3} < IntLanes{n, n, n, n}, x, y); }
inline float reduce_add(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float reduce_max(Vec a) {
  const float x = a.v[0] > a.v[2] ? a.v[0] : a.v[2];
  const float y = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
  return x > y ? x : y;
}

/// rows[i][j] -> rows[j][i] of a 4 by 4 block.
inline void transpose(Vec (&r)[4]) {
  for (int i = 0; i < 4; ++i)
    for (int j = i + 1; j < 4; ++j) {
      const float t = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = t;
    }
}

}  // namespace prl::ops::cpu::portable
