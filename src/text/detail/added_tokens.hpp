#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace prl::text::detail {

/// One entry of added_tokens.
struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool special = false;
  bool single_word = false;  ///< only between non-word characters
  bool lstrip = false;       ///< eats white space on its left
  bool rstrip = false;       ///< and on its right
  bool normalized = false;   ///< searched in the normalized text
};

/// A stretch of text: an added token (id >= 0), or ordinary text (id < 0).
struct TextSpan {
  std::size_t begin, end;
  std::int32_t id;
};

/// Finds added tokens in text, leftmost first and longest among those, as the Aho-Corasick automaton upstream does.
class AddedTokenFinder {
 public:
  void add(const AddedToken& token, std::string_view spelling);
  bool empty() const noexcept { return tokens_.empty(); }
  /// Cuts `text` into spans, in order, none empty. `allow_special` false: special tokens are not looked for.
  void split(std::string_view text, bool allow_special, std::vector<TextSpan>& spans) const;

 private:
  struct Node {
    std::map<unsigned char, std::uint32_t> next;
    std::int32_t token = -1;  // index into tokens_
  };
  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_{Node{}};
  bool can_start_[256] = {};
};

}  // namespace prl::text::detail
