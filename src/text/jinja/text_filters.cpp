#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/iterator.hpp"
#include "text/jinja/markup.hpp"
#include "text/jinja/string_ops.hpp"
#include "text/utf8.hpp"

// Filters that lay text out: sizes, wrapped lines, HTML. Source: jinja2/filters.py and textwrap of Python.
namespace prl::text::jinja {
namespace {

struct TextFilterEntry {
  std::string_view name;
  FilterFunction filter;
};

Value filter_filesizeformat(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "filesizeformat", args, {"binary"});
  const bool is_binary = reader.bool_or(0, false);
  double bytes = 0;
  if (input.is_number()) {
    bytes = input.number();
  } else if (input.is_string()) {
    const std::optional<double> parsed = parse_float(input.string());
    if (!parsed) i.fail("could not convert string to float: " + repr(input));
    bytes = *parsed;
  } else {
    i.fail(input.is_undefined() ? input.undefined_message() : "filesizeformat: wanted a number, found " + input.type_name());
  }
  constexpr std::array<const char*, 8> kDecimal = {"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"};
  constexpr std::array<const char*, 8> kBinary = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"};
  const double base = is_binary ? 1024 : 1000;
  if (bytes == 1) return Value("1 Byte");
  if (bytes < base) return Value(fmt::format("{:.0f} Bytes", std::trunc(bytes) + 0.0));
  double unit = base;
  std::size_t at = 0;
  for (; at < kDecimal.size(); ++at) {
    unit = std::pow(base, static_cast<double>(at + 2));
    if (bytes < unit) break;
  }
  at = std::min(at, kDecimal.size() - 1);
  return Value(fmt::format("{:.1f} {}", base * bytes / unit, is_binary ? kBinary[at] : kDecimal[at]));
}

// The pieces that textwrap breaks lines between: words, and the parts of words behind hyphens.
std::vector<std::string> wrap_chunks(const std::string& line, bool break_on_hyphens) {
  std::vector<std::string> chunks;
  const auto is_space = [](char c) { return std::string_view("\t\n\x0b\x0c\r ").find(c) != std::string_view::npos; };
  for (std::size_t i = 0; i < line.size();) {
    std::size_t end = i;
    const bool spaces = is_space(line[i]);
    while (end < line.size() && is_space(line[end]) == spaces) ++end;
    std::string_view word(line.data() + i, end - i);
    i = end;
    while (!spaces && break_on_hyphens) {
      // A hyphen between letters ends a piece: "well-" "known".
      std::size_t cut = std::string_view::npos;
      for (std::size_t h = word.find('-'); h != std::string_view::npos && cut == std::string_view::npos; h = word.find('-', h + 1)) {
        const auto is_letter = [&](std::size_t at) {
          return at < word.size() && (static_cast<unsigned char>(word[at]) >= 0x80 ||
                                      (std::isalpha(static_cast<unsigned char>(word[at])) != 0) || word[at] == '_');
        };
        if (h >= 2 && is_letter(h - 1) && is_letter(h - 2) && is_letter(h + 1) &&
            (is_letter(h + 2) || (h + 2 < word.size() && word[h + 2] == '-')))
          cut = h;
      }
      if (cut == std::string_view::npos) break;
      chunks.emplace_back(word.substr(0, cut + 1));
      word.remove_prefix(cut + 1);
    }
    if (!word.empty()) chunks.emplace_back(word);
  }
  return chunks;
}

// textwrap.wrap without expanding tabs or replacing white space.
std::vector<std::string> wrap_line(Interpreter& interpreter, const std::string& line, std::size_t width, bool break_long, bool on_hyphens) {
  std::vector<std::string> chunks = wrap_chunks(line, on_hyphens), lines;
  std::reverse(chunks.begin(), chunks.end());
  const auto is_blank = [](const std::string& text) { return strip(text, std::nullopt, true, true).empty(); };
  while (!chunks.empty()) {
    interpreter.charge_step();
    interpreter.charge_bytes(chunks.back().size());  // it may be measured and cut once a line
    std::vector<std::string> current;
    std::size_t length = 0;
    if (!lines.empty() && is_blank(chunks.back())) chunks.pop_back();
    while (!chunks.empty()) {
      const std::size_t size = count_code_points(chunks.back());
      if (length + size > width) break;
      length += size;
      current.push_back(std::move(chunks.back()));
      chunks.pop_back();
    }
    if (!chunks.empty() && count_code_points(chunks.back()) > width) {
      if (break_long) {
        const std::size_t room = width - length;
        std::string& chunk = chunks.back();
        std::size_t cut = byte_of_code_point(chunk, std::max<std::size_t>(room, 1));
        if (on_hyphens && count_code_points(chunk) > room && room > 0) {
          const std::size_t hyphen = chunk.rfind('-', byte_of_code_point(chunk, room) - 1);
          if (hyphen != std::string::npos && hyphen > 0 && chunk.substr(0, hyphen).find_first_not_of('-') != std::string::npos)
            cut = hyphen + 1;
        }
        if (room > 0) {
          current.push_back(chunk.substr(0, cut));
          chunk.erase(0, cut);
        } else if (current.empty()) {
          current.push_back(chunk.substr(0, cut));
          chunk.erase(0, cut);
        }
      } else if (current.empty()) {
        current.push_back(std::move(chunks.back()));
        chunks.pop_back();
      }
    }
    if (!current.empty() && is_blank(current.back())) current.pop_back();
    if (current.empty()) continue;
    std::string out;
    for (const std::string& chunk : current) out += chunk;
    lines.push_back(std::move(out));
  }
  return lines;
}

Value filter_wordwrap(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "wordwrap", args, {"width", "break_long_words", "wrapstring", "break_on_hyphens"});
  if (!input.is_string()) i.fail("'" + input.type_name() + "' object has no attribute 'splitlines'");
  const std::int64_t width = reader.int_or(0, 79);
  const std::string mark = reader.has(2) && !reader.required(2).is_none() ? reader.string(2) : "\n";
  std::string out;
  bool is_first = true;
  for (const std::string& line : split_lines(input.string(), false)) {
    if (width <= 0) i.fail(fmt::format("invalid width {} (must be > 0)", width));
    if (!is_first) out += mark;
    is_first = false;
    bool is_first_part = true;
    for (const std::string& part : wrap_line(i, line, static_cast<std::size_t>(width), reader.bool_or(1, true), reader.bool_or(3, true))) {
      if (!is_first_part) out += mark;
      is_first_part = false;
      out += part;
      i.charge_bytes(part.size() + mark.size());
    }
  }
  return Value(std::move(out));
}

Value filter_striptags(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "striptags", args, {});
  std::string out = strip_tags(input.str());
  i.charge_bytes(out.size());
  return Value(std::move(out));
}

Value filter_xmlattr(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "xmlattr", args, {"autospace"});
  if (!input.is_dict())
    i.fail(input.is_undefined() ? input.undefined_message() : "'" + input.type_name() + "' object has no attribute 'items'");
  std::string out;
  for (const auto& [key, value] : input.dict().entries) {
    if (value.is_none() || value.is_undefined()) continue;
    if (!key.is_string()) i.fail("expected string or bytes-like object, got '" + key.type_name() + "'");
    if (key.string().find_first_of(" \t\n\r\f\v/>=") != std::string::npos) i.fail("Invalid character in attribute name: " + repr(key));
    const auto escaped = [](const Value& v) { return v.is_markup() ? v.string() : escape_html(v.str()); };
    out += (out.empty() ? "" : " ") + escaped(key) + "=\"" + escaped(value) + "\"";
  }
  if (reader.bool_or(0, true) && !out.empty()) out.insert(0, " ");
  i.charge_bytes(out.size());
  return Value(std::move(out));
}

Value refuse_random(Interpreter& i, const Value&, Args&) {
  i.fail("the filter 'random' is not possible in a chat template: a conversation must give the same text each time");
}

constexpr TextFilterEntry kTextFilters[] = {
    {"filesizeformat", filter_filesizeformat},
    {"wordwrap", filter_wordwrap},
    {"striptags", filter_striptags},
    {"xmlattr", filter_xmlattr},
    {"random", refuse_random},
};

}  // namespace

FilterFunction find_text_filter(std::string_view name) {
  const auto* entry =
      std::find_if(std::begin(kTextFilters), std::end(kTextFilters), [name](const TextFilterEntry& e) { return e.name == name; });
  return entry == std::end(kTextFilters) ? nullptr : entry->filter;
}

}  // namespace prl::text::jinja
