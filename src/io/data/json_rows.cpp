#include "io/data/json_rows.hpp"

#include <fmt/core.h>

#include <algorithm>

namespace prl::io {
namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

/// Of what stands between `open` and `close`, divided by commas; `kind` is its name in messages.
std::string split(std::string_view text, char open, char close, std::string_view kind,
                  const std::function<void(std::string_view element)>& each) {
  std::size_t i = 0;
  const auto skip_space = [&] {
    while (i < text.size() && is_space(text[i])) ++i;
  };
  const auto wrong = [&](std::string_view what) { return fmt::format("byte {}: {}", i, what); };
  skip_space();
  if (i >= text.size() || text[i] != open) return wrong(open == '[' ? "wanted a list" : "wanted an object");
  ++i;
  skip_space();
  bool is_empty = i < text.size() && text[i] == close;
  while (!is_empty) {
    skip_space();
    const std::size_t begin = i;
    std::int64_t depth = 0;
    bool in_text = false;
    for (; i < text.size(); ++i) {
      const char c = text[i];
      if (in_text) {
        if (c == '\\') {
          ++i;
        } else if (c == '"') {
          in_text = false;
        }
      } else if (c == '"') {
        in_text = true;
      } else if (c == '{' || c == '[') {
        ++depth;
      } else if (c == '}' || c == ']') {
        if (depth == 0) break;
        --depth;
      } else if (c == ',' && depth == 0) {
        break;
      }
    }
    if (i >= text.size()) return wrong(fmt::format("the {} does not end: truncated", kind));
    std::size_t end = i;
    while (end > begin && is_space(text[end - 1])) --end;
    if (end == begin) return wrong("an element is missing");
    each(text.substr(begin, end - begin));
    if (text[i] == close) break;
    if (text[i] != ',') return wrong("brackets that do not match");
    ++i;
  }
  ++i;
  skip_space();
  return i < text.size() ? wrong(fmt::format("something follows the {}", kind)) : std::string();
}

}  // namespace

std::string split_json_list(std::string_view text, const std::function<void(std::string_view element)>& each) {
  return split(text, '[', ']', "list", each);
}

std::string split_json_object(std::string_view text, const std::function<void(std::string_view key, std::string_view value)>& each) {
  std::string problem;
  const std::string of_members = split(text, '{', '}', "object", [&](std::string_view member) {
    std::size_t end = 1;
    while (end < member.size() && member[end] != '"') end += member[end] == '\\' ? 2 : 1;
    const std::size_t colon = member.find_first_not_of(" \t\r\n", std::min(end + 1, member.size()));
    const std::size_t value = colon == std::string_view::npos ? colon : member.find_first_not_of(" \t\r\n", colon + 1);
    if (member.front() != '"' || value == std::string_view::npos || member[colon] != ':') {
      if (problem.empty()) problem = fmt::format("wanted a member, found {}", member.substr(0, 40));
      return;
    }
    each(member.substr(0, end + 1), member.substr(value));
  });
  return of_members.empty() ? problem : of_members;
}

std::string split_csv(std::string_view text, char separator,
                      const std::function<void(const std::vector<CsvCell>& cells, std::int64_t line)>& each) {
  std::vector<CsvCell> cells;
  std::int64_t line = 1;
  for (std::size_t i = 0; i < text.size();) {
    const std::int64_t first_line = line;
    cells.clear();
    for (bool has_more = true; has_more;) {
      CsvCell cell;
      if (i < text.size() && text[i] == '"') {
        cell.was_quoted = true;
        ++i;
        for (;;) {
          if (i >= text.size()) return fmt::format("line {}: a quote that is opened there is never closed", first_line);
          if (text[i] == '"') {
            if (i + 1 < text.size() && text[i + 1] == '"') {
              cell.text += '"';
              i += 2;
              continue;
            }
            ++i;
            break;
          }
          line += text[i] == '\n';
          cell.text += text[i++];
        }
      }
      // Text behind a closing quote is taken as it is, as most readers do.
      while (i < text.size() && text[i] != separator && text[i] != '\n' && text[i] != '\r') cell.text += text[i++];
      cells.push_back(std::move(cell));
      has_more = i < text.size() && text[i] == separator;
      if (has_more) ++i;
    }
    if (i < text.size() && text[i] == '\r') ++i;
    if (i < text.size() && text[i] == '\n') {
      ++i;
      ++line;
    }
    const bool is_blank = cells.size() == 1 && cells[0].text.empty() && !cells[0].was_quoted;
    if (!is_blank) each(cells, first_line);
  }
  return {};
}

}  // namespace prl::io
