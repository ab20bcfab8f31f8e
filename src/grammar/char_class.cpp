#include "grammar/char_class.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <string>

namespace prl::grammar {
namespace {

constexpr std::uint32_t kFirstSurrogate = 0xD800, kLastSurrogate = 0xDFFF;

int encode_utf8(std::uint32_t c, std::array<std::uint8_t, 4>& out) {
  const auto tail = [&](int shift) { return static_cast<std::uint8_t>(0x80 | (c >> shift & 0x3F)); };
  if (c < 0x80) return out[0] = static_cast<std::uint8_t>(c), 1;
  if (c < 0x800) return out[0] = static_cast<std::uint8_t>(0xC0 | c >> 6), out[1] = tail(0), 2;
  if (c < 0x10000) return out[0] = static_cast<std::uint8_t>(0xE0 | c >> 12), out[1] = tail(6), out[2] = tail(0), 3;
  return out[0] = static_cast<std::uint8_t>(0xF0 | c >> 18), out[1] = tail(12), out[2] = tail(6), out[3] = tail(0), 4;
}

/// Byte sequences of [first, last], all of one length: split until each byte is a range of its own.
void add_utf8_range(AutomatonBuilder& builder, NodeId from, std::uint32_t first, std::uint32_t last, NodeId to) {
  static constexpr std::uint32_t kLengthEnds[] = {0x7F, 0x7FF, 0xFFFF};
  for (const std::uint32_t end : kLengthEnds) {
    if (first <= end && last > end) {
      add_utf8_range(builder, from, first, end, to);
      add_utf8_range(builder, from, end + 1, last, to);
      return;
    }
  }
  for (int i = 1; i <= 3; ++i) {
    const std::uint32_t mask = (1u << (6 * i)) - 1;
    if (last <= 0x7F || (first & ~mask) == (last & ~mask)) continue;
    if ((first & mask) != 0) {
      add_utf8_range(builder, from, first, first | mask, to);
      add_utf8_range(builder, from, (first | mask) + 1, last, to);
      return;
    }
    if ((last & mask) != mask) {
      add_utf8_range(builder, from, first, (last & ~mask) - 1, to);
      add_utf8_range(builder, from, last & ~mask, last, to);
      return;
    }
  }
  std::array<std::uint8_t, 4> low{}, high{};
  const int length = encode_utf8(first, low);
  encode_utf8(last, high);
  for (int i = 0; i < length; ++i) {
    const NodeId next = i + 1 == length ? to : builder.add_node();
    builder.add_bytes(from, low[static_cast<std::size_t>(i)], high[static_cast<std::size_t>(i)], next);
    from = next;
  }
}

std::string json_escape(std::uint32_t c) {
  switch (c) {
    case '"': return "\\\"";
    case '\\': return "\\\\";
    case '\b': return "\\b";
    case '\f': return "\\f";
    case '\n': return "\\n";
    case '\r': return "\\r";
    case '\t': return "\\t";
    default: return fmt::format("\\u{:04x}", c);
  }
}

}  // namespace

void CharClass::add(std::uint32_t first, std::uint32_t last) {
  if (first > last) return;
  if (first <= kLastSurrogate && last >= kFirstSurrogate) {
    if (first < kFirstSurrogate) add(first, kFirstSurrogate - 1);
    if (last > kLastSurrogate) add(kLastSurrogate + 1, last);
    return;
  }
  ranges_.emplace_back(first, last);
  std::sort(ranges_.begin(), ranges_.end());
  std::vector<std::pair<std::uint32_t, std::uint32_t>> merged;
  for (const auto& range : ranges_) {
    if (!merged.empty() && range.first <= merged.back().second + 1)
      merged.back().second = std::max(merged.back().second, range.second);
    else
      merged.push_back(range);
  }
  ranges_ = std::move(merged);
}

void CharClass::add(const CharClass& other) {
  for (const auto& [first, last] : other.ranges_) add(first, last);
}

CharClass CharClass::complement() const {
  CharClass out;
  std::uint32_t next = 0;
  for (const auto& [first, last] : ranges_) {
    if (first > next) out.add(next, first - 1);
    next = last + 1;
  }
  if (next <= kLast) out.add(next, kLast);
  return out;
}

CharClass CharClass::intersect(const CharClass& other) const {
  CharClass out;
  for (const auto& [first, last] : ranges_)
    for (const auto& [other_first, other_last] : other.ranges_) out.add(std::max(first, other_first), std::min(last, other_last));
  return out;
}

bool CharClass::contains(std::uint32_t c) const {
  return std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& range) { return range.first <= c && c <= range.second; });
}

void add_char(AutomatonBuilder& builder, NodeId from, const CharClass& set, Spelling spelling, NodeId to) {
  CharClass plain = set;
  if (spelling == Spelling::kJsonString) {
    CharClass escaped(0, 0x1F);
    escaped.add('"', '"');
    escaped.add('\\', '\\');
    plain = set.intersect(escaped.complement());
    const CharClass to_escape = set.intersect(escaped);
    for (const auto& [first, last] : to_escape.ranges()) {
      for (std::uint32_t c = first; c <= last; ++c) {
        const std::string text = json_escape(c);
        const NodeId before_last = builder.emit_literal(from, text.substr(0, text.size() - 1));
        builder.add_bytes(before_last, static_cast<std::uint8_t>(text.back()), static_cast<std::uint8_t>(text.back()), to);
      }
    }
  }
  for (const auto& [first, last] : plain.ranges()) add_utf8_range(builder, from, first, last, to);
}

}  // namespace prl::grammar
