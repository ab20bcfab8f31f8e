#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace prl::io {

/// Of a hash of pieces: XXH3 (64 bits) of the XXH3s of the pieces of kHashPiece bytes, each as 8 bytes, the lowest first. Pieces can be
/// hashed side by side, which a plain XXH3 of the whole does not allow.
inline constexpr std::size_t kHashPiece = std::size_t{16} << 20;

/// The hash of bytes that come one after the other. One thread.
class ChunkedHash {
 public:
  ChunkedHash();
  ~ChunkedHash();
  ChunkedHash(const ChunkedHash&) = delete;
  ChunkedHash& operator=(const ChunkedHash&) = delete;
  void update(std::span<const std::byte> bytes);
  std::uint64_t digest();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// XXH3 of the whole, with the character '0' in place of the `count` bytes from `begin` on.
std::uint64_t hash_with_zeros(std::span<const std::byte> bytes, std::size_t begin, std::size_t count);
/// The hash of pieces of bytes that are there, hashed by several threads, with the character '0' in place of the `count` bytes from `begin`
/// on.
std::uint64_t chunked_hash_with_zeros(std::span<const std::byte> bytes, std::size_t begin, std::size_t count);

}  // namespace prl::io
