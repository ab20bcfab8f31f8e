#include "ops/cuda/logit_stats.cuh"

#include <algorithm>

#include "ops/cuda/hopper.cuh"
#include "ops/cuda/launch.hpp"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

/// Three warpgroups compute 64 rows each of a tile, a fourth one copies. They take a chunk of the vocabulary tile after tile, so that each
/// quad of lanes ends with the statistics of all its pieces. While one forms statistics the others go on with their products as far as the
/// ring reaches; two warpgroups with 256 columns each took longer (docs/performance.md).
constexpr int kGroup = 128, kGroups = 3, kThreads = (kGroups + 1) * kGroup;
constexpr int kGroupRows = 64, kRows = kGroups * kGroupRows, kColumns = 128;
constexpr int kBlock = 64;  ///< of K: a row of 128 bytes in shared memory
constexpr int kRowBytes = kBlock * 2, kWeightsAt = kRows * kRowBytes, kSlotBytes = kWeightsAt + kColumns * kRowBytes;
constexpr int kSlots = 5, kBarriersAt = kSlots * kSlotBytes, kSharedBytes = kBarriersAt + 2 * kSlots * 8;
static_assert(kVocabChunk % kColumns == 0);
/// A guess: two tiles of rows, a third of them empty. Where this kernel begins to pay was not measured.
constexpr std::int64_t kMinRows = 256;

struct Args {
  CUtensorMap rows;     ///< [K / 64][M][64], box [1][kRows][64]
  CUtensorMap weights;  ///< [K / 64][V][64], box [1][kColumns][64]
  ChunkStats* stats;
  float* target_logits;
  KeptSoftmax<__half> kept;
  LiveRows live;
  const std::int32_t* targets;
  const float* temperatures;
  int M, V, num_blocks, num_row_tiles, num_units;
};

#if PRL_HOPPER

using namespace hopper;

/// Rows of a tile and a chunk of the vocabulary. Neighbouring blocks take the same chunk, which then comes from memory once.
struct Unit {
  int first_row, first_column, num_tiles;
  __device__ __forceinline__ Unit(const Args& a, int unit)
      : first_row(unit % a.num_row_tiles * kRows),
        first_column(unit / a.num_row_tiles * kVocabChunk),
        num_tiles((min(kVocabChunk, a.V - first_column) + kColumns - 1) / kColumns) {}
};
template <typename Visit>
__device__ __forceinline__ void for_each_unit(const Args& a, const Visit& visit) {
  for (int unit = static_cast<int>(blockIdx.x); unit < a.num_units; unit += static_cast<int>(gridDim.x)) visit(Unit(a, unit));
}

/// One thread.
__device__ __forceinline__ void copy_tiles(const Args& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty) {
  RingPlace<kSlots> at;
  for_each_unit(a, [&](const Unit& u) {
    for (int tile = 0; tile < u.num_tiles; ++tile)
      for (int block = 0; block < a.num_blocks; ++block, at.advance()) {
        unsigned char* slot = shared + at.slot * kSlotBytes;
        barrier_wait(empty + at.slot, at.phase ^ 1);
        barrier_arrive_expect(full + at.slot, kSlotBytes);
        copy_box(slot, &a.rows, full + at.slot, 0, u.first_row, block);
        copy_box(slot + kWeightsAt, &a.weights, full + at.slot, 0, u.first_column + tile * kColumns, block);
      }
  });
}

/// What a lane knows of one of its two rows of a unit.
struct LaneRow {
  int row;
  float temperature = 1.0f;
  int target = -1;         ///< from the first column of the unit on
  __half* kept = nullptr;  ///< from that column on
  QuadChunk<true> quad;
  __device__ __forceinline__ LaneRow(const Args& a, const Unit& u, int row_) : row(row_) {
#pragma unroll
    for (auto& p : quad.pieces) p = {{-INFINITY, 0.0f}, 0.0f};
    if (row >= a.M) return;
    const std::int64_t t = a.live.of(row);
    temperature = a.temperatures[t];
    target = a.targets[t] - u.first_column;
    if (row >= a.kept.rows) return;
    kept = a.kept.piece(row, u.first_column);
  }
  /// Of a piece of logits, whose first column lies `first` from the unit's.
  __device__ __forceinline__ void take(float (&x)[kPieceValues], const Args& a, int first, int num_columns) {
    scale_piece(x, temperature);
    if (first + kPiece > num_columns) cut_piece(x, first, num_columns);
    if (target >= first && target < first + kPiece)
#pragma unroll
      for (int i = 0; i < kPieceValues; ++i)
        if (first + piece_column(i) == target) a.target_logits[row] = x[i];
    const ChunkStats s = piece_weights<true>(x);
    if (kept != nullptr) keep_piece(kept + first, x);
    const int piece = first / kPiece;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (piece == QuadChunk<true>::piece(i)) quad.pieces[i] = s;
  }
  __device__ __forceinline__ void keep_tops(const Args& a, const Unit& u) const {
    if (kept == nullptr) return;
    float* to = a.kept.top(row, u.first_column);
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      *reinterpret_cast<float2*>(to + QuadChunk<true>::piece(i)) = make_float2(quad.pieces[i].max, quad.pieces[i + 1].max);
  }
};

__device__ __forceinline__ void form_tiles(const Args& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty) {
  const int group = static_cast<int>(threadIdx.x) / kGroup, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int lane_row = static_cast<int>(threadIdx.x) / kWarp * 16 + lane / 4;
  const std::uint32_t both = same_in_warp(shared_address(shared) + static_cast<std::uint32_t>(group << 20));
  const std::uint32_t begin = both & 0xfffff, height = both >> 20;
  const std::uint64_t rows = along_rows(begin + height * (kGroupRows * kRowBytes)), weights = along_rows(begin + kWeightsAt);
  RingPlace<kSlots> at;
  for_each_unit(a, [&](const Unit& u) {
    const int num_columns = min(kVocabChunk, a.V - u.first_column);
    LaneRow mine[2] = {{a, u, u.first_row + lane_row}, {a, u, u.first_row + lane_row + 8}};
#pragma unroll 1
    for (int tile = 0; tile < u.num_tiles; ++tile) {
      float d[kColumns / 2];  // the first product does not add to it
      pin(d);
      int before = 0;
#pragma unroll 1
      for (int block = 0; block < a.num_blocks; ++block) {
        barrier_wait(full + at.slot, at.phase);
        const std::uint32_t step = static_cast<std::uint32_t>(at.slot) * (kSlotBytes / 16);
        products_begin();
#pragma unroll
        for (int k = 0; k < kBlock / 16; ++k)
          product<0>(d, rows + (step + static_cast<std::uint32_t>(2 * k)), weights + (step + static_cast<std::uint32_t>(2 * k)),
                     k > 0 || block > 0);
        products_commit();
        if (block > 0) {
          products_wait<1>();
          arrive_once_per_warp(empty + before);
        }
        before = at.slot;
        at.advance();
      }
      products_wait<0>();
      pin(d);
      arrive_once_per_warp(empty + before);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int p = 0; p < kColumns / kPiece; ++p) {
          float x[kPieceValues];
#pragma unroll
          for (int i = 0; i < kPieceValues; ++i) x[i] = d[4 * (p * (kPiece / 8) + i / 2) + 2 * half + i % 2];
          mine[half].take(x, a, tile * kColumns + p * kPiece, num_columns);
        }
    }
#pragma unroll
    for (const LaneRow& r : mine) {
      r.keep_tops(a, u);
      const ChunkStats s = r.quad.stats();
      if (lane % 4 == 0 && r.row < a.M) a.stats[static_cast<std::int64_t>(u.first_column / kVocabChunk) * a.M + r.row] = s;
    }
  });
}

#endif  // PRL_HOPPER

__global__ void __launch_bounds__(kThreads, 1) logit_stats_kernel(const __grid_constant__ Args a) {
#if PRL_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* full = reinterpret_cast<std::uint64_t*>(shared + kBarriersAt);
  auto* empty = full + kSlots;
  if (threadIdx.x == 0) {
    if (shared_address(shared) % 1024 != 0) __trap();
    prefetch_map(&a.rows);
    prefetch_map(&a.weights);
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, kGroups * (kGroup / kWarp));
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kGroups * kGroup) {
    registers_down<24>();
    if (threadIdx.x == kGroups * kGroup) copy_tiles(a, shared, full, empty);
  } else {
    registers_up<160>();
    form_tiles(a, shared, full, empty);
  }
#endif
}

}  // namespace

bool can_form_logit_stats(const OpContext& ctx, const Product& p) {
  return properties_of(ctx).major == 9 && p.M >= kMinRows && p.K % kBlock == 0 && p.in_dtype == DType::kBF16 && p.bias == nullptr &&
         has_librarys_bits(ctx, p) && is_aligned(p.a, 16) && p.a_stride % kVec == 0;
}

void logit_stats(const OpContext& ctx, ChunkStats* stats, float* target_logits, const Product& p, const KeptSoftmax<__half>& kept,
                 const LiveRows& live, const std::int32_t* targets, const float* temperatures) {
  Args a{};
  a.rows = rows_map(p.a, p.M, p.K, p.a_stride, kRows, 1);
  a.weights = rows_map(p.b, p.N, p.K, p.b_stride, kColumns, 1);
  a.stats = stats;
  a.target_logits = target_logits;
  a.kept = kept;
  a.live = live;
  a.targets = targets;
  a.temperatures = temperatures;
  a.M = static_cast<int>(p.M);
  a.V = static_cast<int>(p.N);
  a.num_blocks = static_cast<int>(p.K / kBlock);
  a.num_row_tiles = static_cast<int>(ceil_div(p.M, kRows));
  a.num_units = a.num_row_tiles * static_cast<int>(ceil_div(p.N, kVocabChunk));
  PRL_CUDA_CHECK(cudaFuncSetAttribute(logit_stats_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const auto grid = static_cast<unsigned>(std::min(a.num_units, num_multiprocessors(ctx)));
  logit_stats_kernel<<<grid, kThreads, kSharedBytes, stream_of(ctx)>>>(a);
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
