#include "text/utf8.hpp"

#include <algorithm>

#include "text/unicode_tables.hpp"

namespace prl::text {
namespace {

const unsigned char* bytes_at(std::string_view text, std::size_t position) noexcept {
  return reinterpret_cast<const unsigned char*>(text.data()) + position;
}

template <typename Row, typename Key>
const Row* find_range(const Row* rows, std::size_t num_rows, Key key) noexcept {
  const Row* end = rows + num_rows;
  const Row* row = std::upper_bound(rows, end, key, [](Key k, const Row& r) { return k < r.first; });
  if (row == rows) return nullptr;
  --row;
  return key <= row->last ? row : nullptr;
}

struct CaseTable {
  const detail::CaseRun* runs;
  std::size_t num_runs;
  const detail::CaseSpecial* special;
  std::size_t num_special;
};

CaseTable upper_table() { return {detail::kUpperRuns, detail::kNumUpperRuns, detail::kUpperSpecial, detail::kNumUpperSpecial}; }
CaseTable lower_table() { return {detail::kLowerRuns, detail::kNumLowerRuns, detail::kLowerSpecial, detail::kNumLowerSpecial}; }
CaseTable title_table() { return {detail::kTitleRuns, detail::kNumTitleRuns, detail::kTitleSpecial, detail::kNumTitleSpecial}; }

void append_mapped(std::string& out, char32_t c, const CaseTable& table) {
  const auto* special = std::lower_bound(table.special, table.special + table.num_special, c,
                                         [](const detail::CaseSpecial& s, char32_t k) { return s.code_point < k; });
  if (special != table.special + table.num_special && special->code_point == c) {
    for (std::uint32_t mapped : special->mapped)
      if (mapped != 0) append_code_point(out, mapped);
    return;
  }
  const auto* run = find_range(table.runs, table.num_runs, static_cast<std::uint32_t>(c));
  if (run != nullptr && (c - run->first) % run->stride == 0)
    append_code_point(out, static_cast<char32_t>(static_cast<std::int32_t>(c) + run->delta));
  else
    append_code_point(out, c);
}

bool is_cased(char32_t c) noexcept {
  return find_range(detail::kCasedRanges, detail::kNumCasedRanges, static_cast<std::uint32_t>(c)) != nullptr;
}

std::string map_case(std::string_view text, const CaseTable& table) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) append_mapped(out, next_code_point(text, i), table);
  return out;
}

// Greek capital sigma lowers to its final form at the end of a word.
void append_lower(std::string& out, const std::vector<char32_t>& points, std::size_t i) {
  if (points[i] == 0x3A3) {
    const bool after_cased = i > 0 && is_cased(points[i - 1]);
    const bool before_cased = i + 1 < points.size() && is_cased(points[i + 1]);
    append_code_point(out, after_cased && !before_cased ? 0x3C2 : 0x3C3);
    return;
  }
  append_mapped(out, points[i], lower_table());
}

}  // namespace

char32_t next_code_point(std::string_view text, std::size_t& position) noexcept {
  const unsigned char* p = bytes_at(text, position);
  if (p[0] < 0x80) {
    position += 1;
    return p[0];
  }
  if (p[0] < 0xE0) {
    position += 2;
    return static_cast<char32_t>((p[0] & 0x1F) << 6 | (p[1] & 0x3F));
  }
  if (p[0] < 0xF0) {
    position += 3;
    return static_cast<char32_t>((p[0] & 0x0F) << 12 | (p[1] & 0x3F) << 6 | (p[2] & 0x3F));
  }
  position += 4;
  return static_cast<char32_t>((p[0] & 0x07) << 18 | (p[1] & 0x3F) << 12 | (p[2] & 0x3F) << 6 | (p[3] & 0x3F));
}

void append_code_point(std::string& out, char32_t c) {
  const auto byte = [&out](char32_t value) { out.push_back(static_cast<char>(static_cast<unsigned char>(value))); };
  if (c < 0x80) {
    byte(c);
  } else if (c < 0x800) {
    byte(0xC0 | c >> 6);
    byte(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    byte(0xE0 | c >> 12);
    byte(0x80 | (c >> 6 & 0x3F));
    byte(0x80 | (c & 0x3F));
  } else {
    byte(0xF0 | c >> 18);
    byte(0x80 | (c >> 12 & 0x3F));
    byte(0x80 | (c >> 6 & 0x3F));
    byte(0x80 | (c & 0x3F));
  }
}

std::vector<char32_t> to_code_points(std::string_view text) {
  std::vector<char32_t> out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) out.push_back(next_code_point(text, i));
  return out;
}

std::size_t count_code_points(std::string_view text) noexcept {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::size_t byte_of_code_point(std::string_view text, std::size_t index) noexcept {
  std::size_t position = 0;
  while (index > 0 && position < text.size()) {
    next_code_point(text, position);
    --index;
  }
  return position;
}

bool is_white_space(char32_t c) noexcept {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_python_space(char32_t c) noexcept { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }

bool is_alpha(char32_t c) noexcept {
  return find_range(detail::kAlphaRanges, detail::kNumAlphaRanges, static_cast<std::uint32_t>(c)) != nullptr;
}

bool is_printable(char32_t c) noexcept {
  return find_range(detail::kUnprintableRanges, detail::kNumUnprintableRanges, static_cast<std::uint32_t>(c)) == nullptr;
}

int decimal_value(char32_t c) noexcept {
  if (c < 0x80) return c >= '0' && c <= '9' ? static_cast<int>(c - '0') : -1;
  const auto code = static_cast<std::uint32_t>(c);
  const auto* range = find_range(detail::kDecimalRanges, detail::kNumDecimalRanges, code);
  return range == nullptr ? -1 : static_cast<int>((code - range->first) % 10);
}

bool is_digit(char32_t c) noexcept {
  return decimal_value(c) >= 0 || find_range(detail::kDigitRanges, detail::kNumDigitRanges, static_cast<std::uint32_t>(c)) != nullptr;
}

bool is_numeric(char32_t c) noexcept {
  return is_digit(c) || find_range(detail::kNumericRanges, detail::kNumNumericRanges, static_cast<std::uint32_t>(c)) != nullptr;
}

bool is_word_character(char32_t c) noexcept {
  return find_range(detail::kWordRanges, detail::kNumWordRanges, static_cast<std::uint32_t>(c)) != nullptr;
}

std::string to_upper(std::string_view text) { return map_case(text, upper_table()); }

std::string to_lower(std::string_view text) {
  const std::vector<char32_t> points = to_code_points(text);
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < points.size(); ++i) append_lower(out, points, i);
  return out;
}

std::string to_title(std::string_view text) {
  const std::vector<char32_t> points = to_code_points(text);
  std::string out;
  out.reserve(text.size());
  bool previous_cased = false;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (previous_cased)
      append_lower(out, points, i);
    else
      append_mapped(out, points[i], title_table());
    previous_cased = is_cased(points[i]);
  }
  return out;
}

std::string capitalize(std::string_view text) {
  const std::vector<char32_t> points = to_code_points(text);
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (i == 0)
      append_mapped(out, points[i], title_table());
    else
      append_lower(out, points, i);
  }
  return out;
}

}  // namespace prl::text
