#pragma once

#include <array>

#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"

namespace prl::ops::cuda {

/// Element-by-element work over kIn inputs and kOut outputs of one [rows, cols] shape, 8 elements a thread. Outputs may alias
/// inputs. `f(out, in)` gets float[kOut][8] and float[kIn][8].
template <typename Out, typename In, int kOut, int kIn, typename F>
struct MapArgs {
  Out* out[kOut];
  const In* in[kIn];
  std::int64_t out_stride[kOut], in_stride[kIn];
  std::uint32_t vectors_per_row;
  std::uint32_t num_vectors;
  std::int64_t cols;
  bool wide;  ///< every row starts 16-byte aligned
  F f;
};

constexpr int kMapBlock = 256;

template <typename Out, typename In, int kOut, int kIn, typename F>
__global__ void __launch_bounds__(kMapBlock) map_kernel(const MapArgs<Out, In, kOut, kIn, F> a) {
  let_next_begin();
  wait_for_previous();
  const std::uint32_t v = blockIdx.x * kMapBlock + threadIdx.x;
  if (v >= a.num_vectors) return;
  const std::uint32_t row = v / a.vectors_per_row;
  const std::int64_t c = static_cast<std::int64_t>(v - row * a.vectors_per_row) * kVec;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(kVec), a.cols - c));
  float in[kIn][kVec], out[kOut][kVec];
  if (a.wide && count == kVec) {
#pragma unroll
    for (int i = 0; i < kIn; ++i) load<true>(in[i], a.in[i] + row * a.in_stride[i] + c, count);
    a.f(out, in);
#pragma unroll
    for (int i = 0; i < kOut; ++i) store<true>(a.out[i] + row * a.out_stride[i] + c, out[i], count);
  } else {
#pragma unroll
    for (int i = 0; i < kIn; ++i) load<false>(in[i], a.in[i] + row * a.in_stride[i] + c, count);
    a.f(out, in);
#pragma unroll
    for (int i = 0; i < kOut; ++i) store<false>(a.out[i] + row * a.out_stride[i] + c, out[i], count);
  }
}

template <typename Out, typename In, int kOut, int kIn, typename F>
void map(OpContext& ctx, const std::array<TensorView, kOut>& outs, const std::array<ConstTensorView, kIn>& ins, const F& f) {
  MapArgs<Out, In, kOut, kIn, F> a{.f = f};
  std::int64_t rows = outs[0].shape.num_rows();
  a.cols = outs[0].shape.num_cols();
  bool dense = true, aligned = true;
  const auto look_at = [&](const ConstTensorView& v) {
    dense = dense && (v.row_stride == a.cols || rows <= 1);
    aligned = aligned && is_aligned(v.data, 16);
  };
  for (const TensorView& v : outs) look_at(v);
  for (const ConstTensorView& v : ins) look_at(v);
  if (dense) {  // one long row
    a.cols *= rows;
    rows = 1;
  }
  a.wide = aligned;
  const auto stride_of = [&](const ConstTensorView& v) {
    if (rows > 1 && v.row_stride * static_cast<std::int64_t>(size_of(v.dtype)) % 16 != 0) a.wide = false;
    return dense ? 0 : v.row_stride;
  };
  for (std::size_t i = 0; i < kOut; ++i) {
    a.out[i] = outs[i].template as<Out>();
    a.out_stride[i] = stride_of(outs[i]);
  }
  for (std::size_t i = 0; i < kIn; ++i) {
    a.in[i] = ins[i].template as<In>();
    a.in_stride[i] = stride_of(ins[i]);
  }
  const std::int64_t per_row = ceil_div(a.cols, kVec), total = rows * per_row;
  PRL_CHECK(total < (std::int64_t{1} << 32) - kMapBlock, "a tensor of {} elements in one launch", rows * a.cols);
  a.vectors_per_row = static_cast<std::uint32_t>(per_row);
  a.num_vectors = static_cast<std::uint32_t>(total);
  launch_chained(stream_of(ctx), map_kernel<Out, In, kOut, kIn, F>, dim3(static_cast<unsigned>(ceil_div(total, kMapBlock))),
                 dim3(kMapBlock), 0, a);
}

/// A [count] fp32 array as a view.
inline TensorView dense_f32(float* data, std::int64_t count) { return {data, Shape{count}, DType::kF32, {}, count}; }
inline ConstTensorView dense_f32(const float* data, std::int64_t count) { return {data, Shape{count}, DType::kF32, {}, count}; }

/// out = a * x + b * y, fp32.
struct Axpby {
  float a, b;
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[2][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = fmaf(a, in[0][i], b * in[1][i]);
  }
};

}  // namespace prl::ops::cuda
