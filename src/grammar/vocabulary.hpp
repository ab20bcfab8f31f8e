#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "grammar/automaton.hpp"
#include "text/tokenizer.hpp"

namespace prl::grammar {

/// The spellings of a tokenizer's tokens as a trie in depth-first order. Stop tokens and tokens without text are left out.
///
/// Added tokens (<think>, <tool_call>, special ones) are not spelt as their text but with bytes that UTF-8 never has, so that
/// they never slip into ordinary text, and a marker that has a token is never spelt piece by piece: tokens of such bytes are left out.
/// Immutable.
class Vocabulary {
 public:
  struct Entry {
    std::uint32_t subtree_end;  ///< index of the first entry that is not below this one
    std::int32_t token;         ///< the token that ends here, or -1
    std::uint16_t depth;        ///< number of bytes, from 1
    std::uint8_t byte;
  };

  explicit Vocabulary(const text::Tokenizer& tokenizer);
  /// From spellings by id; empty ones are left out.
  explicit Vocabulary(std::vector<std::string> spellings);

  const std::vector<Entry>& entries() const { return entries_; }
  /// (a, b): token b is spelt as token a, which the trie holds.
  const std::vector<std::pair<std::int32_t, std::int32_t>>& twins() const { return twins_; }
  std::int32_t size() const { return static_cast<std::int32_t>(spellings_.size()); }
  /// Empty for tokens that are left out.
  const std::string& spelling(std::int32_t token) const { return spellings_[static_cast<std::size_t>(token)]; }
  /// How the automaton must spell a marker: as the tokenizer's added token of that text, or else as the text.
  std::string marker(std::string_view text) const;
  /// Bytes that automata may use: those that are tokens by themselves, and those of markers.
  const ByteSet& usable_bytes() const { return usable_bytes_; }
  std::size_t max_spelling_bytes() const { return max_spelling_bytes_; }

 private:
  void build();

  std::vector<std::string> spellings_;
  std::vector<Entry> entries_;
  std::vector<std::pair<std::int32_t, std::int32_t>> twins_;
  ByteSet usable_bytes_;
  std::map<std::string, std::string, std::less<>> markers_;
  std::size_t max_spelling_bytes_ = 0;
};

}  // namespace prl::grammar
