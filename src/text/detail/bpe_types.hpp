#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace prl::text::detail {

/// Heterogeneous lookup of strings.
struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
};
using StringToId = std::unordered_map<std::string, std::int32_t, StringHash, std::equal_to<>>;

/// A token of one piece: its id and how many bytes of the piece it covers.
struct PieceToken {
  std::int32_t id;
  std::uint32_t num_bytes;
};

}  // namespace prl::text::detail
