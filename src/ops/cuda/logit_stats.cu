#include "ops/cuda/logit_stats.cuh"

#include <algorithm>

#include "ops/cuda/hopper.cuh"
#include "ops/cuda/launch.hpp"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

/// Three warpgroups compute 64 rows each of a tile, a fourth one copies. They take a chunk of the vocabulary tile after tile, so that each
/// quad of lanes ends with the statistics of all its pieces. While one forms statistics the others go on with their products as far as the
/// ring reaches; two warpgroups with 256 columns each took longer (docs/notebook/2026-11-23-lm-head-statistics.md).
constexpr int kGroup = 128, kGroups = 3, kThreads = (kGroups + 1) * kGroup, kWarps = kGroups * kGroup / kWarp;
constexpr int kGroupRows = 64, kRows = kGroups * kGroupRows, kColumns = 128;
constexpr int kBlock = 64;  ///< of K: a row of 128 bytes in shared memory
constexpr int kRowBytes = kBlock * 2, kWeightsAt = kRows * kRowBytes, kSlotBytes = kWeightsAt + kColumns * kRowBytes;
/// A warp's weights of a piece wait for their way to memory as rows of 128 bytes.
constexpr int kWarpRows = 16, kPieceBytes = kWarpRows * kPiece * 2;
constexpr int kSlots = 5, kPiecesAt = kSlots * kSlotBytes, kBarriersAt = kPiecesAt + kWarps * kPieceBytes;
constexpr int kSharedBytes = kBarriersAt + 2 * kSlots * 8;
static_assert(kPiece * 2 == kRowBytes && kPiecesAt % 1024 == 0 && kSharedBytes <= 227 * 1024);
static_assert(kVocabChunk % kColumns == 0 && kColumns == 2 * kPiece);
/// A guess: two tiles of rows, a third of them empty. Where this kernel begins to pay was not measured.
constexpr std::int64_t kMinRows = 256;

struct Args {
  CUtensorMap rows;      ///< [K / 64][M][64], box [1][kRows][64]
  CUtensorMap weights;   ///< [K / 64][V][64], box [1][kColumns][64]
  CUtensorMap kept_map;  ///< of `kept`, [chunks in pieces][rows][64], box [1][kWarpRows][64]
  ChunkStats* stats;
  float* target_logits;
  SoftmaxRows<__nv_bfloat16> kept;
  LiveRows live;
  const std::int32_t* targets;
  const float* temperatures;
  int M, V, num_blocks, num_row_tiles, num_units;
};

#if PRL_HOPPER

using namespace hopper;

/// Slots of operands.
struct Ring {
  unsigned char* shared;
  std::uint64_t *full, *empty;
  __device__ __forceinline__ explicit Ring(unsigned char* memory)
      : shared(memory), full(reinterpret_cast<std::uint64_t*>(memory + kBarriersAt)), empty(full + kSlots) {}
  /// By all threads of the block.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      if (shared_address(shared) % 1024 != 0) __trap();
      for (int i = 0; i < kSlots; ++i) {
        barrier_init(full + i, 1);
        barrier_init(empty + i, kWarps);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }
  /// By all threads of a warp: a slot's operands have been read.
  __device__ __forceinline__ void release(int slot) const { arrive_once_per_warp(empty + slot); }
};

/// One thread: the operands of a tile in order. copy(rows at, weights at, barrier, block).
template <typename Copy>
__device__ __forceinline__ void copy_tile(const Ring& ring, RingPlace<kSlots>& at, int num_blocks, const Copy& copy) {
  for (int block = 0; block < num_blocks; ++block, at.advance()) {
    unsigned char* slot = ring.shared + at.slot * kSlotBytes;
    barrier_wait(ring.empty + at.slot, at.phase ^ 1);
    barrier_arrive_expect(ring.full + at.slot, kSlotBytes);
    copy(slot, slot + kWeightsAt, ring.full + at.slot, block);
  }
}

/// A warpgroup's rows of tiles.
class Products {
 public:
  __device__ __forceinline__ explicit Products(const Ring& ring) : ring_(ring) {
    const int group = static_cast<int>(threadIdx.x) / kGroup;
    const std::uint32_t both = same_in_warp(shared_address(ring.shared) + static_cast<std::uint32_t>(group << 20));
    const std::uint32_t begin = both & 0xfffff, height = both >> 20;
    rows_ = along_rows(begin + height * (kGroupRows * kRowBytes));
    weights_ = along_rows(begin + kWeightsAt);
  }
  /// d: as `product` has it.
  __device__ __forceinline__ void form(float (&d)[kColumns / 2], int num_blocks) {
    pin(d);  // the first product does not add to it
    int before = 0;
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
      barrier_wait(ring_.full + at_.slot, at_.phase);
      const std::uint32_t step = static_cast<std::uint32_t>(at_.slot) * (kSlotBytes / 16);
      products_begin();
#pragma unroll
      for (int k = 0; k < kBlock / 16; ++k)
        product<0>(d, rows_ + (step + static_cast<std::uint32_t>(2 * k)), weights_ + (step + static_cast<std::uint32_t>(2 * k)),
                   k > 0 || block > 0);
      products_commit();
      if (block > 0) {
        products_wait<1>();
        ring_.release(before);
      }
      before = at_.slot;
      at_.advance();
    }
    products_wait<0>();
    pin(d);
    ring_.release(before);
  }

 private:
  const Ring& ring_;
  RingPlace<kSlots> at_;
  std::uint64_t rows_, weights_;
};

/// Weights on their way to memory: pieces of 16 rows, a warp's, one at a time.
class PieceStore {
 public:
  static constexpr int kWords = kPiece / 8;
  __device__ __forceinline__ explicit PieceStore(const Ring& ring)
      : room_(ring.shared + kPiecesAt + static_cast<int>(threadIdx.x) / kWarp * kPieceBytes) {
    const std::uint32_t lane = threadIdx.x % kWarp, row = lane % 16, column = lane / 16;  // of the matrices that it has the addresses of
    row_ = shared_address(room_) + row * kRowBytes;
    swizzled_ = (column ^ row % 8) * 16;
  }
  /// Of the rows from `first_row` on a lane has words[0], row lane / 4, and words[1], 8 further: columns 8 i + 2 (lane % 4) and the next.
  /// Rows that the map has not are left out.
  __device__ __forceinline__ void store(const CUtensorMap* map, const std::uint32_t (&words)[2][kWords], int first_row, int piece) const {
    if (threadIdx.x % kWarp == 0) stored_boxes_are_read();
    __syncwarp();
#pragma unroll
    for (std::uint32_t i = 0; i < kWords; i += 2)
      store_matrices(row_ + (swizzled_ ^ i * 16), words[0][i], words[1][i], words[0][i + 1], words[1][i + 1]);
    async_fence();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) store_box(room_, map, 0, first_row, piece);
  }
  /// Before a thread ends.
  __device__ __forceinline__ void finish() const {
    if (threadIdx.x % kWarp == 0) stored_boxes_are_written();
  }

 private:
  unsigned char* room_;
  std::uint32_t row_, swizzled_;
};

/// Where there is no column: low enough to weigh nothing, and a number.
constexpr float kNone = -1e30f;

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
__device__ __forceinline__ void copy_tiles(const Args& a, const Ring& ring) {
  RingPlace<kSlots> at;
  for_each_unit(a, [&](const Unit& u) {
    for (int tile = 0; tile < u.num_tiles; ++tile)
      copy_tile(ring, at, a.num_blocks, [&](unsigned char* rows, unsigned char* weights, std::uint64_t* full, int block) {
        copy_box(rows, &a.rows, full, 0, u.first_row, block);
        copy_box(weights, &a.weights, full, 0, u.first_column + tile * kColumns, block);
      });
  });
}

/// What a lane knows of one of its two rows of a unit.
struct LaneRow {
  int row;
  float temperature = 1.0f;
  int target = -1;  ///< from the first column of the unit on
  float reference = 0.0f;
  QuadChunk<true> quad;
  __device__ __forceinline__ LaneRow(const Args& a, const Unit& u, int row_) : row(row_) {
#pragma unroll
    for (auto& p : quad.pieces) p = {{-INFINITY, 0.0f}, 0.0f};
    if (row >= a.M) return;
    const std::int64_t t = a.live.of(row);
    temperature = a.temperatures[t];
    target = a.targets[t] - u.first_column;
    if (row < a.kept.rows) reference = a.kept.references[row];
  }
  /// A piece of logits, whose first column lies `first` from the unit's.
  __device__ __forceinline__ void scale(float (&x)[kPieceValues], const Args& a, int first, int num_columns) const {
    scale_piece(x, temperature);
    if (first + kPiece > num_columns) cut_piece(x, first, num_columns, kNone);
    if (target >= first && target < first + kPiece)
#pragma unroll
      for (int i = 0; i < kPieceValues; ++i)
        if (first + piece_column(i) == target) a.target_logits[row] = x[i];
  }
  /// Statistics of piece p of a tile, for the lane that QuadChunk reads them from: pieces 2 i and 2 i + 1 in lane i % 4.
  __device__ __forceinline__ void take(const ChunkStats& s, int tile, int p) {
    const bool is_mine = tile % QuadChunk<true>::kLanes == static_cast<int>(threadIdx.x) % QuadChunk<true>::kLanes;
    if (is_mine && tile < kPieces / 4) quad.pieces[p] = s;
    if (is_mine && tile >= kPieces / 4) quad.pieces[2 + p] = s;
  }
};

__device__ __forceinline__ void form_tiles(const Args& a, const Ring& ring) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int lane_row = static_cast<int>(threadIdx.x) / kWarp * kWarpRows + lane / 4;
  Products products(ring);
  const PieceStore store(ring);
  for_each_unit(a, [&](const Unit& u) {
    const int num_columns = min(kVocabChunk, a.V - u.first_column),
              warp_row = u.first_row + static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
    LaneRow mine[2] = {{a, u, u.first_row + lane_row}, {a, u, u.first_row + lane_row + 8}};
#pragma unroll 1
    for (int tile = 0; tile < u.num_tiles; ++tile) {
      float d[kColumns / 2];
      products.form(d, a.num_blocks);
#pragma unroll
      for (int p = 0; p < kColumns / kPiece; ++p) {
        const int first = tile * kColumns + p * kPiece;
        float x[2][kPieceValues];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int i = 0; i < kPieceValues; ++i) x[r][i] = d[4 * (p * (kPiece / 8) + i / 2) + 2 * r + i % 2];
          mine[r].scale(x[r], a, first, num_columns);
        }
        const ChunkStats s[2] = {piece_weights<true, false>(x[0]), piece_weights<true, false>(x[1])};
#pragma unroll
        for (int r = 0; r < 2; ++r) mine[r].take(s[r], tile, p);
        if (warp_row >= a.kept.rows) continue;
        std::uint32_t words[2][kPieceValues / 2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          clear_target(x[r], mine[r].target - first);
          pack_weights(words[r], x[r], weight_factor(s[r].max, mine[r].reference));
        }
        store.store(&a.kept_map, words, warp_row, (u.first_column + first) / kPiece);
      }
    }
#pragma unroll
    for (const LaneRow& r : mine) {
      const ChunkStats s = r.quad.stats();
      if (lane % 4 == 0 && r.row < a.M) a.stats[static_cast<std::int64_t>(u.first_column / kVocabChunk) * a.M + r.row] = s;
    }
  });
  store.finish();
}

#endif  // PRL_HOPPER

__global__ void __launch_bounds__(kThreads, 1) logit_stats_kernel(const __grid_constant__ Args a) {
#if PRL_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  if (threadIdx.x == 0) {
    prefetch_map(&a.rows);
    prefetch_map(&a.weights);
  }
  const Ring ring(shared);
  ring.init();
  if (threadIdx.x >= kGroups * kGroup) {
    registers_down<24>();
    if (threadIdx.x == kGroups * kGroup) copy_tiles(a, ring);
  } else {
    registers_up<160>();
    form_tiles(a, ring);
  }
#endif
}

}  // namespace

bool can_form_logit_stats(const OpContext& ctx, const Product& p) {
  return properties_of(ctx).major == 9 && p.M >= kMinRows && p.K % kBlock == 0 && p.in_dtype == DType::kBF16 && p.bias == nullptr &&
         has_librarys_bits(ctx, p) && is_aligned(p.a, 16) && p.a_stride % kVec == 0;
}

void logit_stats(const OpContext& ctx, ChunkStats* stats, float* target_logits, const Product& p, const SoftmaxRows<__nv_bfloat16>& kept,
                 const LiveRows& live, const std::int32_t* targets, const float* temperatures) {
  Args a{};
  a.rows = rows_map(p.a, p.M, p.K, p.a_stride, kRows, 1);
  a.weights = rows_map(p.b, p.N, p.K, p.b_stride, kColumns, 1);
  a.stats = stats;
  a.target_logits = target_logits;
  a.kept = kept;
  if (kept.rows > 0) a.kept_map = rows_map(kept.weights, kept.rows, kept.stride, kept.stride, kWarpRows, 1);
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
