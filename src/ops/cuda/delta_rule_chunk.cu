#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/delta_rule_chunk.cuh"

// Chunks of the gated delta rule: outputs, and the states that its gradient needs. delta_rule_chunk.cuh says what is computed.

namespace prl::ops::cuda {
namespace {

using Half = __nv_bfloat16;
constexpr int D = kChunkValues, kStateSize = kChunkKeys * D;

/// What a slot holds behind the state [N, K, D]: tokens since the last multiple of kRuleChunk.
struct OpenChunk {
  Half* keys;        ///< [M, kChunk, K]
  float* k_scale;    ///< [M, kChunk]
  float* log_decay;  ///< [N, kChunk]
  float* u;          ///< [N, kChunk, D]
  __device__ OpenChunk(float* slot, int M, int N) {
    float* at = slot + static_cast<std::int64_t>(N) * kStateSize;
    keys = reinterpret_cast<Half*>(at);
    k_scale = at + static_cast<std::int64_t>(M) * kChunk * kChunkKeys / 2;
    log_decay = k_scale + static_cast<std::int64_t>(M) * kChunk;
    u = log_decay + static_cast<std::int64_t>(N) * kChunk;
  }
};

struct ChunkArgs {
  RuleInputs<Half> in;
  Half* out;
  std::int64_t out_stride;
  float* slots;  ///< nullptr: all sequences begin anew and leave nothing
  std::int64_t slot_size;
  const std::int32_t *slot, *begin;
  const std::int32_t* context_len;  ///< in place of `begin`: with the token here
  ChunkStates saved;
  RuleGates<Half> gates;  ///< of a step, which has no RuleScales
};

/// Which tokens of a sequence a call has, and where the sequence's slot is.
struct ChunkSequence {
  std::int64_t first_row, before, end;  ///< before, end: in tokens of the sequence
  float* slot;
  __device__ ChunkSequence(const ChunkArgs& a, int s) {
    first_row = a.in.first_row(s);
    before = 0, slot = nullptr;
    const std::int64_t count = a.in.end_row(s) - first_row;
    if (a.slots != nullptr && a.slot[s] >= 0) {
      slot = a.slots + a.slot[s] * a.slot_size;
      before = a.context_len != nullptr ? a.context_len[s] - 1 : a.begin[s];
    }
    end = before + count;
  }
};

__device__ __forceinline__ float solved(float beta, float v, float sum) { return __fmul_rn(beta, __fsub_rn(v, sum)); }

/// Products of 16 tokens' keys or queries, from row `left_row` of `left` on, with 16 earlier ones' keys, as coefficients.
__device__ __forceinline__ void coefficients(float (&c)[2][4], ChunkKeys left, int left_row, ChunkKeys keys, const ChunkGates& gates,
                                             const float* left_scale, int tile, int other, bool has_diagonal) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (auto& half : c)
#pragma unroll
    for (float& v : half) v = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunkKeys; k += 16) {
    std::uint32_t a[4], b[4];
    left.left(a, left_row, k);
    keys.right_rows(b, other * kSubChunk, k);
    multiply_add(c[0], a, b[0], b[1]);
    multiply_add(c[1], a, b[2], b[3]);
  }
  const int row = tile * kSubChunk + lane / 4;
  const float scale_t[2] = {left_scale[row], left_scale[row + 8]}, cum_t[2] = {gates.cum[row], gates.cum[row + 8]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int s = other * kSubChunk + half * 8 + tile_col(lane, 0);
    const float2 scale_s = *reinterpret_cast<const float2*>(gates.k_scale + s), cum_s = *reinterpret_cast<const float2*>(gates.cum + s);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value = e % 2 == 0 ? coefficient(c[half][e], scale_t[e / 2], scale_s.x, cum_t[e / 2], cum_s.x)
                                     : coefficient(c[half][e], scale_t[e / 2], scale_s.y, cum_t[e / 2], cum_s.y);
      const int distance = row + e / 2 * 8 - s - e % 2;
      c[half][e] = distance > 0 || (has_diagonal && distance == 0) ? value : 0.0f;
    }
  }
}

struct ChunkShared {
  Half keys[2][kChunk * ChunkKeys::kPitch], queries[2][kChunk * ChunkKeys::kPitch];
  union {
    Half state[2][kChunkKeys * ChunkCols::kPitch];  ///< high and low parts, until all products with it are done
    struct {
      Half weighted[2][kRuleCols * ChunkTokens::kPitch];
      float sums[kSubChunks][kRuleCols][kSumPitch];
    } later;
  };
  Half u[2][kRuleCols * ChunkTokens::kPitch];
  float diagonal[kSubChunks][kSubChunk][kSubChunk];             ///< A, [tile][s][t]
  SplitLeft earlier[kSubChunks * (kSubChunks - 1) / 2][kWarp];  ///< A of a tile and earlier ones, as its warp multiplies with it
  ChunkGates gates[2];
};

/// A block's columns of a state, in registers: those of rows [32 warp, 32 warp + 32) are a warp's.
struct StateTile {
  float v[2][4][4];
  __device__ __forceinline__ float* place(float* state, int warp, int lane, int first_col, int m, int n, int e) const {
    return state + (warp * 32 + m * 16 + tile_row(lane, e)) * D + first_col + n * 8 + tile_col(lane, e);
  }
  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; e += 2) body(m, n, e, v[m][n][e], v[m][n][e + 1]);
  }
};

/// kSaves: for the gradient, without outputs.
template <bool kSaves>
__global__ void __launch_bounds__(kRuleThreads, 2) rule_chunk_kernel(const ChunkArgs a) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<ChunkShared*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int s = static_cast<int>(blockIdx.z), n = static_cast<int>(blockIdx.y), first_col = static_cast<int>(blockIdx.x) * kRuleCols;
  const int N = a.in.num_value_heads, M = a.in.num_key_heads, m = n / (N / M), col = first_col + lane;
  const ChunkSequence seq(a, s);
  if (seq.end == seq.before) return;
  const bool has_slot = !kSaves && seq.slot != nullptr;
  const OpenChunk open(seq.slot, M, N);
  const std::int64_t state_at = static_cast<std::int64_t>(n) * kStateSize;
  std::int64_t chunk = seq.before / kChunk;
  const std::int64_t last_chunk = (seq.end - 1) / kChunk;

  // Of the chunk: its tokens [lo, hi) are this call's, its token 0 would be in row `row`.
  int lo = static_cast<int>(seq.before - chunk * kChunk), hi = 0;
  std::int64_t row = 0;
  GatesOfLane gates_ahead;
  Half v[kSubChunk];  // of the warp's tokens in column `col`
  const auto place = [&] {
    row = seq.first_row + chunk * kChunk - seq.before;
    hi = static_cast<int>(min(kRuleChunk, seq.end - chunk * kChunk));
  };
  const auto ask = [&](int buffer) {
    const ChunkKeys keys{shared.keys[buffer]}, queries{shared.queries[buffer]};
    ask_for_keys<kRuleThreads>(keys, a.in, 1, m, row, lo, hi);
    ask_for_keys<kRuleThreads>(queries, a.in, 0, m, row, lo, hi);
    for (int i = static_cast<int>(threadIdx.x); i < lo * (kChunkKeys / kVec); i += kRuleThreads) {
      const int t = i / (kChunkKeys / kVec), c = i % (kChunkKeys / kVec) * kVec;
      copy_16(keys.at(t, c), open.keys + (static_cast<std::int64_t>(m) * kChunk + t) * kChunkKeys + c, true);
      *reinterpret_cast<uint4*>(queries.at(t, c)) = make_uint4(0, 0, 0, 0);
    }
    copies_commit();
    if (warp == 0) {
      gates_ahead.read(a.in, n, row, lo, hi);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (const int t = 2 * lane + i; t < lo) {
          gates_ahead.k_scale[i] = open.k_scale[m * kChunk + t];
          gates_ahead.log_decay[i] = open.log_decay[n * kChunk + t];
        }
    }
  };
  // Those of tokens that are not there are of others, and not used.
  const auto ask_for_values = [&] {
    const Half* const from = a.in.qkv + row * a.in.qkv_stride + a.in.v_column(n) + col;
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) v[i] = from[min(max(warp * kSubChunk + i, lo), hi - 1) * a.in.qkv_stride];
  };

  StateTile state;
  bool has_state = chunk > 0, is_changed = false;
  state.each([&](int i, int j, int e, float& first, float& second) {
    first = second = 0.0f;
    if (!has_state) return;
    const float2 pair = *reinterpret_cast<const float2*>(state.place(seq.slot + state_at, warp, lane, first_col, i, j, e));
    first = pair.x, second = pair.y;
  });
  place();
  ask(0);
  ask_for_values();
  for (int buffer = 0; chunk <= last_chunk; ++chunk, buffer = 1 - buffer) {
    const int here_lo = lo, here_hi = hi;
    const std::int64_t here_row = row;
    const ChunkKeys keys{shared.keys[buffer]}, queries{shared.queries[buffer]};
    const ChunkCols state_hi{shared.state[0]}, state_lo{shared.state[1]};
    const ChunkTokens u_hi{shared.u[0]}, u_lo{shared.u[1]};
    const ChunkTokens weighted_hi{shared.later.weighted[0]}, weighted_lo{shared.later.weighted[1]};
    const ChunkGates& gates = shared.gates[buffer];
    if (warp == 0) gates_ahead.write(shared.gates[buffer]);
    if (has_state)
      state.each([&](int i, int j, int e, float first, float second) {
        const SplitPair p = split(first, second);
        const int r = warp * 32 + i * 16 + tile_row(lane, e), c = j * 8 + tile_col(lane, e);
        *reinterpret_cast<std::uint32_t*>(state_hi.at(r, c)) = p.hi;
        *reinterpret_cast<std::uint32_t*>(state_lo.at(r, c)) = p.lo;
      });
    copies_wait<0>();
    __syncthreads();
    const bool is_complete = here_hi == kChunk;
    if (chunk < last_chunk) {
      lo = 0, row += kChunk;
      hi = static_cast<int>(min(kRuleChunk, seq.end - (chunk + 1) * kChunk));
      ask(1 - buffer);
    }
    const int first = warp * kSubChunk;
    const bool is_active = first + kSubChunk > here_lo && first < here_hi;

    float of_keys[4][4] = {}, of_queries[4][4] = {};  // products with the state
    SplitLeft* const earlier = &shared.earlier[warp * (warp - 1) / 2][lane];
    if (is_active) {
      if (has_state) {
#pragma unroll 2
        for (int k = 0; k < kChunkKeys; k += 16) {
          std::uint32_t left_k[4], left_q[4];
          keys.left(left_k, first, k);
          if constexpr (!kSaves) queries.left(left_q, first, k);
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            std::uint32_t b[2][4];
            state_hi.right_columns(b[0], k, j * 8);
            state_lo.right_columns(b[1], k, j * 8);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
              multiply_add(of_keys[j], left_k, b[part][0], b[part][1]);
              multiply_add(of_keys[j + 1], left_k, b[part][2], b[part][3]);
              if constexpr (!kSaves) {
                multiply_add(of_queries[j], left_q, b[part][0], b[part][1]);
                multiply_add(of_queries[j + 1], left_q, b[part][2], b[part][3]);
              }
            }
          }
        }
      }
#pragma unroll 1
      for (int i = 0; i <= warp; ++i) {
        float c[2][4];
        coefficients(c, keys, first, keys, gates, gates.k_scale, warp, i, false);
        if (i < warp) {
          SplitLeft left;
          left.pack(c[0], c[1]);
          earlier[i * kWarp] = left;
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 4; ++e) shared.diagonal[warp][half * 8 + tile_col(lane, e)][tile_row(lane, e)] = c[half][e];
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int t = first + tile_row(lane, e);
          of_keys[j][e] = __fmul_rn(of_keys[j][e], __fmul_rn(gates.k_scale[t], gates.decay[t]));
          if constexpr (!kSaves) of_queries[j][e] = __fmul_rn(of_queries[j][e], __fmul_rn(gates.q_scale[t], gates.decay[t]));
        }
    }
    __syncthreads();  // nobody reads the state in shared memory any more

    float u[kSubChunk];
#pragma unroll 1
    for (int tile = 0; tile < kSubChunks; ++tile) {
      if (warp == tile) {
        float sums[kSubChunk];
        auto& staged_sums = shared.later.sums[warp];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) staged_sums[j * 8 + tile_col(lane, e)][tile_row(lane, e)] = of_keys[j][e];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kSubChunk; i += 4) {
          const float4 part = *reinterpret_cast<const float4*>(staged_sums[lane] + i);
          sums[i] = part.x, sums[i + 1] = part.y, sums[i + 2] = part.z, sums[i + 3] = part.w;
        }
#pragma unroll
        for (float& value : u) value = 0.0f;
        if (first < here_lo) {
#pragma unroll
          for (int i = 0; i < kSubChunk; ++i)
            if (first + i < here_lo) u[i] = open.u[(static_cast<std::int64_t>(n) * kChunk + first + i) * D + col];
        }
        // Of a tile without tokens of this call the coefficients were not computed.
        if (is_active) {
#pragma unroll
          for (int i = 0; i < kSubChunk; ++i) {
            const float r = __fsub_rn(to_float(v[i]), sums[i]);
            if (first + i >= here_lo) u[i] = __fmul_rn(gates.beta[first + i], r);
#pragma unroll
            for (int later = i + 1; later < kSubChunk; ++later) sums[later] = fmaf(shared.diagonal[warp][i][later], u[i], sums[later]);
          }
        }
        split_into(u_hi.at(lane, first), u_lo.at(lane, first), u);
      }
      __syncthreads();
      if (warp == tile) {
        // Not what the next tile waits for.
        if (is_complete) {
          float w[kSubChunk];
#pragma unroll
          for (int i = 0; i < kSubChunk; ++i) w[i] = __fmul_rn(u[i], gates.weight[first + i]);
          split_into(weighted_hi.at(lane, first), weighted_lo.at(lane, first), w);
        }
        if constexpr (kSaves) {
          Half* const to = a.saved.u_CNPDT + ((a.saved.chunk_start_S[s] + chunk) * N + n) * 2 * kChunkDelta + col * kChunk + first;
          split_into(to, to + kChunkDelta, u);
        } else if (has_slot && !is_complete) {
          float* const to = open.u + static_cast<std::int64_t>(n) * kChunk * D + col;
#pragma unroll
          for (int i = 0; i < kSubChunk; ++i)
            if (const int t = first + i; t >= here_lo && t < here_hi) to[t * D] = u[i];
        }
      } else if (warp > tile && is_active) {
        const SplitLeft left = earlier[tile * kWarp];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          std::uint32_t b_hi[4], b_lo[4];
          u_hi.right_rows(b_hi, j * 8, tile * kSubChunk);
          u_lo.right_rows(b_lo, j * 8, tile * kSubChunk);
          multiply_add(of_keys[j], left, b_hi, b_lo);
          multiply_add(of_keys[j + 1], left, b_hi + 2, b_lo + 2);
        }
      }
    }
    if (chunk < last_chunk) ask_for_values();

    if constexpr (!kSaves) {
      if (is_active) {
#pragma unroll 1
        for (int i = 0; i <= warp; ++i) {
          float c[2][4];
          coefficients(c, queries, first, keys, gates, gates.q_scale, warp, i, true);
          SplitLeft p;
          p.pack(c[0], c[1]);
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            std::uint32_t b_hi[4], b_lo[4];
            u_hi.right_rows(b_hi, j * 8, i * kSubChunk);
            u_lo.right_rows(b_lo, j * 8, i * kSubChunk);
            multiply_add(of_queries[j], p, b_hi, b_lo);
            multiply_add(of_queries[j + 1], p, b_hi + 2, b_lo + 2);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 4; e += 2) {
            const int t = first + tile_row(lane, e);
            if (t >= here_lo && t < here_hi)
              *reinterpret_cast<__nv_bfloat162*>(a.out + (here_row + t) * a.out_stride + n * D + first_col + j * 8 + tile_col(lane, e)) =
                  __floats2bfloat162_rn(of_queries[j][e], of_queries[j][e + 1]);
          }
      }
    }
    __syncthreads();
    if (is_complete && (has_slot || chunk < last_chunk)) {
      const float decay = gates.decay[kChunk - 1];
      state.each([&](int, int, int, float& one, float& other) { one = __fmul_rn(decay, one), other = __fmul_rn(decay, other); });
#pragma unroll 1
      for (int k = 0; k < kChunk; k += 16) {
        std::uint32_t left[2][4];
        left_transposed(left[0], keys, k, warp * 32);
        left_transposed(left[1], keys, k, warp * 32 + 16);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          std::uint32_t b[2][4];
          weighted_hi.right_rows(b[0], j * 8, k);
          weighted_lo.right_rows(b[1], j * 8, k);
#pragma unroll
          for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              multiply_add(state.v[i][j], left[i], b[part][0], b[part][1]);
              multiply_add(state.v[i][j + 1], left[i], b[part][2], b[part][3]);
            }
        }
      }
      has_state = is_changed = true;
      if constexpr (kSaves) {
        float* const to = a.saved.states_CNKD + (static_cast<std::int64_t>(a.saved.chunk_start_S[s]) + chunk + 1) * N * kStateSize;
        state.each([&](int i, int j, int e, float one, float other) {
          *reinterpret_cast<float2*>(state.place(to + state_at, warp, lane, first_col, i, j, e)) = make_float2(one, other);
        });
      }
    }
    __syncthreads();
  }
  if (has_slot && is_changed)
    state.each([&](int i, int j, int e, float one, float other) {
      *reinterpret_cast<float2*>(state.place(seq.slot + state_at, warp, lane, first_col, i, j, e)) = make_float2(one, other);
    });
}

/// Behind rule_chunk_kernel: keys and decays of chunks that are not complete. One block per key head and sequence.
__global__ void __launch_bounds__(kRuleThreads) rule_keep_kernel(const ChunkArgs a) {
  const int s = static_cast<int>(blockIdx.y), m = static_cast<int>(blockIdx.x), N = a.in.num_value_heads, M = a.in.num_key_heads;
  const ChunkSequence seq(a, s);
  if (seq.slot == nullptr || seq.end == seq.before || seq.end % kChunk == 0) return;
  const OpenChunk open(seq.slot, M, N);
  const std::int64_t first = seq.end / kChunk * kChunk, row = seq.first_row + first - seq.before;
  const int lo = static_cast<int>(max(seq.before - first, std::int64_t{0})), hi = static_cast<int>(seq.end - first);
  constexpr int kPieces = kChunkKeys / kVec;
  for (int i = lo * kPieces + static_cast<int>(threadIdx.x); i < hi * kPieces; i += kRuleThreads) {
    const int t = i / kPieces, c = i % kPieces * kVec;
    *reinterpret_cast<uint4*>(open.keys + (static_cast<std::int64_t>(m) * kChunk + t) * kChunkKeys + c) =
        *reinterpret_cast<const uint4*>(a.in.qkv + (row + t) * a.in.qkv_stride + (M + m) * kChunkKeys + c);
  }
  for (int t = lo + static_cast<int>(threadIdx.x); t < hi; t += kRuleThreads) {
    open.k_scale[m * kChunk + t] = a.in.scales.k_TM[(row + t) * M + m];
    for (int n = m * (N / M); n < (m + 1) * (N / M); ++n) open.log_decay[n * kChunk + t] = a.in.scales.gate_TN[(row + t) * N + n];
  }
}

/// One token of each sequence: the sums of rule_chunk_kernel for that token alone, a warp for each eight columns.
__global__ void __launch_bounds__(kRuleThreads) rule_step_kernel(const ChunkArgs a) {
  __shared__ __align__(16) Half key_memory[kChunk * ChunkKeys::kPitch], query_memory[kSubChunk * ChunkKeys::kPitch];
  __shared__ __align__(16) Half u_memory[2][kRuleCols * ChunkTokens::kPitch], weighted_memory[2][kRuleCols * ChunkTokens::kPitch];
  __shared__ __align__(16) float u_of_tile[kSubChunk][kRuleCols], to_keys[kChunk], to_queries[kChunk];
  __shared__ ChunkGates gates;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int n = static_cast<int>(blockIdx.y), first_col = static_cast<int>(blockIdx.x) * kRuleCols;
  const int N = a.in.num_value_heads, M = a.in.num_key_heads, m = n / (N / M);
  let_next_begin();
  wait_for_previous();
  const ChunkSequence seq(a, static_cast<int>(blockIdx.z));
  if (seq.slot == nullptr) return;
  const OpenChunk open(seq.slot, M, N);
  const int p = static_cast<int>(seq.before % kChunk), tile = p / kSubChunk, in_tile = p % kSubChunk, num_rows = (tile + 1) * kSubChunk;
  const bool has_state = seq.before >= kChunk, is_last = p == kChunk - 1;
  const ChunkKeys keys{key_memory}, queries{query_memory};
  const ChunkTokens u_hi{u_memory[0]}, u_lo{u_memory[1]}, weighted_hi{weighted_memory[0]}, weighted_lo{weighted_memory[1]};
  float* const state = seq.slot + static_cast<std::int64_t>(n) * kStateSize + first_col;
  float* const kept_u = open.u + static_cast<std::int64_t>(n) * kChunk * D + first_col;
  const Half* const token = a.in.qkv + seq.first_row * a.in.qkv_stride;

  constexpr int kPieces = kChunkKeys / kVec, kRowsOfCopy = kRuleThreads / kPieces;
  {
    const int t0 = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces * kVec;
    const Half *const kept = open.keys + (m * kChunk + t0) * kChunkKeys + c, *const own = token + (M + m) * kChunkKeys + c;
#pragma unroll
    for (int i = 0; i < kChunk; i += kRowsOfCopy)
      if (i < num_rows) copy_16(keys.at(t0 + i, c), t0 + i < p ? kept + i * kChunkKeys : own, t0 + i <= p);
#pragma unroll
    for (int i = 0; i < kSubChunk; i += kRowsOfCopy) copy_16(queries.at(t0 + i, c), token + m * kChunkKeys + c, t0 + i == in_tile);
  }
  copies_commit();
  // All that comes from memory is asked for before any of it is used.
  float state_columns[kChunkKeys / 16][2][2] = {};
  if (has_state) {
    const float* const from = state + lane % 4 * 2 * D + warp * 8 + lane / 4;
#pragma unroll
    for (int k = 0; k < kChunkKeys / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) state_columns[k][i / 2][i % 2] = from[(k * 16 + i / 2 * 8 + i % 2) * D];
  }
  float earlier_u[kSubChunk];  // column `lane` of a warp's tile
  {
    const float* const from = kept_u + warp * kSubChunk * D + lane;
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) earlier_u[i] = warp * kSubChunk + i < p ? from[i * D] : 0.0f;
  }
  if (warp == 0) {
    const float of_query = inverse_length(token + m * kChunkKeys, kChunkKeys, lane, a.gates.query_scale),
                of_key = inverse_length(token + (M + m) * kChunkKeys, kChunkKeys, lane, 1.0f);
    GatesOfLane mine{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * lane + i;
      if (t < p) {
        mine.k_scale[i] = open.k_scale[m * kChunk + t];
        mine.log_decay[i] = open.log_decay[n * kChunk + t];
      } else if (t == p) {
        mine.q_scale[i] = of_query, mine.k_scale[i] = of_key;
        mine.beta[i] = a.gates.beta(seq.first_row, n), mine.log_decay[i] = a.gates.chunk_decay(seq.first_row, n);
        if (blockIdx.x == 0 && !is_last) open.log_decay[n * kChunk + p] = mine.log_decay[i];
      }
    }
    mine.write(gates);
  }
  std::uint32_t state_hi[kChunkKeys / 16][2], state_lo[kChunkKeys / 16][2];  // right operands
#pragma unroll
  for (int k = 0; k < kChunkKeys / 16; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SplitPair pair = split(state_columns[k][i][0], state_columns[k][i][1]);
      state_hi[k][i] = pair.hi, state_lo[k][i] = pair.lo;
    }
  split_into(u_hi.at(lane, warp * kSubChunk), u_lo.at(lane, warp * kSubChunk), earlier_u);
  if (warp == tile) {
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) u_of_tile[i][lane] = earlier_u[i];
  }
  copies_wait<0>();
  __syncthreads();

  const bool has_row = lane / 4 == in_tile % 8;  // of a product's tile
  const int row_at = in_tile / 8 * 2;
  if (warp <= tile) {
    float c[2][2][4];
    coefficients(c[0], keys, tile * kSubChunk, keys, gates, gates.k_scale, tile, warp, false);
    coefficients(c[1], queries, 0, keys, gates, gates.q_scale, tile, warp, true);
    if (has_row) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int s = warp * kSubChunk + half * 8 + lane % 4 * 2 + i;
          to_keys[s] = row_at == 0 ? c[0][half][i] : c[0][half][i + 2];
          to_queries[s] = row_at == 0 ? c[1][half][i] : c[1][half][i + 2];
        }
    }
  }
  float of_key[4] = {}, of_query[4] = {};
  if (has_state) {
#pragma unroll
    for (int k = 0; k < kChunkKeys / 16; ++k) {
      std::uint32_t left_k[4], left_q[4];
      keys.left(left_k, tile * kSubChunk, k * 16);
      queries.left(left_q, 0, k * 16);
      multiply_add(of_key, left_k, state_hi[k][0], state_hi[k][1]);
      multiply_add(of_key, left_k, state_lo[k][0], state_lo[k][1]);
      multiply_add(of_query, left_q, state_hi[k][0], state_hi[k][1]);
      multiply_add(of_query, left_q, state_lo[k][0], state_lo[k][1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    of_key[e] = __fmul_rn(of_key[e], __fmul_rn(gates.k_scale[p], gates.decay[p]));
    of_query[e] = __fmul_rn(of_query[e], __fmul_rn(gates.q_scale[p], gates.decay[p]));
  }
  __syncthreads();

  // A tile with the token's coefficients in its row.
  const auto left_of = [&](const float* from, int other) {
    float c[2][4] = {};
    if (has_row) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float value = from[other * kSubChunk + half * 8 + lane % 4 * 2 + i];
          c[half][i] = row_at == 0 ? value : 0.0f;
          c[half][i + 2] = row_at == 0 ? 0.0f : value;
        }
    }
    SplitLeft left;
    left.pack(c[0], c[1]);
    return left;
  };
  const auto add = [&](float(&sum)[4], const float* from, int other) {
    std::uint32_t b_hi[4], b_lo[4];
    u_hi.right_rows(b_hi, warp / 2 * 16, other * kSubChunk);
    u_lo.right_rows(b_lo, warp / 2 * 16, other * kSubChunk);
    const SplitLeft left = left_of(from, other);
    const std::uint32_t hi[2] = {warp % 2 == 0 ? b_hi[0] : b_hi[2], warp % 2 == 0 ? b_hi[1] : b_hi[3]};
    const std::uint32_t lo[2] = {warp % 2 == 0 ? b_lo[0] : b_lo[2], warp % 2 == 0 ? b_lo[1] : b_lo[3]};
    multiply_add(sum, left, hi, lo);
  };
  for (int i = 0; i < tile; ++i) add(of_key, to_keys, i);
  float u[2] = {};
  const int c = warp * 8 + lane % 4 * 2;  // of u[0], within the block
  if (has_row) {
    float sum[2] = {row_at == 0 ? of_key[0] : of_key[2], row_at == 0 ? of_key[1] : of_key[3]};
    for (int i = 0; i < in_tile; ++i) {
      const float coefficient_of = to_keys[tile * kSubChunk + i];
      sum[0] = fmaf(coefficient_of, u_of_tile[i][c], sum[0]);
      sum[1] = fmaf(coefficient_of, u_of_tile[i][c + 1], sum[1]);
    }
    const __nv_bfloat162 v = *reinterpret_cast<const __nv_bfloat162*>(token + a.in.v_column(n) + first_col + c);
    u[0] = solved(gates.beta[p], __low2float(v), sum[0]);
    u[1] = solved(gates.beta[p], __high2float(v), sum[1]);
    split_into(u_hi.at(c, p), u_lo.at(c, p), u[0]);
    split_into(u_hi.at(c + 1, p), u_lo.at(c + 1, p), u[1]);
    if (!is_last) *reinterpret_cast<float2*>(kept_u + p * D + c) = make_float2(u[0], u[1]);
  }
  __syncthreads();
  for (int i = 0; i <= tile; ++i) add(of_query, to_queries, i);
  if (has_row)
    *reinterpret_cast<__nv_bfloat162*>(a.out + seq.first_row * a.out_stride + n * D + first_col + c) =
        row_at == 0 ? __floats2bfloat162_rn(of_query[0], of_query[1]) : __floats2bfloat162_rn(of_query[2], of_query[3]);
  if (!is_last) {
    if (blockIdx.x != 0 || n % (N / M) != 0) return;  // one block keeps what all value heads of the key share
    if (threadIdx.x == 0) open.k_scale[m * kChunk + p] = gates.k_scale[p];
    for (int i = static_cast<int>(threadIdx.x); i < kPieces; i += kRuleThreads)
      *reinterpret_cast<uint4*>(open.keys + (static_cast<std::int64_t>(m) * kChunk + p) * kChunkKeys + i * kVec) =
          *reinterpret_cast<const uint4*>(keys.at(p, i * kVec));
    return;
  }

  // The chunk is complete: the state behind it.
  float w[kSubChunk];
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) w[i] = __fmul_rn(earlier_u[i], gates.weight[warp * kSubChunk + i]);
  split_into(weighted_hi.at(lane, warp * kSubChunk), weighted_lo.at(lane, warp * kSubChunk), w);
  __syncthreads();
  if (has_row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) split_into(weighted_hi.at(c + i, p), weighted_lo.at(c + i, p), __fmul_rn(u[i], gates.weight[p]));
  }
  __syncthreads();
  const float decay = gates.decay[kChunk - 1];
#pragma unroll 1
  for (int rows = 0; rows < kChunkKeys; rows += 16) {
    float sum[4];
    float* const at = state + (rows + lane / 4) * D + c;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 before = has_state ? *reinterpret_cast<const float2*>(at + half * 8 * D) : make_float2(0, 0);
      sum[half * 2] = __fmul_rn(decay, before.x), sum[half * 2 + 1] = __fmul_rn(decay, before.y);
    }
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      std::uint32_t left[4], b[2][4];
      left_transposed(left, keys, k, rows);
      weighted_hi.right_rows(b[0], warp / 2 * 16, k);
      weighted_lo.right_rows(b[1], warp / 2 * 16, k);
#pragma unroll
      for (int part = 0; part < 2; ++part)
        multiply_add(sum, left, warp % 2 == 0 ? b[part][0] : b[part][2], warp % 2 == 0 ? b[part][1] : b[part][3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) *reinterpret_cast<float2*>(at + half * 8 * D) = make_float2(sum[half * 2], sum[half * 2 + 1]);
  }
}

void check_chunks(const DeltaRule& in, std::int64_t num_sequences) {
  if (!is_wide(in.qkv_TC))
    fail(ErrorCode::kNotImplemented, "[delta_rule] rows of queries, keys and values must begin at multiples of 16 bytes");
  if (num_sequences > 65535) fail(ErrorCode::kNotImplemented, "[delta_rule] {} sequences; the kernel takes up to 65535", num_sequences);
}

dim3 chunk_grid(const DeltaRule& in, std::int64_t num_sequences) {
  return {static_cast<unsigned>(in.value_dim / kRuleCols), static_cast<unsigned>(in.num_value_heads), static_cast<unsigned>(num_sequences)};
}

/// Of sequences with slots.
ChunkArgs chunk_args(const OpContext& ctx, const TensorView& out_TV, const TensorView& state_SF, const RuleScales& scales,
                     const DeltaRule& in, const StateRows& rows) {
  const bool has_slots = rows.is_by_index() || !rows.slot_S.empty();
  return {.in = rule_inputs<Half>(ctx, scales, in, rows),
          .out = out_TV.as<Half>(),
          .out_stride = out_TV.row_stride,
          .slots = has_slots ? state_SF.as<float>() : nullptr,
          .slot_size = has_slots ? state_SF.row_stride : 0,
          .slot = rows.is_by_index() ? rows.slot_B.as<std::int32_t>() : staged(ctx, rows.slot_S),
          .begin = staged(ctx, rows.begin_S),
          .context_len = rows.context_len_B.as<std::int32_t>(),
          .saved = {},
          .gates = rule_gates<Half>(in)};
}

}  // namespace

void delta_rule_step(OpContext& ctx, TensorView out_TV, TensorView state_SF, const DeltaRule& in, const StateRows& rows) {
  const std::int64_t num_sequences = in.qkv_TC.shape[0];
  check_chunks(in, num_sequences);
  launch_chained(stream_of(ctx), rule_step_kernel, chunk_grid(in, num_sequences), dim3(kRuleThreads), 0,
                 chunk_args(ctx, out_TV, state_SF, {}, in, rows));
}

void delta_rule_in_chunks(OpContext& ctx, TensorView out_TV, TensorView state_SF, const RuleScales& scales, const DeltaRule& in,
                          const StateRows& rows) {
  const std::int64_t num_sequences = static_cast<std::int64_t>(rows.start_S.size()) - 1;
  check_chunks(in, num_sequences);
  const ChunkArgs a = chunk_args(ctx, out_TV, state_SF, scales, in, rows);
  launch_with<ChunkShared>(ctx, rule_chunk_kernel<false>, a, chunk_grid(in, num_sequences), kRuleThreads);
  if (a.slots == nullptr) return;
  const dim3 grid(static_cast<unsigned>(in.num_key_heads), static_cast<unsigned>(num_sequences));
  rule_keep_kernel<<<grid, kRuleThreads, 0, stream_of(ctx)>>>(a);
  PRL_CUDA_CHECK(cudaGetLastError());
}

void write_chunk_states(OpContext& ctx, const ChunkStates& to, const RuleScales& scales, const DeltaRule& in, const StateRows& rows) {
  const std::int64_t num_sequences = static_cast<std::int64_t>(rows.start_S.size()) - 1;
  check_chunks(in, num_sequences);
  ChunkArgs a = chunk_args(ctx, {}, {}, scales, in, rows);
  a.saved = to;
  launch_with<ChunkShared>(ctx, rule_chunk_kernel<true>, a, chunk_grid(in, num_sequences), kRuleThreads);
}

}  // namespace prl::ops::cuda
