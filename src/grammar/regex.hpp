#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "grammar/automaton.hpp"
#include "grammar/char_class.hpp"

namespace prl::grammar {

/// A parsed regular expression: what ECMA 262 and Python's `re` have in common, as a regular language.
///
/// Supported: literals, `.`, classes with ranges and negation, \d \w \s \D \W \S (ASCII), \t \n \r \f \v \0 \xHH \uHHHH \u{H..},
/// groups (capturing, named and not), `|`, `* + ? {m} {m,} {m,n}` (lazy forms too), `^` and `$` at the ends of an alternative.
/// Not supported, by name in the error: lookaround, backreferences, \b, \p, flags, possessive quantifiers.
struct Regex {
  enum class Kind { kEmpty, kChar, kConcat, kAlternate, kRepeat, kBegin, kEnd };
  Kind kind = Kind::kEmpty;
  CharClass chars = {};              ///< kChar
  std::vector<Regex> parts = {};     ///< kConcat, kAlternate; one for kRepeat
  int min_count = 0, max_count = 0;  ///< kRepeat; max_count -1: no bound
  static constexpr int kMaxCount = 10'000;
  static constexpr std::size_t kMaxPatternBytes = 64 << 10;
};

/// Error{kInvalidArgument} with the place and what is wrong there.
Regex parse_regex(std::string_view pattern);

enum class Anchoring {
  kFull,    ///< the pattern is the whole text; ^ and $ change nothing
  kSearch,  ///< text may stand before and after it, but where ^ or $ forbid that
};
NodeId emit_regex(AutomatonBuilder& builder, NodeId from, const Regex& regex, Spelling spelling, Anchoring anchoring);

}  // namespace prl::grammar
