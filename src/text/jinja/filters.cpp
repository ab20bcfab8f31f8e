#include <algorithm>
#include <charconv>
#include <cmath>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/markup.hpp"
#include "text/jinja/operators.hpp"
#include "text/jinja/string_ops.hpp"
#include "text/utf8.hpp"

// Filters on strings, numbers and single values. Source: jinja2/filters.py, and transformers for tojson.
namespace prl::text::jinja {
namespace {

struct FilterEntry {
  std::string_view name;
  FilterFunction filter;
};

constexpr std::int64_t kMaxIndent = 1000;

Value text_result(Interpreter& interpreter, std::string text) {
  interpreter.charge_bytes(text.size());
  return Value(std::move(text));
}

/// soft_str: a Markup stays one.
bool is_soft_markup(const Value& input) { return input.is_markup(); }
Value soft_result(Interpreter& interpreter, std::string text, const Value& input) {
  interpreter.charge_bytes(text.size());
  return make_text(std::move(text), is_soft_markup(input));
}

Value filter_default(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "default", args, {"default_value", "boolean"});
  if (input.is_undefined() || (reader.bool_or(1, false) && !input.truthy())) return reader.value_or(0, Value(""));
  return input;
}

Value filter_trim(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "trim", args, {"chars"});
  std::optional<std::string> characters;
  if (reader.has(0) && !reader.required(0).is_none()) characters = reader.string(0);
  return soft_result(i, strip(input.str(), characters, true, true), input);
}

Value filter_replace(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "replace", args, {"old", "new", "count"});
  const std::string text = input.str(), from = reader.required(0).str(), to = reader.required(1).str();
  i.charge_bytes(text.size() + count(text, from) * to.size());
  return Value(replace(text, from, to, reader.int_or(2, -1)));
}

// Capitalizes after white space and opening brackets, unlike str.title.
Value filter_title(Interpreter& i, const Value& input, Args&) {
  const std::string text = input.str();
  std::string out, word;
  const auto flush = [&] {
    if (word.empty()) return;
    const std::size_t first = byte_of_code_point(word, 1);
    out += to_upper(std::string_view(word).substr(0, first)) + to_lower(std::string_view(word).substr(first));
    word.clear();
  };
  for (std::size_t at = 0; at < text.size();) {
    const char32_t c = next_code_point(text, at);
    if (is_python_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<') {
      flush();
      append_code_point(out, c);
    } else {
      append_code_point(word, c);
    }
  }
  flush();
  return text_result(i, std::move(out));
}

Value filter_indent(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "indent", args, {"width", "first", "blank"});
  if (!input.is_string())
    i.fail(input.is_undefined() ? input.undefined_message() : "'" + input.type_name() + "' object has no attribute 'splitlines'");
  std::string unit(4, ' ');
  if (reader.has(0)) {
    if (reader.required(0).is_string())
      unit = reader.required(0).string();
    else
      unit.assign(static_cast<std::size_t>(std::clamp<std::int64_t>(reader.int_or(0, 4), 0, kMaxIndent)), ' ');
  }
  const bool blank = reader.bool_or(2, false);
  std::string out = reader.bool_or(1, false) ? unit : "";
  bool is_first = true;
  for (const std::string& line : split_lines(input.string() + "\n", false)) {
    if (!is_first) {
      i.charge_bytes(unit.size());
      out += "\n";
      if (blank || !line.empty()) out += unit;
    }
    is_first = false;
    out += line;
  }
  return soft_result(i, std::move(out), input);
}

std::optional<Int> truncated(double value) {
  if (!(std::fabs(value) < 1e37)) return std::nullopt;
  return static_cast<Int>(value);
}

Value filter_int(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "int", args, {"default", "base"});
  const Value fallback = reader.value_or(0, Value(0));
  if (input.big_integer()) return input;
  std::optional<Int> value;
  if (input.is_float()) {
    value = truncated(input.number());
  } else if (input.is_number()) {
    value = input.integer();
  } else if (input.is_string()) {
    value = parse_int(input.string(), static_cast<int>(std::clamp<std::int64_t>(reader.int_or(1, 10), 0, 36)));
    const std::string text = strip(input.string(), std::nullopt, true, true);
    const std::size_t first = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
    if (!value && !reader.has(1) && text.size() > first && text.size() <= 4300 &&
        text.find_first_not_of("0123456789", first) == std::string::npos)
      return make_integer(text);
    if (!value)
      if (const auto number = parse_float(input.string())) value = truncated(*number);
  } else if (input.is_undefined()) {
    i.fail(input.undefined_message());
  }
  return value ? Value(*value) : fallback;
}

Value filter_float(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "float", args, {"default"});
  if (input.is_number()) return Value(input.number());
  if (input.big_integer()) {
    const double number = to_float(*input.big_integer());
    if (std::isinf(number)) i.fail("int too large to convert to float");
    return Value(number);
  }
  if (input.is_undefined()) i.fail(input.undefined_message());
  if (input.is_string())
    if (const auto number = parse_float(input.string())) return Value(*number);
  return reader.value_or(0, Value(0.0));
}

Value filter_abs(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "abs", args, {});
  if (input.is_undefined()) i.fail(input.undefined_message());
  if (input.big_integer()) return input.big_integer()->text.front() == '-' ? make_integer(input.big_integer()->text.substr(1)) : input;
  if (!input.is_number()) i.fail("bad operand type for abs(): '" + input.type_name() + "'");
  if (input.is_float()) return Value(std::fabs(input.number()));
  return Value(input.integer() < 0 ? -input.integer() : input.integer());
}

Value filter_round(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "round", args, {"precision", "method"});
  const auto precision = static_cast<int>(std::clamp<std::int64_t>(reader.int_or(0, 0), -30, 30));
  const std::string method = reader.has(1) ? reader.string(1) : "common";
  if (method != "common" && method != "ceil" && method != "floor") i.fail("method must be common, ceil or floor");
  if (input.is_undefined()) i.fail(input.undefined_message());
  if (input.big_integer() && method == "common" && precision >= 0) return input;
  if (!input.is_number()) i.fail("type " + input.type_name() + " doesn't define __round__ method");
  if (method != "common") {
    const double scale = std::pow(10.0, precision);
    return Value((method == "ceil" ? std::ceil(input.number() * scale) : std::floor(input.number() * scale)) / scale + 0.0);  // no -0
  }
  if (!input.is_float() && precision >= 0) return input.is_bool() ? Value(input.integer()) : input;
  if (precision < 0) {
    const double scale = std::pow(10.0, -precision);
    const double rounded = std::nearbyint(input.number() / scale) * scale;
    return input.is_float() ? Value(rounded) : Value(static_cast<Int>(rounded));
  }
  // printf rounds the exact binary value half to even, as Python does.
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, "%.*f", precision, input.number());
  return Value(parse_float(buffer).value_or(input.number()));
}

Value filter_tojson(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  ToJsonOptions options;
  options.ensure_ascii = reader.bool_or(0, false);
  options.sort_keys = reader.bool_or(3, false);
  if (reader.has(1) && !reader.required(1).is_none()) {
    if (reader.required(1).is_string())
      options.indent = reader.required(1).string();
    else
      options.indent = std::string(static_cast<std::size_t>(std::clamp<std::int64_t>(reader.int_or(1, 0), 0, kMaxIndent)), ' ');
    options.item_separator = ",";
  }
  if (reader.has(2) && !reader.required(2).is_none()) {
    const std::vector<Value> pair = iterate(i, reader.required(2));
    if (pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string()) i.fail("tojson: separators must be two strings");
    options.item_separator = pair[0].string();
    options.key_separator = pair[1].string();
  }
  std::string problem;
  const auto text = to_json(input, options, problem);
  if (!text) i.fail(problem);
  return text_result(i, *text);
}

template <bool kForce>
Value filter_escape(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "escape", args, {});
  if (input.is_markup() && !kForce) return input;
  std::string out = escape_html(input.str());
  i.charge_bytes(out.size());
  return make_markup(std::move(out));
}

Value filter_safe(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "safe", args, {});
  return make_markup(input.str());
}

Value filter_format(Interpreter& i, const Value& input, Args& args) {
  const Value soft = make_text(input.str(), input.is_markup());
  if (!args.positional.empty() && !args.keyword.empty()) i.fail("can't handle positional and keyword arguments at the same time");
  if (!args.keyword.empty()) {
    std::vector<std::pair<Value, Value>> entries;
    for (auto& [name, value] : args.keyword) entries.emplace_back(Value(name), value);
    return percent_format(i, soft, make_dict(std::move(entries)));
  }
  return percent_format(i, soft, make_tuple(args.positional));
}

Value filter_truncate(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "truncate", args, {"length", "killwords", "end", "leeway"});
  const std::string end = reader.has(2) ? reader.string(2) : "...";
  const std::int64_t bound = reader.int_or(0, 255), leeway = reader.int_or(3, 5);
  const auto size = static_cast<std::int64_t>(length(i, input)), end_size = static_cast<std::int64_t>(count_code_points(end));
  if (bound < end_size) i.fail("truncate: length is smaller than the end mark");
  if (leeway < 0) i.fail("truncate: leeway is negative");
  if (size <= bound + leeway) return input;
  if (!input.is_string()) i.fail("'" + input.type_name() + "' object has no attribute 'rsplit'");
  const std::string& text = input.string();
  std::string cut = text.substr(0, byte_of_code_point(text, static_cast<std::size_t>(bound - end_size)));
  if (!reader.bool_or(1, false))
    if (const std::size_t space = cut.rfind(' '); space != std::string::npos) cut.resize(space);
  return soft_result(i, cut + (input.is_markup() ? escape_html(end) : end), input);
}

Value filter_center(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "center", args, {"width"});
  const auto width = static_cast<std::size_t>(std::clamp<std::int64_t>(reader.int_or(0, 80), 0, 1'000'000));
  return soft_result(i, pad(input.str(), width, " ", Align::kCenter), input);
}

Value filter_wordcount(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "wordcount", args, {});
  const std::string text = input.str();
  std::size_t words = 0;
  bool in_word = false;
  for (std::size_t at = 0; at < text.size();) {
    const char32_t c = next_code_point(text, at);
    const bool is_word = c == '_' || is_alpha(c) || is_numeric(c);
    words += is_word && !in_word;
    in_word = is_word;
  }
  return Value(words);
}

std::string url_quote(const std::string& text, bool in_query) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string out;
  for (char c : text) {
    const bool is_safe = std::isalnum(static_cast<unsigned char>(c)) != 0 || std::string_view("_.-~").find(c) != std::string_view::npos;
    if (is_safe || (c == '/' && !in_query)) {
      out.push_back(c);
    } else if (c == ' ' && in_query) {
      out.push_back('+');
    } else {
      out.push_back('%');
      out.push_back(kHex[static_cast<unsigned char>(c) >> 4]);
      out.push_back(kHex[static_cast<unsigned char>(c) & 15]);
    }
  }
  return out;
}

// A text, or the pairs of a query.
Value filter_urlencode(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "urlencode", args, {});
  Args none;
  if (!input.is_dict() && !input.is_list() && !input.is_undefined() && !find_test("iterable")(i, input, none))
    return text_result(i, url_quote(input.str(), false));
  if (input.is_string()) return text_result(i, url_quote(input.string(), false));
  std::string out;
  for (const Value& pair : input.is_dict() ? i.call(*find_method(input, "items"), none).list().items : iterate(i, input)) {
    const std::vector<Value> parts = iterate(i, pair);
    if (parts.size() != 2) i.fail("urlencode: wanted pairs, found " + repr(pair));
    out += (out.empty() ? "" : "&") + url_quote(parts[0].str(), true) + "=" + url_quote(parts[1].str(), true);
  }
  return text_result(i, std::move(out));
}

Value filter_attr(Interpreter& i, const Value& input, Args& args) {
  const std::string name = ArgReader(i, "attr", args, {"name"}).string(0);
  if (input.is_undefined()) i.fail(input.undefined_message());
  // Unlike a dot, |attr never looks at items.
  if (input.is_object())
    if (auto value = input.object().attribute(name)) return *value;
  if (auto method = find_method(input, name)) return *method;
  return make_undefined("'" + input.type_name() + " object' has no attribute '" + name + "'");
}

template <std::string (*kMap)(std::string_view)>
Value map_text(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "this filter", args, {});
  return soft_result(i, kMap(input.str()), input);
}

Value filter_string(Interpreter&, const Value& input, Args&) { return input.is_string() ? input : Value(input.str()); }

constexpr FilterEntry kFilters[] = {
    {"default", filter_default},
    {"d", filter_default},
    {"trim", filter_trim},
    {"replace", filter_replace},
    {"upper", map_text<to_upper>},
    {"lower", map_text<to_lower>},
    {"capitalize", map_text<capitalize>},
    {"title", filter_title},
    {"indent", filter_indent},
    {"int", filter_int},
    {"float", filter_float},
    {"abs", filter_abs},
    {"round", filter_round},
    {"tojson", filter_tojson},
    {"string", filter_string},
    {"safe", filter_safe},
    {"escape", filter_escape<false>},
    {"e", filter_escape<false>},
    {"forceescape", filter_escape<true>},
    {"format", filter_format},
    {"truncate", filter_truncate},
    {"center", filter_center},
    {"wordcount", filter_wordcount},
    {"urlencode", filter_urlencode},
    {"attr", filter_attr},
};

}  // namespace

FilterFunction find_filter(std::string_view name) {
  const auto* entry = std::find_if(std::begin(kFilters), std::end(kFilters), [name](const FilterEntry& e) { return e.name == name; });
  return entry == std::end(kFilters) ? nullptr : entry->filter;
}

}  // namespace prl::text::jinja
