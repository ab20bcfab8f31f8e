#include "mutator.hpp"

#include <algorithm>
#include <cstring>

namespace prl::fuzz {
namespace {

// What parsers trip over: ends of ranges, deep nesting, half characters, empty and endless things.
const char* const kPieces[] = {"",
                               "0",
                               "-1",
                               "1e999",
                               "18446744073709551615",
                               "9223372036854775808",
                               "null",
                               "true",
                               "\"\"",
                               "[[[[[[[[",
                               "{\"a\":{\"a\":",
                               "{{{{",
                               "}}",
                               "%}",
                               "{%",
                               "\\u0000",
                               "\\ud800",
                               "\xff",
                               "\xf0\x9f",
                               "\xed\xa0\x80",
                               "\n\n",
                               "\r",
                               "'''",
                               "\"\"\"",
                               "[a]\n",
                               "x.y=",
                               "(((((",
                               "{9999}",
                               "|",
                               "data: ",
                               ":",
                               "1979-05-27T07:32:00Z"};

}  // namespace

std::string Mutator::next() {
  std::string text = corpus_[rng_.next_below(corpus_.size())];
  for (std::uint64_t k = rng_.next_below(8) + 1; k > 0; --k) change(text);
  if (text.size() > kMaxBytes) text.resize(kMaxBytes);
  return text;
}

void Mutator::change(std::string& text) {
  const std::size_t at = rng_.next_below(text.size() + 1);
  const std::size_t length = std::min<std::size_t>(text.size() - at, rng_.next_below(rng_.next_below(4) == 0 ? 200 : 8) + 1);
  switch (rng_.next_below(9)) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(rng_.next_below(256));
      break;
    case 1:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << rng_.next_below(8)));
      break;
    case 2: text.erase(at, length); break;
    case 3: text.insert(at, text.substr(at, length)); break;
    case 4: text.insert(at, kPieces[rng_.next_below(std::size(kPieces))]); break;
    case 5: text.replace(at, length, kPieces[rng_.next_below(std::size(kPieces))]); break;
    case 6: {
      const std::string& other = corpus_[rng_.next_below(corpus_.size())];
      const std::size_t from = rng_.next_below(other.size() + 1);
      text.insert(at, other.substr(from, rng_.next_below(64) + 1));
      break;
    }
    case 7: {
      // A length or count of a binary header.
      static constexpr std::uint64_t kValues[] = {0,         1, 0x7f, 0xff, 0x7fffffff, 0xffffffff, 0x7fffffffffffffff, 0xffffffffffffffff,
                                                  1ull << 40};
      const std::uint64_t value = kValues[rng_.next_below(std::size(kValues))];
      const std::size_t width = rng_.next_below(2) == 0 ? 4 : 8;
      if (at + width <= text.size()) std::memcpy(text.data() + at, &value, width);
      break;
    }
    default: text.resize(at); break;
  }
}

}  // namespace prl::fuzz
