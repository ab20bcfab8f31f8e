#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/delta_rule.hpp"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/sums.hpp"

// The causal convolution of linear attention. A thread has one channel and goes through some tokens, the last inputs in registers, so that
// an input is read once and the reads of a warp lie side by side.

namespace prl::ops::cuda {
namespace {

constexpr int kConvBlock = 128;
/// Tokens of a thread, forward.
constexpr std::int64_t kConvTokens = 16;
/// Tokens of a partial sum of the weights' gradient: at least so many, and at most so many sums.
constexpr std::int64_t kMinConvGroup = 64, kMaxConvGroups = 128;

template <typename T>
struct ConvArgs {
  T* y;  ///< dx of the gradient
  const T *x, *dy;
  const float* weight;                       ///< [C, W]
  T* state;                                  ///< [slots, W - 1, C]
  const std::int32_t *start, *slot, *begin;  ///< start == nullptr: sequence s has row s alone
  const std::int32_t* context_len;           ///< in place of `begin`: with the token here
  float* partial_dw;                         ///< [groups, C, W]
  std::int64_t y_stride, x_stride, dy_stride, num_tokens, group_tokens;
  int num_sequences, num_channels;
};

template <typename T>
__device__ __forceinline__ std::int64_t first_row(const ConvArgs<T>& a, int s) {
  return a.start != nullptr ? a.start[s] : s;
}
template <typename T>
__device__ __forceinline__ std::int64_t end_row(const ConvArgs<T>& a, int s) {
  return a.start != nullptr ? a.start[s + 1] : s + 1;
}

/// The sequence of a token: the last that starts at it or before.
__device__ __forceinline__ int sequence_of(const std::int32_t* start, int num_sequences, std::int64_t token) {
  if (start == nullptr) return static_cast<int>(token);
  int low = 0, high = num_sequences;  // start[low] <= token < start[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (start[middle] <= token ? low : high) = middle;
  }
  return low;
}

/// Input `i` of a sequence, counted from its first row here.
template <typename T, int kTaps>
__device__ __forceinline__ float conv_input(const ConvArgs<T>& a, int s, std::int64_t i, int c) {
  if (i >= 0) return to_float(a.x[(first_row(a, s) + i) * a.x_stride + c]);
  if (a.slot == nullptr || a.slot[s] < 0 || (a.context_len != nullptr ? a.context_len[s] <= 1 : a.begin[s] == 0)) return 0.0f;
  return to_float(a.state[(static_cast<std::int64_t>(a.slot[s]) * (kTaps - 1) + kTaps - 1 + i) * a.num_channels + c]);
}

template <int kTaps>
__device__ __forceinline__ float conv_sum(const float (&weight)[kTaps], const float (&x)[kTaps]) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kTaps; ++w) sum = fmaf(weight[w], x[w], sum);
  return sum;
}

/// A window over a channel's inputs, the newest last.
template <typename T, int kTaps>
struct ConvWindow {
  float x[kTaps];
  int s = -1;
  std::int64_t end = 0;  ///< of the sequence
  __device__ __forceinline__ void move_to(const ConvArgs<T>& a, std::int64_t token, int c) {
    if (s < 0 || token >= end) {
      s = sequence_of(a.start, a.num_sequences, token);
      end = end_row(a, s);
#pragma unroll
      for (int w = 0; w < kTaps; ++w) x[w] = conv_input<T, kTaps>(a, s, token - first_row(a, s) - (kTaps - 1) + w, c);
      return;
    }
#pragma unroll
    for (int w = 0; w < kTaps - 1; ++w) x[w] = x[w + 1];
    x[kTaps - 1] = to_float(a.x[token * a.x_stride + c]);
  }
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kConvBlock) conv_kernel(const ConvArgs<T> a) {
  const int c = static_cast<int>(blockIdx.x) * kConvBlock + static_cast<int>(threadIdx.x);
  if (c >= a.num_channels) return;
  float weight[kTaps];
#pragma unroll
  for (int w = 0; w < kTaps; ++w) weight[w] = a.weight[static_cast<std::int64_t>(c) * kTaps + w];
  ConvWindow<T, kTaps> window;
  const std::int64_t first = blockIdx.y * kConvTokens, last = min(a.num_tokens, first + kConvTokens);
  for (std::int64_t t = first; t < last; ++t) {
    window.move_to(a, t, c);
    const float sum = conv_sum(weight, window.x);
    a.y[t * a.y_stride + c] = from_float<T>(sum * sigmoid(sum));
  }
}

/// The last inputs of each sequence into its slot. All are read before any is written: some come from the slot itself.
template <typename T, int kTaps>
__global__ void __launch_bounds__(kConvBlock) keep_inputs_kernel(const ConvArgs<T> a) {
  const int c = static_cast<int>(blockIdx.x) * kConvBlock + static_cast<int>(threadIdx.x), s = static_cast<int>(blockIdx.y);
  const std::int64_t count = end_row(a, s) - first_row(a, s);
  if (c >= a.num_channels || count == 0 || a.slot[s] < 0) return;
  float kept[kTaps - 1];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) kept[i] = conv_input<T, kTaps>(a, s, count - (kTaps - 1) + i, c);
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i)
    a.state[(static_cast<std::int64_t>(a.slot[s]) * (kTaps - 1) + i) * a.num_channels + c] = from_float<T>(kept[i]);
}

/// Sequences of one token each, with slots: a thread has a channel of a sequence, and moves its last inputs on.
template <typename T, int kTaps>
__global__ void __launch_bounds__(kConvBlock) conv_step_kernel(const ConvArgs<T> a) {
  let_next_begin();
  const int c = static_cast<int>(blockIdx.x) * kConvBlock + static_cast<int>(threadIdx.x), s = static_cast<int>(blockIdx.y);
  const bool is_there = c < a.num_channels;
  float weight[kTaps], x[kTaps];
#pragma unroll
  for (int w = 0; w < kTaps; ++w) weight[w] = is_there ? a.weight[static_cast<std::int64_t>(c) * kTaps + w] : 0.0f;
  wait_for_previous();
  if (!is_there) return;
#pragma unroll
  for (int w = 0; w < kTaps; ++w) x[w] = conv_input<T, kTaps>(a, s, w - (kTaps - 1), c);
  const float sum = conv_sum(weight, x);
  a.y[first_row(a, s) * a.y_stride + c] = from_float<T>(sum * sigmoid(sum));
  if (a.slot[s] < 0) return;
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i)
    a.state[(static_cast<std::int64_t>(a.slot[s]) * (kTaps - 1) + i) * a.num_channels + c] = from_float<T>(x[i + 1]);
}

/// A thread has a channel and a group of tokens: their inputs' gradients, for which it looks at the tokens behind them too, and their part
/// of that of the weights.
template <typename T, int kTaps>
__global__ void __launch_bounds__(kConvBlock) conv_backward_kernel(const ConvArgs<T> a) {
  const int c = static_cast<int>(blockIdx.x) * kConvBlock + static_cast<int>(threadIdx.x);
  if (c >= a.num_channels) return;
  float weight[kTaps], dw[kTaps] = {}, d[kTaps] = {};  // d: gradients of the last sums, the newest last
#pragma unroll
  for (int w = 0; w < kTaps; ++w) weight[w] = a.weight[static_cast<std::int64_t>(c) * kTaps + w];
  const std::int64_t first = blockIdx.y * a.group_tokens, last = min(a.num_tokens, first + a.group_tokens);
  ConvWindow<T, kTaps> window;
  // Step t brings the sum of token t, and completes the gradient of the input kTaps - 1 before it.
  for (std::int64_t t = first; t < last + kTaps - 1; ++t) {
    const std::int64_t of_input = t - (kTaps - 1);
#pragma unroll
    for (int w = 0; w < kTaps - 1; ++w) d[w] = d[w + 1];
    d[kTaps - 1] = 0.0f;
    if (t < a.num_tokens) {
      window.move_to(a, t, c);
      const float sum = conv_sum(weight, window.x), s = sigmoid(sum);
      d[kTaps - 1] = to_float(a.dy[t * a.dy_stride + c]) * fmaf(sum * s, 1.0f - s, s);
      if (t < last) {
#pragma unroll
        for (int w = 0; w < kTaps; ++w) dw[w] = fmaf(d[kTaps - 1], window.x[w], dw[w]);
      }
    }
    if (of_input < first) continue;
    // Tap w of token of_input + kTaps - 1 - w, as far as the input's sequence goes.
    const std::int64_t end = a.start[sequence_of(a.start, a.num_sequences, of_input) + 1];
    float dx = 0.0f;
#pragma unroll
    for (int w = 0; w < kTaps; ++w)
      if (of_input + kTaps - 1 - w < end) dx = fmaf(weight[w], d[kTaps - 1 - w], dx);
    a.y[of_input * a.y_stride + c] = from_float<T>(dx);
  }
#pragma unroll
  for (int w = 0; w < kTaps; ++w) a.partial_dw[(blockIdx.y * static_cast<std::int64_t>(a.num_channels) + c) * kTaps + w] = dw[w];
}

/// body(std::integral_constant) of 2 to 8 taps.
template <typename Body>
void with_taps(std::int64_t num_taps, Body&& body) {
  switch (num_taps) {
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 5: return body(std::integral_constant<int, 5>{});
    case 6: return body(std::integral_constant<int, 6>{});
    case 7: return body(std::integral_constant<int, 7>{});
    default: return body(std::integral_constant<int, 8>{});
  }
}

template <typename T>
ConvArgs<T> conv_args(const OpContext& ctx, const TensorView& y, const ConstTensorView& x, const ConstTensorView& weight,
                      const StateRows& rows) {
  return {.y = y.as<T>(),
          .x = x.as<T>(),
          .weight = weight.as<float>(),
          .start = rows.is_by_index() ? nullptr : staged(ctx, rows.start_S),
          .slot = rows.is_by_index() ? rows.slot_B.as<std::int32_t>() : staged(ctx, rows.slot_S),
          .begin = staged(ctx, rows.begin_S),
          .context_len = rows.context_len_B.as<std::int32_t>(),
          .y_stride = y.row_stride,
          .x_stride = x.row_stride,
          .num_tokens = x.shape[0],
          .num_sequences = static_cast<int>(rows.is_by_index() ? rows.slot_B.shape[0] : static_cast<std::int64_t>(rows.start_S.size()) - 1),
          .num_channels = static_cast<int>(x.shape[1])};
}
dim3 conv_grid(std::int64_t num_channels, std::int64_t rows) {
  return {static_cast<unsigned>(ceil_div(num_channels, kConvBlock)), static_cast<unsigned>(rows)};
}

}  // namespace

void causal_conv(OpContext& ctx, TensorView y_TC, ConstTensorView x_TC, ConstTensorView weight_CW, TensorView state_SWC,
                 const StateRows& rows) {
  with_type(x_TC.dtype, [&](auto t) {
    using T = decltype(t);
    ConvArgs<T> a = conv_args<T>(ctx, y_TC, x_TC, weight_CW, rows);
    a.state = state_SWC.as<T>();
    with_taps(weight_CW.shape[1], [&](auto taps) {
      constexpr int kTaps = decltype(taps)::value;
      if (is_a_step(rows))
        return launch_chained(stream_of(ctx), conv_step_kernel<T, kTaps>, conv_grid(a.num_channels, a.num_sequences), dim3(kConvBlock), 0,
                              a);
      conv_kernel<T, kTaps><<<conv_grid(a.num_channels, ceil_div(a.num_tokens, kConvTokens)), kConvBlock, 0, stream_of(ctx)>>>(a);
      if (a.slot != nullptr) keep_inputs_kernel<T, kTaps><<<conv_grid(a.num_channels, a.num_sequences), kConvBlock, 0, stream_of(ctx)>>>(a);
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void causal_conv_backward(OpContext& ctx, TensorView dx_TC, TensorView dweight_CW, ConstTensorView dy_TC, ConstTensorView x_TC,
                          ConstTensorView weight_CW, const StateRows& rows) {
  const std::int64_t group_tokens = std::max(kMinConvGroup, ceil_div(x_TC.shape[0], kMaxConvGroups));
  const std::int64_t groups = ceil_div(x_TC.shape[0], group_tokens), size = weight_CW.shape.num_elements();
  auto* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(groups * size) * sizeof(float)));
  with_type(x_TC.dtype, [&](auto t) {
    using T = decltype(t);
    ConvArgs<T> a = conv_args<T>(ctx, dx_TC, x_TC, weight_CW, rows);
    a.dy = dy_TC.as<T>();
    a.dy_stride = dy_TC.row_stride;
    a.partial_dw = partial;
    a.group_tokens = group_tokens;
    with_taps(weight_CW.shape[1], [&](auto taps) {
      conv_backward_kernel<T, decltype(taps)::value><<<conv_grid(a.num_channels, groups), kConvBlock, 0, stream_of(ctx)>>>(a);
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
  add_rows(ctx, dweight_CW.as<float>(), partial, groups, size);
}

}  // namespace prl::ops::cuda
