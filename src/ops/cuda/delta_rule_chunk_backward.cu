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

using Half = __nv_bfloat16;
constexpr int D = kChunkValues, kStateSize = kChunkKeys * D;
constexpr int kMatrixWarps = 16;  ///< one block fits a multiprocessor; so many, for what one warp waits for is another's time
constexpr int kMatrixThreads = kMatrixWarps * kWarp;
constexpr int kColsOfKey = 16;  ///< elements of keys that are a warp's
constexpr int kKeySlices = kChunkKeys / kColsOfKey;
constexpr int kTilesOfWarp = kSubChunks / (kMatrixWarps / kKeySlices);  ///< for which it has these
constexpr int kTilePairs = kSubChunks * (kSubChunks + 1) / 2;           ///< of 16 tokens and as many that are not later
static_assert(kSubChunks == 4 && kMatrixWarps < 2 * kTilePairs && 2 * kTilePairs <= 2 * kMatrixWarps);

using ValueCols = PaddedMatrix<D>;
using ChunkPairs = PaddedMatrix<kChunk>;  ///< of two tokens' something

struct MatrixArgs {
  RuleInputs<Half> in;
  RuleGateGrads<Half> gates;
  const Half* dout;
  Half* dqkv;
  std::int64_t dout_stride, dqkv_stride;
  const std::int32_t *chunk_start_S, *sequence_C;  ///< the first chunk of each sequence; the sequence of each chunk
  const float *states_CNKD, *dstates_CNKD;
  const Half *u_CNPDT, *y_CNPDT;
  float query_scale;
};

struct MatrixShared {
  Half keys[kChunk * ChunkKeys::kPitch], queries[kChunk * ChunkKeys::kPitch];
  Half dout[kChunk * ValueCols::kPitch], y[2][D * ChunkTokens::kPitch], u[2][D * ChunkTokens::kPitch];
  /// ratio(t, s) dP_ts and ratio(t, s) dA_ts with the scales of both tokens, [t][s], high and low parts; tiles of later s are not used.
  Half of_queries[2][kChunk * ChunkPairs::kPitch], of_keys[2][kChunk * ChunkPairs::kPitch];
  /// Of the gradient of decays, from pairs of different tokens: sums over s [dA or dP][tile of s][t] and over t [dA or dP][tile of t][s].
  float row_sums[2][kSubChunks][kChunk], col_sums[2][kSubChunks][kChunk];
  float read[kKeySlices][kChunk], written[kKeySlices][kChunk];  ///< likewise, from S and dS'
  float state_dot[kKeySlices];                                  ///< sum of S times dS'
  float dbeta[kChunk];                                          ///< Y_t . U_t
  float lengths[2][kKeySlices][kChunk];
  ChunkGates gates;
  RuleGateGrads<Half>::Decay decays[kChunk];
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

/// What a warp has: elements [first_key, first_key + kColsOfKey) of keys for kTilesOfWarp tiles of tokens.
struct MatrixWarp {
  int lane, warp, slice, first_key, first_tile;
  __device__ __forceinline__ MatrixWarp()
      : lane(static_cast<int>(threadIdx.x) % kWarp),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        slice(warp % kKeySlices),
        first_key(slice * kColsOfKey),
        first_tile(warp / kKeySlices * kTilesOfWarp) {}
  /// The token of element e in a tile of the warp.
  __device__ __forceinline__ int token(int tile, int e) const { return (first_tile + tile) * kSubChunk + tile_row(lane, e); }
};

/// Asks for both parts of U or Y of a chunk.
__device__ __forceinline__ void ask_for_delta(Half* to, const Half* from) {
  constexpr int kPieces = kChunk / kVec, kRows = kMatrixThreads / kPieces;  // of 16 bytes; at a time
  const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces * kVec;
#pragma unroll
  for (int i = first; i < first + 2 * D; i += kRows) copy_16(to + i * ChunkTokens::kPitch + c, from + i * kChunk + c, true);
}

/// A warp's share of dA (pairs [0, kTilePairs)) and dP (those behind them), a tile of 16 by 16 at a time.
struct TilePair {
  int t_tile, s_tile;
  bool is_key;
  __device__ __forceinline__ explicit TilePair(int i) : is_key(i < kTilePairs) {
    const int at = is_key ? i : i - kTilePairs;
    t_tile = at >= 6 ? 3 : at >= 3 ? 2 : at >= 1 ? 1 : 0;
    s_tile = at - t_tile * (t_tile + 1) / 2;
  }
};

/// dA or dP of a tile to `sum`.
__device__ __forceinline__ void add_pair_products(float (&sum)[2][4], MatrixShared& shared, const TilePair& pair) {
  const ValueCols dout{shared.dout};
  const ChunkTokens y_hi{shared.y[0]}, y_lo{shared.y[1]}, u_hi{shared.u[0]}, u_lo{shared.u[1]};
  const int t = pair.t_tile * kSubChunk, s = pair.s_tile * kSubChunk;
#pragma unroll 2
  for (int c = 0; c < D; c += 16) {
    std::uint32_t hi[4], lo[4];
    u_hi.right_columns(hi, c, s);
    u_lo.right_columns(lo, c, s);
    if (pair.is_key) {
      SplitLeft left;
      left_transposed(left.hi, y_hi, c, t);
      left_transposed(left.lo, y_lo, c, t);
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
  const int first_t = pair.t_tile * kSubChunk + tile_row(lane, 0);
  const float sign = pair.is_key ? -1.0f : 1.0f;
  const float scale_of[2] = {__fmul_rn(sign, scale_t[first_t]), __fmul_rn(sign, scale_t[first_t + 8])};
  const float cum_of[2] = {gates.cum[first_t], gates.cum[first_t + 8]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int s = pair.s_tile * kSubChunk + half * 8 + tile_col(lane, 0);
    const float2 scale_s = *reinterpret_cast<const float2*>(gates.k_scale + s), cum_s = *reinterpret_cast<const float2*>(gates.cum + s);
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int t = first_t + e / 2 * 8;
      const float first = coefficient(sum[half][e], scale_of[e / 2], scale_s.x, cum_of[e / 2], cum_s.x);
      const float second = coefficient(sum[half][e + 1], scale_of[e / 2], scale_s.y, cum_of[e / 2], cum_s.y);
      const bool has_self = !pair.is_key;
      const SplitPair both = split(s < t || (has_self && s == t) ? first : 0.0f, s + 1 < t || (has_self && s + 1 == t) ? second : 0.0f);
      *reinterpret_cast<std::uint32_t*>(to_hi.at(t, s)) = both.hi;
      *reinterpret_cast<std::uint32_t*>(to_lo.at(t, s)) = both.lo;
      passing[half][e] = s < t ? __fmul_rn(first, product[half][e]) : 0.0f;
      passing[half][e + 1] = s + 1 < t ? __fmul_rn(second, product[half][e + 1]) : 0.0f;
      if (pair.is_key && (s == t || s + 1 == t)) shared.dbeta[t] = s == t ? sum[half][e] : sum[half][e + 1];
    }
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

/// Tiles of 16 tokens by 8 elements of keys, a warp's.
using KeyTiles = float[kTilesOfWarp][2][4];

/// Products with S and dS'.
struct StateProducts {
  KeyTiles dout, y, u;  ///< S dO_t, S Y_t, dS' U_t
  float dot;            ///< of S and dS', a lane's part
};
/// A right operand's part of S or dS' in fp32: rows j * 8 + lane / 4 of a warp's 16, columns c + i * 8 + lane % 4 * 2 and the next.
struct StatePart {
  float2 v[2][2];
  __device__ __forceinline__ void read(const float* at, int c) {
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

/// The same as an operand.
struct SplitRight {
  std::uint32_t hi[2][2], lo[2][2];
  __device__ __forceinline__ explicit SplitRight(const StatePart& part) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const SplitPair pair = split(part.v[j][i].x, part.v[j][i].y);
        hi[j][i] = pair.hi, lo[j][i] = pair.lo;
      }
  }
};

/// Has the second-level cache fetch a state that the block reads later, a few numbers at a time.
__device__ __forceinline__ void fetch_state(const float* state) {
  constexpr int kLine = 128 / sizeof(float);
  for (int i = static_cast<int>(threadIdx.x) * kLine; i < kStateSize; i += kMatrixThreads * kLine)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(state + i));
}

/// With a lane's first elements of S and dS' at `state` and `dstate`; `s` and `d` are their first parts.
__device__ __forceinline__ void add_state_products(StateProducts& sums, MatrixShared& shared, const ChunkPlace& place, const MatrixWarp& me,
                                                   StatePart& s, StatePart& d, const float* state, const float* dstate) {
  const ValueCols dout{shared.dout};
  const ChunkTokens y_hi{shared.y[0]}, y_lo{shared.y[1]}, u_hi{shared.u[0]}, u_lo{shared.u[1]};
#pragma unroll 1
  for (int c = 0; c < D; c += 16) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) sums.dot = fmaf(s.v[j][i].y, d.v[j][i].y, fmaf(s.v[j][i].x, d.v[j][i].x, sums.dot));
    if (place.has_state) {
      const SplitRight right(s);
      if (c + 16 < D) s.read(state, c + 16);
#pragma unroll
      for (int tile = 0; tile < kTilesOfWarp; ++tile) {
        const int t = (me.first_tile + tile) * kSubChunk;
        std::uint32_t left[4];
        SplitLeft of_y;
        dout.left(left, t, c);
        left_transposed(of_y.hi, y_hi, c, t);
        left_transposed(of_y.lo, y_lo, c, t);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          multiply_add(sums.dout[tile][j], left, right.hi[j][0], right.hi[j][1]);
          multiply_add(sums.dout[tile][j], left, right.lo[j][0], right.lo[j][1]);
          multiply_add(sums.y[tile][j], of_y, right.hi[j], right.lo[j]);
        }
      }
    }
    if (place.has_later) {
      const SplitRight right(d);
      if (c + 16 < D) d.read(dstate, c + 16);
#pragma unroll
      for (int tile = 0; tile < kTilesOfWarp; ++tile) {
        const int t = (me.first_tile + tile) * kSubChunk;
        SplitLeft of_u;
        left_transposed(of_u.hi, u_hi, c, t);
        left_transposed(of_u.lo, u_lo, c, t);
#pragma unroll
        for (int j = 0; j < 2; ++j) multiply_add(sums.u[tile][j], of_u, right.hi[j], right.lo[j]);
      }
    }
  }
}

/// Two neighbouring elements of a row of bfloat16.
__device__ __forceinline__ float2 pair_at(ChunkKeys matrix, int row, int column) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(matrix.at(row, column)));
}

/// Adds products with S and dS' to the gradients of a warp's elements; the sums for decays.
__device__ __forceinline__ void add_states(KeyTiles& dq, KeyTiles& dk, const StateProducts& sums, MatrixShared& shared,
                                           const MatrixWarp& me) {
  const ChunkKeys keys{shared.keys}, queries{shared.queries};
  const ChunkGates& gates = shared.gates;
#pragma unroll
  for (int tile = 0; tile < kTilesOfWarp; ++tile)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int t = me.token(tile, e);
      const float of_q = __fmul_rn(gates.q_scale[t], gates.decay[t]), of_k = -__fmul_rn(gates.k_scale[t], gates.decay[t]);
      const float of_w = gates.weight[t];
      float read = 0.0f, written = 0.0f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int c = me.first_key + j * 8 + tile_col(me.lane, e);
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
      if (me.lane % 4 == 0) shared.read[me.slice][t] = read, shared.written[me.slice][t] = written;
    }
  const float dot = warp_sum(sums.dot);
  if (me.lane == 0 && me.first_tile == 0) shared.state_dot[me.slice] = dot;
}

/// Adds products of tokens with one another.
__device__ __forceinline__ void add_pairs(KeyTiles& dq, KeyTiles& dk, MatrixShared& shared, const MatrixWarp& me) {
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
    keys.right_columns(of_keys, from * kSubChunk, me.first_key);
    queries.right_columns(of_queries, from * kSubChunk, me.first_key);
#pragma unroll
    for (int tile = 0; tile < kTilesOfWarp; ++tile) {
      const int to = me.first_tile + tile;
      std::uint32_t hi[4], lo[4];
      if (from <= to) {
        ChunkPairs{shared.of_queries[0]}.left(hi, to * kSubChunk, from * kSubChunk);
        ChunkPairs{shared.of_queries[1]}.left(lo, to * kSubChunk, from * kSubChunk);
        add(dq[tile], hi, lo, of_keys);
        ChunkPairs{shared.of_keys[0]}.left(hi, to * kSubChunk, from * kSubChunk);
        ChunkPairs{shared.of_keys[1]}.left(lo, to * kSubChunk, from * kSubChunk);
        add(dk[tile], hi, lo, of_keys);
      }
      if (from >= to) {
        left_transposed(hi, ChunkPairs{shared.of_queries[0]}, from * kSubChunk, to * kSubChunk);
        left_transposed(lo, ChunkPairs{shared.of_queries[1]}, from * kSubChunk, to * kSubChunk);
        add(dk[tile], hi, lo, of_queries);
        left_transposed(hi, ChunkPairs{shared.of_keys[0]}, from * kSubChunk, to * kSubChunk);
        left_transposed(lo, ChunkPairs{shared.of_keys[1]}, from * kSubChunk, to * kSubChunk);
        add(dk[tile], hi, lo, of_keys);
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
    for (int w = 0; w < kKeySlices; ++w) {
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
    for (int w = 0; w < kKeySlices; ++w) passed = __fadd_rn(passed, shared.state_dot[w]);
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
    // Y_t . R_t from Y_t . U_t; where beta is 0, so is Y.
    const float beta = shared.gates.beta[t], of_beta = beta > 0.0f ? shared.dbeta[t] / beta : 0.0f;
    if (t < place.size) a.gates.write(place.row + t, n, __fmul_rn(__fsub_rn(1.0f, beta), of_beta), dlog[i], shared.decays[t]);
  }
}

/// The chain rule of lengths; gradients of queries and keys take the place of these and are copied from there.
__device__ __forceinline__ void write_vectors(const MatrixArgs& a, MatrixShared& shared, const KeyTiles& dq, const KeyTiles& dk,
                                              const ChunkPlace& place, const MatrixWarp& me, int m) {
  const ChunkKeys keys{shared.keys}, queries{shared.queries};
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int tile = 0; tile < kTilesOfWarp; ++tile)
#pragma unroll
        for (int e = 0; e < 4; e += 2) body(side, tile, e, me.token(tile, e));
  };
  const auto value = [&](int side, int tile, int j, int e) { return side == 0 ? dq[tile][j][e] : dk[tile][j][e]; };
  each([&](int side, int tile, int e, int t) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 x = pair_at(side == 0 ? queries : keys, t, me.first_key + j * 8 + tile_col(me.lane, e));
      sum = fmaf(value(side, tile, j, e + 1), x.y, fmaf(value(side, tile, j, e), x.x, sum));
    }
    sum = warp_sum<4>(sum);
    if (me.lane % 4 == 0) shared.lengths[side][me.slice][t] = sum;
  });
  __syncthreads();
  each([&](int side, int tile, int e, int t) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kKeySlices; ++w) sum = __fadd_rn(sum, shared.lengths[side][w][t]);
    // Of queries, whose scale has 1 / sqrt(K) in it, the length's inverse is what is left without it.
    const float inverse_length = side == 0 ? shared.gates.q_scale[t] / a.query_scale : shared.gates.k_scale[t];
    const float back = -__fmul_rn(__fmul_rn(sum, inverse_length), inverse_length);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const ChunkKeys vectors = side == 0 ? queries : keys;
      const int c = me.first_key + j * 8 + tile_col(me.lane, e);
      const float2 x = pair_at(vectors, t, c);
      *reinterpret_cast<__nv_bfloat162*>(vectors.at(t, c)) =
          __floats2bfloat162_rn(fmaf(back, x.x, value(side, tile, j, e)), fmaf(back, x.y, value(side, tile, j, e + 1)));
    }
  });
  __syncthreads();
  // A piece of 16 bytes of every kRows-th row.
  constexpr int kPieces = 2 * kChunkKeys / kVec, kRows = kMatrixThreads / kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces, side = static_cast<int>(threadIdx.x) / (kPieces / 2) % 2,
            c = static_cast<int>(threadIdx.x) % (kPieces / 2) * kVec;
  const ChunkKeys from = side == 0 ? queries : keys;
  Half* to = a.dqkv + (place.row + first) * a.dqkv_stride + (side * a.in.num_key_heads + m) * kChunkKeys + c;
#pragma unroll
  for (int t = first; t < first + kChunk; t += kRows, to += kRows * a.dqkv_stride)
    if (t < place.size) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from.at(t, c));
}

__global__ void __launch_bounds__(kMatrixThreads, 1) rule_matrix_kernel(const MatrixArgs a) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<MatrixShared*>(memory);
  const MatrixWarp me;
  const int chunk = static_cast<int>(blockIdx.x), m = static_cast<int>(blockIdx.y), N = a.in.num_value_heads,
            group = N / a.in.num_key_heads;
  const ChunkPlace place(a, chunk);
  ask_for_keys<kMatrixThreads>(ChunkKeys{shared.keys}, a.in, 1, m, place.row, 0, place.size);
  ask_for_keys<kMatrixThreads>(ChunkKeys{shared.queries}, a.in, 0, m, place.row, 0, place.size);
  KeyTiles dq = {}, dk = {};
#pragma unroll 1
  for (int n = m * group; n < (m + 1) * group; ++n) {
    const std::int64_t at = static_cast<std::int64_t>(chunk) * N + n;
    ask_for_columns<kMatrixThreads>(ValueCols{shared.dout}, a.dout + place.row * a.dout_stride + n * D, a.dout_stride, place.size);
    ask_for_delta(shared.y[0], a.y_CNPDT + at * 2 * kChunkDelta);
    ask_for_delta(shared.u[0], a.u_CNPDT + at * 2 * kChunkDelta);
    copies_commit();
    const float *const state = a.states_CNKD + at * kStateSize, *const dstate = a.dstates_CNKD + at * kStateSize;
    if (place.has_state) fetch_state(state);
    if (place.has_later) fetch_state(dstate);
    if (me.warp == 0) {
      GatesOfLane gates;
      gates.read(a.in, n, place.row, 0, place.size);
#pragma unroll
      for (int i = 0; i < 2; ++i) shared.decays[2 * me.lane + i] = a.gates.decay(place.row + min(2 * me.lane + i, place.size - 1), n);
      gates.write(shared.gates);
    }
    copies_wait<0>();
    __syncthreads();
    const int lane_at = (me.first_key + me.lane / 4) * D + me.lane % 4 * 2;
#pragma unroll 1
    for (int i = me.warp; i < 2 * kTilePairs; i += kMatrixWarps) {
      const TilePair pair(i);
      float sum[2][4] = {};
      add_pair_products(sum, shared, pair);
      finish_pair(shared, sum, pair);
    }
    StatePart s, d;
    s.clear(), d.clear();
    if (place.has_state) s.read(state + lane_at, 0);
    if (place.has_later) d.read(dstate + lane_at, 0);
    StateProducts sums = {};
    add_state_products(sums, shared, place, me, s, d, state + lane_at, dstate + lane_at);
    add_states(dq, dk, sums, shared, me);
    __syncthreads();
    add_pairs(dq, dk, shared, me);
    if (me.warp == 0) write_gates(a, shared, place, n);
    __syncthreads();
  }
  write_vectors(a, shared, dq, dk, place, me, m);
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
  float *states_CNKD, *dstates_CNKD, *parameter_parts;
  Half *u_CNPDT, *y_CNPDT;
  ChunkMemory(Carver& c, const DeltaRule& in, std::int64_t num_chunks) {
    const std::int64_t T = in.qkv_TC.shape[0], N = in.num_value_heads;
    scales = take_rule_scales(c, in);
    states_CNKD = c.take<float>(num_chunks * N * kStateSize);
    dstates_CNKD = c.take<float>(num_chunks * N * kStateSize);
    u_CNPDT = c.take<Half>(num_chunks * N * 2 * kChunkDelta);
    y_CNPDT = c.take<Half>(num_chunks * N * 2 * kChunkDelta);
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
  write_chunk_states(ctx, {memory.states_CNKD, memory.u_CNPDT, chunk_start_S}, memory.scales, in, rows);

  const ChunkGradients gradients{memory.dstates_CNKD, memory.y_CNPDT, chunk_start_S};
  write_chunk_gradients(ctx, gradients, grads.dqkv_TC, dout_TV, memory.scales, in, rows);
  const MatrixArgs matrix{.in = rule_inputs<Half>(ctx, memory.scales, in, rows),
                          .gates = rule_gate_grads<Half>(grads, in, memory.parameter_parts),
                          .dout = dout_TV.as<Half>(),
                          .dqkv = grads.dqkv_TC.as<Half>(),
                          .dout_stride = dout_TV.row_stride,
                          .dqkv_stride = grads.dqkv_TC.row_stride,
                          .chunk_start_S = chunk_start_S,
                          .sequence_C = staged(ctx, std::span<const std::int32_t>(chunks.sequence_C)),
                          .states_CNKD = memory.states_CNKD,
                          .dstates_CNKD = memory.dstates_CNKD,
                          .u_CNPDT = memory.u_CNPDT,
                          .y_CNPDT = memory.y_CNPDT,
                          .query_scale = 1.0f / std::sqrt(static_cast<float>(in.key_dim))};
  const dim3 grid(static_cast<unsigned>(chunks.count()), static_cast<unsigned>(in.num_key_heads));
  launch_with<MatrixShared>(ctx, rule_matrix_kernel, matrix, grid, kMatrixThreads);
  add_rule_parameters(ctx, grads, memory.parameter_parts, rows);
}

}  // namespace prl::ops::cuda
