#include "base/rng.hpp"

namespace prl {

std::array<std::uint32_t, 4> Rng::philox(std::array<std::uint32_t, 4> c, std::array<std::uint32_t, 2> k) {
  // Single numbers stay in registers, where an array goes through memory in each round.
  std::uint32_t c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3], k0 = k[0], k1 = k[1];
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {c0, c1, c2, c3};
}

void Rng::draw_block() {
  block_ = position_ >> 2;
  drawn_ = philox({static_cast<std::uint32_t>(block_), static_cast<std::uint32_t>(block_ >> 32), static_cast<std::uint32_t>(stream_),
                   static_cast<std::uint32_t>(stream_ >> 32)},
                  {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
}

std::uint64_t Rng::next_below(std::uint64_t bound) {
  const std::uint64_t limit = -bound % bound;  // 2^64 mod bound
  for (;;) {
    const std::uint64_t draw = next_u64();
    if (draw >= limit) return draw % bound;
  }
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
