#include "ops/delta_rule.hpp"

#include <algorithm>
#include <cmath>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/row_access.hpp"
#include "ops/cpu/table.hpp"

namespace prl::ops::cpu {
namespace {

/// Tokens between two visits of a tile of states, which is then in the nearest cache.
constexpr std::int64_t kDeltaPiece = 64;
/// From so many tokens on a state is worth a copy whose tiles lie together.
constexpr std::int64_t kCopiedFrom = 8;
/// Rows of a partial sum of a gradient of weights; part of the order of summation.
constexpr std::int64_t kGateNormRows = 128;

std::int64_t bytes_of_type(DType t) { return static_cast<std::int64_t>(size_of(t)); }
std::int64_t rounded_floats(std::int64_t n) { return ceil_div(n, 16) * 16; }

/// Pieces of the workspace. Without memory it counts.
class FloatCarver {
 public:
  explicit FloatCarver(void* memory) : memory_(static_cast<float*>(memory)) {}
  float* take(std::int64_t count) {
    float* p = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += rounded_floats(count);
    return p;
  }
  std::size_t num_bytes() const { return static_cast<std::size_t>(used_) * sizeof(float); }

 private:
  float* memory_;
  std::int64_t used_ = 0;
};

struct SequenceRows {
  std::int64_t begin, count;
};
SequenceRows rows_of_sequence(const StateRows& rows, std::int64_t s) {
  const auto i = static_cast<std::size_t>(s);
  return {rows.start_S[i], rows.start_S[i + 1] - rows.start_S[i]};
}
std::int64_t num_sequences(const StateRows& rows) { return static_cast<std::int64_t>(rows.start_S.size()) - 1; }

/// weight_CW as [W, stride].
struct TapRows {
  float* data;
  std::int64_t stride;
};
void write_tap_rows(TapRows to, const ConstTensorView& weight_CW) {
  const std::int64_t C = weight_CW.shape[0], W = weight_CW.shape[1];
  for (std::int64_t c = 0; c < C; ++c)
    for (std::int64_t w = 0; w < W; ++w) to.data[w * to.stride + c] = weight_CW.as<float>()[c * W + w];
}

/// Input `i` of a sequence, counted from its first row here: one of these rows, or of its state; nullptr before the sequence.
const char* conv_input(const ConstTensorView& x, const ConstTensorView& state, const StateRows& rows, std::int64_t s, std::int64_t i) {
  const SequenceRows r = rows_of_sequence(rows, s);
  if (i >= 0) return row_bytes(x, r.begin + i);
  const auto at = static_cast<std::size_t>(s);
  if (rows.slot_S.empty() || rows.begin_S[at] == 0) return nullptr;
  const std::int64_t num_kept = state.shape[1];
  return row_bytes(state, rows.slot_S[at] * num_kept + num_kept + i);
}

void keep_inputs(const TensorView& state, const ConstTensorView& x, const StateRows& rows, std::int64_t s) {
  const std::int64_t num_kept = state.shape[1], count = rows_of_sequence(rows, s).count;
  if (count == 0) return;
  const auto bytes = static_cast<std::size_t>(x.shape.num_cols() * bytes_of_type(x.dtype));
  // Oldest first: an input that moves on within the state moves to a place that has been read.
  for (std::int64_t i = 0; i < num_kept; ++i) {
    char* to = row_bytes(state, rows.slot_S[static_cast<std::size_t>(s)] * num_kept + i);
    if (const char* from = conv_input(x, state, rows, s, count - num_kept + i); from != nullptr)
      __builtin_memcpy(to, from, bytes);
    else
      __builtin_memset(to, 0, bytes);
  }
}

}  // namespace

void causal_conv(OpContext& ctx, TensorView y_TC, ConstTensorView x_TC, ConstTensorView weight_CW, TensorView state_SWC,
                 const StateRows& rows, ConstTensorView bias_C) {
  const std::int64_t T = x_TC.shape[0], C = x_TC.shape[1], W = weight_CW.shape[1], stride = rounded_floats(C);
  const TapRows taps{static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(W * stride) * sizeof(float))), stride};
  write_tap_rows(taps, weight_CW);
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, T, 8 * C, [&](std::int64_t begin, std::int64_t end) {
    auto s = std::ranges::upper_bound(rows.start_S, static_cast<std::int32_t>(begin)) - rows.start_S.begin() - 1;
    for (std::int64_t t = begin; t < end; ++t) {
      while (t >= rows.start_S[static_cast<std::size_t>(s) + 1]) ++s;
      const void* inputs[kMaxConvTaps];
      for (std::int64_t w = 0; w < W; ++w)
        inputs[w] = conv_input(x_TC, state_SWC, rows, s, t - rows.start_S[static_cast<std::size_t>(s)] - (W - 1) + w);
      k.conv_row(row_bytes(y_TC, t), inputs, taps.data, stride, static_cast<int>(W), bias_C.as<float>(), C, x_TC.dtype);
    }
  });
  if (!rows.slot_S.empty()) parallel(ctx, num_sequences(rows), [&](std::int64_t s) { keep_inputs(state_SWC, x_TC, rows, s); });
}

void causal_conv_backward(OpContext& ctx, TensorView dx_TC, TensorView dweight_CW, ConstTensorView dy_TC, ConstTensorView x_TC,
                          ConstTensorView weight_CW, const StateRows& rows, ConstTensorView bias_C, TensorView dbias_C) {
  const std::int64_t C = x_TC.shape[1], W = weight_CW.shape[1], stride = rounded_floats(C);
  FloatCarver count(nullptr);
  count.take(W * stride), count.take(W * stride), count.take(stride);
  FloatCarver carve(ctx.workspace->require(count.num_bytes()));
  const TapRows taps{carve.take(W * stride), stride}, sums{carve.take(W * stride), stride};
  float* const bias_sums = carve.take(stride);
  write_tap_rows(taps, weight_CW);
  const Kernels& k = kernels(ctx);
  // A task owns columns, so that sequences are added in order.
  parallel(ctx, ceil_div(C, kConvCols), [&](std::int64_t i) {
    const std::int64_t col = i * kConvCols, cols = std::min<std::int64_t>(kConvCols, C - col);
    for (std::int64_t w = 0; w < W; ++w) std::fill_n(sums.data + w * stride + col, cols, 0.0f);
    std::fill_n(bias_sums + col, cols, 0.0f);
    for (std::int64_t s = 0; s < num_sequences(rows); ++s) {
      const SequenceRows r = rows_of_sequence(rows, s);
      k.conv_backward({.dx = row_bytes(dx_TC, r.begin, col),
                       .dy = row_bytes(dy_TC, r.begin, col),
                       .x = row_bytes(x_TC, r.begin, col),
                       .dx_stride = dx_TC.row_stride,
                       .dy_stride = dy_TC.row_stride,
                       .x_stride = x_TC.row_stride,
                       .weight_stride = stride,
                       .weight = taps.data + col,
                       .dweight = sums.data + col,
                       .bias = bias_C.data != nullptr ? bias_C.as<float>() + col : nullptr,
                       .dbias = bias_sums + col,
                       .num_tokens = r.count,
                       .num_cols = cols,
                       .num_taps = static_cast<int>(W),
                       .dtype = x_TC.dtype});
    }
    for (std::int64_t c = col; c < col + cols; ++c) {
      for (std::int64_t w = 0; w < W; ++w) dweight_CW.as<float>()[c * W + w] += sums.data[w * stride + c];
      if (bias_C.data != nullptr) dbias_C.as<float>()[c] += bias_sums[c];
    }
  });
}

namespace {

/// Sizes of a call, and where its heads lie in a row.
struct RuleSizes {
  std::int64_t T, S, M, N, K, D, group, first_query, first_key, first_value;
  RuleSizes(const DeltaRule& in, const StateRows& rows)
      : T(in.qkv_TC.shape[0]),
        S(num_sequences(rows)),
        M(in.num_key_heads),
        N(in.num_value_heads),
        K(in.key_dim),
        D(in.value_dim),
        group(N / M),
        first_query(in.first_query()),
        first_key(in.first_key()),
        first_value(in.first_value()) {}
  std::int64_t q_col(std::int64_t m) const { return first_query + m * K; }
  std::int64_t k_col(std::int64_t m) const { return first_key + m * K; }
  std::int64_t v_col(std::int64_t n) const { return first_value + n * D; }
  std::int64_t state_size() const { return K * D; }
  float query_scale() const { return 1.0f / std::sqrt(static_cast<float>(K)); }
};

struct GateRows {
  float *decay_TN, *beta_TN;
};
void write_gates(OpContext& ctx, const DeltaRule& in, const RuleSizes& z, GateRows gates) {
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, z.T, 32 * z.N, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      if (in.is_state_space())
        k.state_gates(gates.decay_TN + t * z.N, gates.beta_TN + t * z.N, row_bytes(in.a_TN, t), in.decay_rate_N.as<float>(),
                      in.decay_bias_N.as<float>(), {in.min_step, in.max_step}, z.N, in.a_TN.dtype);
      else
        k.delta_gates(gates.decay_TN + t * z.N, gates.beta_TN + t * z.N, row_bytes(in.a_TN, t), row_bytes(in.b_TN, t),
                      in.decay_rate_N.as<float>(), in.decay_bias_N.as<float>(), z.N, in.a_TN.dtype);
  });
}

/// Queries and keys of a key head and `count` tokens, scaled.
void write_units(const Kernels& kernels, const DeltaRule& in, const RuleSizes& z, std::int64_t m, std::int64_t first, std::int64_t count,
                 float* q, float* k) {
  for (std::int64_t t = 0; t < count; ++t) {
    if (in.is_state_space()) {
      kernels.cast(q + t * z.K, DType::kF32, row_bytes(in.qkv_TC, first + t, z.q_col(m)), in.qkv_TC.dtype, z.K);
      kernels.cast(k + t * z.K, DType::kF32, row_bytes(in.qkv_TC, first + t, z.k_col(m)), in.qkv_TC.dtype, z.K);
      continue;
    }
    kernels.unit_row(q + t * z.K, row_bytes(in.qkv_TC, first + t, z.q_col(m)), z.query_scale(), z.K, in.qkv_TC.dtype);
    kernels.unit_row(k + t * z.K, row_bytes(in.qkv_TC, first + t, z.k_col(m)), 1.0f, z.K, in.qkv_TC.dtype);
  }
}

/// body(first column, columns) of each tile of a state.
template <typename Body>
void for_each_tile(const Kernels& kernels, std::int64_t D, const Body& body) {
  for (std::int64_t col = 0; col < D; col += kernels.delta_cols) body(col, std::min<std::int64_t>(kernels.delta_cols, D - col));
}

/// States whose tiles lie together: tile `col` is [K, its columns] from K * col on.
void load_state(const Kernels& kernels, float* tiles, const float* state, std::int64_t K, std::int64_t D) {
  for_each_tile(kernels, D, [&](std::int64_t col, std::int64_t cols) {
    for (std::int64_t i = 0; i < K; ++i) std::copy_n(state + i * D + col, cols, tiles + K * col + i * cols);
  });
}
void store_state(const Kernels& kernels, float* state, const float* tiles, std::int64_t K, std::int64_t D) {
  for_each_tile(kernels, D, [&](std::int64_t col, std::int64_t cols) {
    for (std::int64_t i = 0; i < K; ++i) std::copy_n(tiles + K * col + i * cols, cols, state + i * D + col);
  });
}

/// What the kernels need to know of `count` tokens from `first` on, of value head n, but for columns and state.
DeltaTile tile_of(const DeltaRule& in, const RuleSizes& z, const GateRows& gates, std::int64_t n, std::int64_t first, std::int64_t count,
                  const float* q, const float* k) {
  return {.num_tokens = count,
          .key_dim = static_cast<int>(z.K),
          .q = q,
          .k = k,
          .decay = gates.decay_TN + first * z.N + n,
          .beta = gates.beta_TN + first * z.N + n,
          .gate_stride = z.N,
          .v = row_bytes(in.qkv_TC, first, z.v_col(n)),
          .v_stride = in.qkv_TC.row_stride,
          .dtype = in.qkv_TC.dtype,
          .is_state_space = in.is_state_space(),
          .skip = in.is_state_space() ? in.skip_N.as<float>()[n] : 0.0f};
}
DeltaTile columns_of(DeltaTile a, std::int64_t col, std::int64_t cols, float* state, std::int64_t state_stride) {
  a.num_cols = static_cast<int>(cols);
  a.v = static_cast<const char*>(a.v) + col * bytes_of_type(a.dtype);
  if (a.out != nullptr) a.out = static_cast<char*>(a.out) + col * bytes_of_type(a.dtype);
  a.state = state;
  a.state_stride = state_stride;
  return a;
}

/// Memory of one task of delta_rule(): a sequence and a key head.
struct RuleScratch {
  float *q, *k, *states;
  RuleScratch(FloatCarver& c, const RuleSizes& z)
      : q(c.take(kDeltaPiece * z.K)), k(c.take(kDeltaPiece * z.K)), states(c.take(z.group * z.state_size())) {}
};

void run_rule(OpContext& ctx, const TensorView& out, const TensorView& state, const DeltaRule& in, const StateRows& rows,
              const RuleSizes& z, const GateRows& gates, std::int64_t s, std::int64_t m, const RuleScratch& scratch) {
  const Kernels& k = kernels(ctx);
  const SequenceRows r = rows_of_sequence(rows, s);
  if (r.count == 0) return;
  const bool has_slot = !rows.slot_S.empty();
  const bool has_state = has_slot && rows.begin_S[static_cast<std::size_t>(s)] > 0, is_copied = !has_slot || r.count >= kCopiedFrom;
  float* kept = has_slot ? state.as<float>() + (rows.slot_S[static_cast<std::size_t>(s)] * z.N + m * z.group) * z.state_size() : nullptr;
  float* states = is_copied ? scratch.states : kept;
  if (!has_state)
    std::fill_n(states, z.group * z.state_size(), 0.0f);
  else if (is_copied)
    for (std::int64_t g = 0; g < z.group; ++g) load_state(k, states + g * z.state_size(), kept + g * z.state_size(), z.K, z.D);
  for (std::int64_t done = 0; done < r.count; done += kDeltaPiece) {
    const std::int64_t first = r.begin + done, count = std::min(kDeltaPiece, r.count - done);
    write_units(k, in, z, m, first, count, scratch.q, scratch.k);
    for (std::int64_t g = 0; g < z.group; ++g) {
      DeltaTile a = tile_of(in, z, gates, m * z.group + g, first, count, scratch.q, scratch.k);
      a.out = row_bytes(out, first, (m * z.group + g) * z.D);
      a.out_stride = out.row_stride;
      float* own = states + g * z.state_size();
      for_each_tile(k, z.D, [&](std::int64_t col, std::int64_t cols) {
        k.delta_rule(is_copied ? columns_of(a, col, cols, own + z.K * col, cols) : columns_of(a, col, cols, own + col, z.D));
      });
    }
  }
  if (has_slot && is_copied)
    for (std::int64_t g = 0; g < z.group; ++g) store_state(k, kept + g * z.state_size(), states + g * z.state_size(), z.K, z.D);
}

/// Tokens whose states the backward pass keeps at a time, and between two of the states that it keeps of the whole sequence.
std::int64_t backward_piece(std::int64_t num_tokens) {
  std::int64_t n = 32;
  while (n * n < num_tokens) n += 16;
  return n;
}

/// Memory of one task of delta_rule_backward(), for sequences of up to `longest` tokens.
struct RuleBackwardScratch {
  float *q, *k, *dq, *dk, *starts, *dstates, *states, *deltas;
  RuleBackwardScratch(FloatCarver& c, const Kernels& kernels, const RuleSizes& z, std::int64_t longest) {
    const std::int64_t piece = backward_piece(longest), cols = std::min<std::int64_t>(kernels.delta_cols, z.D);
    for (float** p : {&q, &k, &dq, &dk}) *p = c.take(piece * z.K);
    starts = c.take(ceil_div(longest, piece) * z.group * z.state_size());
    dstates = c.take(z.group * z.state_size());
    states = c.take(piece * z.K * cols);
    deltas = c.take(piece * 2 * cols);
  }
};

struct GateGradRows {
  float *dbeta_TN, *dlog_decay_TN, *dskip_TN;  ///< dskip_TN: of a state space
};

/// One piece of one key head's heads: gradients of values, and += those of its scaled queries and keys and of the gates.
void run_piece_backward(const Kernels& k, const TensorView& dqkv, const ConstTensorView& dout, const DeltaRule& in, const RuleSizes& z,
                        const GateRows& gates, const GateGradRows& dgates, std::int64_t m, std::int64_t first, std::int64_t count,
                        float* starts, const RuleBackwardScratch& scratch) {
  for (std::int64_t g = 0; g < z.group; ++g) {
    const std::int64_t n = m * z.group + g;
    const DeltaTile a = tile_of(in, z, gates, n, first, count, scratch.q, scratch.k);
    for_each_tile(k, z.D, [&](std::int64_t col, std::int64_t cols) {
      const std::int64_t at = g * z.state_size() + z.K * col;
      k.delta_rule_backward({.forward = columns_of(a, col, cols, starts + at, cols),
                             .dout = row_bytes(dout, first, n * z.D + col),
                             .dv = row_bytes(dqkv, first, z.v_col(n) + col),
                             .dout_stride = dout.row_stride,
                             .dv_stride = dqkv.row_stride,
                             .dstate = scratch.dstates + at,
                             .dq = scratch.dq,
                             .dk = scratch.dk,
                             .dbeta = dgates.dbeta_TN + first * z.N + n,
                             .dlog_decay = dgates.dlog_decay_TN + first * z.N + n,
                             .dskip = dgates.dskip_TN + first * z.N + n,
                             .states = scratch.states,
                             .deltas = scratch.deltas});
    });
  }
}

void run_rule_backward(OpContext& ctx, const DeltaRuleGrads& grads, const ConstTensorView& dout, const DeltaRule& in, const StateRows& rows,
                       const RuleSizes& z, const GateRows& gates, const GateGradRows& dgates, std::int64_t s, std::int64_t m,
                       const RuleBackwardScratch& scratch) {
  const Kernels& k = kernels(ctx);
  const SequenceRows r = rows_of_sequence(rows, s);
  if (r.count == 0) return;
  const std::int64_t piece = backward_piece(r.count), num_pieces = ceil_div(r.count, piece), size = z.group * z.state_size();
  std::fill_n(scratch.starts, size, 0.0f);
  std::fill_n(scratch.dstates, size, 0.0f);
  for (std::int64_t p = 0; p + 1 < num_pieces; ++p) {
    write_units(k, in, z, m, r.begin + p * piece, piece, scratch.q, scratch.k);
    float* state = scratch.starts + (p + 1) * size;
    std::copy_n(scratch.starts + p * size, size, state);
    for (std::int64_t g = 0; g < z.group; ++g) {
      const DeltaTile a = tile_of(in, z, gates, m * z.group + g, r.begin + p * piece, piece, scratch.q, scratch.k);
      for_each_tile(k, z.D, [&](std::int64_t col, std::int64_t cols) {
        k.delta_rule(columns_of(a, col, cols, state + g * z.state_size() + z.K * col, cols));
      });
    }
  }
  for (std::int64_t p = num_pieces - 1; p >= 0; --p) {
    const std::int64_t first = r.begin + p * piece, count = std::min(piece, r.count - p * piece);
    write_units(k, in, z, m, first, count, scratch.q, scratch.k);
    std::fill_n(scratch.dq, count * z.K, 0.0f);
    std::fill_n(scratch.dk, count * z.K, 0.0f);
    run_piece_backward(k, grads.dqkv_TC, dout, in, z, gates, dgates, m, first, count, scratch.starts + p * size, scratch);
    for (std::int64_t t = 0; t < count; ++t) {
      if (in.is_state_space()) {
        k.cast(row_bytes(grads.dqkv_TC, first + t, z.q_col(m)), in.qkv_TC.dtype, scratch.dq + t * z.K, DType::kF32, z.K);
        k.cast(row_bytes(grads.dqkv_TC, first + t, z.k_col(m)), in.qkv_TC.dtype, scratch.dk + t * z.K, DType::kF32, z.K);
        continue;
      }
      k.unit_row_backward(row_bytes(grads.dqkv_TC, first + t, z.q_col(m)), row_bytes(in.qkv_TC, first + t, z.q_col(m)),
                          scratch.dq + t * z.K, z.query_scale(), z.K, in.qkv_TC.dtype);
      k.unit_row_backward(row_bytes(grads.dqkv_TC, first + t, z.k_col(m)), row_bytes(in.qkv_TC, first + t, z.k_col(m)),
                          scratch.dk + t * z.K, 1.0f, z.K, in.qkv_TC.dtype);
    }
  }
}

/// Numbers of each value head that are parameters.
constexpr std::int64_t kRuleParameters = 3;

/// From the gradients of beta and of the logarithm of the decay to those of b and a, and the sums over a sequence of those of the
/// parameters.
void run_gates_backward(OpContext& ctx, const DeltaRuleGrads& grads, const DeltaRule& in, const StateRows& rows, const RuleSizes& z,
                        const GateGradRows& dgates, float* sums_S3N) {
  const Kernels& k = kernels(ctx);
  parallel(ctx, z.S, [&](std::int64_t s) {
    float* sums = sums_S3N + s * kRuleParameters * z.N;
    std::fill_n(sums, kRuleParameters * z.N, 0.0f);
    const SequenceRows r = rows_of_sequence(rows, s);
    for (std::int64_t t = r.begin; t < r.begin + r.count; ++t) {
      DeltaGatesGrad of_token{.da = row_bytes(grads.da_TN, t),
                              .drate = sums,
                              .dbias = sums + z.N,
                              .dbeta = dgates.dbeta_TN + t * z.N,
                              .dlog_decay = dgates.dlog_decay_TN + t * z.N,
                              .a = row_bytes(in.a_TN, t),
                              .rate = in.decay_rate_N.as<float>(),
                              .bias = in.decay_bias_N.as<float>()};
      if (in.is_state_space()) {
        k.state_gates_backward(of_token, {in.min_step, in.max_step}, z.N, in.a_TN.dtype);
        k.accumulate(sums + 2 * z.N, dgates.dskip_TN + t * z.N, z.N, DType::kF32);
        continue;
      }
      of_token.db = row_bytes(grads.db_TN, t);
      of_token.b = row_bytes(in.b_TN, t);
      k.delta_gates_backward(of_token, z.N, in.a_TN.dtype);
    }
  });
  if (grads.ddecay_rate_N.data == nullptr) return;
  for (std::int64_t s = 0; s < z.S; ++s)
    for (std::int64_t n = 0; n < z.N; ++n) {
      const float* const sums = sums_S3N + s * kRuleParameters * z.N + n;
      grads.ddecay_rate_N.as<float>()[n] += sums[0];
      grads.ddecay_bias_N.as<float>()[n] += sums[z.N];
      if (in.is_state_space()) grads.dskip_N.as<float>()[n] += sums[2 * z.N];
    }
}

/// Memory of tasks that run at the same time, one after the other.
template <typename Scratch>
class ScratchSlots {
 public:
  template <typename Make>
  ScratchSlots(FloatCarver& carve, std::int64_t count, const Make& make) {
    FloatCarver one(nullptr);
    make(one);
    slot_floats_ = static_cast<std::int64_t>(one.num_bytes() / sizeof(float));
    memory_ = carve.take(count * slot_floats_);
  }
  float* at(std::int64_t slot) const { return memory_ + slot * slot_floats_; }

 private:
  std::int64_t slot_floats_;
  float* memory_;
};

}  // namespace

void delta_rule(OpContext& ctx, TensorView out_TV, TensorView state_SF, const DeltaRule& in, const StateRows& rows) {
  const RuleSizes z(in, rows);
  const std::int64_t slots = std::min<std::int64_t>(num_threads(ctx), z.S * z.M);
  const auto carve_all = [&](FloatCarver& c) {
    const GateRows gates{c.take(z.T * z.N), c.take(z.T * z.N)};
    return std::pair(gates, ScratchSlots<RuleScratch>(c, slots, [&](FloatCarver& one) { RuleScratch(one, z); }));
  };
  FloatCarver count(nullptr);
  carve_all(count);
  FloatCarver carve(ctx.workspace->require(count.num_bytes()));
  const auto [gates, scratch] = carve_all(carve);
  write_gates(ctx, in, z, gates);
  parallel_slots(ctx, z.S * z.M, [&, &gates = gates, &scratch = scratch](std::int64_t i, std::int64_t slot) {
    FloatCarver own(scratch.at(slot));
    run_rule(ctx, out_TV, state_SF, in, rows, z, gates, i / z.M, i % z.M, RuleScratch(own, z));
  });
}

void delta_rule_backward(OpContext& ctx, const DeltaRuleGrads& grads, ConstTensorView dout_TV, const DeltaRule& in, const StateRows& rows) {
  const RuleSizes z(in, rows);
  const Kernels& k = kernels(ctx);
  std::int64_t longest = 0;
  for (std::int64_t s = 0; s < z.S; ++s) longest = std::max(longest, rows_of_sequence(rows, s).count);
  const std::int64_t slots = std::min<std::int64_t>(num_threads(ctx), z.S * z.M);
  struct Memory {
    GateRows gates;
    GateGradRows dgates;
    float* sums;
    ScratchSlots<RuleBackwardScratch> scratch;
  };
  const auto carve_all = [&](FloatCarver& c) {
    const GateRows gates{c.take(z.T * z.N), c.take(z.T * z.N)};
    const GateGradRows dgates{c.take(z.T * z.N), c.take(z.T * z.N), in.is_state_space() ? c.take(z.T * z.N) : nullptr};
    float* sums = c.take(z.S * kRuleParameters * z.N);
    return Memory{gates, dgates, sums, {c, slots, [&](FloatCarver& one) { RuleBackwardScratch(one, k, z, longest); }}};
  };
  FloatCarver count(nullptr);
  carve_all(count);
  FloatCarver carve(ctx.workspace->require(count.num_bytes()));
  const Memory memory = carve_all(carve);
  write_gates(ctx, in, z, memory.gates);
  std::fill_n(memory.dgates.dbeta_TN, z.T * z.N, 0.0f);
  std::fill_n(memory.dgates.dlog_decay_TN, z.T * z.N, 0.0f);
  if (in.is_state_space()) std::fill_n(memory.dgates.dskip_TN, z.T * z.N, 0.0f);
  parallel_slots(ctx, z.S * z.M, [&](std::int64_t i, std::int64_t slot) {
    FloatCarver own(memory.scratch.at(slot));
    run_rule_backward(ctx, grads, dout_TV, in, rows, z, memory.gates, memory.dgates, i / z.M, i % z.M,
                      RuleBackwardScratch(own, k, z, longest));
  });
  run_gates_backward(ctx, grads, in, rows, z, memory.dgates, memory.sums);
}

namespace {

/// Norms of D elements each across a row, with the weight of an element at its place in w, or in each D of the row where w has no more.
/// `cost` of an element, as parallel_rows() takes it.
void gated_norms(OpContext& ctx, decltype(Kernels::gated_norm) norm, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV,
                 ConstTensorView w, std::int64_t D, std::int64_t cost, float eps) {
  const std::int64_t V = x_TV.shape.num_cols(), W = w.shape[0];
  parallel_rows(ctx, x_TV.shape.num_rows(), cost * V, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t c = 0; c < V; c += D)
        norm(row_bytes(y_TV, t, c), row_bytes(x_TV, t, c), row_bytes(gate_TV, t, c), w.as<float>() + c % W, D, eps, x_TV.dtype);
  });
}

struct GatedNorms {
  TensorView dx_TV, dgate_TV, dw;
  ConstTensorView dy_TV, x_TV, gate_TV, w;
};
/// The weight's gradient is summed over blocks of rows, whose sums are added in order.
void gated_norms_backward(OpContext& ctx, decltype(Kernels::gated_norm_backward) norm, const GatedNorms& n, std::int64_t D, float eps) {
  const std::int64_t W = n.w.shape[0], V = n.x_TV.shape.num_cols(), T = n.x_TV.shape.num_rows();
  const std::int64_t blocks = ceil_div(T, kGateNormRows), stride = rounded_floats(W);
  auto* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(blocks * stride) * sizeof(float)));
  parallel(ctx, blocks, [&](std::int64_t b) {
    float* dw = partial + b * stride;
    std::fill_n(dw, W, 0.0f);
    for (std::int64_t t = b * kGateNormRows; t < std::min(T, (b + 1) * kGateNormRows); ++t)
      for (std::int64_t c = 0; c < V; c += D)
        norm({.dx = row_bytes(n.dx_TV, t, c),
              .dgate = row_bytes(n.dgate_TV, t, c),
              .dw = dw + c % W,
              .dy = row_bytes(n.dy_TV, t, c),
              .x = row_bytes(n.x_TV, t, c),
              .gate = row_bytes(n.gate_TV, t, c),
              .w = n.w.as<float>() + c % W,
              .eps = eps},
             D, n.x_TV.dtype);
  });
  for (std::int64_t b = 0; b < blocks; ++b) kernels(ctx).accumulate(n.dw.as<float>(), partial + b * stride, W, DType::kF32);
}

}  // namespace

void gated_head_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps) {
  gated_norms(ctx, kernels(ctx).gated_norm, y_TV, x_TV, gate_TV, w_D, w_D.shape[0], 8, eps);
}

void gated_head_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_D, ConstTensorView dy_TV,
                              ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps) {
  gated_norms_backward(ctx, kernels(ctx).gated_norm_backward, {dx_TV, dgate_TV, dw_D, dy_TV, x_TV, gate_TV, w_D}, w_D.shape[0], eps);
}

void gated_group_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_V,
                      std::int64_t num_groups, float eps) {
  gated_norms(ctx, kernels(ctx).gated_group_norm, y_TV, x_TV, gate_TV, w_V, w_V.shape[0] / num_groups, 12, eps);
}

void gated_group_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_V, ConstTensorView dy_TV,
                               ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_V, std::int64_t num_groups, float eps) {
  gated_norms_backward(ctx, kernels(ctx).gated_group_norm_backward, {dx_TV, dgate_TV, dw_V, dy_TV, x_TV, gate_TV, w_V},
                       w_V.shape[0] / num_groups, eps);
}

namespace {

/// Copies queries and further columns between rows with gates and rows without: from(t, column with gates, column without, columns).
template <typename Copy>
void for_each_ungated(OpContext& ctx, std::int64_t num_tokens, std::int64_t num_cols, std::int64_t H, std::int64_t D, const Copy& copy) {
  parallel_rows(ctx, num_tokens, num_cols, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t h = 0; h < H; ++h) copy(t, 2 * h * D, h * D, D);
      copy(t, 2 * H * D, H * D, num_cols - 2 * H * D);
    }
  });
}

}  // namespace

void drop_gates(OpContext& ctx, TensorView out_TF, ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  for_each_ungated(ctx, in_TE.shape.num_rows(), in_TE.shape.num_cols(), num_heads, head_dim,
                   [&](std::int64_t t, std::int64_t gated, std::int64_t plain, std::int64_t cols) {
                     __builtin_memcpy(row_bytes(out_TF, t, plain), row_bytes(in_TE, t, gated),
                                      static_cast<std::size_t>(cols * bytes_of_type(in_TE.dtype)));
                   });
}

void drop_gates_backward(OpContext& ctx, TensorView din_TE, ConstTensorView dout_TF, std::int64_t num_heads, std::int64_t head_dim) {
  for_each_ungated(ctx, din_TE.shape.num_rows(), din_TE.shape.num_cols(), num_heads, head_dim,
                   [&](std::int64_t t, std::int64_t gated, std::int64_t plain, std::int64_t cols) {
                     __builtin_memcpy(row_bytes(din_TE, t, gated), row_bytes(dout_TF, t, plain),
                                      static_cast<std::size_t>(cols * bytes_of_type(din_TE.dtype)));
                   });
}

void gate_heads(OpContext& ctx, TensorView y_TQ, ConstTensorView x_TQ, ConstTensorView in_TE, std::int64_t num_heads,
                std::int64_t head_dim) {
  const std::int64_t H = num_heads, D = head_dim;
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, x_TQ.shape.num_rows(), 4 * H * D, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t h = 0; h < H; ++h)
        k.gate_row(row_bytes(y_TQ, t, h * D), row_bytes(x_TQ, t, h * D), row_bytes(in_TE, t, (2 * h + 1) * D), D, x_TQ.dtype);
  });
}

void gate_heads_backward(OpContext& ctx, TensorView dx_TQ, TensorView din_TE, ConstTensorView dy_TQ, ConstTensorView x_TQ,
                         ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  const std::int64_t H = num_heads, D = head_dim;
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, x_TQ.shape.num_rows(), 4 * H * D, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t h = 0; h < H; ++h)
        k.gate_row_backward(row_bytes(dx_TQ, t, h * D), row_bytes(din_TE, t, (2 * h + 1) * D), row_bytes(dy_TQ, t, h * D),
                            row_bytes(x_TQ, t, h * D), row_bytes(in_TE, t, (2 * h + 1) * D), D, x_TQ.dtype);
  });
}

}  // namespace prl::ops::cpu
