#pragma once

#include <boost/json/object.hpp>

#include <string>

namespace prl::text::detail {

/// Where Metaspace puts its replacement in front of a piece that does not begin with it.
enum class PrependScheme {
  kFirst,   ///< where the text begins
  kAlways,  ///< before every piece
  kNever
};

/// The members of a Metaspace pre-tokenizer or decoder.
struct Metaspace {
  std::string replacement;  ///< one character, which stands for a space
  PrependScheme scheme = PrependScheme::kAlways;
  bool split = true;  ///< pieces begin at each replacement
};

/// Reads both spellings: `prepend_scheme`, and `add_prefix_space` of older files, which may only repeat what the other says.
/// Error{kCorrupt} naming the key below `where`.
Metaspace read_metaspace(const boost::json::object& object, const std::string& where);

}  // namespace prl::text::detail
