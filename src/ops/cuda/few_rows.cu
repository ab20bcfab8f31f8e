#include "ops/cuda/few_rows.hpp"

#include <algorithm>

#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kBlock = 64;  ///< of K: a row of 128 bytes in shared memory
constexpr int kRowBytes = kBlock * 2;
constexpr int kComputing = 128, kCopying = 32;  ///< threads
constexpr int kSpanBytes = 64 * kRowBytes;      ///< a warpgroup product reads 64 rows on its left, whatever the tile has
/// Of a multiprocessor. Blocks of which each has one to itself take all; else two share it, and one computes while the other copies.
constexpr int kSharedBytes = 224 * 1024;
/// Beyond these the library is as fast: what counts then is how often operands pass through the second-level cache.
constexpr std::int64_t kMaxRows = 256, kMaxOutputs = 64 * 6144;

/// Blocks of K in a slot: one copy brings them.
__host__ __device__ constexpr int blocks_per_slot(int rows) { return rows <= 16 ? 4 : rows <= 64 ? 2 : 1; }

struct FewRowsArgs {
  CUtensorMap weights;  ///< [K / 64][N][64], box [blocks per slot][columns][64]
  CUtensorMap rows;     ///< [K / 64][M][64], box [blocks per slot][rows][64]
  void* out;
  const float* bias;  ///< [N] or null
  std::int64_t out_stride;
  int M, N, num_steps, columns, slots;
};

/// Slots of weights, slots of rows, barriers.
__host__ __device__ inline int rows_at(int slots, int columns, int blocks) { return slots * blocks * columns * kRowBytes; }
__host__ __device__ inline int barriers_at(int slots, int columns, int rows, int blocks) {
  const int end = rows_at(slots, columns, blocks) + slots * blocks * rows * kRowBytes;
  const int read = (slots * blocks - 1) * columns * kRowBytes + kSpanBytes;
  return end < read ? read : end;
}
int shared_bytes(const FewRowsTile& t) { return barriers_at(t.slots, t.columns, t.rows, blocks_per_slot(t.rows)) + 2 * t.slots * 8; }

#if PRL_HOPPER

using namespace hopper;

/// One thread copies: weights of the first slots before anything else, for no kernel of recorded work writes those.
template <int kRows>
__device__ void copy_tiles(const FewRowsArgs& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty) {
  constexpr int kBlocks = blocks_per_slot(kRows), kRowsBytes = kBlocks * kRows * kRowBytes;
  const int column = static_cast<int>(blockIdx.x) * a.columns, row = static_cast<int>(blockIdx.y) * kRows;
  const int weight_bytes = kBlocks * a.columns * kRowBytes;
  unsigned char* rows = shared + rows_at(a.slots, a.columns, kBlocks);
  const auto copy_weights = [&](int slot, int step) {
    barrier_arrive_expect(full + slot, static_cast<std::uint32_t>(weight_bytes + kRowsBytes));
    copy_box(shared + slot * weight_bytes, &a.weights, full + slot, 0, column, step * kBlocks);
  };
  const auto copy_rows = [&](int slot, int step) { copy_box(rows + slot * kRowsBytes, &a.rows, full + slot, 0, row, step * kBlocks); };
  const int first = min(a.slots, a.num_steps);
  for (int s = 0; s < first; ++s) copy_weights(s, s);
  wait_for_previous();
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

/// Lanes whose columns of out are neighbours exchange halves, so that each has a pair that lies together in a row of out.
__device__ __forceinline__ std::uint32_t pair_of(float even_row, float odd_row, bool is_odd_column) {
  const float other = __shfl_xor_sync(kFullWarp, is_odd_column ? even_row : odd_row, 4);
  const __nv_bfloat162 pair = is_odd_column ? __floats2bfloat162_rn(other, odd_row) : __floats2bfloat162_rn(even_row, other);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// d[4 j + e]: column of out lane / 4 (+ 8 for e >= 2) of the warp's 16, row 8 j + 2 (lane % 4) + e % 2.
template <int kRows, typename T>
__device__ __forceinline__ void store_tile(const FewRowsArgs& a, const float (&d)[kRows / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, first = static_cast<int>(threadIdx.x) / kWarp * 16;
  const bool is_odd = lane / 4 % 2 != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int local = first + 8 * half;
    if (local >= a.columns) return;
    const int n = static_cast<int>(blockIdx.x) * a.columns + local + lane / 4;
    const float bias = a.bias != nullptr && n < a.N ? a.bias[n] : 0.0f;
    const bool has_bias = a.bias != nullptr;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      float even = d[4 * j + 2 * half], odd = d[4 * j + 2 * half + 1];
      if (has_bias) {
        even += bias;
        odd += bias;
      }
      const int m = static_cast<int>(blockIdx.y) * kRows + 8 * j + 2 * (lane % 4);
      if constexpr (std::is_same_v<T, float>) {
        float* to = static_cast<float*>(a.out) + m * a.out_stride + n;
        if (n < a.N && m < a.M) to[0] = even;
        if (n < a.N && m + 1 < a.M) to[a.out_stride] = odd;
      } else {
        const std::uint32_t pair = pair_of(even, odd, is_odd);
        const int row = m + (is_odd ? 1 : 0), column = n - (is_odd ? 1 : 0);
        if (column < a.N && row < a.M)
          *reinterpret_cast<std::uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + row * a.out_stride + column) = pair;
      }
    }
  }
}

/// The sum over K, in order. Addresses of operands are kept as the products want them, in units of 16 bytes: what lies between two
/// products is what a product of few rows waits for.
template <int kRows>
__device__ __forceinline__ void compute_tile(const FewRowsArgs& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty,
                                             float (&d)[kRows / 2]) {
  constexpr int kBlocks = blocks_per_slot(kRows);
  const std::uint32_t begin = __shfl_sync(kFullWarp, shared_address(shared), 0);
  const std::uint64_t weights = along_rows(begin),
                      rows = along_rows(begin + static_cast<std::uint32_t>(rows_at(a.slots, a.columns, kBlocks)));
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
      if (threadIdx.x % kWarp == 0) barrier_arrive(empty + (slot == 0 ? a.slots : slot) - 1);
    }
    if (++slot == a.slots) {
      slot = 0;
      phase ^= 1;
      left = weights;
      right = rows;
    }
  }
  products_wait<0>();
  pin(d);
}

#endif  // PRL_HOPPER

template <int kRows, typename T>
__global__ void __launch_bounds__(kComputing + kCopying) few_rows_kernel(const __grid_constant__ FewRowsArgs a) {
#if PRL_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* full = reinterpret_cast<std::uint64_t*>(shared + barriers_at(a.slots, a.columns, kRows, blocks_per_slot(kRows)));
  std::uint64_t* empty = full + a.slots;
  if (threadIdx.x == kComputing) {
    if (shared_address(shared) % 1024 != 0) __trap();
    prefetch_map(&a.weights);
    prefetch_map(&a.rows);
    for (int i = 0; i < a.slots; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, kComputing / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();
  let_next_begin();
  if (threadIdx.x >= kComputing) {
    if (threadIdx.x == kComputing) copy_tiles<kRows>(a, shared, full, empty);
    return;
  }
  float d[kRows / 2];
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) d[i] = 0.0f;
  pin(d);
  compute_tile<kRows>(a, shared, full, empty, d);
  store_tile<kRows, T>(a, d);
#endif
}

template <int kRows>
void launch(const OpContext& ctx, const Product& p, const FewRowsArgs& a, const FewRowsTile& t) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.N, t.columns)), static_cast<unsigned>(ceil_div(p.M, kRows)));
  with_type(p.out_dtype, [&](auto out) {
    const auto kernel = few_rows_kernel<kRows, decltype(out)>;
    const int bytes = shared_bytes(t);
    PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    launch_chained(stream_of(ctx), kernel, grid, dim3(kComputing + kCopying), static_cast<std::size_t>(bytes), a);
  });
}

CUtensorMap map_of(const void* data, std::int64_t rows, std::int64_t K, std::int64_t stride, int box_rows, int box_blocks) {
  const std::int64_t step = rows == 1 ? K : stride;  // nothing is said about the stride of a single row
  return tensor_map(data,
                    {{static_cast<std::uint64_t>(kBlock), static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(K / kBlock)},
                     {step, kBlock},
                     {static_cast<std::uint32_t>(kBlock), static_cast<std::uint32_t>(box_rows), static_cast<std::uint32_t>(box_blocks)}});
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

std::optional<FewRowsTile> few_rows_tile(const Product& p, const cudaDeviceProp& device) {
  if (device.major != 9 || p.M > kMaxRows || p.M * p.N > kMaxOutputs || p.K % kBlock != 0) return std::nullopt;
  if (p.in_dtype != DType::kBF16 || p.may_split || p.accumulate || p.transpose_a || !p.transpose_b) return std::nullopt;
  const int processors = device.multiProcessorCount;
  FewRowsTile best;
  double best_time = 0;
  for (int rows = 8; rows <= 128 && (rows == 8 || rows < 2 * p.M); rows *= 2)
    for (int columns = 8; columns <= 64; columns += 8) {
      const double time = copy_time(p, rows, columns, processors);
      if (best_time > 0 && time >= best_time) continue;
      best_time = time;
      best = {rows, columns, 1};
    }
  const bool is_one_wave = ceil_div(p.M, best.rows) * ceil_div(p.N, best.columns) <= processors;
  best.slots = slots_of(best, p.K, is_one_wave ? kSharedBytes : kSharedBytes / 2);
  return best;
}

void few_rows_product(const OpContext& ctx, const Product& p, const FewRowsTile& t) {
  FewRowsArgs a{};
  const int blocks = blocks_per_slot(t.rows);
  a.weights = map_of(p.b, p.N, p.K, p.b_stride, t.columns, blocks);
  a.rows = map_of(p.a, p.M, p.K, p.a_stride, t.rows, blocks);
  a.out = p.out;
  a.bias = p.bias;
  a.out_stride = p.out_stride;
  a.M = static_cast<int>(p.M);
  a.N = static_cast<int>(p.N);
  a.num_steps = static_cast<int>(ceil_div(p.K, blocks * kBlock));
  a.columns = t.columns;
  a.slots = t.slots;
  switch (t.rows) {
    case 8: return launch<8>(ctx, p, a, t);
    case 16: return launch<16>(ctx, p, a, t);
    case 32: return launch<32>(ctx, p, a, t);
    case 64: return launch<64>(ctx, p, a, t);
    default: return launch<128>(ctx, p, a, t);
  }
}

}  // namespace prl::ops::cuda
