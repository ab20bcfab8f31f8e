#pragma once

#include "ops/cuda/chain.cuh"
#include "ops/cuda/few_rows_args.cuh"
#include "ops/cuda/hopper.cuh"

// Products of few rows of which both sides are codes of 8 bits, with a factor for each row of either (Product::a_factors). They are copied
// as numbers of 16 bits are, two in the place of one, and multiplied as they are. The sums of tensor cores over codes keep fewer bits than
// fp32: so of 128 inputs, a block, and those are summed in fp32, as the library does without fast accumulation.

namespace prl::ops::cuda {

#if PRL_HOPPER

/// The sum over K, in order, without factors. While the sum of one block is added, that of the next is formed.
template <typename Tile>
__device__ __forceinline__ void sum_codes(const FewRowsArgs& a, unsigned char* shared, std::uint64_t* full, std::uint64_t* empty,
                                          float (&d)[Tile::kResults]) {
  using namespace hopper;
  constexpr int kBlocks = Tile::kBlocks, kStepsOfBlock = kRowBytes / 32;
  static_assert(kBlocks % 2 == 0);
  const std::uint32_t begin = same_in_warp(shared_address(shared)),
                      group = Tile::kGroups == 1 ? 0 : same_in_warp(threadIdx.x / static_cast<unsigned>(kGroup));
  const std::uint64_t weights = along_rows(begin),
                      rows = along_rows(begin + static_cast<std::uint32_t>(a.rows_at) + group * (Tile::kEach * kRowBytes));
  const auto weights_block = static_cast<std::uint32_t>(a.columns * kRowBytes / 16);
  constexpr std::uint32_t kRowsBlock = Tile::kRows * kRowBytes / 16;
  std::uint64_t at_weights = weights, at_rows = rows;
  float even[Tile::kResults], odd[Tile::kResults];
  const auto form = [&](float(&sum)[Tile::kResults]) {
    pin(sum);
    products_begin();
#pragma unroll
    for (int k = 0; k < kStepsOfBlock; ++k) {
      const std::uint64_t w = at_weights + static_cast<std::uint32_t>(2 * k), r = at_rows + static_cast<std::uint32_t>(2 * k);
      Tile::kHasRowsLeft ? product_of_codes(sum, r, w, k) : product_of_codes(sum, w, r, k);
    }
    products_commit();
    at_weights += weights_block;
    at_rows += kRowsBlock;
  };
  const auto add = [&](float(&sum)[Tile::kResults]) {
    pin(sum);
#pragma unroll
    for (int i = 0; i < Tile::kResults; ++i) d[i] += sum[i];
  };
  int slot = 0;
  std::uint32_t phase = 0;
  for (int step = 0; step < a.num_steps; ++step) {
    barrier_wait(full + slot, phase);
#pragma unroll
    for (int b = 0; b < kBlocks; b += 2) {
      form(even);
      if (b > 0) {
        products_wait<1>();
        add(odd);
      }
      form(odd);
      products_wait<1>();
      add(even);
    }
    products_wait<0>();
    add(odd);
    if (step + a.slots < a.num_steps) arrive_once_per_warp(empty + slot);
    if (++slot == a.slots) {
      slot = 0;
      phase ^= 1;
      at_weights = weights;
      at_rows = rows;
    }
  }
}

/// The factors of a lane's results, which lie as LanePairs says: those of rows and of columns, each of which several results share.
template <typename Tile, bool kSwiglu, bool kOfExperts>
struct ScalesOfThread {
  static constexpr int kPieces = Tile::kResults / 4;
  static constexpr int kAcross = 2 * kPieces;  ///< of the side whose pieces of 8 lie in registers one after the other
  float across[kAcross], down[2];

  /// Waits for earlier kernels, which make the factors of rows.
  __device__ __forceinline__ ScalesOfThread(const FewRowsArgs& a, const RowsOfBlock<kOfExperts>& of_block) {
    const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % kWarp, first = thread / kWarp * 16;
    const float* column_scales = a.column_scales;
    if constexpr (kOfExperts) column_scales += of_block.first_weight;
    const auto of_columns = [&](auto& to, int count, auto&& column) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int c = column(i), own = a.columns / (kSwiglu ? 2 : 1);
        const int n = static_cast<int>(blockIdx.x) * own + (kSwiglu ? c / 16 * 8 + c % 8 : c);
        const bool is_up = kSwiglu && c / 8 % 2 != 0;
        to[i] = c < a.columns && n < a.N ? __ldg(column_scales + n + (is_up ? a.N : 0)) : 0.0f;
      }
    };
    const auto of_rows = [&](auto& to, int count, auto&& row) {
      const int top = rows_begin<Tile::kRows>(of_block) + static_cast<int>(threadIdx.x) / kGroup * Tile::kEach;
#pragma unroll
      for (int i = 0; i < count; ++i) to[i] = top + row(i) < rows_end(a, of_block) ? __ldcg(a.row_scales + top + row(i)) : 0.0f;
    };
    const auto at_across = [&](int i) { return i / 2 * 8 + 2 * (lane % 4) + i % 2; };
    const auto at_down = [&](int i) { return first + lane / 4 + 8 * i; };
    if constexpr (Tile::kHasRowsLeft) {
      of_columns(across, kAcross, at_across);
      wait_for_previous();
      of_rows(down, 2, at_down);
    } else {
      of_columns(down, 2, at_down);
      wait_for_previous();
      of_rows(across, kAcross, at_across);
    }
  }
  __device__ __forceinline__ void apply(float (&d)[Tile::kResults]) const {
#pragma unroll
    for (int i = 0; i < Tile::kResults; ++i) d[i] = d[i] * across[i / 4 * 2 + i % 2] * down[i % 4 / 2];
  }
};

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda
