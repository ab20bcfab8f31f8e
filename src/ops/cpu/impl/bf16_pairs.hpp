#pragma once

#include <cstring>

#include "base/error.hpp"
#include "ops/cpu/eight_panels.hpp"
#include "ops/cpu/kernels.hpp"
#include "ops/cpu/simd/avx512.hpp"

// Packing for the instructions that multiply pairs of bf16 (VDPBF16PS, TDPBF16PS). PRL_PAIRS names the namespace.
//
//   panel    [depth / 2][columns][2]: of 32 columns, 128 bytes hold rows p and p + 1, and the two halves of the columns are two AMX tiles;
//            or of 16
//   depth is padded with zeros to a multiple of 32, one tile row of A, in panels of 16 columns to one of 2

namespace prl::ops::cpu::PRL_PAIRS {

using avx512::Vec;

constexpr int kColTile = 32;
constexpr int kDepthTile = 32;
/// Depth walked per visit of a tile of C, which lives in fp32 memory in between; C enters again unchanged, so this is not
/// part of the order of summation. 512 columns of two 16-row slivers are 32 KiB and stay in L1.
constexpr std::int64_t kDepthBlock = 512;

template <int Cols>
constexpr int kDepthMultiple = Cols == kColTile ? kDepthTile : 2;
template <int Cols = kColTile>
std::int64_t round_up(std::int64_t k) {
  return (k + kDepthMultiple<Cols> - 1) / kDepthMultiple<Cols> * kDepthMultiple<Cols>;
}
inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

/// 32 consecutive values as bf16; beyond `count` they are zero.
inline __m512i load_32(const BFloat16* p, std::int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(p);
  const __mmask32 mask = count <= 0 ? 0 : (1u << count) - 1u;
  return _mm512_maskz_loadu_epi16(mask, p);
}
inline __m512i load_32(const float* p, std::int64_t count) {
  const auto part = [&](std::int64_t at) {
    const std::int64_t n = count - at;
    const Vec v = n >= 16 ? avx512::load(p + at) : avx512::load_n(n <= 0 ? p : p + at, n <= 0 ? 0 : static_cast<int>(n));
    return avx512::narrow(v);
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(part(0)), part(16), 1);
}
/// 16 consecutive values as bf16 in the low halves of 16 lanes.
inline __m512i load_16(const BFloat16* p, int count) {
  return _mm512_cvtepu16_epi32(count >= 16 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                           : _mm256_maskz_loadu_epi16(avx512::first_lanes(count < 0 ? 0 : count), p));
}
inline __m512i load_16(const float* p, int count) {
  return _mm512_cvtepu16_epi32(avx512::narrow(count >= 16 ? avx512::load(p) : avx512::load_n(p, count < 0 ? 0 : count)));
}
/// Lane j holds (row p, column j) below (row p + 1, column j).
template <typename T>
inline __m512i pair_rows(const T* source, std::int64_t stride, std::int64_t p, std::int64_t depth, int cols) {
  const __m512i low = p < depth ? load_16(source + p * stride, cols) : _mm512_setzero_si512();
  const __m512i high = p + 1 < depth ? load_16(source + (p + 1) * stride, cols) : _mm512_setzero_si512();
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
/// Rows of 16 pairs become columns.
inline void transpose_pairs(__m512i (&r)[16]) {
  Vec v[16];
  for (int i = 0; i < 16; ++i) v[i].v = _mm512_castsi512_ps(r[i]);
  avx512::transpose(v);
  for (int i = 0; i < 16; ++i) r[i] = _mm512_castps_si512(v[i].v);
}

template <int Cols, typename T>
void pack_panel_t(BFloat16* out, const T* source, std::int64_t stride, int cols, std::int64_t depth, bool transposed) {
  for (int j = 0; j < Cols; j += 16)
    for (std::int64_t p = 0; p < round_up(depth); p += kDepthTile) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) {
        if (transposed)
          r[i] = pair_rows(source + j, stride, p + 2 * i, depth, cols - j);
        else
          r[i] = j + i < cols ? load_32(source + (j + i) * stride + p, depth - p) : _mm512_setzero_si512();
      }
      if (!transposed) transpose_pairs(r);
      const std::int64_t pairs = smaller(16, (round_up<Cols>(depth) - p) / 2);
      for (std::int64_t i = 0; i < pairs; ++i) _mm512_storeu_si512(out + (p / 2 + i) * (2 * Cols) + 2 * j, r[i]);
    }
}
template <int Cols = kColTile>
void pack_panel(void* out, const void* source, DType dtype, std::int64_t stride, int cols, std::int64_t depth, bool transposed) {
  if (dtype == DType::kBF16)
    pack_panel_t<Cols>(static_cast<BFloat16*>(out), static_cast<const BFloat16*>(source), stride, cols, depth, transposed);
  else
    pack_panel_t<Cols>(static_cast<BFloat16*>(out), static_cast<const float*>(source), stride, cols, depth, transposed);
}
template <int Cols = kColTile>
void unpack_column(float* out, const void* panel, int j, std::int64_t depth) {
  for (std::int64_t p = 0; p < depth; ++p) out[p] = to_f32(static_cast<const BFloat16*>(panel)[p / 2 * (2 * Cols) + 2 * j + p % 2]);
}
template <int Cols = kColTile>
std::size_t panel_bytes(std::int64_t depth) {
  return static_cast<std::size_t>(round_up<Cols>(depth) * Cols) * sizeof(BFloat16);
}

/// Panels of 8-bit codes, in the order of the bf16 ones of 32 columns.
inline std::size_t panel_bytes_eight(std::int64_t depth) {
  return static_cast<std::size_t>(kColTile) * (sizeof(float) + static_cast<std::size_t>(round_up(depth)));
}
inline const std::uint8_t* codes_of(const void* panel) { return static_cast<const std::uint8_t*>(panel) + kColTile * sizeof(float); }
inline std::int64_t place_of_code(std::int64_t p, int j) { return p / 2 * (2 * kColTile) + 2 * j + p % 2; }
inline void pack_panel_eight(void* out, const void* source, DType dtype, std::int64_t stride, int cols, std::int64_t depth,
                             bool transposed) {
  PRL_CHECK(!transposed, "panels of 8 bits of a transposed matrix");
  std::memset(out, 0, panel_bytes_eight(depth));
  if (dtype == DType::kBF16)
    pack_codes<BFloat16>(out, static_cast<const BFloat16*>(source), stride, cols, kColTile, depth, place_of_code);
  else
    pack_codes<BFloat16>(out, static_cast<const float*>(source), stride, cols, kColTile, depth, place_of_code);
}
inline void unpack_column_eight(float* out, const void* panel, int j, std::int64_t depth) {
  const int n = exponent_of_factor(static_cast<const float*>(panel)[j]);
  for (std::int64_t p = 0; p < depth; ++p) out[p] = eight_bit_value(codes_of(panel)[place_of_code(p, j)], n);
}
/// What is added to the bf16 exponents of both rows of a pair, for the columns of each half of a panel. It makes the code of NaN that.
struct PairExponents {
  __m512i of_half[2];
  explicit PairExponents(const void* panel) {
    for (int half = 0; half < 2; ++half) {
      const __m512i factor = _mm512_loadu_si512(static_cast<const float*>(panel) + 16 * half);
      const __m512i of_factor = _mm512_srli_epi32(factor, 23);
      const __m512i exponent = _mm512_mask_mov_epi32(_mm512_sub_epi32(of_factor, _mm512_set1_epi32(127)),
                                                     _mm512_cmpeq_epi32_mask(of_factor, _mm512_set1_epi32(255)), _mm512_set1_epi32(240));
      const __m512i sum = _mm512_slli_epi32(exponent, 7);
      of_half[half] = _mm512_or_si512(_mm512_and_si512(sum, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(sum, 16));
    }
  }
};
/// 32 codes as bf16.
inline __m512i widen_codes(const std::uint8_t* codes, __m512i exponents) {
  const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));  // copies of the sign above
  const __m512i tiny = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(static_cast<short>(0x87f0)));
  return _mm512_mask_add_epi16(tiny, _mm512_test_epi16_mask(tiny, _mm512_set1_epi16(0x07f0)), tiny, exponents);  // zeros stay zeros
}
/// `depth` rows of a panel from row p on, as the bf16 panel holds them. Codes that are read once come from memory: kAhead bytes on are
/// asked for, and past a panel's end lies the next one.
template <std::int64_t kAhead = 0>
inline void widen_panel(BFloat16* out, const void* panel, std::int64_t p, std::int64_t depth) {
  const PairExponents exponents(panel);
  const std::uint8_t* const codes = codes_of(panel) + p * kColTile;
  for (std::int64_t i = 0; i < depth * kColTile; i += 64) {
    if constexpr (kAhead > 0) _mm_prefetch(reinterpret_cast<const char*>(codes) + i + kAhead, _MM_HINT_T0);
    _mm512_storeu_si512(out + i, widen_codes(codes + i, exponents.of_half[0]));
    _mm512_storeu_si512(out + i + 32, widen_codes(codes + i + 32, exponents.of_half[1]));
  }
}

/// Sixteen rows by 32 of depth of the left operand, row by row; rows from `rows` on are zero.
template <typename T>
void load_left(__m512i (&r)[16], const T* source, std::int64_t stride, int rows, std::int64_t p, std::int64_t depth, bool transposed) {
  for (int i = 0; i < 16; ++i) {
    if (transposed)
      r[i] = pair_rows(source, stride, p + 2 * i, depth, rows);
    else
      r[i] = i < rows ? load_32(source + i * stride + p, depth - p) : _mm512_setzero_si512();
  }
  if (transposed) transpose_pairs(r);
}

}  // namespace prl::ops::cpu::PRL_PAIRS
