#include "ops/cuda/device.cuh"
#include "ops/cuda/simple_product.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kProductTile = 64;   ///< rows and columns of out per block
constexpr int kProductDepth = 16;  ///< of K in shared memory at a time
constexpr int kProductPart = 4;    ///< rows and columns of out per thread
constexpr int kProductBlock = (kProductTile / kProductPart) * (kProductTile / kProductPart);

/// Each element of out is one chain of fused multiply-adds over k = 0, 1, 2, ...: nothing else enters its bits.
template <typename In, typename Out, bool kTransposeB>
__global__ void __launch_bounds__(kProductBlock) product_kernel(const Product p) {
  __shared__ float a_tile[kProductDepth][kProductTile + 4], b_tile[kProductDepth][kProductTile + 4];
  const In* a = static_cast<const In*>(p.a);
  const In* b = static_cast<const In*>(p.b);
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * kProductTile,
                     col0 = static_cast<std::int64_t>(blockIdx.x) * kProductTile;
  const int ty = static_cast<int>(threadIdx.x) / (kProductTile / kProductPart),
            tx = static_cast<int>(threadIdx.x) % (kProductTile / kProductPart);
  float sums[kProductPart][kProductPart] = {};
  for (std::int64_t k0 = 0; k0 < p.K; k0 += kProductDepth) {
    for (int i = static_cast<int>(threadIdx.x); i < kProductTile * kProductDepth; i += kProductBlock) {
      const int r = i / kProductDepth, d = i % kProductDepth;
      a_tile[d][r] = row0 + r < p.M && k0 + d < p.K ? to_float(a[(row0 + r) * p.a_stride + k0 + d]) : 0.0f;
      if constexpr (kTransposeB) {
        b_tile[d][r] = col0 + r < p.N && k0 + d < p.K ? to_float(b[(col0 + r) * p.b_stride + k0 + d]) : 0.0f;
      } else {
        const int c = i % kProductTile, e = i / kProductTile;
        b_tile[e][c] = col0 + c < p.N && k0 + e < p.K ? to_float(b[(k0 + e) * p.b_stride + col0 + c]) : 0.0f;
      }
    }
    __syncthreads();
    // Beyond K nothing is added: 0 * 0 onto a sum of -0 would make it +0.
    const int depth = static_cast<int>(min(static_cast<std::int64_t>(kProductDepth), p.K - k0));
    for (int d = 0; d < depth; ++d) {
      float av[kProductPart], bv[kProductPart];
#pragma unroll
      for (int i = 0; i < kProductPart; ++i) {
        av[i] = a_tile[d][ty * kProductPart + i];
        bv[i] = b_tile[d][tx * kProductPart + i];
      }
#pragma unroll
      for (int i = 0; i < kProductPart; ++i)
#pragma unroll
        for (int j = 0; j < kProductPart; ++j) sums[i][j] = fmaf(av[i], bv[j], sums[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kProductPart; ++i)
#pragma unroll
    for (int j = 0; j < kProductPart; ++j) {
      const std::int64_t r = row0 + ty * kProductPart + i, c = col0 + tx * kProductPart + j;
      if (r >= p.M || c >= p.N) continue;
      Out* out = static_cast<Out*>(p.out) + r * p.out_stride + c;
      float v = sums[i][j];
      if (p.bias != nullptr) v += p.bias[c];
      if (p.accumulate) v = to_float(*out) + v;
      *out = from_float<Out>(v);
    }
}

}  // namespace

void simple_product(const OpContext& ctx, const Product& p) {
  const std::int64_t row_tiles = ceil_div(p.M, kProductTile);
  if (row_tiles > 65535) fail(ErrorCode::kNotImplemented, "[cuda] a product of {} rows outside the tensor cores", p.M);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.N, kProductTile)), static_cast<unsigned>(row_tiles));
  with_type(p.in_dtype, [&](auto in) {
    with_type(p.out_dtype, [&](auto out) {
      with_bool(p.transpose_b, [&](auto transpose_b) {
        const auto kernel = product_kernel<decltype(in), decltype(out), decltype(transpose_b)::value>;
        kernel<<<grid, kProductBlock, 0, stream_of(ctx)>>>(p);
      });
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
