#include <algorithm>
#include <span>
#include <vector>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/delta_rule.cuh"

// The gradient of the rule, in windows of kRuleWindow tokens from the last of a sequence to its first; some sequences at a time, each at a
// window of its own, so that there are blocks for the whole device. The states before each window are computed first, by the kernel of the
// forward pass. In a window a block computes the states again twice: once to keep that before every kSubTokens tokens in memory, and for
// each such few tokens, from the last to the first, once more to keep all of them in shared memory, where the way back finds them. What
// blocks have of the gradients of queries, keys and gates is added up by a second kernel, over tiles of columns and value heads in order.
// A sequence that begins before a window hands the gradient of its state on to the next one. No sum depends on what is computed together.

namespace prl::ops::cuda {
namespace {

constexpr int kSumBlock = 256;

/// Tokens whose states a block keeps in shared memory: so many that two blocks fit a multiprocessor, as one alone waits for itself.
template <int kRows>
constexpr int kSubTokens = kRows > 32 ? 2 : 4;
/// Blocks that are wanted at a time, two for each multiprocessor of the larger cards.
constexpr std::int64_t kBlocksWanted = 264;
/// Places for tokens of a sequence's window begin at multiples of this, which kSubTokens divides.
constexpr std::int64_t kPlaceStep = 8;

/// Which window each sequence of a group is at, counted from its last one, and where its tokens have places in the workspace.
struct RuleWave {
  const std::int32_t* start;  ///< of all sequences
  const std::int32_t* place;  ///< of all sequences: the first place of a window's tokens
  int first_sequence, from_last;
  struct Window {
    std::int64_t start, end;   ///< of the sequence
    std::int64_t first, last;  ///< tokens of the window
    std::int64_t place;        ///< of the first
  };
  /// Of the group's z-th sequence; without tokens if it has no such window.
  __device__ Window window(int z) const {
    const int s = first_sequence + z;
    Window w{start[s], start[s + 1], 0, 0, place[s]};
    const std::int64_t i = (w.end - 1) / kRuleWindow - from_last;
    if (w.end == w.start || i < w.start / kRuleWindow) return w;
    w.first = max(w.start, i * kRuleWindow);
    w.last = min(w.end, (i + 1) * kRuleWindow);
    return w;
  }
};

template <typename T>
struct WindowArgs {
  RuleInputs<T> in;
  const T* dout;
  T* dqkv;
  std::int64_t dout_stride, dqkv_stride;
  const float* checkpoints;
  RuleWave wave;
  float* states;            ///< before every few places, as registers lie
  const float* carried_in;  ///< gradients of the states behind the windows, [sequences of the group, N, K, D]
  float* carried_out;
  float *key_parts, *gate_parts;  ///< [places, N, tiles, 2, K] and [places, N, tiles, num_rule_parameters()]
};

template <int kRows>
struct WindowShared {
  static constexpr int kTokens = kSubTokens<kRows>, kKeys = kRuleLanes * kRows;
  float4 states[kTokens][kRows / 4][kRuleThreads];
  RulePiece<kRows, kTokens> pieces[2];
  float keys[kTokens][2][kRuleWarps][kKeys];
  float deltas[kTokens][2][kRuleCols], dv[kTokens][kRuleCols];
  float gates[kTokens][3][kRuleWarps];  ///< of beta or the step, the decay, and the skip of a state space
};

/// Two lanes change places: one keeps the sums of the first kHalf of 2 kHalf numbers, the other those of the rest. Gives its first.
template <int kHalf, int kRows>
__device__ __forceinline__ int share_sums(float (&v)[kRows], const RuleThread& me, int distance) {
  const bool is_upper = (me.lane & distance) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = is_upper ? v[i] : v[i + kHalf], own = is_upper ? v[i + kHalf] : v[i];
    v[i] = own + __shfl_xor_sync(kFullWarp, sent, distance);
  }
  return is_upper ? kHalf : 0;
}
/// Sums over the eight columns of a warp, of which each lane writes those of an eighth of its rows.
template <int kRows>
__device__ __forceinline__ void sum_over_columns(float (&v)[kRows], float* to, const RuleThread& me) {
  static_assert(kColsOfWarp == 8);
  int own = share_sums<kRows / 2>(v, me, 16);  // one after the other: each halves what the one before has left
  own += share_sums<kRows / 4>(v, me, 8);
  own += share_sums<kRows / 8>(v, me, 4);
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i) to[me.row(own + i)] = v[i];
}

/// `here` tokens forward from `state`: P of each, and what is needed on the way back; parts of the gradient of queries.
template <bool kIsSpace, int kRows>
__device__ __forceinline__ void forward_again(WindowShared<kRows>& shared, int side, int here, float (&state)[kRows],
                                              const RuleThread& me) {
  const auto& piece = shared.pieces[side];
#pragma unroll 1
  for (int t = 0; t < here; ++t) {
    float r = 0.0f;
    if constexpr (kIsSpace)
      shrink_column(state, piece.decay[t]);
    else
      r = decay_column(state, piece.k[t], me.part, piece.decay[t]);
#pragma unroll
    for (int i = 0; i < kRows; i += 4)
      shared.states[t][i / 4][threadIdx.x] = make_float4(state[i], state[i + 1], state[i + 2], state[i + 3]);
    const float e = piece.v[t][me.col] - r, d = piece.beta[t] * e;
    if (me.part == 0) shared.deltas[t][0][me.col] = d, shared.deltas[t][1][me.col] = e;
    add_to_column(state, piece.k[t], me.part, d);
    float dq[kRows];
    const float g = piece.dout[t][me.col];
#pragma unroll
    for (int i = 0; i < kRows; ++i) dq[i] = state[i] * g;
    sum_over_columns(dq, shared.keys[t][0][me.warp], me);
  }
  __syncwarp();
}

/// The sum of what the columns of a warp have, each the same in its four lanes.
__device__ __forceinline__ float sum_of_columns(float v) {
#pragma unroll
  for (int distance = kWarp / 2; distance >= kRuleLanes; distance /= 2) v += __shfl_xor_sync(kFullWarp, v, distance);
  return v;
}

/// The same tokens back: `dstate` is the gradient of the state behind them, then that before them.
template <bool kIsSpace, int kRows>
__device__ __forceinline__ void backward_again(WindowShared<kRows>& shared, int side, int here, float (&dstate)[kRows], float skip,
                                               const RuleThread& me) {
  const auto& piece = shared.pieces[side];
#pragma unroll 1
  for (int t = here - 1; t >= 0; --t) {
    const float d = shared.deltas[t][0][me.col], e = shared.deltas[t][1][me.col], decay = piece.decay[t];
    add_to_column(dstate, piece.q[t], me.part, piece.dout[t][me.col]);
    const float dd = column_dot(dstate, piece.k[t], me.part), dv = piece.beta[t] * dd;
    if (me.part == 0) shared.dv[t][me.col] = kIsSpace ? fmaf(skip, piece.dout[t][me.col], dv) : dv;
    float dk[kRows], dlog[4] = {};
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 k4 = *reinterpret_cast<const float4*>(piece.k[t] + i * kRuleLanes + 4 * me.part),
                   p4 = shared.states[t][i / 4][threadIdx.x];
      const float k[4] = {k4.x, k4.y, k4.z, k4.w}, p[4] = {p4.x, p4.y, p4.z, p4.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float ds = dstate[i + j], dp = kIsSpace ? ds : fmaf(k[j], -dv, ds);
        dk[i + j] = kIsSpace ? ds * d : fmaf(p[j], -dv, ds * d);
        dlog[j] = fmaf(dp, p[j], dlog[j]);
        dstate[i + j] = decay * dp;
      }
    }
    sum_over_columns(dk, shared.keys[t][1][me.warp], me);
    const float dlog_decay = warp_sum(pair_sum(dlog));
    const float dbeta = sum_of_columns(dd * e);
    if constexpr (kIsSpace) {
      const float dskip = sum_of_columns(piece.dout[t][me.col] * e);
      if (me.lane == 0) shared.gates[t][2][me.warp] = dskip;
    }
    if (me.lane == 0) shared.gates[t][0][me.warp] = dbeta, shared.gates[t][1][me.warp] = dlog_decay;
  }
}

/// What the block has of `here` tokens from `first` on, to memory.
template <bool kIsSpace, typename T, int kRows>
__device__ __forceinline__ void write_parts(const WindowArgs<T>& a, const WindowShared<kRows>& shared, std::int64_t first,
                                            std::int64_t place, int here, int n, int tile) {
  const int K = a.in.key_dim, D = a.in.value_dim, N = a.in.num_value_heads, num_tiles = static_cast<int>(gridDim.x);
  const auto part_of = [&](int t) { return ((place + t) * N + n) * num_tiles + tile; };
  for (int i = static_cast<int>(threadIdx.x); i < here * 2 * K; i += kRuleThreads) {
    const int t = i / (2 * K), which = i / K % 2, row = i % K;
    float sum = shared.keys[t][which][0][row];
#pragma unroll
    for (int w = 1; w < kRuleWarps; ++w) sum += shared.keys[t][which][w][row];
    a.key_parts[part_of(t) * 2 * K + which * K + row] = sum;
  }
  for (int i = static_cast<int>(threadIdx.x); i < here * kRuleCols; i += kRuleThreads) {
    const int t = i / kRuleCols, c = tile * kRuleCols + i % kRuleCols;
    if (c < D) a.dqkv[(first + t) * a.dqkv_stride + a.in.v_column(n) + c] = from_float<T>(shared.dv[t][i % kRuleCols]);
  }
  constexpr int kParts = kIsSpace ? 3 : 2;
  if (const int i = static_cast<int>(threadIdx.x); i < kParts * here) {
    const float* of_warps = shared.gates[i / kParts][i % kParts];
    float sum = of_warps[0];
#pragma unroll
    for (int w = 1; w < kRuleWarps; ++w) sum += of_warps[w];
    a.gate_parts[part_of(i / kParts) * kParts + i % kParts] = sum;
  }
}

template <typename T, int kRows, bool kIsSpace>
__global__ void __launch_bounds__(kRuleThreads, 2) rule_window_kernel(const WindowArgs<T> a) {
  constexpr int kTokens = kSubTokens<kRows>;
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<WindowShared<kRows>*>(memory);
  const RuleThread me;
  const int z = static_cast<int>(blockIdx.z), n = static_cast<int>(blockIdx.y), tile = static_cast<int>(blockIdx.x);
  const int K = a.in.key_dim, D = a.in.value_dim, N = a.in.num_value_heads, col = tile * kRuleCols + me.col;
  const RuleWave::Window w = a.wave.window(z);
  const std::int64_t first = w.first, count = w.last - w.first, state_size = static_cast<std::int64_t>(K) * D;
  if (count <= 0) return;
  const int num_subs = static_cast<int>((count + kTokens - 1) / kTokens);
  const auto size_of_sub = [&](int j) { return static_cast<int>(min(static_cast<std::int64_t>(kTokens), count - j * kTokens)); };
  RuleReader<T, kRows, kTokens, true> next;
  const auto ask = [&](int j) {
    next.read(a.in, a.dout, a.dout_stride, n, tile * kRuleCols, first + static_cast<std::int64_t>(j) * kTokens, size_of_sub(j));
  };
  // Of sub j > 0.
  float4* const kept = reinterpret_cast<float4*>(a.states) + threadIdx.x;
  const auto kept_at = [&](int j, int i) -> float4& {
    const std::int64_t slot = w.place / kTokens + j - 1;
    return kept[((slot * N + n) * gridDim.x + tile) * (kRows / 4) * kRuleThreads + i / 4 * kRuleThreads];
  };
  float state[kRows] = {};
  const auto load_first = [&] {
    if (first > w.start)
      load_column(state, a.checkpoints + (first / kRuleWindow * N + n) * state_size, me, col, K, D);
    else
#pragma unroll
      for (float& v : state) v = 0.0f;
  };
  load_first();
  ask(0);
  next.write(shared.pieces[0]);
  __syncthreads();
#pragma unroll 1
  for (int j = 0; j + 1 < num_subs; ++j) {
    ask(j + 1);
    const auto& piece = shared.pieces[j % 2];
#pragma unroll 1
    for (int t = 0; t < kTokens; ++t) {
      if constexpr (kIsSpace) {
        shrink_column(state, piece.decay[t]);
        add_to_column(state, piece.k[t], me.part, piece.beta[t] * piece.v[t][me.col]);
      } else {
        const float r = decay_column(state, piece.k[t], me.part, piece.decay[t]);
        add_to_column(state, piece.k[t], me.part, piece.beta[t] * (piece.v[t][me.col] - r));
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; i += 4) kept_at(j + 1, i) = make_float4(state[i], state[i + 1], state[i + 2], state[i + 3]);
    next.write(shared.pieces[1 - j % 2]);
    __syncthreads();
  }
  float dstate[kRows] = {};
  const std::int64_t carried = (static_cast<std::int64_t>(z) * N + n) * state_size;
  if (w.end > w.last) load_column(dstate, a.carried_in + carried, me, col, K, D);
#pragma unroll 1
  for (int j = num_subs - 1; j >= 0; --j) {
    const int here = size_of_sub(j);
    if (j > 0) {
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const float4 v = kept_at(j, i);
        state[i] = v.x, state[i + 1] = v.y, state[i + 2] = v.z, state[i + 3] = v.w;
      }
    } else {
      load_first();
    }
    forward_again<kIsSpace>(shared, j % 2, here, state, me);
    if (j > 0) ask(j - 1);
    backward_again<kIsSpace>(shared, j % 2, here, dstate, kIsSpace ? a.in.skip[n] : 0.0f, me);
    __syncthreads();
    write_parts<kIsSpace>(a, shared, first + static_cast<std::int64_t>(j) * kTokens, w.place + static_cast<std::int64_t>(j) * kTokens, here,
                          n, tile);
    if (j > 0) next.write(shared.pieces[1 - j % 2]);
    __syncthreads();
  }
  if (first > w.start) store_column(a.carried_out + carried, dstate, me, col, K, D);
}

template <typename T>
struct SumArgs {
  RuleGateGrads<T> gates;
  T* dqkv;
  const T* qkv;
  RuleScales scales;
  const float *key_parts, *gate_parts;
  std::int64_t dqkv_stride, qkv_stride;
  RuleWave wave;
  int num_key_heads, group, key_dim, num_tiles;
  float query_scale;
  int first_query, first_key;
  bool is_state_space;
};

/// One block per token of a window, key head and sequence of the group, a thread per element of the key: tiles and value heads in order,
/// then the chain rule.
template <typename T>
__global__ void __launch_bounds__(kSumBlock) rule_sum_kernel(const SumArgs<T> g) {
  __shared__ float scratch[kSumBlock / kWarp];
  const RuleWave::Window w = g.wave.window(static_cast<int>(blockIdx.z));
  const std::int64_t token = w.first + static_cast<std::int64_t>(blockIdx.x);
  if (token >= w.last) return;
  const int m = static_cast<int>(blockIdx.y), i = static_cast<int>(threadIdx.x), N = g.num_key_heads * g.group;
  const int parts = g.group * g.num_tiles;
  const std::int64_t first_part = ((w.place + static_cast<std::int64_t>(blockIdx.x)) * N + m * g.group) * g.num_tiles;
  for (int side = 0; side < 2; ++side) {
    const std::int64_t column = (side == 0 ? g.first_query : g.first_key) + m * g.key_dim + i;
    float d = 0.0f, x = 0.0f;
    if (i < g.key_dim) {
      for (int p = 0; p < parts; ++p) d += g.key_parts[((first_part + p) * 2 + side) * g.key_dim + i];
      x = to_float(g.qkv[token * g.qkv_stride + column]);
    }
    if (g.is_state_space) {
      if (i < g.key_dim) g.dqkv[token * g.dqkv_stride + column] = from_float<T>(d);
      continue;
    }
    const float dot = block_sum(d * x, scratch);
    // Of queries, whose scale has 1 / sqrt(K) in it, the length's inverse is what is left without it.
    const float scale = (side == 0 ? g.scales.q_TM : g.scales.k_TM)[token * g.num_key_heads + m];
    const float inverse_length = side == 0 ? scale / g.query_scale : scale;
    if (i < g.key_dim) g.dqkv[token * g.dqkv_stride + column] = from_float<T>(fmaf(-dot * inverse_length * inverse_length, x, d) * scale);
  }
  for (int h = i; h < g.group; h += static_cast<int>(blockDim.x)) {
    const int n = m * g.group + h;
    float dbeta = 0.0f, dlog = 0.0f, dskip = 0.0f;
    const int num_parts = g.is_state_space ? 3 : 2;
    for (int p = 0; p < g.num_tiles; ++p) {
      const float* part = g.gate_parts + (first_part + h * g.num_tiles + p) * num_parts;
      dbeta += part[0], dlog += part[1];
      if (g.is_state_space) dskip += part[2];
    }
    if (g.is_state_space) {
      g.gates.write_step(token, n, dbeta, dlog, dskip);
      continue;
    }
    const float beta = g.scales.beta_TN[token * N + n];
    g.gates.write(token, n, dbeta * (beta * (1.0f - beta)), dlog, g.gates.decay(token, n));
  }
}

/// One block per value head: sequence by sequence.
__global__ void __launch_bounds__(kSumBlock)
    rule_parameters_kernel(float* drate, float* dbias, float* dskip, const float* parts, const std::int32_t* start, int num_sequences) {
  __shared__ float scratch[kSumBlock / kWarp];
  const int n = static_cast<int>(blockIdx.x), N = static_cast<int>(gridDim.x);
  const int num_parts = dskip != nullptr ? 3 : 2;
  for (int which = 0; which < num_parts; ++which) {
    float total = 0.0f;
    for (int s = 0; s < num_sequences; ++s) {
      float sum = 0.0f;
      for (std::int64_t t = start[s] + static_cast<std::int64_t>(threadIdx.x); t < start[s + 1]; t += kSumBlock)
        sum += parts[(t * N + n) * num_parts + which];
      total += block_sum(sum, scratch);
    }
    if (threadIdx.x == 0) (which == 0 ? drate : which == 1 ? dbias : dskip)[n] += total;
  }
}

/// Sequences that are computed together, with places for the tokens of a window of each.
struct RuleGroup {
  std::int64_t first_sequence = 0, num_sequences = 0, num_places = 0, num_waves = 0;
};
struct RuleGroups {
  std::vector<RuleGroup> groups;
  std::vector<std::int32_t> places;  ///< of each sequence
  std::int64_t most_places = 0, most_sequences = 0;
  RuleGroups(const DeltaRule& in, const StateRows& rows) {
    const std::int64_t blocks = ceil_div(in.value_dim, kRuleCols) * in.num_value_heads;
    const std::int64_t places_wanted = std::max<std::int64_t>(1, kBlocksWanted / blocks) * kRuleWindow;
    constexpr std::int64_t kMostSequences = 256;  // each has two gradients of states in the workspace
    for (std::size_t s = 0; s + 1 < rows.start_S.size(); ++s) {
      const std::int64_t start = rows.start_S[s], end = rows.start_S[s + 1];
      const std::int64_t wanted = round_up(std::min(end - start, kRuleWindow), kPlaceStep);
      if (groups.empty() || groups.back().num_places + wanted > places_wanted || groups.back().num_sequences == kMostSequences)
        groups.push_back({.first_sequence = static_cast<std::int64_t>(s)});
      RuleGroup& group = groups.back();
      places.push_back(static_cast<std::int32_t>(group.num_places));
      group.num_places += wanted;
      ++group.num_sequences;
      if (end > start) group.num_waves = std::max(group.num_waves, (end - 1) / kRuleWindow - start / kRuleWindow + 1);
      most_places = std::max(most_places, group.num_places);
      most_sequences = std::max(most_sequences, group.num_sequences);
    }
  }
};

/// The workspace of a call.
struct RuleMemory {
  RuleScales scales;
  float *checkpoints, *states, *carried[2], *key_parts, *gate_parts, *parameter_parts;
  RuleMemory(Carver& c, const DeltaRule& in, const RuleGroups& groups) {
    const std::int64_t T = in.qkv_TC.shape[0], N = in.num_value_heads, K = in.key_dim, D = in.value_dim, tiles = ceil_div(D, kRuleCols);
    scales = take_rule_scales(c, in);
    checkpoints = c.take<float>(ceil_div(T, kRuleWindow) * N * K * D);
    with_rows(K, [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      states = c.take<float>(groups.most_places / kSubTokens<kRows> * N * tiles * kRows * kRuleThreads);
    });
    for (float*& p : carried) p = c.take<float>(groups.most_sequences * N * K * D);
    key_parts = c.take<float>(groups.most_places * N * tiles * 2 * K);
    gate_parts = c.take<float>(groups.most_places * N * tiles * num_rule_parameters(in));
    parameter_parts = c.take<float>(T * N * num_rule_parameters(in));
  }
};

template <typename T>
void launch_window(OpContext& ctx, const WindowArgs<T>& a, const DeltaRule& in, std::int64_t num_sequences) {
  const dim3 grid(static_cast<unsigned>(ceil_div(in.value_dim, kRuleCols)), static_cast<unsigned>(in.num_value_heads),
                  static_cast<unsigned>(num_sequences));
  with_rows(in.key_dim, [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    with_bool(in.is_state_space(), [&](auto is_space) {
      const auto kernel = rule_window_kernel<T, kRows, decltype(is_space)::value>;
      constexpr int kBytes = sizeof(WindowShared<kRows>);
      PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
      kernel<<<grid, kRuleThreads, kBytes, stream_of(ctx)>>>(a);
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void launch_sum(OpContext& ctx, const RuleMemory& memory, const DeltaRuleGrads& grads, const DeltaRule& in, const RuleWave& wave,
                std::int64_t num_sequences) {
  const SumArgs<T> a{.gates = rule_gate_grads<T>(grads, in, memory.parameter_parts),
                     .dqkv = grads.dqkv_TC.as<T>(),
                     .qkv = in.qkv_TC.as<T>(),
                     .scales = memory.scales,
                     .key_parts = memory.key_parts,
                     .gate_parts = memory.gate_parts,
                     .dqkv_stride = grads.dqkv_TC.row_stride,
                     .qkv_stride = in.qkv_TC.row_stride,
                     .wave = wave,
                     .num_key_heads = static_cast<int>(in.num_key_heads),
                     .group = static_cast<int>(in.num_value_heads / in.num_key_heads),
                     .key_dim = static_cast<int>(in.key_dim),
                     .num_tiles = static_cast<int>(ceil_div(in.value_dim, kRuleCols)),
                     .query_scale = 1.0f / std::sqrt(static_cast<float>(in.key_dim)),
                     .first_query = static_cast<int>(in.first_query()),
                     .first_key = static_cast<int>(in.first_key()),
                     .is_state_space = in.is_state_space()};
  const auto threads = static_cast<unsigned>(round_up(in.key_dim, kWarp));
  const dim3 grid(static_cast<unsigned>(kRuleWindow), static_cast<unsigned>(in.num_key_heads), static_cast<unsigned>(num_sequences));
  rule_sum_kernel<T><<<grid, threads, 0, stream_of(ctx)>>>(a);
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void add_rule_parameters(OpContext& ctx, const DeltaRuleGrads& grads, const float* parts, const StateRows& rows) {
  if (grads.ddecay_rate_N.data == nullptr) return;
  rule_parameters_kernel<<<static_cast<unsigned>(grads.ddecay_rate_N.shape[0]), kSumBlock, 0, stream_of(ctx)>>>(
      grads.ddecay_rate_N.as<float>(), grads.ddecay_bias_N.as<float>(), grads.dskip_N.as<float>(), parts, staged(ctx, rows.start_S),
      static_cast<int>(rows.start_S.size()) - 1);
  PRL_CUDA_CHECK(cudaGetLastError());
}

void delta_rule_backward(OpContext& ctx, const DeltaRuleGrads& grads, ConstTensorView dout_TV, const DeltaRule& in, const StateRows& rows) {
  if (is_in_chunks(in)) return delta_rule_backward_in_chunks(ctx, grads, dout_TV, in, rows);
  const RuleGroups groups(in, rows);
  Carver count(nullptr);
  RuleMemory(count, in, groups);
  Carver carve(ctx.workspace->require(count.used()));
  const RuleMemory memory(carve, in, groups);
  write_rule_scales(ctx, memory.scales, in);
  if (in.qkv_TC.shape[0] > kRuleWindow) write_rule_checkpoints(ctx, memory.checkpoints, memory.scales, in, rows);
  with_type(in.qkv_TC.dtype, [&](auto t) {
    using T = decltype(t);
    const RuleInputs<T> inputs = rule_inputs<T>(ctx, memory.scales, in, rows);
    const std::int32_t* const places = staged(ctx, std::span<const std::int32_t>(groups.places));
    for (const RuleGroup& group : groups.groups)
      for (std::int64_t w = 0; w < group.num_waves; ++w) {
        const RuleWave wave{inputs.start, places, static_cast<int>(group.first_sequence), static_cast<int>(w)};
        launch_window<T>(ctx,
                         {.in = inputs,
                          .dout = dout_TV.as<T>(),
                          .dqkv = grads.dqkv_TC.as<T>(),
                          .dout_stride = dout_TV.row_stride,
                          .dqkv_stride = grads.dqkv_TC.row_stride,
                          .checkpoints = memory.checkpoints,
                          .wave = wave,
                          .states = memory.states,
                          .carried_in = memory.carried[(w + 1) % 2],
                          .carried_out = memory.carried[w % 2],
                          .key_parts = memory.key_parts,
                          .gate_parts = memory.gate_parts},
                         in, group.num_sequences);
        launch_sum<T>(ctx, memory, grads, in, wave, group.num_sequences);
      }
  });
  add_rule_parameters(ctx, grads, memory.parameter_parts, rows);
}

}  // namespace prl::ops::cuda
