#pragma once

#include <cstdint>
#include <span>

#include "ops/linear.hpp"

namespace prl::ops {

/// Rows [first_row, first_row + num_rows) of a packed matrix, or of a contiguous tensor (kF32 or kBF16) seen as a matrix.
struct HashedRows {
  const LinearWeight* packed = nullptr;  ///< this, or `plain`
  ConstTensorView plain = {};
  std::int64_t first_row = 0, num_rows = 0, num_cols = 0;
  std::int64_t first_number = 0;  ///< of the first row, where these are a part of a tensor's rows
};

/// One step of splitmix64 (Steele et al. 2014) of word `index` of a tensor.
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr std::uint64_t
    hash_word(std::uint64_t word, std::uint64_t index) {
  std::uint64_t x = word + (index + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// A 64-bit hash of the values of each item, as `as` (kF32 or kBF16) holds them; fp32 values must be exact in it.
///
/// A row is its elements' bytes, little-endian, cut into words of 8 bytes, the last one filled up with zeros. With W words a row, the
/// hash is the sum of hash_word(word k of row r, r * W + k) modulo 2^64: the same on every device, in any order of addition. Rows are
/// numbered from `first_number`, so that the hashes of a tensor's parts add up to its own.
void hash_rows(OpContext& ctx, std::span<std::uint64_t> out, std::span<const HashedRows> items, DType as);

}  // namespace prl::ops
