#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"

// What stands between the two matrices of an MLP without gates, with the factor of an expert's row or without.

namespace prl::ops::cuda {
namespace {

constexpr int kSquareBlock = 128;

__device__ __forceinline__ float positive(float x) { return x < 0.0f ? 0.0f : x; }  // a NaN stays one

/// use(first column, count): a block has a row, a thread kVec columns at a time.
template <typename Use>
__device__ __forceinline__ void each_vector(std::int64_t cols, Use&& use) {
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * kVec; c < cols; c += kSquareBlock * kVec)
    use(c, static_cast<int>(min(static_cast<std::int64_t>(kVec), cols - c)));
}

template <typename T>
struct SquareArgs {
  T* out;  ///< dx of the gradient
  float* dfactors;
  const T *x, *dout;
  const float* factors;  ///< nullptr: there are none
  std::int64_t out_stride, x_stride, dout_stride, cols;
};

template <typename T, bool kWide>
__global__ void __launch_bounds__(kSquareBlock) squared_relu_kernel(const SquareArgs<T> a) {
  const std::int64_t r = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  const float factor = a.factors != nullptr ? a.factors[r] : 1.0f;
  each_vector(a.cols, [&](std::int64_t c, int count) {
    float v[kVec];
    load<kWide>(v, a.x + r * a.x_stride + c, count);
#pragma unroll
    for (float& x : v) x = positive(x) * positive(x);
    round_all<T>(v);
#pragma unroll
    for (float& x : v) x *= factor;
    store<kWide>(a.out + r * a.out_stride + c, v, count);
  });
}

template <typename T, bool kWide>
__global__ void __launch_bounds__(kSquareBlock) squared_relu_backward_kernel(const SquareArgs<T> a) {
  __shared__ float scratch[kSquareBlock / kWarp];
  const std::int64_t r = blockIdx.x;
  const float factor = a.factors != nullptr ? a.factors[r] : 1.0f;
  float sum = 0.0f;
  each_vector(a.cols, [&](std::int64_t c, int count) {
    float v[kVec], d[kVec], square[kVec];
    load<kWide>(v, a.x + r * a.x_stride + c, count);
    load<kWide>(d, a.dout + r * a.dout_stride + c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = positive(v[i]), square[i] = v[i] * v[i];
    round_all<T>(square);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sum = fmaf(d[i], square[i], sum);
      d[i] *= factor;
    }
    round_all<T>(d);
#pragma unroll
    for (int i = 0; i < kVec; ++i) d[i] *= v[i] + v[i];
    store<kWide>(a.out + r * a.out_stride + c, d, count);
  });
  if (a.factors == nullptr) return;
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) a.dfactors[r] = sum;
}

}  // namespace

void squared_relu(OpContext& ctx, TensorView out_TF, ConstTensorView x_TF, ConstTensorView factors_T) {
  with_type(out_TF.dtype, [&](auto t) {
    using T = decltype(t);
    const SquareArgs<T> a{.out = out_TF.as<T>(),
                          .dfactors = nullptr,
                          .x = x_TF.as<T>(),
                          .dout = nullptr,
                          .factors = factors_T.as<float>(),
                          .out_stride = out_TF.row_stride,
                          .x_stride = x_TF.row_stride,
                          .dout_stride = 0,
                          .cols = out_TF.shape.num_cols()};
    with_bool(is_wide(out_TF) && is_wide(x_TF), [&](auto wide) {
      launch_chained(stream_of(ctx), squared_relu_kernel<T, decltype(wide)::value>, dim3(static_cast<unsigned>(out_TF.shape.num_rows())),
                     dim3(kSquareBlock), 0, a);
    });
  });
}

void squared_relu_backward(OpContext& ctx, TensorView dx_TF, TensorView dfactors_T, ConstTensorView dout_TF, ConstTensorView x_TF,
                           ConstTensorView factors_T) {
  with_type(dout_TF.dtype, [&](auto t) {
    using T = decltype(t);
    const SquareArgs<T> a{.out = dx_TF.as<T>(),
                          .dfactors = dfactors_T.as<float>(),
                          .x = x_TF.as<T>(),
                          .dout = dout_TF.as<T>(),
                          .factors = factors_T.as<float>(),
                          .out_stride = dx_TF.row_stride,
                          .x_stride = x_TF.row_stride,
                          .dout_stride = dout_TF.row_stride,
                          .cols = dout_TF.shape.num_cols()};
    with_bool(is_wide(dx_TF) && is_wide(dout_TF) && is_wide(x_TF), [&](auto wide) {
      squared_relu_backward_kernel<T, decltype(wide)::value>
          <<<static_cast<unsigned>(dout_TF.shape.num_rows()), kSquareBlock, 0, stream_of(ctx)>>>(a);
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
