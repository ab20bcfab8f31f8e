// Part of an instruction set's kernels: causal attention over tiles of keys, dense or paged.
namespace prl::ops::cpu::PRL_SIMD {

constexpr int kTile = kAttentionTile;

/// Bump allocation in caller's scratch, 64-byte steps.
struct Scratch {
  char* next;
  template <typename T>
  T* take(std::int64_t count) {
    T* p = reinterpret_cast<T*>(next);
    next += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};
inline std::size_t padded_bytes(std::int64_t floats) { return (static_cast<std::size_t>(floats) * sizeof(float) + 63) / 64 * 64; }

/// Addresses of the rows [begin, begin + count) of keys or values, `stride` apart within what is contiguous.
template <typename T>
void key_rows(const T** rows, const void* base, std::int64_t stride, const KeySource& s, std::int64_t begin, int count) {
  const T* p = static_cast<const T*>(base);
  if (s.blocks == nullptr) {
    for (int i = 0; i < count; ++i) rows[i] = p + (begin + i) * stride;
    return;
  }
  std::int64_t block = begin / s.block_size, offset = begin % s.block_size;
  for (int i = 0; i < count; ++i) {
    rows[i] = p + s.blocks[block] * s.block_stride + offset * stride;
    if (++offset == s.block_size) {
      offset = 0;
      ++block;
    }
  }
}

/// Tiles that are right operands lie in panels like those of weights: columns [j * kColTile, (j + 1) * kColTile) together, so that
/// a product walks memory in order. `tile_floats` is the size of one with 64 rows or columns.
constexpr std::int64_t panel_width(std::int64_t cols) { return (cols + kColTile - 1) / kColTile * kColTile; }
constexpr std::int64_t tile_floats(std::int64_t head_dim) { return kTile * panel_width(head_dim); }

/// Panels of B[d][i] = rows[i][d] in fp32, d < head_dim: zero from column count up to the end of its panel.
template <typename T>
void tile_transposed(float* out, const T* const* rows, int count, int head_dim) {
  constexpr int kL = Vec::kLanes;
  for (int i = 0; i < panel_width(count); i += kL) {
    float* panel = out + i / kColTile * (kColTile * head_dim) + i % kColTile;
    for (int d = 0; d < head_dim; d += kL) {
      Vec r[kL];
      for (int a = 0; a < kL; ++a) r[a] = i + a < count ? load(rows[i + a] + d) : zero();
      transpose(r);
      for (int a = 0; a < kL; ++a) store(panel + (d + a) * kColTile, r[a]);
    }
  }
}
/// Panels of B[i][d] = rows[i][d] in fp32, i < count; a panel holds kTile rows.
template <typename T>
void tile_rows(float* out, const T* const* rows, int count, int head_dim) {
  for (int i = 0; i < count; ++i) {
    const T* from = rows[i];
    float* to = out + i * kColTile;
    int d = 0;
    for (; d + kColTile <= head_dim; d += kColTile, to += kColTile * kTile)
#pragma GCC unroll 8
      for (int v = 0; v < kColTile; v += Vec::kLanes) store(to + v, load(from + d + v));
    for (int v = 0; d + v < head_dim; v += Vec::kLanes) store(to + v, load(from + d + v));
  }
}

/// The panels of tile_transposed from paged keys, whose blocks are [head_dim][block_size] already. Columns from `count` on hold
/// anything. Each block is read in the order it lies in memory.
template <typename T>
void tile_paged(float* out, const KeySource& s, std::int64_t begin, int count, int head_dim) {
  constexpr int kL = Vec::kLanes;
  const auto column = [&](int i) { return out + i / kColTile * (kColTile * head_dim) + i % kColTile; };
  int next = 0;
  for (int first = 0; first < count; first = next) {
    const std::int64_t key = begin + first, offset = key % s.block_size;
    const T* from = static_cast<const T*>(s.k) + s.blocks[key / s.block_size] * s.block_stride + offset;
    next = static_cast<int>(smaller(first + s.block_size - offset, count));
    if (s.block_size % kL != 0) {
      for (int i = first; i < next; ++i)
        for (int d = 0; d < head_dim; ++d) column(i)[d * kColTile] = to_float(from[d * s.block_size + i - first]);
      continue;
    }
    float* to[kTile / kL];
    int groups = 0;
    for (int i = first; i < next; i += kL) to[groups++] = column(i);
    for (int d = 0; d < head_dim; ++d, from += s.block_size)
      for (int g = 0; g < groups; ++g) store(to[g] + d * kColTile, load(from + g * kL));
  }
}

/// Vectors of columns per visit: short slivers take more, so that enough chains run side by side to hide the adder's latency.
template <int H>
constexpr int kWide = (Vec::kLanes == 16 && H <= 6) ? 2 * kColVecs : kColVecs;

struct ScoreArgs {
  const float* q;  ///< [head_dim][height]
  const float* k;  ///< panels of tile_transposed
  float* scores;   ///< [height][kTile]
  int head_dim, num_keys;
};
template <int H>
struct Scores {
  static void run(const ScoreArgs& s) {
    constexpr int kPanels = kWide<H> / kColVecs;
    int j = 0;
    if constexpr (kPanels > 1)
      for (; j + kColTile < s.num_keys; j += kPanels * kColTile) columns<kPanels>(s, j);
    for (; j < s.num_keys; j += kColTile) columns<1>(s, j);
  }
  template <int P>
  [[gnu::always_inline]] static inline void columns(const ScoreArgs& s, int j) {
    Vec acc[H][P * kColVecs];
    micro<H, P * kColVecs, 1, H>(s.head_dim, s.q, Panels<P>{s.k + j * s.head_dim, s.head_dim * kColTile}, acc);
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < P * kColVecs; ++v) store(s.scores + i * kTile + j + v * Vec::kLanes, acc[i][v]);
  }
};

struct MixArgs {
  const float* p;        ///< [height][kTile]
  const float* v;        ///< panels of tile_rows
  float* out;            ///< [height][head_dim]
  const float* rescale;  ///< [height]
  int head_dim, num_keys;
};
template <int H>
struct Mix {
  /// V vectors of columns of P panels.
  template <int P, int V>
  [[gnu::always_inline]] static inline void columns(const MixArgs& m, int d) {
    constexpr std::int64_t kPanel = kColTile * kTile;
    Vec acc[H][P * V];
    micro<H, P * V, kTile, 1>(m.num_keys, m.p, Panels<P>{m.v + d / kColTile * kPanel + d % kColTile, kPanel}, acc);
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      const Vec factor = set1(m.rescale[i]);
#pragma GCC unroll 8
      for (int v = 0; v < P * V; ++v) {
        float* out = m.out + i * m.head_dim + d + v * Vec::kLanes;
        store(out, fma(load(out), factor, acc[i][v]));
      }
    }
  }
  static void run(const MixArgs& m) {
    constexpr int kPanels = kWide<H> / kColVecs;
    int d = 0;
    if constexpr (kPanels > 1)
      for (; d + kPanels * kColTile <= m.head_dim; d += kPanels * kColTile) columns<kPanels, kColVecs>(m, d);
    for (; d + kColTile <= m.head_dim; d += kColTile) columns<1, kColVecs>(m, d);
    for (; d < m.head_dim; d += Vec::kLanes) columns<1, 1>(m, d);
  }
};

/// Columns of keys straight from cache blocks of [head_dim][block_size]: vector j is at group[j] and moves by block_size.
template <typename T>
struct PagedColumns {
  const T* group[kTile / Vec::kLanes];
  std::int64_t step, at = 0;
  template <int J>
  Vec column(std::integral_constant<int, J>) const {
    return load(group[J] + at);
  }
  void advance() { at += step; }
};
/// Rows wherever they lie, from column d on.
template <typename T>
struct ScatteredRows {
  const T* const* rows;
  int d;
  template <int J>
  Vec column(std::integral_constant<int, J>) const {
    return load(*rows + d + J * Vec::kLanes);
  }
  void advance() { ++rows; }
};

/// One sliver over paged keys, as in decode: nothing would use a packed tile twice, so operands are read where they are.
template <typename T>
struct Direct {
  struct ScoreTask {
    const float* q;
    const KeySource* keys;
    std::int64_t begin;
    float* scores;
    int head_dim, num_keys;
  };
  template <int H>
  struct Scores {
    static void run(const ScoreTask& s) {
      constexpr int kVecs = kWide<H>, kL = Vec::kLanes;
      for (int j = 0; j < s.num_keys; j += kVecs * kL) {
        PagedColumns<T> right;
        right.step = s.keys->block_size;
        for (int v = 0; v < kVecs; ++v) {
          const std::int64_t key = s.begin + (j + v * kL < s.num_keys ? j + v * kL : j);  // past the end: any block that exists
          right.group[v] =
              static_cast<const T*>(s.keys->k) + s.keys->blocks[key / s.keys->block_size] * s.keys->block_stride + key % s.keys->block_size;
        }
        Vec acc[H][kVecs];
        micro<H, kVecs, 1, H>(s.head_dim, s.q, right, acc);
#pragma GCC unroll 16
        for (int i = 0; i < H; ++i)
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) store(s.scores + i * kTile + j + v * kL, acc[i][v]);
      }
    }
  };
  struct MixTask {
    const float* p;
    const T* const* rows;
    float* out;
    const float* rescale;
    int head_dim, num_keys;
  };
  template <int H>
  struct Mix {
    template <int V>
    [[gnu::always_inline]] static inline void columns(const MixTask& m, int d) {
      Vec acc[H][V];
      micro<H, V, kTile, 1>(m.num_keys, m.p, ScatteredRows<T>{m.rows, d}, acc);
#pragma GCC unroll 16
      for (int i = 0; i < H; ++i) {
        const Vec factor = set1(m.rescale[i]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          float* out = m.out + i * m.head_dim + d + v * Vec::kLanes;
          store(out, fma(load(out), factor, acc[i][v]));
        }
      }
    }
    static void run(const MixTask& m) {
      constexpr int kL = Vec::kLanes;
      int d = 0;
      for (; d + kWide<H> * kL <= m.head_dim; d += kWide<H> * kL) columns<kWide<H>>(m, d);
      for (; d < m.head_dim; d += kL) columns<1>(m, d);
    }
  };
};

constexpr int kTileVecs = kTile / Vec::kLanes;

/// Scales one row of raw scores, bans all keys but those that are seen, and returns the maximum.
inline float scale_scores(float* scores, SeenKeys seen, float scale) {
  Vec top = set1(-__builtin_inff());
#pragma GCC unroll 16
  for (int j = 0; j < kTileVecs; ++j) {
    Vec s = load(scores + j * Vec::kLanes) * set1(scale);
    if (seen.end < kTile) s = select_first(seen.end - j * Vec::kLanes, s, set1(-__builtin_inff()));
    if (seen.first > 0) s = select_first(seen.first - j * Vec::kLanes, set1(-__builtin_inff()), s);
    store(scores + j * Vec::kLanes, s);
    top = max(top, s);
  }
  return reduce_max(top);
}
/// What a row's scores are taken relative to: its maximum, if it has seen any key.
inline float reference(float row_max) { return row_max == -__builtin_inff() ? 0.0f : row_max; }
/// Turns scaled scores into exp(s - m) and returns their sum.
inline float exponentials(float* scores, float m) {
  Vec sum = zero();
#pragma GCC unroll 16
  for (int j = 0; j < kTileVecs; ++j) {
    const Vec e = exp(load(scores + j * Vec::kLanes) - set1(m));
    store(scores + j * Vec::kLanes, e);
    sum = sum + e;
  }
  return reduce_add(sum);
}

std::size_t attention_scratch_bytes(std::int64_t rows, int head_dim) {
  const std::int64_t slivers = num_slivers(rows, kRowTile);
  return static_cast<std::size_t>(slivers) * sliver_bytes(head_dim) + 2 * padded_bytes(tile_floats(head_dim)) +
         padded_bytes(kRowTile * kTile);
}

inline void clear_state(const AttentionTask& t, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) {
    t.row_max[r] = -__builtin_inff();
    t.row_sum[r] = 0.0f;
  }
  for (std::int64_t i = 0; i < rows * t.value_dim; i += Vec::kLanes) store(t.row_out + i, zero());
}

template <typename T>
void attention_t(const AttentionTask& t) {
  const int D = t.head_dim, Dv = t.value_dim;
  const std::int64_t rows = t.num_tokens * t.group, slivers = num_slivers(rows, kRowTile);
  const std::size_t slot = sliver_bytes(D);
  Scratch scratch{t.scratch};
  char* q_packed = scratch.take<char>(slivers * static_cast<std::int64_t>(slot));
  float* k_tile = scratch.take<float>(tile_floats(D));
  float* v_tile = scratch.take<float>(tile_floats(D));
  float* scores = scratch.take<float>(kRowTile * kTile);

  for (std::int64_t s = 0; s < slivers; ++s) {
    const std::int64_t begin = sliver_begin(s, rows, slivers), height = sliver_begin(s + 1, rows, slivers) - begin;
    float* out = reinterpret_cast<float*>(q_packed + static_cast<std::size_t>(s) * slot);
    for (std::int64_t i = 0; i < height; ++i) {
      const std::int64_t r = begin + i;
      const T* q = static_cast<const T*>(t.q) + (r / t.group) * t.q_token_stride + (r % t.group) * t.head_stride;
      for (int d = 0; d < D; ++d) out[d * height + i] = to_float(q[d]);
    }
  }
  clear_state(t, rows);
  const std::int64_t last_position = t.first_position + t.position_step * (t.num_tokens - 1);
  const std::int64_t key_end = smaller(t.key_end, last_position + 1);
  // The first key that a query sees. Tiles before it are left out where no row needs them, and change nothing where one does.
  const auto first_key = [&](std::int64_t token) { return t.window == 0 ? 0 : t.first_position + token - t.window + 1; };
  const std::int64_t key_begin = first_key(0) > t.key_begin ? first_key(0) / kTile * kTile : t.key_begin;
  const T* rows_of_tile[kTile];
  const bool is_turned = t.keys.blocks != nullptr && t.keys.k_stride == 0;  // keys lie as [D][block_size]
  const bool direct = slivers == 1 && is_turned && t.keys.block_size % Vec::kLanes == 0;
  for (std::int64_t k0 = key_begin; k0 < key_end; k0 += kTile) {
    const int count = static_cast<int>(smaller(kTile, key_end - k0));
    if (direct) {
      key_rows<T>(rows_of_tile, t.keys.v, t.keys.v_stride, t.keys, k0, count);
    } else {
      if (is_turned) {
        tile_paged<T>(k_tile, t.keys, k0, count, D);
      } else {
        key_rows<T>(rows_of_tile, t.keys.k, t.keys.k_stride, t.keys, k0, count);
        tile_transposed(k_tile, rows_of_tile, count, D);
      }
      key_rows<T>(rows_of_tile, t.keys.v, t.keys.v_stride, t.keys, k0, count);
      tile_rows(v_tile, rows_of_tile, count, Dv);
    }
    for (std::int64_t s = 0; s < slivers; ++s) {
      const std::int64_t begin = sliver_begin(s, rows, slivers), end = sliver_begin(s + 1, rows, slivers);
      const std::int64_t reach =
          t.first_position + t.position_step * ((end - 1) / t.group) - k0 + 1;  // keys of this tile that the last row sees
      if (reach <= 0 || first_key(begin / t.group) >= k0 + kTile) continue;
      const int num_keys = static_cast<int>(smaller(reach, count));
      const int height = static_cast<int>(end - begin);
      const float* q = reinterpret_cast<const float*>(q_packed + static_cast<std::size_t>(s) * slot);
      if (direct)
        Heights<Direct<T>::template Scores>::kRun[height]({q, &t.keys, k0, scores, D, num_keys});
      else
        Heights<Scores>::kRun[height]({q, k_tile, scores, D, num_keys});
      // One pass over all rows per step: the long latencies of a row's reductions overlap with the next rows' work.
      float rescale[kRowTile + Vec::kLanes] = {};
      for (int i = 0; i < height; ++i) {
        const std::int64_t r = begin + i;
        const SeenKeys seen = seen_keys(t.first_position + t.position_step * (r / t.group), k0, count, t.window);
        const float before = t.row_max[r], tile_max = seen.first < seen.end ? scale_scores(scores + i * kTile, seen, t.scale) : before;
        if (tile_max > before) t.row_max[r] = tile_max;
        rescale[i] = before == t.row_max[r] ? 0.0f : before - t.row_max[r];  // also where nothing has been seen so far
        if (seen.first >= seen.end)  // a row that ends before this tile, or begins after it: nothing is added to it
          for (int j = 0; j < kTile; j += Vec::kLanes) store(scores + i * kTile + j, set1(-__builtin_inff()));
      }
      for (int i = 0; i < height; i += Vec::kLanes) store(rescale + i, exp(load(rescale + i)));
      for (int i = 0; i < height; ++i)
        t.row_sum[begin + i] = t.row_sum[begin + i] * rescale[i] + exponentials(scores + i * kTile, reference(t.row_max[begin + i]));
      if (direct)
        Heights<Direct<T>::template Mix>::kRun[height]({scores, rows_of_tile, t.row_out + begin * Dv, rescale, Dv, num_keys});
      else
        Heights<Mix>::kRun[height]({scores, v_tile, t.row_out + begin * Dv, rescale, Dv, num_keys});
    }
  }
}
void attention(const AttentionTask& t) {
  if (t.dtype == DType::kBF16)
    attention_t<BFloat16>(t);
  else
    attention_t<float>(t);
}

inline float exp_one(float x) {
  float lanes[Vec::kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

void attention_merge(float* max_, float* sum, float* out, const float* next_max, const float* next_sum, const float* next_out,
                     std::int64_t rows, int head_dim) {
  for (std::int64_t r = 0; r < rows; ++r) {
    if (next_max[r] == -__builtin_inff()) continue;  // a row that ends before this chunk, or begins after it
    const float m = next_max[r] > max_[r] ? next_max[r] : max_[r];
    const float a = exp_one(max_[r] - m), b = exp_one(next_max[r] - m);
    max_[r] = m;
    sum[r] = sum[r] * a + next_sum[r] * b;
    for (int d = 0; d < head_dim; d += Vec::kLanes) {
      float* o = out + r * head_dim + d;
      store(o, fma(load(next_out + r * head_dim + d), set1(b), load(o) * set1(a)));
    }
  }
}

template <typename T>
void attention_finish_t(const AttentionFinish& f) {
  for (std::int64_t r = 0; r < f.num_rows; ++r) {
    T* out = static_cast<T*>(f.out) + (r / f.group) * f.out_token_stride + (r % f.group) * f.head_stride;
    float top = f.row_max[r], sum = f.row_sum[r], scale = 1.0f;
    if (f.sinks != nullptr) {
      const float sink = f.sinks[r % f.group];
      top = sink > top ? sink : top;
      scale = exp_one(f.row_max[r] - top);
      sum = sum * scale + exp_one(sink - top);
    }
    const Vec inverse = set1(scale / sum);
    // Adding zero turns -0 into +0, the one trace a skipped key with weight 0 could leave.
    for (int d = 0; d < f.head_dim; d += Vec::kLanes) store(out + d, load(f.row_out + r * f.head_dim + d) * inverse + zero());
    if (f.lse != nullptr) f.lse[(r / f.group) * f.lse_token_stride + r % f.group] = top + __builtin_logf(sum);
  }
}
void attention_finish(const AttentionFinish& f) {
  if (f.dtype == DType::kBF16)
    attention_finish_t<BFloat16>(f);
  else
    attention_finish_t<float>(f);
}

}  // namespace prl::ops::cpu::PRL_SIMD
