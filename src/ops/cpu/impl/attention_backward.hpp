// Part of an instruction set's kernels: the backward pass of attention, recomputing the scores from lse (Dao 2023, FlashAttention-2).
namespace prl::ops::cpu::PRL_SIMD {

/// c[height, n] (+)= A B with A(i, p) = a[i * RowStep + p * DepthStep]; n is a multiple of the vector length.
struct TileProduct {
  const float* a;
  const float* b;  ///< panels
  std::int64_t panel_stride;
  float* c;
  std::int64_t c_stride;
  int depth, num_cols;
  bool add_to_c;
};
template <int RowStep, int DepthStep>
struct TileProductOf {
  template <int H>
  struct Body {
    template <int V>
    [[gnu::always_inline]] static inline void columns(const TileProduct& t, int j) {
      Vec acc[H][V];
      micro<H, V, RowStep, DepthStep>(t.depth, t.a, Panels<1>{t.b + j / kColTile * t.panel_stride + j % kColTile, 0}, acc);
#pragma GCC unroll 16
      for (int i = 0; i < H; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          float* out = t.c + i * t.c_stride + j + v * Vec::kLanes;
          store(out, t.add_to_c ? load(out) + acc[i][v] : acc[i][v]);
        }
    }
    static void run(const TileProduct& t) {
      int j = 0;
      for (; j + kColTile <= t.num_cols; j += kColTile) columns<kColVecs>(t, j);
      for (; j < t.num_cols; j += Vec::kLanes) columns<1>(t, j);
    }
  };
};

template <int RowStep, int DepthStep>
void tile_product(int rows, TileProduct t) {
  const std::int64_t slivers = num_slivers(rows, kRowTile);
  const float* a = t.a;
  float* c = t.c;
  for (std::int64_t s = 0; s < slivers; ++s) {
    const std::int64_t begin = sliver_begin(s, rows, slivers);
    t.a = a + begin * RowStep;
    t.c = c + begin * t.c_stride;
    Heights<TileProductOf<RowStep, DepthStep>::template Body>::kRun[sliver_begin(s + 1, rows, slivers) - begin](t);
  }
}

std::size_t attention_backward_scratch_bytes(std::int64_t length, int group, int head_dim) {
  return padded_bytes(group * length * head_dim) + padded_bytes(group * length) + 9 * padded_bytes(tile_floats(head_dim)) +
         2 * padded_bytes(kTile * kTile);
}

/// out[d][i] = rows[i][d] in fp32, i < count, kTile apart: a left operand with RowStep 1.
template <typename T>
void tile_columns(float* out, const T* const* rows, int count, int head_dim) {
  constexpr int kL = Vec::kLanes;
  for (int i = 0; i < count; i += kL)
    for (int d = 0; d < head_dim; d += kL) {
      Vec r[kL];
      for (int a = 0; a < kL; ++a) r[a] = i + a < count ? load(rows[i + a] + d) : zero();
      transpose(r);
      for (int a = 0; a < kL; ++a) store(out + (d + a) * kTile + i, r[a]);
    }
}

template <typename T>
void tile_pointers(const T** rows, const void* base, std::int64_t stride, std::int64_t begin, int count) {
  for (int i = 0; i < count; ++i) rows[i] = static_cast<const T*>(base) + (begin + i) * stride;
}

template <typename T>
void attention_backward_t(const AttentionBackwardTask& t) {
  const int D = t.head_dim;
  const std::int64_t L = t.length;
  constexpr std::int64_t kPanel = kTile * kColTile;
  Scratch scratch{t.scratch};
  float* dq = scratch.take<float>(t.group * L * D);
  float* delta = scratch.take<float>(t.group * L);
  float* k_T = scratch.take<float>(tile_floats(D));
  float* v_T = scratch.take<float>(tile_floats(D));
  float* k = scratch.take<float>(tile_floats(D));
  float* q_T = scratch.take<float>(tile_floats(D));
  float* q = scratch.take<float>(tile_floats(D));
  float* dout_T = scratch.take<float>(tile_floats(D));
  float* dout = scratch.take<float>(tile_floats(D));
  float* dk = scratch.take<float>(tile_floats(D));
  float* dv = scratch.take<float>(tile_floats(D));
  float* p = scratch.take<float>(kTile * kTile);
  float* ds = scratch.take<float>(kTile * kTile);

  for (std::int64_t i = 0; i < t.group * L * D; i += Vec::kLanes) store(dq + i, zero());
  for (int g = 0; g < t.group; ++g)
    for (std::int64_t i = 0; i < L; ++i) {
      const T* o = static_cast<const T*>(t.out) + i * t.out_stride + g * D;
      const T* d = static_cast<const T*>(t.dout) + i * t.dout_stride + g * D;
      Vec sum = zero();
      for (int j = 0; j < D; j += Vec::kLanes) sum = fma(load(o + j), load(d + j), sum);
      delta[g * L + i] = reduce_add(sum);
    }

  const T* rows[kTile];
  for (std::int64_t k0 = 0; k0 < L; k0 += kTile) {
    const int keys = static_cast<int>(smaller(kTile, L - k0));
    const int key_width = static_cast<int>(panel_width(keys));
    tile_pointers(rows, t.k, t.k_stride, k0, keys);
    tile_transposed(k_T, rows, keys, D);
    tile_rows(k, rows, keys, D);
    tile_pointers(rows, t.v, t.v_stride, k0, keys);
    tile_transposed(v_T, rows, keys, D);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(kTile) * D; i += Vec::kLanes) {
      store(dk + i, zero());
      store(dv + i, zero());
    }
    const std::int64_t end = t.window == 0 ? L : smaller(L, k0 + keys + t.window - 1);  // of the queries that see these keys
    for (int g = 0; g < t.group; ++g)
      for (std::int64_t q0 = k0; q0 < end; q0 += kTile) {
        const int queries = static_cast<int>(smaller(kTile, L - q0));
        tile_pointers(rows, static_cast<const T*>(t.q) + g * D, t.q_stride, q0, queries);
        tile_columns(q_T, rows, queries, D);
        tile_rows(q, rows, queries, D);
        tile_pointers(rows, static_cast<const T*>(t.dout) + g * D, t.dout_stride, q0, queries);
        tile_columns(dout_T, rows, queries, D);
        tile_rows(dout, rows, queries, D);
        tile_product<1, kTile>(queries, {q_T, k_T, D * kColTile, p, kTile, D, key_width, false});
        tile_product<1, kTile>(queries, {dout_T, v_T, D * kColTile, ds, kTile, D, key_width, false});
        for (int i = 0; i < queries; ++i) {
          const SeenKeys seen = seen_keys(q0 + i, k0, keys, t.window);
          const Vec lse = set1(t.lse[(q0 + i) * t.lse_stride + g]), d = set1(delta[g * L + q0 + i]), scale = set1(t.scale);
          for (int j = 0; j < key_width; j += Vec::kLanes) {
            float* s = p + i * kTile + j;
            float* x = ds + i * kTile + j;
            const Vec e = select_first(seen.first - j, zero(), select_first(seen.end - j, exp(load(s) * scale - lse), zero()));
            store(s, e);
            store(x, e * (load(x) - d) * scale);
          }
        }
        tile_product<1, kTile>(keys, {p, dout, kPanel, dv, D, queries, D, true});
        tile_product<1, kTile>(keys, {ds, q, kPanel, dk, D, queries, D, true});
        tile_product<kTile, 1>(queries, {ds, k, kPanel, dq + (g * L + q0) * D, D, keys, D, true});
      }
    for (int i = 0; i < keys; ++i)
      for (int d = 0; d < D; d += Vec::kLanes) {
        store(static_cast<T*>(t.dk) + (k0 + i) * t.dk_stride + d, load(dk + i * D + d));
        store(static_cast<T*>(t.dv) + (k0 + i) * t.dv_stride + d, load(dv + i * D + d));
      }
  }
  for (int g = 0; g < t.group; ++g)
    for (std::int64_t i = 0; i < L; ++i)
      for (int d = 0; d < D; d += Vec::kLanes) store(static_cast<T*>(t.dq) + i * t.dq_stride + g * D + d, load(dq + (g * L + i) * D + d));
}
void attention_backward(const AttentionBackwardTask& t) {
  if (t.dtype == DType::kBF16)
    attention_backward_t<BFloat16>(t);
  else
    attention_backward_t<float>(t);
}

}  // namespace prl::ops::cpu::PRL_SIMD
