#include "text/jinja/string_ops.hpp"

#include <algorithm>

#include "text/utf8.hpp"

namespace prl::text::jinja {
namespace {

std::size_t previous(std::string_view text, std::size_t position) {
  do --position;
  while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80);
  return position;
}

}  // namespace

std::string strip(std::string_view text, const std::optional<std::string>& characters, bool left, bool right) {
  const std::vector<char32_t> set = characters ? to_code_points(*characters) : std::vector<char32_t>();
  const auto goes = [&](char32_t c) { return characters ? std::find(set.begin(), set.end(), c) != set.end() : is_python_space(c); };
  std::size_t begin = 0, end = text.size();
  while (left && begin < end) {
    std::size_t next = begin;
    if (!goes(next_code_point(text, next))) break;
    begin = next;
  }
  while (right && end > begin) {
    const std::size_t last = previous(text, end);
    std::size_t next = last;
    if (!goes(next_code_point(text, next))) break;
    end = last;
  }
  return std::string(text.substr(begin, end - begin));
}

std::vector<std::string> split(std::string_view text, const std::optional<std::string>& separator, std::int64_t limit) {
  std::vector<std::string> parts;
  if (separator) {
    std::size_t begin = 0;
    for (std::size_t hit; limit != 0 && (hit = text.find(*separator, begin)) != std::string_view::npos;
         begin = hit + separator->size(), --limit)
      parts.emplace_back(text.substr(begin, hit - begin));
    parts.emplace_back(text.substr(begin));
    return parts;
  }
  std::size_t i = 0;
  const auto skip = [&](bool spaces) {
    while (i < text.size()) {
      std::size_t next = i;
      if (is_python_space(next_code_point(text, next)) != spaces) break;
      i = next;
    }
  };
  for (skip(true); i < text.size(); skip(true)) {
    const std::size_t begin = i;
    if (limit-- == 0) {
      parts.emplace_back(text.substr(begin));
      break;
    }
    skip(false);
    parts.emplace_back(text.substr(begin, i - begin));
  }
  return parts;
}

std::vector<std::string> split_from_right(std::string_view text, const std::optional<std::string>& separator, std::int64_t limit) {
  if (limit < 0) return split(text, separator, -1);
  std::vector<std::string> parts;
  if (separator) {
    std::size_t end = text.size();
    while (limit-- > 0) {
      const std::size_t from = end >= separator->size() ? end - separator->size() : std::string_view::npos;
      const std::size_t hit = from == std::string_view::npos ? from : text.rfind(*separator, from);
      if (hit == std::string_view::npos) break;
      parts.emplace_back(text.substr(hit + separator->size(), end - hit - separator->size()));
      end = hit;
    }
    parts.emplace_back(text.substr(0, end));
  } else {
    std::string rest = strip(text, std::nullopt, false, true);
    while (!rest.empty()) {
      if (limit-- == 0) {
        parts.push_back(rest);
        break;
      }
      std::size_t begin = rest.size();
      while (begin > 0) {
        const std::size_t last = previous(rest, begin);
        std::size_t next = last;
        if (is_python_space(next_code_point(rest, next))) break;
        begin = last;
      }
      parts.push_back(rest.substr(begin));
      rest = strip(std::string_view(rest).substr(0, begin), std::nullopt, false, true);
    }
    if (!parts.empty() && parts.back().empty()) parts.pop_back();
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string> lines;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t at = i;
    const char32_t c = next_code_point(text, i);
    const bool is_end = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
    if (!is_end) continue;
    if (c == '\r' && i < text.size() && text[i] == '\n') ++i;
    lines.emplace_back(text.substr(begin, (keep_ends ? i : at) - begin));
    begin = i;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

std::string replace(std::string_view text, std::string_view from, std::string_view to, std::int64_t limit) {
  std::string out;
  std::size_t i = 0;
  if (from.empty()) {  // Python puts `to` in front of every character and at the end
    while (limit != 0) {
      out += to;
      --limit;
      if (i >= text.size()) break;
      const std::size_t begin = i;
      next_code_point(text, i);
      out += text.substr(begin, i - begin);
    }
    return out.append(text.substr(std::min(i, text.size())));
  }
  for (std::size_t hit; limit != 0 && (hit = text.find(from, i)) != std::string_view::npos; i = hit + from.size(), --limit)
    out.append(text.substr(i, hit - i)).append(to);
  return out.append(text.substr(i));
}

std::size_t count(std::string_view text, std::string_view needle) {
  if (needle.empty()) return count_code_points(text) + 1;
  std::size_t hits = 0;
  for (std::size_t i = 0; (i = text.find(needle, i)) != std::string_view::npos; i += needle.size()) ++hits;
  return hits;
}

std::string pad(std::string_view text, std::size_t width, std::string_view fill, Align align) {
  const std::size_t length = count_code_points(text);
  if (width <= length) return std::string(text);
  const std::size_t total = width - length;
  // str.center puts the odd one left or right by Python's own rule.
  const std::size_t left = align == Align::kLeft ? 0 : align == Align::kRight ? total : total / 2 + (total & width & 1);
  std::string out;
  for (std::size_t i = 0; i < left; ++i) out += fill;
  out += text;
  for (std::size_t i = left; i < total; ++i) out += fill;
  return out;
}

}  // namespace prl::text::jinja
