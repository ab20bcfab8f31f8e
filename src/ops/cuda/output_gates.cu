#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/sums.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kGateWarps = 4;
constexpr int kGateBlock = kGateWarps * kWarp;
/// Heads of a partial sum of the weight's gradient: at least so many, and at most so many sums.
constexpr std::int64_t kMinGateGroup = 64, kMaxGateGroups = 1024;
/// The widest head whose gradient of the weight fits into shared memory without asking for more.
constexpr std::int64_t kMaxGatedHead = 48 * 1024 / (kGateWarps * static_cast<std::int64_t>(sizeof(float)));

template <typename T>
struct GatedNormArgs {
  T *y, *dgate;  ///< y: dx of the gradient
  const T *x, *gate, *dy;
  const float* w;
  float* partial_dw;  ///< [groups, D]
  std::int64_t y_stride, dgate_stride, x_stride, gate_stride, dy_stride, num_heads, heads_of_token, group_heads;
  int head_dim;
  float inverse_dim, eps;
  /// Where a head begins in a view of this stride.
  __device__ std::int64_t at(std::int64_t head, std::int64_t stride) const {
    return head / heads_of_token * stride + head % heads_of_token * head_dim;
  }
};

/// One warp per head; a lane has every 32nd element.
template <typename T>
__global__ void __launch_bounds__(kGateBlock) gated_norm_kernel(const GatedNormArgs<T> a) {
  let_next_begin();
  wait_for_previous();
  const std::int64_t head = static_cast<std::int64_t>(blockIdx.x) * kGateWarps + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (head >= a.num_heads) return;
  const T *x = a.x + a.at(head, a.x_stride), *gate = a.gate + a.at(head, a.gate_stride);
  T* y = a.y + a.at(head, a.y_stride);
  float squares = 0.0f;
  for (int i = lane; i < a.head_dim; i += kWarp) squares = fmaf(to_float(x[i]), to_float(x[i]), squares);
  const float scale = norm_scale(warp_sum(squares), a.inverse_dim, a.eps);
  for (int i = lane; i < a.head_dim; i += kWarp) {
    const float g = to_float(gate[i]);
    y[i] = from_float<T>(to_float(x[i]) * scale * a.w[i] * (g * sigmoid(g)));
  }
}

/// A block has a group of heads, which its warps take in turn; each warp sums the weight's gradient in a row of shared memory.
template <typename T>
__global__ void __launch_bounds__(kGateBlock) gated_norm_backward_kernel(const GatedNormArgs<T> a) {
  extern __shared__ float sums[];  // [kGateWarps, D]
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp, D = a.head_dim;
  float* const dw = sums + warp * D;
  for (int i = lane; i < D; i += kWarp) dw[i] = 0.0f;
  const std::int64_t first = blockIdx.x * a.group_heads, last = min(a.num_heads, first + a.group_heads);
  for (std::int64_t head = first + warp; head < last; head += kGateWarps) {
    const T *x = a.x + a.at(head, a.x_stride), *gate = a.gate + a.at(head, a.gate_stride), *dy = a.dy + a.at(head, a.dy_stride);
    T *dx = a.y + a.at(head, a.y_stride), *dgate = a.dgate + a.at(head, a.dgate_stride);
    float2 part = make_float2(0.0f, 0.0f);
    for (int i = lane; i < D; i += kWarp) {
      const float v = to_float(x[i]), g = to_float(gate[i]);
      part.x = fmaf(v, v, part.x);
      part.y = fmaf(to_float(dy[i]) * (g * sigmoid(g)) * a.w[i], v, part.y);
    }
    const float scale = norm_scale(warp_sum(part.x), a.inverse_dim, a.eps);
    const float k = warp_sum(part.y) * scale * scale * scale * a.inverse_dim;
    for (int i = lane; i < D; i += kWarp) {
      const float v = to_float(x[i]), g = to_float(gate[i]), d = to_float(dy[i]), open = sigmoid(g), silu = g * open;
      dw[i] = fmaf(d * silu, v * scale, dw[i]);
      dgate[i] = from_float<T>(d * (v * scale * a.w[i]) * fmaf(silu, 1.0f - open, open));
      dx[i] = from_float<T>(fmaf(-k, v, d * silu * a.w[i] * scale));
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < D; i += kGateBlock) {
    float total = sums[i];
    for (int w = 1; w < kGateWarps; ++w) total += sums[w * D + i];
    a.partial_dw[blockIdx.x * static_cast<std::int64_t>(D) + i] = total;
  }
}

template <typename T>
GatedNormArgs<T> gated_norm_args(const TensorView& y, const ConstTensorView& x, const ConstTensorView& gate, const ConstTensorView& w,
                                 float eps) {
  const std::int64_t D = w.shape[0], heads = x.shape.num_cols() / D;
  return {.y = y.as<T>(),
          .x = x.as<T>(),
          .gate = gate.as<T>(),
          .w = w.as<float>(),
          .y_stride = y.row_stride,
          .x_stride = x.row_stride,
          .gate_stride = gate.row_stride,
          .num_heads = x.shape.num_rows() * heads,
          .heads_of_token = heads,
          .head_dim = static_cast<int>(D),
          .inverse_dim = 1.0f / static_cast<float>(D),
          .eps = eps};
}

/// Attention heads with gates among other columns, in Units of an element or of 16 bytes. Column c of a row without gates is that of
/// `gated(c)` in a row with them.
struct GatedColumns {
  std::int64_t num_rows, num_queries, head_dim, plain_cols, plain_stride, gated_stride;
  __device__ std::int64_t gated(std::int64_t c) const { return c < num_queries ? c + c / head_dim * head_dim : c + num_queries; }
};

template <typename Unit>
__global__ void __launch_bounds__(kGateBlock) drop_gates_kernel(Unit* plain, Unit* with_gates, bool is_reverse, const GatedColumns a) {
  let_next_begin();
  wait_for_previous();
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kGateBlock + threadIdx.x;
  if (c >= a.plain_cols) return;
  for (std::int64_t t = blockIdx.y; t < a.num_rows; t += gridDim.y) {
    Unit &without = plain[t * a.plain_stride + c], &with = with_gates[t * a.gated_stride + a.gated(c)];
    if (is_reverse)
      with = without;
    else
      without = with;
  }
}

constexpr std::int64_t kMaxGateRows = 32768;

template <typename Unit>
void launch_drop_gates(OpContext& ctx, const TensorView& plain, const TensorView& with_gates, bool is_reverse, std::int64_t num_heads,
                       std::int64_t head_dim) {
  const std::int64_t of_unit = static_cast<std::int64_t>(sizeof(Unit) / size_of(plain.dtype));
  const GatedColumns a{.num_rows = plain.shape.num_rows(),
                       .num_queries = num_heads * head_dim / of_unit,
                       .head_dim = head_dim / of_unit,
                       .plain_cols = plain.shape.num_cols() / of_unit,
                       .plain_stride = plain.row_stride / of_unit,
                       .gated_stride = with_gates.row_stride / of_unit};
  const dim3 grid(static_cast<unsigned>(ceil_div(a.plain_cols, kGateBlock)), static_cast<unsigned>(std::min(a.num_rows, kMaxGateRows)));
  launch_chained(stream_of(ctx), drop_gates_kernel<Unit>, grid, dim3(kGateBlock), 0, plain.as<Unit>(), with_gates.as<Unit>(), is_reverse,
                 a);
}
void move_ungated(OpContext& ctx, const TensorView& plain, const TensorView& with_gates, bool is_reverse, std::int64_t num_heads,
                  std::int64_t head_dim) {
  const auto is_whole = [&](std::int64_t elements) { return elements * static_cast<std::int64_t>(size_of(plain.dtype)) % 16 == 0; };
  const bool is_one_row = plain.shape.num_rows() <= 1;
  if (is_aligned(plain.data, 16) && is_aligned(with_gates.data, 16) && is_whole(head_dim) && is_whole(plain.shape.num_cols()) &&
      (is_one_row || (is_whole(plain.row_stride) && is_whole(with_gates.row_stride))))
    return launch_drop_gates<uint4>(ctx, plain, with_gates, is_reverse, num_heads, head_dim);
  with_type(plain.dtype, [&](auto t) { launch_drop_gates<decltype(t)>(ctx, plain, with_gates, is_reverse, num_heads, head_dim); });
}
/// Reads through a view that only this file's kernels see as writable.
TensorView unlocked(const ConstTensorView& v) { return {const_cast<void*>(v.data), v.shape, v.dtype, v.device, v.row_stride}; }

template <typename T>
struct GateArgs {
  T *y, *din;  ///< y: dx of the gradient
  const T *x, *in, *dy;
  std::int64_t y_stride, din_stride, x_stride, in_stride, dy_stride;
  GatedColumns columns;
};

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kGateBlock) gate_heads_kernel(const GateArgs<T> a) {
  let_next_begin();
  wait_for_previous();
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kGateBlock + threadIdx.x;
  if (c >= a.columns.num_queries) return;
  const std::int64_t of_gate = a.columns.gated(c) + a.columns.head_dim;
  for (std::int64_t t = blockIdx.y; t < a.columns.num_rows; t += gridDim.y) {
    const float x = to_float(a.x[t * a.x_stride + c]), open = sigmoid(to_float(a.in[t * a.in_stride + of_gate]));
    if constexpr (kBackward) {
      const float d = to_float(a.dy[t * a.dy_stride + c]);
      a.din[t * a.din_stride + of_gate] = from_float<T>(d * x * (open * (1.0f - open)));
      a.y[t * a.y_stride + c] = from_float<T>(d * open);
    } else {
      a.y[t * a.y_stride + c] = from_float<T>(x * open);
    }
  }
}

template <typename T, bool kBackward>
void launch_gate_heads(OpContext& ctx, GateArgs<T> a, std::int64_t num_rows, std::int64_t num_heads, std::int64_t head_dim) {
  a.columns = {.num_rows = num_rows, .num_queries = num_heads * head_dim, .head_dim = head_dim};
  const dim3 grid(static_cast<unsigned>(ceil_div(a.columns.num_queries, kGateBlock)),
                  static_cast<unsigned>(std::min(num_rows, kMaxGateRows)));
  launch_chained(stream_of(ctx), gate_heads_kernel<T, kBackward>, grid, dim3(kGateBlock), 0, a);
}

}  // namespace

void gated_head_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps) {
  with_type(x_TV.dtype, [&](auto t) {
    using T = decltype(t);
    const GatedNormArgs<T> a = gated_norm_args<T>(y_TV, x_TV, gate_TV, w_D, eps);
    launch_chained(stream_of(ctx), gated_norm_kernel<T>, dim3(static_cast<unsigned>(ceil_div(a.num_heads, kGateWarps))), dim3(kGateBlock),
                   0, a);
  });
}

void gated_head_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_D, ConstTensorView dy_TV,
                              ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps) {
  const std::int64_t D = w_D.shape[0], heads = x_TV.shape.num_elements() / D;
  if (D > kMaxGatedHead)
    fail(ErrorCode::kNotImplemented, "[gated_head_norm_backward] heads of {}; the kernel takes up to {}", D, kMaxGatedHead);
  const std::int64_t group = std::max(kMinGateGroup, ceil_div(heads, kMaxGateGroups)), groups = ceil_div(heads, group);
  auto* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(groups * D) * sizeof(float)));
  with_type(x_TV.dtype, [&](auto t) {
    using T = decltype(t);
    GatedNormArgs<T> a = gated_norm_args<T>(dx_TV, x_TV, gate_TV, w_D, eps);
    a.dgate = dgate_TV.as<T>();
    a.dgate_stride = dgate_TV.row_stride;
    a.dy = dy_TV.as<T>();
    a.dy_stride = dy_TV.row_stride;
    a.partial_dw = partial;
    a.group_heads = group;
    gated_norm_backward_kernel<T>
        <<<static_cast<unsigned>(groups), kGateBlock, static_cast<std::size_t>(kGateWarps * D) * sizeof(float), stream_of(ctx)>>>(a);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
  add_rows(ctx, dw_D.as<float>(), partial, groups, D);
}

void drop_gates(OpContext& ctx, TensorView out_TF, ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  move_ungated(ctx, out_TF, unlocked(in_TE), false, num_heads, head_dim);
}

void drop_gates_backward(OpContext& ctx, TensorView din_TE, ConstTensorView dout_TF, std::int64_t num_heads, std::int64_t head_dim) {
  move_ungated(ctx, unlocked(dout_TF), din_TE, true, num_heads, head_dim);
}

void gate_heads(OpContext& ctx, TensorView y_TQ, ConstTensorView x_TQ, ConstTensorView in_TE, std::int64_t num_heads,
                std::int64_t head_dim) {
  with_type(x_TQ.dtype, [&](auto t) {
    using T = decltype(t);
    launch_gate_heads<T, false>(ctx,
                                {.y = y_TQ.as<T>(),
                                 .x = x_TQ.as<T>(),
                                 .in = in_TE.as<T>(),
                                 .y_stride = y_TQ.row_stride,
                                 .x_stride = x_TQ.row_stride,
                                 .in_stride = in_TE.row_stride},
                                x_TQ.shape.num_rows(), num_heads, head_dim);
  });
}

void gate_heads_backward(OpContext& ctx, TensorView dx_TQ, TensorView din_TE, ConstTensorView dy_TQ, ConstTensorView x_TQ,
                         ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  with_type(x_TQ.dtype, [&](auto t) {
    using T = decltype(t);
    launch_gate_heads<T, true>(ctx,
                               {.y = dx_TQ.as<T>(),
                                .din = din_TE.as<T>(),
                                .x = x_TQ.as<T>(),
                                .in = in_TE.as<T>(),
                                .dy = dy_TQ.as<T>(),
                                .y_stride = dx_TQ.row_stride,
                                .din_stride = din_TE.row_stride,
                                .x_stride = x_TQ.row_stride,
                                .in_stride = in_TE.row_stride,
                                .dy_stride = dy_TQ.row_stride},
                               x_TQ.shape.num_rows(), num_heads, head_dim);
  });
}

}  // namespace prl::ops::cuda
