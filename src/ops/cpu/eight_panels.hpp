#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/eight_bit.hpp"
#include "tensor/dtype.hpp"

// Panels of 8-bit codes (ops/eight_bit.hpp) on CPUs: the factor of each column as fp32, 2^(120 + n) or NaN, then the codes in the order in
// which the kind's panels of wider types hold their values.

namespace prl::ops::cpu {

inline constexpr std::int64_t kCodesAtOnce = 64;

/// What is left of a source's value in the compute dtype.
template <typename Compute, typename In>
inline float eight_bit_input(In x) {
  float wide;
  if constexpr (sizeof(In) == 2)
    wide = to_f32(x);
  else
    wide = x;
  return sizeof(Compute) == 2 && sizeof(In) == 4 ? to_f32(to_bf16(wide)) : wide;
}

/// Fills a panel of `columns` columns and depth k from rows source[j * stride + p], of which `cols` are there. `place(p, j)` is where a
/// code goes behind the factors.
template <typename Compute, typename In, typename Place>
void pack_codes(void* out, const In* source, std::int64_t stride, int cols, int columns, std::int64_t k, const Place& place) {
  float* const factors = static_cast<float*>(out);
  auto* const codes = reinterpret_cast<std::uint8_t*>(factors + columns);
  for (int j = 0; j < columns; ++j) {
    factors[j] = 0.0f;
    if (j >= cols) continue;
    const In* const row = source + j * stride;
    std::uint32_t greatest = 0;  // as bits: those of NaN are greater than all others
    for (std::int64_t p = 0; p < k; ++p)
      greatest = std::max(greatest, std::bit_cast<std::uint32_t>(eight_bit_input<Compute>(row[p])) & 0x7fffffffu);
    const int n = eight_bit_exponent(std::bit_cast<float>(greatest));
    factors[j] = n == kNoNumberExponent ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, 120 + n);
    for (std::int64_t first = 0; first < k; first += kCodesAtOnce) {
      const std::int64_t count = std::min(kCodesAtOnce, k - first);
      std::uint8_t piece[kCodesAtOnce];
      for (std::int64_t i = 0; i < count; ++i) piece[i] = eight_bit_code(eight_bit_input<Compute>(row[first + i]), n);
      for (std::int64_t i = 0; i < count; ++i) codes[place(first + i, j)] = piece[i];
    }
  }
}

inline int exponent_of_factor(float factor) {
  if (std::isnan(factor)) return kNoNumberExponent;
  return factor == 0.0f ? 0 : std::ilogb(factor) - 120;
}

}  // namespace prl::ops::cpu
