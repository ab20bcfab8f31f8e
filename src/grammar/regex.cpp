#include "grammar/regex.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/ascii.hpp"
#include "base/error.hpp"
#include "text/utf8.hpp"

namespace prl::grammar {
namespace {

constexpr int kMaxNesting = 100;

class Parser {
 public:
  explicit Parser(std::string_view pattern) : pattern_(pattern) {}

  Regex parse() {
    Regex out = alternation(0);
    if (place_ < pattern_.size()) error("unmatched ')'");
    return out;
  }

 private:
  [[noreturn]] void error(std::string_view what) const {
    fail(ErrorCode::kInvalidArgument, "pattern '{}': {} at byte {}", pattern_.substr(0, 200), what, place_);
  }
  bool at_end() const { return place_ >= pattern_.size(); }
  char peek() const { return at_end() ? '\0' : pattern_[place_]; }
  bool accept(char c) { return !at_end() && pattern_[place_] == c && ++place_; }
  bool accept(std::string_view text) {
    if (pattern_.substr(place_, text.size()) != text) return false;
    place_ += text.size();
    return true;
  }
  std::uint32_t code_point() {
    if (at_end()) error("the pattern ends too early");
    return text::next_code_point(pattern_, place_);
  }

  Regex alternation(int nesting) {
    if (nesting > kMaxNesting) error("groups nest too deep");
    Regex out{.kind = Regex::Kind::kAlternate};
    do out.parts.push_back(concatenation(nesting));
    while (accept('|'));
    return out.parts.size() == 1 ? std::move(out.parts.front()) : out;
  }

  Regex concatenation(int nesting) {
    Regex out{.kind = Regex::Kind::kConcat};
    while (!at_end() && peek() != '|' && peek() != ')') out.parts.push_back(quantified(nesting));
    return out;
  }

  Regex quantified(int nesting) {
    Regex out = atom(nesting);
    for (bool is_first = true;; is_first = false) {
      std::optional<std::pair<int, int>> counts;
      const std::size_t before = place_;
      if (accept('*'))
        counts = {0, -1};
      else if (accept('+'))
        counts = {1, -1};
      else if (accept('?'))
        counts = {0, 1};
      else if (peek() == '{')
        counts = braces();
      if (!counts) return out;
      if (!is_first) {
        place_ = before;
        error("a quantifier follows a quantifier");
      }
      if (out.kind == Regex::Kind::kBegin || out.kind == Regex::Kind::kEnd) error("an anchor cannot be repeated");
      if (!accept('?') && peek() == '+') error("possessive quantifiers are not supported");  // '?': lazy, the same set of texts
      Regex repeat{.kind = Regex::Kind::kRepeat};
      repeat.min_count = counts->first;
      repeat.max_count = counts->second;
      repeat.parts.push_back(std::move(out));
      out = std::move(repeat);
    }
  }

  int number() {
    int value = 0;
    while (peek() >= '0' && peek() <= '9') {
      value = value * 10 + (pattern_[place_++] - '0');
      if (value > Regex::kMaxCount) error(fmt::format("a repeat count is above {}", Regex::kMaxCount));
    }
    return value;
  }

  /// {m}, {m,} or {m,n}; anything else in braces is plain text, as in Python.
  std::optional<std::pair<int, int>> braces() {
    const std::size_t before = place_;
    const auto is_digit = [&] { return peek() >= '0' && peek() <= '9'; };
    accept('{');
    std::pair<int, int> counts;
    if (is_digit()) {
      counts.first = counts.second = number();
      if (accept(',')) counts.second = is_digit() ? number() : -1;
      if (accept('}')) {
        if (counts.second >= 0 && counts.first > counts.second) error("repeat counts are in the wrong order");
        return counts;
      }
    }
    place_ = before;
    return std::nullopt;
  }

  Regex atom(int nesting) {
    if (accept('(')) return group(nesting);
    if (accept('[')) return Regex{.kind = Regex::Kind::kChar, .chars = bracket()};
    if (accept('^')) return Regex{.kind = Regex::Kind::kBegin};
    if (accept('$')) return Regex{.kind = Regex::Kind::kEnd};
    if (accept('.')) return Regex{.kind = Regex::Kind::kChar, .chars = CharClass('\n', '\n').complement()};
    if (accept('\\')) return Regex{.kind = Regex::Kind::kChar, .chars = escape(false)};
    if (peek() == '*' || peek() == '+' || peek() == '?') error("a quantifier has nothing to repeat");
    const std::uint32_t c = code_point();
    return Regex{.kind = Regex::Kind::kChar, .chars = CharClass(c, c)};
  }

  Regex group(int nesting) {
    if (accept("?:")) {
    } else if (accept("?=") || accept("?!") || accept("?<=") || accept("?<!")) {
      error("lookaround is not supported");
    } else if (accept("?P<") || accept("?<")) {
      while (!at_end() && peek() != '>') ++place_;
      if (!accept('>')) error("a group name has no end");
    } else if (peek() == '?') {
      error("this kind of group is not supported");
    }
    Regex out = alternation(nesting + 1);
    if (!accept(')')) error("a group is not closed");
    return out;
  }

  std::uint32_t hex(int digits) {
    std::uint32_t value = 0;
    for (int i = 0; i < digits; ++i, ++place_) {
      const char c = peek();
      const int digit = hex_value(c);
      if (digit < 0) error("a hexadecimal digit is missing");
      value = value * 16 + static_cast<std::uint32_t>(digit);
    }
    return value;
  }

  std::uint32_t unicode_escape() {
    if (!accept('{')) {
      const std::uint32_t first = hex(4);
      if (first < 0xD800 || first > 0xDFFF) return first;
      if (first > 0xDBFF || !accept("\\u")) error("half of a surrogate pair");
      const std::uint32_t second = hex(4);
      if (second < 0xDC00 || second > 0xDFFF) error("half of a surrogate pair");
      return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
    }
    std::uint32_t value = 0;
    while (peek() != '}') {
      value = value * 16 + hex(1);
      if (value > CharClass::kLast) error("a code point is above U+10FFFF");
    }
    accept('}');
    return value;
  }

  CharClass escape(bool is_in_class) {
    CharClass out;
    const std::uint32_t c = code_point();
    const auto one = [](std::uint32_t value) { return CharClass(value, value); };
    switch (c) {
      case 'd':
      case 'D': out.add('0', '9'); break;
      case 'w':
      case 'W': out.add('0', '9'), out.add('A', 'Z'), out.add('_', '_'), out.add('a', 'z'); break;
      case 's':
      case 'S': out.add('\t', '\r'), out.add(' ', ' '); break;
      case 't': return one('\t');
      case 'n': return one('\n');
      case 'r': return one('\r');
      case 'f': return one('\f');
      case 'v': return one('\v');
      case '0': return one(0);
      case 'x': return one(hex(2));
      case 'u': return one(unicode_escape());
      case 'b':
        if (is_in_class) return one('\b');
        error("word boundaries are not supported");
      case 'B':
      case 'A':
      case 'Z':
      case 'z': error("this anchor is not supported; write ^ or $");
      case 'p':
      case 'P': error("Unicode properties are not supported");
      default:
        if (c >= '1' && c <= '9') error("backreferences are not supported");
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) error("this escape is not supported");
        return one(c);
    }
    return c == 'D' || c == 'W' || c == 'S' ? out.complement() : out;
  }

  CharClass bracket() {
    const bool is_negated = accept('^');
    CharClass out;
    for (bool is_first = true; is_first || peek() != ']'; is_first = false) {
      if (at_end()) error("a class is not closed");
      if (is_first && peek() == ']') error("an empty class");
      const auto item = [&]() -> CharClass {
        if (accept('\\')) return escape(true);
        const std::uint32_t c = code_point();
        return CharClass(c, c);
      };
      const CharClass first = item();
      const bool is_single = first.ranges().size() == 1 && first.ranges()[0].first == first.ranges()[0].second;
      if (is_single && peek() == '-' && place_ + 1 < pattern_.size() && pattern_[place_ + 1] != ']') {
        accept('-');
        const CharClass last = item();
        if (last.ranges().size() != 1 || last.ranges()[0].first != last.ranges()[0].second) error("a range ends in a class");
        if (last.ranges()[0].first < first.ranges()[0].first) error("a range is in the wrong order");
        out.add(first.ranges()[0].first, last.ranges()[0].first);
      } else {
        out.add(first);
      }
    }
    accept(']');
    return is_negated ? out.complement() : out;
  }

  std::string_view pattern_;
  std::size_t place_ = 0;
};

class Emitter {
 public:
  Emitter(AutomatonBuilder& builder, Spelling spelling) : builder_(builder), spelling_(spelling) {}

  NodeId emit(NodeId from, const Regex& regex) {
    switch (regex.kind) {
      case Regex::Kind::kEmpty: return from;
      case Regex::Kind::kChar: {
        const NodeId to = builder_.add_node();
        add_char(builder_, from, regex.chars, spelling_, to);
        return to;
      }
      case Regex::Kind::kConcat:
        for (const Regex& part : regex.parts) from = emit(from, part);
        return from;
      case Regex::Kind::kAlternate: {
        const NodeId to = builder_.add_node();
        for (const Regex& part : regex.parts) builder_.add_empty(emit(fresh(from), part), to);
        return to;
      }
      case Regex::Kind::kRepeat: return repeat(from, regex);
      case Regex::Kind::kBegin:
      case Regex::Kind::kEnd: break;
    }
    fail(ErrorCode::kInvalidArgument, "pattern: ^ and $ are supported only at the ends of the pattern or of one of its alternatives");
  }

  NodeId any_text(NodeId from) {
    Regex any{.kind = Regex::Kind::kRepeat, .min_count = 0, .max_count = -1};
    any.parts.push_back({.kind = Regex::Kind::kChar, .chars = CharClass(0, CharClass::kLast)});
    return repeat(from, any);
  }
  NodeId fresh(NodeId from) {
    const NodeId node = builder_.add_node();
    builder_.add_empty(from, node);
    return node;
  }

 private:
  NodeId repeat(NodeId from, const Regex& regex) {
    const Regex& body = regex.parts.front();
    for (int i = 0; i < regex.min_count; ++i) from = emit(from, body);
    if (regex.max_count < 0) {
      const NodeId loop = fresh(from);
      builder_.add_empty(emit(loop, body), loop);
      return fresh(loop);
    }
    const NodeId end = builder_.add_node();
    for (int i = regex.min_count; i < regex.max_count; ++i) {
      from = fresh(from);
      builder_.add_empty(from, end);
      from = emit(from, body);
    }
    builder_.add_empty(from, end);
    return end;
  }

  AutomatonBuilder& builder_;
  Spelling spelling_;
};

}  // namespace

Regex parse_regex(std::string_view pattern) {
  if (pattern.size() > Regex::kMaxPatternBytes)
    fail(ErrorCode::kInvalidArgument, "pattern: {} bytes, at most {} are allowed", pattern.size(), Regex::kMaxPatternBytes);
  if (!text::is_valid_utf8(pattern)) fail(ErrorCode::kInvalidArgument, "pattern: not valid UTF-8");
  return Parser(pattern).parse();
}

NodeId emit_regex(AutomatonBuilder& builder, NodeId from, const Regex& regex, Spelling spelling, Anchoring anchoring) {
  Emitter emitter(builder, spelling);
  const bool is_alternation = regex.kind == Regex::Kind::kAlternate;
  const std::span<const Regex> alternatives = is_alternation ? std::span(regex.parts) : std::span(&regex, 1);
  const NodeId to = builder.add_node();
  for (const Regex& alternative : alternatives) {
    std::span<const Regex> parts = alternative.kind == Regex::Kind::kConcat ? std::span(alternative.parts) : std::span(&alternative, 1);
    bool has_begin = false, has_end = false;
    for (; !parts.empty() && parts.front().kind == Regex::Kind::kBegin; parts = parts.subspan(1)) has_begin = true;
    for (; !parts.empty() && parts.back().kind == Regex::Kind::kEnd; parts = parts.first(parts.size() - 1)) has_end = true;
    NodeId node = emitter.fresh(from);
    if (anchoring == Anchoring::kSearch && !has_begin) node = emitter.any_text(node);
    for (const Regex& part : parts) node = emitter.emit(node, part);
    if (anchoring == Anchoring::kSearch && !has_end) node = emitter.any_text(node);
    builder.add_empty(node, to);
  }
  return to;
}

}  // namespace prl::grammar
