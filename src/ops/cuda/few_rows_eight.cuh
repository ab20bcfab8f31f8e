#pragma once

#include "ops/cuda/few_rows_args.cuh"
#include "ops/cuda/hopper.cuh"
#include "ops/eight_bit.hpp"

// Products of few rows with weights that are codes of 8 bits (ops/eight_bit.hpp). They come to shared memory as codes; a warpgroup widens
// them, each to the value that it stands for, into the slots where weights of 16 bits would have been copied to. So the rest is the same
// kernel, and the bits are those of the product with the rounded weights.
//
// Codes of a matrix [N, K] lie as [K / 64][N][64]: of 64 inputs and one output 64 bytes, in which those of each four neighbours are in the
// order 2, 0, 3, 1. So two pairs of neighbours come out of a word by shifts and masks.

namespace prl::ops::cuda {

constexpr int kCodesOfThread = 16;  ///< that it widens together
/// Threads that widen the codes of a step, and how many such groups take turns: what one waits for, another hides.
constexpr int kWidening = 4 * kWarp, kWideners = 2;

/// Where the 16 codes of output n for inputs [64 block + 16 i, ...) begin.
__host__ __device__ constexpr std::int64_t codes_at(std::int64_t N, std::int64_t n, std::int64_t block, int i) {
  return (block * N + n) * kBlock + i * kCodesOfThread;
}
/// The input, of a thread's 16, whose code is byte `at` of them.
__host__ __device__ constexpr int input_of_code(int at) { return at / 4 * 4 + (at % 2 == 0 ? 2 : 0) + at % 4 / 2; }
/// What codes whose bits were moved to those of a bfloat16 are multiplied by, as bits of a bfloat16: 2^(120 + n). Exponents of E4M3 have a
/// bias of 7, those of bfloat16 one of 127.
__host__ __device__ constexpr std::uint16_t code_factor(int n) {
  return n == kNoNumberExponent ? std::uint16_t{0x7fc0} : static_cast<std::uint16_t>((247 + n) << 7);
}

#if PRL_HOPPER

__device__ __forceinline__ std::uint32_t product_of_pairs(std::uint32_t x, std::uint32_t y) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const std::uint32_t*>(&product);
}
/// The values of a word's codes: of bytes 1 and 3, then of bytes 0 and 2.
__device__ __forceinline__ uint2 widened(std::uint32_t codes, std::uint32_t factors) {
  return {product_of_pairs((codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u), factors),
          product_of_pairs((codes << 8 & 0x80008000u) | (codes << 4 & 0x07f007f0u), factors)};
}

/// `of_codes`: barriers of full slots of codes, then of empty ones.
__device__ __forceinline__ void init_code_barriers(const FewRowsArgs& a, std::uint64_t* of_codes) {
  for (int i = 0; i < a.code_slots; ++i) {
    hopper::barrier_init(of_codes + i, 1);
    hopper::barrier_init(of_codes + a.code_slots + i, kWidening / kWarp);
  }
}

/// By one thread. With a norm a block begins long before its result is needed, and keeps few copies in flight as copy_steps() does.
template <typename Tile, bool kNorm, bool kSwiglu>
__device__ __forceinline__ void copy_codes(const FewRowsArgs& a, unsigned char* codes, std::uint64_t* of_codes) {
  using namespace hopper;
  constexpr int kPaced = 4;
  const int bytes = Tile::kBlocks * a.columns * kBlock, column = static_cast<int>(blockIdx.x) * a.columns;
  const CachePolicy once = read_once();
  int slot = 0;
  std::uint32_t phase = 1;
  for (int step = 0; step < a.num_steps; ++step) {
    if (step >= a.code_slots) barrier_wait(of_codes + a.code_slots + slot, phase);
    // With no more slots than that the wait above does it, and this one could be for a copy that has not begun.
    if (kNorm && a.code_slots > kPaced && step >= kPaced && step - kPaced < a.code_slots) barrier_wait(of_codes + step - kPaced, 0);
    barrier_arrive_expect(of_codes + slot, static_cast<std::uint32_t>(bytes));
    if constexpr (kSwiglu)
      copy_box(codes + slot * bytes, &a.weights, of_codes + slot, once, 0, 0, 0, column / 16, step * Tile::kBlocks);
    else
      copy_box(codes + slot * bytes, &a.weights, of_codes + slot, once, 0, column / 8, step * Tile::kBlocks);
    if (++slot == a.code_slots) {
      slot = 0;
      phase ^= 1;
    }
  }
}

/// Of two columns of the tile that a thread widens codes of, `thread` / 4 and the one 32 further: the factor, twice, or zeros for columns
/// that the tile does not have.
template <bool kSwiglu>
__device__ __forceinline__ void load_code_factors(const FewRowsArgs& a, int thread, std::uint32_t (&factors)[2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int column = thread / 4 + 32 * j, own = a.columns / (kSwiglu ? 2 : 1);
    const int n = static_cast<int>(blockIdx.x) * own + (kSwiglu ? column / 16 * 8 + column % 8 : column);
    const bool is_up = kSwiglu && column / 8 % 2 != 0;
    const std::uint32_t factor = column < a.columns && n < a.N ? __ldg(a.code_factors + n + (is_up ? a.N : 0)) : 0;
    factors[j] = factor << 16 | factor;
  }
}

/// By kWideners groups of kWidening threads: codes become weights as the copy engine would have written them.
template <typename Tile, bool kSwiglu>
__device__ __forceinline__ void widen_steps(const FewRowsArgs& a, int thread, unsigned char* shared, std::uint64_t* full,
                                            std::uint64_t* empty, std::uint64_t* of_codes) {
  using namespace hopper;
  constexpr int kBlocks = Tile::kBlocks;
  const int group = thread / kWidening;
  thread %= kWidening;
  std::uint32_t factors[2];
  load_code_factors<kSwiglu>(a, thread, factors);
  const int column = thread / 4, i = thread % 4;  // columns 32 apart lie alike among their eights
  const int first_place = column * kRowBytes + (2 * i ^ column % 8) * 16,
            second_place = column * kRowBytes + ((2 * i + 1) ^ column % 8) * 16;
  const unsigned char* const codes = shared + a.codes_at + thread * kCodesOfThread;
  const int code_block = a.columns * kBlock, weight_block = a.columns * kRowBytes;
  // Of either kind there are at least as many slots as groups, but where there is one step.
  int slot = group, code_slot = group;
  std::uint32_t phase = 1, code_phase = 0;
  for (int step = group; step < a.num_steps; step += kWideners) {
    barrier_wait(of_codes + code_slot, code_phase);
    uint4 given[kBlocks][2];
    const unsigned char* from = codes + code_slot * kBlocks * code_block;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (column + 32 * j < a.columns) given[b][j] = *reinterpret_cast<const uint4*>(from + b * code_block + j * 32 * kBlock);
    if (step >= a.slots) barrier_wait(empty + slot, phase);
    unsigned char* const to = shared + slot * kBlocks * weight_block;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (column + 32 * j >= a.columns) continue;
        const uint2 x = widened(given[b][j].x, factors[j]), y = widened(given[b][j].y, factors[j]), z = widened(given[b][j].z, factors[j]),
                    w = widened(given[b][j].w, factors[j]);
        unsigned char* const place = to + b * weight_block + j * 32 * kRowBytes;
        *reinterpret_cast<uint4*>(place + first_place) = {x.x, x.y, y.x, y.y};
        *reinterpret_cast<uint4*>(place + second_place) = {z.x, z.y, w.x, w.y};
      }
    async_fence();
    arrive_once_per_warp(full + slot);
    arrive_once_per_warp(of_codes + a.code_slots + code_slot);
    if ((slot += kWideners) >= a.slots) {
      slot -= a.slots;
      phase ^= 1;
    }
    if ((code_slot += kWideners) >= a.code_slots) {
      code_slot -= a.code_slots;
      code_phase ^= 1;
    }
  }
}

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda
