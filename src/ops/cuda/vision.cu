#include "ops/vision.hpp"

#include "device/cuda/fault.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/map.cuh"
#include "ops/cuda/sums.hpp"

// What a vision tower needs beside the decoder's kernels. An image passes it once, so that these are plain.

namespace prl::ops::cuda {
namespace {

constexpr int kNormRows = 4;  ///< of a block, a warp each

/// One warp per row; a lane has every 32nd vector of the row, three times.
template <typename T, bool kWide>
__global__ void __launch_bounds__(kNormRows* kWarp)
    layer_norm_kernel(T* y, const T* x, const float* w, const float* b, std::int64_t y_stride, std::int64_t x_stride, std::int64_t num_rows,
                      std::int64_t cols, float eps) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kNormRows + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  wait_for_previous();
  let_next_begin();
  if (r >= num_rows) return;
  const T* const row = x + r * x_stride;
  const auto for_vectors = [&](const auto& body) {
    for (std::int64_t c = static_cast<std::int64_t>(lane) * kVec; c < cols; c += kWarp * kVec) {
      const int count = static_cast<int>(min(static_cast<std::int64_t>(kVec), cols - c));
      float v[kVec];
      load<kWide>(v, row + c, count);
      body(c, count, v);
    }
  };
  float sum = 0.0f;
  for_vectors([&](std::int64_t, int count, float(&v)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum += i < count ? v[i] : 0.0f;
  });
  const float mean = warp_sum(sum) / static_cast<float>(cols);
  float squares = 0.0f;
  for_vectors([&](std::int64_t, int count, float(&v)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float away = i < count ? v[i] - mean : 0.0f;
      squares = fmaf(away, away, squares);
    }
  });
  const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(cols) + eps);
  for_vectors([&](std::int64_t c, int count, float(&v)[kVec]) {
    float by[kVec], plus[kVec];
    load<kWide>(by, w + c, count);
    load<kWide>(plus, b + c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = fmaf((v[i] - mean) * scale, by[i], plus[i]);
    store<kWide>(y + r * y_stride + c, v, count);
  });
}

struct GeluTanh {
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[1][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = Gelu(in[0][i]).value;
  }
};
struct GeluErf {
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[1][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = 0.5f * in[0][i] * (1.0f + erff(in[0][i] * 0.70710678f));
  }
};

constexpr int kFullQueries = 32;  ///< of a block
constexpr int kFullLanes = 4;     ///< threads that share a query, each with a quarter of a head's elements
constexpr int kFullThreads = kFullQueries * kFullLanes;
constexpr int kFullKeys = 32;       ///< of a tile, at fixed positions of the sequence
constexpr int kMaxQuarter = 64;     ///< elements of a head that a thread has at most
constexpr int kMaxFullHeads = 256;  ///< elements of a head

template <typename T>
struct FullArgs {
  T* out;
  const T *q, *k, *v;
  std::int64_t q_stride, k_stride, v_stride;
  const std::int32_t* cu_seqlens;
  int num_heads, head_dim;
  float scale;
};

/// A block has kFullQueries queries of a head and walks all keys of their sequence in tiles. A thread has every fourth element of a query,
/// and of the sums of values. The order of sums follows from the positions of keys.
template <typename T, int kQuarter>
__global__ void __launch_bounds__(kFullThreads) attention_full_kernel(const FullArgs<T> a) {
  extern __shared__ float tiles[];  // keys, then values, [kFullKeys][head_dim] each
  // Not in registers: the loops over keys would have to be unrolled whole, which takes a minute to compile.
  __shared__ float scores_of[kFullQueries][kFullKeys + 1];
  float* const scores = scores_of[threadIdx.x / kFullLanes];
  const int sequence = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y), D = a.head_dim;
  const std::int64_t begin = a.cu_seqlens[sequence], length = a.cu_seqlens[sequence + 1] - begin;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kFullQueries;
  if (first >= length) return;
  const int lane = static_cast<int>(threadIdx.x) % kFullLanes;
  const std::int64_t query = first + threadIdx.x / kFullLanes;
  const bool is_there = query < length;
  float q[kQuarter], sum[kQuarter] = {};
  const T* const from = a.q + (begin + (is_there ? query : 0)) * a.q_stride + static_cast<std::int64_t>(head) * D;
#pragma unroll
  for (int i = 0; i < kQuarter; ++i) {
    const int d = i * kFullLanes + lane;
    q[i] = d < D ? to_float(from[d]) : 0.0f;
  }
  float top = -INFINITY, total = 0.0f;
  const std::int64_t kv = static_cast<std::int64_t>(head) * D;
  float *const keys = tiles, *const values = tiles + kFullKeys * D;
  for (std::int64_t k0 = 0; k0 < length; k0 += kFullKeys) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kFullKeys), length - k0));
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < count * D; at += kFullThreads) {
      const int key = at / D, d = at - key * D;
      keys[at] = to_float(a.k[(begin + k0 + key) * a.k_stride + kv + d]);
      values[at] = to_float(a.v[(begin + k0 + key) * a.v_stride + kv + d]);
    }
    __syncthreads();
    float tile_top = -INFINITY;
#pragma unroll 1
    for (int key = 0; key < count; ++key) {
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < kQuarter; ++i) {
        const int d = i * kFullLanes + lane;
        if (d < D) dot = fmaf(q[i], keys[key * D + d], dot);
      }
      dot = dot + __shfl_xor_sync(kFullWarp, dot, 1);
      dot = dot + __shfl_xor_sync(kFullWarp, dot, 2);
      const float score = dot * a.scale;
      if (lane == 0) scores[key] = score;
      tile_top = fmaxf(tile_top, score);
    }
    __syncwarp();
    const float before = top;
    top = fmaxf(top, tile_top);
    const float rescale = before == top ? 1.0f : expf(before - top);
    total *= rescale;
#pragma unroll
    for (int i = 0; i < kQuarter; ++i) sum[i] *= rescale;
#pragma unroll 1
    for (int key = 0; key < count; ++key) {
      const float weight = expf(scores[key] - top);
      total += weight;
#pragma unroll
      for (int i = 0; i < kQuarter; ++i) {
        const int d = i * kFullLanes + lane;
        if (d < D) sum[i] = fmaf(weight, values[key * D + d], sum[i]);
      }
    }
  }
  if (!is_there) return;
  T* const to = a.out + ((begin + query) * a.num_heads + head) * D;
#pragma unroll
  for (int i = 0; i < kQuarter; ++i) {
    const int d = i * kFullLanes + lane;
    if (d < D) to[d] = from_float<T>(sum[i] / total);
  }
}

template <typename T, int kQuarter>
void launch_full(OpContext& ctx, const FullArgs<T>& a, dim3 grid) {
  const std::size_t bytes = 2 * kFullKeys * static_cast<std::size_t>(a.head_dim) * sizeof(float);
  if (bytes > 40 * 1024)  // with the scores more than a kernel has unasked
    PRL_CUDA_CHECK(
        cudaFuncSetAttribute(attention_full_kernel<T, kQuarter>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  attention_full_kernel<T, kQuarter><<<grid, kFullThreads, bytes, stream_of(ctx)>>>(a);
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// One thread per pair of a token.
__global__ void gather_rope_rows_kernel(float* cosines, float* sines, const float* from_cosines, const float* from_sines,
                                        const std::int32_t* positions, std::int64_t num_tokens, int pairs, std::int64_t num_positions,
                                        int height, int width, ::prl::cuda::FaultWord* fault) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= num_tokens * pairs) return;
  const std::int64_t t = at / pairs;
  const int i = static_cast<int>(at - t * pairs), axis = i % 3 == 1 && i < 3 * height ? 1 : i % 3 == 2 && i < 3 * width ? 2 : 0;
  const std::int32_t position = positions[axis * num_tokens + t];
  if (position < 0 || position >= num_positions) {
    ::prl::cuda::report(fault, ::prl::cuda::Fault::kRopePosition, static_cast<std::uint32_t>(t));
    cosines[at] = sines[at] = 0.0f;
    return;
  }
  cosines[at] = from_cosines[static_cast<std::int64_t>(position) * pairs + i];
  sines[at] = from_sines[static_cast<std::int64_t>(position) * pairs + i];
}

}  // namespace

void layer_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, ConstTensorView b_C, float eps) {
  const std::int64_t rows = x_RC.shape.num_rows(), cols = x_RC.shape.num_cols();
  const auto wide = [](const ConstTensorView& v) {
    return is_aligned(v.data, 16) && v.row_stride * static_cast<std::int64_t>(size_of(v.dtype)) % 16 == 0;
  };
  const bool is_wide = cols % kVec == 0 && wide(y_RC) && wide(x_RC) && is_aligned(w_C.data, 16) && is_aligned(b_C.data, 16);
  with_type(x_RC.dtype, [&](auto t) {
    using T = decltype(t);
    const auto launch = [&](auto kernel) {
      launch_chained(stream_of(ctx), kernel, dim3(static_cast<unsigned>(ceil_div(rows, kNormRows))), dim3(kNormRows * kWarp), 0,
                     y_RC.as<T>(), x_RC.as<T>(), w_C.as<float>(), b_C.as<float>(), y_RC.row_stride, x_RC.row_stride, rows, cols, eps);
    };
    if (is_wide)
      launch(layer_norm_kernel<T, true>);
    else
      launch(layer_norm_kernel<T, false>);
  });
}

void gelu(OpContext& ctx, TensorView out_RC, ConstTensorView x_RC, GeluForm form) {
  with_type(x_RC.dtype, [&](auto t) {
    using T = decltype(t);
    if (form == GeluForm::kTanh)
      map<T, T, 1, 1>(ctx, {out_RC}, {x_RC}, GeluTanh{});
    else
      map<T, T, 1, 1>(ctx, {out_RC}, {x_RC}, GeluErf{});
  });
}

void attention_full(OpContext& ctx, TensorView out_THD, const VarlenAttention& args) {
  const auto num_heads = static_cast<int>(args.q_THD.shape[1]), head_dim = static_cast<int>(args.q_THD.shape[2]);
  PRL_CHECK(head_dim <= kMaxFullHeads, "heads of {} elements", head_dim);
  std::int64_t longest = 0;
  for (std::size_t s = 0; s + 1 < args.cu_seqlens.size(); ++s)
    longest = std::max<std::int64_t>(longest, args.cu_seqlens[s + 1] - args.cu_seqlens[s]);
  const dim3 grid(static_cast<unsigned>(ceil_div(longest, kFullQueries)), static_cast<unsigned>(num_heads),
                  static_cast<unsigned>(args.cu_seqlens.size() - 1));
  with_type(args.q_THD.dtype, [&](auto t) {
    using T = decltype(t);
    const FullArgs<T> a{.out = out_THD.as<T>(),
                        .q = args.q_THD.as<T>(),
                        .k = args.k_TKD.as<T>(),
                        .v = args.v_TKD.as<T>(),
                        .q_stride = args.q_token_stride,
                        .k_stride = args.k_token_stride,
                        .v_stride = args.v_token_stride,
                        .cu_seqlens = staged(ctx, args.cu_seqlens),
                        .num_heads = num_heads,
                        .head_dim = head_dim,
                        .scale = args.scale};
    if (head_dim <= 64)
      launch_full<T, 16>(ctx, a, grid);
    else if (head_dim <= 80)
      launch_full<T, 20>(ctx, a, grid);
    else if (head_dim <= 128)
      launch_full<T, 32>(ctx, a, grid);
    else
      launch_full<T, kMaxQuarter>(ctx, a, grid);
  });
}

void gather_rope_rows(OpContext& ctx, TensorView cos_TR2, TensorView sin_TR2, const RopeTable& table, ConstTensorView positions_3T,
                      RopeSections sections) {
  constexpr int kBlock = 256;
  const std::int64_t T = cos_TR2.shape[0], pairs = cos_TR2.shape[1];
  gather_rope_rows_kernel<<<static_cast<unsigned>(ceil_div(T * pairs, kBlock)), kBlock, 0, stream_of(ctx)>>>(
      cos_TR2.as<float>(), sin_TR2.as<float>(), table.cos_PR2.as<float>(), table.sin_PR2.as<float>(), positions_3T.as<std::int32_t>(), T,
      static_cast<int>(pairs), table.cos_PR2.shape()[0], static_cast<int>(sections.height), static_cast<int>(sections.width),
      fault_word_of(ctx));
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
