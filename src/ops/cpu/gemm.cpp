#include "ops/cpu/gemm.hpp"

#include <algorithm>

#include "ops/cpu/parallel.hpp"

namespace prl::ops::cpu {
namespace {

/// Rows packed at a time: 512 rows of depth 1,536 are 3 MiB, which a shared last-level cache keeps.
constexpr std::int64_t kBlockRows = 512;
/// A task of 8 slivers and 256 columns reads its block of A and of B from L2 (about 400 KiB) and B once per 100 rows from beyond.
constexpr std::int64_t kTaskSlivers = 8;
constexpr std::int64_t kTaskCols = 256;
/// Tasks per thread, at least, so that threads finish together.
constexpr std::int64_t kTasksPerThread = 3;

/// The same where one sliver of A meets all of B, as in decoding: time is that of reading B, so what counts is that threads end together.
constexpr std::int64_t kReadsPerThread = 4;

/// Columns of a task of such a product: about kReadsPerThread tasks a thread, in the cut that gives the busiest thread the least.
std::int64_t read_cols(std::int64_t cols, std::int64_t col_tile, std::int64_t threads) {
  const std::int64_t tiles = ceil_div(cols, col_tile), first = std::max<std::int64_t>(1, tiles / (threads * kReadsPerThread));
  std::int64_t best = first, best_load = ceil_div(ceil_div(tiles, first), threads) * first;
  for (std::int64_t per_task = first + 1; per_task <= 2 * first; ++per_task)
    if (const std::int64_t load = ceil_div(ceil_div(tiles, per_task), threads) * per_task; load < best_load) {
      best = per_task;
      best_load = load;
    }
  return best * col_tile;
}

const char* at_row(const GemmLeft& a, std::int64_t row) {
  return static_cast<const char*>(a.data) + (a.transposed ? row : row * a.stride) * static_cast<std::int64_t>(size_of(a.dtype));
}

}  // namespace

GemmPlan plan_gemm(const OpContext& ctx, const GemmKernels& k, std::int64_t rows, std::int64_t depth, std::int64_t cols, bool has_sink,
                   std::int64_t sink_cols) {
  GemmPlan plan;
  plan.block_rows = std::min(rows, kBlockRows);
  const std::int64_t slivers = num_slivers(plan.block_rows, k.row_tile);
  plan.task_slivers = std::min(slivers, sink_cols != 0 ? kTaskSlivers / 2 : kTaskSlivers);
  plan.task_cols = sink_cols != 0 ? sink_cols : kTaskCols;
  const std::int64_t wanted = num_threads(ctx) == 1 ? 1 : kTasksPerThread * num_threads(ctx);
  const auto tasks = [&] { return ceil_div(slivers, plan.task_slivers) * ceil_div(cols, plan.task_cols); };
  if (sink_cols == 0)
    while (tasks() < wanted && plan.task_cols > 2 * k.col_tile) plan.task_cols /= 2;
  if (sink_cols == 0 && slivers == 1 && num_threads(ctx) > 1)
    plan.task_cols = std::min(kTaskCols, read_cols(cols, k.col_tile, num_threads(ctx)));
  while (tasks() < wanted && plan.task_slivers > 1) plan.task_slivers = (plan.task_slivers + 1) / 2;
  const std::int64_t last_col = std::min(cols, plan.task_cols);
  plan.packed_bytes = aligned_bytes(static_cast<std::size_t>(slivers) * k.sliver_bytes(depth));
  plan.slot_bytes = aligned_bytes(k.scratch_bytes);
  if (has_sink) plan.slot_bytes += aligned_bytes(static_cast<std::size_t>(plan.task_slivers * k.row_tile * last_col) * sizeof(float));
  plan.total_bytes = plan.packed_bytes + plan.slot_bytes * static_cast<std::size_t>(num_threads(ctx));
  return plan;
}

void gemm(OpContext& ctx, const GemmKernels& k, const GemmPlan& plan, const GemmLeft& a, const GemmRight& b, const GemmOutput& out,
          char* memory) {
  char* packed = memory;
  char* slots = memory + plan.packed_bytes;
  const std::size_t sliver_stride = k.sliver_bytes(a.depth);
  for (std::int64_t row0 = 0; row0 < a.rows; row0 += plan.block_rows) {
    const std::int64_t rows = std::min(plan.block_rows, a.rows - row0);
    const std::int64_t slivers = num_slivers(rows, k.row_tile);
    parallel_rows(ctx, slivers, k.row_tile * a.depth, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t s = begin; s < end; ++s) {
        const std::int64_t first = sliver_begin(s, rows, slivers), last = sliver_begin(s + 1, rows, slivers);
        k.pack_sliver(packed + static_cast<std::size_t>(s) * sliver_stride, at_row(a, row0 + first), a.dtype, a.stride,
                      static_cast<int>(last - first), a.depth, a.transposed);
      }
    });

    const std::int64_t row_tasks = ceil_div(slivers, plan.task_slivers), col_tasks = ceil_div(b.cols, plan.task_cols);
    parallel_slots(ctx, row_tasks * col_tasks, [&](std::int64_t task, std::int64_t slot) {
      // Neighbouring tasks share columns, so threads read the same panels at about the same time.
      const std::int64_t s0 = task % row_tasks * plan.task_slivers, s1 = std::min(slivers, s0 + plan.task_slivers);
      const std::int64_t first = sliver_begin(s0, rows, slivers), last = sliver_begin(s1, rows, slivers);
      const std::int64_t col = task / row_tasks * plan.task_cols, cols = std::min(plan.task_cols, b.cols - col);
      char* scratch = slots + static_cast<std::size_t>(slot) * plan.slot_bytes;
      float* tile = reinterpret_cast<float*>(scratch + aligned_bytes(k.scratch_bytes));
      GemmBlock block;
      block.a = packed;
      block.num_rows = rows;
      block.first_sliver = s0;
      block.num_slivers = s1 - s0;
      block.panel_stride = b.panel_stride;
      block.depth = a.depth;
      block.c_stride = out.sink != nullptr ? cols : out.c_stride;
      block.accumulate = out.sink == nullptr && out.accumulate;
      block.scratch = scratch;
      float* c = out.sink != nullptr ? tile : out.c + (row0 + first) * out.c_stride + col;
      for (std::int64_t j = 0; j < cols; j += kTaskCols) {
        block.b = b.panels + (col + j) / k.col_tile * b.panel_stride;
        block.num_cols = std::min(kTaskCols, cols - j);
        block.c = c + j;
        k.block(block);
      }
      if (out.sink != nullptr) out.sink(out.self, {row0 + first, col, last - first, cols, tile, cols});
    });
  }
}

std::size_t panels_bytes(const GemmKernels& k, std::int64_t cols, std::int64_t depth) {
  return static_cast<std::size_t>(ceil_div(cols, k.col_tile)) * k.panel_bytes(depth);
}

void pack_panels(OpContext& ctx, const GemmKernels& k, char* out, const void* source, DType dtype, std::int64_t stride, std::int64_t cols,
                 std::int64_t depth, bool transposed) {
  const std::int64_t panels = ceil_div(cols, k.col_tile);
  const std::size_t bytes = k.panel_bytes(depth);
  parallel_rows(ctx, panels, k.col_tile * depth, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      const std::int64_t col = j * k.col_tile;
      const char* from = static_cast<const char*>(source) + (transposed ? col : col * stride) * static_cast<std::int64_t>(size_of(dtype));
      k.pack_panel(out + static_cast<std::size_t>(j) * bytes, from, dtype, stride,
                   static_cast<int>(std::min<std::int64_t>(k.col_tile, cols - col)), depth, transposed);
    }
  });
}

}  // namespace prl::ops::cpu
