#include "device/cuda/check.hpp"
#include "ops/cuda/attention/plain.hpp"
#include "ops/cuda/attention/rows.cuh"

namespace prl::ops::cuda {
namespace {

constexpr int kOwned = kPlainOwned<float>, kTile = kPlainTile;
constexpr int kThreads = 256, kWarps = kThreads / 32, kRowsPerWarp = kOwned / kWarps;

__device__ __forceinline__ void load_rows(float* to, int pitch, int count, const float* from, std::int64_t stride, int token, int first,
                                          int length, int D) {
  for (int i = static_cast<int>(threadIdx.x); i < count * D; i += kThreads) {
    const int row = i / D, d = i % D;
    to[row * pitch + d] = first + row < length ? from[(token + first + row) * stride + d] : 0.0f;
  }
}

/// Owned rows against tiles of the others. kKeys: keys are owned and walk the queries that see them, of all heads of the group;
/// otherwise queries are owned and walk their keys. A lane takes others `lane` and `lane + 32`, and columns lane, lane + 32, ...
template <int kColumns, bool kKeys>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ PlainBackward<float> p) {
  extern __shared__ float shared[];
  const int D = p.head_dim, pitch = D + 1, warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = p.num_q_heads / p.num_kv_heads, num_heads = kKeys ? p.num_kv_heads : p.num_q_heads;
  const PlainBackwardUnit u = p.units[blockIdx.x / num_heads];
  const int head = static_cast<int>(blockIdx.x) % num_heads, kv_head = kKeys ? head : head / group;
  float* own_a = shared;              // k or q
  float* own_b = own_a + kOwned * D;  // v or dout
  float* a = own_b + kOwned * D;      // q or k
  float* b = a + kTile * pitch;       // dout or v
  if (kKeys) {
    load_rows(own_a, D, kOwned, p.k + head * D, p.k_stride, u.token, u.first, u.length, D);
    load_rows(own_b, D, kOwned, p.v + head * D, p.v_stride, u.token, u.first, u.length, D);
  } else {
    load_rows(own_a, D, kOwned, p.q + head * D, p.q_stride, u.token, u.first, u.length, D);
    load_rows(own_b, D, kOwned, p.dout + head * D, p.dout_stride, u.token, u.first, u.length, D);
  }
  float sum_a[kRowsPerWarp][kColumns] = {}, sum_b[kRowsPerWarp][kColumns] = {};
  // Of the queries that see the keys, or of the keys that the queries see.
  const int begin = (kKeys ? u.first : max(0, u.first - p.window + 1)) / kTile * kTile;
  const int end = min(u.length, u.first + kOwned + (kKeys ? p.window - 1 : 0));
  for (int h = kKeys ? head * group : head; h < (kKeys ? (head + 1) * group : head + 1); ++h) {
    const float2* stats = p.stats + h * p.stats_rows + u.stats;
    for (int first = begin; first < end; first += kTile) {
      __syncthreads();
      if (kKeys) {
        load_rows(a, pitch, kTile, p.q + h * D, p.q_stride, u.token, first, u.length, D);
        load_rows(b, pitch, kTile, p.dout + h * D, p.dout_stride, u.token, first, u.length, D);
      } else {
        load_rows(a, pitch, kTile, p.k + kv_head * D, p.k_stride, u.token, first, u.length, D);
        load_rows(b, pitch, kTile, p.v + kv_head * D, p.v_stride, u.token, first, u.length, D);
      }
      __syncthreads();
      // Unrolled over rows, the code would take minutes to compile.
#pragma unroll 1
      for (int i = 0; i < kRowsPerWarp; ++i) {
        const int row = warp + i * kWarps, own = u.first + row;
        if (own >= u.length) break;
        float w[2], dw[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int other = lane + 32 * e, query = kKeys ? first + other : own, key = kKeys ? own : first + other;
          float s = 0.0f, x = 0.0f;
          for (int d = 0; d < D; ++d) {
            s = fmaf(own_a[row * D + d], a[other * pitch + d], s);
            x = fmaf(own_b[row * D + d], b[other * pitch + d], x);
          }
          const float2 st = query < u.length ? stats[query] : make_float2(-kMinusInfinity, 0.0f);
          w[e] = key <= query && key > query - p.window ? exp2f(fmaf(s, p.scale * kLog2e, -st.x)) : 0.0f;
          dw[e] = w[e] * (x - st.y);
        }
#pragma unroll 4
        for (int other = 0; other < kTile; ++other) {
          const float ws = __shfl_sync(0xffffffffu, other < 32 ? w[0] : w[1], other % 32);
          const float ds = __shfl_sync(0xffffffffu, other < 32 ? dw[0] : dw[1], other % 32);
#pragma unroll
          for (int c = 0; c < kColumns; ++c)
            if (c * 32 + lane < D) {
              sum_a[i][c] = fmaf(ds, a[other * pitch + c * 32 + lane], sum_a[i][c]);
              if (kKeys) sum_b[i][c] = fmaf(ws, b[other * pitch + c * 32 + lane], sum_b[i][c]);
            }
        }
      }
    }
  }
#pragma unroll 1
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int own = u.first + warp + i * kWarps;
    if (own >= u.length) break;
    const std::int64_t token = u.token + own;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int d = c * 32 + lane;
      if (d >= D) continue;
      if (kKeys) {
        p.dk[token * p.dk_stride + head * D + d] = sum_a[i][c] * p.scale;
        p.dv[token * p.dv_stride + head * D + d] = sum_b[i][c];
      } else {
        p.dq[token * p.dq_stride + head * D + d] = sum_a[i][c] * p.scale;
      }
    }
  }
}

template <int kColumns, bool kKeys>
void launch_pass(const PlainBackward<float>& p, cudaStream_t stream) {
  const auto bytes_of = [](int dim) { return (2 * kOwned * dim + 2 * kTile * (dim + 1)) * static_cast<int>(sizeof(float)); };
  const int bytes = bytes_of(p.head_dim);
  // The limit is the whole process's, and another thread may launch this kernel for another width: the widest, not this one.
  PRL_CUDA_CHECK(
      cudaFuncSetAttribute(backward_kernel<kColumns, kKeys>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_of(kColumns * 32)));
  backward_kernel<kColumns, kKeys><<<p.num_units*(kKeys ? p.num_kv_heads : p.num_q_heads), kThreads, bytes, stream>>>(p);
  PRL_CUDA_CHECK(cudaGetLastError());
}
template <int kColumns>
void launch(const PlainBackward<float>& p, cudaStream_t stream) {
  launch_pass<kColumns, true>(p, stream);
  launch_pass<kColumns, false>(p, stream);
}

}  // namespace

void launch_plain_backward(const PlainBackward<float>& p, cudaStream_t stream) {
  switch ((p.head_dim + 31) / 32) {
    case 1:
    case 2: return launch<2>(p, stream);
    case 3:
    case 4: return launch<4>(p, stream);
    default: return launch<8>(p, stream);
  }
}

}  // namespace prl::ops::cuda
