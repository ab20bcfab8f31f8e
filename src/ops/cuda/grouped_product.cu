#include <algorithm>

#include "base/error.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/device.cuh"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/input_codes.hpp"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/tensor_map.hpp"
#include "ops/experts.hpp"

// Products of groups of neighbouring rows, each with a matrix of its own (grouped GEMM), in bf16, or of codes of 8 bits, for compute
// capability 9.0. Blocks stay and take tile after tile of 128 x 256; one warp copies operands ahead, over the ends of tiles, and two
// warpgroups multiply. The sum of an element is formed in steps of 16 in order, as the library's kernels without split-K do: a forward
// product has their bits. Of codes too: of each 128 inputs, and those sums in fp32 (Product::a_factors).

namespace prl::ops::cuda {
namespace {

/// Which product, and what a group's rows are in it.
enum class Grouped {
  kForward,  ///< out = x W^T: rows of out and of the left factor
  kCodes,    ///< the same of codes, which are copied two by two as numbers of 16 bits
  kInput,    ///< out = dy W: the same
  kWeight,   ///< out = dy^T x: what the sum runs over
};

constexpr int kTileRows = 128, kTileColumns = 256;
constexpr int kDepth = 64;  ///< of a step: a row of 128 bytes in shared memory, which are 128 codes
constexpr int kSlots = 4;
constexpr int kLeftBytes = kTileRows * kDepth * 2, kSlotBytes = kLeftBytes + kTileColumns * kDepth * 2;
constexpr int kGroupThreads = 128, kGroups = kTileRows / 64, kMultiplying = kGroups * kGroupThreads,
              kThreads = kMultiplying + kGroupThreads;
constexpr int kPassColumns = 64;  ///< of results that are put into rows at a time
constexpr int kStagedBytes = kTileRows * kPassColumns * 2;

struct GroupedArgs {
  CUtensorMap left, right;
  void* out;
  const std::int32_t* begin;  ///< [num_groups + 1]
  std::int64_t out_stride;
  std::int64_t out_apart;  ///< kWeight: elements from one group's matrix to the next
  int num_groups;
  int num_matrices, rows_apart;  ///< of `right`, which groups take in turn, and from one to the next; not of kWeight
  int rows, columns, depth;      ///< of out and of the sum; what a group's rows are is not used
  bool accumulate;               ///< kWeight
  // Of kCodes: those of rows, and of the rows of all matrices, which lie one behind another.
  const float *row_factors, *column_factors;
};

struct SharedMemory {
  alignas(1024) unsigned char slots[kSlots][kSlotBytes];
  alignas(128) unsigned char staged[kStagedBytes];
  std::uint64_t full[kSlots], empty[kSlots];
  std::int32_t begin[kMaxExperts + 1];
  std::int32_t tiles_end[kMaxExperts];  ///< tiles of this group and those before it; not of kWeight
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

#if PRL_HOPPER

using namespace hopper;

/// Where the groups and their tiles lie. By all threads of the block.
template <Grouped kKind>
__device__ __forceinline__ void read_groups(const GroupedArgs& a, SharedMemory& s) {
  for (int g = static_cast<int>(threadIdx.x); g <= a.num_groups; g += kThreads) s.begin[g] = a.begin[g];
  __syncthreads();
  if constexpr (kKind != Grouped::kWeight) {
    if (threadIdx.x < kWarp) {
      const int lane = static_cast<int>(threadIdx.x), each = (a.columns + kTileColumns - 1) / kTileColumns;
      int before = 0;
      for (int first = 0; first < a.num_groups; first += kWarp) {
        const int g = first + lane;
        int tiles = g < a.num_groups ? (s.begin[g + 1] - s.begin[g] + kTileRows - 1) / kTileRows * each : 0;
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
          const int other = __shfl_up_sync(kFullWarp, tiles, step);
          if (lane >= step) tiles += other;
        }
        if (g < a.num_groups) s.tiles_end[g] = before + tiles;
        before += __shfl_sync(kFullWarp, tiles, kWarp - 1);
      }
    }
    __syncthreads();
  }
}

/// A tile of a group: rows from `row` on, of out and of the left factor or (kWeight) of the group's matrix.
struct TilePlace {
  int group = 0, row, end_row, column, num_steps;
};
/// Whether there is a tile of this number. `p` is where an earlier one lay, or fresh. Those that are neighbours share columns: blocks that
/// run at a time find one matrix, and few rows, in the second-level cache.
template <Grouped kKind>
__device__ __forceinline__ bool find_tile(const GroupedArgs& a, const SharedMemory& s, int tile, TilePlace& p) {
  int first_tile = 0, first_row = 0;
  if constexpr (kKind == Grouped::kWeight) {
    const int each = (a.rows + kTileRows - 1) / kTileRows * ((a.columns + kTileColumns - 1) / kTileColumns);
    p.group = tile / each;
    if (p.group >= a.num_groups) return false;
    first_tile = p.group * each;
    p.end_row = a.rows;
    p.num_steps = (s.begin[p.group + 1] - s.begin[p.group] + kDepth - 1) / kDepth;
  } else {
    while (p.group < a.num_groups && tile >= s.tiles_end[p.group]) ++p.group;
    if (p.group == a.num_groups) return false;
    if (p.group > 0) first_tile = s.tiles_end[p.group - 1];
    first_row = s.begin[p.group];
    p.end_row = s.begin[p.group + 1];
    p.num_steps = (a.depth + kDepth - 1) / kDepth;
  }
  const int row_tiles = (p.end_row - first_row + kTileRows - 1) / kTileRows, within = tile - first_tile;
  p.row = first_row + within % row_tiles * kTileRows;
  p.column = within / row_tiles * kTileColumns;
  return true;
}

/// By one thread.
template <Grouped kKind>
__device__ __forceinline__ void copy_tiles(const GroupedArgs& a, SharedMemory& s) {
  RingPlace<kSlots> at;
  TilePlace p;
  for (int tile = static_cast<int>(blockIdx.x); find_tile<kKind>(a, s, tile, p); tile += static_cast<int>(gridDim.x)) {
    for (int step = 0; step < p.num_steps; ++step) {
      barrier_wait(s.empty + at.slot, at.phase ^ 1);
      barrier_arrive_expect(s.full + at.slot, kSlotBytes);
      unsigned char *left = s.slots[at.slot], *right = left + kLeftBytes;
      if constexpr (kKind == Grouped::kWeight) {
        const int row = s.begin[p.group] + step * kDepth;
        copy_box(left, &a.left, s.full + at.slot, 0, row, p.row / kDepth);
        copy_box(right, &a.right, s.full + at.slot, 0, row, p.column / kDepth);
      } else {
        const int matrix_row = p.group % a.num_matrices * a.rows_apart;
        if constexpr (kKind == Grouped::kCodes) {
          copy_box(left, &a.left, s.full + at.slot, step * kDepth, p.row, 0);
          copy_box(right, &a.right, s.full + at.slot, step * kDepth, matrix_row + p.column, 0);
        } else {
          copy_box(left, &a.left, s.full + at.slot, 0, p.row, step);
          if constexpr (kKind == Grouped::kForward)
            copy_box(right, &a.right, s.full + at.slot, 0, matrix_row + p.column, step);
          else
            copy_box(right, &a.right, s.full + at.slot, 0, matrix_row + step * kDepth, p.column / kDepth);
        }
      }
      at.advance();
    }
  }
}

/// Rows of another group, which the last copy of a group's has brought too, count for nothing.
__device__ __forceinline__ void clear_rows(unsigned char* block, int first, int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  for (int i = first * 8 + thread; i < kDepth * 8; i += kGroupThreads) reinterpret_cast<uint4*>(block)[i] = uint4{};
  async_fence();
  named_sync<kGroupThreads>(1 + warpgroup);
}

/// Stores 16 rows of a warp, 64 columns at a time, so that rows go out whole.
__device__ __forceinline__ void store_rows(const GroupedArgs& a, SharedMemory& s, const TilePlace& p, const float (&d)[128], int row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  unsigned char* const staged = s.staged + warp * (16 * kPassColumns * 2);
  // Of a matrix of 8 x 8 a lane names a row: those of the first and the last eight rows take turns, then those of the next columns.
  const int matrix_row = lane % 8 + lane / 8 % 2 * 8, matrix_piece = lane / 16;
#pragma unroll
  for (int pass = 0; pass < kTileColumns / kPassColumns; ++pass) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPassColumns / 8; j += 2) {
      const float* v = d + (pass * (kPassColumns / 8) + j) * 4;
      store_matrices(shared_address(staged + matrix_row * 128 + ((j + matrix_piece) ^ matrix_row % 8) * 16), pack_bf16(v[0], v[1]),
                     pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
    __syncwarp();
    const int column = p.column + pass * kPassColumns + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / 8;
      if (row + r < p.end_row && column < a.columns)
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + (row + r) * a.out_stride + column) =
            *reinterpret_cast<const uint4*>(staged + r * 128 + (lane % 8 ^ r % 8) * 16);
    }
  }
}
/// The same of a gradient, 32 columns at a time.
__device__ __forceinline__ void store_gradient(const GroupedArgs& a, SharedMemory& s, const TilePlace& p, const float (&d)[128], int row) {
  constexpr int kColumns = 32, kRowPieces = kColumns / 4;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  unsigned char* const staged = s.staged + warp * (16 * kColumns * 4);
  const auto piece_at = [&](int r, int piece) { return staged + (r * kRowPieces + (piece ^ r % 8)) * 16; };
  float* const out = static_cast<float*>(a.out) + p.group * a.out_apart;
#pragma unroll
  for (int pass = 0; pass < kTileColumns / kColumns; ++pass) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int from = (pass * (kColumns / 8) + j) * 4 + 2 * half;
        *reinterpret_cast<float2*>(piece_at(lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8) = {d[from], d[from + 1]};
      }
    }
    __syncwarp();
    const int column = p.column + pass * kColumns + lane % kRowPieces * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / kRowPieces;
      if (row + r >= p.end_row || column >= a.columns) continue;
      auto* const to = reinterpret_cast<float4*>(out + (row + r) * a.out_stride + column);
      float4 v = *reinterpret_cast<const float4*>(piece_at(r, lane % kRowPieces));
      if (a.accumulate) {
        const float4 old = *to;
        v = {v.x + old.x, v.y + old.y, v.z + old.z, v.w + old.w};
      }
      *to = v;
    }
  }
}

/// Adds what a step's codes give to the sum: half of the columns at a time, so that registers hold what is being formed beside it.
__device__ __forceinline__ void add_codes(float (&d)[128], std::uint64_t left, std::uint64_t right) {
  constexpr std::uint32_t kHalfColumns = kTileColumns / 2 * 128 / 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float part[64];
    pin(part);
    products_begin();
#pragma unroll
    for (int k = 0; k < 128 / 32; ++k) {
      const auto at = static_cast<std::uint32_t>(2 * k);
      product_of_codes(part, left + at, right + static_cast<std::uint32_t>(half) * kHalfColumns + at, k);
    }
    products_commit();
    products_wait<0>();
    pin(part);
#pragma unroll
    for (int i = 0; i < 64; ++i) d[64 * half + i] += part[i];
  }
}
/// Multiplies a warp's 16 rows, from `row` on, with the factors of both sides.
__device__ __forceinline__ void apply_factors(const GroupedArgs& a, const TilePlace& p, float (&d)[128], int row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float of_rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + lane / 4 + 8 * half;
    of_rows[half] = r < p.end_row ? a.row_factors[r] : 0.0f;
  }
  const float* const factors = a.column_factors + static_cast<std::int64_t>(p.group % a.num_matrices) * a.rows_apart;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
    const int column = p.column + 8 * j + 2 * (lane % 4);
    const float2 of_columns = column < a.columns ? *reinterpret_cast<const float2*>(factors + column) : float2{};
#pragma unroll
    for (int i = 0; i < 4; ++i) d[4 * j + i] = d[4 * j + i] * (i % 2 == 0 ? of_columns.x : of_columns.y) * of_rows[i / 2];
  }
}

template <Grouped kKind>
__device__ __forceinline__ void multiply_tiles(const GroupedArgs& a, SharedMemory& s) {
  constexpr bool kIsWeight = kKind == Grouped::kWeight;
  constexpr bool kIsOfCodes = kKind == Grouped::kCodes;
  constexpr int kDown = kKind == Grouped::kForward || kIsOfCodes ? 0 : 1, kLeftDown = kIsWeight ? 1 : 0;
  constexpr int kBlockBytes = kDepth * kDepth * 2;  ///< [64][64]
  const int warpgroup = static_cast<int>(threadIdx.x) / kGroupThreads, row_of_warp = static_cast<int>(threadIdx.x) / kWarp * 16;
  const std::uint32_t both = same_in_warp(shared_address(s.slots) + (static_cast<std::uint32_t>(warpgroup) << 20));
  const std::uint32_t begin = both & 0xfffff, left_begin = begin + (both >> 20) * (64 * 128);
  RingPlace<kSlots> at;
  TilePlace p;
  for (int tile = static_cast<int>(blockIdx.x); find_tile<kKind>(a, s, tile, p); tile += static_cast<int>(gridDim.x)) {
    const bool has_rows = p.row + warpgroup * 64 < p.end_row;
    float d[128];
#pragma unroll
    for (float& v : d) v = 0.0f;
    pin(d);
    int last = 0;
    for (int step = 0; step < p.num_steps; ++step) {
      barrier_wait(s.full + at.slot, at.phase);
      if constexpr (kIsWeight) {
        const int rest = s.begin[p.group + 1] - s.begin[p.group] - step * kDepth;
        if (rest < kDepth && has_rows) clear_rows(s.slots[at.slot] + warpgroup * kBlockBytes, rest, warpgroup);
      }
      if (has_rows) {
        const std::uint32_t slot = static_cast<std::uint32_t>(at.slot) * kSlotBytes;
        const std::uint64_t left = kIsWeight ? down_rows(left_begin + slot, kBlockBytes) : along_rows(left_begin + slot);
        const std::uint64_t right = kDown ? down_rows(begin + slot + kLeftBytes, kBlockBytes) : along_rows(begin + slot + kLeftBytes);
        if constexpr (kIsOfCodes) {
          add_codes(d, left, right);
        } else {
          products_begin();
#pragma unroll
          for (int k = 0; k < kDepth / 16; ++k)
            product<kDown, kLeftDown>(d, left + static_cast<std::uint32_t>(k * (kLeftDown ? 128 : 2)),
                                      right + static_cast<std::uint32_t>(k * (kDown ? 128 : 2)), 1);
          products_commit();
        }
      }
      // The slot before this one is free once its products have been formed.
      if (step > 0) {
        products_wait<1>();
        arrive_once_per_warp(s.empty + last);
      }
      last = at.slot;
      at.advance();
    }
    products_wait<0>();
    pin(d);
    if (p.num_steps > 0) arrive_once_per_warp(s.empty + last);
    if constexpr (kIsOfCodes) apply_factors(a, p, d, p.row + row_of_warp);
    if constexpr (kIsWeight)
      store_gradient(a, s, p, d, p.row + row_of_warp);
    else
      store_rows(a, s, p, d, p.row + row_of_warp);
  }
}

#endif  // PRL_HOPPER

template <Grouped kKind>
__global__ void __launch_bounds__(kThreads, 1) grouped_kernel(const __grid_constant__ GroupedArgs a) {
#if PRL_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& s = *reinterpret_cast<SharedMemory*>(shared);
  if (threadIdx.x == kMultiplying) {
    if (shared_address(shared) % 1024 != 0) __trap();
    prefetch_map(&a.left);
    prefetch_map(&a.right);
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(s.full + i, 1);
      barrier_init(s.empty + i, kMultiplying / kWarp);
    }
    barrier_init_fence();
  }
  read_groups<kKind>(a, s);  // has barriers for the block
  if (threadIdx.x >= kMultiplying) {
    registers_down<40>();
    if (threadIdx.x == kMultiplying) copy_tiles<kKind>(a, s);
  } else {
    registers_up<232>();
    multiply_tiles<kKind>(a, s);
  }
#endif
}

template <Grouped kKind>
void launch(const OpContext& ctx, const GroupedArgs& a, std::int64_t most_tiles) {
  PRL_CUDA_CHECK(
      cudaFuncSetAttribute(grouped_kernel<kKind>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(SharedMemory))));
  const std::int64_t blocks = std::min<std::int64_t>(most_tiles, num_multiprocessors(ctx));
  grouped_kernel<kKind><<<static_cast<unsigned>(blocks), kThreads, sizeof(SharedMemory), stream_of(ctx)>>>(a);
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// Whether rows can be copied in boxes and stored in pieces of 16 bytes.
bool is_boxed(const ConstTensorView& rows) { return rows.dtype == DType::kBF16 && is_wide(rows) && rows.shape.num_cols() % kDepth == 0; }

/// Matrices that groups of so many rows can be multiplied with, whose values those products read.
struct GroupedValues {
  const DenseWeight* first = nullptr;
  const void* data = nullptr;  ///< or null: they are to be widened from `codes`
  std::int64_t rows_apart = 0;
  ProductCodes codes;
};
std::optional<GroupedValues> grouped(const OpContext& ctx, std::span<const LinearWeight* const> weights, std::int64_t rows) {
  if (properties_of(ctx).major != 9 || static_cast<std::int64_t>(weights.size()) > kMaxExperts) return std::nullopt;
  const DenseWeight& first = dense(ctx, *weights[0]);
  GroupedValues found{.first = &first, .rows_apart = first.num_outputs()};
  if (first.has_values()) {
    const std::optional<Stacked> w = stacked(ctx, weights);
    if (!w) return std::nullopt;
    found.data = first.w_NK.data();
    found.rows_apart = w->rows_apart;
  } else {
    const std::optional<ProductCodes> codes = stacked_codes(ctx, weights);
    if (!codes) return std::nullopt;
    found.codes = *codes;
  }
  if (first.dtype() != DType::kBF16) return std::nullopt;
  Product p = forward_product(first, nullptr, first.num_inputs(), rows, 0, first.num_outputs());
  p.out_dtype = DType::kBF16;
  return has_librarys_bits(ctx, p) ? std::optional(found) : std::nullopt;
}

/// out = left W^T or left W, whose rows are those of groups.
template <Grouped kKind>
bool multiply_rows(OpContext& ctx, TensorView out, ConstTensorView left, std::span<const LinearWeight* const> weights,
                   ConstTensorView begin_P) {
  const std::int64_t rows = left.shape.num_rows(), groups = begin_P.shape.num_elements() - 1;
  const auto matrices = static_cast<std::int64_t>(weights.size());
  if (!is_boxed(out) || !is_boxed(left) || groups > kMaxExperts) return false;
  std::optional<GroupedValues> w = grouped(ctx, weights, rows);
  if (!w) return false;
  const std::int64_t N = w->first->num_outputs(), K = w->first->num_inputs();
  if (w->data == nullptr) {
    void* const values = ctx.workspace->require(static_cast<std::size_t>(matrices * N * K) * sizeof(std::uint16_t));
    widen_codes(ctx, values, w->codes, matrices * N, K);
    w->data = values;
  }
  GroupedArgs a{};
  a.left = rows_map(left.data, rows, left.shape.num_cols(), left.row_stride, kTileRows, 1);
  const std::int64_t all_rows = N + (matrices - 1) * w->rows_apart;
  a.right = kKind == Grouped::kForward ? rows_map(w->data, all_rows, K, K, kTileColumns, 1)
                                       : rows_map(w->data, all_rows, K, K, kDepth, kTileColumns / kDepth);
  a.out = out.data;
  a.begin = begin_P.as<std::int32_t>();
  a.out_stride = out.row_stride;
  a.num_groups = static_cast<int>(groups);
  a.num_matrices = static_cast<int>(matrices);
  a.rows_apart = static_cast<int>(w->rows_apart);
  a.columns = static_cast<int>(out.shape.num_cols());
  a.depth = static_cast<int>(left.shape.num_cols());
  const std::int64_t row_tiles = std::min(rows, groups) + rows / kTileRows;
  launch<kKind>(ctx, a, row_tiles * ceil_div(a.columns, kTileColumns));
  return true;
}

}  // namespace

bool can_group(const OpContext& ctx, std::span<const LinearWeight* const> weights, std::int64_t num_rows) {
  if (weights[0]->rounds_inputs()) return weights[0]->num_outputs() % kDepth == 0 && stacked_codes(ctx, weights).has_value();
  const std::optional<GroupedValues> w = grouped(ctx, weights, num_rows);
  return w && w->first->num_outputs() % kDepth == 0 && w->first->num_inputs() % kDepth == 0;
}

bool grouped_codes(OpContext& ctx, TensorView out, const InputCodes& left, std::span<const LinearWeight* const> weights,
                   ConstTensorView begin_P) {
  const std::int64_t rows = out.shape.num_rows(), groups = begin_P.shape.num_elements() - 1;
  const auto matrices = static_cast<std::int64_t>(weights.size());
  const std::int64_t N = weights[0]->num_outputs(), K = weights[0]->num_inputs();
  const std::optional<ProductCodes> codes = stacked_codes(ctx, weights);
  if (!codes || !is_boxed(out) || groups > kMaxExperts || matrices > kMaxExperts) return false;
  GroupedArgs a{};
  a.left = whole_rows_map(left.codes, rows, K / 2, left.stride / 2, kTileRows);
  a.right = whole_rows_map(codes->codes, matrices * N, K / 2, K / 2, kTileColumns);
  a.row_factors = left.factors;
  a.column_factors = codes->factors;
  a.out = out.data;
  a.begin = begin_P.as<std::int32_t>();
  a.out_stride = out.row_stride;
  a.num_groups = static_cast<int>(groups);
  a.num_matrices = static_cast<int>(matrices);
  a.rows_apart = static_cast<int>(N);
  a.columns = static_cast<int>(N);
  a.depth = static_cast<int>(K / 2);
  launch<Grouped::kCodes>(ctx, a, (std::min(rows, groups) + rows / kTileRows) * ceil_div(N, kTileColumns));
  return true;
}

bool grouped_linear(OpContext& ctx, TensorView y_RN, ConstTensorView x_RK, std::span<const LinearWeight* const> weights,
                    ConstTensorView begin_P) {
  if (weights[0]->rounds_inputs()) {
    if (!can_group(ctx, weights, x_RK.shape.num_rows())) return false;
    InputCodes codes;
    const auto carve = [&](void* memory) {
      Carver c(memory);
      codes = take_codes(c, x_RK.shape.num_rows(), x_RK.shape.num_cols());
      return c.used();
    };
    (void)carve(ctx.workspace->require(carve(nullptr)));
    inputs_to_codes(ctx, codes, x_RK);
    return grouped_codes(ctx, y_RN, codes, weights, begin_P);
  }
  return multiply_rows<Grouped::kForward>(ctx, y_RN, x_RK, weights, begin_P);
}

bool grouped_linear_backward_input(OpContext& ctx, TensorView dx_RK, ConstTensorView dy_RN, std::span<const LinearWeight* const> weights,
                                   ConstTensorView begin_P) {
  return multiply_rows<Grouped::kInput>(ctx, dx_RK, dy_RN, weights, begin_P);
}

bool grouped_linear_backward_weight(OpContext& ctx, std::span<const TensorView> dw, ConstTensorView dy_RN, ConstTensorView x_RK,
                                    ConstTensorView begin_P, bool accumulate) {
  const std::int64_t rows = x_RK.shape.num_rows(), N = dy_RN.shape.num_cols(), K = x_RK.shape.num_cols();
  const auto groups = static_cast<std::int64_t>(dw.size());
  if (properties_of(ctx).major != 9 || !is_boxed(dy_RN) || !is_boxed(x_RK) || groups > kMaxExperts || rows == 0) return false;
  const std::int64_t apart = groups > 1 ? dw[1].as<float>() - dw[0].as<float>() : N * K;
  for (std::size_t g = 0; g < dw.size(); ++g)
    if (dw[g].data == nullptr || dw[g].as<float>() != dw[0].as<float>() + static_cast<std::int64_t>(g) * apart) return false;
  if (!is_aligned(dw[0].data, 16) || apart % 4 != 0) return false;
  GroupedArgs a{};
  a.left = rows_map(dy_RN.data, rows, N, dy_RN.row_stride, kDepth, kTileRows / kDepth);
  a.right = rows_map(x_RK.data, rows, K, x_RK.row_stride, kDepth, kTileColumns / kDepth);
  a.out = dw[0].data;
  a.begin = begin_P.as<std::int32_t>();
  a.out_stride = K;
  a.out_apart = apart;
  a.num_groups = static_cast<int>(groups);
  a.rows = static_cast<int>(N);
  a.columns = static_cast<int>(K);
  a.accumulate = accumulate;
  launch<Grouped::kWeight>(ctx, a, groups * ceil_div(N, kTileRows) * ceil_div(K, kTileColumns));
  return true;
}

}  // namespace prl::ops::cuda
