#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/cuda/fault.hpp"
#include "ops/cuda/attention/unit.hpp"

// How host code calls the attention kernels of compute capability 9.0.

namespace prl::ops::cuda::hopper {

/// Columns a head of this size takes in shared memory: 64, 128 or 256.
constexpr int padded_head_dim(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
/// Keys per tile of the forward pass.
constexpr int forward_tile(int head_dim) { return head_dim <= 128 ? 128 : 64; }
/// Blocks of 64 rows that one unit of the forward pass has, unless it is split.
constexpr int forward_row_blocks(int head_dim) { return head_dim <= 128 ? 2 : 1; }

/// What a decoding step does to its new tokens' heads before attention: norms, rotation, keys and values into the cache.
struct FreshHeads {
  const __nv_bfloat16* qkv;  ///< [token][q heads, k heads, v heads][D]
  std::int64_t qkv_stride;
  const float *q_norm, *k_norm;  ///< null: no norms
  float eps;
  const std::int32_t* positions;
  const float *cosines, *sines;
  int num_pairs;  ///< of a head that turn: a multiple of 8
  std::int64_t num_positions;
  const std::int32_t* slots;  ///< -1: not into the cache
  __nv_bfloat16 *k_cache, *v_cache;
  ::prl::cuda::FaultWord* fault;
};

struct ForwardParams {
  CUtensorMap q;  ///< [T][Hq][D], box [tokens][heads][64] of the packing
  /// Dense: [Hkv][T][D], box [1][tile][64]; paged: [blocks * Hkv][block_size][D], box [1][box_rows][64]; launch_decode:
  /// [blocks * Hkv][block_size / 8][D / 64][8][64], box [1][box_rows / 8][D / 64][8][64].
  CUtensorMap k, v;
  const AttentionUnit* units;
  const std::int32_t* num_units_at;  ///< device memory, or nullptr: num_units
  std::int32_t num_units;
  RowPacking packing;
  std::int32_t num_kv_heads, num_q_heads, head_dim;
  float scale_log2;
  std::int32_t window;  ///< keys that a query sees at most
  __nv_bfloat16* out;   ///< [T][Hq][D]
  float* lse;           ///< [T][Hq] or nullptr
  const std::int32_t* block_table;
  std::int32_t block_size, box_rows;
  float* state_out;    ///< [state][group of heads][state_rows][D]
  float2* state_sums;  ///< [state][group of heads][state_rows]: top, sum
  std::int32_t state_rows;
  const float* sinks;  ///< [Hq] or nullptr

  // launch_decode only
  CUtensorMap k_rest, v_rest;  ///< as k and v, boxes of 8 rows
  FreshHeads fresh;
  std::int32_t* next_item;  ///< [2] 0, and 0 again after each call
};

/// Rows of q in a unit that launch_decode has room for.
constexpr int kMaxFreshHeads = 32;
/// Keys that launch_decode copies into one slot of its ring; a box has at most as many rows.
constexpr int kDecodeSlotRows = 64;
/// Queues split units of one token each, num_units_at of them, whose heads are `p.fresh`. kHeadDim is 64 or 128.
template <int kHeadDim>
void launch_decode(const ForwardParams& p, int num_items, int num_multiprocessors, cudaStream_t stream);

/// Queues the forward pass over all units, for heads that are padded to kPaddedHeadDim. `split`: units are one block of rows and one chunk
/// of keys. `num_items`: units times groups of heads, at least one; an estimate where the number of units lies on the device.
template <int kPaddedHeadDim>
void launch_forward(const ForwardParams& p, bool paged, bool split, int num_items, int num_multiprocessors, cudaStream_t stream);

/// Attention to latents of kMaxLatent elements behind kMaxLatentRotary others, one key for all heads: p.v is not read, rows of out have
/// kMaxLatent elements. Units are one block of rows, of all their chunks of keys or of one.
void launch_latent(const ForwardParams& p, bool paged, int num_items, int num_multiprocessors, cudaStream_t stream);

/// Consecutive keys of one sequence, whose dk and dv are summed over all queries that see them.
struct KeyUnit {
  std::int32_t token;   ///< row of the sequence's position 0
  std::int32_t stats;   ///< the same in the table of row statistics
  std::int32_t first;   ///< position of the first key, a multiple of kKeyRows
  std::int32_t length;  ///< of the sequence
  std::int32_t tiles;   ///< where the sequence's tiles of score gradients start
};
constexpr int kKeyRows = 128;
/// Consecutive queries of one sequence.
struct QueryUnit {
  std::int32_t token;  ///< row of position 0
  std::int32_t stats;
  std::int32_t first;  ///< position of the first query
  std::int32_t num_tokens;
  std::int32_t tiles;  ///< where the sequence's tiles of score gradients start
};

/// Gradients of scores, kept between the two passes: tiles of 64 queries x kKeyRows keys that lie on or below the diagonal, in bf16,
/// as left operands of mma.m16n8k16: [4 times 16 queries][8 times 16 keys][32 lanes][8 elements].
constexpr int kScoreTileBytes = 64 * kKeyRows * 2;
/// What a plain copy takes of row statistics and of score gradients, in rows of 128 bytes.
constexpr int kPlainRowBytes = 128, kStatsPerRow = kPlainRowBytes / static_cast<int>(sizeof(float2)),
              kScoreTileRows = kScoreTileBytes / kPlainRowBytes;
/// Tiles of a sequence before those of its queries [64 i, 64 i + 64).
__host__ __device__ constexpr std::int64_t score_tiles_before(std::int64_t i) { return (i / 2 + 1) * ((i + 1) / 2); }

struct BackwardParams {
  CUtensorMap q, dout;                ///< [T][Hq][D], box [64][1][64]
  CUtensorMap q_packed, dout_packed;  ///< [T][Hq][D], box [tokens][heads][64] of the packing
  CUtensorMap k, v;                   ///< [Hkv][T][D], box [1][kKeyRows][64]
  CUtensorMap stats_rows_map;         ///< `stats` in rows of 128 bytes, box of the 64 of a slot
  CUtensorMap dscore_rows_map;        ///< `dscores` in rows of 128 bytes, box of a tile
  const KeyUnit* key_units;
  const QueryUnit* query_units;
  std::int32_t num_key_units, num_query_units;
  RowPacking packing;
  std::int32_t num_kv_heads, head_dim;
  std::int32_t window;  ///< keys that a query sees at most
  float scale, scale_log2;
  const float2* stats;  ///< [Hq][stats_rows]: log-sum in powers of two, sum of dout * out; (inf, 0) where there is no query
  std::int64_t stats_rows;
  __nv_bfloat16 *dq, *dk, *dv;
  std::int64_t dq_stride, dk_stride, dv_stride;  ///< from token to token
  uint4* dscores;                                ///< of the heads of a round, dscore_tiles each
  std::int64_t dscore_tiles;
  std::int32_t first_kv_head, num_round_kv_heads;
};
/// Queues dk, dv and dq, forming scores twice. kPaddedHeadDim is 64 or 128.
template <int kPaddedHeadDim>
void launch_backward(const BackwardParams& p, int num_multiprocessors, cudaStream_t stream);
/// The same with score gradients kept in p.dscores, kv heads [p.first_kv_head, ... + p.num_round_kv_heads) only; the units of queries
/// are of kKeyRows.
template <int kPaddedHeadDim>
void launch_backward_kept(const BackwardParams& p, int num_multiprocessors, cudaStream_t stream);

}  // namespace prl::ops::cuda::hopper
