#include "device/cuda/check.hpp"
#include "ops/cuda/attention/plain.hpp"
#include "ops/cuda/attention/rows.cuh"
#include "ops/cuda/mma.cuh"

namespace prl::ops::cuda {
namespace {

constexpr int kThreads = 256, kRows = kPlainOwned<__nv_bfloat16>, kTile = kPlainTile;
using Params = PlainBackward<__nv_bfloat16>;

template <int kD>
constexpr int kSharedBytes = PaddedMatrix<kD>::kRowBytes*(2 * kRows + 2 * kTile) + PaddedMatrix<kTile>::kRowBytes*(2 * kRows);

template <int kD>
__device__ __forceinline__ void copy_rows(const PaddedMatrix<kD>& to, const __nv_bfloat16* from, std::int64_t stride, int token, int first,
                                          int length) {
  for (int i = static_cast<int>(threadIdx.x); i < 64 * (kD / 8); i += kThreads) {
    const int row = i / (kD / 8), column = i % (kD / 8) * 8;
    const bool exists = first + row < length;
    copy_16(to.at(row, column), exists ? from + (token + first + row) * stride + column : from, exists);
  }
}

/// 64 owned rows against tiles of 64 others. kKeys: keys are owned and walk the queries that see them, of all heads of the group;
/// otherwise queries are owned and walk their keys. Eight warps: 4 times 16 rows, 2 halves of the others, then of the columns;
/// weights pass between the two through shared memory.
template <int kD, bool kKeys>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Matrix = PaddedMatrix<kD>;
  using Weights = PaddedMatrix<kTile>;
  const auto matrix = [&](int i) { return Matrix{reinterpret_cast<__nv_bfloat16*>(shared + i * 64 * Matrix::kRowBytes)}; };
  const Matrix own_a = matrix(0), own_b = matrix(1), a = matrix(2), b = matrix(3);
  const Weights weights{reinterpret_cast<__nv_bfloat16*>(shared + 4 * 64 * Matrix::kRowBytes)}, dscores{weights.at(kRows, 0)};
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = warp % 4 * 16, half = warp / 4;
  const int group = p.num_q_heads / p.num_kv_heads, num_heads = kKeys ? p.num_kv_heads : p.num_q_heads;
  const PlainBackwardUnit u = p.units[blockIdx.x / num_heads];
  const int own_head = static_cast<int>(blockIdx.x) % num_heads, kv_head = kKeys ? own_head : own_head / group;
  if (kKeys) {
    copy_rows<kD>(own_a, p.k + kv_head * kD, p.k_stride, u.token, u.first, u.length);
    copy_rows<kD>(own_b, p.v + kv_head * kD, p.v_stride, u.token, u.first, u.length);
  } else {
    copy_rows<kD>(own_a, p.q + own_head * kD, p.q_stride, u.token, u.first, u.length);
    copy_rows<kD>(own_b, p.dout + own_head * kD, p.dout_stride, u.token, u.first, u.length);
  }
  // Each warp sums 16 rows of kColumns columns: halves of D, in steps of 16 that may not divide evenly.
  constexpr int kSteps = kD / 16, kColumnSteps = (kSteps + 1) / 2;
  float sum_a[8 * kColumnSteps] = {}, sum_b[kKeys ? 8 * kColumnSteps : 8] = {};
  // Of the queries that see the keys, or of the keys that the queries see.
  const int begin = kKeys ? u.first : max(0, u.first - p.window + 1) / kTile * kTile;
  const int end = min(u.length, u.first + kRows + (kKeys ? p.window - 1 : 0));
  for (int h = kKeys ? own_head * group : own_head; h < (kKeys ? (own_head + 1) * group : own_head + 1); ++h) {
    const float2* stats = p.stats + h * p.stats_rows + u.stats;
    for (int first = begin; first < end; first += kTile) {
      __syncthreads();
      if (kKeys) {
        copy_rows<kD>(a, p.q + h * kD, p.q_stride, u.token, first, u.length);
        copy_rows<kD>(b, p.dout + h * kD, p.dout_stride, u.token, first, u.length);
      } else {
        copy_rows<kD>(a, p.k + kv_head * kD, p.k_stride, u.token, first, u.length);
        copy_rows<kD>(b, p.v + kv_head * kD, p.v_stride, u.token, first, u.length);
      }
      copies_commit();
      copies_wait<0>();
      __syncthreads();
      float scores[16] = {}, dweights[16] = {};
#pragma unroll
      for (int d = 0; d < kD; d += 16) {
        std::uint32_t x[4], y[4];
        own_a.left(x, first_row, d);
        own_b.left(y, first_row, d);
#pragma unroll
        for (int n = 0; n < 32; n += 16) {
          std::uint32_t r[4];
          a.right_rows(r, half * 32 + n, d);
          multiply_add(scores + n / 2, x, r[0], r[1]);
          multiply_add(scores + n / 2 + 4, x, r[2], r[3]);
          b.right_rows(r, half * 32 + n, d);
          multiply_add(dweights + n / 2, y, r[0], r[1]);
          multiply_add(dweights + n / 2 + 4, y, r[2], r[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const int row = first_row + lane / 4 + (i & 2) / 2 * 8, column = half * 32 + 8 * (i / 4) + 2 * (lane % 4);
        float w[2], dw[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int own = u.first + row, other = first + column + e, query = kKeys ? other : own, key = kKeys ? own : other;
          const float2 s = query < u.length ? stats[query] : make_float2(-kMinusInfinity, 0.0f);
          w[e] = key <= query && key > query - p.window ? power_of_two(fmaf(scores[i + e], p.scale * kLog2e, -s.x)) : 0.0f;
          dw[e] = w[e] * (dweights[i + e] - s.y);
        }
        if (kKeys) *reinterpret_cast<std::uint32_t*>(weights.at(row, column)) = pack_bf16(w[0], w[1]);
        *reinterpret_cast<std::uint32_t*>(dscores.at(row, column)) = pack_bf16(dw[0], dw[1]);
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kTile; n += 16) {
        std::uint32_t x[4], y[4];
        dscores.left(x, first_row, n);
        if (kKeys) weights.left(y, first_row, n);
#pragma unroll
        for (int step = 0; step < kColumnSteps; ++step) {
          const int d = (half * kColumnSteps + step) * 16;
          if (d >= kD) break;
          std::uint32_t r[4];
          a.right_columns(r, n, d);
          multiply_add(sum_a + 8 * step, x, r[0], r[1]);
          multiply_add(sum_a + 8 * step + 4, x, r[2], r[3]);
          if (kKeys) {
            b.right_columns(r, n, d);
            multiply_add(sum_b + 8 * step, y, r[0], r[1]);
            multiply_add(sum_b + 8 * step + 4, y, r[2], r[3]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kColumnSteps; ++step) {
    const int d = (half * kColumnSteps + step) * 16;
    if (d >= kD) break;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int own = u.first + first_row + lane / 4 + (i & 2) / 2 * 8, column = own_head * kD + d + 8 * (i / 4) + 2 * (lane % 4);
      if (own >= u.length) continue;
      const std::int64_t token = u.token + own;
      const auto store = [&](__nv_bfloat16* to, const float* sum, float factor) {
        *reinterpret_cast<std::uint32_t*>(to) = pack_bf16(sum[8 * step + i] * factor, sum[8 * step + i + 1] * factor);
      };
      if (kKeys) {
        store(p.dk + token * p.dk_stride + column, sum_a, p.scale);
        store(p.dv + token * p.dv_stride + column, sum_b, 1.0f);
      } else {
        store(p.dq + token * p.dq_stride + column, sum_a, p.scale);
      }
    }
  }
}

template <int kD, bool kKeys>
void launch_pass(const Params& p, cudaStream_t stream) {
  PRL_CUDA_CHECK(cudaFuncSetAttribute(backward_kernel<kD, kKeys>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kD>));
  backward_kernel<kD, kKeys><<<p.num_units*(kKeys ? p.num_kv_heads : p.num_q_heads), kThreads, kSharedBytes<kD>, stream>>>(p);
  PRL_CUDA_CHECK(cudaGetLastError());
}
template <int kD>
void launch(const Params& p, cudaStream_t stream) {
  launch_pass<kD, true>(p, stream);
  launch_pass<kD, false>(p, stream);
}

}  // namespace

void launch_plain_backward(const Params& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 16: return launch<16>(p, stream);
    case 32: return launch<32>(p, stream);
    case 64: return launch<64>(p, stream);
    case 80: return launch<80>(p, stream);
    case 96: return launch<96>(p, stream);
    case 128: return launch<128>(p, stream);
    default: return launch<256>(p, stream);
  }
}

}  // namespace prl::ops::cuda
