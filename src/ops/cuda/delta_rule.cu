#include "ops/cuda/delta_rule.cuh"

#include "ops/cuda/bodies.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kScaleWarps = 4;

template <typename T>
struct ScaleArgs {
  RuleScales out;
  const T* qkv;
  RuleGates<T> gates;
  std::int64_t qkv_stride, num_pairs;
  int num_key_heads, group, key_dim;
  bool in_chunks, is_state_space;
};

/// One warp per token and key head: the lengths of its query and key (1 where they are taken as they are), and the gates of its value
/// heads.
template <typename T>
__global__ void __launch_bounds__(kScaleWarps* kWarp) rule_scales_kernel(const ScaleArgs<T> g) {
  const std::int64_t pair = static_cast<std::int64_t>(blockIdx.x) * kScaleWarps + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (pair >= g.num_pairs) return;
  const std::int64_t t = pair / g.num_key_heads;
  const int m = static_cast<int>(pair % g.num_key_heads);
  if (g.is_state_space) {
    if (lane == 0) g.out.q_TM[pair] = g.out.k_TM[pair] = 1.0f;
    for (int i = lane; i < g.group; i += kWarp) {
      const int n = m * g.group + i;
      const std::int64_t at = t * g.num_key_heads * g.group + n;
      const float step = g.gates.step(t, n);
      g.out.gate_TN[at] = expf(-expf(g.gates.rate[n]) * step);
      g.out.beta_TN[at] = step;
    }
    return;
  }
  const T* const query = g.qkv + t * g.qkv_stride + m * g.key_dim;
  const float of_query = inverse_length(query, g.key_dim, lane, g.gates.query_scale),
              of_key = inverse_length(query + g.num_key_heads * g.key_dim, g.key_dim, lane, 1.0f);
  if (lane == 0) g.out.q_TM[pair] = of_query, g.out.k_TM[pair] = of_key;
  for (int i = lane; i < g.group; i += kWarp) {
    const int n = m * g.group + i;
    const std::int64_t at = t * g.num_key_heads * g.group + n;
    g.out.gate_TN[at] = g.in_chunks ? g.gates.chunk_decay(t, n) : expf(g.gates.log_decay(t, n));
    g.out.beta_TN[at] = g.gates.beta(t, n);
  }
}

template <typename T>
struct RuleArgs {
  RuleInputs<T> in;
  T* out;
  std::int64_t out_stride;
  float* states;  ///< [slots, N, K, D]
  const std::int32_t *slot, *begin;
  const std::int32_t* context_len;  ///< in place of `begin`: with the token here
  float* checkpoints;
};

/// kHasOut: outputs and states are wanted; else checkpoints are. kIsSpace: RuleKind::kStateSpace.
template <typename T, int kRows, bool kHasOut, bool kIsSpace>
__global__ void __launch_bounds__(kRuleThreads, 2) rule_kernel(const RuleArgs<T> a) {
  constexpr int kTokens = kRows > 32 ? 8 : 16;
  __shared__ __align__(16) RulePiece<kRows, kTokens> pieces[2];
  __shared__ float outs[2][kTokens][kRuleCols];
  const RuleThread me;
  const int s = static_cast<int>(blockIdx.z), n = static_cast<int>(blockIdx.y), first_col = static_cast<int>(blockIdx.x) * kRuleCols;
  const int K = a.in.key_dim, D = a.in.value_dim, N = a.in.num_value_heads, col = first_col + me.col;
  const std::int64_t begin = a.in.first_row(s), count = a.in.end_row(s) - begin, state_size = static_cast<std::int64_t>(K) * D;
  if (count == 0 || (kHasOut && a.slot != nullptr && a.slot[s] < 0)) return;
  float* const kept = !kHasOut || a.slot == nullptr ? nullptr : a.states + (static_cast<std::int64_t>(a.slot[s]) * N + n) * state_size;
  RuleReader<T, kRows, kTokens, false> next;
  next.read(a.in, nullptr, 0, n, first_col, begin, static_cast<int>(min(static_cast<std::int64_t>(kTokens), count)));
  float state[kRows] = {};
  if (kept != nullptr && (a.context_len != nullptr ? a.context_len[s] > 1 : a.begin[s] > 0)) load_column(state, kept, me, col, K, D);
  next.write(pieces[0]);
  __syncthreads();
  const float skip = kIsSpace ? a.in.skip[n] : 0.0f;
  for (std::int64_t done = 0; done < count; done += kTokens) {
    const int side = static_cast<int>(done / kTokens % 2), here = static_cast<int>(min(static_cast<std::int64_t>(kTokens), count - done));
    const auto& piece = pieces[side];
    if (done + kTokens < count)
      next.read(a.in, nullptr, 0, n, first_col, begin + done + kTokens,
                static_cast<int>(min(static_cast<std::int64_t>(kTokens), count - done - kTokens)));
#pragma unroll 1
    for (int t = 0; t < here; ++t) {
      if constexpr (!kHasOut)
        if (done + t > 0 && (begin + done + t) % kRuleWindow == 0)
          store_column(a.checkpoints + ((begin + done + t) / kRuleWindow * N + n) * state_size, state, me, col, K, D);
      if constexpr (kIsSpace) {
        shrink_column(state, piece.decay[t]);
        add_to_column(state, piece.k[t], me.part, piece.beta[t] * piece.v[t][me.col]);
      } else {
        const float r = decay_column(state, piece.k[t], me.part, piece.decay[t]);
        add_to_column(state, piece.k[t], me.part, piece.beta[t] * (piece.v[t][me.col] - r));
      }
      if constexpr (kHasOut) {
        const float o = column_dot(state, piece.q[t], me.part);
        if (me.part == 0) outs[side][t][me.col] = kIsSpace ? fmaf(skip, piece.v[t][me.col], o) : o;
      }
    }
    if (done + kTokens < count) next.write(pieces[1 - side]);
    __syncthreads();
    if constexpr (kHasOut) {
      for (int i = static_cast<int>(threadIdx.x); i < here * kRuleCols; i += kRuleThreads) {
        const int t = i / kRuleCols, c = first_col + i % kRuleCols;
        if (c < D) a.out[(begin + done + t) * a.out_stride + n * D + c] = from_float<T>(outs[side][t][i % kRuleCols]);
      }
    }
  }
  if (kept != nullptr) store_column(kept, state, me, col, K, D);
}

template <typename T>
void launch_rule(OpContext& ctx, const RuleArgs<T>& a, const DeltaRule& in, std::int64_t num_sequences) {
  const dim3 grid(static_cast<unsigned>(ceil_div(in.value_dim, kRuleCols)), static_cast<unsigned>(in.num_value_heads),
                  static_cast<unsigned>(num_sequences));
  with_rows(in.key_dim, [&](auto rows) {
    with_bool(a.out != nullptr, [&](auto has_out) {
      with_bool(in.is_state_space(), [&](auto is_space) {
        rule_kernel<T, decltype(rows)::value, decltype(has_out)::value, decltype(is_space)::value>
            <<<grid, kRuleThreads, 0, stream_of(ctx)>>>(a);
      });
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

std::int64_t num_rule_sequences(const StateRows& rows) {
  const std::int64_t count = rows.is_by_index() ? rows.slot_B.shape[0] : static_cast<std::int64_t>(rows.start_S.size()) - 1;
  if (count > 65535) fail(ErrorCode::kNotImplemented, "[delta_rule] {} sequences; the kernel takes up to 65535", count);
  return count;
}

}  // namespace

bool is_a_step(const StateRows& rows) {
  if (rows.is_by_index()) return true;
  for (std::size_t s = 0; s < rows.slot_S.size(); ++s)
    if (rows.start_S[s + 1] - rows.start_S[s] != 1) return false;
  return !rows.slot_S.empty();
}

RuleScales take_rule_scales(Carver& carve, const DeltaRule& in) {
  const std::int64_t T = in.qkv_TC.shape[0];
  RuleScales out;
  out.q_TM = carve.take<float>(T * in.num_key_heads);
  out.k_TM = carve.take<float>(T * in.num_key_heads);
  out.gate_TN = carve.take<float>(T * in.num_value_heads);
  out.beta_TN = carve.take<float>(T * in.num_value_heads);
  return out;
}

void write_rule_scales(OpContext& ctx, const RuleScales& scales, const DeltaRule& in) {
  with_type(in.qkv_TC.dtype, [&](auto t) {
    using T = decltype(t);
    const ScaleArgs<T> a{.out = scales,
                         .qkv = in.qkv_TC.as<T>(),
                         .gates = rule_gates<T>(in),
                         .qkv_stride = in.qkv_TC.row_stride,
                         .num_pairs = in.qkv_TC.shape[0] * in.num_key_heads,
                         .num_key_heads = static_cast<int>(in.num_key_heads),
                         .group = static_cast<int>(in.num_value_heads / in.num_key_heads),
                         .key_dim = static_cast<int>(in.key_dim),
                         .in_chunks = is_in_chunks(in),
                         .is_state_space = in.is_state_space()};
    rule_scales_kernel<T><<<static_cast<unsigned>(ceil_div(a.num_pairs, kScaleWarps)), kScaleWarps * kWarp, 0, stream_of(ctx)>>>(a);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void write_rule_checkpoints(OpContext& ctx, float* checkpoints, const RuleScales& scales, const DeltaRule& in, const StateRows& rows) {
  with_type(in.qkv_TC.dtype, [&](auto t) {
    using T = decltype(t);
    launch_rule<T>(ctx, {.in = rule_inputs<T>(ctx, scales, in, rows), .checkpoints = checkpoints}, in, num_rule_sequences(rows));
  });
}

void delta_rule(OpContext& ctx, TensorView out_TV, TensorView state_SF, const DeltaRule& in, const StateRows& rows) {
  if (is_in_chunks(in) && is_a_step(rows)) return delta_rule_step(ctx, out_TV, state_SF, in, rows);
  Carver count(nullptr);
  take_rule_scales(count, in);
  Carver carve(ctx.workspace->require(count.used()));
  const RuleScales scales = take_rule_scales(carve, in);
  write_rule_scales(ctx, scales, in);
  if (is_in_chunks(in)) return delta_rule_in_chunks(ctx, out_TV, state_SF, scales, in, rows);
  with_type(in.qkv_TC.dtype, [&](auto t) {
    using T = decltype(t);
    launch_rule<T>(ctx,
                   {.in = rule_inputs<T>(ctx, scales, in, rows),
                    .out = out_TV.as<T>(),
                    .out_stride = out_TV.row_stride,
                    .states = state_SF.as<float>(),
                    .slot = rows.is_by_index() ? rows.slot_B.as<std::int32_t>() : staged(ctx, rows.slot_S),
                    .begin = staged(ctx, rows.begin_S),
                    .context_len = rows.context_len_B.as<std::int32_t>()},
                   in, num_rule_sequences(rows));
  });
}

}  // namespace prl::ops::cuda
