#include <cmath>
#include <span>
#include <vector>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/delta_rule_chunk.cuh"

// The gradient of the gated delta rule in chunks; the notation is that of delta_rule_chunk.cuh. With Y_t the gradient of R_t (and of v_t),
// dS' that of the state behind the chunk, dO_t that of out_t, W_t = exp(cum_last - cum_t) and G_t = exp(cum_t):
//   Y_s = beta_s (sum over t >= s of P_ts dO_t + W_s dS'^T k'_s - sum over t > s of A_ts Y_t)
//   dS = exp(cum_last) dS' + sum over t of G_t (q'_t dO_t^T - k'_t Y_t^T)
// is what one chunk hands on to the one before it, so the first kernel goes from chunk to chunk, a block for 32 columns of a value head.
// All else is sums within a chunk, the second kernel's, which goes over the value heads of a key head. With dP_ts = dO_t . U_s for s <= t
// and dA_ts = -Y_t . U_s for s < t:
//   dq'_t = G_t S dO_t + sum over s of ratio(t, s) dP_ts k'_s
//   dk'_t = -G_t S Y_t + W_t dS' U_t + sum over s of ratio(t, s) dA_ts k'_s
//           + sum over s of ratio(s, t) (dP_st q'_s + dA_st k'_s)
// Both are found as gradients of the unscaled vectors with their lengths held fixed, which is what their lengths' chain rule is applied to.
// The gradient of the logarithm of the decay of token t is a sum over everything that passes t on its way from an earlier token (or the
// state before the chunk) to t itself or a later one (or the state behind the chunk): each part is computed once, so that what cancels
// does.

namespace prl::ops::cuda {
namespace {

constexpr int kMatrixWarps = 8;
constexpr int kMatrixThreads = kMatrixWarps * kWarp;
constexpr int kColsOfPiece = 128;                              ///< columns of values that are in shared memory at a time
constexpr int kColsOfKey = kChunkKeys / kMatrixWarps;          ///< elements of keys that are a warp's
constexpr int kTilePairs = kSubChunks * (kSubChunks + 1) / 2;  ///< of 16 tokens and as many that are not later
static_assert(kColsOfKey == 16 && kSubChunks == 4);

using PieceCols = PaddedMatrix<kColsOfPiece>;
using ChunkPairs = PaddedMatrix<kChunk>;  ///< of two tokens' something

struct MatrixArgs {
  RuleInputs<__nv_bfloat16> in;
  RuleGateGrads<__nv_bfloat16> gates;
  const __nv_bfloat16* dout;
  __nv_bfloat16* dqkv;
  std::int64_t dout_stride, dqkv_stride;
  const std::int32_t *chunk_start_S, *sequence_C;  ///< the first chunk of each sequence; the sequence of each chunk
  const float *states_CNKD, *dstates_CNKD, *residual_TV, *y_TV;
  float query_scale;
};

struct MatrixShared {
  __nv_bfloat16 keys[kChunk * ChunkKeys::kPitch], queries[kChunk * ChunkKeys::kPitch];
  __nv_bfloat16 dout[kChunk * PieceCols::kPitch], y[2][kChunk * PieceCols::kPitch], u[2][kChunk * PieceCols::kPitch];
  /// ratio(t, s) dP_ts and ratio(t, s) dA_ts with the scales of both tokens, [t][s], high and low parts; tiles of later s are not used.
  __nv_bfloat16 of_queries[2][kChunk * ChunkPairs::kPitch], of_keys[2][kChunk * ChunkPairs::kPitch];
  float products[2 * kTilePairs][kWarp][8];  ///< dP and dA of the columns so far, as registers lie
  /// Of the gradient of decays, from pairs of different tokens: sums over s [dA or dP][tile of s][t] and over t [dA or dP][tile of t][s].
  float row_sums[2][kSubChunks][kChunk], col_sums[2][kSubChunks][kChunk];
  float read[kMatrixWarps][kChunk], written[kMatrixWarps][kChunk];  ///< likewise, from S and dS'
  float state_dot[kMatrixWarps];                                    ///< sum of S times dS'
  float dbeta[kChunk];                                              ///< Y_t . R_t
  float lengths[2][kMatrixWarps][kChunk];
  ChunkGates gates;
};

/// A block's chunk.
struct ChunkPlace {
  std::int64_t row;
  int size;                   ///< tokens
  bool has_state, has_later;  ///< S and dS' are not 0
  __device__ ChunkPlace(const MatrixArgs& a, int chunk) {
    const int s = a.sequence_C[chunk], first = a.chunk_start_S[s];
    row = a.in.first_row(s) + static_cast<std::int64_t>(chunk - first) * kChunk;
    size = static_cast<int>(min(kRuleChunk, a.in.end_row(s) - row));
    has_state = chunk > first;
    has_later = chunk + 1 < a.chunk_start_S[s + 1];
  }
};

/// Columns [0, width) of Y and U, from Y and R at y and r, to shared memory; Y_t . R_t of them is added up. Of each warp eight tokens.
__device__ __forceinline__ void load_deltas(MatrixShared& shared, const MatrixArgs& a, const ChunkPlace& place, int n, const float* y,
                                            const float* r, int width, bool is_first) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t stride = static_cast<std::int64_t>(a.in.num_value_heads) * a.in.value_dim;
  const PieceCols y_hi{shared.y[0]}, y_lo{shared.y[1]}, u_hi{shared.u[0]}, u_lo{shared.u[1]};
#pragma unroll 4
  for (int i = 0; i < kChunk / kMatrixWarps; ++i) {
    const int t = warp * (kChunk / kMatrixWarps) + i, c = lane * 4;
    float4 of_y = make_float4(0, 0, 0, 0), of_r = of_y;
    float beta = 0.0f;
    if (t < place.size) {
      beta = a.in.scales.beta_TN[(place.row + t) * a.in.num_value_heads + n];
      if (c < width) {
        of_y = *reinterpret_cast<const float4*>(y + t * stride + c);
        of_r = *reinterpret_cast<const float4*>(r + t * stride + c);
      }
    }
    const float sum = warp_sum(fmaf(of_y.w, of_r.w, fmaf(of_y.z, of_r.z, fmaf(of_y.y, of_r.y, of_y.x * of_r.x))));
    if (lane == 0) shared.dbeta[t] = is_first ? sum : shared.dbeta[t] + sum;
    if (c >= width) continue;
    const SplitPair ys[2] = {split(of_y.x, of_y.y), split(of_y.z, of_y.w)};
    const SplitPair us[2] = {split(__fmul_rn(beta, of_r.x), __fmul_rn(beta, of_r.y)),
                             split(__fmul_rn(beta, of_r.z), __fmul_rn(beta, of_r.w))};
    *reinterpret_cast<uint2*>(y_hi.at(t, c)) = make_uint2(ys[0].hi, ys[1].hi);
    *reinterpret_cast<uint2*>(y_lo.at(t, c)) = make_uint2(ys[0].lo, ys[1].lo);
    *reinterpret_cast<uint2*>(u_hi.at(t, c)) = make_uint2(us[0].hi, us[1].hi);
    *reinterpret_cast<uint2*>(u_lo.at(t, c)) = make_uint2(us[0].lo, us[1].lo);
  }
}

/// A warp's share of dA (pairs [0, kTilePairs)) and dP (those behind them), a tile of 16 by 16 at a time.
struct TilePair {
  int index, t_tile, s_tile;
  bool is_key;
  __device__ explicit TilePair(int i) : index(i), is_key(i < kTilePairs) {
    const int at = is_key ? i : i - kTilePairs;
    t_tile = at >= 6 ? 3 : at >= 3 ? 2 : at >= 1 ? 1 : 0;
    s_tile = at - t_tile * (t_tile + 1) / 2;
  }
  /// The i-th of a warp, which has three at most; below 0: none. Those of keys, which take longer, are dealt first.
  __device__ static int index_of(int warp, int i) {
    const int dealt = i * kMatrixWarps + warp;
    return dealt < 2 * kMatrixWarps ? dealt : warp < 4 ? -1 : dealt - 4;
  }
};

/// dA or dP of a tile, of columns [0, width), to `sum`.
__device__ __forceinline__ void add_pair_products(float (&sum)[2][4], MatrixShared& shared, const TilePair& pair, int width) {
  const PieceCols dout{shared.dout}, y_hi{shared.y[0]}, y_lo{shared.y[1]}, u_hi{shared.u[0]}, u_lo{shared.u[1]};
  const int t = pair.t_tile * kSubChunk, s = pair.s_tile * kSubChunk;
  for (int c = 0; c < width; c += 16) {
    std::uint32_t hi[4], lo[4];
    u_hi.right_rows(hi, s, c);
    u_lo.right_rows(lo, s, c);
    if (pair.is_key) {
      SplitLeft left;
      y_hi.left(left.hi, t, c);
      y_lo.left(left.lo, t, c);
      multiply_add(sum[0], left, hi, lo);
      multiply_add(sum[1], left, hi + 2, lo + 2);
    } else {
      std::uint32_t left[4];
      dout.left(left, t, c);
      multiply_add(sum[0], left, hi[0], hi[1]);
      multiply_add(sum[0], left, lo[0], lo[1]);
      multiply_add(sum[1], left, hi[2], hi[3]);
      multiply_add(sum[1], left, lo[2], lo[3]);
    }
  }
}

/// From Y_t . U_s or dO_t . U_s to what queries and keys are multiplied with, and to the sums for decays.
__device__ __forceinline__ void finish_pair(MatrixShared& shared, const float (&sum)[2][4], const TilePair& pair) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const ChunkKeys keys{shared.keys}, of_t{pair.is_key ? shared.keys : shared.queries};
  const ChunkPairs to_hi{pair.is_key ? shared.of_keys[0] : shared.of_queries[0]},
      to_lo{pair.is_key ? shared.of_keys[1] : shared.of_queries[1]};
  const ChunkGates& gates = shared.gates;
  const float* const scale_t = pair.is_key ? gates.k_scale : gates.q_scale;
  float product[2][4] = {};
#pragma unroll
  for (int k = 0; k < kChunkKeys; k += 16) {
    std::uint32_t left[4], b[4];
    of_t.left(left, pair.t_tile * kSubChunk, k);
    keys.right_rows(b, pair.s_tile * kSubChunk, k);
    multiply_add(product[0], left, b[0], b[1]);
    multiply_add(product[1], left, b[2], b[3]);
  }
  float passing[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      float value[2];
      const int t = pair.t_tile * kSubChunk + tile_row(lane, e), first_s = pair.s_tile * kSubChunk + half * 8 + tile_col(lane, e);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int s = first_s + i;
        const float v =
            coefficient(pair.is_key ? -sum[half][e + i] : sum[half][e + i], scale_t[t], gates.k_scale[s], gates.cum[t], gates.cum[s]);
        value[i] = s < t || (s == t && !pair.is_key) ? v : 0.0f;
        passing[half][e + i] = s < t ? __fmul_rn(v, product[half][e + i]) : 0.0f;
      }
      const SplitPair both = split(value[0], value[1]);
      *reinterpret_cast<std::uint32_t*>(to_hi.at(t, first_s)) = both.hi;
      *reinterpret_cast<std::uint32_t*>(to_lo.at(t, first_s)) = both.lo;
    }
  const int which = pair.is_key ? 0 : 1;
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const float row = warp_sum<4>(__fadd_rn(__fadd_rn(passing[0][e], passing[0][e + 1]), __fadd_rn(passing[1][e], passing[1][e + 1])));
    if (lane % 4 == 0) shared.row_sums[which][pair.s_tile][pair.t_tile * kSubChunk + tile_row(lane, e)] = row;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float column = __fadd_rn(passing[half][i], passing[half][i + 2]);
#pragma unroll
      for (int distance = 4; distance < kWarp; distance *= 2) column += __shfl_xor_sync(kFullWarp, column, distance);
      if (lane < 4) shared.col_sums[which][pair.t_tile][pair.s_tile * kSubChunk + half * 8 + tile_col(lane, i)] = column;
    }
}

/// A warp's 16 elements of keys of all tokens, in tiles of 16 tokens by 8 elements.
using KeyTiles = float[kSubChunks][2][4];

/// Products with S and dS'.
struct StateProducts {
  KeyTiles dout, y, u;  ///< S dO_t, S Y_t, dS' U_t
  float dot;            ///< of S and dS', a lane's part
};
/// A right operand's part of S or dS' in fp32: rows j * 8 + lane / 4 of a warp's 16, columns c + i * 8 + lane % 4 * 2 and the next.
struct StatePart {
  float2 v[2][2];
  __device__ __forceinline__ void read(const float* at, int D, int c) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) v[j][i] = *reinterpret_cast<const float2*>(at + j * 8 * D + c + i * 8);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& row : v) row[0] = row[1] = make_float2(0, 0);
  }
};

/// Has the second-level cache fetch [K, D] numbers that the block reads later, a few at a time.
__device__ __forceinline__ void fetch_state(const float* state, int D) {
  constexpr int kLine = 128 / sizeof(float);
  for (int i = static_cast<int>(threadIdx.x) * kLine; i < kChunkKeys * D; i += kMatrixThreads * kLine)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(state + i));
}

/// Of columns [0, width), with a lane's first elements of S and dS' at `state` and `dstate`.
__device__ __forceinline__ void add_state_products(StateProducts& sums, MatrixShared& shared, const ChunkPlace& place, const float* state,
                                                   const float* dstate, int D, int width) {
  const PieceCols dout{shared.dout}, y_hi{shared.y[0]}, y_lo{shared.y[1]}, u_hi{shared.u[0]}, u_lo{shared.u[1]};
  StatePart s, d;
  s.clear(), d.clear();
  if (place.has_state) s.read(state, D, 0);
  if (place.has_later) d.read(dstate, D, 0);
#pragma unroll 1
  for (int c = 0; c < width; c += 16) {
    std::uint32_t s_hi[2][2], s_lo[2][2], d_hi[2][2], d_lo[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const SplitPair of_s = split(s.v[j][i].x, s.v[j][i].y), of_d = split(d.v[j][i].x, d.v[j][i].y);
        s_hi[j][i] = of_s.hi, s_lo[j][i] = of_s.lo, d_hi[j][i] = of_d.hi, d_lo[j][i] = of_d.lo;
        sums.dot = fmaf(s.v[j][i].y, d.v[j][i].y, fmaf(s.v[j][i].x, d.v[j][i].x, sums.dot));
      }
    if (c + 16 < width) {
      if (place.has_state) s.read(state, D, c + 16);
      if (place.has_later) d.read(dstate, D, c + 16);
    }
#pragma unroll
    for (int tile = 0; tile < kSubChunks; ++tile) {
      if (place.has_state) {
        std::uint32_t left[4];
        SplitLeft of_y;
        dout.left(left, tile * kSubChunk, c);
        y_hi.left(of_y.hi, tile * kSubChunk, c);
        y_lo.left(of_y.lo, tile * kSubChunk, c);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          multiply_add(sums.dout[tile][j], left, s_hi[j][0], s_hi[j][1]);
          multiply_add(sums.dout[tile][j], left, s_lo[j][0], s_lo[j][1]);
          multiply_add(sums.y[tile][j], of_y, s_hi[j], s_lo[j]);
        }
      }
      if (place.has_later) {
        SplitLeft of_u;
        u_hi.left(of_u.hi, tile * kSubChunk, c);
        u_lo.left(of_u.lo, tile * kSubChunk, c);
#pragma unroll
        for (int j = 0; j < 2; ++j) multiply_add(sums.u[tile][j], of_u, d_hi[j], d_lo[j]);
      }
    }
  }
}

/// Two neighbouring elements of a row of bfloat16.
__device__ __forceinline__ float2 pair_at(ChunkKeys matrix, int row, int column) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(matrix.at(row, column)));
}

/// Adds products with S and dS' to the gradients of a warp's elements; the sums for decays.
__device__ __forceinline__ void add_states(KeyTiles& dq, KeyTiles& dk, const StateProducts& sums, MatrixShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const ChunkKeys keys{shared.keys}, queries{shared.queries};
  const ChunkGates& gates = shared.gates;
#pragma unroll
  for (int tile = 0; tile < kSubChunks; ++tile)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int t = tile * kSubChunk + tile_row(lane, e);
      const float of_q = __fmul_rn(gates.q_scale[t], gates.decay[t]), of_k = -__fmul_rn(gates.k_scale[t], gates.decay[t]);
      const float of_w = __fmul_rn(gates.k_scale[t], decay_between(gates.cum[t], gates.cum[kChunk - 1]));
      float read = 0.0f, written = 0.0f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int c = warp * kColsOfKey + j * 8 + tile_col(lane, e);
        const float2 qs = pair_at(queries, t, c), ks = pair_at(keys, t, c);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float q = i == 0 ? qs.x : qs.y, k = i == 0 ? ks.x : ks.y;
          const float from_dout = __fmul_rn(of_q, sums.dout[tile][j][e + i]), from_y = __fmul_rn(of_k, sums.y[tile][j][e + i]);
          const float from_u = __fmul_rn(of_w, sums.u[tile][j][e + i]);
          read = fmaf(k, from_y, fmaf(q, from_dout, read));
          written = fmaf(k, from_u, written);
          dq[tile][j][e + i] = __fadd_rn(dq[tile][j][e + i], from_dout);
          dk[tile][j][e + i] = __fadd_rn(dk[tile][j][e + i], __fadd_rn(from_y, from_u));
        }
      }
      read = warp_sum<4>(read), written = warp_sum<4>(written);
      if (lane % 4 == 0) shared.read[warp][t] = read, shared.written[warp][t] = written;
    }
  const float dot = warp_sum(sums.dot);
  if (lane == 0) shared.state_dot[warp] = dot;
}

/// Adds products of tokens with one another.
__device__ __forceinline__ void add_pairs(KeyTiles& dq, KeyTiles& dk, MatrixShared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const ChunkKeys keys{shared.keys}, queries{shared.queries};
  const auto add = [](float(&to)[2][4], const std::uint32_t(&hi)[4], const std::uint32_t(&lo)[4], const std::uint32_t(&b)[4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      multiply_add(to[j], hi, b[2 * j], b[2 * j + 1]);
      multiply_add(to[j], lo, b[2 * j], b[2 * j + 1]);
    }
  };
#pragma unroll 1
  for (int from = 0; from < kSubChunks; ++from) {
    std::uint32_t of_keys[4], of_queries[4];
    keys.right_columns(of_keys, from * kSubChunk, warp * kColsOfKey);
    queries.right_columns(of_queries, from * kSubChunk, warp * kColsOfKey);
#pragma unroll
    for (int to = 0; to < kSubChunks; ++to) {
      std::uint32_t hi[4], lo[4];
      if (from <= to) {
        ChunkPairs{shared.of_queries[0]}.left(hi, to * kSubChunk, from * kSubChunk);
        ChunkPairs{shared.of_queries[1]}.left(lo, to * kSubChunk, from * kSubChunk);
        add(dq[to], hi, lo, of_keys);
        ChunkPairs{shared.of_keys[0]}.left(hi, to * kSubChunk, from * kSubChunk);
        ChunkPairs{shared.of_keys[1]}.left(lo, to * kSubChunk, from * kSubChunk);
        add(dk[to], hi, lo, of_keys);
      }
      if (from >= to) {
        left_transposed(hi, ChunkPairs{shared.of_queries[0]}, from * kSubChunk, to * kSubChunk);
        left_transposed(lo, ChunkPairs{shared.of_queries[1]}, from * kSubChunk, to * kSubChunk);
        add(dk[to], hi, lo, of_queries);
        left_transposed(hi, ChunkPairs{shared.of_keys[0]}, from * kSubChunk, to * kSubChunk);
        left_transposed(lo, ChunkPairs{shared.of_keys[1]}, from * kSubChunk, to * kSubChunk);
        add(dk[to], hi, lo, of_keys);
      }
    }
  }
}

/// Gradients of the gates of a value head, by one warp: tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void write_gates(const MatrixArgs& a, const MatrixShared& shared, const ChunkPlace& place, int n) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float read[2], written[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i, tile = t / kSubChunk;
    read[i] = written[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < kMatrixWarps; ++w) {
      read[i] = __fadd_rn(read[i], shared.read[w][t]);
      written[i] = __fadd_rn(written[i], shared.written[w][t]);
    }
    for (int which = 0; which < 2; ++which) {
      for (int other = 0; other <= tile; ++other) read[i] = __fadd_rn(read[i], shared.row_sums[which][other][t]);
      for (int other = tile; other < kSubChunks; ++other) read[i] = __fsub_rn(read[i], shared.col_sums[which][other][t]);
    }
  }
  float passed = 0.0f;  // from the state before the chunk to that behind it
  if (place.has_state && place.has_later) {
    for (int w = 0; w < kMatrixWarps; ++w) passed = __fadd_rn(passed, shared.state_dot[w]);
    passed = __fmul_rn(passed, shared.gates.decay[kChunk - 1]);
  }
  // What tokens from t on read, and what those before t have written.
  float after = __fadd_rn(read[0], read[1]), before = __fadd_rn(written[0], written[1]);
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const float other_after = __shfl_down_sync(kFullWarp, after, static_cast<unsigned>(distance));
    const float other_before = __shfl_up_sync(kFullWarp, before, static_cast<unsigned>(distance));
    if (lane + distance < kWarp) after = __fadd_rn(after, other_after);
    if (lane >= distance) before = __fadd_rn(other_before, before);
  }
  float next = __shfl_down_sync(kFullWarp, after, 1), last = __shfl_up_sync(kFullWarp, before, 1);
  if (lane == kWarp - 1) next = 0.0f;
  if (lane == 0) last = 0.0f;
  const float dlog[2] = {__fadd_rn(passed, __fadd_rn(last, after)),
                         __fadd_rn(passed, __fadd_rn(__fadd_rn(last, written[0]), __fadd_rn(read[1], next)))};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    if (t < place.size) a.gates.write(place.row + t, n, __fmul_rn(__fsub_rn(1.0f, shared.gates.beta[t]), shared.dbeta[t]), dlog[i]);
  }
}

/// The chain rule of lengths; gradients of queries and keys take the place of these and are copied from there.
__device__ __forceinline__ void write_vectors(const MatrixArgs& a, MatrixShared& shared, const KeyTiles& dq, const KeyTiles& dk,
                                              const ChunkPlace& place, int m) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const ChunkKeys keys{shared.keys}, queries{shared.queries};
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int tile = 0; tile < kSubChunks; ++tile)
#pragma unroll
        for (int e = 0; e < 4; e += 2) body(side, tile, e, tile * kSubChunk + tile_row(lane, e));
  };
  const auto value = [&](int side, int tile, int j, int e) { return side == 0 ? dq[tile][j][e] : dk[tile][j][e]; };
  each([&](int side, int tile, int e, int t) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 x = pair_at(side == 0 ? queries : keys, t, warp * kColsOfKey + j * 8 + tile_col(lane, e));
      sum = fmaf(value(side, tile, j, e + 1), x.y, fmaf(value(side, tile, j, e), x.x, sum));
    }
    sum = warp_sum<4>(sum);
    if (lane % 4 == 0) shared.lengths[side][warp][t] = sum;
  });
  __syncthreads();
  each([&](int side, int tile, int e, int t) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kMatrixWarps; ++w) sum = __fadd_rn(sum, shared.lengths[side][w][t]);
    // Of queries, whose scale has 1 / sqrt(K) in it, the length's inverse is what is left without it.
    const float inverse_length = side == 0 ? shared.gates.q_scale[t] / a.query_scale : shared.gates.k_scale[t];
    const float back = -__fmul_rn(__fmul_rn(sum, inverse_length), inverse_length);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const ChunkKeys vectors = side == 0 ? queries : keys;
      const int c = warp * kColsOfKey + j * 8 + tile_col(lane, e);
      const float2 x = pair_at(vectors, t, c);
      *reinterpret_cast<__nv_bfloat162*>(vectors.at(t, c)) =
          __floats2bfloat162_rn(fmaf(back, x.x, value(side, tile, j, e)), fmaf(back, x.y, value(side, tile, j, e + 1)));
    }
  });
  __syncthreads();
  constexpr int kPieces = kChunkKeys / kVec;
  for (int i = static_cast<int>(threadIdx.x); i < place.size * 2 * kPieces; i += kMatrixThreads) {
    const int t = i / (2 * kPieces), side = i / kPieces % 2, c = i % kPieces * kVec;
    *reinterpret_cast<uint4*>(a.dqkv + (place.row + t) * a.dqkv_stride + (side * a.in.num_key_heads + m) * kChunkKeys + c) =
        *reinterpret_cast<const uint4*>((side == 0 ? queries : keys).at(t, c));
  }
}

__global__ void __launch_bounds__(kMatrixThreads) rule_matrix_kernel(const MatrixArgs a) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<MatrixShared*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int chunk = static_cast<int>(blockIdx.x), m = static_cast<int>(blockIdx.y), N = a.in.num_value_heads, D = a.in.value_dim;
  const int group = N / a.in.num_key_heads;
  const ChunkPlace place(a, chunk);
  ask_for_keys<kMatrixThreads>(ChunkKeys{shared.keys}, a.in, 1, m, place.row, 0, place.size);
  ask_for_keys<kMatrixThreads>(ChunkKeys{shared.queries}, a.in, 0, m, place.row, 0, place.size);
  KeyTiles dq = {}, dk = {};
#pragma unroll 1
  for (int n = m * group; n < (m + 1) * group; ++n) {
    const std::int64_t at = place.row * N * D + static_cast<std::int64_t>(n) * D;
    const std::int64_t states_at = (static_cast<std::int64_t>(chunk) * N + n) * kChunkKeys * D;
    const std::int64_t state_at = states_at + static_cast<std::int64_t>(warp * kColsOfKey + lane / 4) * D + lane % 4 * 2;
    if (place.has_state) fetch_state(a.states_CNKD + states_at, D);
    if (place.has_later) fetch_state(a.dstates_CNKD + states_at, D);
    StateProducts sums = {};
    if (warp == 0) {
      GatesOfLane gates;
      gates.read(a.in, n, place.row, 0, place.size);
      gates.write(shared.gates);
    }
#pragma unroll 1
    for (int first = 0; first < D; first += kColsOfPiece) {
      const int width = min(kColsOfPiece, D - first);
      if (first > 0) __syncthreads();
      ask_for_columns(PieceCols{shared.dout}, a.dout + place.row * a.dout_stride + n * D + first, a.dout_stride, place.size, width);
      copies_commit();
      load_deltas(shared, a, place, n, a.y_TV + at + first, a.residual_TV + at + first, width, first == 0);
      copies_wait<0>();
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < 3; ++i) {
        const int index = TilePair::index_of(warp, i);
        if (index < 0) continue;
        const TilePair pair(index);
        float* const kept = shared.products[index][lane];
        float sum[2][4] = {};
        if (first > 0)
#pragma unroll
          for (int e = 0; e < 8; ++e) sum[e / 4][e % 4] = kept[e];
        add_pair_products(sum, shared, pair, width);
        if (first + width == D)
          finish_pair(shared, sum, pair);
        else
#pragma unroll
          for (int e = 0; e < 8; ++e) kept[e] = sum[e / 4][e % 4];
      }
      add_state_products(sums, shared, place, a.states_CNKD + state_at + first, a.dstates_CNKD + state_at + first, D, width);
    }
    add_states(dq, dk, sums, shared);
    __syncthreads();
    if (warp == 0) write_gates(a, shared, place, n);
    add_pairs(dq, dk, shared);
    __syncthreads();
  }
  write_vectors(a, shared, dq, dk, place, m);
}

/// Chunks of all sequences, one behind the other.
struct ChunkList {
  std::vector<std::int32_t> start_S = {0}, sequence_C;
  explicit ChunkList(const StateRows& rows) {
    for (std::size_t s = 0; s + 1 < rows.start_S.size(); ++s) {
      const std::int64_t chunks = ceil_div(rows.start_S[s + 1] - rows.start_S[s], kRuleChunk);
      start_S.push_back(start_S.back() + static_cast<std::int32_t>(chunks));
      sequence_C.insert(sequence_C.end(), static_cast<std::size_t>(chunks), static_cast<std::int32_t>(s));
    }
  }
  std::int64_t count() const { return static_cast<std::int64_t>(sequence_C.size()); }
};

/// The workspace of a call.
struct ChunkMemory {
  RuleScales scales;
  float *states_CNKD, *dstates_CNKD, *residual_TV, *y_TV, *parameter_parts;
  ChunkMemory(Carver& c, const DeltaRule& in, std::int64_t num_chunks) {
    const std::int64_t T = in.qkv_TC.shape[0], N = in.num_value_heads, D = in.value_dim;
    scales = take_rule_scales(c, in);
    states_CNKD = c.take<float>(num_chunks * N * kChunkKeys * D);
    dstates_CNKD = c.take<float>(num_chunks * N * kChunkKeys * D);
    residual_TV = c.take<float>(T * N * D);
    y_TV = c.take<float>(T * N * D);
    parameter_parts = c.take<float>(T * N * 2);
  }
};

}  // namespace

void delta_rule_backward_in_chunks(OpContext& ctx, const DeltaRuleGrads& grads, ConstTensorView dout_TV, const DeltaRule& in,
                                   const StateRows& rows) {
  for (const ConstTensorView& v : {in.qkv_TC, dout_TV, ConstTensorView(grads.dqkv_TC)})
    if (!is_wide(v)) fail(ErrorCode::kNotImplemented, "[delta_rule_backward] rows must begin at multiples of 16 bytes");
  const ChunkList chunks(rows);
  Carver count(nullptr);
  ChunkMemory(count, in, chunks.count());
  Carver carve(ctx.workspace->require(count.used()));
  const ChunkMemory memory(carve, in, chunks.count());
  const std::int32_t* const chunk_start_S = staged(ctx, std::span<const std::int32_t>(chunks.start_S));
  write_rule_scales(ctx, memory.scales, in);
  write_chunk_states(ctx, {memory.states_CNKD, memory.residual_TV, chunk_start_S}, memory.scales, in, rows);

  using T = __nv_bfloat16;
  const ChunkGradients gradients{memory.dstates_CNKD, memory.y_TV, chunk_start_S};
  write_chunk_gradients(ctx, gradients, grads.dqkv_TC, dout_TV, memory.scales, in, rows);
  const MatrixArgs matrix{.in = rule_inputs<T>(ctx, memory.scales, in, rows),
                          .gates = rule_gate_grads<T>(grads, in, memory.parameter_parts),
                          .dout = dout_TV.as<T>(),
                          .dqkv = grads.dqkv_TC.as<T>(),
                          .dout_stride = dout_TV.row_stride,
                          .dqkv_stride = grads.dqkv_TC.row_stride,
                          .chunk_start_S = chunk_start_S,
                          .sequence_C = staged(ctx, std::span<const std::int32_t>(chunks.sequence_C)),
                          .states_CNKD = memory.states_CNKD,
                          .dstates_CNKD = memory.dstates_CNKD,
                          .residual_TV = memory.residual_TV,
                          .y_TV = memory.y_TV,
                          .query_scale = 1.0f / std::sqrt(static_cast<float>(in.key_dim))};
  const dim3 grid(static_cast<unsigned>(chunks.count()), static_cast<unsigned>(in.num_key_heads));
  launch_with<MatrixShared>(ctx, rule_matrix_kernel, matrix, grid, kMatrixThreads);
  add_rule_parameters(ctx, grads, memory.parameter_parts, rows);
}

}  // namespace prl::ops::cuda
