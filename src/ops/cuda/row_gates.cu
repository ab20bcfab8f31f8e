#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/sums.hpp"

// One number a row, from all of the row: the gate of an expert that every token passes.

namespace prl::ops::cuda {
namespace {

constexpr int kGateRows = 4;  ///< of a block, a warp each
constexpr int kGradBlock = 128;
/// Rows of a partial sum of the weight's gradient: at least so many, and at most so many sums.
constexpr std::int64_t kMinGradRows = 32, kMaxGradGroups = 1024;

/// One warp per row; a lane has every 32nd vector of the row.
template <typename T, bool kWide>
__global__ void __launch_bounds__(kGateRows* kWarp)
    row_gates_kernel(float* gates, const T* x, const float* w, std::int64_t x_stride, std::int64_t num_rows, std::int64_t cols) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kGateRows + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  wait_for_previous();
  let_next_begin();
  if (r >= num_rows) return;
  const T* const row = x + r * x_stride;
  float sum = 0.0f;
  for (std::int64_t c = static_cast<std::int64_t>(lane) * kVec; c < cols; c += kWarp * kVec) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kVec), cols - c));
    float v[kVec], by[kVec];
    load<kWide>(v, row + c, count);
    load<kWide>(by, w + c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum = fmaf(v[i], by[i], sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) gates[r] = sigmoid(sum);
}

template <typename T>
struct RowGatesGrad {
  T* dx;              ///< nullptr: not wanted
  float* partial_dw;  ///< [groups, cols]; nullptr: not wanted
  const float *dgates, *gates;
  const T* x;
  const float* w;
  std::int64_t dx_stride, x_stride, num_rows, cols, group_rows;
};

/// A block has a group of rows, which come one after the other, and kGradBlock vectors of columns, one a thread.
template <typename T, bool kWide, bool kAccumulate>
__global__ void __launch_bounds__(kGradBlock) row_gates_backward_kernel(const RowGatesGrad<T> a) {
  const std::int64_t c = (static_cast<std::int64_t>(blockIdx.y) * kGradBlock + threadIdx.x) * kVec;
  if (c >= a.cols) return;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(kVec), a.cols - c));
  const std::int64_t first = blockIdx.x * a.group_rows, last = min(a.num_rows, first + a.group_rows);
  float w[kVec], dw[kVec] = {};
  load<kWide>(w, a.w + c, count);
  for (std::int64_t r = first; r < last; ++r) {
    const float gate = a.gates[r], dlogit = a.dgates[r] * (gate * (1.0f - gate));
    if (a.partial_dw != nullptr) {
      float x[kVec];
      load<kWide>(x, a.x + r * a.x_stride + c, count);
#pragma unroll
      for (int i = 0; i < kVec; ++i) dw[i] = fmaf(dlogit, x[i], dw[i]);
    }
    if (a.dx == nullptr) continue;
    float dx[kVec] = {};
    T* const to = a.dx + r * a.dx_stride + c;
    if constexpr (kAccumulate) load<kWide>(dx, to, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) dx[i] = fmaf(dlogit, w[i], dx[i]);
    store<kWide>(to, dx, count);
  }
  if (a.partial_dw != nullptr) store<kWide>(a.partial_dw + blockIdx.x * a.cols + c, dw, count);
}

/// Whether all kVec elements of a vector are there and aligned, in fp32 and in the rows' own type.
bool is_wide_vector(const ConstTensorView& v) { return is_aligned(v.data, 16) && v.shape.num_elements() % kVec == 0; }

}  // namespace

void row_gates(OpContext& ctx, TensorView gates_T, ConstTensorView x_TH, ConstTensorView w_H) {
  const std::int64_t T = x_TH.shape.num_rows(), H = x_TH.shape.num_cols();
  const dim3 grid(static_cast<unsigned>(ceil_div(T, kGateRows)));
  with_type(x_TH.dtype, [&](auto t) {
    using Type = decltype(t);
    with_bool(is_wide(x_TH) && is_wide_vector(w_H), [&](auto wide) {
      launch_chained(stream_of(ctx), row_gates_kernel<Type, wide.value>, grid, dim3(kGateRows * kWarp), 0, gates_T.as<float>(),
                     x_TH.as<Type>(), w_H.as<float>(), x_TH.row_stride, T, H);
    });
  });
}

void row_gates_backward(OpContext& ctx, TensorView dx_TH, TensorView dw_H, ConstTensorView dgates_T, ConstTensorView gates_T,
                        ConstTensorView x_TH, ConstTensorView w_H, bool accumulate) {
  const std::int64_t T = x_TH.shape.num_rows(), H = x_TH.shape.num_cols();
  const std::int64_t group = std::max(kMinGradRows, ceil_div(T, kMaxGradGroups)), groups = ceil_div(T, group);
  auto* const partial =
      dw_H.data != nullptr ? static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(groups * H) * sizeof(float))) : nullptr;
  const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(ceil_div(H, kGradBlock * kVec)));
  const bool is_all_wide = is_wide(x_TH) && is_wide_vector(w_H) && (dx_TH.data == nullptr || is_wide(dx_TH));
  with_type(x_TH.dtype, [&](auto t) {
    using Type = decltype(t);
    with_bool(is_all_wide, [&](auto wide) {
      with_bool(accumulate, [&](auto adds) {
        row_gates_backward_kernel<Type, wide.value, adds.value><<<grid, kGradBlock, 0, stream_of(ctx)>>>({.dx = dx_TH.as<Type>(),
                                                                                                          .partial_dw = partial,
                                                                                                          .dgates = dgates_T.as<float>(),
                                                                                                          .gates = gates_T.as<float>(),
                                                                                                          .x = x_TH.as<Type>(),
                                                                                                          .w = w_H.as<float>(),
                                                                                                          .dx_stride = dx_TH.row_stride,
                                                                                                          .x_stride = x_TH.row_stride,
                                                                                                          .num_rows = T,
                                                                                                          .cols = H,
                                                                                                          .group_rows = group});
      });
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
  if (dw_H.data != nullptr) add_rows(ctx, dw_H.as<float>(), partial, groups, H);
}

}  // namespace prl::ops::cuda
