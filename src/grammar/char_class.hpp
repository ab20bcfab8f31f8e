#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "grammar/automaton.hpp"

namespace prl::grammar {

/// A set of Unicode code points as ascending, disjoint ranges [first, last]. Surrogates are never members.
class CharClass {
 public:
  static constexpr std::uint32_t kLast = 0x10FFFF;

  CharClass() = default;
  CharClass(std::uint32_t first, std::uint32_t last) { add(first, last); }
  void add(std::uint32_t first, std::uint32_t last);
  void add(const CharClass& other);
  CharClass complement() const;
  CharClass intersect(const CharClass& other) const;
  bool contains(std::uint32_t code_point) const;
  bool empty() const { return ranges_.empty(); }
  const std::vector<std::pair<std::uint32_t, std::uint32_t>>& ranges() const { return ranges_; }

 private:
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges_;
};

/// How the characters of a pattern are spelt.
enum class Spelling {
  kPlain,       ///< as UTF-8
  kJsonString,  ///< as inside the quotes of a JSON string: quote, backslash and control characters escaped
};

/// One character of the class, from node `from` to node `to`.
void add_char(AutomatonBuilder& builder, NodeId from, const CharClass& set, Spelling spelling, NodeId to);

}  // namespace prl::grammar
