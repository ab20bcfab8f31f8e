#include <algorithm>
#include <vector>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/device.cuh"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/lora_bf16.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kTile = 32;             ///< rows and columns of out per block
constexpr int kDepth = 32;            ///< of K in shared memory at a time
constexpr int kPart = 2;              ///< rows and columns of out per thread
constexpr int kSide = kTile / kPart;  ///< threads along each
constexpr int kBlock = kSide * kSide;
constexpr std::int64_t kMaxTiles = 65535;

/// out[o(i), n] (+)= round(scale_n * sum_k a[x(i), k] * b(n, k)), where x(i) and o(i) are rows[i] or i.
struct RowsProduct {
  std::int64_t M = 0, N = 0, K = 0;
  ConstTensorView a;
  const void* b = nullptr;
  DType b_dtype = DType::kF32;
  std::int64_t b_stride = 0;
  bool transpose_b = true;               ///< b is [N, K], else [K, N]
  const std::int32_t* a_rows = nullptr;  ///< device memory
  const std::int32_t* out_rows = nullptr;
  TensorView out;
  bool accumulate = false;
  float scale = 1;
};

/// A block owns kTile rows and columns, a thread kPart of each. Each element is one chain of fused multiply-adds over k = 0, 1, 2, ... in
/// fp32: nothing else enters its bits, whatever the number of rows. For fp32, which lora_bf16.hpp does not take; no alignment is needed.
template <typename A, typename B, typename Out, bool kTransposeB>
__global__ void __launch_bounds__(kBlock) rows_product_kernel(const RowsProduct p, const A* a, const B* b, Out* out) {
  __shared__ float a_tile[kDepth][kTile + 1], b_tile[kDepth][kTile + 1];
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * kTile, col0 = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const int ty = static_cast<int>(threadIdx.x) / kSide, tx = static_cast<int>(threadIdx.x) % kSide;
  float sums[kPart][kPart] = {};
  for (std::int64_t k0 = 0; k0 < p.K; k0 += kDepth) {
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kBlock) {
      const int r = i / kDepth, d = i % kDepth;
      float av = 0.0f;
      if (row0 + r < p.M && k0 + d < p.K) {
        const std::int64_t row = p.a_rows != nullptr ? p.a_rows[row0 + r] : row0 + r;
        av = to_float(a[row * p.a.row_stride + k0 + d]);
      }
      a_tile[d][r] = av;
      if constexpr (kTransposeB) {
        b_tile[d][r] = col0 + r < p.N && k0 + d < p.K ? to_float(b[(col0 + r) * p.b_stride + k0 + d]) : 0.0f;
      } else {
        const int c = i % kTile, e = i / kTile;
        b_tile[e][c] = col0 + c < p.N && k0 + e < p.K ? to_float(b[(k0 + e) * p.b_stride + col0 + c]) : 0.0f;
      }
    }
    __syncthreads();
    const int depth = static_cast<int>(min(static_cast<std::int64_t>(kDepth), p.K - k0));
    for (int d = 0; d < depth; ++d) {
#pragma unroll
      for (int i = 0; i < kPart; ++i)
#pragma unroll
        for (int j = 0; j < kPart; ++j) sums[i][j] = fmaf(a_tile[d][ty * kPart + i], b_tile[d][tx * kPart + j], sums[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i)
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const std::int64_t r = row0 + ty * kPart + i, c = col0 + tx * kPart + j;
      if (r >= p.M || c >= p.N) continue;
      Out* to = out + (p.out_rows != nullptr ? p.out_rows[r] : r) * p.out.row_stride + c;
      const float v = sums[i][j] * p.scale;
      *to = from_float<Out>(p.accumulate ? to_float(*to) + v : v);
    }
}

void run(OpContext& ctx, const RowsProduct& p) {
  const std::int64_t row_tiles = ceil_div(p.M, kTile);
  PRL_CHECK(row_tiles <= kMaxTiles, "a product of {} rows in one launch", p.M);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.N, kTile)), static_cast<unsigned>(row_tiles));
  with_type(p.a.dtype, [&](auto a) {
    with_type(p.b_dtype, [&](auto b) {
      with_type(p.out.dtype, [&](auto out) {
        with_bool(p.transpose_b, [&](auto transpose_b) {
          using A = decltype(a);
          using B = decltype(b);
          using Out = decltype(out);
          rows_product_kernel<A, B, Out, decltype(transpose_b)::value>
              <<<grid, kBlock, 0, stream_of(ctx)>>>(p, p.a.as<A>(), static_cast<const B*>(p.b), p.out.as<Out>());
        });
      });
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// out (+)= scale * a W^T for rows of a.
RowsProduct forward(const DenseWeight& w, ConstTensorView a, TensorView out, std::int64_t rows) {
  return {.M = rows,
          .N = w.num_outputs(),
          .K = w.num_inputs(),
          .a = a,
          .b = w.w_NK.data(),
          .b_dtype = w.dtype(),
          .b_stride = w.num_inputs(),
          .out = out};
}
/// out (+)= scale * a W.
RowsProduct backward(const DenseWeight& w, ConstTensorView a, TensorView out) {
  return {.M = a.shape.num_rows(),
          .N = w.num_inputs(),
          .K = w.num_outputs(),
          .a = a,
          .b = w.w_NK.data(),
          .b_dtype = w.dtype(),
          .b_stride = w.num_inputs(),
          .transpose_b = false,
          .out = out};
}

TensorView dense_rows(char* data, std::int64_t rows, std::int64_t cols, DType dtype, Device device) {
  return {data, Shape{rows, cols}, dtype, device, cols};
}

/// partial[chunk, n, k] = sum over the tokens of a chunk of dy[t, n] * x[t, k], in order. A thread owns an element of a chunk.
constexpr std::int64_t kChunkTokens = 256;
template <typename Dy, typename X>
__global__ void __launch_bounds__(kBlock) gradient_chunk_kernel(float* partial, const Dy* dy, const X* x, std::int64_t T, std::int64_t N,
                                                                std::int64_t K, std::int64_t dy_stride, std::int64_t x_stride) {
  const std::int64_t k = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x, n = blockIdx.y, chunk = blockIdx.z;
  if (k >= K) return;
  const std::int64_t begin = chunk * kChunkTokens, end = min(T, begin + kChunkTokens);
  float sum = 0.0f;
  for (std::int64_t t = begin; t < end; ++t) sum = fmaf(to_float(dy[t * dy_stride + n]), to_float(x[t * x_stride + k]), sum);
  partial[(chunk * N + n) * K + k] = sum;
}
/// out (+)= the chunks in order.
__global__ void __launch_bounds__(kBlock)
    add_chunks_kernel(float* out, const float* partial, std::int64_t chunks, std::int64_t count, bool accumulate) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= count) return;
  float sum = accumulate ? out[i] : 0.0f;
  for (std::int64_t c = 0; c < chunks; ++c) sum += partial[c * count + i];
  out[i] = sum;
}

/// dw_NK (+)= dy^T x, whatever the operands' dtypes. `partial`: [ceil(T / kChunkTokens), N, K] fp32.
void weight_gradient(OpContext& ctx, TensorView dw, ConstTensorView dy, ConstTensorView x, bool accumulate, float* partial) {
  const std::int64_t T = x.shape.num_rows(), N = dy.shape.num_cols(), K = x.shape.num_cols(), chunks = ceil_div(T, kChunkTokens);
  PRL_CHECK(N <= kMaxTiles && chunks <= kMaxTiles, "a gradient of {} rows over {} tokens in one launch", N, T);
  const dim3 grid(static_cast<unsigned>(ceil_div(K, kBlock)), static_cast<unsigned>(N), static_cast<unsigned>(chunks));
  with_type(dy.dtype, [&](auto a) {
    with_type(x.dtype, [&](auto b) {
      using Dy = decltype(a);
      using X = decltype(b);
      gradient_chunk_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(partial, dy.as<Dy>(), x.as<X>(), T, N, K, dy.row_stride, x.row_stride);
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
  add_chunks_kernel<<<static_cast<unsigned>(ceil_div(N * K, kBlock)), kBlock, 0, stream_of(ctx)>>>(dw.as<float>(), partial, chunks, N * K,
                                                                                                   accumulate);
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// A thread owns an element.
template <typename T>
__global__ void __launch_bounds__(kBlock)
    dropout_kernel(T* y, const T* x, std::int64_t rows, std::int64_t cols, std::int64_t y_stride, std::int64_t x_stride, std::uint64_t seed,
                   std::int64_t first, std::uint64_t threshold, float kept, bool accumulate) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= rows * cols) return;
  const std::int64_t t = i / cols, k = i % cols;
  const float value = is_dropped(seed, static_cast<std::uint64_t>(first + i), threshold) ? 0.0f : to_float(x[t * x_stride + k]) * kept;
  T* to = y + t * y_stride + k;
  *to = from_float<T>(accumulate ? to_float(*to) + value : value);
}

}  // namespace

void add_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, std::span<const LoraRows> all) {
  const std::int64_t T = x_TK.shape.num_rows();
  std::vector<LoraRows> in_bf16, groups;
  for (const LoraRows& group : all) (is_bf16_lora(ctx, *group.weight, x_TK.dtype) ? in_bf16 : groups).push_back(group);
  add_bf16_lora(ctx, y_TN, x_TK, in_bf16);
  std::size_t bytes = 0;
  for (const LoraRows& group : groups)
    bytes = std::max(bytes, static_cast<std::size_t>(group.count(T) * group.weight->num_ranks()) * size_of(group.weight->dtype()));
  auto* memory = static_cast<char*>(ctx.workspace->require(bytes));
  for (const LoraRows& group : groups) {
    const std::int64_t count = group.count(T);
    if (count == 0) continue;
    const LoraWeight& w = *group.weight;
    const bool together = group.lie_together();
    const std::int32_t* rows = together ? nullptr : staged(ctx, group.rows);
    const ConstTensorView x = together ? x_TK.rows(group.first(), count) : x_TK;
    const TensorView y = together ? y_TN.rows(group.first(), count) : y_TN;
    const TensorView h = dense_rows(memory, count, w.num_ranks(), w.dtype(), y_TN.device);
    RowsProduct shrink = forward(dense(ctx, *w.a), x, h, count);
    shrink.a_rows = rows;
    run(ctx, shrink);
    for (const LoraPart& part : w.parts) {
      RowsProduct expand =
          forward(dense(ctx, *part.b), h.columns(part.first_rank, part.rank), y.columns(part.first_output, part.num_outputs), count);
      expand.out_rows = rows;
      expand.accumulate = true;
      expand.scale = part.scale;
      run(ctx, expand);
    }
  }
}

void lora_backward(OpContext& ctx, TensorView dx_TK, TensorView da_RK, std::span<const TensorView> db, ConstTensorView dy_TN,
                   ConstTensorView x_TK, const LoraWeight& w, bool accumulate_dx, bool accumulate) {
  if (is_bf16_lora(ctx, w, x_TK.dtype)) return bf16_lora_backward(ctx, dx_TK, da_RK, db, dy_TN, x_TK, w, accumulate_dx, accumulate);
  const std::int64_t T = x_TK.shape.num_rows(), K = x_TK.shape.num_cols(), R = w.num_ranks(), chunks = ceil_div(T, kChunkTokens);
  std::int64_t largest = R * K;
  for (const LoraPart& part : w.parts) largest = std::max(largest, part.num_outputs * part.rank);
  const std::int64_t h_bytes = T * R * static_cast<std::int64_t>(size_of(w.dtype()));
  char *h_data = nullptr, *dh_data = nullptr;
  float* partial = nullptr;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    h_data = carver.take<char>(h_bytes);
    dh_data = carver.take<char>(h_bytes);
    partial = carver.take<float>(chunks * largest);
    return carver.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  const TensorView h = dense_rows(h_data, T, R, w.dtype(), dy_TN.device), dh = dense_rows(dh_data, T, R, w.dtype(), dy_TN.device);
  const DenseWeight& a = dense(ctx, *w.a);
  for (const LoraPart& part : w.parts) {
    RowsProduct shrink = forward(a, x_TK, h.columns(part.first_rank, part.rank), T);
    shrink.N = part.rank;
    shrink.b = a.w_NK.as<char>() + static_cast<std::size_t>(part.first_rank * K) * size_of(a.dtype());
    shrink.scale = part.scale;
    run(ctx, shrink);
  }
  for (std::size_t i = 0; i < w.parts.size(); ++i) {
    const LoraPart& part = w.parts[i];
    const ConstTensorView dy = dy_TN.columns(part.first_output, part.num_outputs);
    weight_gradient(ctx, db[i], dy, h.columns(part.first_rank, part.rank), accumulate, partial);
    RowsProduct down = backward(dense(ctx, *part.b), dy, dh.columns(part.first_rank, part.rank));
    down.scale = part.scale;
    run(ctx, down);
  }
  weight_gradient(ctx, da_RK, dh, x_TK, accumulate, partial);
  if (dx_TK.data == nullptr) return;
  RowsProduct up = backward(a, dh, dx_TK);
  up.accumulate = accumulate_dx;
  run(ctx, up);
}

void dropout(OpContext& ctx, TensorView y_TK, ConstTensorView x_TK, const DropoutMask& mask, bool accumulate) {
  const std::int64_t rows = x_TK.shape.num_rows(), cols = x_TK.shape.num_cols();
  with_type(x_TK.dtype, [&](auto t) {
    using T = decltype(t);
    dropout_kernel<T><<<static_cast<unsigned>(ceil_div(rows * cols, kBlock)), kBlock, 0, stream_of(ctx)>>>(
        y_TK.as<T>(), x_TK.as<T>(), rows, cols, y_TK.row_stride, x_TK.row_stride, mask.seed, mask.first_row * cols,
        dropout_threshold(mask.probability), 1.0f / (1.0f - mask.probability), accumulate);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
