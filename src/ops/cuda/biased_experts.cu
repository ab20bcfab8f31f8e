#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/experts.hpp"

// What experts with biases and a clamped gate (GPT-OSS) have beside their products.

namespace prl::ops::cuda {
namespace {

constexpr int kBlock = 128;

struct PairRow {
  float gate[kVec], up[kVec];
};
/// kVec gates and ups from column c of F on, of which `count` exist.
template <bool kWide, typename T>
__device__ __forceinline__ PairRow load_pairs(const T* row, std::int64_t c, int count) {
  float a[kVec], b[kVec];
  load<kWide>(a, row + 2 * c, min(kVec, 2 * count));
  load<kWide>(b, row + 2 * c + kVec, max(0, 2 * count - kVec));
  PairRow out;
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    out.gate[i] = a[2 * i];
    out.up[i] = a[2 * i + 1];
    out.gate[kVec / 2 + i] = b[2 * i];
    out.up[kVec / 2 + i] = b[2 * i + 1];
  }
  return out;
}
template <bool kWide, typename T>
__device__ __forceinline__ void store_pairs(T* row, std::int64_t c, int count, const PairRow& p) {
  float a[kVec], b[kVec];
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    a[2 * i] = p.gate[i];
    a[2 * i + 1] = p.up[i];
    b[2 * i] = p.gate[kVec / 2 + i];
    b[2 * i + 1] = p.up[kVec / 2 + i];
  }
  store<kWide>(row + 2 * c, a, min(kVec, 2 * count));
  store<kWide>(row + 2 * c + kVec, b, max(0, 2 * count - kVec));
}

/// use(first column, count): a block has a row, a thread kVec columns at a time.
template <typename Use>
__device__ __forceinline__ void each_vector(std::int64_t cols, Use&& use) {
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * kVec; c < cols; c += kBlock * kVec)
    use(c, static_cast<int>(min(static_cast<std::int64_t>(kVec), cols - c)));
}

template <typename T>
struct ClampedArgs {
  T* out;
  const T* pairs;
  const float* factors;
  std::int64_t out_stride, pairs_stride, cols;
  float alpha, limit;
};
template <typename T, bool kWide>
__global__ void __launch_bounds__(kBlock) clamped_swiglu_kernel(const ClampedArgs<T> a) {
  const std::int64_t r = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  const float factor = a.factors[r];
  each_vector(a.cols, [&](std::int64_t c, int count) {
    PairRow p = load_pairs<kWide>(a.pairs + r * a.pairs_stride, c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) p.gate[i] = clamped_gated(p.gate[i], p.up[i], a.alpha, a.limit);
    round_all<T>(p.gate);
#pragma unroll
    for (float& v : p.gate) v *= factor;
    store<kWide>(a.out + r * a.out_stride + c, p.gate, count);
  });
}

template <typename T>
struct ClampedBackwardArgs {
  T* dpairs;
  float* dfactors;
  const T *dout, *pairs;
  const float* factors;
  std::int64_t dpairs_stride, dout_stride, pairs_stride, cols;
  float alpha, limit;
};
template <typename T, bool kWide>
__global__ void __launch_bounds__(kBlock) clamped_swiglu_backward_kernel(const ClampedBackwardArgs<T> a) {
  __shared__ float scratch[kBlock / kWarp];
  const std::int64_t r = blockIdx.x;
  const float factor = a.factors[r];
  float sum = 0.0f;
  each_vector(a.cols, [&](std::int64_t c, int count) {
    PairRow p = load_pairs<kWide>(a.pairs + r * a.pairs_stride, c, count);
    float d[kVec], hidden[kVec];
    load<kWide>(d, a.dout + r * a.dout_stride + c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) hidden[i] = clamped_gated(p.gate[i], p.up[i], a.alpha, a.limit);
    round_all<T>(hidden);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i < count) sum = fmaf(d[i], hidden[i], sum);
      d[i] *= factor;
    }
    round_all<T>(d);
#pragma unroll
    for (int i = 0; i < kVec; ++i) clamped_gated_backward(d[i], p.gate[i], p.up[i], a.alpha, a.limit);
    store_pairs<kWide>(a.dpairs + r * a.dpairs_stride, c, count, p);
  });
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) a.dfactors[r] = sum;
}

/// The expert that has row r: the last one whose rows begin at r or before, of those that have rows.
__device__ __forceinline__ int expert_of(const std::int32_t* begin, int num_experts, int r) {
  int low = 0, high = num_experts;  // begin[low] <= r < begin[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begin[middle] <= r ? low : high) = middle;
  }
  return low;
}

template <typename T>
struct BiasArgs {
  T* y;  ///< add_expert_biases
  const T* dy;
  const float* biases;
  float *dbiases, *dfactors;
  const std::int32_t *begin, *token;
  const float* factors;  ///< nullptr: 1
  std::int64_t stride, cols;
  int num_experts;
  std::int64_t first_token, end_token;
};
template <typename T, bool kWide>
__global__ void __launch_bounds__(kBlock) add_biases_kernel(const BiasArgs<T> a) {
  const std::int64_t r = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  const float* const bias = a.biases + static_cast<std::int64_t>(expert_of(a.begin, a.num_experts, static_cast<int>(r))) * a.cols;
  const float factor = a.factors != nullptr ? a.factors[r] : 1.0f;
  each_vector(a.cols, [&](std::int64_t c, int count) {
    float v[kVec], b[kVec];
    load<kWide>(v, a.y + r * a.stride + c, count);
    load<kWide>(b, bias + c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] += a.factors != nullptr ? factor * b[i] : b[i];
    store<kWide>(a.y + r * a.stride + c, v, count);
  });
}

/// A thread per expert and column: rows are added in order.
template <typename T>
__global__ void __launch_bounds__(kBlock) bias_gradients_kernel(const BiasArgs<T> a) {
  const int expert = static_cast<int>(blockIdx.y);
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (c >= a.cols) return;
  float sum = 0.0f;
  for (int r = a.begin[expert]; r < a.begin[expert + 1]; ++r) {
    if (a.token[r] < a.first_token || a.token[r] >= a.end_token) continue;
    const float d = to_float(a.dy[r * a.stride + c]);
    sum += a.factors != nullptr ? a.factors[r] * d : d;
  }
  a.dbiases[expert * a.cols + c] += sum;
}

template <typename T, bool kWide>
__global__ void __launch_bounds__(kBlock) bias_dots_kernel(const BiasArgs<T> a) {
  __shared__ float scratch[kBlock / kWarp];
  const std::int64_t r = blockIdx.x;
  const float* const bias = a.biases + static_cast<std::int64_t>(expert_of(a.begin, a.num_experts, static_cast<int>(r))) * a.cols;
  float sum = 0.0f;
  each_vector(a.cols, [&](std::int64_t c, int count) {
    float d[kVec], b[kVec];
    load<kWide>(d, a.dy + r * a.stride + c, count);
    load<kWide>(b, bias + c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (i < count) sum = fmaf(d[i], b[i], sum);
  });
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) a.dfactors[r] += sum;
}

template <typename T>
BiasArgs<T> bias_args(const ConstTensorView& rows_RN, const ConstTensorView& begin_P) {
  BiasArgs<T> a{};
  a.dy = rows_RN.as<T>();
  a.begin = begin_P.as<std::int32_t>();
  a.stride = rows_RN.row_stride;
  a.cols = rows_RN.shape.num_cols();
  a.num_experts = static_cast<int>(begin_P.shape.num_elements()) - 1;
  return a;
}
unsigned num_rows(const ConstTensorView& v) { return static_cast<unsigned>(v.shape.num_rows()); }

}  // namespace

void clamped_swiglu(OpContext& ctx, TensorView out_RF, ConstTensorView pairs_RG, ConstTensorView factors_R, const ClampedGate& gate) {
  with_type(out_RF.dtype, [&](auto t) {
    using T = decltype(t);
    const ClampedArgs<T> a{.out = out_RF.as<T>(),
                           .pairs = pairs_RG.as<T>(),
                           .factors = factors_R.as<float>(),
                           .out_stride = out_RF.row_stride,
                           .pairs_stride = pairs_RG.row_stride,
                           .cols = out_RF.shape.num_cols(),
                           .alpha = gate.alpha,
                           .limit = gate.limit};
    with_bool(is_wide(out_RF) && is_wide(pairs_RG), [&](auto wide) {
      launch_chained(stream_of(ctx), clamped_swiglu_kernel<T, wide.value>, dim3(num_rows(out_RF)), dim3(kBlock), 0, a);
    });
  });
}

void clamped_swiglu_backward(OpContext& ctx, TensorView dpairs_RG, TensorView dfactors_R, ConstTensorView dout_RF, ConstTensorView pairs_RG,
                             ConstTensorView factors_R, const ClampedGate& gate) {
  with_type(dout_RF.dtype, [&](auto t) {
    using T = decltype(t);
    const ClampedBackwardArgs<T> a{.dpairs = dpairs_RG.as<T>(),
                                   .dfactors = dfactors_R.as<float>(),
                                   .dout = dout_RF.as<T>(),
                                   .pairs = pairs_RG.as<T>(),
                                   .factors = factors_R.as<float>(),
                                   .dpairs_stride = dpairs_RG.row_stride,
                                   .dout_stride = dout_RF.row_stride,
                                   .pairs_stride = pairs_RG.row_stride,
                                   .cols = dout_RF.shape.num_cols(),
                                   .alpha = gate.alpha,
                                   .limit = gate.limit};
    with_bool(is_wide(dpairs_RG) && is_wide(dout_RF) && is_wide(pairs_RG),
              [&](auto wide) { clamped_swiglu_backward_kernel<T, wide.value><<<num_rows(dout_RF), kBlock, 0, stream_of(ctx)>>>(a); });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void add_expert_biases(OpContext& ctx, TensorView y_RN, ConstTensorView biases_V, ConstTensorView begin_P, ConstTensorView factors_R) {
  with_type(y_RN.dtype, [&](auto t) {
    using T = decltype(t);
    BiasArgs<T> a = bias_args<T>(y_RN, begin_P);
    a.y = y_RN.as<T>();
    a.biases = biases_V.as<float>();
    a.factors = factors_R.as<float>();
    with_bool(is_wide(y_RN) && is_aligned(biases_V.data, 16), [&](auto wide) {
      launch_chained(stream_of(ctx), add_biases_kernel<T, wide.value>, dim3(num_rows(y_RN)), dim3(kBlock), 0, a);
    });
  });
}

void expert_biases_backward(OpContext& ctx, TensorView dbiases_V, ConstTensorView dy_RN, ConstTensorView begin_P, ConstTensorView token_R,
                            ConstTensorView factors_R, const TokenRange& tokens) {
  with_type(dy_RN.dtype, [&](auto t) {
    using T = decltype(t);
    BiasArgs<T> a = bias_args<T>(dy_RN, begin_P);
    a.dbiases = dbiases_V.as<float>();
    a.token = token_R.as<std::int32_t>();
    a.factors = factors_R.as<float>();
    a.first_token = tokens.first;
    a.end_token = tokens.first + tokens.count;
    const dim3 grid(static_cast<unsigned>(ceil_div(a.cols, kBlock)), static_cast<unsigned>(a.num_experts));
    bias_gradients_kernel<T><<<grid, kBlock, 0, stream_of(ctx)>>>(a);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void add_bias_dots(OpContext& ctx, TensorView dfactors_R, ConstTensorView dy_RN, ConstTensorView biases_V, ConstTensorView begin_P) {
  with_type(dy_RN.dtype, [&](auto t) {
    using T = decltype(t);
    BiasArgs<T> a = bias_args<T>(dy_RN, begin_P);
    a.biases = biases_V.as<float>();
    a.dfactors = dfactors_R.as<float>();
    with_bool(is_wide(dy_RN) && is_aligned(biases_V.data, 16),
              [&](auto wide) { bias_dots_kernel<T, wide.value><<<num_rows(dy_RN), kBlock, 0, stream_of(ctx)>>>(a); });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
