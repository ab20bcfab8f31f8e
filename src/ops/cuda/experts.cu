#include <climits>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/device.cuh"
#include "ops/experts.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kRouteWarps = 4;
constexpr int kRowBlock = 128;

struct RouteArgs {
  std::int32_t* ids;
  float* weights;
  float* mass;
  const float* logits;
  std::int64_t ids_stride, weights_stride, logits_stride;
  int num_tokens, num_experts, num_active;
  bool renormalize;
};

/// The greater of two candidates; of equals that of the lower index.
__device__ __forceinline__ void take_greater(float& value, int& index, float other, int other_index) {
  if (other > value || (other == value && other_index < index)) {
    value = other;
    index = other_index;
  }
}

/// One warp per token; lane k keeps the k-th expert.
__global__ void __launch_bounds__(kRouteWarps* kWarp) route_kernel(const RouteArgs a) {
  const int t = static_cast<int>(blockIdx.x) * kRouteWarps + static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  if (t >= a.num_tokens) return;
  const float* logits = a.logits + t * a.logits_stride;
  float last = INFINITY, mine = 0.0f, most = 0.0f;
  int last_index = -1, mine_index = 0;
  for (int k = 0; k < a.num_active; ++k) {
    float best = -INFINITY;
    int best_index = INT_MAX;
    for (int e = lane; e < a.num_experts; e += kWarp) {
      const float v = logits[e];
      if (v < last || (v == last && e > last_index)) take_greater(best, best_index, v, e);
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2)
      take_greater(best, best_index, __shfl_xor_sync(kFullWarp, best, step), __shfl_xor_sync(kFullWarp, best_index, step));
    if (best_index == INT_MAX) best_index = 0;  // only NaN is left
    if (k == 0) most = best;
    if (lane == k) mine = best, mine_index = best_index;
    last = best, last_index = best_index;
  }
  float all = 0.0f;
  for (int e = lane; e < a.num_experts; e += kWarp) all += __expf(logits[e] - most);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) all += __shfl_xor_sync(kFullWarp, all, step);
  const float weight = __expf(mine - most);
  float of_chosen = 0.0f;
  for (int k = 0; k < a.num_active; ++k) of_chosen += __shfl_sync(kFullWarp, weight, k);
  if (lane == 0) a.mass[t] = of_chosen / all;
  if (lane < a.num_active) {
    a.ids[t * a.ids_stride + lane] = mine_index;
    a.weights[t * a.weights_stride + lane] = weight / (a.renormalize ? of_chosen : all);
  }
}

/// One warp per token: first what all experts get, then the active ones.
template <typename T>
__global__ void __launch_bounds__(kRouteWarps* kWarp)
    route_backward_kernel(T* dlogits, const float* dweights, std::int64_t dlogits_stride, std::int64_t dweights_stride, const RouteArgs a) {
  const int t = static_cast<int>(blockIdx.x) * kRouteWarps + static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  if (t >= a.num_tokens) return;
  const float* logits = a.logits + t * a.logits_stride;
  const bool is_mine = lane < a.num_active;
  const int index = is_mine ? a.ids[t * a.ids_stride + lane] : 0;
  const float w = is_mine ? a.weights[t * a.weights_stride + lane] : 0.0f, dw = is_mine ? dweights[t * dweights_stride + lane] : 0.0f;
  float mean = 0.0f;
  for (int k = 0; k < a.num_active; ++k) mean += __shfl_sync(kFullWarp, w * dw, k);
  float all = 1.0f;
  const float most = logits[__shfl_sync(kFullWarp, index, 0)];
  if (!a.renormalize) {
    all = 0.0f;
    for (int e = lane; e < a.num_experts; e += kWarp) all += __expf(logits[e] - most);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) all += __shfl_xor_sync(kFullWarp, all, step);
  }
  T* out = dlogits + t * dlogits_stride;
  for (int e = lane; e < a.num_experts; e += kWarp) out[e] = from_float<T>(a.renormalize ? 0.0f : -mean * (__expf(logits[e] - most) / all));
  __syncwarp();
  if (is_mine) out[index] = from_float<T>(w * (dw - mean));
}

template <typename T>
__global__ void __launch_bounds__(kRowBlock)
    scale_rows_kernel(T* out, const T* x, const float* factors, std::int64_t out_stride, std::int64_t x_stride, std::int64_t cols) {
  const std::int64_t r = blockIdx.x;
  const float factor = factors[r];
  for (std::int64_t c = threadIdx.x; c < cols; c += kRowBlock)
    out[r * out_stride + c] = from_float<T>(to_float(x[r * x_stride + c]) * factor);
}

template <typename T>
__global__ void __launch_bounds__(kRowBlock)
    row_dots_kernel(float* out, const T* a, const T* b, std::int64_t a_stride, std::int64_t b_stride, std::int64_t cols) {
  __shared__ float scratch[kRowBlock / kWarp];
  const std::int64_t r = blockIdx.x;
  float sum = 0.0f;
  for (std::int64_t c = threadIdx.x; c < cols; c += kRowBlock)
    sum = fmaf(to_float(a[r * a_stride + c]), to_float(b[r * b_stride + c]), sum);
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) out[r] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kRowBlock)
    sum_rows_kernel(T* out, const T* x, const std::int32_t* rows, std::int64_t out_stride, std::int64_t x_stride, std::int64_t rows_stride,
                    std::int64_t cols, int num_rows, bool accumulate) {
  const std::int64_t t = blockIdx.x, c = static_cast<std::int64_t>(blockIdx.y) * kRowBlock + threadIdx.x;
  if (c >= cols) return;
  float sum = 0.0f;
  for (int k = 0; k < num_rows; ++k) sum += to_float(x[rows[t * rows_stride + k] * x_stride + c]);
  T* const to = out + t * out_stride + c;
  *to = from_float<T>(accumulate ? to_float(*to) + sum : sum);
}

RouteArgs args_of(const ConstTensorView& logits_TE, const ConstTensorView& ids_TK, const ConstTensorView& weights_TK, bool renormalize) {
  return {.ids = const_cast<std::int32_t*>(ids_TK.as<std::int32_t>()),
          .weights = const_cast<float*>(weights_TK.as<float>()),
          .mass = nullptr,
          .logits = logits_TE.as<float>(),
          .ids_stride = ids_TK.row_stride,
          .weights_stride = weights_TK.row_stride,
          .logits_stride = logits_TE.row_stride,
          .num_tokens = static_cast<int>(logits_TE.shape.num_rows()),
          .num_experts = static_cast<int>(logits_TE.shape.num_cols()),
          .num_active = static_cast<int>(ids_TK.shape.num_cols()),
          .renormalize = renormalize};
}

unsigned route_blocks(const RouteArgs& a) { return static_cast<unsigned>((a.num_tokens + kRouteWarps - 1) / kRouteWarps); }

}  // namespace

void route(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE, bool renormalize) {
  RouteArgs a = args_of(logits_TE, ids_TK, weights_TK, renormalize);
  a.mass = mass_T.as<float>();
  route_kernel<<<route_blocks(a), kRouteWarps * kWarp, 0, stream_of(ctx)>>>(a);
  PRL_CUDA_CHECK(cudaGetLastError());
}

void route_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE, ConstTensorView ids_TK,
                    ConstTensorView weights_TK, bool renormalize) {
  const RouteArgs a = args_of(logits_TE, ids_TK, weights_TK, renormalize);
  with_type(dlogits_TE.dtype, [&](auto t) {
    using T = decltype(t);
    route_backward_kernel<T><<<route_blocks(a), kRouteWarps * kWarp, 0, stream_of(ctx)>>>(dlogits_TE.as<T>(), dweights_TK.as<float>(),
                                                                                          dlogits_TE.row_stride, dweights_TK.row_stride, a);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void scale_rows(OpContext& ctx, TensorView out_RC, ConstTensorView x_RC, ConstTensorView factors_R) {
  with_type(x_RC.dtype, [&](auto t) {
    using T = decltype(t);
    scale_rows_kernel<T><<<static_cast<unsigned>(x_RC.shape.num_rows()), kRowBlock, 0, stream_of(ctx)>>>(
        out_RC.as<T>(), x_RC.as<T>(), factors_R.as<float>(), out_RC.row_stride, x_RC.row_stride, x_RC.shape.num_cols());
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void row_dots(OpContext& ctx, TensorView out_R, ConstTensorView a_RC, ConstTensorView b_RC) {
  with_type(a_RC.dtype, [&](auto t) {
    using T = decltype(t);
    row_dots_kernel<T><<<static_cast<unsigned>(a_RC.shape.num_rows()), kRowBlock, 0, stream_of(ctx)>>>(
        out_R.as<float>(), a_RC.as<T>(), b_RC.as<T>(), a_RC.row_stride, b_RC.row_stride, a_RC.shape.num_cols());
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void sum_rows(OpContext& ctx, TensorView out_TC, ConstTensorView x_RC, ConstTensorView rows_TK, bool accumulate) {
  const std::int64_t cols = out_TC.shape.num_cols();
  const dim3 grid(static_cast<unsigned>(out_TC.shape.num_rows()), static_cast<unsigned>(ceil_div(cols, kRowBlock)));
  with_type(out_TC.dtype, [&](auto t) {
    using T = decltype(t);
    sum_rows_kernel<T><<<grid, kRowBlock, 0, stream_of(ctx)>>>(out_TC.as<T>(), x_RC.as<T>(), rows_TK.as<std::int32_t>(), out_TC.row_stride,
                                                               x_RC.row_stride, rows_TK.row_stride, cols,
                                                               static_cast<int>(rows_TK.shape.num_cols()), accumulate);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
