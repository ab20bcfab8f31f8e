#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "ops/cuda/device.cuh"
#include "ops/cuda/few_rows.hpp"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/lora_entry.cuh"

namespace prl::ops::cuda {

constexpr int kBlock = 64;  ///< of K: a row of 128 bytes in shared memory
constexpr int kRowBytes = kBlock * 2;
constexpr int kGroup = 128, kCopying = 2 * kWarp;  ///< threads: of a warpgroup that computes, and of the warps that copy weights and rows
constexpr int kSpan = 64;                          ///< columns that products read, whatever the tile has

/// What is multiplied: numbers of 16 bits; such numbers, of which the weights come as codes that are widened; or codes of 8 bits on both
/// sides, which are copied two by two as if they were numbers of 16 bits.
enum class Operands : std::uint8_t { kBf16, kWidened, kCodes };

/// Blocks of K that one copy loads into a slot. Of codes to be widened few: what is widened waits for whole slots.
__host__ __device__ constexpr int blocks_per_slot(int rows, Operands operands = Operands::kBf16) {
  if (operands == Operands::kCodes) return rows <= 16 ? 4 : 2;
  return rows <= 16 && operands == Operands::kBf16 ? 4 : rows <= 64 ? 2 : 1;
}

/// Where A lies: behind the columns of the weight, so that one product forms both, or apart, where they have no room for it.
enum class AdapterPlace { kNone, kBehind, kApart };
/// The parts of an adapter, of which recorded work is made.
struct LoraParts {
  int num_parts, first_output[kMaxLoraParts], num_outputs[kMaxLoraParts], first_rank[kMaxLoraParts], rank[kMaxLoraParts];
};
struct FewRowsArgs {
  /// [K / 64][N][64], box [blocks per slot][columns][64]; of gate and up [K / 64][N / 16][2][8][64], box [blocks][columns / 16][2][8][64]:
  /// then 8 columns of gate and 8 of up take turns in shared memory, and a thread holds both factors of its results.
  CUtensorMap weights;
  /// [K / 64][M][64], box [blocks per slot][rows][64]; not with a norm.
  CUtensorMap rows;
  void* out;
  const float* bias;  ///< [N] or null
  std::int64_t out_stride;
  int M, N, num_steps, columns, slots;  ///< N: columns of out
  int rows_at, barriers_at;             ///< in shared memory: slots of weights, then of rows (all of K with a norm), then barriers
  const __nv_bfloat16* x;               ///< with a norm: what is normed
  const float* norm;
  const __nv_bfloat16* residual;  ///< or null
  std::int64_t x_stride, residual_stride;
  std::int32_t* rows_are_there;  ///< or null
  bool is_wide;                  ///< 8 columns of out, and of the residual, lie together in 16 aligned bytes
  float eps, inverse_K;
  int K;
  // With an adapter, which has A behind the columns of the weight in shared memory, or from ranks_at on where gate and up take turns.
  const LoraEntryMemory* adapter;  ///< or null
  LoraParts parts;                 ///< of it
  const std::int32_t* tiles;       ///< [num_tiles][kLoraTileWords]: rows that name it
  const float* adapted_bias;       ///< in place of bias
  int num_tiles, ranks;            ///< ranks: rows of A that a block has room for
  int ranks_at, adapter_at;        ///< adapter_at: AdapterOfBlock
  // Of experts' rows.
  const RowTile* row_tiles;  ///< [gridDim.y], or null
  int rows_apart;            ///< rows of `weights` from one expert's matrix to the next
  const float* row_factors;  ///< of swiglu's results, or null
  // Of weights that are codes (EightBitCodes); `weights` then is a map of 4 bytes each, [K / 64][N / 8][128] with boxes [blocks per
  // slot][columns / 8][128], of gate and up [K / 64][N / 16][2][2][64] with boxes [blocks][columns / 16][2][2][64].
  const std::uint16_t* code_factors;
  int code_slots, codes_at;  ///< slots of codes, and where they lie in shared memory; their barriers follow the others
  // Of Operands::kCodes.
  const float *row_scales, *column_scales;  ///< [M], and one for each row of the weights, of all experts' matrices
};

/// The rows of a block, and where its weights begin.
template <bool kOfExperts>
struct RowsOfBlock {
  const int first, end, first_weight;
};
template <>
struct RowsOfBlock<false> {};
/// By tiles of kRows.
template <int kRows>
__device__ __forceinline__ int rows_begin(const RowsOfBlock<false>&) {
  return static_cast<int>(blockIdx.y) * kRows;
}
template <int kRows>
__device__ __forceinline__ int rows_begin(const RowsOfBlock<true>& rows) {
  return rows.first;
}
__device__ __forceinline__ int rows_end(const FewRowsArgs& a, const RowsOfBlock<false>&) { return a.M; }
__device__ __forceinline__ int rows_end(const FewRowsArgs&, const RowsOfBlock<true>& rows) { return rows.end; }
/// Threads that compute a tile: a warpgroup, or one for each 64 rows.
__host__ __device__ constexpr int computing_threads(int rows) { return rows >= 64 ? rows / 64 * kGroup : kGroup; }

/// Of weights that are codes, as FewRowsArgs says; boxes of `blocks` blocks of K and `columns` columns.
CUtensorMap codes_map(const Product& p, int columns, int blocks, bool swiglu);
/// Queues the product of weights that are codes, by tiles of so many rows up to kMaxEightBitRows; without adapters and experts.
void launch_eight_bit_rows(const OpContext& ctx, const Product& p, const FewRowsArgs& a, int rows, bool swiglu);
/// The same of codes on both sides, perhaps of experts; without a norm as well.
void launch_code_rows(const OpContext& ctx, const Product& p, const FewRowsArgs& a, int rows, const FewRowsFusion& fusion);

#if PRL_HOPPER

/// A tile of out, formed by products of 64 by 8 to 64. Up to 32 rows stand on the right, from 64 on they stand on the left, 64 for each
/// warpgroup: then a warp has 16 rows of its own, and a lane neighbouring columns.
template <int kRows_, Operands kOperands_ = Operands::kBf16>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr Operands kOperands = kOperands_;
  static constexpr int kBlocks = blocks_per_slot(kRows, kOperands);
  static constexpr bool kHasRowsLeft = kRows >= 64;
  static constexpr int kGroups = computing_threads(kRows) / kGroup, kEach = kRows / kGroups;  ///< kEach: rows of a warpgroup
  static constexpr int kResults = kEach * kSpan / kGroup;                                     ///< of a thread
};

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda
