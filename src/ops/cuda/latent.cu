#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"

// Heads of latent attention: copies between layouts, kVec elements a thread.

namespace prl::ops::cuda {
namespace {

constexpr int kLatentBlock = 256;
constexpr std::int64_t kMaxLatentRows = 32768;

/// Sizes of LatentHeads, and of each row that a kernel writes how many vectors it has.
struct LatentSizes {
  int H, D, N, R, V;
  bool neighbours;
  std::int64_t num_rows;
  int num_vectors;
  /// Where element i of the rotated ones stands in the inputs, and the reverse.
  __device__ int place_of(int i) const { return !neighbours ? i : i < R / 2 ? 2 * i : 2 * (i - R / 2) + 1; }
  __device__ int order_of(int i) const { return !neighbours ? i : i % 2 == 0 ? i / 2 : R / 2 + i / 2; }
};

template <typename T>
struct LatentRows {
  T* p;
  std::int64_t stride;
  bool is_wide;  ///< every vector of every row is aligned
  __device__ T* row(std::int64_t t) const { return p + t * stride; }
};
template <typename T, typename View>
LatentRows<T> rows_of(const View& v) {
  const bool is_whole = v.row_stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0 || v.shape.num_rows() <= 1;
  return {static_cast<T*>(const_cast<void*>(static_cast<const void*>(v.data))), v.row_stride, is_aligned(v.data, 16) && is_whole};
}

template <typename T>
__device__ __forceinline__ void copy_vector(T* to, bool to_wide, const T* from, bool from_wide) {
  float v[kVec];
  if (from_wide)
    load<true>(v, from, kVec);
  else
    load<false>(v, from, kVec);
  if (to_wide)
    store<true>(to, v, kVec);
  else
    store<false>(to, v, kVec);
}
template <typename T>
__device__ __forceinline__ void clear_vector(T* to, bool is_wide) {
  const float v[kVec] = {};
  if (is_wide)
    store<true>(to, v, kVec);
  else
    store<false>(to, v, kVec);
}

/// A row and a vector of it for each thread.
template <typename F>
__device__ __forceinline__ void for_each_vector(const LatentSizes& s, const F& f) {
  let_next_begin();
  wait_for_previous();
  const int v = static_cast<int>(blockIdx.x) * kLatentBlock + static_cast<int>(threadIdx.x);
  if (v >= s.num_vectors) return;
  for (std::int64_t t = blockIdx.y; t < s.num_rows; t += gridDim.y) f(t, v * kVec);
}

template <typename T>
__global__ void __launch_bounds__(kLatentBlock)
    latent_heads_kernel(LatentRows<T> qkv, LatentRows<T> q, LatentRows<T> up, LatentRows<T> rotary, const LatentSizes s) {
  for_each_vector(s, [&](std::int64_t t, int c) {
    T* const to = qkv.row(t) + c;
    const int head = c / s.D, d = c % s.D, part = head / s.H, h = head % s.H;
    if (part == 2) {
      if (d < s.V)
        copy_vector(to, qkv.is_wide, up.row(t) + h * (s.N + s.V) + s.N + d, up.is_wide);
      else
        clear_vector(to, qkv.is_wide);
    } else if (d < s.R) {
      const T* const from = part == 0 ? q.row(t) + h * (s.N + s.R) + s.N : rotary.row(t);
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = from[s.place_of(d + i)];
    } else if (d < s.R + s.N) {
      if (part == 0)
        copy_vector(to, qkv.is_wide, q.row(t) + h * (s.N + s.R) + d - s.R, q.is_wide);
      else
        copy_vector(to, qkv.is_wide, up.row(t) + h * (s.N + s.V) + d - s.R, up.is_wide);
    } else {
      clear_vector(to, qkv.is_wide);
    }
  });
}

/// Of queries.
template <typename T>
__global__ void __launch_bounds__(kLatentBlock) latent_dq_kernel(LatentRows<T> dq, LatentRows<T> dqkv, const LatentSizes s) {
  for_each_vector(s, [&](std::int64_t t, int c) {
    T* const to = dq.row(t) + c;
    const int h = c / (s.N + s.R), d = c % (s.N + s.R);
    const T* const from = dqkv.row(t) + h * s.D;
    if (d < s.N) return copy_vector(to, dq.is_wide, from + s.R + d, dqkv.is_wide);
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = from[s.order_of(d - s.N + i)];
  });
}

template <typename T>
__global__ void __launch_bounds__(kLatentBlock) latent_dup_kernel(LatentRows<T> dup, LatentRows<T> dqkv, const LatentSizes s) {
  for_each_vector(s, [&](std::int64_t t, int c) {
    const int h = c / (s.N + s.V), d = c % (s.N + s.V);
    const T* const from = dqkv.row(t) + (d < s.N ? (s.H + h) * s.D + s.R + d : (2 * s.H + h) * s.D + d - s.N);
    copy_vector(dup.row(t) + c, dup.is_wide, from, dqkv.is_wide);
  });
}

/// Sums over heads, in their order.
template <typename T>
__global__ void __launch_bounds__(kLatentBlock) latent_drotary_kernel(LatentRows<T> drotary, LatentRows<T> dqkv, const LatentSizes s) {
  for_each_vector(s, [&](std::int64_t t, int c) {
    const T* const from = dqkv.row(t) + s.H * s.D;
    float sums[kVec] = {};
    for (int h = 0; h < s.H; ++h) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[i] += to_float(from[h * s.D + s.order_of(c + i)]);
    }
    if (drotary.is_wide)
      store<true>(drotary.row(t) + c, sums, kVec);
    else
      store<false>(drotary.row(t) + c, sums, kVec);
  });
}

/// Between heads of V and of D elements; what is wider is written with zeros behind.
template <typename T, bool kWiden>
__global__ void __launch_bounds__(kLatentBlock) narrow_heads_kernel(LatentRows<T> out, LatentRows<T> in, const LatentSizes s) {
  for_each_vector(s, [&](std::int64_t t, int c) {
    const int to = kWiden ? s.D : s.V, from = kWiden ? s.V : s.D, h = c / to, d = c % to;
    if (d < s.V)
      copy_vector(out.row(t) + c, out.is_wide, in.row(t) + h * from + d, in.is_wide);
    else
      clear_vector(out.row(t) + c, out.is_wide);
  });
}

/// `cols`: of a row of what is written.
LatentSizes sizes_of(const LatentHeads& h, std::int64_t num_rows, std::int64_t cols) {
  return {static_cast<int>(h.num_heads),
          static_cast<int>(h.head_dim),
          static_cast<int>(h.plain_dim),
          static_cast<int>(h.rotary_dim),
          static_cast<int>(h.value_dim),
          h.are_pairs_neighbours,
          num_rows,
          static_cast<int>(cols / kVec)};
}
dim3 grid_of(const LatentSizes& s) {
  return {static_cast<unsigned>(ceil_div(s.num_vectors, kLatentBlock)), static_cast<unsigned>(std::min(s.num_rows, kMaxLatentRows))};
}

/// kernel(out, in, sizes).
template <typename T, typename View>
void launch_latent(OpContext& ctx, void (*kernel)(LatentRows<T>, LatentRows<T>, LatentSizes), const TensorView& out, const View& in,
                   const LatentHeads& h) {
  if (out.data == nullptr) return;
  const LatentSizes s = sizes_of(h, out.shape.num_rows(), out.shape.num_cols());
  launch_chained(stream_of(ctx), kernel, grid_of(s), dim3(kLatentBlock), 0, rows_of<T>(out), rows_of<T>(in), s);
}

}  // namespace

void latent_heads(OpContext& ctx, TensorView qkv_TE, ConstTensorView q_TQ, ConstTensorView up_TU, ConstTensorView rotary_TR,
                  const LatentHeads& heads) {
  with_type(qkv_TE.dtype, [&](auto t) {
    using T = decltype(t);
    const LatentSizes s = sizes_of(heads, qkv_TE.shape.num_rows(), qkv_TE.shape.num_cols());
    launch_chained(stream_of(ctx), latent_heads_kernel<T>, grid_of(s), dim3(kLatentBlock), 0, rows_of<T>(qkv_TE), rows_of<T>(q_TQ),
                   rows_of<T>(up_TU), rows_of<T>(rotary_TR), s);
  });
}

void latent_heads_backward(OpContext& ctx, TensorView dq_TQ, TensorView dup_TU, TensorView drotary_TR, ConstTensorView dqkv_TE,
                           const LatentHeads& heads) {
  with_type(dqkv_TE.dtype, [&](auto t) {
    using T = decltype(t);
    launch_latent<T>(ctx, latent_dq_kernel<T>, dq_TQ, dqkv_TE, heads);
    launch_latent<T>(ctx, latent_dup_kernel<T>, dup_TU, dqkv_TE, heads);
    launch_latent<T>(ctx, latent_drotary_kernel<T>, drotary_TR, dqkv_TE, heads);
  });
}

void narrow_heads(OpContext& ctx, TensorView y_TV, ConstTensorView x_TQ, const LatentHeads& heads) {
  with_type(y_TV.dtype, [&](auto t) { launch_latent<decltype(t)>(ctx, narrow_heads_kernel<decltype(t), false>, y_TV, x_TQ, heads); });
}

void narrow_heads_backward(OpContext& ctx, TensorView dx_TQ, ConstTensorView dy_TV, const LatentHeads& heads) {
  with_type(dx_TQ.dtype, [&](auto t) { launch_latent<decltype(t)>(ctx, narrow_heads_kernel<decltype(t), true>, dx_TQ, dy_TV, heads); });
}

}  // namespace prl::ops::cuda
