#pragma once

#include "ops/cuda/few_rows_args.cuh"
#include "ops/cuda/hopper.cuh"

// Products of few rows with weights that are codes of 8 bits (ops/eight_bit.hpp). They come to shared memory as codes and are widened in the
// registers that products take their left operand from, each to the value that it stands for: so the bits are those of the product with
// the rounded weights.
//
// Codes of a matrix [N, K] lie as [K / 64][N / 8][8][4][4][4]: of 64 inputs and 8 outputs, for output, quarter q and step s the codes of
// inputs 16 s + 2 q + {8, 0, 9, 1}. So a lane of a product, which has output lane / 4 and quarter lane % 4, finds what it wants for four
// steps in 16 bytes.

namespace prl::ops::cuda {

constexpr int kCodesOfLane = 16, kCodesOfEight = 8 * kBlock;  ///< bytes

/// Where the 16 codes of quarter `q` of output n begin, for inputs [64 block, 64 block + 64).
__host__ __device__ constexpr std::int64_t codes_at(std::int64_t N, std::int64_t n, std::int64_t block, int q) {
  return (block * (N / 8) + n / 8) * kCodesOfEight + n % 8 * kBlock + q * kCodesOfLane;
}
/// The input, of a block's 64, whose code is byte `at` of the 16 of quarter q.
__host__ __device__ constexpr int input_of_code(int q, int at) { return at / 4 * 16 + 2 * q + (at % 2 == 0 ? 8 : 0) + at % 4 / 2; }
/// What codes whose bits were moved to those of a bfloat16 are multiplied by, as bits of a bfloat16: 2^(120 + n). Exponents of E4M3 have a
/// bias of 7, those of bfloat16 one of 127.
__host__ __device__ constexpr std::uint16_t code_factor(int n) { return static_cast<std::uint16_t>((247 + n) << 7); }

#if PRL_HOPPER

__device__ __forceinline__ std::uint32_t product_of_pairs(std::uint32_t x, std::uint32_t y) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const std::uint32_t*>(&product);
}
/// Two pairs of neighbouring inputs: of bytes 1 and 3, and of bytes 0 and 2.
__device__ __forceinline__ std::uint32_t high_pair(std::uint32_t codes, std::uint32_t factors) {
  return product_of_pairs((codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u), factors);
}
__device__ __forceinline__ std::uint32_t low_pair(std::uint32_t codes, std::uint32_t factors) {
  return product_of_pairs((codes << 8 & 0x80008000u) | (codes << 4 & 0x07f007f0u), factors);
}

/// The factors of a lane's two outputs, each twice: 16 warp + lane / 4 of the tile, and the eighth after it.
template <bool kSwiglu>
__device__ __forceinline__ void load_code_factors(const FewRowsArgs& a, std::uint32_t (&factors)[2]) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, own = a.columns / (kSwiglu ? 2 : 1);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int in_tile = (kSwiglu ? 8 * warp : 16 * warp + 8 * half) + thread % kWarp / 4, n = static_cast<int>(blockIdx.x) * own + in_tile;
    // Zero for outputs that the tile does not have: whatever codes are read for those stay finite.
    const std::uint32_t factor = in_tile < own && n < a.N ? __ldg(a.code_factors + n + (kSwiglu ? half * a.N : 0)) : 0;
    factors[half] = factor << 16 | factor;
  }
}

/// What a lane has of the left operand for the products of a block of K: values of its two outputs. `codes` are the lane's own.
__device__ __forceinline__ void widen_codes(std::uint32_t (&w)[kBlock / 4], const unsigned char* codes, const std::uint32_t (&factors)[2]) {
  const uint4 first = *reinterpret_cast<const uint4*>(codes), second = *reinterpret_cast<const uint4*>(codes + kCodesOfEight);
  const std::uint32_t of_step[kBlock / 16][2] = {{first.x, second.x}, {first.y, second.y}, {first.z, second.z}, {first.w, second.w}};
#pragma unroll
  for (int k = 0; k < kBlock / 16; ++k) {
    w[4 * k] = high_pair(of_step[k][0], factors[0]);
    w[4 * k + 1] = high_pair(of_step[k][1], factors[1]);
    w[4 * k + 2] = low_pair(of_step[k][0], factors[0]);
    w[4 * k + 3] = low_pair(of_step[k][1], factors[1]);
  }
}

/// compute_tile() for codes. While the products of a block of K are formed, the codes of the next are widened into other registers; the
/// products of that begin once the former have ended, for the assembler lets none run while registers that others read are written.
template <typename Tile, bool kNorm, bool kSwiglu>
__device__ __forceinline__ void compute_tile_of_codes(const FewRowsArgs& a, unsigned char* shared, std::uint64_t* full,
                                                      std::uint64_t* empty, float (&d)[Tile::kResults]) {
  using namespace hopper;
  constexpr int kBlocks = blocks_per_slot(Tile::kRows, true);
  static_assert(Tile::kGroups == 1 && kBlocks % 2 == 0);
  std::uint32_t factors[2];
  load_code_factors<kSwiglu>(a, factors);
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned char* const codes = shared + thread / kWarp * (2 * kCodesOfEight) + thread % kWarp * kCodesOfLane;
  const int block_bytes = a.columns * column_bytes(true);
  const std::uint64_t rows = along_rows(same_in_warp(shared_address(shared)) + static_cast<std::uint32_t>(a.rows_at));
  constexpr std::uint32_t kRowsBlock = Tile::kRows * kRowBytes / 16;
  const unsigned char* at_codes = codes;
  std::uint64_t at_rows = rows;
  std::uint32_t w[2][kBlock / 4];
  int slot = 0;
  std::uint32_t phase = 0;
  barrier_wait(full, 0);
  widen_codes(w[0], at_codes, factors);
  for (int step = 0; step < a.num_steps; ++step) {
    const int own_slot = slot;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      pin(w[b % 2]);
      products_begin();
#pragma unroll
      for (int k = 0; k < kBlock / 16; ++k) product<0>(d, w[b % 2] + 4 * k, at_rows + static_cast<std::uint32_t>(2 * k), 1);
      products_commit();
      at_codes += block_bytes;
      at_rows += kRowsBlock;
      if (b == kBlocks - 1) {
        if (++slot == a.slots) {
          slot = 0;
          phase ^= 1;
          at_codes = codes;
          if constexpr (!kNorm) at_rows = rows;
        }
        if (step + 1 < a.num_steps) barrier_wait(full + slot, phase);
      }
      widen_codes(w[(b + 1) % 2], at_codes, factors);  // after the last block, of whatever lies there, for nobody
      products_wait<0>();
    }
    if (step + a.slots < a.num_steps) arrive_once_per_warp(empty + own_slot);
  }
  pin(d);
}

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda
