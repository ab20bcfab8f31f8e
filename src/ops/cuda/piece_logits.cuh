#pragma once

#include <algorithm>

#include "ops/cuda/blas.hpp"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/log_softmax.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {

/// Where a draw finds a piece's logits: in memory.
struct StoredLogits {
  static constexpr bool kIsProduct = false;
  const float* logits;
  std::int64_t stride, V;
  __device__ void begin() const {}
  /// Of row b, before they are scaled, by all threads of a block; -inf beyond the vocabulary.
  __device__ void load(float (&x)[kPiece], std::int64_t b, int piece) const {
    const std::int64_t i = static_cast<std::int64_t>(piece) * kPiece + threadIdx.x;
    if (threadIdx.x < kPiece) x[threadIdx.x] = i < V ? logits[b * stride + i] : -INFINITY;
    __syncthreads();
  }
};

/// Nowhere: they are formed again, with the bits they have in any product of this head. A warpgroup computes 64 columns of eight rows, of
/// which the first is wanted.
struct FormedLogits {
  static constexpr bool kIsProduct = true;
  static constexpr int kThreads = 4 * kWarp;  ///< of a block, which has at least as many
  static constexpr int kSlotBlocks = 4, kRows = 8, kMaxSlots = 5, kRowBytes = 128;
  static constexpr int kSlotBytes = kSlotBlocks * (kPiece + kRows) * kRowBytes;
  CUtensorMap weights;  ///< [K / 64][V][64], box [kSlotBlocks][kPiece][64]
  CUtensorMap rows;     ///< [K / 64][M][64], box [kSlotBlocks][kRows][64]
  std::int64_t V;
  int num_steps, slots;

#if PRL_HOPPER
  static __device__ unsigned char* ring() {
    extern __shared__ __align__(1024) unsigned char formed_logits_ring[];
    return formed_logits_ring;
  }
  static __device__ std::uint64_t* full() {
    __shared__ std::uint64_t barriers[kMaxSlots];
    return barriers;
  }
  __device__ void begin() const {
    if (threadIdx.x == 0) {
      if (hopper::shared_address(ring()) % 1024 != 0) __trap();
      hopper::prefetch_map(&weights);
      hopper::prefetch_map(&rows);
      for (int i = 0; i < slots; ++i) hopper::barrier_init(full() + i, 1);
      hopper::barrier_init_fence();
    }
    __syncthreads();
  }
  __device__ void load(float (&x)[kPiece], std::int64_t b, int piece) const {
    using namespace hopper;
    if (threadIdx.x < kThreads) {
      const auto copy = [&](int step) {
        const int slot = step % slots;
        unsigned char* to = ring() + slot * kSlotBytes;
        barrier_arrive_expect(full() + slot, kSlotBytes);
        copy_box(to, &weights, full() + slot, 0, piece * kPiece, step * kSlotBlocks);
        copy_box(to + kSlotBlocks * kPiece * kRowBytes, &rows, full() + slot, 0, static_cast<int>(b), step * kSlotBlocks);
      };
      if (threadIdx.x == 0) {
        for (int step = 0; step < min(slots, num_steps); ++step) copy(step);
      }
      const std::uint32_t begin = same_in_warp(shared_address(ring()));
      float d[4] = {};
      pin(d);
      for (int step = 0; step < num_steps; ++step) {
        const int slot = step % slots;
        const std::uint32_t at = begin + static_cast<std::uint32_t>(slot * kSlotBytes);
        barrier_wait(full() + slot, static_cast<std::uint32_t>(step / slots % 2));
        products_begin();
#pragma unroll
        for (int k = 0; k < kSlotBlocks * 4; ++k)
          product<0>(d, along_rows(at + static_cast<std::uint32_t>(k / 4 * kPiece * kRowBytes + k % 4 * 32)),
                     along_rows(at + static_cast<std::uint32_t>((kSlotBlocks * kPiece + k / 4 * kRows) * kRowBytes + k % 4 * 32)), 1);
        products_commit();
        products_wait<0>();
        if (step + slots >= num_steps) continue;
        named_sync<kThreads>(1);
        if (threadIdx.x == 0) copy(step + slots);
      }
      pin(d);
      // d[0] and d[2] of every fourth lane are the first row's.
      const int lane = static_cast<int>(threadIdx.x) % kWarp, column = static_cast<int>(threadIdx.x) / kWarp * 16 + lane / 4;
      if (lane % 4 == 0) {
        const std::int64_t first = static_cast<std::int64_t>(piece) * kPiece;
        x[column] = first + column < V ? d[0] : -INFINITY;
        x[column + 8] = first + column + 8 < V ? d[2] : -INFINITY;
      }
    }
    __syncthreads();
  }
#else
  __device__ void begin() const {}
  __device__ void load(float (&)[kPiece], std::int64_t, int) const {}
#endif
  std::size_t shared_bytes() const { return static_cast<std::size_t>(slots) * kSlotBytes; }

  /// Of the head's product p, as can_form_head takes it.
  static FormedLogits of(const Product& p) {
    FormedLogits logits{};
    logits.weights = rows_map(p.b, p.N, p.K, p.b_stride, kPiece, kSlotBlocks);
    logits.rows = rows_map(p.a, p.M, p.K, p.a_stride, kRows, kSlotBlocks);
    logits.V = p.N;
    logits.num_steps = static_cast<int>(ceil_div(p.K, kSlotBlocks * 64));
    logits.slots = std::min(logits.num_steps, kMaxSlots);
    return logits;
  }
};

}  // namespace prl::ops::cuda
