#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PRL_HOST_AND_DEVICE __host__ __device__
#else
#define PRL_HOST_AND_DEVICE
#endif

// Weights of 8 bits: E4M3 numbers (sign, 4 bits of exponent with bias 7, 3 of mantissa) times a power of two for each output row. The
// subnormal numbers of E4M3 are not used, so what is left is 2^-6 to 448, of both signs, and zero. Since the factor is a power of two, a
// value is exact in bfloat16 and float32, and a matrix whose values are such comes to itself again. A row with what is no finite number
// becomes NaN, so that a matrix that has gone wrong is seen as one of 16 bits is.

namespace prl::ops {

/// Of rows with larger magnitudes than 448 * 2^kMaxEightBitExponent that value is the largest; smaller rows than 2^kMin... become zero.
inline constexpr int kMaxEightBitExponent = 7, kMinEightBitExponent = -100;

/// Instead of the exponent of a row with what is no finite number.
inline constexpr int kNoNumberExponent = 128;
/// The code of NaN.
inline constexpr std::uint8_t kNoNumberCode = 0x7f;

/// The smallest n with `greatest` <= 448 * 2^n, at most `most`; kNoNumberExponent if that magnitude is infinite or NaN.
PRL_HOST_AND_DEVICE constexpr int eight_bit_exponent(float greatest, int most = kMaxEightBitExponent) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, greatest);
  if (bits >= 0x7f800000u) return kNoNumberExponent;
  const int exponent = static_cast<int>(bits >> 23) - 127;  // greatest = 1.mantissa * 2^exponent; 448 = 1.75 * 2^8
  const int n = exponent - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return n > most ? most : n < kMinEightBitExponent ? kMinEightBitExponent : n;
}

/// The code of the number nearest to w * 2^-n, ties to even; below 2^-7 zero, and below 2^-6 that. With kNoNumberExponent, and of NaN, the
/// code of NaN.
PRL_HOST_AND_DEVICE constexpr std::uint8_t eight_bit_code(float w, int n) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, w);
  const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80u);
  const std::uint32_t magnitude = bits & 0x7fffffffu, rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
  if (n == kNoNumberExponent || magnitude > 0x7f800000u) return kNoNumberCode;
  const int least = static_cast<int>(magnitude >> 23) - 120 - n,
            exponent = static_cast<int>(rounded >> 23) - 120 - n;  // as E4M3 stores them
  if (least < 0) return sign;
  if (least == 0) return sign | 0x08;
  if (exponent > 15 || (exponent == 15 && (rounded >> 20 & 7u) == 7u)) return sign | 0x7e;
  return static_cast<std::uint8_t>(sign | exponent << 3 | (rounded >> 20 & 7u));
}

/// code * 2^n.
PRL_HOST_AND_DEVICE constexpr float eight_bit_value(std::uint8_t code, int n) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24, rest = code & 0x7fu;
  if (rest == 0) return __builtin_bit_cast(float, sign);
  if (rest == kNoNumberCode) return __builtin_bit_cast(float, 0x7fc00000u);
  return __builtin_bit_cast(float, sign | (static_cast<std::uint32_t>(static_cast<int>(rest >> 3) + 120 + n) << 23) | (rest & 7u) << 20);
}

/// w as its row with exponent n holds it.
PRL_HOST_AND_DEVICE constexpr float eight_bit_rounded(float w, int n) noexcept { return eight_bit_value(eight_bit_code(w, n), n); }

// Inputs of products of two 8-bit numbers: all numbers of E4M3, the subnormal ones (below 2^-6, multiples of 2^-9) too, times a power of
// two for each row. Exact in bfloat16 and float32 as well. A row with what is no finite number becomes NaN.

/// As kMaxEightBitExponent, of rows of inputs: 448 times that is a finite number.
inline constexpr int kMaxInputExponent = 118;

/// 2^n.
PRL_HOST_AND_DEVICE constexpr float power_of_two(int n) noexcept {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(n + 127) << 23);
}
/// The number of E4M3 nearest to x, ties to even; beyond 448 that.
PRL_HOST_AND_DEVICE constexpr float nearest_eight_bit(float x) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t sign = bits & 0x80000000u, magnitude = bits & 0x7fffffffu;
  constexpr float kSteps = 0x1.8p14f;  // between it and its neighbours lie 2^-9
  const float small = __builtin_bit_cast(float, magnitude) + kSteps - kSteps;
  const std::uint32_t large = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) & 0xfff00000u;
  const std::uint32_t rounded = magnitude < 0x3c800000u ? __builtin_bit_cast(std::uint32_t, small)
                                : large > 0x43e00000u   ? 0x43e00000u
                                                        : large;
  return __builtin_bit_cast(float, sign | rounded);
}

/// Bytes of what a GPU keeps beside the values of a matrix that is multiplied with in 8 bits: codes and a factor for each row; 0 for shapes
/// that its kernels do not take.
constexpr std::int64_t eight_bit_product_bytes(std::int64_t N, std::int64_t K) noexcept {
  return N % 16 == 0 && K % 16 == 0 ? N * (K + 4) : 0;
}

/// Of matrices [N, K] with fewer outputs, or with so many and more inputs than that, no kernel of a GPU reads codes: a step along K takes
/// 0.2 us on an H200 until they are widened and multiplied with, in which weights of 16 bits for some 3,600 outputs are read.
inline constexpr std::int64_t kMinOutputsOfCodes = 4096;
/// What a GPU may keep beside the values of a matrix: its codes, and a factor of two bytes for each row, for kernels that take such shapes.
constexpr std::int64_t eight_bit_code_bytes(std::int64_t N, std::int64_t K) noexcept {
  const bool gains = N > kMinOutputsOfCodes || (N == kMinOutputsOfCodes && K <= kMinOutputsOfCodes);
  return gains && N % 16 == 0 && K % 64 == 0 ? N * (K + 2) : 0;
}

}  // namespace prl::ops
