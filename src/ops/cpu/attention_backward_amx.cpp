#include <cstddef>
#include <cstdint>

#define PRL_PAIRS amx_attention
#include "ops/cpu/impl/bf16_pairs.hpp"

// exp of this file's own, so that no other file's code is compiled with its instruction set.
#undef PRL_SIMD
#define PRL_SIMD amx_attention
namespace prl::ops::cpu::amx_attention {
using avx512::set1;
using avx512::zero;
}  // namespace prl::ops::cpu::amx_attention
#include "ops/cpu/impl/math.hpp"

// The backward pass of attention in bf16 with tile products (Dao 2023, FlashAttention-2): probabilities and score gradients are
// recomputed in fp32 and rounded to bf16 as operands; sums stay in fp32. Tiles are always 64 by 64, rows and keys that do not exist are
// zero, so every product has one shape and the order of every sum is fixed.

namespace prl::ops::cpu::amx_attention {
namespace {

constexpr int kTile = 64;
constexpr int kRowTile = 16;

const GemmKernels& gemm() { return gemm_bf16_amx(); }

std::int64_t num_panels(std::int64_t cols) { return (cols + kColTile - 1) / kColTile; }
std::int64_t num_tiles(std::int64_t length) { return (length + kTile - 1) / kTile; }
/// A left operand of 64 rows, a right operand of `cols` columns.
std::size_t left_bytes(std::int64_t depth) { return kTile / kRowTile * gemm().sliver_bytes(depth); }
std::size_t right_bytes(std::int64_t cols, std::int64_t depth) {
  return static_cast<std::size_t>(num_panels(cols)) * gemm().panel_bytes(depth);
}

/// A[i][p] of 64 rows; rows from `rows` on are zero.
template <typename T>
void pack_left(char* out, const T* source, DType dtype, std::int64_t stride, int rows, std::int64_t depth, bool transposed) {
  for (int i = 0; i < kTile; i += kRowTile) {
    const int own = rows - i < 0 ? 0 : rows - i < kRowTile ? rows - i : kRowTile;
    gemm().pack_sliver(out, own > 0 ? source + i * (transposed ? 1 : stride) : source, dtype, stride, own, depth, transposed);
    out += gemm().sliver_bytes(depth);
  }
}
/// B[p][j] = rows[j][p] for j < cols <= 64, zero beyond.
void pack_keys(char* out, const BFloat16* rows, std::int64_t stride, int cols, std::int64_t depth) {
  for (int j = 0; j < kTile; j += kColTile, out += gemm().panel_bytes(depth))
    gemm().pack_panel(out, cols > j ? rows + j * stride : rows, DType::kBF16, stride,
                      cols > j ? static_cast<int>(smaller(cols - j, kColTile)) : 0, depth, false);
}
/// B[p][j] = rows[p][j] for p < count, zero for p up to 64.
void pack_rows(char* out, const BFloat16* rows, std::int64_t stride, int count, std::int64_t cols) {
  const std::size_t bytes = gemm().panel_bytes(kTile);
  if (count < kTile) __builtin_memset(out, 0, static_cast<std::size_t>(num_panels(cols)) * bytes);
  for (std::int64_t j = 0; j < cols; j += kColTile, out += bytes)
    gemm().pack_panel(out, rows + j, DType::kBF16, stride, static_cast<int>(smaller(cols - j, kColTile)), count, true);
}

struct Product {
  const char* left;
  const char* right;
  std::int64_t depth, num_cols;
  float* c;
  std::int64_t c_stride;
  bool accumulate;
};
void multiply(const Product& p, char* scratch) {
  gemm().block({.a = p.left,
                .num_rows = kTile,
                .first_sliver = 0,
                .num_slivers = kTile / kRowTile,
                .b = p.right,
                .panel_stride = static_cast<std::int64_t>(gemm().panel_bytes(p.depth)),
                .num_cols = p.num_cols,
                .depth = p.depth,
                .c = p.c,
                .c_stride = p.c_stride,
                .accumulate = p.accumulate,
                .scratch = scratch});
}

/// Bump allocation in the caller's scratch, 64-byte steps.
struct Scratch {
  char* next;
  char* take(std::size_t bytes) {
    char* p = next;
    next += (bytes + 63) / 64 * 64;
    return p;
  }
  float* floats(std::int64_t count) { return reinterpret_cast<float*>(take(static_cast<std::size_t>(count) * sizeof(float))); }
};

/// 64 queries of one head, packed once and used with every tile of keys.
struct QueryTile {
  char *q_left, *dout_left, *q_right, *dout_right;
};
std::size_t query_tile_bytes(int head_dim) { return 2 * left_bytes(head_dim) + 2 * right_bytes(head_dim, kTile); }
QueryTile query_tile(char* memory, int head_dim) {
  const std::size_t left = left_bytes(head_dim);
  return {memory, memory + left, memory + 2 * left, memory + 2 * left + right_bytes(head_dim, kTile)};
}

/// Row i of scores s becomes probabilities, of dp their gradient; columns of keys that are not seen become 0.
void softmax_rows(float* s, float* dp, SeenKeys seen, float scale, float lse, float delta) {
  const Vec vscale = set1(scale), vlse = set1(lse), vdelta = set1(delta);
  for (int j = 0; j < kTile; j += Vec::kLanes) {
    const Vec until_end = avx512::select_first(seen.end - j, exp(avx512::load(s + j) * vscale - vlse), zero());
    const Vec e = avx512::select_first(seen.first - j, zero(), until_end);
    avx512::store(s + j, e);
    avx512::store(dp + j, e * (avx512::load(dp + j) - vdelta) * vscale);
  }
}
void clear(float* p, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += Vec::kLanes) avx512::store(p + i, zero());
}
void store_rows(void* out, std::int64_t stride, const float* rows, std::int64_t count, int head_dim) {
  for (std::int64_t i = 0; i < count; ++i)
    for (int d = 0; d < head_dim; d += Vec::kLanes)
      avx512::store(static_cast<BFloat16*>(out) + i * stride + d, avx512::load(rows + i * head_dim + d));
}

}  // namespace

std::size_t scratch_bytes(std::int64_t length, int group, int head_dim) {
  const std::int64_t tiles = group * num_tiles(length);
  const std::size_t floats =
      static_cast<std::size_t>(tiles * kTile * (head_dim + 1) + 2 * kTile * head_dim + 2 * kTile * kTile) * sizeof(float);
  return static_cast<std::size_t>(tiles) * query_tile_bytes(head_dim) + floats + 2 * right_bytes(kTile, head_dim) +
         right_bytes(head_dim, kTile) + 3 * left_bytes(kTile) + gemm().scratch_bytes + 32 * 64;
}

void attention_backward(const AttentionBackwardTask& t) {
  const int D = t.head_dim;
  const std::int64_t L = t.length, tiles = num_tiles(L), padded = tiles * kTile;
  Scratch scratch{t.scratch};
  char* queries = scratch.take(static_cast<std::size_t>(t.group * tiles) * query_tile_bytes(D));
  float* dq = scratch.floats(t.group * padded * D);
  float* delta = scratch.floats(t.group * padded);
  float* dk = scratch.floats(kTile * D);
  float* dv = scratch.floats(kTile * D);
  float* p = scratch.floats(kTile * kTile);
  float* ds = scratch.floats(kTile * kTile);
  char* k_scores = scratch.take(right_bytes(kTile, D));
  char* v_scores = scratch.take(right_bytes(kTile, D));
  char* k_rows = scratch.take(right_bytes(D, kTile));
  char* p_T = scratch.take(left_bytes(kTile));
  char* ds_T = scratch.take(left_bytes(kTile));
  char* ds_left = scratch.take(left_bytes(kTile));
  char* edge = scratch.take(gemm().scratch_bytes);

  clear(dq, t.group * padded * D);
  for (int g = 0; g < t.group; ++g)
    for (std::int64_t b = 0; b < tiles; ++b) {
      const std::int64_t q0 = b * kTile;
      const int count = static_cast<int>(smaller(kTile, L - q0));
      const BFloat16* q = static_cast<const BFloat16*>(t.q) + q0 * t.q_stride + g * D;
      const BFloat16* dout = static_cast<const BFloat16*>(t.dout) + q0 * t.dout_stride + g * D;
      const BFloat16* out = static_cast<const BFloat16*>(t.out) + q0 * t.out_stride + g * D;
      const QueryTile tile = query_tile(queries + static_cast<std::size_t>(g * tiles + b) * query_tile_bytes(D), D);
      pack_left(tile.q_left, q, DType::kBF16, t.q_stride, count, D, false);
      pack_left(tile.dout_left, dout, DType::kBF16, t.dout_stride, count, D, false);
      pack_rows(tile.q_right, q, t.q_stride, count, D);
      pack_rows(tile.dout_right, dout, t.dout_stride, count, D);
      for (int i = 0; i < count; ++i) {
        Vec sum = zero();
        for (int d = 0; d < D; d += Vec::kLanes)
          sum = avx512::fma(avx512::load(out + i * t.out_stride + d), avx512::load(dout + i * t.dout_stride + d), sum);
        delta[g * padded + q0 + i] = avx512::reduce_add(sum);
      }
    }

  for (std::int64_t k0 = 0; k0 < L; k0 += kTile) {
    const int keys = static_cast<int>(smaller(kTile, L - k0));
    const BFloat16* k = static_cast<const BFloat16*>(t.k) + k0 * t.k_stride;
    pack_keys(k_scores, k, t.k_stride, keys, D);
    pack_keys(v_scores, static_cast<const BFloat16*>(t.v) + k0 * t.v_stride, t.v_stride, keys, D);
    pack_rows(k_rows, k, t.k_stride, keys, D);
    clear(dk, kTile * D);
    clear(dv, kTile * D);
    const std::int64_t end = t.window == 0 ? tiles : smaller(tiles, num_tiles(k0 + keys + t.window - 1));  // queries that see these keys
    for (int g = 0; g < t.group; ++g)
      for (std::int64_t b = k0 / kTile; b < end; ++b) {
        const std::int64_t q0 = b * kTile;
        const QueryTile tile = query_tile(queries + static_cast<std::size_t>(g * tiles + b) * query_tile_bytes(D), D);
        multiply({tile.q_left, k_scores, D, kTile, p, kTile, false}, edge);
        multiply({tile.dout_left, v_scores, D, kTile, ds, kTile, false}, edge);
        for (int i = 0; i < kTile; ++i) {
          const bool exists = q0 + i < L;
          const SeenKeys seen = exists ? seen_keys(q0 + i, k0, keys, t.window) : SeenKeys{};
          softmax_rows(p + i * kTile, ds + i * kTile, seen, t.scale, exists ? t.lse[(q0 + i) * t.lse_stride + g] : 0.0f,
                       exists ? delta[g * padded + q0 + i] : 0.0f);
        }
        pack_left(p_T, p, DType::kF32, kTile, kTile, kTile, true);
        pack_left(ds_T, ds, DType::kF32, kTile, kTile, kTile, true);
        pack_left(ds_left, ds, DType::kF32, kTile, kTile, kTile, false);
        multiply({p_T, tile.dout_right, kTile, D, dv, D, true}, edge);
        multiply({ds_T, tile.q_right, kTile, D, dk, D, true}, edge);
        multiply({ds_left, k_rows, kTile, D, dq + (g * padded + q0) * D, D, true}, edge);
      }
    store_rows(static_cast<BFloat16*>(t.dk) + k0 * t.dk_stride, t.dk_stride, dk, keys, D);
    store_rows(static_cast<BFloat16*>(t.dv) + k0 * t.dv_stride, t.dv_stride, dv, keys, D);
  }
  for (int g = 0; g < t.group; ++g) store_rows(static_cast<BFloat16*>(t.dq) + g * D, t.dq_stride, dq + g * padded * D, L, D);
}

}  // namespace prl::ops::cpu::amx_attention

namespace prl::ops::cpu {

std::size_t attention_backward_scratch_bytes_amx(std::int64_t length, int group, int head_dim) {
  const std::size_t f32 = kernels_avx512().attention_backward_scratch_bytes(length, group, head_dim);
  const std::size_t bf16 = amx_attention::scratch_bytes(length, group, head_dim);
  return f32 > bf16 ? f32 : bf16;
}
void attention_backward_amx(const AttentionBackwardTask& t) {
  if (t.dtype == DType::kBF16)
    amx_attention::attention_backward(t);
  else
    kernels_avx512().attention_backward(t);
}

}  // namespace prl::ops::cpu
