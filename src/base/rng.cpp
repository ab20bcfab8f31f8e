#include "base/rng.hpp"

#include <cmath>
#include <numbers>

namespace prl {

std::array<std::uint32_t, 4> Rng::philox(std::array<std::uint32_t, 4> c, std::array<std::uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53} * c[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(p0)};
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return c;
}

std::uint32_t Rng::next_u32() {
  const std::uint64_t block = position_ >> 2;
  const auto out = philox({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), static_cast<std::uint32_t>(stream_),
                           static_cast<std::uint32_t>(stream_ >> 32)},
                          {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
  return out[position_++ & 3];
}

std::uint64_t Rng::next_below(std::uint64_t bound) {
  const std::uint64_t limit = -bound % bound;  // 2^64 mod bound
  for (;;) {
    const std::uint64_t draw = next_u64();
    if (draw >= limit) return draw % bound;
  }
}

double Rng::next_normal() {
  const double u = 1.0 - next_double();
  const double v = next_double();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

std::uint64_t mix_seed(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  auto step = [](std::uint64_t x) {
    x += 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
  };
  return step(step(step(a) ^ b) ^ c);
}

}  // namespace prl
