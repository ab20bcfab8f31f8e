#include "router/sent_prefixes.hpp"

#include <algorithm>

#include "base/files.hpp"

namespace prl::router {

PrefixHashes hash_prefixes(std::string_view text, std::uint64_t space) {
  PrefixHashes hashes;
  hashes.reserve(std::max<std::size_t>(1, text.size() / kPrefixBytes));
  for (std::size_t begin = 0; begin + kPrefixBytes <= text.size(); begin += kPrefixBytes)
    hashes.push_back(space = hash_bytes(text.substr(begin, kPrefixBytes), space));
  if (hashes.empty() && !text.empty()) hashes.push_back(hash_bytes(text, space));
  return hashes;
}

PrefixHashes hash_prefixes(std::span<const std::int32_t> token_ids, std::uint64_t space) {
  const auto bytes = std::as_bytes(token_ids);
  return hash_prefixes(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()), space);
}

SentPrefixes::SentPrefixes(std::int64_t max_bytes)
    : max_parts_(std::max<std::size_t>(1, static_cast<std::size_t>(max_bytes) / kPrefixBytes)) {}

std::size_t SentPrefixes::longest(const PrefixHashes& prompt) const {
  // Whoever has a part has all parts before it.
  const auto end = std::partition_point(prompt.begin(), prompt.end(), [this](std::uint64_t part) { return parts_.contains(part); });
  return static_cast<std::size_t>(end - prompt.begin());
}

void SentPrefixes::add(const PrefixHashes& prompt) {
  // From the end on, so that the beginning is the one used last. What cannot be kept of a very long prompt is its end.
  for (std::size_t i = std::min(prompt.size(), max_parts_); i-- > 0;) {
    const auto [it, is_new] = parts_.try_emplace(prompt[i]);
    if (!is_new) {
      ages_.splice(ages_.begin(), ages_, it->second);
      continue;
    }
    ages_.push_front(prompt[i]);
    it->second = ages_.begin();
  }
  while (parts_.size() > max_parts_) {
    parts_.erase(ages_.back());
    ages_.pop_back();
  }
}

void SentPrefixes::clear() noexcept {
  parts_.clear();
  ages_.clear();
}

}  // namespace prl::router
