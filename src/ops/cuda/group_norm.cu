#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/sums.hpp"

// The norm behind a state space: of what its gate has let through, by groups of a row.

namespace prl::ops::cuda {
namespace {

constexpr int kGroupWarps = 4;
constexpr int kGroupBlock = kGroupWarps * kWarp;
/// Tokens of a partial sum of the weight's gradient: at least so many, and at most so many sums.
constexpr std::int64_t kMinGroupTokens = 32, kMaxTokenGroups = 256;
/// The widest group whose gradient of the weight fits into shared memory without asking for more.
constexpr std::int64_t kMaxNormGroup = 48 * 1024 / (kGroupWarps * static_cast<std::int64_t>(sizeof(float)));

template <typename T>
struct GroupNormArgs {
  T *y, *dgate;  ///< y: dx of the gradient
  const T *x, *gate, *dy;
  const float* w;
  float* partial_dw;  ///< [blocks of tokens, V]
  std::int64_t y_stride, dgate_stride, x_stride, gate_stride, dy_stride, num_tokens, block_tokens;
  int num_groups, width;  ///< of a group
  float inverse_width, eps;
};

/// One warp per token and group; a lane has every 32nd element.
template <typename T>
__global__ void __launch_bounds__(kGroupBlock) group_norm_kernel(const GroupNormArgs<T> a) {
  let_next_begin();
  wait_for_previous();
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kGroupWarps + threadIdx.x / kWarp, t = index / a.num_groups;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, first = static_cast<int>(index % a.num_groups) * a.width;
  if (t >= a.num_tokens) return;
  const T *x = a.x + t * a.x_stride + first, *gate = a.gate + t * a.gate_stride + first;
  T* const y = a.y + t * a.y_stride + first;
  const auto opened = [&](int i) {
    const float g = to_float(gate[i]);
    return to_float(x[i]) * (g * sigmoid(g));
  };
  float squares = 0.0f;
  for (int i = lane; i < a.width; i += kWarp) {
    const float h = opened(i);
    squares = fmaf(h, h, squares);
  }
  const float scale = norm_scale(warp_sum(squares), a.inverse_width, a.eps);
  for (int i = lane; i < a.width; i += kWarp) y[i] = from_float<T>(opened(i) * scale * a.w[first + i]);
}

/// A block has a group of columns and some tokens, which its warps take in turn; each warp sums the weight's gradient in a row of shared
/// memory, and the warps' sums are added in order.
template <typename T>
__global__ void __launch_bounds__(kGroupBlock) group_norm_backward_kernel(const GroupNormArgs<T> a) {
  extern __shared__ float sums[];  // [kGroupWarps, width]
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp, width = a.width;
  const int first = static_cast<int>(blockIdx.y) * width;
  float* const dw = sums + warp * width;
  for (int i = lane; i < width; i += kWarp) dw[i] = 0.0f;
  const std::int64_t begin = blockIdx.x * a.block_tokens, end = min(a.num_tokens, begin + a.block_tokens);
  for (std::int64_t t = begin + warp; t < end; t += kGroupWarps) {
    const T *x = a.x + t * a.x_stride + first, *gate = a.gate + t * a.gate_stride + first, *dy = a.dy + t * a.dy_stride + first;
    T *dx = a.y + t * a.y_stride + first, *dgate = a.dgate + t * a.dgate_stride + first;
    float2 part = make_float2(0.0f, 0.0f);
    for (int i = lane; i < width; i += kWarp) {
      const float g = to_float(gate[i]), h = to_float(x[i]) * (g * sigmoid(g));
      part.x = fmaf(h, h, part.x);
      part.y = fmaf(to_float(dy[i]) * a.w[first + i], h, part.y);
    }
    const float scale = norm_scale(warp_sum(part.x), a.inverse_width, a.eps);
    const float k = warp_sum(part.y) * scale * scale * scale * a.inverse_width;
    for (int i = lane; i < width; i += kWarp) {
      const float v = to_float(x[i]), g = to_float(gate[i]), d = to_float(dy[i]), open = sigmoid(g), silu = g * open, h = v * silu;
      const float dh = fmaf(-k, h, d * a.w[first + i] * scale);
      dw[i] = fmaf(d, h * scale, dw[i]);
      dgate[i] = from_float<T>(dh * v * fmaf(silu, 1.0f - open, open));
      dx[i] = from_float<T>(dh * silu);
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kGroupBlock) {
    float total = sums[i];
    for (int w = 1; w < kGroupWarps; ++w) total += sums[w * width + i];
    a.partial_dw[(blockIdx.x * static_cast<std::int64_t>(a.num_groups) + blockIdx.y) * width + i] = total;
  }
}

template <typename T>
GroupNormArgs<T> group_norm_args(const TensorView& y, const ConstTensorView& x, const ConstTensorView& gate, const ConstTensorView& w,
                                 std::int64_t num_groups, float eps) {
  const std::int64_t width = w.shape[0] / num_groups;
  return {.y = y.as<T>(),
          .x = x.as<T>(),
          .gate = gate.as<T>(),
          .w = w.as<float>(),
          .y_stride = y.row_stride,
          .x_stride = x.row_stride,
          .gate_stride = gate.row_stride,
          .num_tokens = x.shape.num_rows(),
          .num_groups = static_cast<int>(num_groups),
          .width = static_cast<int>(width),
          .inverse_width = 1.0f / static_cast<float>(width),
          .eps = eps};
}

}  // namespace

void gated_group_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_V,
                      std::int64_t num_groups, float eps) {
  const std::int64_t blocks = ceil_div(x_TV.shape.num_rows() * num_groups, kGroupWarps);
  with_type(x_TV.dtype, [&](auto t) {
    using T = decltype(t);
    launch_chained(stream_of(ctx), group_norm_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kGroupBlock), 0,
                   group_norm_args<T>(y_TV, x_TV, gate_TV, w_V, num_groups, eps));
  });
}

void gated_group_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_V, ConstTensorView dy_TV,
                               ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_V, std::int64_t num_groups, float eps) {
  const std::int64_t V = w_V.shape[0], T = x_TV.shape.num_rows(), width = V / num_groups;
  if (width > kMaxNormGroup)
    fail(ErrorCode::kNotImplemented, "[gated_group_norm_backward] groups of {} columns; this build has up to {}", width, kMaxNormGroup);
  const std::int64_t block_tokens = std::max(kMinGroupTokens, ceil_div(T, kMaxTokenGroups)), blocks = ceil_div(T, block_tokens);
  auto* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(blocks * V) * sizeof(float)));
  with_type(x_TV.dtype, [&](auto t) {
    using E = decltype(t);
    GroupNormArgs<E> a = group_norm_args<E>(dx_TV, x_TV, gate_TV, w_V, num_groups, eps);
    a.dgate = dgate_TV.as<E>();
    a.dgate_stride = dgate_TV.row_stride;
    a.dy = dy_TV.as<E>();
    a.dy_stride = dy_TV.row_stride;
    a.partial_dw = partial;
    a.block_tokens = block_tokens;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(num_groups));
    group_norm_backward_kernel<E><<<grid, kGroupBlock, static_cast<std::size_t>(kGroupWarps * width) * sizeof(float), stream_of(ctx)>>>(a);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
  add_rows(ctx, dw_V.as<float>(), partial, blocks, V);
}

}  // namespace prl::ops::cuda
