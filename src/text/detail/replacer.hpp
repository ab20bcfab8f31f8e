#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/detail/regex.hpp"

namespace prl::text::detail {

/// A regular expression that matches just `text`.
std::string escape_pattern(std::string_view text);
/// A "pattern" of tokenizer.json as the source of a regular expression: {"Regex": source}, or {"String": text}, which is escaped.
std::string read_pattern(const boost::json::object& object, const std::string& where);

/// The Replace step of normalizers and decoders: every match of a pattern gives way to fixed content.
class Replacer {
 public:
  /// Error{kCorrupt, kNotImplemented} naming the key below `where`.
  Replacer(const boost::json::object& object, const std::string& where);

  /// `text` with the content in place of each match. `origin`, when given, receives for each byte of the result the byte of `text`
  /// it came from; the content comes from the last byte of its match.
  std::string apply(std::string_view text, std::vector<std::uint32_t>* origin = nullptr) const;

 private:
  std::string literal_;         // what to look for; empty: regex_ says
  std::optional<Regex> regex_;  // set where literal_ is empty
  std::string content_;
};

}  // namespace prl::text::detail
