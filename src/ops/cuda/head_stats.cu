#include "ops/cuda/head_stats.hpp"

#include <algorithm>

#include "ops/cuda/chain.cuh"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/log_softmax.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kBlock = 64;  ///< of K: a row of 128 bytes in shared memory, and a slot of the ring
constexpr int kRowBytes = kBlock * 2;
constexpr int kGroupRows = 64, kGroupColumns = 192;  ///< of a warpgroup
constexpr int kTileColumns = 2 * kGroupColumns;
constexpr int kGroup = 128;

/// Of kHeights times 64 rows. A block takes all rows, so that the head is read once.
template <int kHeights>
struct HeadTile {
  /// A warp that only copies would leave the others of its scheduler too few registers for results of this size.
  static constexpr int kThreads = 2 * kHeights * kGroup;
  static constexpr int kRows = kHeights * kGroupRows;
  static constexpr int kRowsAt = kTileColumns * kRowBytes, kSlotBytes = kRowsAt + kRows * kRowBytes;
  static constexpr int kSlots = 224 * 1024 / kSlotBytes;
  static constexpr int kBarriersAt = kSlots * kSlotBytes, kSharedBytes = kBarriersAt + kSlots * 8;
};

struct HeadArgs {
  CUtensorMap weights;  ///< [K / 64][V][64], box [1][kGroupColumns][64]
  CUtensorMap rows;     ///< [K / 64][M][64], box [1][kRows][64]
  SoftmaxStats* stats;
  std::int64_t stride;
  int M, V, num_blocks, num_tiles;
  float temperatures[kMaxHeadRows];
};

#if PRL_HOPPER

using namespace hopper;

/// What one thread copies: all blocks of all tiles of this block, in order.
template <typename Tile>
struct Copies {
  const HeadArgs& a;
  unsigned char* const shared;
  std::uint64_t* const full;
  const CachePolicy once = read_once();
  int tile = static_cast<int>(blockIdx.x), block = 0;

  __device__ __forceinline__ void weights(int slot) {
    if (tile >= a.num_tiles) return;
    barrier_arrive_expect(full + slot, Tile::kSlotBytes);
    unsigned char* to = shared + slot * Tile::kSlotBytes;
    for (int half = 0; half < 2; ++half)
      copy_box(to + half * kGroupColumns * kRowBytes, &a.weights, full + slot, once, 0, tile * kTileColumns + half * kGroupColumns, block);
  }
  __device__ __forceinline__ void rows(int slot, int of_block) const {
    copy_box(shared + slot * Tile::kSlotBytes + Tile::kRowsAt, &a.rows, full + slot, 0, 0, of_block);
  }
  __device__ __forceinline__ void advance() {
    if (++block < a.num_blocks) return;
    block = 0;
    tile += static_cast<int>(gridDim.x);
  }
  /// Weights before earlier kernels have ended: no recorded work writes them.
  __device__ __forceinline__ void begin() {
    Copies again = *this;
    for (int slot = 0; slot < Tile::kSlots; ++slot, advance()) weights(slot);
    wait_for_previous();
    for (int slot = 0; slot < Tile::kSlots; ++slot, again.advance())
      if (again.tile < a.num_tiles) again.rows(slot, again.block);
  }
  __device__ __forceinline__ void next(int slot) {
    if (tile >= a.num_tiles) return;
    weights(slot);
    rows(slot, block);
    advance();
  }
};

/// Of the warpgroup's rows and columns, whose first column is `first`.
__device__ __forceinline__ void store_stats(const HeadArgs& a, const float (&d)[kGroupColumns / 2], int first_row, int first) {
  constexpr int kGroupPieces = kGroupColumns / kPiece;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + static_cast<int>(threadIdx.x) % kGroup / kWarp * 16 + lane / 4 + 8 * half;
    const float temperature = row < a.M ? a.temperatures[row] : 1.0f;
#pragma unroll
    for (int p = 0; p < kGroupPieces; ++p) {
      float x[kPieceValues];
#pragma unroll
      for (int i = 0; i < kPieceValues; ++i) {
        const int at = p * kPiece / 8 + i / 2;
        x[i] = d[4 * at + 2 * half + i % 2];
      }
      scale_piece(x, temperature);
      if (first + kGroupColumns > a.V) cut_piece(x, first + p * kPiece, a.V);
      const SoftmaxStats s = piece_stats<false>(x);
      if (lane % kPieceLanes == 0 && row < a.M && first + p * kPiece < a.V) a.stats[row * a.stride + first / kPiece + p] = s;
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void form_tiles(const HeadArgs& a, unsigned char* shared, std::uint64_t* full) {
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  // Both in one exchange: with two the compiler no longer sees that the addresses are alike in a warp.
  const std::uint32_t both = same_in_warp(shared_address(shared) + static_cast<std::uint32_t>(group << 20));
  const std::uint32_t begin = both & 0xfffff, half = both >> 20 & 1, height = both >> 21;
  const std::uint64_t rows = along_rows(begin + Tile::kRowsAt + height * (kGroupRows * kRowBytes)),
                      weights = along_rows(begin + half * (kGroupColumns * kRowBytes));
  constexpr std::uint32_t kSlotStep = Tile::kSlotBytes / 16;
  Copies<Tile> copies{a, shared, full};
  if (threadIdx.x == 0) copies.begin();
  wait_for_previous();
  RingPlace<Tile::kSlots> at;
  // All warps have read a slot: it is refilled while the products in flight continue.
  const auto give_back = [&](int slot) {
    named_sync<Tile::kThreads>(1);
    if (threadIdx.x == 0) copies.next(slot);
  };
  for (int tile = static_cast<int>(blockIdx.x); tile < a.num_tiles; tile += static_cast<int>(gridDim.x)) {
    float d[kGroupColumns / 2];
#pragma unroll
    for (float& v : d) v = 0.0f;
    pin(d);
    int before = 0;
    for (int block = 0; block < a.num_blocks; ++block) {
      barrier_wait(full + at.slot, at.phase);
      const std::uint32_t step = static_cast<std::uint32_t>(at.slot) * kSlotStep;
      products_begin();
#pragma unroll
      for (int k = 0; k < kBlock / 16; ++k)
        product<0>(d, rows + (step + static_cast<std::uint32_t>(2 * k)), weights + (step + static_cast<std::uint32_t>(2 * k)), 1);
      products_commit();
      if (block > 0) {
        products_wait<1>();
        give_back(before);
      }
      before = at.slot;
      at.advance();
    }
    products_wait<0>();
    pin(d);
    give_back(before);
    store_stats(a, d, static_cast<int>(height) * kGroupRows, tile * kTileColumns + static_cast<int>(half) * kGroupColumns);
  }
}

#endif  // PRL_HOPPER

template <int kHeights>
__global__ void __launch_bounds__(HeadTile<kHeights>::kThreads, 1) head_stats_kernel(const __grid_constant__ HeadArgs a) {
#if PRL_HOPPER
  using Tile = HeadTile<kHeights>;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* full = reinterpret_cast<std::uint64_t*>(shared + Tile::kBarriersAt);
  if (threadIdx.x == 0) {
    if (shared_address(shared) % 1024 != 0) __trap();
    prefetch_map(&a.weights);
    prefetch_map(&a.rows);
    for (int i = 0; i < Tile::kSlots; ++i) barrier_init(full + i, 1);
    barrier_init_fence();
  }
  __syncthreads();
  let_next_begin();
  form_tiles<Tile>(a, shared, full);
#endif
}

template <int kHeights>
void launch(const OpContext& ctx, const HeadArgs& a) {
  using Tile = HeadTile<kHeights>;
  const auto kernel = head_stats_kernel<kHeights>;
  PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes));
  const auto grid = static_cast<unsigned>(std::min(a.num_tiles, num_multiprocessors(ctx)));
  launch_chained(stream_of(ctx), kernel, dim3(grid), dim3(Tile::kThreads), Tile::kSharedBytes, a);
}

}  // namespace

bool can_form_head(const OpContext& ctx, const Product& p) {
  return properties_of(ctx).major == 9 && p.M >= kMinHeadRows && p.M <= kMaxHeadRows && p.K % kBlock == 0 && p.in_dtype == DType::kBF16 &&
         p.bias == nullptr && has_librarys_bits(ctx, p) && is_aligned(p.a, 16) && p.a_stride % kVec == 0;
}

void head_stats(const OpContext& ctx, SoftmaxStats* stats, std::int64_t stride, const Product& p, std::span<const float> temperatures) {
  HeadArgs a{};
  const bool is_low = p.M <= kGroupRows;
  a.weights = rows_map(p.b, p.N, p.K, p.b_stride, kGroupColumns, 1);
  a.rows = rows_map(p.a, p.M, p.K, p.a_stride, is_low ? kGroupRows : 2 * kGroupRows, 1);
  a.stats = stats;
  a.stride = stride;
  a.M = static_cast<int>(p.M);
  a.V = static_cast<int>(p.N);
  a.num_blocks = static_cast<int>(p.K / kBlock);
  a.num_tiles = static_cast<int>(ceil_div(p.N, kTileColumns));
  std::ranges::copy(temperatures, a.temperatures);
  is_low ? launch<1>(ctx, a) : launch<2>(ctx, a);
}

}  // namespace prl::ops::cuda
