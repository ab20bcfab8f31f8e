#include "device/cuda/check.hpp"
#include "ops/cuda/attention/plain.hpp"
#include "ops/cuda/attention/rows.cuh"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/mma.cuh"

// Attention to latents in bf16: all heads share one key, whose last elements are its value. A tile of keys is read once, for scores and for
// sums. Eight warps share a block of rows: each takes 16 rows and a part of the tile's keys, later the same rows and a part of the columns.

namespace prl::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kTile = kPlainTile, kTilesPerChunk = kChunkKeys / kTile;
/// Columns before those of the latent in shared memory: rotated elements, then zeros.
constexpr int kRotary = kMaxLatentRotary, kGroups = kTile / 8;
using Params = PlainForward<__nv_bfloat16>;

/// A matrix in shared memory, its rows of 16-byte pieces permuted so that neighbouring rows' pieces lie in different banks.
template <int kColumns>
struct Swizzled {
  static constexpr int kRowBytes = 2 * kColumns;
  __nv_bfloat16* data;
  __device__ __forceinline__ __nv_bfloat16* at(int row, int column) const {
    return data + row * kColumns + ((column / 8) ^ (row % 8)) * 8 + column % 8;
  }
  __device__ __forceinline__ void left(std::uint32_t (&a)[4], int row, int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(a, at(row + lane % 16, column + lane / 16 * 8));
  }
  /// As PaddedMatrix's.
  __device__ __forceinline__ void right_rows(std::uint32_t (&b)[4], int row, int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(b, at(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8));
  }
  /// n is rows [row, row + 8): of columns [column, column + 16) with b[0], b[1], of the next 16 with b[2], b[3].
  __device__ __forceinline__ void right_eight_rows(std::uint32_t (&b)[4], int row, int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(b, at(row + lane % 8, column + lane / 8 * 8));
  }
  __device__ __forceinline__ void right_columns(std::uint32_t (&b)[4], int row, int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices_transposed(b, at(row + lane % 16, column + lane / 16 * 8));
  }
};

template <int kL, int kRowBlocks>
struct Layout {
  static constexpr int kColumns = kRotary + kL, kRows = 16 * kRowBlocks, kParts = kWarps / kRowBlocks;
  static constexpr int kPartKeys = kTile / kParts, kPartColumns = kL / kParts;
  using Keys = Swizzled<kColumns>;
  using Weights = Swizzled<kTile>;
  static constexpr int kStages = 2;
  static constexpr int kWeightsAt = (kRows + kStages * kTile) * Keys::kRowBytes, kTopsAt = kWeightsAt + kRows * Weights::kRowBytes;
  static constexpr int kSumsAt = kTopsAt + kRows * kParts * 4, kBytes = kSumsAt + kRows * kGroups * 4;
};

/// Queues the copy of a row of queries or keys: piece `first` and every `step`-th behind it.
template <int kColumns, typename Matrix>
__device__ __forceinline__ void copy_row(const Matrix& to, int row, const __nv_bfloat16* from, bool exists, int first, int step, int R,
                                         int L) {
  for (int piece = first; piece < kColumns / 8; piece += step) {
    const int column = piece * 8, in_latent = column - kRotary;
    const bool is_there = exists && (in_latent < 0 ? column < R : in_latent < L);
    copy_16(to.at(row, column), is_there ? from + (in_latent < 0 ? column : R + in_latent) : from, is_there);
  }
}

template <int kL, int kRowBlocks>
__global__ void __launch_bounds__(kThreads, 1) latent_forward_kernel(const __grid_constant__ Params p) {
  using Sizes = Layout<kL, kRowBlocks>;
  using Keys = typename Sizes::Keys;
  constexpr int kParts = Sizes::kParts, kPartKeys = Sizes::kPartKeys, kPartGroups = kPartKeys / 8, kOuts = Sizes::kPartColumns / 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  const auto rows_at = [&](int row) { return Keys{reinterpret_cast<__nv_bfloat16*>(shared + row * Keys::kRowBytes)}; };
  const Keys q = rows_at(0);
  const auto key_tile = [&](int t) { return rows_at(Sizes::kRows + t % Sizes::kStages * kTile); };
  const typename Sizes::Weights weights{reinterpret_cast<__nv_bfloat16*>(shared + Sizes::kWeightsAt)};
  float* const tops = reinterpret_cast<float*>(shared + Sizes::kTopsAt);  // [row][part]
  float* const sums = reinterpret_cast<float*>(shared + Sizes::kSumsAt);  // [row][group of 8 keys]

  let_next_begin();
  wait_for_previous();
  if (p.num_units_at != nullptr && static_cast<int>(blockIdx.x) >= *p.num_units_at * p.packing.num_groups) return;
  const AttentionUnit u = p.units[blockIdx.x / p.packing.num_groups];
  const int part_of_heads = static_cast<int>(blockIdx.x) % p.packing.num_groups, first_head = part_of_heads * p.packing.heads;
  const int num_heads = min(p.packing.heads, p.packing.group - first_head);
  const int D = p.head_dim, L = p.value_dim, R = D - L;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int first_row = warp % kRowBlocks * 16, part = warp / kRowBlocks;

  for (int row = thread / 8; row < Sizes::kRows; row += kThreads / 8) {
    const int token = row / p.packing.heads, head = row % p.packing.heads;
    const bool exists = token < u.num_tokens && head < num_heads;
    copy_row<Sizes::kColumns>(q, row, exists ? p.q + (u.token + token) * p.q_stride + (first_head + head) * D : p.q, exists, thread % 8, 8,
                              R, L);
  }
  const auto copy = [&](int t) {
    if (t < u.tile_end) {
      const int row = thread / 4, key = t * kTile + row;
      const bool exists = key < u.num_keys;
      std::int64_t at = 0;
      if (exists && p.block_table != nullptr) {
        const std::int64_t block = p.block_table[u.keys + key / p.block_size];
        at = (block * p.block_size + key % p.block_size) * D;
      } else if (exists) {
        at = (u.keys + key) * p.k_stride;
      }
      copy_row<Sizes::kColumns>(key_tile(t), row, p.k + at, exists, thread % 4, 4, R, L);
    }
    copies_commit();
  };

  int row[2], token[2], head[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = first_row + lane / 4 + 8 * r;
    token[r] = row[r] / p.packing.heads;
    head[r] = row[r] % p.packing.heads;
  }
  float out[kOuts] = {};
  // Of earlier chunks: in local memory, as registers hold `out`.
  float total_memory[kOuts];
  float* total_out = total_memory;
  asm volatile("" : "+l"(total_out)::"memory");
  RowPair rows, total;
  rows.clear();
  total.clear();
  bool is_first = true;
  copy(u.tile_begin);
  for (int t = u.tile_begin; t < u.tile_end; ++t) {
    copy(t + 1);
    copies_wait<1>();
    __syncthreads();
    const Keys keys = key_tile(t);
    float scores[4 * kPartGroups] = {};
    if constexpr (kPartGroups == 1) {
#pragma unroll 6
      for (int d = 0; d < Sizes::kColumns; d += 32) {
        std::uint32_t a[4], next[4], b[4];
        q.left(a, first_row, d);
        q.left(next, first_row, d + 16);
        keys.right_eight_rows(b, part * kPartKeys, d);
        multiply_add(scores, a, b[0], b[1]);
        multiply_add(scores, next, b[2], b[3]);
      }
    } else {
#pragma unroll 6
      for (int d = 0; d < Sizes::kColumns; d += 16) {
        std::uint32_t a[4];
        q.left(a, first_row, d);
#pragma unroll
        for (int g = 0; g < kPartGroups; g += 2) {
          std::uint32_t b[4];
          keys.right_rows(b, part * kPartKeys + 8 * g, d);
          multiply_add(scores + 4 * g, a, b[0], b[1]);
          multiply_add(scores + 4 * g + 4, a, b[2], b[3]);
        }
      }
    }
    const int position = u.position - t * kTile - part * kPartKeys;
    if (position < kPartKeys - 1) ban_after(scores, position + token[0], position + token[1]);
    const int hidden = position - p.window + 1;
    if (hidden + u.num_tokens - 1 > 0) ban_before(scores, hidden + token[0], hidden + token[1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = kMinusInfinity;
#pragma unroll
      for (int i = 2 * r; i < 4 * kPartGroups; i += 4) top = fmaxf(top, fmaxf(scores[i], scores[i + 1]));
      top = quad_max(top);
      if (lane % 4 == 0) tops[row[r] * kParts + part] = top;
    }
    __syncthreads();
    // As weigh_tile(), but a row's keys lie in several warps: maxima of parts, and sums of groups of 8 keys that are added in order.
    bool same = true;
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = kMinusInfinity;
#pragma unroll
      for (int i = 0; i < kParts; ++i) top = fmaxf(top, tops[row[r] * kParts + i]);
      const float tile_top = top * p.scale_log2, before = rows.top[r];
      top = tile_top - before > kSlack ? tile_top : before;
      rescale[r] = top == before ? 1.0f : power_of_two(before - top);
      rows.top[r] = top;
      same = same && top == before;
      const float minus_top = top == kMinusInfinity ? 0.0f : -top;
#pragma unroll
      for (int g = 0; g < kPartGroups; ++g) {
        float* const s = scores + 4 * g + 2 * r;
        s[0] = power_of_two(fmaf(s[0], p.scale_log2, minus_top));
        s[1] = power_of_two(fmaf(s[1], p.scale_log2, minus_top));
        const float sum = quad_sum(s[0] + s[1]);
        if (lane % 4 == 0) sums[row[r] * kGroups + part * kPartGroups + g] = sum;
        *reinterpret_cast<std::uint32_t*>(weights.at(row[r], part * kPartKeys + 8 * g + 2 * (lane % 4))) = pack_bf16(s[0], s[1]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) sum += sums[row[r] * kGroups + g];
      rows.sum[r] = fmaf(rows.sum[r], rescale[r], sum);
    }
    if (!__all_sync(0xffffffffu, same)) {
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[i] *= rescale[(i & 2) / 2];
    }
#pragma unroll
    for (int k = 0; k < kTile; k += 16) {
      std::uint32_t a[4];
      weights.left(a, first_row, k);
#pragma unroll
      for (int d = 0; d < Sizes::kPartColumns; d += 16) {
        std::uint32_t b[4];
        keys.right_columns(b, k, kRotary + part * Sizes::kPartColumns + d);
        multiply_add(out + d / 2, a, b[0], b[1]);
        multiply_add(out + d / 2 + 4, a, b[2], b[3]);
      }
    }
    const bool is_last = t + 1 == u.tile_end;
    if (is_last && !is_first) {
      const ChunkWeights w[2] = {merge_rows<__nv_bfloat16>(total.top[0], total.sum[0], rows.top[0], rows.sum[0]),
                                 merge_rows<__nv_bfloat16>(total.top[1], total.sum[1], rows.top[1], rows.sum[1])};
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[i] = merge_out(total_out[i], out[i], w[(i & 2) / 2]);
      rows = total;
    } else if (!is_last && (t + 1) % kTilesPerChunk == 0) {
      ChunkWeights w[2] = {};
      if (is_first)
        total = rows;
      else
        for (int r = 0; r < 2; ++r) w[r] = merge_rows<__nv_bfloat16>(total.top[r], total.sum[r], rows.top[r], rows.sum[r]);
#pragma unroll
      for (int i = 0; i < kOuts; ++i) {
        total_out[i] = is_first ? out[i] : merge_out(total_out[i], out[i], w[(i & 2) / 2]);
        out[i] = 0.0f;
      }
      rows.clear();
      is_first = false;
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (token[r] >= u.num_tokens || head[r] >= num_heads) continue;
    const std::int64_t at = static_cast<std::int64_t>(u.token + token[r]) * p.num_q_heads + first_head + head[r];
    const int first_column = part * Sizes::kPartColumns + 2 * (lane % 4);
    if (u.state >= 0) {
      const std::int64_t state = (static_cast<std::int64_t>(u.state) * p.packing.num_groups + part_of_heads) * p.state_rows + row[r];
#pragma unroll
      for (int i = 2 * r; i < kOuts; i += 4)
        if (const int column = first_column + 2 * (i - 2 * r); column < L)
          *reinterpret_cast<float2*>(p.state_out + state * L + column) = make_float2(out[i], out[i + 1]);
      if (part == 0 && lane % 4 == 0) p.state_sums[state] = make_float2(rows.top[r], rows.sum[r]);
      continue;
    }
    const RowEnd end = end_row<__nv_bfloat16>(rows.top[r], rows.sum[r], p.sinks, first_head + head[r]);
#pragma unroll
    for (int i = 2 * r; i < kOuts; i += 4)
      if (const int column = first_column + 2 * (i - 2 * r); column < L)
        *reinterpret_cast<std::uint32_t*>(p.out + at * L + column) =
            pack_bf16(finish_out(out[i], end.scale), finish_out(out[i + 1], end.scale));
    if (p.lse != nullptr && part == 0 && lane % 4 == 0) p.lse[at] = log_sum(end.top, end.sum);
  }
}

template <int kL, int kRowBlocks>
void launch(const Params& p, cudaStream_t stream) {
  constexpr int kBytes = Layout<kL, kRowBlocks>::kBytes;
  PRL_CUDA_CHECK(cudaFuncSetAttribute(latent_forward_kernel<kL, kRowBlocks>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_chained(stream, latent_forward_kernel<kL, kRowBlocks>, dim3(static_cast<unsigned>(p.num_units * p.packing.num_groups)),
                 dim3(kThreads), kBytes, p);
}
template <int kL>
void launch(const Params& p, int num_rows, cudaStream_t stream) {
  if (num_rows <= 16)
    launch<kL, 1>(p, stream);
  else if (num_rows <= 32)
    launch<kL, 2>(p, stream);
  else
    launch<kL, 4>(p, stream);
}

}  // namespace

void launch_latent_forward(const Params& p, int num_rows, cudaStream_t stream) {
  if (p.value_dim <= 128)
    launch<128>(p, num_rows, stream);
  else
    launch<512>(p, num_rows, stream);
}

}  // namespace prl::ops::cuda
