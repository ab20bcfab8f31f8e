#include "ops/cuda/lora_bf16.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/lora_bf16.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

using namespace lora;

LoraEntry entry_of(const OpContext& ctx, const LoraWeight& w) {
  LoraEntry e{};
  e.a = dense(ctx, *w.a).w_NK.as<Bf16>();
  e.num_parts = static_cast<int>(w.parts.size());
  for (std::size_t i = 0; i < w.parts.size(); ++i) {
    const LoraPart& part = w.parts[i];
    e.b[i] = dense(ctx, *part.b).w_NK.as<Bf16>();
    e.first_output[i] = static_cast<int>(part.first_output);
    e.num_outputs[i] = static_cast<int>(part.num_outputs);
    e.first_rank[i] = static_cast<int>(part.first_rank);
    e.rank[i] = static_cast<int>(part.rank);
    e.scale[i] = part.scale;
  }
  return e;
}

bool has_vector_rows(const ConstTensorView& x) { return x.row_stride % 8 == 0 && is_aligned(x.data, 16); }
bool has_rows_of_four(const TensorView& y) { return y.row_stride % 4 == 0 && is_aligned(y.data, 8); }

/// Two kernels over `num_tiles` tiles of adapters with parts of up to `max_rank`.
void launch_tiles(OpContext& ctx, TileArgs& args, std::int64_t num_tiles, std::int64_t max_rank) {
  PRL_CHECK(num_tiles <= kMaxGrid, "{} tiles of adapters in one launch", num_tiles);
  const std::int64_t rank_blocks = kMaxLoraParts * ceil_div(max_rank, kRankBlock);
  args.h_pitch = static_cast<int>(rank_blocks * kRankBlock);
  args.h = static_cast<Bf16*>(ctx.workspace->require(static_cast<std::size_t>(num_tiles * kLoraTileRows * args.h_pitch) * sizeof(Bf16)));
  const auto tiles = static_cast<unsigned>(num_tiles);
  launch_chained(stream_of(ctx), shrink_tiles_kernel, dim3(static_cast<unsigned>(rank_blocks), tiles), dim3(kThreads), 0, args);
  // Blocks that fit at once; where many tiles are empty fewer than that have work, so that no block has more than some passes.
  constexpr std::int64_t kBlocksAtOnce = 4, kMostPasses = 8;
  const std::int64_t pieces = std::max<std::int64_t>(1, kBlocksAtOnce * num_multiprocessors(ctx) / num_tiles);
  args.columns = static_cast<int>(std::min(round_up(ceil_div(args.N, pieces), kBlockColumns), kMostPasses * kBlockColumns));
  launch_chained(stream_of(ctx), expand_tiles_kernel, dim3(static_cast<unsigned>(ceil_div(args.N, args.columns)), tiles), dim3(kThreads), 0,
                 args);
}

TileArgs tile_args(TensorView y_TN, ConstTensorView x_TK) {
  TileArgs args{};
  args.x = x_TK.as<Bf16>();
  args.y = y_TN.as<Bf16>();
  args.x_stride = x_TK.row_stride;
  args.y_stride = y_TN.row_stride;
  args.num_rows = static_cast<int>(x_TK.shape.num_rows());
  args.K = static_cast<int>(x_TK.shape.num_cols());
  args.N = static_cast<int>(y_TN.shape.num_cols());
  args.x_is_vector = args.K % 8 == 0 && has_vector_rows(x_TK);
  args.y_is_vector = has_rows_of_four(y_TN);
  return args;
}

TileArgs tile_args(TensorView y_TN, ConstTensorView x_TK, const LoraIndex& index) {
  TileArgs args = tile_args(y_TN, x_TK);
  args.entries = index.entries.as<char>();
  args.entry_stride = index.entries.row_stride;
  args.tiles = index.tiles.as<std::int32_t>();
  return args;
}

std::int64_t max_rank_of(const LoraWeight& w) {
  std::int64_t most = 1;
  for (const LoraPart& part : w.parts) most = std::max(most, part.rank);
  return most;
}

/// Groups whose rows tiles name, `count` of them; none: all rows, and one matrix.
struct TiledGroups {
  GroupedRows rows;
  std::int64_t count = 0;
  std::int64_t tiles_of(std::int64_t num_rows) const { return rows.tiles != nullptr ? count : ceil_div(num_rows, kManyRows); }
};

/// h = round(scale * x a^T); `a` is not read with groups.
void run_shrink(const OpContext& ctx, Bf16* h, std::int64_t h_stride, ConstTensorView x, const Bf16* a, std::int64_t num_ranks, float scale,
                const TiledGroups& groups = {}) {
  const ShrinkArgs args{x.as<Bf16>(),
                        a,
                        groups.rows,
                        h,
                        x.row_stride,
                        h_stride,
                        static_cast<int>(x.shape.num_rows()),
                        static_cast<int>(x.shape.num_cols()),
                        static_cast<int>(num_ranks),
                        x.shape.num_cols() % 8 == 0 && has_vector_rows(x),
                        scale};
  const std::int64_t tiles = groups.tiles_of(args.num_rows);
  PRL_CHECK(tiles <= kMaxGrid, "{} tiles of adapters in one launch", tiles);
  shrink_kernel<<<dim3(static_cast<unsigned>(ceil_div(num_ranks, kRankBlock)), static_cast<unsigned>(tiles)), kThreads, 0,
                  stream_of(ctx)>>>(args);
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// out (+)= scale * h w^T, h [T, num_ranks] at `h_stride`; `w` is not read with groups.
void run_expand(const OpContext& ctx, TensorView out, const Bf16* h, std::int64_t h_stride, const Bf16* w, std::int64_t num_ranks,
                float scale, bool accumulate, const TiledGroups& groups = {}) {
  constexpr int kColumns = 4 * kBlockColumns;
  const ExpandArgs args{h,
                        w,
                        groups.rows,
                        out.as<Bf16>(),
                        h_stride,
                        out.row_stride,
                        static_cast<int>(out.shape.num_rows()),
                        static_cast<int>(out.shape.num_cols()),
                        static_cast<int>(num_ranks),
                        kColumns,
                        accumulate,
                        num_ranks % 4 == 0 && h_stride % 4 == 0 && is_aligned(h, 8),
                        has_rows_of_four(out),
                        scale};
  expand_kernel<<<dim3(static_cast<unsigned>(ceil_div(args.N, kColumns)), static_cast<unsigned>(groups.tiles_of(args.num_rows))), kThreads,
                  0, stream_of(ctx)>>>(args);
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// Rows of one adapter that lie together.
void add_to_all(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LoraWeight& w) {
  const std::int64_t T = x_TK.shape.num_rows(), R = w.num_ranks(), h_stride = round_up(R, 8);
  const TensorView h_shape{nullptr, {T, R}, DType::kBF16, y_TN.device, h_stride};
  Product a_x = linear_product(dense(ctx, *w.a), h_shape, x_TK);
  if (T < kManyRows || !has_librarys_bits(ctx, a_x)) {
    TileArgs args = tile_args(y_TN, x_TK);
    args.one = entry_of(ctx, w);
    return launch_tiles(ctx, args, ceil_div(T, kLoraTileRows), max_rank_of(w));
  }
  auto* h = static_cast<Bf16*>(ctx.workspace->require(static_cast<std::size_t>(T * h_stride) * sizeof(Bf16)));
  a_x.out = h;
  blas_of(ctx).run(ctx, a_x);
  for (const LoraPart& part : w.parts)
    run_expand(ctx, y_TN.columns(part.first_output, part.num_outputs), h + part.first_rank, h_stride, dense(ctx, *part.b).w_NK.as<Bf16>(),
               part.rank, part.scale, true);
}

GradientArgs gradient_args(ConstTensorView narrow, ConstTensorView wide, bool is_transposed, float* partial) {
  GradientArgs args{narrow.as<Bf16>(),
                    wide.as<Bf16>(),
                    narrow.row_stride,
                    wide.row_stride,
                    static_cast<int>(wide.shape.num_rows()),
                    static_cast<int>(narrow.shape.num_cols()),
                    static_cast<int>(wide.shape.num_cols()),
                    false,
                    false,
                    is_transposed,
                    partial};
  args.narrow_is_vector = args.M % 8 == 0 && has_vector_rows(narrow);
  args.wide_is_vector = args.N % 8 == 0 && has_vector_rows(wide);
  return args;
}
/// launch(kM, grid) for the blocks of a gradient, `depth` of them one behind another.
template <typename Launch>
void with_gradient_blocks(const GradientArgs& args, unsigned depth, const Launch& launch) {
  const auto run = [&]<int kM>() {
    launch.template operator()<kM>(
        dim3(static_cast<unsigned>(ceil_div(args.N, kGradientColumns)), static_cast<unsigned>(ceil_div(args.M, 16 * kM)), depth));
    PRL_CUDA_CHECK(cudaGetLastError());
  };
  args.M <= 16 ? run.template operator()<1>() : args.M <= 32 ? run.template operator()<2>() : run.template operator()<4>();
}

/// out[m, n], or [n, m] if `is_transposed`, (+)= sum_t narrow[t, m] wide[t, n].
void run_gradient(const OpContext& ctx, TensorView out, ConstTensorView narrow, ConstTensorView wide, bool is_transposed, bool accumulate,
                  float* partial) {
  const GradientArgs args = gradient_args(narrow, wide, is_transposed, partial);
  const std::int64_t chunks = ceil_div(args.T, kChunkTokens), count = static_cast<std::int64_t>(args.M) * args.N;
  PRL_CHECK(chunks <= kMaxGrid, "a gradient over {} tokens in one launch", args.T);
  with_gradient_blocks(args, static_cast<unsigned>(chunks),
                       [&]<int kM>(const dim3& grid) { gradient_kernel<kM><<<grid, kGradientThreads, 0, stream_of(ctx)>>>(args); });
  add_gradient_chunks_kernel<<<static_cast<unsigned>(ceil_div(count, kThreads)), kThreads, 0, stream_of(ctx)>>>(out.as<float>(), partial,
                                                                                                                chunks, count, accumulate);
  PRL_CUDA_CHECK(cudaGetLastError());
}

void run_transpose(const OpContext& ctx, Bf16* out, const Bf16* in, std::int64_t rows, std::int64_t columns) {
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, 32)), static_cast<unsigned>(ceil_div(rows, 32)));
  transpose_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(out, in, nullptr, static_cast<int>(rows), static_cast<int>(columns));
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

bool is_bf16_lora(const OpContext& ctx, const LoraWeight& w, DType dtype) {
  return dtype == DType::kBF16 && w.dtype() == DType::kBF16 && w.parts.size() <= kMaxLoraParts && properties_of(ctx).major >= 8;
}

bool write_lora_entry(OpContext& ctx, std::span<std::byte> entry, const LoraWeight* weight, DType dtype) {
  PRL_CHECK(entry.size() >= sizeof(LoraEntryMemory), "an adapter's entry of {} bytes", entry.size());
  if (weight != nullptr && !is_bf16_lora(ctx, *weight, dtype)) return false;
  LoraEntryMemory memory{};
  if (weight != nullptr) {
    memory.entry = entry_of(ctx, *weight);
    const std::int64_t K = weight->a->num_inputs();
    if (K % 64 == 0 && properties_of(ctx).major == 9) memory.a_map = rows_map(memory.entry.a, weight->num_ranks(), K, K, kLoraMapRows, 1);
  }
  std::memcpy(entry.data(), &memory, sizeof memory);
  return true;
}

void add_lora_indexed(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LoraIndex& index) {
  TileArgs args = tile_args(y_TN, x_TK, index);
  launch_tiles(ctx, args, index.tiles.shape.num_rows(), index.max_rank);
}

bool linear_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& weight, const LoraIndex& index) {
  auto* x_is_there = index.signal.as<std::int32_t>();
  if (weight.rounds_inputs()) return false;
  if (x_is_there == nullptr || !run_few_rows(ctx, linear_product(dense(ctx, weight), y_TN, x_TK), {.rows_are_there = x_is_there}))
    return false;
  TileArgs args = tile_args(y_TN, x_TK, index);
  args.x_is_there = x_is_there;
  launch_tiles(ctx, args, index.tiles.shape.num_rows(), index.max_rank);
  return true;
}

void add_bf16_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, std::span<const LoraRows> groups) {
  const std::int64_t T = x_TK.shape.num_rows();
  std::vector<std::int32_t> tiles;
  std::vector<std::byte> entries;
  std::int64_t max_rank = 1;
  for (const LoraRows& group : groups) {
    const std::int64_t count = group.count(T);
    if (count == 0) continue;
    if (group.lie_together()) {
      add_to_all(ctx, y_TN.rows(group.first(), count), x_TK.rows(group.first(), count), *group.weight);
      continue;
    }
    const std::size_t at = entries.size();
    entries.resize(at + kLoraEntryBytes);
    const LoraEntry e = entry_of(ctx, *group.weight);
    std::memcpy(entries.data() + at, &e, sizeof e);
    max_rank = std::max(max_rank, max_rank_of(*group.weight));
    append_lora_tiles(tiles, static_cast<std::int32_t>(at / kLoraEntryBytes), group.rows);
  }
  if (tiles.empty()) return;
  TileArgs args = tile_args(y_TN, x_TK);
  args.entries = reinterpret_cast<const char*>(staged(ctx, std::span<const std::byte>(entries)));
  args.entry_stride = kLoraEntryBytes;
  args.tiles = staged(ctx, std::span<const std::int32_t>(tiles));
  launch_tiles(ctx, args, static_cast<std::int64_t>(tiles.size()) / kLoraTileWords, max_rank);
}

void bf16_lora_backward(OpContext& ctx, TensorView dx_TK, TensorView da_RK, std::span<const TensorView> db, ConstTensorView dy_TN,
                        ConstTensorView x_TK, const LoraWeight& w, bool accumulate_dx, bool accumulate) {
  const std::int64_t T = x_TK.shape.num_rows(), K = x_TK.shape.num_cols(), R = w.num_ranks(), chunks = ceil_div(T, kChunkTokens);
  std::int64_t largest = R * K;
  for (const LoraPart& part : w.parts) largest = std::max(largest, part.num_outputs * part.rank);
  const std::int64_t h_stride = round_up(R, 8);
  Bf16 *h = nullptr, *dh = nullptr, *transposed = nullptr;
  float* partial = nullptr;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    h = carver.take<Bf16>(T * h_stride);
    dh = carver.take<Bf16>(T * h_stride);
    transposed = carver.take<Bf16>(largest);
    partial = carver.take<float>(chunks * largest);
    return carver.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  const auto columns = [&](Bf16* data, const LoraPart& part) {
    return ConstTensorView(TensorView{data + part.first_rank, Shape{T, part.rank}, DType::kBF16, dy_TN.device, h_stride});
  };
  const Bf16* a = dense(ctx, *w.a).w_NK.as<Bf16>();
  for (std::size_t i = 0; i < w.parts.size(); ++i) {
    const LoraPart& part = w.parts[i];
    const ConstTensorView dy = dy_TN.columns(part.first_output, part.num_outputs);
    run_shrink(ctx, h + part.first_rank, h_stride, x_TK, a + part.first_rank * K, part.rank, part.scale);
    run_gradient(ctx, db[i], columns(h, part), dy, /*is_transposed=*/true, accumulate, partial);
    run_transpose(ctx, transposed, dense(ctx, *part.b).w_NK.as<Bf16>(), part.num_outputs, part.rank);
    run_shrink(ctx, dh + part.first_rank, h_stride, dy, transposed, part.rank, part.scale);
  }
  const ConstTensorView all(TensorView{dh, Shape{T, R}, DType::kBF16, dy_TN.device, h_stride});
  run_gradient(ctx, da_RK, all, x_TK, /*is_transposed=*/false, accumulate, partial);
  if (dx_TK.data == nullptr) return;
  run_transpose(ctx, transposed, a, R, K);
  run_expand(ctx, dx_TK, dh, h_stride, transposed, R, 1.0f, accumulate_dx);
}

namespace {

/// Adapters of groups, all alike.
struct AdapterGroups {
  std::span<const LoraWeight* const> adapters;
  std::span<const std::int32_t> begin;
  const LoraWeight& first() const { return *adapters[0]; }
  std::int64_t count() const { return static_cast<std::int64_t>(adapters.size()); }
};

bool are_alike(const OpContext& ctx, const AdapterGroups& groups, DType dtype) {
  constexpr std::int64_t kMostGroups = 65535;
  if (groups.adapters.empty() || groups.count() > kMostGroups) return false;
  const auto is_same_part = [](const LoraPart& a, const LoraPart& b) {
    return a.first_output == b.first_output && a.num_outputs == b.num_outputs && a.first_rank == b.first_rank && a.rank == b.rank &&
           a.scale == b.scale;
  };
  return std::ranges::all_of(groups.adapters, [&](const LoraWeight* w) {
    return w != nullptr && is_bf16_lora(ctx, *w, dtype) && std::ranges::equal(w->parts, groups.first().parts, is_same_part);
  });
}

/// One value for each group, in device memory.
template <typename Of>
auto of_groups(const OpContext& ctx, const AdapterGroups& groups, const Of& of) {
  std::vector<decltype(of(std::size_t{0}))> all;
  for (std::size_t g = 0; g < groups.adapters.size(); ++g) all.push_back(of(g));
  return staged(ctx, std::span<const decltype(of(std::size_t{0}))>(all));
}

std::vector<RowTile> tiles_of_rows(const AdapterGroups& groups) {
  std::vector<RowTile> tiles;
  for (std::size_t g = 0; g < groups.adapters.size(); ++g)
    for (std::int32_t row = groups.begin[g]; row < groups.begin[g + 1]; row += kManyRows)
      tiles.push_back({static_cast<std::int32_t>(g), row, std::min<std::int32_t>(kManyRows, groups.begin[g + 1] - row), 0});
  return tiles;
}

/// The steps of a backward pass over all groups.
class GroupedBackward {
 public:
  GroupedBackward(OpContext& ctx, const AdapterGroups& groups)
      : ctx_(ctx), groups_(groups), num_groups_(static_cast<unsigned>(groups.count())) {
    const std::vector<RowTile> tiles = tiles_of_rows(groups);
    tiles_ = staged(ctx, std::span<const RowTile>(tiles));
    num_tiles_ = static_cast<std::int64_t>(tiles.size());
    begin_ = staged(ctx, groups.begin);
  }

  /// h = round(scale * x matrix^T).
  void shrink(Bf16* h, std::int64_t h_stride, ConstTensorView x, const Bf16* const* matrices, std::int64_t num_ranks, float scale) const {
    if (num_tiles_ > 0) run_shrink(ctx_, h, h_stride, x, nullptr, num_ranks, scale, {{tiles_, matrices}, num_tiles_});
  }
  /// out (+)= h matrix^T.
  void expand(TensorView out, const Bf16* h, std::int64_t h_stride, const Bf16* const* matrices, std::int64_t num_ranks,
              bool accumulate) const {
    if (num_tiles_ > 0) run_expand(ctx_, out, h, h_stride, nullptr, num_ranks, 1.0f, accumulate, {{tiles_, matrices}, num_tiles_});
  }
  /// outs (+)= narrow^T wide of each group's rows.
  void gradient(float* const* outs, ConstTensorView narrow, ConstTensorView wide, bool is_transposed, bool accumulate) const {
    const GradientArgs args = gradient_args(narrow, wide, is_transposed, nullptr);
    with_gradient_blocks(args, num_groups_, [&]<int kM>(const dim3& grid) {
      grouped_gradient_kernel<kM><<<grid, kGradientThreads, 0, stream_of(ctx_)>>>(args, outs, begin_, accumulate);
    });
  }
  /// Those of each group into `memory`, one behind another; where they lie.
  const Bf16* const* transpose(Bf16* memory, const Bf16* const* matrices, std::int64_t rows, std::int64_t columns) const {
    const dim3 grid(static_cast<unsigned>(ceil_div(columns, 32)), static_cast<unsigned>(ceil_div(rows, 32)), num_groups_);
    transpose_kernel<<<grid, kThreads, 0, stream_of(ctx_)>>>(memory, nullptr, matrices, static_cast<int>(rows), static_cast<int>(columns));
    PRL_CUDA_CHECK(cudaGetLastError());
    return of_groups(ctx_, groups_, [&](std::size_t g) -> const Bf16* { return memory + static_cast<std::int64_t>(g) * rows * columns; });
  }

 private:
  OpContext& ctx_;
  const AdapterGroups groups_;
  unsigned num_groups_;
  std::int64_t num_tiles_ = 0;
  const RowTile* tiles_ = nullptr;
  const std::int32_t* begin_ = nullptr;
};

}  // namespace

bool add_grouped_lora(OpContext& ctx, TensorView y_RN, ConstTensorView x_RK, std::span<const LoraWeight* const> adapters,
                      std::span<const std::int32_t> begin) {
  const AdapterGroups groups{adapters, begin};
  if (!are_alike(ctx, groups, x_RK.dtype)) return false;
  std::vector<std::byte> entries(adapters.size() * kLoraEntryBytes);
  std::vector<std::int32_t> tiles;
  for (std::size_t g = 0; g < adapters.size(); ++g) {
    const LoraEntry e = entry_of(ctx, *adapters[g]);
    std::memcpy(entries.data() + g * kLoraEntryBytes, &e, sizeof e);
    for (std::int32_t row = begin[g]; row < begin[g + 1]; row += static_cast<std::int32_t>(kLoraTileRows)) {
      tiles.push_back(static_cast<std::int32_t>(g));
      for (std::int32_t i = 0; i < kLoraTileRows; ++i) tiles.push_back(row + i < begin[g + 1] ? row + i : -1);
    }
  }
  if (tiles.empty()) return true;
  if (static_cast<std::int64_t>(tiles.size()) / kLoraTileWords > kMaxGrid) return false;
  TileArgs args = tile_args(y_RN, x_RK);
  args.entries = reinterpret_cast<const char*>(staged(ctx, std::span<const std::byte>(entries)));
  args.entry_stride = kLoraEntryBytes;
  args.tiles = staged(ctx, std::span<const std::int32_t>(tiles));
  launch_tiles(ctx, args, static_cast<std::int64_t>(tiles.size()) / kLoraTileWords, max_rank_of(groups.first()));
  return true;
}

bool grouped_lora_backward(OpContext& ctx, TensorView dx_RK, std::span<const TensorView> da, std::span<const TensorView> db,
                           ConstTensorView dy_RN, ConstTensorView x_RK, std::span<const LoraWeight* const> adapters,
                           std::span<const std::int32_t> begin, bool accumulate_dx, bool accumulate) {
  const AdapterGroups groups{adapters, begin};
  if (!are_alike(ctx, groups, x_RK.dtype)) return false;
  const LoraWeight& w = groups.first();
  const std::size_t num_parts = w.parts.size();
  const std::int64_t rows = x_RK.shape.num_rows(), K = x_RK.shape.num_cols(), R = w.num_ranks(), h_stride = round_up(R, 8);
  std::int64_t largest = R * K;
  for (const LoraPart& part : w.parts) largest = std::max(largest, part.num_outputs * part.rank);
  Bf16 *h = nullptr, *dh = nullptr, *transposed = nullptr;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    h = carver.take<Bf16>(rows * h_stride);
    dh = carver.take<Bf16>(rows * h_stride);
    transposed = carver.take<Bf16>(groups.count() * largest);
    return carver.used();
  };
  (void)carve(ctx.workspace->require(carve(nullptr)));
  const auto columns = [&](Bf16* data, std::int64_t first, std::int64_t count) {
    return ConstTensorView(TensorView{data + first, Shape{rows, count}, DType::kBF16, dy_RN.device, h_stride});
  };
  const auto a_of = [&](std::int64_t first_rank) {
    return of_groups(ctx, groups,
                     [&](std::size_t g) -> const Bf16* { return dense(ctx, *adapters[g]->a).w_NK.as<Bf16>() + first_rank * K; });
  };
  const GroupedBackward run(ctx, groups);
  for (std::size_t p = 0; p < num_parts; ++p) {
    const LoraPart& part = w.parts[p];
    const ConstTensorView dy = dy_RN.columns(part.first_output, part.num_outputs);
    run.shrink(h + part.first_rank, h_stride, x_RK, a_of(part.first_rank), part.rank, part.scale);
    run.gradient(of_groups(ctx, groups, [&](std::size_t g) { return db[g * num_parts + p].as<float>(); }),
                 columns(h, part.first_rank, part.rank), dy, /*is_transposed=*/true, accumulate);
    const Bf16* const* b =
        of_groups(ctx, groups, [&](std::size_t g) -> const Bf16* { return dense(ctx, *adapters[g]->parts[p].b).w_NK.as<Bf16>(); });
    run.shrink(dh + part.first_rank, h_stride, dy, run.transpose(transposed, b, part.num_outputs, part.rank), part.rank, part.scale);
  }
  run.gradient(of_groups(ctx, groups, [&](std::size_t g) { return da[g].as<float>(); }), columns(dh, 0, R), x_RK, /*is_transposed=*/false,
               accumulate);
  if (dx_RK.data == nullptr) return true;
  run.expand(dx_RK, dh, h_stride, run.transpose(transposed, a_of(0), R, K), R, accumulate_dx);
  return true;
}

}  // namespace prl::ops::cuda
