#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define PRL_PAIRS avx512bf16
#include "ops/cpu/impl/bf16_pairs.hpp"

// bf16 products with VDPBF16PS: acc += a0 * b0 + a1 * b1 per lane, pairs of depth in order.

namespace prl::ops::cpu::avx512bf16 {
namespace {

constexpr int kRowTile = 14;  // 28 accumulators of the 32 registers

std::size_t sliver_bytes(std::int64_t depth) { return static_cast<std::size_t>(round_up(depth) / 2 * kRowTile + 16) * 4; }

/// A sliver is [depth / 2][rows] pairs, and so a single row is as it was.
template <typename T>
void pack_sliver_t(std::int32_t* out, const T* source, std::int64_t stride, int rows, std::int64_t depth, bool transposed) {
  if (rows == 1 && !transposed) {
    for (std::int64_t p = 0; p < depth; p += 32) _mm512_storeu_si512(out + p / 2, load_32(source + p, depth - p));
    return;
  }
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

/// What tiles take from a panel: vectors of pairs of bf16, or of codes that become them.
struct WidePairs {
  using Element = BFloat16;
  __m512bh column(const BFloat16* b, int j) const { return (__m512bh)_mm512_loadu_si512(b + 32 * j); }
};
struct CodePairs {
  using Element = std::uint8_t;
  PairExponents exponents;
  __m512bh column(const std::uint8_t* b, int j) const { return (__m512bh)widen_codes(b + 32 * j, exponents.of_half[j]); }
};

/// H rows by a panel of V vectors of columns.
template <int V, typename Source = WidePairs>
struct Tiles {
  static constexpr int kCols = 16 * V;
  using Element = typename Source::Element;
  /// How far ahead of its products a single row asks for B, which it reads once, from memory. Past a panel's end lies the next one.
  static constexpr std::int64_t kAhead = 2048 / sizeof(Element);

  template <int H>
  static void run(std::int64_t pairs, const std::int32_t* a, const Element* b, const Source& source, float* c, std::int64_t c_stride,
                  int cols, bool add_to_c) {
    __mmask16 mask[V];
    for (int j = 0; j < V; ++j) mask[j] = avx512::first_lanes(cols < 16 * j ? 0 : smaller(cols - 16 * j, 16));
    __m512 acc[H][V];
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i)
      for (int j = 0; j < V; ++j) acc[i][j] = add_to_c ? _mm512_maskz_loadu_ps(mask[j], c + i * c_stride + 16 * j) : _mm512_setzero_ps();
    for (std::int64_t p = 0; p < pairs; ++p) {
      if constexpr (H == 1)
        for (int j = 0; j < V; ++j) __builtin_prefetch(b + kAhead + 32 * j);
      __m512bh right[V];
      for (int j = 0; j < V; ++j) right[j] = source.column(b, j);
#pragma GCC unroll 16
      for (int i = 0; i < H; ++i) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32(a[i]);
        for (int j = 0; j < V; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x, right[j]);
      }
      a += H;
      b += 2 * kCols;
    }
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i)
      for (int j = 0; j < V; ++j) _mm512_mask_storeu_ps(c + i * c_stride + 16 * j, mask[j], acc[i][j]);
  }

  using Run = decltype(&run<1>);
  Run of_height[kRowTile + 1] = {};

  constexpr Tiles() { fill(std::make_integer_sequence<int, kRowTile>{}); }
  template <int... H>
  constexpr void fill(std::integer_sequence<int, H...>) {
    ((of_height[H + 1] = &run<H + 1>), ...);
  }
};
template <int V, typename Source = WidePairs>
constexpr Tiles<V, Source> kTiles;

template <int V>
void block(const GemmBlock& g) {
  constexpr int kCols = Tiles<V>::kCols;
  const std::int64_t depth = round_up<kCols>(g.depth), total = num_slivers(g.num_rows, kRowTile),
                     first_row = sliver_begin(g.first_sliver, g.num_rows, total);
  const auto product_at = [&](std::int64_t p, std::int64_t s, std::int64_t j) {
    const std::int64_t row = sliver_begin(s, g.num_rows, total), height = sliver_begin(s + 1, g.num_rows, total) - row;
    const auto* a = reinterpret_cast<const std::int32_t*>(g.a + static_cast<std::size_t>(s) * sliver_bytes(g.depth)) + p / 2 * height;
    kTiles<V>.of_height[height](smaller(kDepthBlock, depth - p) / 2, a,
                                reinterpret_cast<const BFloat16*>(g.b + j / kCols * g.panel_stride) + p * kCols, WidePairs{},
                                g.c + (row - first_row) * g.c_stride + j, g.c_stride, static_cast<int>(smaller(kCols, g.num_cols - j)),
                                g.accumulate || p > 0);
  };
  if (g.num_rows == 1) {
    // B goes by in the order in which it lies in memory.
    for (std::int64_t j = 0; j < g.num_cols; j += kCols)
      for (std::int64_t p = 0; p < depth; p += kDepthBlock) product_at(p, 0, j);
    return;
  }
  for (std::int64_t p = 0; p < depth; p += kDepthBlock)
    for (std::int64_t s = g.first_sliver; s < g.first_sliver + g.num_slivers; ++s)
      for (std::int64_t j = 0; j < g.num_cols; j += kCols) product_at(p, s, j);
}

/// As block<2>, of codes: widened on the way into registers for one or two slivers, once into scratch for more.
void block_eight(const GemmBlock& g) {
  const std::int64_t depth = round_up(g.depth), total = num_slivers(g.num_rows, kRowTile),
                     first_row = sliver_begin(g.first_sliver, g.num_rows, total);
  auto* const wide = reinterpret_cast<BFloat16*>(g.scratch);
  const auto product_at = [&](std::int64_t p, std::int64_t j) {
    const char* const panel = g.b + j / kColTile * g.panel_stride;
    const std::int64_t rows = smaller(kDepthBlock, depth - p);
    const bool widens_once = g.num_slivers > 2;
    if (widens_once) widen_panel(wide, panel, p, rows);
    const CodePairs source{PairExponents(panel)};
    for (std::int64_t s = g.first_sliver; s < g.first_sliver + g.num_slivers; ++s) {
      const std::int64_t row = sliver_begin(s, g.num_rows, total), height = sliver_begin(s + 1, g.num_rows, total) - row;
      const auto* a = reinterpret_cast<const std::int32_t*>(g.a + static_cast<std::size_t>(s) * sliver_bytes(g.depth)) + p / 2 * height;
      float* const c = g.c + (row - first_row) * g.c_stride + j;
      const int cols = static_cast<int>(smaller(kColTile, g.num_cols - j));
      const bool add_to_c = g.accumulate || p > 0;
      if (widens_once)
        kTiles<2>.of_height[height](rows / 2, a, wide, WidePairs{}, c, g.c_stride, cols, add_to_c);
      else
        kTiles<2, CodePairs>.of_height[height](rows / 2, a, codes_of(panel) + p * kColTile, source, c, g.c_stride, cols, add_to_c);
    }
  };
  if (g.num_rows == 1) {  // B goes by in the order in which it lies in memory
    for (std::int64_t j = 0; j < g.num_cols; j += kColTile)
      for (std::int64_t p = 0; p < depth; p += kDepthBlock) product_at(p, j);
    return;
  }
  for (std::int64_t p = 0; p < depth; p += kDepthBlock)
    for (std::int64_t j = 0; j < g.num_cols; j += kColTile) product_at(p, j);
}

constexpr GemmKernels kGemmEight = {
    .row_tile = kRowTile,
    .col_tile = kColTile,
    .depth_multiple = kDepthTile,
    .scratch_bytes = kDepthBlock * kColTile * sizeof(BFloat16),
    .dtype = DType::kBF16,
    .sliver_bytes = sliver_bytes,
    .panel_bytes = panel_bytes_eight,
    .pack_sliver = pack_sliver,
    .pack_panel = pack_panel_eight,
    .unpack_column = unpack_column_eight,
    .block = block_eight,
};

template <int V>
constexpr GemmKernels kGemm = {
    .row_tile = kRowTile,
    .col_tile = Tiles<V>::kCols,
    .depth_multiple = kDepthMultiple<Tiles<V>::kCols>,
    .scratch_bytes = 0,
    .dtype = DType::kBF16,
    .sliver_bytes = sliver_bytes,
    .panel_bytes = panel_bytes<Tiles<V>::kCols>,
    .pack_sliver = pack_sliver,
    .pack_panel = pack_panel<Tiles<V>::kCols>,
    .unpack_column = unpack_column<Tiles<V>::kCols>,
    .block = block<V>,
};

}  // namespace
}  // namespace prl::ops::cpu::avx512bf16

namespace prl::ops::cpu {

const GemmKernels& gemm_bf16_avx512bf16() { return avx512bf16::kGemm<2>; }
const GemmKernels& gemm_bf16_eight_avx512bf16() { return avx512bf16::kGemmEight; }
const GemmKernels& gemm_bf16_narrow_avx512bf16() { return avx512bf16::kGemm<1>; }

}  // namespace prl::ops::cpu
