#pragma once

#include <array>
#include <cstdint>

namespace prl {

/// Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011). The n-th draw of (seed, stream) is a pure function,
/// so a resumed or re-ordered run draws the same numbers. Copyable; the state is (key, counter).
class Rng {
 public:
  explicit Rng(std::uint64_t seed, std::uint64_t stream = 0) : seed_(seed), stream_(stream) {}
  std::uint32_t next_u32() {
    if (position_ >> 2 != block_) draw_block();
    return drawn_[position_++ & 3];
  }
  std::uint64_t next_u64() { return (static_cast<std::uint64_t>(next_u32()) << 32) | next_u32(); }
  /// Uniform in [0, 1) with 53 bits.
  double next_double() { return static_cast<double>(next_u64() >> 11) * 0x1.0p-53; }
  /// Uniform in [0, bound), bound > 0, by rejection, so without bias.
  std::uint64_t next_below(std::uint64_t bound);
  /// Standard normal (Box-Muller), of four 32-bit draws. normal_draws.hpp makes many of them faster.
  double next_normal();

  /// The number of 32-bit draws so far, and a jump to such a place; with the seed this is the whole state.
  std::uint64_t position() const { return position_; }
  void seek(std::uint64_t position) { position_ = position; }

  std::uint64_t seed() const { return seed_; }
  std::uint64_t stream() const { return stream_; }

  static std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

 private:
  std::uint64_t seed_;
  std::uint64_t stream_;
  std::uint64_t position_ = 0;
  void draw_block();
  std::array<std::uint32_t, 4> drawn_{};     ///< draws 4 * block_ and the three behind it
  std::uint64_t block_ = ~std::uint64_t{0};  ///< none yet: no position lies in this block
};

/// Mixes integers into one seed (splitmix64 steps); order matters.
std::uint64_t mix_seed(std::uint64_t a, std::uint64_t b, std::uint64_t c = 0);

}  // namespace prl
