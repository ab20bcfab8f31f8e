#pragma once

#include "ops/context.hpp"
#include "ops/cpu/kernels.hpp"

namespace prl::ops::cpu {

/// The left operand: A[i][p] = data[i * stride + p], or data[p * stride + i] if transposed. Packed block by block on the way.
struct GemmLeft {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t stride = 0;
  bool transposed = false;
  std::int64_t rows = 0;
  std::int64_t depth = 0;
};
/// The right operand, packed: `cols` columns from panel to panel, starting at the first row used.
struct GemmRight {
  const char* panels = nullptr;
  std::int64_t panel_stride = 0;
  std::int64_t cols = 0;
};
/// Finished fp32 values c[rows, cols] of the product at (row, col), in scratch of the calling thread.
struct GemmTileResult {
  std::int64_t row = 0, col = 0, rows = 0, cols = 0;
  float* c = nullptr;
  std::int64_t c_stride = 0;
};
/// Where the product goes: straight to fp32 memory, or tile by tile to `sink(self, tile)` on the worker threads.
struct GemmOutput {
  float* c = nullptr;
  std::int64_t c_stride = 0;
  bool accumulate = false;
  void (*sink)(const void* self, const GemmTileResult&) = nullptr;
  const void* self = nullptr;
  std::int64_t sink_cols = 0;  ///< if not 0, tiles are exactly this wide and aligned to it (the last one may be narrower)
};

/// How a product is cut. Results do not depend on it.
struct GemmPlan {
  std::int64_t block_rows = 0;  ///< rows of A packed at a time
  std::int64_t task_slivers = 0, task_cols = 0;
  std::size_t packed_bytes = 0, slot_bytes = 0;
  std::size_t total_bytes = 0;
};
GemmPlan plan_gemm(const OpContext& ctx, const GemmKernels& k, std::int64_t rows, std::int64_t depth, std::int64_t cols, bool has_sink,
                   std::int64_t sink_cols = 0);

/// C = A B. `memory`: plan.total_bytes.
void gemm(OpContext& ctx, const GemmKernels& k, const GemmPlan& plan, const GemmLeft& a, const GemmRight& b, const GemmOutput& out,
          char* memory);

/// Panels of `cols` columns and depth k, all together.
std::size_t panels_bytes(const GemmKernels& k, std::int64_t cols, std::int64_t depth);
/// B[p][j] = source[j * stride + p], or source[p * stride + j] if transposed.
void pack_panels(OpContext& ctx, const GemmKernels& k, char* out, const void* source, DType dtype, std::int64_t stride, std::int64_t cols,
                 std::int64_t depth, bool transposed);

inline std::size_t aligned_bytes(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace prl::ops::cpu
