#include "ops/cuda/attention/plain.hpp"

#include "device/cuda/check.hpp"
#include "ops/cuda/attention/rows.cuh"

namespace prl::ops::cuda {
namespace {

constexpr int kTile = kPlainTile;
constexpr int kThreads = 256, kWarps = kThreads / 32, kRowsPerWarp = RowPacking::kRows / kWarps;
constexpr int kTilesPerChunk = kChunkKeys / kTile;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/// Rows of keys [first, first + kTile) of one head; zero past the last key. Rows are `pitch` floats apart in shared memory.
__device__ __forceinline__ void load_tile(float* to, int pitch, const float* from, std::int64_t stride, const PlainForward<float>& p,
                                          const AttentionUnit& u, int kv_head, int first) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * p.head_dim; i += kThreads) {
    const int row = i / p.head_dim, d = i % p.head_dim, key = first + row;
    float x = 0.0f;
    if (key < u.num_keys) {
      if (p.block_table != nullptr) {
        const std::int64_t block = p.block_table[u.keys + key / p.block_size];
        x = from[((block * p.num_kv_heads + kv_head) * p.block_size + key % p.block_size) * p.head_dim + d];
      } else {
        x = from[(u.keys + key) * stride + kv_head * p.head_dim + d];
      }
    }
    to[row * pitch + d] = x;
  }
}

/// A warp computes every eighth row of a block of rows: for scores a lane takes keys `lane` and `lane + 32`, for sums
/// columns lane, lane + 32, ... of values (kColumns of them).
template <int kColumns>
struct Row {
  float top = kMinusInfinity, sum = 0.0f, out[kColumns] = {};
  float total_top = kMinusInfinity, total_sum = 0.0f, total_out[kColumns] = {};

  /// Of the keys of the tile the row sees [num_hidden, num_visible).
  __device__ __forceinline__ void tile(const float* q, int head_dim, const float* k, int pitch, const float* v, int v_pitch, int value_dim,
                                       int num_hidden, int num_visible, float scale_log2) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float a = 0.0f, b = 0.0f;
    for (int d = 0; d < head_dim; ++d) {
      a = fmaf(q[d], k[lane * pitch + d], a);
      b = fmaf(q[d], k[(lane + 32) * pitch + d], b);
    }
    if (lane < num_hidden || lane >= num_visible) a = kMinusInfinity;
    if (lane + 32 < num_hidden || lane + 32 >= num_visible) b = kMinusInfinity;
    const float tile_top = warp_max(fmaxf(a, b)) * scale_log2, before = top;
    top = tile_top - before > kSlack ? tile_top : before;
    const float rescale = top == before ? 1.0f : exp2f(before - top);
    const float minus_top = top == kMinusInfinity ? 0.0f : -top;
    a = exp2f(fmaf(a, scale_log2, minus_top));
    b = exp2f(fmaf(b, scale_log2, minus_top));
    sum = fmaf(sum, rescale, a + b);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] *= rescale;
#pragma unroll 4
    for (int key = 0; key < kTile; ++key) {
      const float w = __shfl_sync(0xffffffffu, key < 32 ? a : b, key % 32);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (c * 32 + lane < value_dim) out[c] = fmaf(w, v[key * v_pitch + c * 32 + lane], out[c]);
    }
  }
  __device__ __forceinline__ void join_total(bool is_first) {
    sum = warp_sum(sum);
    if (is_first) {
      total_top = top;
      total_sum = sum;
    } else {
      const ChunkWeights w = merge_rows<float>(total_top, total_sum, top, sum);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) total_out[c] = merge_out(total_out[c], out[c], w);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (is_first) total_out[c] = out[c];
      out[c] = 0.0f;
    }
    top = kMinusInfinity;
    sum = 0.0f;
  }
};

template <int kColumns>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ PlainForward<float> p) {
  extern __shared__ float shared[];
  // Without v the last elements of k are it, and rows of k are too long for those of q to lie beside them.
  const bool has_values = p.v != nullptr;
  const int D = p.head_dim, V = p.value_dim, pitch = D + 1, v_pitch = has_values ? D : pitch, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  float* q = shared;
  float* k = has_values ? q + RowPacking::kRows * D : shared;
  float* v = has_values ? k + kTile * pitch : k + D - V;
  if (p.num_units_at != nullptr && static_cast<int>(blockIdx.x) >= *p.num_units_at * p.packing.num_groups) return;
  const AttentionUnit u = p.units[blockIdx.x / p.packing.num_groups];
  const int group = static_cast<int>(blockIdx.x) % p.packing.num_groups, part = group % p.packing.groups_per_kv_head;
  const int kv_head = group / p.packing.groups_per_kv_head, first_head = kv_head * p.packing.group + part * p.packing.heads;
  const int num_heads = min(p.packing.heads, p.packing.group - part * p.packing.heads), num_rows = u.num_tokens * num_heads;
  const auto query = [&](int row) { return p.q + (u.token + row / num_heads) * p.q_stride + (first_head + row % num_heads) * D; };
  if (has_values)
    for (int i = static_cast<int>(threadIdx.x); i < num_rows * D; i += kThreads) q[i] = query(i / D)[i % D];
  Row<kColumns> rows[kRowsPerWarp];
  bool is_first = true;
  for (int t = u.tile_begin; t < u.tile_end; ++t) {
    __syncthreads();
    load_tile(k, pitch, p.k, p.k_stride, p, u, kv_head, t * kTile);
    if (has_values) load_tile(v, D, p.v, p.v_stride, p, u, kv_head, t * kTile);
    __syncthreads();
    const bool ends_chunk = (t + 1) % kTilesPerChunk == 0 || t + 1 == u.tile_end;
    // Unrolled over rows, the code would take minutes to compile.
#pragma unroll 1
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = warp + i * kWarps;
      if (row >= num_rows) break;
      const int num_visible = u.position + row / num_heads + 1 - t * kTile;
      rows[i].tile(has_values ? q + row * D : query(row), D, k, pitch, v, v_pitch, V, num_visible - p.window, num_visible, p.scale_log2);
      if (ends_chunk) rows[i].join_total(is_first);
    }
    if (ends_chunk) is_first = false;
  }
#pragma unroll 1
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = warp + i * kWarps;
    if (row >= num_rows) break;
    const int token = row / num_heads, head = row % num_heads;
    const std::int64_t state =
        (static_cast<std::int64_t>(u.state) * p.packing.num_groups + group) * p.state_rows + token * p.packing.heads + head;
    const std::int64_t at = static_cast<std::int64_t>(u.token + token) * p.num_q_heads + first_head + head;
    float* to = u.state >= 0 ? p.state_out + state * V : p.out + at * V;
    const RowEnd end = end_row<float>(rows[i].total_top, rows[i].total_sum, p.sinks, first_head + head);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c * 32 + lane < V) to[c * 32 + lane] = u.state >= 0 ? rows[i].total_out[c] : finish_out(rows[i].total_out[c], end.scale);
    if (lane != 0) continue;
    if (u.state >= 0)
      p.state_sums[state] = make_float2(rows[i].total_top, rows[i].total_sum);
    else if (p.lse != nullptr)
      p.lse[at] = log_sum(end.top, end.sum);
  }
}

template <int kColumns>
void launch(const PlainForward<float>& p, cudaStream_t stream) {
  const auto bytes_of = [](int dim) { return ((RowPacking::kRows + kTile) * dim + kTile * (dim + 1)) * static_cast<int>(sizeof(float)); };
  const auto bytes_of_keys = [](int dim) { return kTile * (dim + 1) * static_cast<int>(sizeof(float)); };
  const int bytes = p.v != nullptr ? bytes_of(p.head_dim) : bytes_of_keys(p.head_dim);
  // The limit is the whole process's, and another thread may launch this kernel for another width: the widest, not this one.
  constexpr int kWidest = kColumns * 32;
  const int most = kWidest > 256 ? bytes_of_keys(kMaxLatent + kMaxLatentRotary) : bytes_of(kWidest);
  PRL_CUDA_CHECK(cudaFuncSetAttribute(forward_kernel<kColumns>, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  forward_kernel<kColumns><<<p.num_units * p.packing.num_groups, kThreads, bytes, stream>>>(p);
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_plain_forward(const PlainForward<float>& p, cudaStream_t stream) {
  if (p.v == nullptr) return launch<16>(p, stream);
  switch ((p.head_dim + 31) / 32) {
    case 1:
    case 2: return launch<2>(p, stream);
    case 3:
    case 4: return launch<4>(p, stream);
    default: return launch<8>(p, stream);
  }
}

}  // namespace prl::ops::cuda
