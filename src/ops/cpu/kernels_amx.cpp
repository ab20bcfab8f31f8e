#include <cstddef>
#include <cstdint>
#include <cstring>

#define PRL_PAIRS amx
#include "ops/cpu/impl/bf16_pairs.hpp"

// bf16 products with TDPBF16PS on tiles of 16 rows by 32 of depth (A) and 16 pairs by 16 columns (B).
//
// Two slivers of A and one panel of B make four tiles of C: per step 4 KiB are loaded for four products of 16 cycles each,
// the sliver pair from L1, the panel from L2.

namespace prl::ops::cpu::amx {
namespace {

constexpr int kRowTile = 16;
constexpr std::int64_t kTileElements = 16 * 32;
/// Four tiles of C that hang over the edge.
constexpr std::size_t kTileScratch = 4 * 256 * sizeof(float);

std::size_t sliver_bytes(std::int64_t depth) { return static_cast<std::size_t>(round_up(depth) * kRowTile) * sizeof(BFloat16); }

/// A sliver is [depth / 32] tiles of 16 rows by 32; rows that do not exist are zero.
template <typename T>
void pack_sliver_t(BFloat16* out, const T* source, std::int64_t stride, int rows, std::int64_t depth, bool transposed) {
  for (std::int64_t p = 0; p < round_up(depth); p += kDepthTile, out += kTileElements) {
    __m512i r[16];
    load_left(r, source, stride, rows, p, depth, transposed);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 32, r[i]);
  }
}
void pack_sliver(void* out, const void* source, DType dtype, std::int64_t stride, int rows, std::int64_t depth, bool transposed) {
  if (dtype == DType::kBF16)
    pack_sliver_t(static_cast<BFloat16*>(out), static_cast<const BFloat16*>(source), stride, rows, depth, transposed);
  else
    pack_sliver_t(static_cast<BFloat16*>(out), static_cast<const float*>(source), stride, rows, depth, transposed);
}

/// Layout of the LDTILECFG operand (Intel SDM, palette 1).
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kConfig;

/// A 16 by 16 tile of C where it lies, or in scratch if it hangs over the edge.
struct OutTile {
  float* memory;
  std::int64_t bytes_per_row;
  float* c;
  std::int64_t c_stride;
  int rows, cols;

  OutTile(float* out, std::int64_t stride, std::int64_t r, std::int64_t n, float* scratch)
      : c(out), c_stride(stride), rows(static_cast<int>(r)), cols(static_cast<int>(n < 0 ? 0 : smaller(n, 16))) {
    const bool whole = rows == 16 && cols == 16;
    memory = whole ? c : scratch;
    bytes_per_row = (whole ? stride : 16) * static_cast<std::int64_t>(sizeof(float));
  }
  void fetch() const {
    if (memory == c) return;
    for (int i = 0; i < rows; ++i) _mm512_storeu_ps(memory + i * 16, _mm512_maskz_loadu_ps(avx512::first_lanes(cols), c + i * c_stride));
    for (int i = rows; i < 16; ++i) _mm512_storeu_ps(memory + i * 16, _mm512_setzero_ps());
  }
  void put_back() const {
    if (memory == c) return;
    for (int i = 0; i < rows; ++i) _mm512_mask_storeu_ps(c + i * c_stride, avx512::first_lanes(cols), _mm512_loadu_ps(memory + i * 16));
  }
};

/// How far ahead of its products B is asked for where a lone sliver reads it once, from memory: tile loads show the hardware prefetcher
/// every other line. Into L2 only. Two steps gained 5% of a decoding step of one sequence on two threads, one 4%, four 2%. Past a panel's
/// end lies the next one.
constexpr std::int64_t kAheadBytes = 4096;

constexpr std::int64_t kAheadCodes = 2048;

/// One or two slivers by one panel, `steps` tiles of depth. Ahead: B comes from memory.
template <bool Two, bool Ahead>
void panel_product(std::int64_t steps, const BFloat16* a0, const BFloat16* a1, const BFloat16* b, const OutTile (&out)[4], bool add_to_c) {
  if (add_to_c) {
    for (int i = 0; i < (Two ? 4 : 2); ++i) out[i].fetch();
    _tile_loadd(0, out[0].memory, out[0].bytes_per_row);
    _tile_loadd(1, out[1].memory, out[1].bytes_per_row);
    if constexpr (Two) {
      _tile_loadd(2, out[2].memory, out[2].bytes_per_row);
      _tile_loadd(3, out[3].memory, out[3].bytes_per_row);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Two) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (std::int64_t s = 0; s < steps; ++s) {
    if constexpr (Ahead)
      for (std::int64_t line = 0; line < kDepthTile * kColTile * 2; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(b) + kAheadBytes + line, _MM_HINT_T1);
    _tile_loadd(4, a0, 64);
    _tile_loadd(6, b, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 32, 128);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Two) {
      _tile_loadd(5, a1, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      a1 += kTileElements;
    }
    a0 += kTileElements;
    b += kDepthTile * kColTile;
  }
  _tile_stored(0, out[0].memory, out[0].bytes_per_row);
  _tile_stored(1, out[1].memory, out[1].bytes_per_row);
  if constexpr (Two) {
    _tile_stored(2, out[2].memory, out[2].bytes_per_row);
    _tile_stored(3, out[3].memory, out[3].bytes_per_row);
  }
  for (int i = 0; i < (Two ? 4 : 2); ++i) out[i].put_back();
}

/// kEight: panels of codes, widened into scratch, once for all slivers of the call.
template <bool kEight>
void block(const GemmBlock& g) {
  _tile_loadconfig(&kConfig);
  const std::int64_t depth = round_up(g.depth), total = num_slivers(g.num_rows, kRowTile),
                     first_row = sliver_begin(g.first_sliver, g.num_rows, total);
  const bool reads_once = total == 1;
  float* scratch = reinterpret_cast<float*>(g.scratch);
  const auto begin = [&](std::int64_t s) { return sliver_begin(s, g.num_rows, total); };
  auto* const wide = reinterpret_cast<BFloat16*>(g.scratch + kTileScratch);
  const auto widen_at = [&](std::int64_t p, std::int64_t j) {
    if constexpr (kEight) {
      const auto widen = reads_once ? widen_panel<kAheadCodes> : widen_panel<>;
      widen(wide, g.b + j / kColTile * g.panel_stride, p, smaller(kDepthBlock, depth - p));
    }
  };
  const auto product_at = [&](std::int64_t p, std::int64_t s, std::int64_t j) {
    const std::int64_t steps = smaller(kDepthBlock, depth - p) / kDepthTile, cols = g.num_cols - j;
    const bool two = s + 1 < g.first_sliver + g.num_slivers;
    const BFloat16* a0 = reinterpret_cast<const BFloat16*>(g.a + static_cast<std::size_t>(s) * sliver_bytes(g.depth)) + p * kRowTile;
    const BFloat16* a1 = a0 + sliver_bytes(g.depth) / sizeof(BFloat16);
    const BFloat16* b = kEight ? wide : reinterpret_cast<const BFloat16*>(g.b + j / kColTile * g.panel_stride) + p * kColTile;
    float* c0 = g.c + (begin(s) - first_row) * g.c_stride;
    float* c1 = two ? g.c + (begin(s + 1) - first_row) * g.c_stride : c0;
    const std::int64_t rows0 = begin(s + 1) - begin(s), rows1 = two ? begin(s + 2) - begin(s + 1) : 0;
    const OutTile out[4] = {{c0 + j, g.c_stride, rows0, cols, scratch},
                            {c0 + j + 16, g.c_stride, rows0, cols - 16, scratch + 256},
                            {c1 + j, g.c_stride, rows1, cols, scratch + 512},
                            {c1 + j + 16, g.c_stride, rows1, cols - 16, scratch + 768}};
    const auto product = two                     ? panel_product<true, false>
                         : reads_once && !kEight ? panel_product<false, true>
                                                 : panel_product<false, false>;
    product(steps, a0, a1, b, out, g.accumulate || p > 0);
  };
  if (reads_once) {
    // B goes by in the order in which it lies in memory.
    for (std::int64_t j = 0; j < g.num_cols; j += kColTile)
      for (std::int64_t p = 0; p < depth; p += kDepthBlock) {
        widen_at(p, j);
        product_at(p, 0, j);
      }
  } else if (kEight) {
    for (std::int64_t p = 0; p < depth; p += kDepthBlock)
      for (std::int64_t j = 0; j < g.num_cols; j += kColTile) {
        widen_at(p, j);
        for (std::int64_t s = g.first_sliver; s < g.first_sliver + g.num_slivers; s += 2) product_at(p, s, j);
      }
  } else {
    for (std::int64_t p = 0; p < depth; p += kDepthBlock)
      for (std::int64_t s = g.first_sliver; s < g.first_sliver + g.num_slivers; s += 2)
        for (std::int64_t j = 0; j < g.num_cols; j += kColTile) product_at(p, s, j);
  }
  _tile_release();
}

constexpr GemmKernels kGemm = {
    .row_tile = kRowTile,
    .col_tile = kColTile,
    .depth_multiple = kDepthTile,
    .scratch_bytes = kTileScratch,
    .dtype = DType::kBF16,
    .sliver_bytes = sliver_bytes,
    .panel_bytes = panel_bytes<>,
    .pack_sliver = pack_sliver,
    .pack_panel = pack_panel<>,
    .unpack_column = unpack_column<>,
    .block = block<false>,
};
constexpr GemmKernels kGemmEight = {
    .row_tile = kRowTile,
    .col_tile = kColTile,
    .depth_multiple = kDepthTile,
    .scratch_bytes = kTileScratch + kDepthBlock * kColTile * sizeof(BFloat16),
    .dtype = DType::kBF16,
    .sliver_bytes = sliver_bytes,
    .panel_bytes = panel_bytes_eight,
    .pack_sliver = pack_sliver,
    .pack_panel = pack_panel_eight,
    .unpack_column = unpack_column_eight,
    .block = block<true>,
};

}  // namespace
}  // namespace prl::ops::cpu::amx

namespace prl::ops::cpu {

const GemmKernels& gemm_bf16_amx() { return amx::kGemm; }
const GemmKernels& gemm_bf16_eight_amx() { return amx::kGemmEight; }

}  // namespace prl::ops::cpu
