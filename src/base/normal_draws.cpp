#include "base/normal_draws.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

// Box-Muller over arrays, in loops that compilers turn into vectors. Compiled without contraction, so that vectors of every width round as
// single numbers do.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PRL_FOR_WIDER_VECTORS __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define PRL_FOR_WIDER_VECTORS
#endif
#define PRL_INLINE inline __attribute__((always_inline))

namespace prl {
namespace {

// Adding this rounds a double of up to 51 bits to an integer, whose two's complement its lowest bits then are.
constexpr double kToInteger = 0x1.8p52;

/// ln(x) of x in [2^-53, 1], within an ulp: ln of the mantissa in [sqrt(1/2), sqrt(2)) by the series of 2 atanh(s), minimax coefficients of
/// Sun's fdlibm (e_log.c), and the exponent times ln 2 in two parts.
PRL_INLINE double log_of(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  // Biased so that mantissas at and above sqrt(2) count as half of themselves.
  const std::uint64_t shifted = bits + (0x3ff0000000000000ULL - 0x3fe6a09e667f3bcdULL);
  const double exponent = std::bit_cast<double>((shifted >> 52) | 0x4330000000000000ULL) - (0x1.0p52 + 1023.0);
  const double f = std::bit_cast<double>((shifted & 0x000fffffffffffffULL) + 0x3fe6a09e667f3bcdULL) - 1.0;
  const double s = f / (2.0 + f), z = s * s, w = z * z;
  const double even = w * (0x1.999999997fa04p-2 + w * (0x1.c71c51d8e78afp-3 + w * 0x1.39a09d078c69fp-3));
  const double odd = z * (0x1.5555555555593p-1 + w * (0x1.2492494229359p-2 + w * (0x1.7466496cb03dep-3 + w * 0x1.2f112df3e5244p-3)));
  const double half_square = 0.5 * f * f;
  return exponent * 0x1.62e42feep-1 - ((half_square - (s * (half_square + (even + odd)) + exponent * 0x1.a39ef35793c76p-33)) - f);
}

/// cos(2 pi v) of v in [0, 1), within two ulps where it is not near 0: the turn less whole quarters is exact; fdlibm's polynomials
/// (k_cos.c, k_sin.c) of the rest.
PRL_INLINE double cos_of_turn(double v) {
  const double turned = 4.0 * v + kToInteger;
  const auto quarter = std::bit_cast<std::uint64_t>(turned);
  const double x = (4.0 * v - (turned - kToInteger)) * 0x1.921fb54442d18p0, z = x * x;
  const double cosine_rest =
      0x1.555555555554cp-5 +
      z * (-0x1.6c16c16c15177p-10 +
           z * (0x1.a01a019cb159p-16 + z * (-0x1.27e4f809c52adp-22 + z * (0x1.1ee9ebdb4b1c4p-29 + z * -0x1.8fae9be8838d4p-37))));
  const double cosine = 1.0 - (0.5 * z - z * z * cosine_rest);
  const double sine_rest =
      -0x1.5555555555549p-3 +
      z * (0x1.111111110f8a6p-7 +
           z * (-0x1.a01a019c161d5p-13 + z * (0x1.71de357b1fe7dp-19 + z * (-0x1.ae5e68a2b9cebp-26 + z * 0x1.5d93a5acfd57cp-33))));
  const double sine = x + x * z * sine_rest;
  // cos, -sin, -cos, sin of the rest in the four quarters.
  const std::uint64_t odd = 0 - (quarter & 1), sign = ((quarter + 1) & 2) << 62;
  return std::bit_cast<double>(((std::bit_cast<std::uint64_t>(sine) & odd) | (std::bit_cast<std::uint64_t>(cosine) & ~odd)) ^ sign);
}

PRL_INLINE double unit_of(std::uint32_t high, std::uint32_t low) {
  const std::uint64_t bits = ((std::uint64_t{high} << 32) | low) >> 11;
  // The parts above and below bit 32 are exact in doubles, and so is their sum: AVX2 converts no 64-bit integers.
  const double upper = std::bit_cast<double>((bits >> 32) | 0x4330000000000000ULL) - 0x1.0p52;
  const double lower = std::bit_cast<double>((bits & 0xffffffffULL) | 0x4330000000000000ULL) - 0x1.0p52;
  return (upper * 0x1.0p32 + lower) * 0x1.0p-53;
}

PRL_INLINE double normal_of(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  return std::sqrt(-2.0 * log_of(1.0 - unit_of(a, b))) * cos_of_turn(unit_of(c, d));
}

constexpr std::size_t kAtOnce = 64;  // whole cache lines, and no overflow of the lower half of a counter below (a multiple of it)

/// Philox of kAtOnce counters from `block` on, each of which makes one value.
PRL_FOR_WIDER_VECTORS void normals_of(std::uint64_t block, std::uint64_t stream, std::uint64_t seed, float* values) {
  std::array<std::uint64_t, kAtOnce> c0, c1, c2, c3;  // 32 bits each; wide, so that products need no unpacking
  for (std::size_t i = 0; i < kAtOnce; ++i) {
    c0[i] = (block + i) & 0xffffffffULL;
    c1[i] = (block + i) >> 32;
    c2[i] = stream & 0xffffffffULL;
    c3[i] = stream >> 32;
  }
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < kAtOnce; ++i) {
      const std::uint64_t p0 = 0xD2511F53ULL * c0[i], p1 = 0xCD9E8D57ULL * c2[i];
      c0[i] = (p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = p1 & 0xffffffffULL;
      c2[i] = (p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = p0 & 0xffffffffULL;
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  for (std::size_t i = 0; i < kAtOnce; ++i)
    values[i] = static_cast<float>(normal_of(static_cast<std::uint32_t>(c0[i]), static_cast<std::uint32_t>(c1[i]),
                                             static_cast<std::uint32_t>(c2[i]), static_cast<std::uint32_t>(c3[i])));
}

}  // namespace

double Rng::next_normal() {
  const std::uint32_t a = next_u32(), b = next_u32(), c = next_u32(), d = next_u32();
  return normal_of(a, b, c, d);
}

void draw_normals(Rng& rng, std::span<float> values, float scale) {
  while (values.size() > kAtOnce / 4 && rng.position() % 4 == 0) {
    std::array<float, kAtOnce> drawn;
    normals_of(rng.position() / 4, rng.stream(), rng.seed(), drawn.data());
    const std::size_t count = std::min(values.size(), kAtOnce);
    for (std::size_t i = 0; i < count; ++i) values[i] = scale * drawn[i];
    rng.seek(rng.position() + 4 * count);
    values = values.subspan(count);
  }
  for (float& value : values) value = scale * static_cast<float>(rng.next_normal());
}

std::vector<float> normal_draws(Rng& rng, std::int64_t count, float scale) {
  std::vector<float> values(static_cast<std::size_t>(count));
  draw_normals(rng, values, scale);
  return values;
}

}  // namespace prl
