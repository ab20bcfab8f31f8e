// Part of an instruction set's kernels: the one register-blocked product that everything else is made of.
namespace prl::ops::cpu::PRL_SIMD {

#if defined(PRL_SIMD_AVX512)
constexpr int kRowTile = 14, kColVecs = 2;  // 28 accumulators, 2 columns of B, 1 broadcast of the 32 registers
#elif defined(PRL_SIMD_AVX2)
constexpr int kRowTile = 6, kColVecs = 2;  // 12 accumulators, 2 columns of B, 1 broadcast of the 16 registers
#elif defined(__aarch64__)
constexpr int kRowTile = 6, kColVecs = 4;
#else
constexpr int kRowTile = 3, kColVecs = 4;
#endif
constexpr int kColTile = kColVecs * Vec::kLanes;

/// P packed panels side by side, panel_stride elements apart.
template <int P, typename B = float>
struct Panels {
  const B* b;
  std::int64_t panel_stride;
  template <int J>
  Vec column(std::integral_constant<int, J>) const {
    return load(b + J / kColVecs * panel_stride + J % kColVecs * Vec::kLanes);
  }
  void advance() { b += kColTile; }
};

/// acc[i][j] = sum over p of A(i, p) * B(p, j), p in order, from zero: one chain of fused multiply-adds per element, whatever H
/// and V are. A(i, p) = a[i * RowStep + p * DepthStep]. Ahead > 0 asks for the row of B that many steps on.
template <int H, int V, int RowStep, int DepthStep, int Ahead = 0, typename Right>
[[gnu::always_inline]] inline void micro(std::int64_t depth, const float* __restrict a, Right right, Vec (&acc)[H][V]) {
#pragma GCC unroll 16
  for (int i = 0; i < H; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) acc[i][j] = zero();
  for (std::int64_t p = 0; p < depth; ++p) {
    Vec row[V];
    [&]<int... J>(std::integer_sequence<int, J...>) { ((row[J] = right.column(std::integral_constant<int, J>{})), ...); }
    (std::make_integer_sequence<int, V>{});
    if constexpr (Ahead > 0)
      for (int j = 0; j < V * Vec::kLanes; j += 64 / static_cast<int>(sizeof(*right.b)))
        __builtin_prefetch(right.b + Ahead * V * Vec::kLanes + j);
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      const Vec x = set1(a[i * RowStep]);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) acc[i][j] = fma(x, row[j], acc[i][j]);
    }
    a += DepthStep;
    right.advance();
  }
}

/// A table of Body<1>::run ... Body<kRowTile>::run, so that a sliver of any height runs code unrolled for it.
template <template <int> class Body, int... H>
struct HeightTable {
  static constexpr decltype(&Body<1>::run) kRun[] = {nullptr, &Body<H + 1>::run...};
};
template <template <int> class Body, int... H>
constexpr HeightTable<Body, H...> make_height_table(std::integer_sequence<int, H...>);
template <template <int> class Body>
using Heights = decltype(make_height_table<Body>(std::make_integer_sequence<int, kRowTile>{}));

}  // namespace prl::ops::cpu::PRL_SIMD
