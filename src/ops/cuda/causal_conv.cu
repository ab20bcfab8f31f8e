#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/delta_rule.hpp"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/sums.hpp"

// The causal convolution of linear attention. A thread has one channel, or four neighbouring ones where rows are aligned for it, and goes
// through some tokens with the last inputs in registers, so that an input is read once and the reads of a warp lie side by side. The
// operations of a channel are the same in both forms.

namespace prl::ops::cuda {
namespace {

constexpr int kConvBlock = 128;
/// Channels of a thread where rows are aligned for it: 8 bytes of bf16. With 8 of them registers leave too few warps.
constexpr int kWideChannels = 4;
/// Above so many taps the wide form would not fit into registers.
constexpr int kMaxWideTaps = 4;
/// Tokens of a thread, forward: kTaps - 1 more are read before them.
constexpr int kConvTokens = 32;
/// Tokens whose inputs a thread reads before it computes with the first.
constexpr int kConvBatch = 4;
/// Tokens of a partial sum of the weights' gradient: at least so many, and at most so many sums.
constexpr std::int64_t kMinConvGroup = 64, kMaxConvGroups = 128;

template <typename T>
struct ConvArgs {
  T* y;  ///< dx of the gradient
  const T *x, *dy;
  const float* weight;                       ///< [C, W]
  const float* bias;                         ///< [C] or nullptr: 0
  T* state;                                  ///< [slots, W - 1, C]
  const std::int32_t *start, *slot, *begin;  ///< start == nullptr: sequence s has row s alone
  const std::int32_t* context_len;           ///< in place of `begin`: with the token here
  float* partial_dw;                         ///< [groups, C, W]
  float* partial_dbias;                      ///< [groups, C] or nullptr
  std::int64_t y_stride, x_stride, dy_stride;
  int num_tokens, group_tokens, num_sequences, num_channels;
};

template <typename T>
__device__ __forceinline__ std::int64_t first_row(const ConvArgs<T>& a, int s) {
  return a.start != nullptr ? a.start[s] : s;
}
template <typename T>
__device__ __forceinline__ std::int64_t end_row(const ConvArgs<T>& a, int s) {
  return a.start != nullptr ? a.start[s + 1] : s + 1;
}

/// Elements of neighbouring channels as they lie in memory; at first zeros.
template <typename T, int kChannels>
struct Neighbours {
  static_assert(std::is_same_v<T, __nv_bfloat16> && kChannels == kWideChannels);
  uint2 words = make_uint2(0, 0);
  __device__ __forceinline__ void read(const T* p) { words = *reinterpret_cast<const uint2*>(p); }
  __device__ __forceinline__ void unpack(float (&v)[kChannels]) const {
    const std::uint32_t pairs[] = {words.x, words.y};
#pragma unroll
    for (int j = 0; j < kChannels; ++j) v[j] = unpacked<T>(pairs, j);
  }
  static __device__ __forceinline__ void write(T* p, const float (&v)[kChannels]) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
  }
};
template <typename T>
struct Neighbours<T, 1> {
  T value = from_float<T>(0.0f);
  __device__ __forceinline__ void read(const T* p) { value = *p; }
  __device__ __forceinline__ void unpack(float (&v)[1]) const { v[0] = to_float(value); }
  static __device__ __forceinline__ void write(T* p, const float (&v)[1]) { *p = from_float<T>(v[0]); }
};

/// The tokens of a thread that are of one sequence, and where that lies.
struct ConvPart {
  int s, first, end, sequence_first, sequence_end;
};
/// Of tokens [first, last), the part that begins at `first`, which is in sequence `s` or in a later one.
__device__ __forceinline__ ConvPart part_at(const std::int32_t* start, int s, int first, int last) {
  while (start[s + 1] <= first) ++s;  // sequences without tokens, too
  const int sequence_end = start[s + 1];
  return {s, first, min(last, sequence_end), start[s], sequence_end};
}
/// The last sequence that starts at a token or before.
__device__ __forceinline__ int sequence_of(const std::int32_t* start, int num_sequences, int token) {
  int low = 0, high = num_sequences;  // start[low] <= token < start[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (start[middle] <= token ? low : high) = middle;
  }
  return low;
}

/// Input `i` of a sequence, counted from its first row here.
template <typename T, int kTaps, int kChannels>
__device__ __forceinline__ Neighbours<T, kChannels> conv_inputs(const ConvArgs<T>& a, int s, std::int64_t i, int c) {
  Neighbours<T, kChannels> x;
  if (i >= 0)
    x.read(a.x + (first_row(a, s) + i) * a.x_stride + c);
  else if (a.slot != nullptr && a.slot[s] >= 0 && (a.context_len != nullptr ? a.context_len[s] > 1 : a.begin[s] != 0))
    x.read(a.state + (static_cast<std::int64_t>(a.slot[s]) * (kTaps - 1) + kTaps - 1 + i) * a.num_channels + c);
  return x;
}
template <typename T, int kTaps>
__device__ __forceinline__ float conv_input(const ConvArgs<T>& a, int s, std::int64_t i, int c) {
  float x[1];
  conv_inputs<T, kTaps, 1>(a, s, i, c).unpack(x);
  return x[0];
}

template <int kTaps>
__device__ __forceinline__ float conv_sum(const float (&weight)[kTaps], const float (&x)[kTaps], float bias) {
  float sum = bias;
#pragma unroll
  for (int w = 0; w < kTaps; ++w) sum = fmaf(weight[w], x[w], sum);
  return sum;
}

/// Inputs of a batch of tokens: kTaps - 1 rows before it, then its own.
template <int kTaps, int kChannels>
using ConvRows = float[kTaps - 1 + kConvBatch][kChannels];

template <int kTaps, int kChannels>
__device__ __forceinline__ float conv_sum_at(const float (&weight)[kChannels][kTaps], const float (&bias)[kChannels],
                                             const ConvRows<kTaps, kChannels>& x, int token, int j) {
  float sum = bias[j];
#pragma unroll
  for (int w = 0; w < kTaps; ++w) sum = fmaf(weight[j][w], x[token + w][j], sum);
  return sum;
}
/// The rows before the next batch.
template <int kTaps, int kChannels>
__device__ __forceinline__ void move_on(ConvRows<kTaps, kChannels>& rows) {
#pragma unroll
  for (int w = 0; w < kTaps - 1; ++w)
#pragma unroll
    for (int j = 0; j < kChannels; ++j) rows[w][j] = rows[w + kConvBatch][j];
}
/// The inputs before a part.
template <typename T, int kTaps, int kChannels>
__device__ __forceinline__ void read_before(ConvRows<kTaps, kChannels>& x, const ConvArgs<T>& a, const ConvPart& part, int c) {
#pragma unroll
  for (int w = 0; w < kTaps - 1; ++w)
    conv_inputs<T, kTaps, kChannels>(a, part.s, part.first - part.sequence_first - (kTaps - 1) + w, c).unpack(x[w]);
}
/// Of channels c and behind it; 16 bytes at a time where there are several.
template <int kTaps, int kChannels>
__device__ __forceinline__ void read_taps(float (&weight)[kChannels][kTaps], const float* taps, int c) {
  const float* from = taps + static_cast<std::int64_t>(c) * kTaps;
  float flat[kChannels * kTaps];
  if constexpr (kChannels > 1) {
#pragma unroll
    for (int i = 0; i < kChannels * kTaps; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      flat[i] = v.x, flat[i + 1] = v.y, flat[i + 2] = v.z, flat[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) flat[i] = from[i];
  }
#pragma unroll
  for (int j = 0; j < kChannels; ++j)
#pragma unroll
    for (int w = 0; w < kTaps; ++w) weight[j][w] = flat[j * kTaps + w];
}

template <typename T, int kChannels>
__device__ __forceinline__ void read_bias(float (&bias)[kChannels], const ConvArgs<T>& a, int c) {
#pragma unroll
  for (int j = 0; j < kChannels; ++j) bias[j] = a.bias != nullptr ? a.bias[c + j] : 0.0f;
}

/// Tokens [t, t + kConvBatch) of a part, as far as there are such: kWhole, if all are.
template <bool kWhole, typename T, int kTaps, int kChannels>
__device__ __forceinline__ void conv_batch(const ConvArgs<T>& a, const float (&weight)[kChannels][kTaps], const float (&bias)[kChannels],
                                           ConvRows<kTaps, kChannels>& x, int t, int end, int c) {
  const T* from = a.x + t * a.x_stride + c;
  T* to = a.y + t * a.y_stride + c;
  Neighbours<T, kChannels> read[kConvBatch];
#pragma unroll
  for (int i = 0; i < kConvBatch; ++i)
    if (kWhole || t + i < end) read[i].read(from + i * a.x_stride);
#pragma unroll
  for (int i = 0; i < kConvBatch; ++i) {
    read[i].unpack(x[kTaps - 1 + i]);
    if (!kWhole && t + i >= end) break;
    float y[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      const float sum = conv_sum_at<kTaps, kChannels>(weight, bias, x, i, j);
      y[j] = sum * sigmoid(sum);
    }
    Neighbours<T, kChannels>::write(to + i * a.y_stride, y);
  }
  move_on<kTaps, kChannels>(x);
}

/// A thread has channels and kConvTokens tokens. Registers of the wide form leave room for 9 blocks on a multiprocessor.
template <typename T, int kTaps, int kChannels>
__global__ void __launch_bounds__(kConvBlock) conv_kernel(const ConvArgs<T> a) {
  const int c = (static_cast<int>(blockIdx.x) * kConvBlock + static_cast<int>(threadIdx.x)) * kChannels;
  if (c >= a.num_channels) return;
  float weight[kChannels][kTaps], bias[kChannels];
  read_taps<kTaps, kChannels>(weight, a.weight, c);
  read_bias<T, kChannels>(bias, a, c);
  const int first = static_cast<int>(blockIdx.y) * kConvTokens, last = min(a.num_tokens, first + kConvTokens);
  int s = sequence_of(a.start, a.num_sequences, first);
  for (int done = first; done < last;) {
    const ConvPart part = part_at(a.start, s, done, last);
    ConvRows<kTaps, kChannels> x;
    read_before<T, kTaps, kChannels>(x, a, part, c);
    int t = part.first;
#pragma unroll 1
    for (; t + kConvBatch <= part.end; t += kConvBatch) conv_batch<true, T, kTaps, kChannels>(a, weight, bias, x, t, part.end, c);
    if (t < part.end) conv_batch<false, T, kTaps, kChannels>(a, weight, bias, x, t, part.end, c);
    done = part.end, s = part.s;
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
  const float bias = is_there && a.bias != nullptr ? a.bias[c] : 0.0f;
  wait_for_previous();
  if (!is_there) return;
#pragma unroll
  for (int w = 0; w < kTaps; ++w) x[w] = conv_input<T, kTaps>(a, s, w - (kTaps - 1), c);
  const float sum = conv_sum(weight, x, bias);
  a.y[first_row(a, s) * a.y_stride + c] = from_float<T>(sum * sigmoid(sum));
  if (a.slot[s] < 0) return;
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i)
    a.state[(static_cast<std::int64_t>(a.slot[s]) * (kTaps - 1) + i) * a.num_channels + c] = from_float<T>(x[i + 1]);
}

/// What a thread of the gradient keeps of its channels: besides inputs the gradients of the sums, which lie in rows as the inputs do.
template <int kTaps, int kChannels>
struct ConvGradient {
  float weight[kChannels][kTaps], dw[kChannels][kTaps] = {};
  float bias[kChannels], dbias[kChannels] = {};
  ConvRows<kTaps, kChannels> x, d;
};

/// Token i of the batch: the gradient of its sum, in place of that of its output, and what it adds to the weights' gradient.
template <int kTaps, int kChannels>
__device__ __forceinline__ void add_token(ConvGradient<kTaps, kChannels>& g, int i, bool is_of_group) {
#pragma unroll
  for (int j = 0; j < kChannels; ++j) {
    const float sum = conv_sum_at<kTaps, kChannels>(g.weight, g.bias, g.x, i, j), s = quick_sigmoid(sum);
    float& d = g.d[kTaps - 1 + i][j];
    d *= fmaf(sum * s, 1.0f - s, s);
    if (!is_of_group) continue;
    g.dbias[j] += d;
#pragma unroll
    for (int w = 0; w < kTaps; ++w) g.dw[j][w] = fmaf(d, g.x[i + w][j], g.dw[j][w]);
  }
}

/// Tokens [t, t + kConvBatch): each brings the gradient of its sum and completes that of the input kTaps - 1 before it. kWhole: all are of
/// the part; else some may be behind it, in its sequence or not.
template <bool kWhole, typename T, int kTaps, int kChannels>
__device__ __forceinline__ void conv_backward_batch(const ConvArgs<T>& a, ConvGradient<kTaps, kChannels>& g, int t, const ConvPart& part,
                                                    int c) {
  const T *x = a.x + t * a.x_stride + c, *dy = a.dy + t * a.dy_stride + c;
  T* dx = a.y + (t - (kTaps - 1)) * a.y_stride + c;
  const int last = min(part.sequence_end, part.end + kTaps - 1);
  Neighbours<T, kChannels> read_x[kConvBatch], read_dy[kConvBatch];
#pragma unroll
  for (int i = 0; i < kConvBatch; ++i) {
    if (!kWhole && t + i >= last) continue;
    read_x[i].read(x + i * a.x_stride);
    read_dy[i].read(dy + i * a.dy_stride);
  }
#pragma unroll
  for (int i = 0; i < kConvBatch; ++i) {
    read_x[i].unpack(g.x[kTaps - 1 + i]);
    read_dy[i].unpack(g.d[kTaps - 1 + i]);  // behind the sequence 0, as the gradients of sums are there
    if (kWhole || t + i < last) add_token<kTaps, kChannels>(g, i, kWhole || t + i < part.end);
    const int input = t + i - (kTaps - 1);
    if (input < part.first || (!kWhole && input >= part.end)) continue;
    float sum[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      sum[j] = 0.0f;
#pragma unroll
      for (int w = 0; w < kTaps; ++w) sum[j] = fmaf(g.weight[j][w], g.d[kTaps - 1 + i - w][j], sum[j]);
    }
    Neighbours<T, kChannels>::write(dx + i * a.y_stride, sum);
  }
  move_on<kTaps, kChannels>(g.x);
  move_on<kTaps, kChannels>(g.d);
}

/// A thread has channels and a group of tokens: their inputs' gradients, for which it looks at the tokens behind them too, and their part
/// of that of the weights.
template <typename T, int kTaps, int kChannels>
__global__ void __launch_bounds__(kConvBlock) conv_backward_kernel(const ConvArgs<T> a) {
  const int c = (static_cast<int>(blockIdx.x) * kConvBlock + static_cast<int>(threadIdx.x)) * kChannels;
  if (c >= a.num_channels) return;
  ConvGradient<kTaps, kChannels> g;
  read_taps<kTaps, kChannels>(g.weight, a.weight, c);
  read_bias<T, kChannels>(g.bias, a, c);
  const int first = static_cast<int>(blockIdx.y) * a.group_tokens, last = min(a.num_tokens, first + a.group_tokens);
  int s = sequence_of(a.start, a.num_sequences, first);
  for (int done = first; done < last;) {
    const ConvPart part = part_at(a.start, s, done, last);
    read_before<T, kTaps, kChannels>(g.x, a, part, c);
#pragma unroll
    for (int w = 0; w < kTaps - 1; ++w)
#pragma unroll
      for (int j = 0; j < kChannels; ++j) g.d[w][j] = 0.0f;
    int t = part.first;
#pragma unroll 1
    for (; t + kConvBatch <= part.end; t += kConvBatch) conv_backward_batch<true, T, kTaps, kChannels>(a, g, t, part, c);
#pragma unroll 1
    for (; t < part.end + kTaps - 1; t += kConvBatch) conv_backward_batch<false, T, kTaps, kChannels>(a, g, t, part, c);
    done = part.end, s = part.s;
  }
  float* out = a.partial_dw + (blockIdx.y * static_cast<std::int64_t>(a.num_channels) + c) * kTaps;
  if constexpr (kChannels > 1) {
    const float* flat = &g.dw[0][0];
#pragma unroll
    for (int i = 0; i < kChannels * kTaps; i += 4)
      *reinterpret_cast<float4*>(out + i) = make_float4(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]);
  } else {
#pragma unroll
    for (int w = 0; w < kTaps; ++w) out[w] = g.dw[0][w];
  }
  if (a.partial_dbias == nullptr) return;
#pragma unroll
  for (int j = 0; j < kChannels; ++j) a.partial_dbias[blockIdx.y * static_cast<std::int64_t>(a.num_channels) + c + j] = g.dbias[j];
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
                      const ConstTensorView& bias, const StateRows& rows) {
  return {.y = y.as<T>(),
          .x = x.as<T>(),
          .weight = weight.as<float>(),
          .bias = bias.as<float>(),
          .start = rows.is_by_index() ? nullptr : staged(ctx, rows.start_S),
          .slot = rows.is_by_index() ? rows.slot_B.as<std::int32_t>() : staged(ctx, rows.slot_S),
          .begin = staged(ctx, rows.begin_S),
          .context_len = rows.context_len_B.as<std::int32_t>(),
          .y_stride = y.row_stride,
          .x_stride = x.row_stride,
          .num_tokens = static_cast<int>(x.shape[0]),
          .num_sequences = static_cast<int>(rows.is_by_index() ? rows.slot_B.shape[0] : static_cast<std::int64_t>(rows.start_S.size()) - 1),
          .num_channels = static_cast<int>(x.shape[1])};
}
dim3 conv_grid(std::int64_t num_channels, std::int64_t rows) {
  return {static_cast<unsigned>(ceil_div(num_channels, kConvBlock)), static_cast<unsigned>(rows)};
}
/// body(std::integral_constant) of the channels of a thread.
template <typename T, int kTaps, typename Body>
void with_channels(bool wide, Body&& body) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kTaps <= kMaxWideTaps)
    if (wide) return body(std::integral_constant<int, kWideChannels>{});
  body(std::integral_constant<int, 1>{});
}

}  // namespace

void causal_conv(OpContext& ctx, TensorView y_TC, ConstTensorView x_TC, ConstTensorView weight_CW, TensorView state_SWC,
                 const StateRows& rows, ConstTensorView bias_C) {
  const bool wide = is_wide(y_TC) && is_wide(x_TC) && is_aligned(weight_CW.data, 16) && is_aligned(state_SWC.data, 16);
  with_type(x_TC.dtype, [&](auto t) {
    using T = decltype(t);
    ConvArgs<T> a = conv_args<T>(ctx, y_TC, x_TC, weight_CW, bias_C, rows);
    a.state = state_SWC.as<T>();
    with_taps(weight_CW.shape[1], [&](auto taps) {
      constexpr int kTaps = decltype(taps)::value;
      if (is_a_step(rows))
        return launch_chained(stream_of(ctx), conv_step_kernel<T, kTaps>, conv_grid(a.num_channels, a.num_sequences), dim3(kConvBlock), 0,
                              a);
      with_channels<T, kTaps>(wide, [&](auto channels) {
        constexpr int kChannels = decltype(channels)::value;
        const dim3 grid = conv_grid(ceil_div(a.num_channels, kChannels), ceil_div(a.num_tokens, kConvTokens));
        conv_kernel<T, kTaps, kChannels><<<grid, kConvBlock, 0, stream_of(ctx)>>>(a);
      });
      if (a.slot != nullptr) keep_inputs_kernel<T, kTaps><<<conv_grid(a.num_channels, a.num_sequences), kConvBlock, 0, stream_of(ctx)>>>(a);
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void causal_conv_backward(OpContext& ctx, TensorView dx_TC, TensorView dweight_CW, ConstTensorView dy_TC, ConstTensorView x_TC,
                          ConstTensorView weight_CW, const StateRows& rows, ConstTensorView bias_C, TensorView dbias_C) {
  const std::int64_t group_tokens = std::max(kMinConvGroup, ceil_div(x_TC.shape[0], kMaxConvGroups));
  const std::int64_t groups = ceil_div(x_TC.shape[0], group_tokens), size = weight_CW.shape.num_elements();
  const std::int64_t num_biases = bias_C.data != nullptr ? x_TC.shape[1] : 0;
  auto* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(groups * (size + num_biases)) * sizeof(float)));
  const bool wide = is_wide(dx_TC) && is_wide(dy_TC) && is_wide(x_TC) && is_aligned(weight_CW.data, 16);
  with_type(x_TC.dtype, [&](auto t) {
    using T = decltype(t);
    ConvArgs<T> a = conv_args<T>(ctx, dx_TC, x_TC, weight_CW, bias_C, rows);
    a.dy = dy_TC.as<T>();
    a.dy_stride = dy_TC.row_stride;
    a.partial_dw = partial;
    a.partial_dbias = num_biases > 0 ? partial + groups * size : nullptr;
    a.group_tokens = static_cast<int>(group_tokens);
    with_taps(weight_CW.shape[1], [&](auto taps) {
      constexpr int kTaps = decltype(taps)::value;
      with_channels<T, kTaps>(wide, [&](auto channels) {
        constexpr int kChannels = decltype(channels)::value;
        const dim3 grid = conv_grid(ceil_div(a.num_channels, kChannels), groups);
        conv_backward_kernel<T, kTaps, kChannels><<<grid, kConvBlock, 0, stream_of(ctx)>>>(a);
      });
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
  add_rows(ctx, dweight_CW.as<float>(), partial, groups, size);
  if (num_biases > 0) add_rows(ctx, dbias_C.as<float>(), partial + groups * size, groups, num_biases);
}

}  // namespace prl::ops::cuda
