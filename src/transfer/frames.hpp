#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/block_exchange.hpp"
#include "transfer/socket.hpp"

/// What engines say to each other about blocks. Every frame is a head of 24 bytes (little-endian: u32 magic, u32 kind, u64 bytes of the
/// body, u64 checksum of the body), then the body.
///
///   giver                                taker
///   kHello    nonce                ->
///                                  <-    kProof    answer to the nonce, own nonce, layout
///   kWelcome  answer to that       ->              or kRefusal with the reason, and the end
///                                  <-    kAsk      identity, prompt, first block, how many
///   kBlocks   how many follow      ->
///   kBlock    its bytes, each      ->              the checksum is that of the bytes and its place: one in a wrong place is damaged
///                                  <-    kAsk ...
namespace prl::transfer {

enum class FrameKind : std::uint32_t { kHello = 1, kProof, kWelcome, kRefusal, kAsk, kBlocks, kBlock };

/// Of a body other than that of a block: 2^22 tokens are far below it.
inline constexpr std::size_t kMaxBodyBytes = std::size_t{32} << 20;
inline constexpr std::size_t kMaxTokens = std::size_t{1} << 22, kMaxImages = 4096, kMaxTextBytes = 4096;
inline constexpr std::size_t kNonceBytes = 32;

/// Blocks [first, first + max_blocks) of a prompt, as far as they are there.
struct Ask {
  engine::KvIdentity identity;
  engine::PromptKey prompt;
  std::int64_t first = 0, max_blocks = 0;
};
std::string encode(const Ask& ask);
/// Error{kCorrupt} naming what is wrong.
Ask decode_ask(std::string_view body);

/// Seeds of the checksums of blocks [first, first + count): what a block depends on, in numbers that mean the same to both sides.
std::vector<std::uint64_t> place_seeds(const Ask& ask, std::int64_t block_size, std::int64_t count);

/// `parts`, one behind the other, are the body.
void send_frame(Socket& socket, FrameKind kind, std::span<const std::span<const std::byte>> parts, std::uint64_t seed,
                Clock::time_point deadline);
void send_frame(Socket& socket, FrameKind kind, std::string_view body, Clock::time_point deadline);
/// The next frame, which must be of that kind; a refusal in its place is Error{kUnavailable} with its text. Error{kCorrupt}: another kind,
/// a longer body, a wrong checksum.
std::string receive_frame(Socket& socket, FrameKind kind, std::size_t max_bytes, Clock::time_point deadline);
/// The same of a body whose size is known, into `parts`.
void receive_into(Socket& socket, FrameKind kind, std::span<const std::span<std::byte>> parts, std::uint64_t seed,
                  Clock::time_point deadline);

/// A number in eight bytes.
std::string encode_number(std::uint64_t number);
/// Error{kCorrupt} unless it is eight bytes.
std::uint64_t decode_number(std::string_view body);

/// HMAC-SHA-256 (RFC 2104) in hex.
std::string keyed_hash(std::string_view key, std::string_view text);
/// In a time that does not tell where texts differ.
bool is_same(std::string_view a, std::string_view b) noexcept;
/// From the system's random numbers.
std::string make_nonce();

}  // namespace prl::transfer
