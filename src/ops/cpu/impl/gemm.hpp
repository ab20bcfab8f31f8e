// Part of an instruction set's kernels: packed matrix products with fp32 arithmetic, for fp32 and for bf16 storage.
namespace prl::ops::cpu::PRL_SIMD {

/// Depth summed in registers before it is added to C. One value for every shape: it is part of the order of summation.
/// 256 rows of a 14-row sliver (14 KiB) stay in L1 while panels of B stream from L2.
constexpr std::int64_t kDepthBlock = 256;

/// Rows of a panel to ask for in advance. Tall slivers leave the hardware prefetcher too little traffic to see the stream; a single row
/// is done with B before it arrives from memory, since that prefetcher stops at each page.
template <int H>
constexpr int kAhead = H > 4 ? 16 : 0;
template <>
constexpr int kAhead<1> = 64;

template <int H>
struct GemmTile {
  /// c[H, cols] = or += one depth block of a sliver times a panel; cols <= kColTile.
  template <typename B>
  [[gnu::always_inline]] static inline void body(std::int64_t depth, const float* a, const B* b, float* c, std::int64_t c_stride, int cols,
                                                 bool add_to_c) {
    Vec acc[H][kColVecs];
    micro<H, kColVecs, 1, H, kAhead<H>>(depth, a, Panels<1, B>{b, 0}, acc);
    put(acc, c, c_stride, cols, add_to_c);
  }
  [[gnu::always_inline]] static inline void put(const Vec (&acc)[H][kColVecs], float* c, std::int64_t c_stride, int cols, bool add_to_c) {
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kColVecs; ++j) {
        float* out = c + i * c_stride + j * Vec::kLanes;
        const int lanes = cols - j * Vec::kLanes;
        if (lanes >= Vec::kLanes) {
          store(out, add_to_c ? load(out) + acc[i][j] : acc[i][j]);
        } else if (lanes > 0) {
          store_n(out, add_to_c ? load_n(out, lanes) + acc[i][j] : acc[i][j], lanes);
        }
      }
    }
  }
  static void run(std::int64_t depth, const float* a, const float* b, float* c, std::int64_t c_stride, int cols, bool add_to_c) {
    body(depth, a, b, c, c_stride, cols, add_to_c);
  }
};
template <int H>
struct GemmTileBf16 {
  static void run(std::int64_t depth, const float* a, const BFloat16* b, float* c, std::int64_t c_stride, int cols, bool add_to_c) {
    GemmTile<H>::body(depth, a, b, c, c_stride, cols, add_to_c);
  }
};

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

/// Bytes from sliver to sliver: fp32 [depth][height], and room for the last vector store to run over.
std::size_t sliver_bytes(std::int64_t k) { return static_cast<std::size_t>((k * kRowTile + Vec::kLanes + 15) / 16 * 16) * sizeof(float); }
std::size_t panel_bytes_f32(std::int64_t k) { return static_cast<std::size_t>(k * kColTile) * sizeof(float); }
std::size_t panel_bytes_bf16(std::int64_t k) { return static_cast<std::size_t>(k * kColTile) * sizeof(BFloat16); }

struct SliverRange {
  std::int64_t total, first_row;
  explicit SliverRange(const GemmBlock& g)
      : total(num_slivers(g.num_rows, kRowTile)), first_row(sliver_begin(g.first_sliver, g.num_rows, total)) {}
  std::int64_t begin(const GemmBlock& g, std::int64_t s) const { return sliver_begin(g.first_sliver + s, g.num_rows, total); }
};

/// A single row reads B once: its depth blocks follow each other, so that B goes by in the order in which it lies in memory. Slivers of
/// four rows, which ask for nothing ahead, were slower in that order.
template <template <int> class Tile, typename B>
void gemm_one_row(const GemmBlock& g, std::size_t panel_bytes(std::int64_t)) {
  for (std::int64_t j = 0; j < g.num_cols; j += kColTile)
    for (std::int64_t p = 0; p < g.depth; p += kDepthBlock)
      Tile<1>::run(smaller(kDepthBlock, g.depth - p), reinterpret_cast<const float*>(g.a) + p,
                   reinterpret_cast<const B*>(g.b + j / kColTile * g.panel_stride + panel_bytes(p)), g.c + j, g.c_stride,
                   static_cast<int>(smaller(kColTile, g.num_cols - j)), g.accumulate || p > 0);
}

void gemm_block_f32(const GemmBlock& g) {
  if (g.num_rows == 1) return gemm_one_row<GemmTile, float>(g, panel_bytes_f32);
  const SliverRange range(g);
  const std::size_t slot = sliver_bytes(g.depth);
  for (std::int64_t p = 0; p < g.depth; p += kDepthBlock) {
    const std::int64_t depth = smaller(kDepthBlock, g.depth - p);
    const bool add_to_c = g.accumulate || p > 0;
    for (std::int64_t s = 0; s < g.num_slivers; ++s) {
      const std::int64_t row = range.begin(g, s), height = range.begin(g, s + 1) - row;
      const float* a = reinterpret_cast<const float*>(g.a + static_cast<std::size_t>(g.first_sliver + s) * slot) + p * height;
      const auto run = Heights<GemmTile>::kRun[height];
      const char* panel = g.b + panel_bytes_f32(p);
      for (std::int64_t j = 0; j < g.num_cols; j += kColTile, panel += g.panel_stride)
        run(depth, a, reinterpret_cast<const float*>(panel), g.c + (row - range.first_row) * g.c_stride + j, g.c_stride,
            static_cast<int>(smaller(kColTile, g.num_cols - j)), add_to_c);
    }
  }
}

/// bf16 panels: widened on the way into registers for one or two slivers, once into scratch for more. The same arithmetic.
void gemm_block_bf16(const GemmBlock& g) {
  if (g.num_rows == 1) return gemm_one_row<GemmTileBf16, BFloat16>(g, panel_bytes_bf16);
  const SliverRange range(g);
  const std::size_t slot = sliver_bytes(g.depth);
  float* wide = reinterpret_cast<float*>(g.scratch);
  for (std::int64_t p = 0; p < g.depth; p += kDepthBlock) {
    const std::int64_t depth = smaller(kDepthBlock, g.depth - p);
    const bool add_to_c = g.accumulate || p > 0;
    const char* panel_bytes = g.b + panel_bytes_bf16(p);
    for (std::int64_t j = 0; j < g.num_cols; j += kColTile, panel_bytes += g.panel_stride) {
      const BFloat16* panel = reinterpret_cast<const BFloat16*>(panel_bytes);
      const bool widen_once = g.num_slivers > 2;
      if (widen_once)
        for (std::int64_t i = 0; i < depth * kColTile; i += Vec::kLanes) store(wide + i, load(panel + i));
      for (std::int64_t s = 0; s < g.num_slivers; ++s) {
        const std::int64_t row = range.begin(g, s), height = range.begin(g, s + 1) - row;
        const float* a = reinterpret_cast<const float*>(g.a + static_cast<std::size_t>(g.first_sliver + s) * slot) + p * height;
        float* c = g.c + (row - range.first_row) * g.c_stride + j;
        const int cols = static_cast<int>(smaller(kColTile, g.num_cols - j));
        if (widen_once)
          Heights<GemmTile>::kRun[height](depth, a, wide, c, g.c_stride, cols, add_to_c);
        else
          Heights<GemmTileBf16>::kRun[height](depth, a, panel, c, g.c_stride, cols, add_to_c);
      }
    }
  }
}

template <typename T>
inline float to_float(T x) {
  if constexpr (sizeof(T) == 2)
    return to_f32(x);
  else
    return x;
}

template <typename T>
void pack_sliver_t(float* out, const T* source, std::int64_t stride, int rows, std::int64_t k, bool transposed) {
  constexpr int kL = Vec::kLanes;
  std::int64_t p = 0;
  if (transposed) {
    for (; p < k; ++p)
      for (int i = 0; i < rows; ++i) out[p * rows + i] = to_float(source[p * stride + i]);
    return;
  }
  if (rows == 1) {
    for (; p + kL <= k; p += kL) store(out + p, load(source + p));
  } else if (rows <= kL) {
    for (; p + kL <= k; p += kL) {
      Vec r[kL];
#pragma GCC unroll 16
      for (int i = 0; i < kL; ++i) r[i] = i < rows ? load(source + i * stride + p) : zero();
      transpose(r);
#pragma GCC unroll 16
      for (int q = 0; q < kL; ++q) store(out + (p + q) * rows, r[q]);  // the surplus lanes are overwritten by the next row
    }
  }
  for (; p < k; ++p)
    for (int i = 0; i < rows; ++i) out[p * rows + i] = to_float(source[i * stride + p]);
}
void pack_sliver(void* out, const void* source, DType dtype, std::int64_t stride, int rows, std::int64_t k, bool transposed) {
  if (dtype == DType::kBF16)
    pack_sliver_t(static_cast<float*>(out), static_cast<const BFloat16*>(source), stride, rows, k, transposed);
  else
    pack_sliver_t(static_cast<float*>(out), static_cast<const float*>(source), stride, rows, k, transposed);
}

template <typename Out, typename In>
void pack_panel_t(Out* out, const In* source, std::int64_t stride, int cols, std::int64_t k, bool transposed) {
  constexpr int kL = Vec::kLanes;
  if (transposed) {
    for (std::int64_t p = 0; p < k; ++p)
      for (int j = 0; j < kColTile; j += kL) {
        const int lanes = cols - j;
        store(out + p * kColTile + j, lanes >= kL ? load(source + p * stride + j)
                                      : lanes > 0 ? load_n(source + p * stride + j, lanes)
                                                  : zero());
      }
    return;
  }
  for (int j = 0; j < kColTile; j += kL)
    for (std::int64_t p = 0; p < k; p += kL) {
      const int depth = static_cast<int>(smaller(kL, k - p));
      Vec r[kL];
      for (int i = 0; i < kL; ++i) {
        const In* row = source + (j + i) * stride + p;
        r[i] = j + i >= cols ? zero() : depth == kL ? load(row) : load_n(row, depth);
      }
      transpose(r);
      for (int q = 0; q < depth; ++q) store(out + (p + q) * kColTile + j, r[q]);
    }
}
template <typename Out>
void pack_panel(void* out, const void* source, DType dtype, std::int64_t stride, int cols, std::int64_t k, bool transposed) {
  if (dtype == DType::kBF16)
    pack_panel_t(static_cast<Out*>(out), static_cast<const BFloat16*>(source), stride, cols, k, transposed);
  else
    pack_panel_t(static_cast<Out*>(out), static_cast<const float*>(source), stride, cols, k, transposed);
}
template <typename T>
void unpack_column(float* out, const void* panel, int j, std::int64_t k) {
  for (std::int64_t p = 0; p < k; ++p) out[p] = to_float(static_cast<const T*>(panel)[p * kColTile + j]);
}

constexpr GemmKernels kGemmF32 = {
    .row_tile = kRowTile,
    .col_tile = kColTile,
    .scratch_bytes = 0,
    .dtype = DType::kF32,
    .sliver_bytes = sliver_bytes,
    .panel_bytes = panel_bytes_f32,
    .pack_sliver = pack_sliver,
    .pack_panel = pack_panel<float>,
    .unpack_column = unpack_column<float>,
    .block = gemm_block_f32,
};
constexpr GemmKernels kGemmBf16 = {
    .row_tile = kRowTile,
    .col_tile = kColTile,
    .scratch_bytes = kDepthBlock * kColTile * sizeof(float),
    .dtype = DType::kBF16,
    .sliver_bytes = sliver_bytes,
    .panel_bytes = panel_bytes_bf16,
    .pack_sliver = pack_sliver,
    .pack_panel = pack_panel<BFloat16>,
    .unpack_column = unpack_column<BFloat16>,
    .block = gemm_block_bf16,
};

}  // namespace prl::ops::cpu::PRL_SIMD
