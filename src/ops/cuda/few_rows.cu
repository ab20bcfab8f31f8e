#include "ops/cuda/few_rows.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kBlock = 64;  ///< of K: a row of 128 bytes in shared memory
constexpr int kRowBytes = kBlock * 2;
constexpr int kGroup = 128, kCopying = 32;  ///< threads: of a warpgroup that computes, and of the warp that copies
constexpr int kSpanBytes = 64 * kRowBytes;  ///< a warpgroup product reads 64 rows on its left, whatever the tile has
/// Of a multiprocessor. Blocks of which each has one to itself take all; else two share it, and one computes while the other copies.
constexpr int kSharedBytes = 224 * 1024;
/// What a block of compute capability 9.0 may ask for.
constexpr int kMaxSharedBytes = 227 * 1024;

/// Warpgroups that compute a tile, which share its rows.
__host__ __device__ constexpr int groups_of(int rows) { return rows == 128 ? 2 : 1; }
__host__ __device__ constexpr int rows_of_group(int rows) { return rows / groups_of(rows); }
/// Blocks of K in a slot: one copy brings them.
__host__ __device__ constexpr int blocks_per_slot(int rows) { return rows <= 16 ? 4 : rows <= 64 ? 2 : 1; }

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
  bool is_wide;  ///< 8 columns of out, and of the residual, lie together in 16 aligned bytes
  float eps;
  int K;
};

#if PRL_HOPPER

using namespace hopper;

/// One thread copies: weights of the first slots before anything else, for no kernel of recorded work writes those.
template <int kRows, bool kNorm, bool kSwiglu>
__device__ void copy_tiles(const FewRowsArgs& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty) {
  constexpr int kBlocks = blocks_per_slot(kRows), kRowsBytes = kNorm ? 0 : kBlocks * kRows * kRowBytes;
  const int column = static_cast<int>(blockIdx.x) * a.columns, row = static_cast<int>(blockIdx.y) * kRows;
  const int weight_bytes = kBlocks * a.columns * kRowBytes;
  unsigned char* rows = shared + a.rows_at;
  const CachePolicy once = read_once();
  const auto copy_weights = [&](int slot, int step) {
    barrier_arrive_expect(full + slot, static_cast<std::uint32_t>(weight_bytes + kRowsBytes));
    unsigned char* to = shared + slot * weight_bytes;
    if constexpr (kSwiglu)
      copy_box(to, &a.weights, full + slot, once, 0, 0, 0, column / 16, step * kBlocks);
    else
      copy_box(to, &a.weights, full + slot, once, 0, column, step * kBlocks);
  };
  const auto copy_rows = [&](int slot, int step) {
    if constexpr (!kNorm) copy_box(rows + slot * kRowsBytes, &a.rows, full + slot, 0, row, step * kBlocks);
  };
  const int first = min(a.slots, a.num_steps);
  for (int s = 0; s < first; ++s) copy_weights(s, s);
  if constexpr (!kNorm) wait_for_previous();
  for (int s = 0; s < first; ++s) copy_rows(s, s);
  int slot = 0;
  std::uint32_t phase = 0;
  for (int step = first; step < a.num_steps; ++step) {
    barrier_wait(empty + slot, phase);
    copy_weights(slot, step);
    copy_rows(slot, step);
    if (++slot == a.slots) {
      slot = 0;
      phase ^= 1;
    }
  }
}

/// Where a lane's results lie. d[4 j + e] is column lane / 4 (+ 8 for e >= 2) of the warp's 16 columns of the left operand, row
/// 8 j + 2 (lane % 4) + e % 2. With SwiGLU the first 8 of them are gate, the others up, and make 8 columns of out.
template <int kRows, bool kSwiglu>
struct LanePlace {
  static constexpr int kHalves = kSwiglu ? 1 : 2;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, first = static_cast<int>(threadIdx.x) % kGroup / kWarp * 16;
  const bool is_odd = lane / 4 % 2 != 0;  ///< the lane stores pairs of the odd rows
  __device__ __forceinline__ bool has(const FewRowsArgs& a, int half) const { return first + 8 * half < a.columns; }
  __device__ __forceinline__ int column(const FewRowsArgs& a, int half) const {
    return (static_cast<int>(blockIdx.x) * a.columns + first) / (kSwiglu ? 2 : 1) + 8 * half + lane / 4;
  }
  __device__ __forceinline__ int row(int j) const {
    const int group = static_cast<int>(threadIdx.x) / kGroup;
    return static_cast<int>(blockIdx.y) * kRows + group * (rows_of_group(kRows)) + 8 * j + 2 * (lane % 4);
  }
};

__device__ __forceinline__ std::uint32_t sum_of_pairs(std::uint32_t x, std::uint32_t y) {
  const auto a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
  const auto b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&y));
  const __nv_bfloat162 sum = __floats2bfloat162_rn(a.x + b.x, a.y + b.y);
  return *reinterpret_cast<const std::uint32_t*>(&sum);
}

/// use(half, j, even, odd): a lane's results of one column and two rows, before they are rounded.
template <int kRows, typename T, bool kSwiglu, typename Use>
__device__ __forceinline__ void for_results(const FewRowsArgs& a, const float (&d)[rows_of_group(kRows) / 2], Use&& use) {
  const LanePlace<kRows, kSwiglu> place;
#pragma unroll
  for (int half = 0; half < place.kHalves; ++half) {
    if (!place.has(a, half)) return;
    const int n = place.column(a, half);
    const float bias = a.bias != nullptr && n < a.N ? a.bias[n] : 0.0f;
    const bool has_bias = a.bias != nullptr;
#pragma unroll
    for (int j = 0; j < rows_of_group(kRows) / 8; ++j) {
      float even = d[4 * j + 2 * half], odd = d[4 * j + 2 * half + 1];
      if constexpr (kSwiglu) {
        even = gated(rounded<T>(even), rounded<T>(d[4 * j + 2]));
        odd = gated(rounded<T>(odd), rounded<T>(d[4 * j + 3]));
      } else if (has_bias) {
        even += bias;
        odd += bias;
      }
      use(half, j, even, odd);
    }
  }
}

/// Stores results from where they are formed: for fp32, and for few rows, which shared memory would only delay.
template <int kRows, typename T, bool kSwiglu>
struct DirectStore {
  using Place = LanePlace<kRows, kSwiglu>;
  std::uint32_t residual[2][rows_of_group(kRows) / 8];  ///< of the pairs that this lane stores

  __device__ __forceinline__ void load_residual(const FewRowsArgs& a) {
    const Place place;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < rows_of_group(kRows) / 8; ++j) {
        const int row = place.row(j) + (place.is_odd ? 1 : 0), column = place.column(a, half) - (place.is_odd ? 1 : 0);
        residual[half][j] = place.has(a, half) && column < a.N && row < a.M
                                ? *reinterpret_cast<const std::uint32_t*>(a.residual + row * a.residual_stride + column)
                                : 0;
      }
  }
  __device__ __forceinline__ void run(const FewRowsArgs& a, unsigned char* /*rows*/, const float (&d)[rows_of_group(kRows) / 2]) const {
    const Place place;
    for_results<kRows, T, kSwiglu>(a, d, [&](int half, int j, float even, float odd) {
      const int n = place.column(a, half), m = place.row(j);
      if constexpr (std::is_same_v<T, float>) {
        float* to = static_cast<float*>(a.out) + m * a.out_stride + n;
        if (n < a.N && m < a.M) to[0] = even;
        if (n < a.N && m + 1 < a.M) to[a.out_stride] = odd;
      } else {
        std::uint32_t pair = pair_of(even, odd, place.is_odd);
        if (a.residual != nullptr) pair = sum_of_pairs(pair, residual[half][j]);
        const int row = m + (place.is_odd ? 1 : 0), column = n - (place.is_odd ? 1 : 0);
        if (column < a.N && row < a.M)
          *reinterpret_cast<std::uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + row * a.out_stride + column) = pair;
      }
    });
  }
};

/// Stores rows of the tile whole, by way of the shared memory of the rows that its warpgroup has read: the pairs that the lanes of a warp
/// hold lie in eight rows, 16 bytes of each.
template <int kRows, bool kSwiglu>
struct StagedStore {
  static constexpr int kEach = rows_of_group(kRows), kPieces = kSwiglu ? 4 : 8;  ///< of 8 columns, in a row
  static constexpr int kRowsAtOnce = kGroup / kPieces, kPasses = kEach / kRowsAtOnce;
  static_assert(kPasses * kRowsAtOnce == kEach);
  uint4 residual[kPasses];

  const int thread = static_cast<int>(threadIdx.x) % kGroup, group = static_cast<int>(threadIdx.x) / kGroup;
  const int piece = thread % kPieces;
  __device__ __forceinline__ int row_in_group(int pass) const { return pass * kRowsAtOnce + thread / kPieces; }
  __device__ __forceinline__ int row(int pass) const { return static_cast<int>(blockIdx.y) * kRows + group * kEach + row_in_group(pass); }
  /// Of out; a.N where the tile has no such columns.
  __device__ __forceinline__ int column(const FewRowsArgs& a) const {
    const int columns = a.columns / (kSwiglu ? 2 : 1);
    return piece * 8 < columns ? static_cast<int>(blockIdx.x) * columns + piece * 8 : a.N;
  }
  /// Pieces of a row change places with its number, so that neither the lanes of a result nor those of a row share banks.
  __device__ __forceinline__ unsigned char* staged(unsigned char* rows, int row, int at_piece) const {
    return rows + (group * kEach + row) * kRowBytes + (at_piece ^ row % kPieces) * 16;
  }

  __device__ __forceinline__ void load_residual(const FewRowsArgs& a) {
    const int n = column(a);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const __nv_bfloat16* from = a.residual + row(pass) * a.residual_stride + n;
      residual[pass] = uint4{};
      if (row(pass) >= a.M) continue;
      if (a.is_wide && n < a.N) {
        residual[pass] = *reinterpret_cast<const uint4*>(from);
      } else {
        auto* pairs = reinterpret_cast<std::uint32_t*>(&residual[pass]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (n + 2 * e < a.N) pairs[e] = *reinterpret_cast<const std::uint32_t*>(from + 2 * e);
      }
    }
  }
  __device__ __forceinline__ void run(const FewRowsArgs& a, unsigned char* rows, const float (&d)[kEach / 2]) const {
    const LanePlace<kRows, kSwiglu> place;
    named_sync<kGroup>(1 + group);  // no warp's products read these rows any more
    for_results<kRows, __nv_bfloat16, kSwiglu>(a, d, [&](int half, int j, float even, float odd) {
      const int row = 8 * j + 2 * (place.lane % 4) + (place.is_odd ? 1 : 0);
      const int at_piece = (place.first / (kSwiglu ? 2 : 1) + 8 * half) / 8;
      *reinterpret_cast<std::uint32_t*>(staged(rows, row, at_piece) + place.lane / 8 * 4) = pair_of(even, odd, place.is_odd);
    });
    named_sync<kGroup>(1 + group);
    const int n = column(a);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (row(pass) >= a.M) return;
      uint4 values = *reinterpret_cast<const uint4*>(staged(rows, row_in_group(pass), piece));
      auto* pairs = reinterpret_cast<std::uint32_t*>(&values);
      const auto* added = reinterpret_cast<const std::uint32_t*>(&residual[pass]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (a.residual != nullptr) pairs[e] = sum_of_pairs(pairs[e], added[e]);
      __nv_bfloat16* to = static_cast<__nv_bfloat16*>(a.out) + row(pass) * a.out_stride + n;
      if (a.is_wide && n < a.N) {
        *reinterpret_cast<uint4*>(to) = values;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (n + 2 * e < a.N) *reinterpret_cast<std::uint32_t*>(to + 2 * e) = pairs[e];
      }
    }
  }
};

/// The sum over K, in order. Addresses of operands are kept as the products want them, in units of 16 bytes: what lies between two
/// products is what a product of few rows waits for.
template <int kRows, bool kNorm>
__device__ __forceinline__ void compute_tile(const FewRowsArgs& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty,
                                             float (&d)[rows_of_group(kRows) / 2]) {
  constexpr int kBlocks = blocks_per_slot(kRows);
  // Both in one exchange: with two the compiler no longer sees that the addresses are alike in a warp.
  constexpr bool kIsOneGroup = groups_of(kRows) == 1;
  const std::uint32_t both = same_in_warp(shared_address(shared) + (kIsOneGroup ? 0 : threadIdx.x / kGroup << 20));
  const std::uint32_t begin = both & 0xfffff, group = kIsOneGroup ? 0 : both >> 20;
  const std::uint64_t weights = along_rows(begin),
                      rows = along_rows(begin + static_cast<std::uint32_t>(a.rows_at) + group * (rows_of_group(kRows) * kRowBytes));
  const auto left_block = static_cast<std::uint32_t>(a.columns * kRowBytes / 16);
  constexpr std::uint32_t kRightBlock = kRows * kRowBytes / 16;
  std::uint64_t left = weights, right = rows;
  int slot = 0;
  std::uint32_t phase = 0;
  for (int step = 0; step < a.num_steps; ++step) {
    barrier_wait(full + slot, phase);
    products_begin();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int k = 0; k < kBlock / 16; ++k)
        product<0>(d, left + static_cast<std::uint32_t>(2 * k), right + static_cast<std::uint32_t>(2 * k), 1);
      left += left_block;
      right += kRightBlock;
    }
    products_commit();
    // The slot before this one is free once its products have been formed.
    if (step > 0 && step - 1 + a.slots < a.num_steps) {
      products_wait<1>();
      arrive_once_per_warp(empty + (slot == 0 ? a.slots : slot) - 1);
    }
    if (++slot == a.slots) {
      slot = 0;
      phase ^= 1;
      left = weights;
      if constexpr (!kNorm) right = rows;
    }
  }
  products_wait<0>();
  pin(d);
}

/// kEach rows of each warp, or of warps that share them: each of these sums the whole row, in the one order, and stores a part of its
/// columns. The arithmetic is norm.cu's, where a warp holds a row of this width.
template <int kRows, int kEach>
__device__ __forceinline__ void norm_rows_of_warps(const FewRowsArgs& a, unsigned char* rows, int num_rows) {
  constexpr int kWarps = kGroup / kWarp, kVectors = static_cast<int>(kMaxNormColumns) / (kWarp * kVec);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int end = a.num_steps * blocks_per_slot(kRows) * kBlock;  // columns beyond K are zero
  const int log_sharers = kEach > 1 ? 0 : num_rows == 1 ? 2 : num_rows == 2 ? 1 : 0;
  const auto is_mine = [&](int j) { return ((j ^ warp) & ((1 << log_sharers) - 1)) == 0; };
  const auto column = [&](int j) { return (lane + j * kWarp) * kVec; };
  // Rows beyond M are the last one again: nobody stores what comes of them.
  const auto row = [&](int i) { return (warp >> log_sharers) + i * kWarps; };
  float w[kVectors][kVec] = {};
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (is_mine(j) && column(j) < a.K) load<true>(w[j], a.norm + column(j), kVec);
  wait_for_previous();
  uint4 x[kEach][kVectors] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const __nv_bfloat16* from = a.x + (static_cast<int>(blockIdx.y) * kRows + min(row(i), num_rows - 1)) * a.x_stride;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (column(j) < a.K) x[i][j] = *reinterpret_cast<const uint4*>(from + column(j));
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float v[kVectors][kVec], squares[kVectors] = {};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      load<true>(v[j], reinterpret_cast<const __nv_bfloat16*>(&x[i][j]), kVec);
#pragma unroll
      for (int e = 0; e < kVec; ++e) squares[j] = fmaf(v[j][e], v[j][e], squares[j]);
    }
    const float scale = 1.0f / sqrtf(warp_sum(pair_sum(squares)) / static_cast<float>(a.K) + a.eps);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int c = column(j), r = row(i);
      if (!is_mine(j) || c >= end) continue;
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[j][e] = v[j][e] * scale * w[j][e];
      unsigned char* to = rows + (c / kBlock * kRows + r) * kRowBytes + (c / kVec % 8 ^ r % 8) * 16;
      store<true>(reinterpret_cast<__nv_bfloat16*>(to), v[j], kVec);
    }
  }
}
/// The tile's rows, normed, as the copy engine would leave rows of that kind.
template <int kRows>
__device__ __forceinline__ void norm_rows(const FewRowsArgs& a, unsigned char* rows) {
  constexpr int kWarps = kGroup / kWarp;
  const int num_rows = min(kRows, a.M - static_cast<int>(blockIdx.y) * kRows);
  num_rows <= kWarps ? norm_rows_of_warps<kRows, 1>(a, rows, num_rows) : norm_rows_of_warps<kRows, kRows / kWarps>(a, rows, num_rows);
  async_fence();
  named_sync<kGroup>(1);
}

#endif  // PRL_HOPPER

template <int kRows, typename T, bool kNorm, bool kSwiglu>
__global__ void __launch_bounds__(groups_of(kRows) * kGroup + kCopying) few_rows_kernel(const __grid_constant__ FewRowsArgs a) {
  static_assert(!kNorm || groups_of(kRows) == 1);
#if PRL_HOPPER
  constexpr int kComputing = groups_of(kRows) * kGroup;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* full = reinterpret_cast<std::uint64_t*>(shared + a.barriers_at);
  std::uint64_t* empty = full + a.slots;
  if (threadIdx.x == kComputing) {
    if (shared_address(shared) % 1024 != 0) __trap();
    prefetch_map(&a.weights);
    if constexpr (!kNorm) prefetch_map(&a.rows);
    for (int i = 0; i < a.slots; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, kComputing / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();
  let_next_begin();
  if (threadIdx.x >= kComputing) {
    if (threadIdx.x == kComputing) copy_tiles<kRows, kNorm, kSwiglu>(a, shared, full, empty);
    return;
  }
  if constexpr (kNorm) norm_rows<kRows>(a, shared + a.rows_at);
  std::conditional_t<(kRows >= 32 && !std::is_same_v<T, float>), StagedStore<kRows, kSwiglu>, DirectStore<kRows, T, kSwiglu>> store;
  if (a.residual != nullptr) {
    wait_for_previous();
    store.load_residual(a);
  }
  float d[rows_of_group(kRows) / 2];
#pragma unroll
  for (int i = 0; i < rows_of_group(kRows) / 2; ++i) d[i] = 0.0f;
  pin(d);
  compute_tile<kRows, kNorm>(a, shared, full, empty, d);
  store.run(a, shared + a.rows_at, d);
#endif
}

template <int kRows>
void launch(const OpContext& ctx, const Product& p, const FewRowsArgs& a, bool swiglu) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.N, a.columns)), static_cast<unsigned>(ceil_div(p.M, kRows)));
  const auto run = [&](auto kernel) {
    const int bytes = a.barriers_at + 2 * a.slots * 8;
    if (bytes > kMaxSharedBytes) fail(ErrorCode::kShape, "[ops] a tile of {} bytes is more than shared memory has", bytes);
    // The limit is the whole process's, and another thread may launch this kernel for another tile: the most of all, not this one.
    PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes));
    launch_chained(stream_of(ctx), kernel, grid, dim3(groups_of(kRows) * kGroup + kCopying), static_cast<std::size_t>(bytes), a);
  };
  if (p.out_dtype == DType::kF32) return run(few_rows_kernel<kRows, float, false, false>);
  if constexpr (kRows <= kMaxNormRows)
    if (a.norm != nullptr)
      return swiglu ? run(few_rows_kernel<kRows, __nv_bfloat16, true, true>) : run(few_rows_kernel<kRows, __nv_bfloat16, true, false>);
  swiglu ? run(few_rows_kernel<kRows, __nv_bfloat16, false, true>) : run(few_rows_kernel<kRows, __nv_bfloat16, false, false>);
}

/// The weights of gate and up, 8 columns of each in turns.
CUtensorMap gate_up_map(const Product& p, int box_columns, int box_blocks) {
  const auto half = static_cast<std::uint64_t>(p.N / 2);
  return tensor_map_5(p.b,
                      MapShapeOf<5>{{kBlock, 8, 2, half / 8, static_cast<std::uint64_t>(p.K / kBlock)},
                                    {p.b_stride, p.N / 2 * p.b_stride, 8 * p.b_stride, kBlock},
                                    {kBlock, 8, 2, static_cast<std::uint32_t>(box_columns / 16), static_cast<std::uint32_t>(box_blocks)}});
}

/// Steps along K that fit into a block's share of shared memory.
int slots_of(const FewRowsTile& t, std::int64_t K, int shared_bytes) {
  const int blocks = blocks_per_slot(t.rows), slot_bytes = blocks * (t.rows + t.columns) * kRowBytes + 16;
  const std::int64_t room = (shared_bytes - kSpanBytes) / slot_bytes;
  return static_cast<int>(std::clamp<std::int64_t>(room, 1, ceil_div(K, blocks * kBlock)));
}

/// Nanoseconds, by what the copies bring: a from the second-level cache once the earlier kernels have ended; b about half before that.
double copy_time(const Product& p, int rows, int columns, int processors) {
  constexpr double kCacheBytes = 5500.0, kProcessorBytes = 112.0;  // per nanosecond, of the device and of one multiprocessor; measured
  const std::int64_t blocks = ceil_div(p.M, rows) * ceil_div(p.N, columns);
  const double block_bytes = static_cast<double>((2 * rows + columns) * p.K);
  return std::max(static_cast<double>(blocks) * block_bytes / kCacheBytes,
                  static_cast<double>(ceil_div(blocks, processors)) * block_bytes / kProcessorBytes);
}

}  // namespace

std::optional<FewRowsTile> few_rows_tile(const Product& p, const cudaDeviceProp& device, const FewRowsFusion& fusion) {
  if (device.major != 9 || p.M > kMaxFewRows || p.M * p.N > max_few_rows_outputs(p.M, p.K) || p.K % kBlock != 0) return std::nullopt;
  if (p.in_dtype != DType::kBF16 || p.may_split || p.accumulate || p.transpose_a || !p.transpose_b) return std::nullopt;
  if (fusion.norm != nullptr && (p.M > kMaxNormRows || p.K > kMaxNormColumns)) return std::nullopt;
  if (fusion.is_any() && p.out_dtype != DType::kBF16) return std::nullopt;
  if (fusion.swiglu && (p.N % 16 != 0 || p.bias != nullptr || fusion.residual != nullptr)) return std::nullopt;
  const int unit = fusion.swiglu ? 16 : 8;
  const int processors = device.multiProcessorCount;
  FewRowsTile best;
  double best_time = 0;
  for (int rows = 8; rows <= 128 && (rows == 8 || rows < 2 * p.M); rows *= 2)
    for (int columns = unit; columns <= 64; columns += unit) {
      const double time = copy_time(p, rows, columns, processors);
      if (best_time > 0 && time >= best_time) continue;
      best_time = time;
      best = {rows, columns, 1};
    }
  // Measured: 128 rows of gate and up are faster in 128 blocks of 48 columns than in 96 of 64. `qkv`, which attention begins beside, is
  // not.
  const auto blocks_with = [&](int columns) { return ceil_div(p.M, best.rows) * ceil_div(p.N, columns); };
  while (fusion.swiglu && best.rows == 128 && best.columns > unit && blocks_with(best.columns - unit) <= processors) best.columns -= unit;
  const bool is_one_wave = blocks_with(best.columns) <= processors;
  best.slots = slots_of(best, p.K, is_one_wave ? kSharedBytes : kSharedBytes / 2);
  return best;
}

void few_rows_product(const OpContext& ctx, const Product& p, const FewRowsTile& t, const FewRowsFusion& fusion) {
  FewRowsArgs a{};
  const int blocks = blocks_per_slot(t.rows);
  a.weights = fusion.swiglu ? gate_up_map(p, t.columns, blocks) : rows_map(p.b, p.N, p.K, p.b_stride, t.columns, blocks);
  a.out = p.out;
  a.bias = p.bias;
  a.out_stride = p.out_stride;
  a.M = static_cast<int>(p.M);
  a.N = static_cast<int>(fusion.swiglu ? p.N / 2 : p.N);
  a.K = static_cast<int>(p.K);
  a.num_steps = static_cast<int>(ceil_div(p.K, blocks * kBlock));
  a.columns = t.columns;
  a.slots = t.slots;
  // A slot is given back only after the products of the next one have begun.
  if (a.num_steps > 1 && a.slots < 2)
    fail(ErrorCode::kShape, "[ops] {} slots for {} steps of a product, at least 2 are wanted", a.slots, a.num_steps);
  a.residual = static_cast<const __nv_bfloat16*>(fusion.residual);
  a.residual_stride = fusion.residual_stride;
  a.is_wide = a.N % 8 == 0 && p.out_stride % 8 == 0 && is_aligned(p.out, 16);
  if (a.residual != nullptr) a.is_wide = a.is_wide && a.residual_stride % 8 == 0 && is_aligned(a.residual, 16);
  a.norm = fusion.norm;
  a.eps = fusion.eps;
  if (fusion.norm != nullptr) {
    a.x = static_cast<const __nv_bfloat16*>(p.a);
    a.x_stride = p.a_stride;
  } else {
    a.rows = rows_map(p.a, p.M, p.K, p.a_stride, t.rows, blocks);
  }
  const int weight_slot = blocks * t.columns * kRowBytes, row_slots = fusion.norm != nullptr ? a.num_steps : t.slots;
  a.rows_at = t.slots * weight_slot;
  a.barriers_at = std::max(a.rows_at + row_slots * blocks * t.rows * kRowBytes, a.rows_at - t.columns * kRowBytes + kSpanBytes);
  switch (t.rows) {
    case 8: return launch<8>(ctx, p, a, fusion.swiglu);
    case 16: return launch<16>(ctx, p, a, fusion.swiglu);
    case 32: return launch<32>(ctx, p, a, fusion.swiglu);
    case 64: return launch<64>(ctx, p, a, fusion.swiglu);
    default: return launch<128>(ctx, p, a, fusion.swiglu);
  }
}

}  // namespace prl::ops::cuda
