#include "ops/cuda/delta_rule_chunk.cuh"

// Gradients of states, from the last chunk of a sequence to its first; delta_rule_chunk_backward.cu says what is computed.

namespace prl::ops::cuda {
namespace {

struct ReverseArgs {
  RuleInputs<__nv_bfloat16> in;
  const __nv_bfloat16* dout;
  __nv_bfloat16* dqkv;
  std::int64_t dout_stride, dqkv_stride;
  ChunkGradients to;
};

struct ReverseShared {
  __nv_bfloat16 keys[2][kChunk * ChunkKeys::kPitch], queries[2][kChunk * ChunkKeys::kPitch];
  __nv_bfloat16 dout[kChunk * ChunkCols::kPitch];
  union {
    __nv_bfloat16 dstate[2][kChunkKeys * ChunkCols::kPitch];   ///< dS', high and low parts, until all products with it are done
    __nv_bfloat16 weighted[2][2][kChunk * ChunkCols::kPitch];  ///< what queries and keys are multiplied with for dS, likewise
  };
  __nv_bfloat16 y[2][kChunk * ChunkCols::kPitch];
  float diagonal[kSubChunks][kSubChunk][kSubChunk];  ///< A, [tile][t][s]
  float sums[kSubChunk][kRuleCols + 1];              ///< of the tile whose turn it is
  ChunkGates gates;
};
static_assert(2 * (sizeof(ReverseShared) + 1024) <= 228 * 1024, "two blocks fit a multiprocessor");

/// p(s, t) = P_ts and a(s, t) = A_ts, for a warp's 16 tokens s and the 16 tokens t of a tile that is not earlier. s_keys: theirs.
__device__ __forceinline__ void later_coefficients(float (&p)[2][4], float (&a)[2][4], const std::uint32_t (&s_keys)[kChunkKeys / 16][4],
                                                   ChunkKeys queries, ChunkKeys keys, const ChunkGates& gates, int s_tile, int t_tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int e = 0; e < 4; ++e) p[half][e] = a[half][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunkKeys / 16; ++k) {
    std::uint32_t of_queries[4], of_keys[4];
    queries.right_rows(of_queries, t_tile * kSubChunk, k * 16);
    keys.right_rows(of_keys, t_tile * kSubChunk, k * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply_add(p[half], s_keys[k], of_queries[2 * half], of_queries[2 * half + 1]);
      multiply_add(a[half], s_keys[k], of_keys[2 * half], of_keys[2 * half + 1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int s = s_tile * kSubChunk + tile_row(lane, e), t = t_tile * kSubChunk + half * 8 + tile_col(lane, e);
      p[half][e] = s <= t ? coefficient(p[half][e], gates.q_scale[t], gates.k_scale[s], gates.cum[t], gates.cum[s]) : 0.0f;
      a[half][e] = s < t ? coefficient(a[half][e], gates.k_scale[t], gates.k_scale[s], gates.cum[t], gates.cum[s]) : 0.0f;
    }
}

/// sum[16 x 32] += left times rows [row, row + 16) of two matrices that are one, high and low parts.
__device__ __forceinline__ void add_product(float (&sum)[4][4], const SplitLeft& left, ChunkCols hi, ChunkCols lo, int row) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    std::uint32_t b_hi[4], b_lo[4];
    hi.right_columns(b_hi, row, j * 8);
    lo.right_columns(b_lo, row, j * 8);
    multiply_add(sum[j], left, b_hi, b_lo);
    multiply_add(sum[j + 1], left, b_hi + 2, b_lo + 2);
  }
}

__global__ void __launch_bounds__(kRuleThreads, 2) rule_reverse_kernel(const ReverseArgs a) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<ReverseShared*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int sequence = static_cast<int>(blockIdx.z), n = static_cast<int>(blockIdx.y), first_col = static_cast<int>(blockIdx.x) * kRuleCols;
  const int N = a.in.num_value_heads, D = a.in.value_dim, m = n / (N / a.in.num_key_heads), col = first_col + lane;
  const std::int64_t begin = a.in.first_row(sequence), count = a.in.end_row(sequence) - begin;
  if (count == 0) return;
  const int num_chunks = static_cast<int>((count + kChunk - 1) / kChunk), own = warp * kSubChunk;
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
    const __nv_bfloat16* from = a.dout + row_of_chunk(chunk) * a.dout_stride + n * D + first_col;
    ask_for_columns(ChunkCols{shared.dout}, from, a.dout_stride, size_of_chunk(chunk), kRuleCols);
    copies_commit();
  };
  const ChunkCols dout{shared.dout}, y_hi{shared.y[0]}, y_lo{shared.y[1]}, dstate_hi{shared.dstate[0]}, dstate_lo{shared.dstate[1]};
  const ChunkCols for_queries_hi{shared.weighted[0][0]}, for_queries_lo{shared.weighted[0][1]};
  const ChunkCols for_keys_hi{shared.weighted[1][0]}, for_keys_lo{shared.weighted[1][1]};
  const ChunkGates& gates = shared.gates;

  float dstate[2][4][4] = {};  // rows [32 warp, 32 warp + 32), in tiles of 16 by 8
  ask_for_vectors(num_chunks - 1, 0);
  ask_for_dout(num_chunks - 1);
  for (int chunk = num_chunks - 1, buffer = 0; chunk >= 0; --chunk, buffer = 1 - buffer) {
    const ChunkKeys keys{shared.keys[buffer]}, queries{shared.queries[buffer]};
    const std::int64_t row = row_of_chunk(chunk);
    const int size = size_of_chunk(chunk);
    const bool has_later = chunk + 1 < num_chunks;
    if (warp == 0) gates_ahead.write(shared.gates);
    if (has_later) {
      float* const to =
          a.to.dstates_CNKD + ((static_cast<std::int64_t>(a.to.chunk_start_S[sequence]) + chunk) * N + n) * kChunkKeys * D + first_col;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 4; e += 2) {
            const int k = warp * 32 + i * 16 + tile_row(lane, e), c = j * 8 + tile_col(lane, e);
            const SplitPair pair = split(dstate[i][j][e], dstate[i][j][e + 1]);
            *reinterpret_cast<std::uint32_t*>(dstate_hi.at(k, c)) = pair.hi;
            *reinterpret_cast<std::uint32_t*>(dstate_lo.at(k, c)) = pair.lo;
            *reinterpret_cast<float2*>(to + static_cast<std::int64_t>(k) * D + c) = make_float2(dstate[i][j][e], dstate[i][j][e + 1]);
          }
    }
    copies_wait<0>();
    __syncthreads();
    if (chunk > 0) ask_for_vectors(chunk - 1, 1 - buffer);

    // Of a warp's 16 tokens: what reaches U from outputs and from the state behind the chunk, and A of later tokens.
    float sum[4][4] = {};
    SplitLeft later[kSubChunks - 1];  // -A of tile i + 1
    {
      std::uint32_t left[kChunkKeys / 16][4];
#pragma unroll
      for (int k = 0; k < kChunkKeys / 16; ++k) keys.left(left[k], own, k * 16);
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
              multiply_add(sum[j], left[k], b[part][0], b[part][1]);
              multiply_add(sum[j + 1], left[k], b[part][2], b[part][3]);
            }
          }
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const int s = own + tile_row(lane, e);
          const float weight = __fmul_rn(gates.k_scale[s], decay_between(gates.cum[s], gates.cum[kChunk - 1]));
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[j][e] = __fmul_rn(sum[j][e], weight), sum[j][e + 1] = __fmul_rn(sum[j][e + 1], weight);
        }
      }
#pragma unroll
      for (int i = 0; i < kSubChunks; ++i) {
        if (i < warp) continue;
        float of_queries[2][4], of_keys[2][4];
        later_coefficients(of_queries, of_keys, left, queries, keys, gates, warp, i);
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
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (i == warp) shared.diagonal[warp][half * 8 + tile_col(lane, e)][tile_row(lane, e)] = of_keys[half][e];
            of_keys[half][e] = -of_keys[half][e];
          }
        if (i > 0 && i > warp) later[i > 0 ? i - 1 : 0].pack(of_keys[0], of_keys[1]);
      }
    }

    float y[kSubChunk];  // of a warp's tokens in column `col`
    // From the last token to the first, a lane for each column.
    const auto solve = [&] {
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) shared.sums[tile_row(lane, e)][j * 8 + tile_col(lane, e)] = sum[j][e];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kSubChunk; ++i) y[i] = shared.sums[i][lane];
#pragma unroll
      for (int i = kSubChunk - 1; i >= 0; --i) {
        const int t = own + i;
        y[i] = __fmul_rn(gates.beta[t], y[i]);
#pragma unroll
        for (int s = 0; s < i; ++s) y[s] = fmaf(-shared.diagonal[warp][i][s], y[i], y[s]);
        split_into(y_hi.at(t, lane), y_lo.at(t, lane), y[i]);
        if (t < size) {
          a.to.y_TV[(row + t) * N * D + n * D + col] = y[i];
          a.dqkv[(row + t) * a.dqkv_stride + a.in.v_column(n) + col] = __float2bfloat16_rn(y[i]);
        }
      }
    };
    const auto weigh_y = [&] {
#pragma unroll
      for (int i = 0; i < kSubChunk; ++i) {
        const int t = own + i;
        const float weighted = -__fmul_rn(y[i], __fmul_rn(gates.k_scale[t], gates.decay[t]));
        split_into(for_keys_hi.at(t, lane), for_keys_lo.at(t, lane), weighted);
      }
    };
    const auto weigh_dout = [&] {
#pragma unroll
      for (int i = 0; i < kSubChunk; ++i) {
        const int t = own + i;
        const float weighted = __fmul_rn(__bfloat162float(*dout.at(t, lane)), __fmul_rn(gates.q_scale[t], gates.decay[t]));
        split_into(for_queries_hi.at(t, lane), for_queries_lo.at(t, lane), weighted);
      }
    };
    // Tiles take turns. In the first, others may still read dS' in shared memory, so what takes its place comes later, and while it is
    // another warp's turn.
    constexpr int kLast = kSubChunks - 1;
#pragma unroll 1
    for (int tile = kLast; tile >= 0; --tile) {
      if (warp == tile) solve();
      if (tile == (warp == kLast ? kLast - 1 : warp)) weigh_y();
      if (tile == (warp == kLast - 1 ? kLast - 2 : kLast - 1)) weigh_dout();
      __syncthreads();
      if (warp >= tile) continue;
      if (tile == 3)
        add_product(sum, later[2], y_hi, y_lo, 3 * kSubChunk);
      else if (tile == 2)
        add_product(sum, later[1], y_hi, y_lo, 2 * kSubChunk);
      else
        add_product(sum, later[0], y_hi, y_lo, kSubChunk);
    }

    if (chunk == 0) break;
    ask_for_dout(chunk - 1);
    const float decay = gates.decay[kChunk - 1];
#pragma unroll
    for (auto& rows : dstate)
#pragma unroll
      for (auto& tile : rows)
#pragma unroll
        for (float& v : tile) v = __fmul_rn(decay, v);
#pragma unroll 1
    for (int t = 0; t < kChunk; t += 16) {
      std::uint32_t left[2][2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        left_transposed(left[0][i], queries, t, warp * 32 + i * 16);
        left_transposed(left[1][i], keys, t, warp * 32 + i * 16);
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        std::uint32_t b[2][2][4];
        for_queries_hi.right_columns(b[0][0], t, j * 8);
        for_queries_lo.right_columns(b[0][1], t, j * 8);
        for_keys_hi.right_columns(b[1][0], t, j * 8);
        for_keys_lo.right_columns(b[1][1], t, j * 8);
#pragma unroll
        for (int side = 0; side < 2; ++side)
#pragma unroll
          for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              multiply_add(dstate[i][j], left[side][i], b[side][part][0], b[side][part][1]);
              multiply_add(dstate[i][j + 1], left[side][i], b[side][part][2], b[side][part][3]);
            }
      }
    }
    __syncthreads();  // what was weighted gives place to dS'
  }
}

}  // namespace

void write_chunk_gradients(OpContext& ctx, const ChunkGradients& to, TensorView dqkv_TC, ConstTensorView dout_TV, const RuleScales& scales,
                           const DeltaRule& in, const StateRows& rows) {
  const ReverseArgs a{.in = rule_inputs<__nv_bfloat16>(ctx, scales, in, rows),
                      .dout = dout_TV.as<__nv_bfloat16>(),
                      .dqkv = dqkv_TC.as<__nv_bfloat16>(),
                      .dout_stride = dout_TV.row_stride,
                      .dqkv_stride = dqkv_TC.row_stride,
                      .to = to};
  const dim3 grid(static_cast<unsigned>(in.value_dim / kRuleCols), static_cast<unsigned>(in.num_value_heads),
                  static_cast<unsigned>(rows.start_S.size() - 1));
  launch_with<ReverseShared>(ctx, rule_reverse_kernel, a, grid, kRuleThreads);
}

}  // namespace prl::ops::cuda
