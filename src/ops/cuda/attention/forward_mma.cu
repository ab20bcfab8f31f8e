#include "device/cuda/check.hpp"
#include "ops/cuda/attention/plain.hpp"
#include "ops/cuda/attention/rows.cuh"
#include "ops/cuda/mma.cuh"

namespace prl::ops::cuda {
namespace {

constexpr int kThreads = 128, kTile = kPlainTile, kTilesPerChunk = kChunkKeys / kTile;
using Params = PlainForward<__nv_bfloat16>;

template <int kD>
constexpr int kStages = kD <= 128 ? 2 : 1;
template <int kD>
constexpr int kSharedBytes = PaddedMatrix<kD>::kRowBytes*(RowPacking::kRows + 2 * kStages<kD> * kTile);

/// Queues the copy of keys [first, first + kTile) of one head; rows past the last key become zero.
template <int kD>
__device__ __forceinline__ void copy_tile(const PaddedMatrix<kD>& to, const __nv_bfloat16* from, std::int64_t stride, const Params& p,
                                          const AttentionUnit& u, int kv_head, int first) {
  constexpr int kPieces = kD / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kPieces; i += kThreads) {
    const int row = i / kPieces, column = i % kPieces * 8, key = first + row;
    const bool exists = key < u.num_keys;
    std::int64_t at = 0;
    if (exists && p.block_table != nullptr) {
      const std::int64_t block = p.block_table[u.keys + key / p.block_size];
      at = ((block * p.num_kv_heads + kv_head) * p.block_size + key % p.block_size) * kD;
    } else if (exists) {
      at = (u.keys + key) * stride + kv_head * kD;
    }
    copy_16(to.at(row, column), from + at + column, exists);
  }
}

/// A block of threads per block of rows, 16 rows a warp.
template <int kD>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Matrix = PaddedMatrix<kD>;
  const auto matrix = [&](int i) { return Matrix{reinterpret_cast<__nv_bfloat16*>(shared + i * 64 * Matrix::kRowBytes)}; };
  const Matrix q = matrix(0);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (p.num_units_at != nullptr && static_cast<int>(blockIdx.x) >= *p.num_units_at * p.packing.num_groups) return;
  const AttentionUnit u = p.units[blockIdx.x / p.packing.num_groups];
  const int group = static_cast<int>(blockIdx.x) % p.packing.num_groups, part = group % p.packing.groups_per_kv_head;
  const int kv_head = group / p.packing.groups_per_kv_head, first_head = kv_head * p.packing.group + part * p.packing.heads;
  const int num_heads = min(p.packing.heads, p.packing.group - part * p.packing.heads);

  for (int i = static_cast<int>(threadIdx.x); i < 64 * (kD / 8); i += kThreads) {
    const int row = i / (kD / 8), column = i % (kD / 8) * 8, token = row / p.packing.heads, head = row % p.packing.heads;
    const bool exists = token < u.num_tokens && head < num_heads;
    copy_16(q.at(row, column), exists ? p.q + (u.token + token) * p.q_stride + (first_head + head) * kD + column : p.q, exists);
  }
  const auto k_tile = [&](int t) { return matrix(1 + t % kStages<kD>); };
  const auto v_tile = [&](int t) { return matrix(1 + kStages<kD> + t % kStages<kD>); };
  const auto copy = [&](int t) {
    if (t < u.tile_end) {
      copy_tile<kD>(k_tile(t), p.k, p.k_stride, p, u, kv_head, t * kTile);
      copy_tile<kD>(v_tile(t), p.v, p.v_stride, p, u, kv_head, t * kTile);
    }
    copies_commit();
  };

  int row[2], token[2], head[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = warp * 16 + lane / 4 + 8 * r;
    token[r] = row[r] / p.packing.heads;
    head[r] = row[r] % p.packing.heads;
  }
  float out[kD / 2] = {}, total_out[kD / 2];
  RowPair rows, total;
  rows.clear();
  total.clear();
  bool is_first = true;
  copy(u.tile_begin);
  for (int t = u.tile_begin; t < u.tile_end; ++t) {
    if constexpr (kStages<kD> == 2) {
      copy(t + 1);
      copies_wait<1>();
    } else {
      if (t > u.tile_begin) copy(t);
      copies_wait<0>();
    }
    __syncthreads();
    const Matrix k = k_tile(t), v = v_tile(t);
    float scores[kTile / 2] = {};
#pragma unroll
    for (int d = 0; d < kD; d += 16) {
      std::uint32_t a[4];
      q.left(a, warp * 16, d);
#pragma unroll
      for (int n = 0; n < kTile; n += 16) {
        std::uint32_t b[4];
        k.right_rows(b, n, d);
        multiply_add(scores + n / 2, a, b[0], b[1]);
        multiply_add(scores + n / 2 + 4, a, b[2], b[3]);
      }
    }
    const int position = u.position - t * kTile;
    if (position < kTile - 1) ban_after(scores, position + token[0], position + token[1]);
    const int hidden = position - p.window + 1;
    if (hidden + u.num_tokens - 1 > 0) ban_before(scores, hidden + token[0], hidden + token[1]);
    float rescale[2];
    if (!weigh_tile(scores, rows, rescale, p.scale_log2)) {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) out[i] *= rescale[(i & 2) / 2];
    }
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      std::uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = pack_bf16(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
#pragma unroll
      for (int d = 0; d < kD; d += 16) {
        std::uint32_t b[4];
        v.right_columns(b, 16 * step, d);
        multiply_add(out + d / 2, a, b[0], b[1]);
        multiply_add(out + d / 2 + 4, a, b[2], b[3]);
      }
    }
    if ((t + 1) % kTilesPerChunk == 0 || t + 1 == u.tile_end) {
      rows.sum[0] = quad_sum(rows.sum[0]);
      rows.sum[1] = quad_sum(rows.sum[1]);
      if (is_first) {
        total = rows;
#pragma unroll
        for (int i = 0; i < kD / 2; ++i) total_out[i] = out[i];
      } else {
        const ChunkWeights w0 = merge_rows<__nv_bfloat16>(total.top[0], total.sum[0], rows.top[0], rows.sum[0]);
        const ChunkWeights w1 = merge_rows<__nv_bfloat16>(total.top[1], total.sum[1], rows.top[1], rows.sum[1]);
#pragma unroll
        for (int i = 0; i < kD / 2; ++i) total_out[i] = merge_out(total_out[i], out[i], (i & 2) != 0 ? w1 : w0);
      }
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) out[i] = 0.0f;
      rows.clear();
      is_first = false;
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row[r] >= p.packing.tokens * p.packing.heads || token[r] >= u.num_tokens || head[r] >= num_heads) continue;
    const std::int64_t at = static_cast<std::int64_t>(u.token + token[r]) * p.num_q_heads + first_head + head[r];
    if (u.state >= 0) {
      const std::int64_t state = (static_cast<std::int64_t>(u.state) * p.packing.num_groups + group) * p.state_rows + row[r];
#pragma unroll
      for (int i = 2 * r; i < kD / 2; i += 4)
        *reinterpret_cast<float2*>(p.state_out + state * kD + 2 * (i - 2 * r) + 2 * (lane % 4)) =
            make_float2(total_out[i], total_out[i + 1]);
      if (lane % 4 == 0) p.state_sums[state] = make_float2(total.top[r], total.sum[r]);
      continue;
    }
    const RowEnd end = end_row<__nv_bfloat16>(total.top[r], total.sum[r], p.sinks, first_head + head[r]);
#pragma unroll
    for (int i = 2 * r; i < kD / 2; i += 4)
      *reinterpret_cast<std::uint32_t*>(p.out + at * kD + 2 * (i - 2 * r) + 2 * (lane % 4)) =
          pack_bf16(finish_out(total_out[i], end.scale), finish_out(total_out[i + 1], end.scale));
    if (p.lse != nullptr && lane % 4 == 0) p.lse[at] = log_sum(end.top, end.sum);
  }
}

template <int kD>
void launch(const Params& p, cudaStream_t stream) {
  PRL_CUDA_CHECK(cudaFuncSetAttribute(forward_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kD>));
  forward_kernel<kD><<<p.num_units * p.packing.num_groups, kThreads, kSharedBytes<kD>, stream>>>(p);
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_plain_forward(const Params& p, cudaStream_t stream) {
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
