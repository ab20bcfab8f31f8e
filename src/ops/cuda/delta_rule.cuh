#pragma once

#include "ops/cuda/delta_rule.hpp"
#include "ops/cuda/device.cuh"

// The gated delta rule and state spaces, token by token. A block has one sequence, one value head and kRuleCols columns of its state.
// Columns do not meet but in gradients of queries and keys. A thread holds kRows rows of one column in registers: rows lie in groups of
// four, and four neighbouring lanes, which share a column, take every fourth group each, so that their reads of a key are one line of
// shared memory. A sum over rows is that of a thread's four partial sums, then of the four lanes: one order, whatever the call.

namespace prl::ops::cuda {

constexpr int kRuleLanes = 4;  ///< of a column
constexpr int kRuleCols = 32;
constexpr int kRuleThreads = kRuleLanes * kRuleCols;
constexpr int kRuleWarps = kRuleThreads / kWarp;
constexpr int kColsOfWarp = kWarp / kRuleLanes;

/// ln(1 + e^x).
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/// Where the gates of value heads come from.
template <typename T>
struct RuleGates {
  const T *b, *a;
  const float *rate, *bias;
  std::int64_t b_stride, a_stride;
  float query_scale;  ///< 1 / sqrt(K)
  float min_step, max_step;
  __device__ float log_decay(std::int64_t t, int n) const { return -expf(rate[n]) * softplus(to_float(a[t * a_stride + n]) + bias[n]); }
  /// exp(-100) is 0 to whatever it is multiplied with; sums of such logarithms keep their digits.
  __device__ float chunk_decay(std::int64_t t, int n) const { return fmaxf(log_decay(t, n), -100.0f); }
  /// Of a state space.
  __device__ float step(std::int64_t t, int n) const {
    return fminf(max_step, fmaxf(min_step, softplus(to_float(a[t * a_stride + n]) + bias[n])));
  }
  __device__ float beta(std::int64_t t, int n) const { return 1.0f / (1.0f + expf(-to_float(b[t * b_stride + n]))); }
};
template <typename T>
RuleGates<T> rule_gates(const DeltaRule& in) {
  return {.b = in.b_TN.as<T>(),
          .a = in.a_TN.as<T>(),
          .rate = in.decay_rate_N.as<float>(),
          .bias = in.decay_bias_N.as<float>(),
          .b_stride = in.b_TN.row_stride,
          .a_stride = in.a_TN.row_stride,
          .query_scale = 1.0f / std::sqrt(static_cast<float>(in.key_dim)),
          .min_step = in.min_step,
          .max_step = in.max_step};
}

/// `scale` over the length of a vector. By all lanes of a warp.
template <typename T>
__device__ __forceinline__ float inverse_length(const T* v, int key_dim, int lane, float scale) {
  constexpr float kUnitEps = 1e-6f;
  float squares = 0.0f;
  for (int i = lane; i < key_dim; i += kWarp) squares = fmaf(to_float(v[i]), to_float(v[i]), squares);
  return scale / sqrtf(warp_sum(squares) + kUnitEps);
}

template <typename T>
struct RuleInputs {
  const T* qkv;
  std::int64_t qkv_stride;
  bool is_wide;  ///< eight elements of a query or key can be read at a time
  RuleScales scales;
  const std::int32_t* start;  ///< [S + 1]; nullptr: sequence s has row s alone
  int num_key_heads, num_value_heads, key_dim, value_dim;
  int first_query, first_key, first_value;  ///< columns
  const float* skip;                        ///< [N] of a state space
  __device__ std::int64_t first_row(int s) const { return start != nullptr ? start[s] : s; }
  __device__ std::int64_t end_row(int s) const { return start != nullptr ? start[s + 1] : s + 1; }
  __device__ int v_column(int n) const { return first_value + n * value_dim; }
};

/// Where a thread stands in its block.
struct RuleThread {
  int lane, warp, part, col;  ///< part: of the rows; col: within the block
  __device__ RuleThread()
      : lane(static_cast<int>(threadIdx.x) % kWarp),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        part(lane % kRuleLanes),
        col(warp * kColsOfWarp + lane / kRuleLanes) {}
  /// The row of a thread's i-th.
  __device__ int row(int i) const { return (i / 4 * kRuleLanes + part) * 4 + i % 4; }
};

/// Some tokens in shared memory; rows behind key_dim and tokens behind the last are 0.
template <int kRows, int kTokens>
struct RulePiece {
  float q[kTokens][kRuleLanes * kRows], k[kTokens][kRuleLanes * kRows];
  float v[kTokens][kRuleCols], dout[kTokens][kRuleCols];
  float decay[kTokens], beta[kTokens];
};

/// Tokens on their way from memory to a RulePiece, in registers meanwhile.
template <typename T, int kRows, int kTokens, bool kHasDout>
struct RuleReader {
  static constexpr int kKeys = kRuleLanes * kRows, kOfToken = kKeys / kVec, kOfSide = kTokens * kOfToken;
  static constexpr int kVectors = (2 * kOfSide + kRuleThreads - 1) / kRuleThreads;
  static constexpr int kValues = (kTokens * kRuleCols + kRuleThreads - 1) / kRuleThreads;
  Raw<T> keys[kVectors];
  float scale[kVectors], v[kValues], dout[kHasDout ? kValues : 1], gate;

  /// Asks for `count` tokens from `first` on.
  __device__ __forceinline__ void read(const RuleInputs<T>& in, const T* douts, std::int64_t dout_stride, int n, int first_col,
                                       std::int64_t first, int count) {
    const int m = n / (in.num_value_heads / in.num_key_heads), id = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = id + i * kRuleThreads, side = at / kOfSide, t = at % kOfSide / kOfToken, c = at % kOfToken * kVec;
      scale[i] = 0.0f;
#pragma unroll
      for (std::uint32_t& word : keys[i].words) word = 0;
      if (side > 1 || t >= count || c >= in.key_dim) continue;
      const T* from = in.qkv + (first + t) * in.qkv_stride + (side == 0 ? in.first_query : in.first_key) + m * in.key_dim + c;
      if (in.is_wide) {
        keys[i].read(from);
      } else {
        float values[kVec];
        load<false>(values, from, kVec);
        keys[i].pack(values);
      }
      scale[i] = (side == 0 ? in.scales.q_TM : in.scales.k_TM)[(first + t) * in.num_key_heads + m];
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int at = id + i * kRuleThreads, t = at / kRuleCols, c = first_col + at % kRuleCols;
      const bool is_there = t < count && c < in.value_dim;
      v[i] = is_there ? to_float(in.qkv[(first + t) * in.qkv_stride + in.v_column(n) + c]) : 0.0f;
      if constexpr (kHasDout) dout[i] = is_there ? to_float(douts[(first + t) * dout_stride + n * in.value_dim + c]) : 0.0f;
    }
    gate = 0.0f;
    if (id < 2 * kTokens && id % kTokens < count)
      gate = (id < kTokens ? in.scales.gate_TN : in.scales.beta_TN)[(first + id % kTokens) * in.num_value_heads + n];
  }
  __device__ __forceinline__ void write(RulePiece<kRows, kTokens>& to) const {
    const int id = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = id + i * kRuleThreads, side = at / kOfSide, t = at % kOfSide / kOfToken, c = at % kOfToken * kVec;
      if (side > 1) continue;
      float* row = (side == 0 ? to.q[t] : to.k[t]) + c;
#pragma unroll
      for (int e = 0; e < kVec; e += 4)
        *reinterpret_cast<float4*>(row + e) =
            make_float4(keys[i][e] * scale[i], keys[i][e + 1] * scale[i], keys[i][e + 2] * scale[i], keys[i][e + 3] * scale[i]);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int at = id + i * kRuleThreads, t = at / kRuleCols, c = at % kRuleCols;
      if (t >= kTokens) continue;
      to.v[t][c] = v[i];
      if constexpr (kHasDout) to.dout[t][c] = dout[i];
    }
    if (id < 2 * kTokens) (id < kTokens ? to.decay : to.beta)[id % kTokens] = gate;
  }
};

/// The sum of a column from its four lanes' partial sums, the same in each of them.
__device__ __forceinline__ float column_sum(const float (&v)[4]) { return warp_sum<kRuleLanes>(pair_sum(v)); }

/// s = decay * s; the sum over rows of key * s.
template <int kRows>
__device__ __forceinline__ float decay_column(float (&s)[kRows], const float* key, int part, float decay) {
  float r[4] = {};
#pragma unroll
  for (int i = 0; i < kRows; i += 4) {
    const float4 k = *reinterpret_cast<const float4*>(key + i * kRuleLanes + 4 * part);
    s[i] *= decay, s[i + 1] *= decay, s[i + 2] *= decay, s[i + 3] *= decay;
    r[0] = fmaf(k.x, s[i], r[0]), r[1] = fmaf(k.y, s[i + 1], r[1]), r[2] = fmaf(k.z, s[i + 2], r[2]), r[3] = fmaf(k.w, s[i + 3], r[3]);
  }
  return column_sum(r);
}
/// s = decay * s.
template <int kRows>
__device__ __forceinline__ void shrink_column(float (&s)[kRows], float decay) {
#pragma unroll
  for (float& v : s) v *= decay;
}
/// s += key * d.
template <int kRows>
__device__ __forceinline__ void add_to_column(float (&s)[kRows], const float* key, int part, float d) {
#pragma unroll
  for (int i = 0; i < kRows; i += 4) {
    const float4 k = *reinterpret_cast<const float4*>(key + i * kRuleLanes + 4 * part);
    s[i] = fmaf(k.x, d, s[i]), s[i + 1] = fmaf(k.y, d, s[i + 1]), s[i + 2] = fmaf(k.z, d, s[i + 2]), s[i + 3] = fmaf(k.w, d, s[i + 3]);
  }
}

/// The sum over rows of query * s.
template <int kRows>
__device__ __forceinline__ float column_dot(const float (&s)[kRows], const float* query, int part) {
  float o[4] = {};
#pragma unroll
  for (int i = 0; i < kRows; i += 4) {
    const float4 q = *reinterpret_cast<const float4*>(query + i * kRuleLanes + 4 * part);
    o[0] = fmaf(q.x, s[i], o[0]), o[1] = fmaf(q.y, s[i + 1], o[1]), o[2] = fmaf(q.z, s[i + 2], o[2]), o[3] = fmaf(q.w, s[i + 3], o[3]);
  }
  return column_sum(o);
}

/// A column of a state [K, D] in memory.
template <int kRows>
__device__ __forceinline__ void load_column(float (&s)[kRows], const float* state, const RuleThread& me, int col, int K, int D) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) s[i] = me.row(i) < K && col < D ? state[me.row(i) * D + col] : 0.0f;
}
template <int kRows>
__device__ __forceinline__ void store_column(float* state, const float (&s)[kRows], const RuleThread& me, int col, int K, int D) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (me.row(i) < K && col < D) state[me.row(i) * D + col] = s[i];
}

/// body(std::integral_constant) of the rows of a thread, for keys of up to four times as many elements.
template <typename Body>
void with_rows(std::int64_t key_dim, Body&& body) {
  if (key_dim <= 32)
    body(std::integral_constant<int, 8>{});
  else if (key_dim <= 64)
    body(std::integral_constant<int, 16>{});
  else if (key_dim <= 128)
    body(std::integral_constant<int, 32>{});
  else
    body(std::integral_constant<int, 64>{});
}

/// Where the gradients of a token's gates go.
template <typename T>
struct RuleGateGrads {
  T *db, *da;
  std::int64_t db_stride, da_stride;
  const T* a;
  std::int64_t a_stride;
  const float *rate, *bias;
  float* parameter_parts;  ///< for add_rule_parameters()
  int num_value_heads;
  float min_step, max_step;
  /// What the gradient of a decay needs of its token.
  struct Decay {
    float x, slope;
  };
  __device__ __forceinline__ Decay decay(std::int64_t token, int n) const {
    return {to_float(a[token * a_stride + n]) + bias[n], -expf(rate[n])};
  }
  /// of_b: the gradient of the argument of beta's sigmoid; dlog: that of the logarithm of the decay.
  __device__ __forceinline__ void write(std::int64_t token, int n, float of_b, float dlog, const Decay& of) const {
    const float dx = dlog * of.slope * (1.0f / (1.0f + expf(-of.x)));
    db[token * db_stride + n] = from_float<T>(of_b);
    da[token * da_stride + n] = from_float<T>(dx);
    float* const parts = parameter_parts + (token * num_value_heads + n) * 2;
    parts[0] = dlog * of.slope * softplus(of.x);
    parts[1] = dx;
  }
  /// Of a state space: gradients of the step as a factor, of the logarithm of the decay and of the skip.
  __device__ __forceinline__ void write_step(std::int64_t token, int n, float of_step, float dlog, float dskip) const {
    const Decay of = decay(token, n);
    const float free = softplus(of.x), step = fminf(max_step, fmaxf(min_step, free));
    const float dx = free > min_step && free < max_step ? fmaf(dlog, of.slope, of_step) * (1.0f / (1.0f + expf(-of.x))) : 0.0f;
    da[token * da_stride + n] = from_float<T>(dx);
    float* const parts = parameter_parts + (token * num_value_heads + n) * 3;
    parts[0] = dlog * (of.slope * step);
    parts[1] = dx;
    parts[2] = dskip;
  }
};
template <typename T>
RuleGateGrads<T> rule_gate_grads(const DeltaRuleGrads& grads, const DeltaRule& in, float* parameter_parts) {
  return {.db = grads.db_TN.as<T>(),
          .da = grads.da_TN.as<T>(),
          .db_stride = grads.db_TN.row_stride,
          .da_stride = grads.da_TN.row_stride,
          .a = in.a_TN.as<T>(),
          .a_stride = in.a_TN.row_stride,
          .rate = in.decay_rate_N.as<float>(),
          .bias = in.decay_bias_N.as<float>(),
          .parameter_parts = parameter_parts,
          .num_value_heads = static_cast<int>(in.num_value_heads),
          .min_step = in.min_step,
          .max_step = in.max_step};
}

template <typename T>
RuleInputs<T> rule_inputs(const OpContext& ctx, const RuleScales& scales, const DeltaRule& in, const StateRows& rows) {
  return {.qkv = in.qkv_TC.as<T>(),
          .qkv_stride = in.qkv_TC.row_stride,
          .is_wide = is_wide(in.qkv_TC),
          .scales = scales,
          .start = rows.is_by_index() ? nullptr : staged(ctx, rows.start_S),
          .num_key_heads = static_cast<int>(in.num_key_heads),
          .num_value_heads = static_cast<int>(in.num_value_heads),
          .key_dim = static_cast<int>(in.key_dim),
          .value_dim = static_cast<int>(in.value_dim),
          .first_query = static_cast<int>(in.first_query()),
          .first_key = static_cast<int>(in.first_key()),
          .first_value = static_cast<int>(in.first_value()),
          .skip = in.skip_N.as<float>()};
}

}  // namespace prl::ops::cuda
