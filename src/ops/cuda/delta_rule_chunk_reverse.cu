#include "ops/cuda/delta_rule_chunk.cuh"

// Gradients of states, from the last chunk of a sequence to its first; delta_rule_chunk_backward.cu says what is computed.

namespace prl::ops::cuda {
namespace {

using Half = __nv_bfloat16;
constexpr int D = kChunkValues, kStateSize = kChunkKeys * D;

struct ReverseArgs {
  RuleInputs<Half> in;
  const Half* dout;
  Half* dqkv;
  std::int64_t dout_stride, dqkv_stride;
  ChunkGradients to;
};

using TileTokens = PaddedMatrix<2 * kSubChunk>;  ///< as ChunkTokens, of two tiles

struct ReverseShared {
  Half keys[2][kChunk * ChunkKeys::kPitch], queries[2][kChunk * ChunkKeys::kPitch];
  Half dout[kChunk * ChunkCols::kPitch];
  union {
    Half dstate[2][kChunkKeys * ChunkCols::kPitch];        ///< dS', high and low parts, until all products with it are done
    Half weighted[2][2][kRuleCols * ChunkTokens::kPitch];  ///< what queries and keys are multiplied with for dS, likewise
  };
  Half y[2][kRuleCols * TileTokens::kPitch];                  ///< of the tile whose turn it is, and of the one before
  float sums[kRuleCols][kSumPitch];                           ///< likewise, of one tile
  float diagonal[kSubChunks][kSubChunk][kSubChunk];           ///< A, [tile][t][s]
  SplitLeft later[kSubChunks * (kSubChunks - 1) / 2][kWarp];  ///< -A of a tile s and later ones t, as the warp of s multiplies with it
  ChunkGates gates;
};
static_assert(2 * (sizeof(ReverseShared) + 1024) <= 228 * 1024, "two blocks fit a multiprocessor");

/// Where `later` has tile t and an earlier one s.
__device__ __forceinline__ int later_index(int t_tile, int s_tile) { return t_tile * (t_tile - 1) / 2 + s_tile; }

/// Of a warp's 16 tokens s: their keys, and what coefficients need of a thread's two of them.
struct EarlierTokens {
  std::uint32_t keys[kChunkKeys / 16][4];
  float scale[2], cum[2];
  int first;  ///< its first
  __device__ __forceinline__ EarlierTokens(ChunkKeys all, const ChunkGates& gates, int tile) {
#pragma unroll
    for (int k = 0; k < kChunkKeys / 16; ++k) all.left(keys[k], tile * kSubChunk, k * 16);
    first = tile * kSubChunk + tile_row(static_cast<int>(threadIdx.x) % kWarp, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = gates.k_scale[first + i * 8], cum[i] = gates.cum[first + i * 8];
  }
  /// p(s, t) = P_ts and a(s, t) = A_ts with the 16 tokens t of a tile that is not earlier.
  __device__ __forceinline__ void coefficients(float (&p)[2][4], float (&a)[2][4], ChunkKeys of_queries, ChunkKeys of_keys,
                                               const ChunkGates& gates, int t_tile) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[half][e] = a[half][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunkKeys / 16; ++k) {
      std::uint32_t q[4], b[4];
      of_queries.right_rows(q, t_tile * kSubChunk, k * 16);
      of_keys.right_rows(b, t_tile * kSubChunk, k * 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_add(p[half], keys[k], q[2 * half], q[2 * half + 1]);
        multiply_add(a[half], keys[k], b[2 * half], b[2 * half + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = t_tile * kSubChunk + half * 8 + tile_col(lane, 0);
      const float2 q_scales = *reinterpret_cast<const float2*>(gates.q_scale + t);
      const float2 k_scales = *reinterpret_cast<const float2*>(gates.k_scale + t);
      const float2 cums = *reinterpret_cast<const float2*>(gates.cum + t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float of_q = e % 2 == 0 ? q_scales.x : q_scales.y, of_k = e % 2 == 0 ? k_scales.x : k_scales.y;
        const float ratio = decay_between(cum[e / 2], e % 2 == 0 ? cums.x : cums.y);
        const float p_ts = __fmul_rn(__fmul_rn(p[half][e], __fmul_rn(of_q, scale[e / 2])), ratio);
        const float a_ts = __fmul_rn(__fmul_rn(a[half][e], __fmul_rn(of_k, scale[e / 2])), ratio);
        const int distance = t + e % 2 - first - e / 2 * 8;
        p[half][e] = distance >= 0 ? p_ts : 0.0f;
        a[half][e] = distance > 0 ? a_ts : 0.0f;
      }
    }
  }
};

/// sum[16 x 32] += left times the transpose of columns [first, first + 16) of a matrix of 32 rows, `hi` and `lo`.
template <int kColumns>
__device__ __forceinline__ void add_product(float (&sum)[4][4], const SplitLeft& left, PaddedMatrix<kColumns> hi, PaddedMatrix<kColumns> lo,
                                            int first) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    std::uint32_t b_hi[4], b_lo[4];
    hi.right_rows(b_hi, j * 8, first);
    lo.right_rows(b_lo, j * 8, first);
    multiply_add(sum[j], left, b_hi, b_lo);
    multiply_add(sum[j + 1], left, b_hi + 2, b_lo + 2);
  }
}

/// From the sums of a warp's 16 tokens to Y in column `lane`, from the last token to the first.
__device__ __forceinline__ void solve(float (&y)[kSubChunk], const float (&sum)[4][4], ReverseShared& shared, int tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) shared.sums[j * 8 + tile_col(lane, e)][tile_row(lane, e)] = sum[j][e];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kSubChunk; i += 4) {
    const float4 part = *reinterpret_cast<const float4*>(shared.sums[lane] + i);
    y[i] = part.x, y[i + 1] = part.y, y[i + 2] = part.z, y[i + 3] = part.w;
  }
#pragma unroll
  for (int i = kSubChunk - 1; i >= 0; --i) {
    y[i] = __fmul_rn(shared.gates.beta[tile * kSubChunk + i], y[i]);
#pragma unroll
    for (int s = 0; s < i; ++s) y[s] = fmaf(-shared.diagonal[tile][i][s], y[i], y[s]);
  }
}

/// A block's columns of dS', in registers: those of rows [32 warp, 32 warp + 32) are a warp's, in tiles of 16 by 8.
struct DStateTile {
  float v[2][4][4] = {};
  /// To shared memory as two parts and to memory, where `to` is a thread's first element.
  __device__ __forceinline__ void write(ChunkCols hi, ChunkCols lo, float* to) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const int k = warp * 32 + i * 16 + tile_row(lane, e), c = j * 8 + tile_col(lane, e);
          const SplitPair pair = split(v[i][j][e], v[i][j][e + 1]);
          *reinterpret_cast<std::uint32_t*>(hi.at(k, c)) = pair.hi;
          *reinterpret_cast<std::uint32_t*>(lo.at(k, c)) = pair.lo;
          *reinterpret_cast<float2*>(to + (i * 16 + e / 2 * 8) * D + j * 8) = make_float2(v[i][j][e], v[i][j][e + 1]);
        }
  }
  /// From dS' to dS.
  __device__ __forceinline__ void go_back(ChunkKeys queries, ChunkKeys keys, const ReverseShared& shared) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const float decay = shared.gates.decay[kChunk - 1];
#pragma unroll
    for (auto& rows : v)
#pragma unroll
      for (auto& tile : rows)
#pragma unroll
        for (float& x : tile) x = __fmul_rn(decay, x);
#pragma unroll 1
    for (int t = 0; t < kChunk; t += 16)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const auto& weighted = shared.weighted[side];
        std::uint32_t left[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) left_transposed(left[i], side == 0 ? queries : keys, t, warp * 32 + i * 16);
#pragma unroll
        for (int j = 0; j < 4; j += 2)
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            std::uint32_t b[4];
            ChunkTokens{const_cast<Half*>(weighted[part])}.right_rows(b, j * 8, t);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              multiply_add(v[i][j], left[i], b[0], b[1]);
              multiply_add(v[i][j + 1], left[i], b[2], b[3]);
            }
          }
      }
  }
};

__global__ void __launch_bounds__(kRuleThreads, 2) rule_reverse_kernel(const ReverseArgs a) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<ReverseShared*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int sequence = static_cast<int>(blockIdx.z), n = static_cast<int>(blockIdx.y), first_col = static_cast<int>(blockIdx.x) * kRuleCols;
  const int N = a.in.num_value_heads, m = n / (N / a.in.num_key_heads), col = first_col + lane, own = warp * kSubChunk;
  const std::int64_t begin = a.in.first_row(sequence), count = a.in.end_row(sequence) - begin;
  if (count == 0) return;
  const int num_chunks = static_cast<int>((count + kChunk - 1) / kChunk);
  const auto row_of_chunk = [&](int chunk) { return begin + static_cast<std::int64_t>(chunk) * kChunk; };
  const auto size_of_chunk = [&](int chunk) {
    return static_cast<int>(min(kRuleChunk, count - static_cast<std::int64_t>(chunk) * kChunk));
  };

  GatesOfLane gates_ahead;
  const auto ask_for_vectors = [&](int chunk, int buffer) {
    const std::int64_t row = row_of_chunk(chunk);
    const int size = size_of_chunk(chunk);
    ask_for_keys<kRuleThreads>(ChunkKeys{shared.keys[buffer]}, a.in, 1, m, row, 0, size);
    ask_for_keys<kRuleThreads>(ChunkKeys{shared.queries[buffer]}, a.in, 0, m, row, 0, size);
    copies_commit();
    if (warp == 0) gates_ahead.read(a.in, n, row, 0, size);
  };
  const auto ask_for_dout = [&](int chunk) {
    const Half* from = a.dout + row_of_chunk(chunk) * a.dout_stride + n * D + first_col;
    ask_for_columns<kRuleThreads>(ChunkCols{shared.dout}, from, a.dout_stride, size_of_chunk(chunk));
    copies_commit();
  };
  const ChunkCols dout{shared.dout}, dstate_hi{shared.dstate[0]}, dstate_lo{shared.dstate[1]};
  const TileTokens y_hi{shared.y[0]}, y_lo{shared.y[1]};
  const ChunkGates& gates = shared.gates;
  const auto weigh = [&](int side, const float(&v)[kSubChunk]) {
    split_into(ChunkTokens{shared.weighted[side][0]}.at(lane, own), ChunkTokens{shared.weighted[side][1]}.at(lane, own), v);
  };

  // Of the last chunk, then of those before it.
  std::int64_t chunk_and_head = (static_cast<std::int64_t>(a.to.chunk_start_S[sequence]) + num_chunks - 1) * N + n;
  DStateTile dstate;
  ask_for_vectors(num_chunks - 1, 0);
  ask_for_dout(num_chunks - 1);
  for (int chunk = num_chunks - 1, buffer = 0; chunk >= 0; --chunk, buffer = 1 - buffer, chunk_and_head -= N) {
    const ChunkKeys keys{shared.keys[buffer]}, queries{shared.queries[buffer]};
    const bool has_later = chunk + 1 < num_chunks;
    if (warp == 0) gates_ahead.write(shared.gates);
    if (has_later)
      dstate.write(dstate_hi, dstate_lo,
                   a.to.dstates_CNKD + chunk_and_head * kStateSize + (warp * 32 + tile_row(lane, 0)) * D + first_col + tile_col(lane, 0));
    copies_wait<0>();
    __syncthreads();
    if (chunk > 0) ask_for_vectors(chunk - 1, 1 - buffer);

    // Of a warp's 16 tokens: what reaches U from outputs and from the state behind the chunk, and A of later tokens.
    float sum[4][4] = {};
    {
      const EarlierTokens tokens(keys, gates, warp);
      if (has_later) {
#pragma unroll
        for (int k = 0; k < kChunkKeys / 16; ++k)
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            std::uint32_t b[2][4];
            dstate_hi.right_columns(b[0], k * 16, j * 8);
            dstate_lo.right_columns(b[1], k * 16, j * 8);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
              multiply_add(sum[j], tokens.keys[k], b[part][0], b[part][1]);
              multiply_add(sum[j + 1], tokens.keys[k], b[part][2], b[part][3]);
            }
          }
        const float weight[2] = {gates.weight[tokens.first], gates.weight[tokens.first + 8]};
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[j][e] = __fmul_rn(sum[j][e], weight[e / 2]);
      }
#pragma unroll 1
      for (int i = warp; i < kSubChunks; ++i) {
        float of_queries[2][4], of_keys[2][4];
        tokens.coefficients(of_queries, of_keys, queries, keys, gates, i);
        SplitLeft p;
        p.pack(of_queries[0], of_queries[1]);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          std::uint32_t b[4];
          dout.right_columns(b, i * kSubChunk, j * 8);
          multiply_add(sum[j], p.hi, b[0], b[1]);
          multiply_add(sum[j], p.lo, b[0], b[1]);
          multiply_add(sum[j + 1], p.hi, b[2], b[3]);
          multiply_add(sum[j + 1], p.lo, b[2], b[3]);
        }
        if (i == warp) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 4; ++e) shared.diagonal[warp][half * 8 + tile_col(lane, e)][tile_row(lane, e)] = of_keys[half][e];
        } else {
#pragma unroll
          for (auto& half : of_keys)
#pragma unroll
            for (float& v : half) v = -v;
          SplitLeft left;
          left.pack(of_keys[0], of_keys[1]);
          shared.later[later_index(i, warp)][lane] = left;
        }
      }
    }

    // Tiles take turns. In the first, others may still read dS' in shared memory, so what takes its place is written behind its barrier.
    float y[kSubChunk] = {};  // of a warp's tokens in column `col`
    SplitColumn of_y(y);
    constexpr int kLast = kSubChunks - 1;
#pragma unroll 1
    for (int tile = kLast; tile >= 0; --tile) {
      const int in_pair = tile % 2 * kSubChunk;
      if (warp == tile) {
        solve(y, sum, shared, tile);
        of_y = SplitColumn(y);
        of_y.write(y_hi.at(lane, in_pair), y_lo.at(lane, in_pair));
      }
      if (tile > 0) __syncthreads();
      if (warp == tile) {
        float weighted[kSubChunk];
#pragma unroll
        for (int i = 0; i < kSubChunk; ++i) weighted[i] = -__fmul_rn(y[i], __fmul_rn(gates.k_scale[own + i], gates.decay[own + i]));
        weigh(1, weighted);
      } else if (warp < tile) {
        add_product(sum, shared.later[later_index(tile, warp)][lane], y_hi, y_lo, in_pair);
      }
      // While the warp would wait.
      if (tile == (warp == kLast - 1 ? warp : kLast)) {
        float weighted[kSubChunk];
#pragma unroll
        for (int i = 0; i < kSubChunk; ++i)
          weighted[i] = __fmul_rn(__bfloat162float(*dout.at(own + i, lane)), __fmul_rn(gates.q_scale[own + i], gates.decay[own + i]));
        weigh(0, weighted);
      }
    }
    __syncthreads();
    if (chunk > 0) ask_for_dout(chunk - 1);

    Half* const to_y = a.to.y_CNPDT + chunk_and_head * 2 * kChunkDelta + col * kChunk + own;
    of_y.write(to_y, to_y + kChunkDelta);
    Half* to_value = a.dqkv + (row_of_chunk(chunk) + own) * a.dqkv_stride + a.in.v_column(n) + col;
    const int num_own = size_of_chunk(chunk) - own;
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i, to_value += a.dqkv_stride)
      if (i < num_own) *to_value = reinterpret_cast<const Half*>(of_y.hi)[i];
    if (chunk == 0) break;
    dstate.go_back(queries, keys, shared);
    __syncthreads();  // what was weighted gives place to dS'
  }
}

}  // namespace

void write_chunk_gradients(OpContext& ctx, const ChunkGradients& to, TensorView dqkv_TC, ConstTensorView dout_TV, const RuleScales& scales,
                           const DeltaRule& in, const StateRows& rows) {
  const ReverseArgs a{.in = rule_inputs<Half>(ctx, scales, in, rows),
                      .dout = dout_TV.as<Half>(),
                      .dqkv = dqkv_TC.as<Half>(),
                      .dout_stride = dout_TV.row_stride,
                      .dqkv_stride = dqkv_TC.row_stride,
                      .to = to};
  const dim3 grid(static_cast<unsigned>(D / kRuleCols), static_cast<unsigned>(in.num_value_heads),
                  static_cast<unsigned>(rows.start_S.size() - 1));
  launch_with<ReverseShared>(ctx, rule_reverse_kernel, a, grid, kRuleThreads);
}

}  // namespace prl::ops::cuda
