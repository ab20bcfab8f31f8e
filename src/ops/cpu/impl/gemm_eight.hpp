// Part of an instruction set's kernels: packed matrix products whose right side is of 8 bits (eight_panels.hpp), in fp32 arithmetic.
namespace prl::ops::cpu::PRL_SIMD {

/// Columns of a panel of codes as Panels<1> has those of wider types.
struct CodePanel {
  const std::uint8_t* b;
  Vec factors[kColVecs];
  template <int J>
  Vec column(std::integral_constant<int, J>) const {
    return load_codes(b + J * Vec::kLanes) * factors[J];
  }
  void advance() { b += kColTile; }
};

template <int H>
struct GemmTileEight {
  static void run(std::int64_t depth, const float* a, const std::uint8_t* b, const float* factors, float* c, std::int64_t c_stride,
                  int cols, bool add_to_c) {
    CodePanel panel{b, {}};
    for (int j = 0; j < kColVecs; ++j) panel.factors[j] = load(factors + j * Vec::kLanes);
    Vec acc[H][kColVecs];
    micro<H, kColVecs, 1, H, kAhead<H>>(depth, a, panel, acc);
    GemmTile<H>::put(acc, c, c_stride, cols, add_to_c);
  }
};

std::size_t panel_bytes_eight(std::int64_t k) { return static_cast<std::size_t>(kColTile) * (sizeof(float) + static_cast<std::size_t>(k)); }

/// As gemm_block_bf16.
void gemm_block_eight(const GemmBlock& g) {
  const SliverRange range(g);
  const std::size_t slot = sliver_bytes(g.depth);
  float* wide = reinterpret_cast<float*>(g.scratch);
  const auto product_at = [&](std::int64_t p, std::int64_t j) {
    const std::int64_t depth = smaller(kDepthBlock, g.depth - p);
    const bool add_to_c = g.accumulate || p > 0;
    const char* const panel = g.b + j / kColTile * g.panel_stride;
    const float* const factors = reinterpret_cast<const float*>(panel);
    const auto* const codes = reinterpret_cast<const std::uint8_t*>(factors + kColTile) + p * kColTile;
    const bool widen_once = g.num_slivers > 2;
    if (widen_once)
      for (std::int64_t i = 0; i < depth * kColTile; i += Vec::kLanes)
        store(wide + i, load_codes(codes + i) * load(factors + i % kColTile));
    for (std::int64_t s = 0; s < g.num_slivers; ++s) {
      const std::int64_t row = range.begin(g, s), height = range.begin(g, s + 1) - row;
      const float* a = reinterpret_cast<const float*>(g.a + static_cast<std::size_t>(g.first_sliver + s) * slot) + p * height;
      float* c = g.c + (row - range.first_row) * g.c_stride + j;
      const int cols = static_cast<int>(smaller(kColTile, g.num_cols - j));
      if (widen_once)
        Heights<GemmTile>::kRun[height](depth, a, wide, c, g.c_stride, cols, add_to_c);
      else
        Heights<GemmTileEight>::kRun[height](depth, a, codes, factors, c, g.c_stride, cols, add_to_c);
    }
  };
  if (g.num_rows == 1) {  // B goes by in the order in which it lies in memory
    for (std::int64_t j = 0; j < g.num_cols; j += kColTile)
      for (std::int64_t p = 0; p < g.depth; p += kDepthBlock) product_at(p, j);
    return;
  }
  for (std::int64_t p = 0; p < g.depth; p += kDepthBlock)
    for (std::int64_t j = 0; j < g.num_cols; j += kColTile) product_at(p, j);
}

template <typename Compute>
void pack_panel_eight(void* out, const void* source, DType dtype, std::int64_t stride, int cols, std::int64_t k, bool transposed) {
  PRL_CHECK(!transposed, "panels of 8 bits of a transposed matrix");
  const auto place = [](std::int64_t p, int j) { return p * kColTile + j; };
  if (dtype == DType::kBF16)
    pack_codes<Compute>(out, static_cast<const BFloat16*>(source), stride, cols, kColTile, k, place);
  else
    pack_codes<Compute>(out, static_cast<const float*>(source), stride, cols, kColTile, k, place);
  auto* const codes = reinterpret_cast<std::uint8_t*>(static_cast<float*>(out) + kColTile);
  for (int j = cols; j < kColTile; ++j)
    for (std::int64_t p = 0; p < k; ++p) codes[p * kColTile + j] = 0;
}
void unpack_column_eight(float* out, const void* panel, int j, std::int64_t k) {
  const float* const factors = static_cast<const float*>(panel);
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(factors + kColTile);
  const int n = exponent_of_factor(factors[j]);
  for (std::int64_t p = 0; p < k; ++p) out[p] = eight_bit_value(codes[p * kColTile + j], n);
}

template <typename Compute>
constexpr GemmKernels kGemmEight = {
    .row_tile = kRowTile,
    .col_tile = kColTile,
    .scratch_bytes = kDepthBlock* kColTile * sizeof(float),
    .dtype = sizeof(Compute) == 2 ? DType::kBF16 : DType::kF32,
    .sliver_bytes = sliver_bytes,
    .panel_bytes = panel_bytes_eight,
    .pack_sliver = pack_sliver,
    .pack_panel = pack_panel_eight<Compute>,
    .unpack_column = unpack_column_eight,
    .block = gemm_block_eight,
};

}  // namespace prl::ops::cpu::PRL_SIMD
