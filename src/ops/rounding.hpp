#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PRL_ROUNDING __host__ __device__ inline
#else
#define PRL_ROUNDING inline
#endif

namespace prl::ops {

// Stochastic rounding of fp32 to bf16: up with the probability of the part that is cut off, so that sums of many small changes keep
// their mean. A second moment needs it: with beta2 = 0.999 it changes by a thousandth per step, and rounding to nearest in steps of a
// 256th would never let it fall. The noise is a hash of the step and of what the element holds, of nothing else: it does not depend on
// where the element lies, on the pieces in which a step is made, on threads or devices, and a resumed run draws the same.

/// Wellons' "lowbias32".
PRL_ROUNDING std::uint32_t mix_bits(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}

/// The bits of a float as a bf16, in the upper half. `salt` differs from step to step and among the values of one element, `other` is
/// the bits of another value of the element, so that equal values do not all go the same way.
PRL_ROUNDING std::uint32_t round_stochastic(std::uint32_t bits, std::uint32_t other, std::uint32_t salt) {
  if ((bits & 0x7f800000U) == 0x7f800000U) return bits & 0xffff0000U;  // infinities; a NaN of this arithmetic is quiet
  return (bits + (mix_bits(mix_bits(bits ^ salt) ^ other) & 0xffffU)) & 0xffff0000U;
}

/// Salts of a step's two moments.
PRL_ROUNDING std::uint32_t first_salt(std::int64_t step) { return mix_bits(2 * static_cast<std::uint32_t>(step)); }
PRL_ROUNDING std::uint32_t second_salt(std::int64_t step) { return mix_bits(2 * static_cast<std::uint32_t>(step) + 1); }

}  // namespace prl::ops

#undef PRL_ROUNDING
