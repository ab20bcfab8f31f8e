#pragma once

#include <immintrin.h>

#include <cstdint>

#include "tensor/dtype.hpp"

// Eight fp32 lanes. Included only by files compiled for AVX2 and FMA.
#define PRL_SIMD avx2

namespace prl::ops::cpu::avx2 {

struct Vec {
  static constexpr int kLanes = 8;
  __m256 v;
};

inline __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load_n(const float* p, int n, float fill = 0.0f) {
  const __m256i m = first_lanes(n);
  return {_mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(p, m), _mm256_castsi256_ps(m))};
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store_n(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }

inline Vec widen(__m128i bits) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))}; }
/// Nearest, ties to even; NaN stays a quiet NaN (as to_bf16).
inline __m128i narrow(Vec a) {
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i out = _mm256_blendv_epi8(r, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
}
inline Vec load(const BFloat16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
/// Codes of eight_bit.hpp, times 2^-120.
inline Vec load_codes(const std::uint8_t* p) {
  const __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));  // copies of the sign above
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(code, 20), _mm256_set1_epi32(INT32_MIN | 0x07f00000)))};
}
inline Vec load_n(const BFloat16* p, int n) {
  alignas(16) BFloat16 t[8] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
inline void store(BFloat16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a)); }
inline void store_n(BFloat16* p, Vec a, int n) {
  alignas(16) BFloat16 t[8];
  store(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
/// a * b + c, rounded once.
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
/// c - a * b, rounded once.
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
/// The larger; b if either is NaN.
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
/// 2^n for whole n in [-126, 127].
inline Vec pow2(Vec n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}
/// a < b ? x : y, lane by lane.
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) { return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))}; }
/// The first n lanes of x, then those of y; any n.
inline Vec select_first(int n, Vec x, Vec y) { return {_mm256_blendv_ps(y.v, x.v, _mm256_castsi256_ps(first_lanes(n)))}; }
inline float reduce_add(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float reduce_max(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

/// rows[i][j] -> rows[j][i] of an 8 by 8 block.
inline void transpose(Vec (&r)[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    r[j].v = _mm256_permute2f128_ps(u[j], u[j + 4], 0x20);
    r[j + 4].v = _mm256_permute2f128_ps(u[j], u[j + 4], 0x31);
  }
}

}  // namespace prl::ops::cpu::avx2
