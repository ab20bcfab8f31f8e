#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/attention/stats.hpp"
#include "ops/cuda/attention/unit.hpp"

// How host code calls the attention kernels that need nothing of compute capability 9.0: of fp32 (plain arithmetic in fp32
// throughout, no tf32: for proofs and small models) and of bf16 (mma.sync, from 8.0 on).

namespace prl::ops::cuda {

/// Keys per tile of these kernels.
constexpr int kPlainTile = 64;

/// T is float or __nv_bfloat16.
template <typename T>
struct PlainForward {
  const T *q, *k, *v;  ///< paged: k and v are [blocks][Hkv][block_size][D]
  std::int64_t q_stride, k_stride, v_stride;
  const AttentionUnit* units;        ///< at most one block of rows each
  const std::int32_t* num_units_at;  ///< device memory, or nullptr: num_units; the latter is the most there can be
  std::int32_t num_units;
  RowPacking packing;
  std::int32_t num_kv_heads, num_q_heads, head_dim;
  std::int32_t value_dim;  ///< without v the last elements of a key are its value, and there is one key head
  float scale_log2;
  std::int32_t window;  ///< keys that a query sees at most
  T* out;
  float* lse;
  const std::int32_t* block_table;  ///< nullptr: dense
  std::int32_t block_size;
  float* state_out;
  float2* state_sums;
  std::int32_t state_rows;
  const float* sinks;  ///< [num_q_heads] or nullptr
};
void launch_plain_forward(const PlainForward<float>& p, cudaStream_t stream);
void launch_plain_forward(const PlainForward<__nv_bfloat16>& p, cudaStream_t stream);
/// Without v: attention to latents. No unit has more than `num_rows` rows (tokens times heads of a group), on which no bit depends.
void launch_latent_forward(const PlainForward<__nv_bfloat16>& p, int num_rows, cudaStream_t stream);
/// What these kernels have room for: of a key its value, and the elements before it.
constexpr int kMaxLatent = 512, kMaxLatentRotary = 64;

/// Keys or queries that a block of threads of the backward pass owns.
template <typename T>
constexpr int kPlainOwned = sizeof(T) == 4 ? 32 : 64;
struct PlainBackwardUnit {
  std::int32_t token, stats;  ///< of position 0: row, and row in the table of statistics
  std::int32_t first;         ///< position of the first one owned
  std::int32_t length;        ///< of the sequence
};
template <typename T>
struct PlainBackward {
  const T *q, *k, *v, *dout;
  std::int64_t q_stride, k_stride, v_stride, dout_stride;
  const PlainBackwardUnit* units;
  std::int32_t num_units, num_q_heads, num_kv_heads, head_dim;
  std::int32_t window;  ///< keys that a query sees at most
  float scale;
  const float2* stats;
  std::int64_t stats_rows;
  T *dq, *dk, *dv;
  std::int64_t dq_stride, dk_stride, dv_stride;
};
/// Queues dk and dv, and dq.
void launch_plain_backward(const PlainBackward<float>& p, cudaStream_t stream);
void launch_plain_backward(const PlainBackward<__nv_bfloat16>& p, cudaStream_t stream);

}  // namespace prl::ops::cuda
