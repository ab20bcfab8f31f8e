#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace prl::wire {

/// Which experts tokens had in the layers of a mixture of experts, in the order of the router: [num_tokens, num_layers, top_k] from
/// position `start` on. Layers without experts have zeros. A token of which nothing is known has a row that no router gives: top_k times 0
/// if that is more than one, else kUnknown.
struct RoutedExperts {
  static constexpr std::uint16_t kUnknown = 0xffff;
  std::int64_t start = 0;
  std::int64_t num_layers = 0, top_k = 0;
  std::vector<std::uint16_t> ids;

  bool empty() const noexcept { return ids.empty(); }
  std::int64_t row_size() const noexcept { return num_layers * top_k; }
  std::int64_t num_tokens() const noexcept { return row_size() == 0 ? 0 : static_cast<std::int64_t>(ids.size()) / row_size(); }
  /// Cuts, or appends tokens of which nothing is known, until there are so many.
  void resize(std::int64_t num_tokens);
  /// What the tokens from position num_tokens() on had, which `other` says from its own start on, at or before that.
  void append(const RoutedExperts& other);
  /// Whether anything is known of token `i`.
  bool knows(std::int64_t i) const noexcept;
  bool operator==(const RoutedExperts&) const = default;
};

/// The numbers as servers send them, little-endian: "uint8", or "uint16" where one is above 255.
struct ExpertBytes {
  std::string data;
  std::string dtype;
};
ExpertBytes encode(const RoutedExperts& experts);
/// Error{kCorrupt} naming `field` unless bytes and dtype are those of the shape [tokens, layers, top_k].
RoutedExperts decode_experts(std::string_view field, std::string_view data, std::string_view dtype, std::int64_t num_tokens,
                             std::int64_t num_layers, std::int64_t top_k);

}  // namespace prl::wire
