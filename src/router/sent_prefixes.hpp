#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace prl::router {

/// Hashes of a prompt's beginnings, each kPrefixBytes longer than the one before: equal hashes mean equal text up to there. The end of the
/// prompt that fills no such part is left out, unless it is all that there is.
using PrefixHashes = std::vector<std::uint64_t>;
inline constexpr std::size_t kPrefixBytes = 64;  ///< or a quarter as many token ids: a block of an engine's cache

/// `space` separates prompts whose computed prefixes are not shared: other models, other salts.
PrefixHashes hash_prefixes(std::string_view text, std::uint64_t space = 0);
PrefixHashes hash_prefixes(std::span<const std::int32_t> token_ids, std::uint64_t space = 0);

/// The prompts that were sent to one engine, as a tree of their parts: what its cache holds, as far as a router can know without asking.
/// Bounded; the part used longest ago is forgotten first, and a part never before those that continue it.
class SentPrefixes {
 public:
  explicit SentPrefixes(std::int64_t max_bytes);
  /// Parts of the prompt that were sent before, from its beginning on. O(log n).
  std::size_t longest(const PrefixHashes& prompt) const;
  void add(const PrefixHashes& prompt);
  void clear() noexcept;
  /// Of the prompts' text; parts that prompts share count once.
  std::int64_t num_bytes() const noexcept { return static_cast<std::int64_t>(parts_.size() * kPrefixBytes); }

 private:
  std::size_t max_parts_;
  std::list<std::uint64_t> ages_;  ///< used last first; a part comes before those that continue it
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> parts_;
};

}  // namespace prl::router
