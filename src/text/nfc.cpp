#include <algorithm>

#include "text/unicode_tables.hpp"
#include "text/utf8.hpp"

// Normalization form C: canonical decomposition, reordering by combining class, canonical composition.
// Source: Unicode standard annex 15, and section 3.12 of the standard for Hangul.
namespace prl::text {
namespace {

constexpr char32_t kHangulBase = 0xAC00, kLeadBase = 0x1100, kVowelBase = 0x1161, kTailBase = 0x11A7;
constexpr char32_t kNumLead = 19, kNumVowel = 21, kNumTail = 28, kNumHangul = kNumLead * kNumVowel * kNumTail;

struct Char {
  char32_t code_point;
  std::uint32_t origin;
  std::uint8_t combining_class;
};

std::uint8_t combining_class(char32_t c) noexcept {
  if (c < 0x300) return 0;
  const auto* end = detail::kCombiningClasses + detail::kNumCombiningClasses;
  const auto* row =
      std::upper_bound(detail::kCombiningClasses, end, c, [](char32_t k, const detail::CombiningClass& r) { return k < r.first; });
  if (row == detail::kCombiningClasses) return 0;
  --row;
  return c <= row->last ? row->value : 0;
}

void decompose(char32_t c, std::uint32_t origin, std::vector<Char>& out) {
  if (c - kHangulBase < kNumHangul) {
    const char32_t index = c - kHangulBase;
    out.push_back({kLeadBase + index / (kNumVowel * kNumTail), origin, 0});
    out.push_back({kVowelBase + index % (kNumVowel * kNumTail) / kNumTail, origin, 0});
    if (index % kNumTail != 0) out.push_back({kTailBase + index % kNumTail, origin, 0});
    return;
  }
  const auto* end = detail::kDecompositions + detail::kNumDecompositions;
  const auto* row =
      std::lower_bound(detail::kDecompositions, end, c, [](const detail::Decomposition& d, char32_t k) { return d.code_point < k; });
  if (c < 0xC0 || row == end || row->code_point != c) {
    out.push_back({c, origin, combining_class(c)});
    return;
  }
  decompose(row->first, origin, out);
  if (row->second != 0) decompose(row->second, origin, out);
}

// The composite of a pair, or 0.
char32_t compose(char32_t first, char32_t second) noexcept {
  if (first - kLeadBase < kNumLead && second - kVowelBase < kNumVowel)
    return kHangulBase + ((first - kLeadBase) * kNumVowel + (second - kVowelBase)) * kNumTail;
  if (first - kHangulBase < kNumHangul && (first - kHangulBase) % kNumTail == 0 && second - kTailBase - 1 < kNumTail - 1)
    return first + (second - kTailBase);
  const auto* end = detail::kCompositions + detail::kNumCompositions;
  const auto key = std::pair<std::uint32_t, std::uint32_t>(first, second);
  const auto* row = std::lower_bound(detail::kCompositions, end, key, [](std::uint16_t index, const auto& k) {
    const detail::Decomposition& d = detail::kDecompositions[index];
    return std::pair<std::uint32_t, std::uint32_t>(d.first, d.second) < k;
  });
  if (row == end) return 0;
  const detail::Decomposition& d = detail::kDecompositions[*row];
  return d.first == first && d.second == second ? d.code_point : 0;
}

void reorder(std::vector<Char>& chars) {
  for (std::size_t i = 0; i < chars.size();) {
    if (chars[i].combining_class == 0) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < chars.size() && chars[end].combining_class != 0) ++end;
    std::stable_sort(chars.begin() + static_cast<std::ptrdiff_t>(i), chars.begin() + static_cast<std::ptrdiff_t>(end),
                     [](const Char& a, const Char& b) { return a.combining_class < b.combining_class; });
    i = end;
  }
}

void compose_all(std::vector<Char>& chars) {
  std::size_t num_out = 0;
  std::size_t starter = static_cast<std::size_t>(-1);
  int last_class = -1;  // class of the last character kept after the starter; -1 directly after it
  for (std::size_t i = 0; i < chars.size(); ++i) {
    const Char c = chars[i];
    if (starter != static_cast<std::size_t>(-1) && last_class < static_cast<int>(c.combining_class)) {
      if (const char32_t joined = compose(chars[starter].code_point, c.code_point); joined != 0) {
        chars[starter].code_point = joined;
        continue;
      }
    }
    if (c.combining_class == 0) {
      starter = num_out;
      last_class = -1;
    } else {
      last_class = c.combining_class;
    }
    chars[num_out++] = c;
  }
  chars.resize(num_out);
}

}  // namespace

std::string to_nfc(std::string_view text, std::vector<std::uint32_t>* origin) {
  if (origin != nullptr) {
    origin->clear();
    origin->reserve(text.size());
  }
  // Nothing below U+0300 composes with or decomposes into anything else in NFC, so such text is already normal.
  const bool is_simple = std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0xCC; });
  std::string out;
  if (is_simple) {
    out = text;
    if (origin != nullptr)
      for (std::size_t i = 0; i < text.size(); ++i) origin->push_back(static_cast<std::uint32_t>(i));
    return out;
  }
  std::vector<Char> chars;
  chars.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const auto begin = static_cast<std::uint32_t>(i);
    decompose(next_code_point(text, i), begin, chars);
  }
  reorder(chars);
  compose_all(chars);
  out.reserve(text.size());
  for (const Char& c : chars) {
    const std::size_t before = out.size();
    append_code_point(out, c.code_point);
    if (origin == nullptr) continue;
    // Reordered marks would step back; the running maximum keeps offsets ascending.
    for (std::size_t i = before; i < out.size(); ++i) {
      const auto place = std::min(c.origin + static_cast<std::uint32_t>(i - before), static_cast<std::uint32_t>(text.size()));
      origin->push_back(origin->empty() ? place : std::max(origin->back(), place));
    }
  }
  return out;
}

}  // namespace prl::text
