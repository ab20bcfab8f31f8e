#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace prl {

enum class DType : std::uint8_t { kF32, kBF16, kF16, kI32, kI64, kU8 };

std::size_t size_of(DType dtype) noexcept;
/// "F32", "BF16", ... as safetensors spells them.
std::string_view to_string(DType dtype) noexcept;

/// bfloat16: the upper half of an fp32.
struct BFloat16 {
  std::uint16_t bits = 0;
};
inline float to_f32(BFloat16 v) noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(v.bits) << 16); }
/// Rounds to nearest, ties to even; NaN stays a quiet NaN.
inline BFloat16 to_bf16(float v) noexcept {
  const auto u = std::bit_cast<std::uint32_t>(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

}  // namespace prl
