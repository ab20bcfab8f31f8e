#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.hpp"

namespace prl::text::renderers {

/// No place in a text.
inline constexpr std::size_t kNowhere = std::string::npos;

/// Ids as bytes, with where each token begins, and markers found in them.
class TokenText {
 public:
  /// `tokenizer` and `ids` must outlive this.
  TokenText(const Tokenizer& tokenizer, std::span<const std::int32_t> ids);

  const std::string& bytes() const noexcept { return bytes_; }
  std::size_t size() const noexcept { return bytes_.size(); }
  /// The bytes [begin, end) as valid UTF-8; empty if end <= begin.
  std::string text(std::size_t begin, std::size_t end) const;
  /// Byte offset of the first marker that begins at `from` or later; kNowhere if none. Where the tokenizer has a token for the marker
  /// only that token counts.
  std::size_t find(std::string_view marker, std::size_t from) const;
  /// The same, but the marker must begin before `end`.
  std::size_t find(std::string_view marker, std::size_t from, std::size_t end) const;

 private:
  const Tokenizer& tokenizer_;
  std::span<const std::int32_t> ids_;
  std::vector<std::size_t> begins_;  // of each token; ascending
  std::string bytes_;
};

}  // namespace prl::text::renderers
