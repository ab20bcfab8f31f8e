#pragma once

#include "ops/cuda/delta_rule.cuh"
#include "ops/cuda/mma.cuh"

// The gated delta rule in chunks of kRuleChunk tokens, for bfloat16 and keys of kChunkKeys. Chunks begin at fixed positions of a sequence,
// so the sums of a token are the same ones in the same order whether its chunk is computed at once, in parts, or one token at a time: a
// call that ends within a chunk leaves the state before the chunk and, beside it, what its tokens add (struct OpenChunk).
//
// With tokens t of a chunk, cum_t the sum of the logarithms of their decays up to and with t, S the state before the chunk, k' and q' keys
// and queries of length 1 and 1 / sqrt(K), and ratio(t, s) = exp(cum_t - cum_s):
//   A_ts = ratio(t, s) k'_t . k'_s for s < t,  P_ts = ratio(t, s) q'_t . k'_s for s <= t
//   R_t = v_t - exp(cum_t) S^T k'_t - sum over s < t of A_ts U_s,  U_t = beta_t R_t
//   out_t = exp(cum_t) S^T q'_t + sum over s <= t of P_ts U_s
//   S behind the chunk = exp(cum_last) S + sum over s of exp(cum_last - cum_s) k'_s U_s^T
// (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"). All sums are products of 16-bit
// matrices added up in fp32: keys and queries are bfloat16 to begin with and multiplied unscaled, and what is fp32 is two bfloat16 numbers,
// whose sum has 16 bits. Within 16 tokens U is found by substitution in fp32, before them by products.

namespace prl::ops::cuda {

constexpr int kChunkKeys = 128, kChunkValues = 128;  ///< K, D
constexpr int kSubChunk = 16;                        ///< tokens of a tile of the matrix instructions
constexpr int kChunk = static_cast<int>(kRuleChunk);
constexpr int kChunkDelta = kChunkValues * kChunk;  ///< numbers of a head's U or Y of a chunk
constexpr int kSubChunks = kChunk / kSubChunk;      ///< as many as a block has warps
static_assert(kSubChunks == kRuleWarps && kRuleCols == kWarp);

using ChunkKeys = PaddedMatrix<kChunkKeys>;  ///< of tokens
using ChunkCols = PaddedMatrix<kRuleCols>;   ///< rows of something in a block's columns
using ChunkTokens = PaddedMatrix<kChunk>;    ///< columns of a block, of each all tokens' something: rows are columns

/// Left operand: a(m, k) = matrix(row + k, column + m).
template <int kColumns>
__device__ __forceinline__ void left_transposed(std::uint32_t (&a)[4], PaddedMatrix<kColumns> matrix, int row, int column) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  load_matrices_transposed(a, matrix.at(row + lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8));
}

/// Two fp32 numbers as two pairs of bfloat16 with v = hi + lo.
struct SplitPair {
  std::uint32_t hi, lo;
};
__device__ __forceinline__ SplitPair split(float first, float second) {
  const __nv_bfloat162 hi = __floats2bfloat162_rn(first, second);
  const __nv_bfloat162 lo = __floats2bfloat162_rn(__fsub_rn(first, __low2float(hi)), __fsub_rn(second, __high2float(hi)));
  return {*reinterpret_cast<const std::uint32_t*>(&hi), *reinterpret_cast<const std::uint32_t*>(&lo)};
}
/// 16 numbers of a thread, high and low parts.
struct SplitColumn {
  uint4 hi[2], lo[2];
  __device__ __forceinline__ explicit SplitColumn(const float (&v)[16]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t *h = &hi[half].x, *l = &lo[half].x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SplitPair pair = split(v[half * 8 + i * 2], v[half * 8 + i * 2 + 1]);
        h[i] = pair.hi, l[i] = pair.lo;
      }
    }
  }
  /// Side by side, to multiples of 16 bytes.
  __device__ __forceinline__ void write(__nv_bfloat16* to_hi, __nv_bfloat16* to_lo) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<uint4*>(to_hi + half * 8) = hi[half];
      *reinterpret_cast<uint4*>(to_lo + half * 8) = lo[half];
    }
  }
};
__device__ __forceinline__ void split_into(__nv_bfloat16* hi, __nv_bfloat16* lo, const float (&v)[16]) { SplitColumn(v).write(hi, lo); }
__device__ __forceinline__ void split_into(__nv_bfloat16* hi, __nv_bfloat16* lo, float v) {
  *hi = __float2bfloat16_rn(v);
  *lo = __float2bfloat16_rn(__fsub_rn(v, __bfloat162float(*hi)));
}

/// A left operand of fp32 numbers, as two.
struct SplitLeft {
  std::uint32_t hi[4], lo[4];
  /// From the results of two neighbouring products.
  __device__ __forceinline__ void pack(const float (&first)[4], const float (&second)[4]) {
    const SplitPair p[4] = {split(first[0], first[1]), split(first[2], first[3]), split(second[0], second[1]), split(second[2], second[3])};
#pragma unroll
    for (int i = 0; i < 4; ++i) hi[i] = p[i].hi, lo[i] = p[i].lo;
  }
};
/// d += a b in the order in which every product of two fp32 numbers is taken.
__device__ __forceinline__ void multiply_add(float* d, const SplitLeft& a, const std::uint32_t* b_hi, const std::uint32_t* b_lo) {
  multiply_add(d, a.hi, b_hi[0], b_hi[1]);
  multiply_add(d, a.hi, b_lo[0], b_lo[1]);
  multiply_add(d, a.lo, b_hi[0], b_hi[1]);
}

/// What is left of token s at token t, from their ChunkGates::cum.
__device__ __forceinline__ float decay_between(float cum_s, float cum_t) { return power_of_two(__fsub_rn(cum_t, cum_s)); }
/// A_ts or P_ts from the product of unscaled vectors.
__device__ __forceinline__ float coefficient(float product, float scale_t, float scale_s, float cum_t, float cum_s) {
  return __fmul_rn(__fmul_rn(product, __fmul_rn(scale_t, scale_s)), decay_between(cum_s, cum_t));
}

/// What a value head has of each token of a chunk, in shared memory. Tokens that are not there have 0 and a decay of 1.
struct ChunkGates {
  float q_scale[kChunk], k_scale[kChunk], beta[kChunk];
  float cum[kChunk];     ///< sums of logarithms of decays, to base 2, up to and with a token
  float decay[kChunk];   ///< 2^cum
  float weight[kChunk];  ///< of a token's U in the state behind the chunk: what is left of it there times the scale of its key
};
/// The gates of two tokens, 2 lane and 2 lane + 1, in the registers of one warp.
struct GatesOfLane {
  float q_scale[2], k_scale[2], beta[2], log_decay[2];
  /// Tokens [lo, hi) of a chunk that lie in rows [row + lo, row + hi); the others are not there.
  template <typename T>
  __device__ __forceinline__ void read(const RuleInputs<T>& in, int n, std::int64_t row, int lo, int hi) {
    const int m = n / (in.num_value_heads / in.num_key_heads), lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * lane + i;
      const bool is_there = t >= lo && t < hi;
      q_scale[i] = is_there ? in.scales.q_TM[(row + t) * in.num_key_heads + m] : 0.0f;
      k_scale[i] = is_there ? in.scales.k_TM[(row + t) * in.num_key_heads + m] : 0.0f;
      beta[i] = is_there ? in.scales.beta_TN[(row + t) * in.num_value_heads + n] : 0.0f;
      log_decay[i] = is_there ? in.scales.gate_TN[(row + t) * in.num_value_heads + n] : 0.0f;
    }
  }
  /// One order of sums, in which later tokens have no part.
  __device__ __forceinline__ void write(ChunkGates& to) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    constexpr float kLog2E = 1.442695041f;
    const float first = __fmul_rn(log_decay[0], kLog2E), both = __fadd_rn(first, __fmul_rn(log_decay[1], kLog2E));
    float sum = both;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const float before = __shfl_up_sync(kFullWarp, sum, static_cast<unsigned>(distance));
      if (lane >= distance) sum = __fadd_rn(before, sum);
    }
    float before = __shfl_up_sync(kFullWarp, sum, 1);
    if (lane == 0) before = 0.0f;
    const float cum[2] = {__fadd_rn(before, first), __fadd_rn(before, both)};
    const float last = __shfl_sync(kFullWarp, cum[1], kWarp - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * lane + i;
      to.q_scale[t] = q_scale[i], to.k_scale[t] = k_scale[i], to.beta[t] = beta[i], to.cum[t] = cum[i], to.decay[t] = power_of_two(cum[i]);
      to.weight[t] = __fmul_rn(k_scale[i], decay_between(cum[i], last));
    }
  }
};

/// A block's threads ask for keys (side 1) or queries (side 0) of tokens [lo, hi) of a chunk, whose rows begin at `row`; tokens from hi on
/// are set to 0, those before lo stay as they are. For copies_commit().
template <int kThreads, typename T>
__device__ __forceinline__ void ask_for_keys(ChunkKeys to, const RuleInputs<T>& in, int side, int m, std::int64_t row, int lo, int hi) {
  constexpr int kPieces = kChunkKeys / kVec, kRows = kThreads / kPieces;  // of 16 bytes; at a time
  const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces * kVec;
  const T* from = in.qkv + (row + first) * in.qkv_stride + (side * in.num_key_heads + m) * kChunkKeys + c;
#pragma unroll
  for (int t = first; t < first + kChunk; t += kRows, from += kRows * in.qkv_stride)
    if (t >= lo) copy_16(to.at(t, c), t < hi ? from : in.qkv, t < hi);
}

/// Of 16 tokens' sums, column by column: eight columns begin in different banks.
constexpr int kSumPitch = kSubChunk + 4;

/// Where element e of a lane's part of a product lies in its tile of 16 by 8.
__device__ __forceinline__ int tile_row(int lane, int e) { return lane / 4 + e / 2 * 8; }
__device__ __forceinline__ int tile_col(int lane, int e) { return lane % 4 * 2 + e % 2; }

/// A block's threads ask for all columns of `size` tokens' rows from `from` on; tokens behind them are set to 0. For copies_commit().
template <int kThreads, int kColumns>
__device__ __forceinline__ void ask_for_columns(PaddedMatrix<kColumns> to, const __nv_bfloat16* from, std::int64_t stride, int size) {
  constexpr int kPieces = kColumns / kVec, kRows = kThreads / kPieces;  // of 16 bytes; at a time
  static_assert(kChunk % kRows == 0);
  const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces * kVec;
  const __nv_bfloat16* row = from + first * stride + c;
#pragma unroll
  for (int i = 0; i < kChunk; i += kRows, row += kRows * stride)
    copy_16(to.at(first + i, c), first + i < size ? row : from, first + i < size);
}

/// A kernel whose shared memory is one Shared.
template <typename Shared, typename Kernel, typename Args>
void launch_with(OpContext& ctx, Kernel kernel, const Args& a, dim3 grid, int threads) {
  constexpr int kBytes = sizeof(Shared);
  PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<grid, threads, kBytes, stream_of(ctx)>>>(a);
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
