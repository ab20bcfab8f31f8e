#include <cstddef>
#include <cstdint>
#include <utility>

#define PRL_PAIRS avx512bf16
#include "ops/cpu/impl/bf16_pairs.hpp"

// bf16 products with VDPBF16PS: acc += a0 * b0 + a1 * b1 per lane, pairs of depth in order.

namespace prl::ops::cpu::avx512bf16 {
namespace {

constexpr int kRowTile = 14;  // 28 accumulators of the 32 registers

std::size_t sliver_bytes(std::int64_t depth) { return static_cast<std::size_t>(round_up(depth) / 2 * kRowTile + 16) * 4; }

/// A sliver is [depth / 2][rows] pairs.
template <typename T>
void pack_sliver_t(std::int32_t* out, const T* source, std::int64_t stride, int rows, std::int64_t depth, bool transposed) {
  for (std::int64_t p = 0; p < round_up(depth); p += kDepthTile) {
    __m512i r[16];
    load_left(r, source, stride, rows, p, depth, transposed);
    transpose_pairs(r);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (p / 2 + i) * rows, r[i]);  // surplus lanes are overwritten by the next
  }
}
void pack_sliver(void* out, const void* source, DType dtype, std::int64_t stride, int rows, std::int64_t depth, bool transposed) {
  if (dtype == DType::kBF16)
    pack_sliver_t(static_cast<std::int32_t*>(out), static_cast<const BFloat16*>(source), stride, rows, depth, transposed);
  else
    pack_sliver_t(static_cast<std::int32_t*>(out), static_cast<const float*>(source), stride, rows, depth, transposed);
}

template <int H>
void tile(std::int64_t pairs, const std::int32_t* a, const BFloat16* b, float* c, std::int64_t c_stride, int cols, bool add_to_c) {
  const __mmask16 mask[2] = {avx512::first_lanes(cols < 16 ? cols : 16), avx512::first_lanes(cols < 16 ? 0 : cols - 16)};
  __m512 acc[H][2];
#pragma GCC unroll 16
  for (int i = 0; i < H; ++i)
    for (int j = 0; j < 2; ++j) acc[i][j] = add_to_c ? _mm512_maskz_loadu_ps(mask[j], c + i * c_stride + 16 * j) : _mm512_setzero_ps();
  for (std::int64_t p = 0; p < pairs; ++p) {
    const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + kColTile);
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(a[i]);
      acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
      acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
    }
    a += H;
    b += 2 * kColTile;
  }
#pragma GCC unroll 16
  for (int i = 0; i < H; ++i)
    for (int j = 0; j < 2; ++j) _mm512_mask_storeu_ps(c + i * c_stride + 16 * j, mask[j], acc[i][j]);
}

using Tile = decltype(&tile<1>);
template <int... H>
constexpr void fill(Tile (&out)[kRowTile + 1], std::integer_sequence<int, H...>) {
  ((out[H + 1] = &tile<H + 1>), ...);
}
struct Tiles {
  Tile run[kRowTile + 1] = {};
  constexpr Tiles() { fill(run, std::make_integer_sequence<int, kRowTile>{}); }
};
constexpr Tiles kTiles;

void block(const GemmBlock& g) {
  const std::int64_t depth = round_up(g.depth), total = num_slivers(g.num_rows, kRowTile),
                     first_row = sliver_begin(g.first_sliver, g.num_rows, total);
  for (std::int64_t p = 0; p < depth; p += kDepthBlock) {
    const std::int64_t pairs = smaller(kDepthBlock, depth - p) / 2;
    for (std::int64_t s = g.first_sliver; s < g.first_sliver + g.num_slivers; ++s) {
      const std::int64_t row = sliver_begin(s, g.num_rows, total), height = sliver_begin(s + 1, g.num_rows, total) - row;
      const std::int32_t* a =
          reinterpret_cast<const std::int32_t*>(g.a + static_cast<std::size_t>(s) * sliver_bytes(g.depth)) + p / 2 * height;
      for (std::int64_t j = 0; j < g.num_cols; j += kColTile)
        kTiles.run[height](pairs, a, reinterpret_cast<const BFloat16*>(g.b + j / kColTile * g.panel_stride) + p * kColTile,
                           g.c + (row - first_row) * g.c_stride + j, g.c_stride, static_cast<int>(smaller(kColTile, g.num_cols - j)),
                           g.accumulate || p > 0);
    }
  }
}

constexpr GemmKernels kGemm = {
    .row_tile = kRowTile,
    .col_tile = kColTile,
    .depth_multiple = kDepthTile,
    .scratch_bytes = 0,
    .dtype = DType::kBF16,
    .sliver_bytes = sliver_bytes,
    .panel_bytes = panel_bytes,
    .pack_sliver = pack_sliver,
    .pack_panel = pack_panel,
    .unpack_column = unpack_column,
    .block = block,
};

}  // namespace
}  // namespace prl::ops::cpu::avx512bf16

namespace prl::ops::cpu {

const GemmKernels& gemm_bf16_avx512bf16() { return avx512bf16::kGemm; }

}  // namespace prl::ops::cpu
