#include "text/json_python.hpp"

#include <boost/json/array.hpp>
#include <boost/json/basic_parser_impl.hpp>
#include <boost/json/monotonic_resource.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value_stack.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/error.hpp"
#include "text/json_together.hpp"
#include "text/utf8.hpp"

namespace prl::text {
namespace {

namespace json = boost::json;

/// Begins the string that stands for a number: bytes that UTF-8 never has, and more, as what a model wrote may be no UTF-8.
constexpr std::string_view kNumberMark = "\xFF\xFF number ";
constexpr std::size_t kMaxBigIntegerSize = 4301;  // as Python's int(): 4300 digits, and a sign

void dump(std::string& out, const json::value& value, const JsonDumpOptions& options, std::string_view item_separator, int depth) {
  const auto new_line = [&](int levels) {
    if (options.indent < 0) return;
    out.push_back('\n');
    out.append(static_cast<std::size_t>(options.indent) * static_cast<std::size_t>(levels), ' ');
  };
  switch (value.kind()) {
    case json::kind::null: out += "null"; break;
    case json::kind::bool_: out += value.get_bool() ? "true" : "false"; break;
    case json::kind::int64: out += std::to_string(value.get_int64()); break;
    case json::kind::uint64: out += std::to_string(value.get_uint64()); break;
    case json::kind::double_: {
      const double number = value.get_double();
      if (std::isnan(number))
        out += "NaN";
      else if (std::isinf(number))
        out += number < 0 ? "-Infinity" : "Infinity";
      else
        out += python_float_repr(number);
      break;
    }
    case json::kind::string:
      if (const auto number = kept_number(value)) {
        out += *number;
        break;
      }
      append_json_string(out, {value.get_string().data(), value.get_string().size()}, options.ensure_ascii);
      break;
    case json::kind::array: {
      const json::array& array = value.get_array();
      if (array.empty()) {
        out += "[]";
        break;
      }
      out.push_back('[');
      for (std::size_t i = 0; i < array.size(); ++i) {
        if (i > 0) out += item_separator;
        new_line(depth + 1);
        dump(out, array[i], options, item_separator, depth + 1);
      }
      new_line(depth);
      out.push_back(']');
      break;
    }
    case json::kind::object: {
      const json::object& object = value.get_object();
      if (object.empty()) {
        out += "{}";
        break;
      }
      std::vector<const json::key_value_pair*> members;
      for (const auto& member : object) members.push_back(&member);
      if (options.sort_keys)  // UTF-8 byte order is code point order
        std::sort(members.begin(), members.end(), [](const auto* a, const auto* b) { return a->key() < b->key(); });
      out.push_back('{');
      for (std::size_t i = 0; i < members.size(); ++i) {
        if (i > 0) out += item_separator;
        new_line(depth + 1);
        append_json_string(out, {members[i]->key().data(), members[i]->key().size()}, options.ensure_ascii);
        out += options.key_separator;
        dump(out, members[i]->value(), options, item_separator, depth + 1);
      }
      new_line(depth);
      out.push_back('}');
      break;
    }
  }
}

// Feeds a value_stack like Boost's own parser, but reads each double from its text with std::from_chars.
struct ExactHandler {
  static constexpr std::size_t max_object_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_array_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_key_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_string_size = static_cast<std::size_t>(-1);
  ExactHandler(json::storage_ptr memory, unsigned char* stack_bytes, std::size_t num_stack_bytes)
      : stack(std::move(memory), stack_bytes, num_stack_bytes) {}
  json::value_stack stack;
  std::string number;
  bool keeps_large = false;
  bool has_kept = false;

  bool on_document_begin(json::error_code&) { return true; }
  bool on_document_end(json::error_code&) { return true; }
  bool on_object_begin(json::error_code&) { return true; }
  bool on_object_end(std::size_t n, json::error_code&) { return stack.push_object(n), true; }
  bool on_array_begin(json::error_code&) { return true; }
  bool on_array_end(std::size_t n, json::error_code&) { return stack.push_array(n), true; }
  bool on_key_part(json::string_view s, std::size_t, json::error_code&) { return stack.push_chars(s), true; }
  bool on_key(json::string_view s, std::size_t, json::error_code&) { return stack.push_key(s), true; }
  bool on_string_part(json::string_view s, std::size_t, json::error_code&) { return stack.push_chars(s), true; }
  bool on_string(json::string_view s, std::size_t, json::error_code&) { return stack.push_string(s), true; }
  bool on_number_part(json::string_view s, json::error_code&) { return number.append(s.data(), s.size()), true; }
  bool on_int64(std::int64_t i, json::string_view, json::error_code&) { return number.clear(), stack.push_int64(i), true; }
  bool on_uint64(std::uint64_t i, json::string_view, json::error_code&) { return number.clear(), stack.push_uint64(i), true; }
  bool on_double(double d, json::string_view s, json::error_code& error) {
    number.append(s.data(), s.size());
    double exact = d;
    // Out of range leaves Boost's infinity or zero in place, which is what Python gives too.
    std::from_chars(number.data(), number.data() + number.size(), exact);
    const bool is_integer = number.find_first_of(".eE") == std::string::npos;
    const bool is_lost =
        std::isinf(exact) || (exact == 0 && number.substr(0, number.find_first_of("eE")).find_first_of("123456789") != std::string::npos);
    if (keeps_large && (is_integer || is_lost)) {
      if (is_integer && number.size() > kMaxBigIntegerSize) return error = json::error::exponent_overflow, false;
      stack.push_string(std::string(kNumberMark) + number);
      has_kept = true;
      return number.clear(), true;
    }
    number.clear();
    return stack.push_double(exact), true;
  }
  bool on_bool(bool b, json::error_code&) { return stack.push_bool(b), true; }
  bool on_null(json::error_code&) { return stack.push_null(), true; }
  bool on_comment_part(json::string_view, json::error_code&) { return true; }
  bool on_comment(json::string_view, json::error_code&) { return true; }
};

/// Members of a request whose numbers somebody else reads: a template, or who writes the grammar of a schema.
constexpr std::string_view kPassedOn[] = {"messages",        "tools",       "documents",          "chat_template_kwargs",
                                          "response_format", "guided_json", "structured_outputs", "text"};

/// The numbers of a request's other members. A member of extra_body is one of the request.
void make_request_doubles(json::value& body) {
  json::object* const object = body.if_object();
  if (object == nullptr) return make_doubles(body);
  for (auto& member : *object) {
    if (member.key() == "extra_body" && member.value().is_object())
      make_request_doubles(member.value());
    else if (std::find(std::begin(kPassedOn), std::end(kPassedOn), std::string_view(member.key())) == std::end(kPassedOn))
      make_doubles(member.value());
  }
}

bool has_kept_number(const json::value& value);
bool has_kept_number(const json::array& items) {
  return std::any_of(items.begin(), items.end(), [](const json::value& item) { return has_kept_number(item); });
}
bool has_kept_number(const json::object& object) {
  return std::any_of(object.begin(), object.end(), [](const auto& member) { return has_kept_number(member.value()); });
}
bool has_kept_number(const json::value& value) {
  if (const json::array* items = value.if_array()) return has_kept_number(*items);
  if (const json::object* object = value.if_object()) return has_kept_number(*object);
  return kept_number(value).has_value();
}

void append_json_text(std::string& out, const json::value& value);
void append_json_text(std::string& out, const json::array& items) {
  out.push_back('[');
  for (const json::value& item : items) {
    if (&item != items.begin()) out.push_back(',');
    append_json_text(out, item);
  }
  out.push_back(']');
}
void append_json_text(std::string& out, const json::object& object) {
  out.push_back('{');
  for (const auto& member : object) {
    if (&member != object.begin()) out.push_back(',');
    out += json::serialize(member.key());
    out.push_back(':');
    append_json_text(out, member.value());
  }
  out.push_back('}');
}
void append_json_text(std::string& out, const json::value& value) {
  if (const json::array* items = value.if_array()) return append_json_text(out, *items);
  if (const json::object* object = value.if_object()) return append_json_text(out, *object);
  const auto number = kept_number(value);
  out += number ? std::string(*number) : json::serialize(value);
}

/// The text of a tree with kept numbers; without any it is Boost's own, which is faster.
template <typename Tree>
std::string text_of_tree(const Tree& tree) {
  if (!has_kept_number(tree)) return json::serialize(tree);
  std::string out;
  append_json_text(out, tree);
  return out;
}

}  // namespace

std::optional<std::string_view> kept_number(const json::value& value) noexcept {
  const json::string* text = value.if_string();
  if (text == nullptr || !std::string_view(text->data(), text->size()).starts_with(kNumberMark)) return std::nullopt;
  const std::string_view number = std::string_view(text->data(), text->size()).substr(kNumberMark.size());
  const std::string_view digits = number.starts_with('-') ? number.substr(1) : number;
  if (digits.empty() || digits.front() < '0' || digits.front() > '9' ||
      digits.find_first_not_of("0123456789.eE+-") != std::string_view::npos)
    return std::nullopt;
  return number;
}

bool is_text(const json::value& value) noexcept { return value.is_string() && !kept_number(value); }

std::optional<double> as_double(const json::value& value) noexcept {
  if (value.is_int64()) return static_cast<double>(value.get_int64());
  if (value.is_uint64()) return static_cast<double>(value.get_uint64());
  if (value.is_double()) return value.get_double();
  if (!kept_number(value)) return std::nullopt;
  return std::strtod(value.get_string().c_str() + kNumberMark.size(), nullptr);
}

std::string to_json_text(const json::value& value) { return text_of_tree(value); }
std::string to_json_text(const json::object& object) { return text_of_tree(object); }
std::string to_json_text(const json::array& items) { return text_of_tree(items); }

void make_doubles(json::value& value, std::initializer_list<std::string_view> kept) {
  if (json::array* items = value.if_array()) {
    for (json::value& item : *items) make_doubles(item, kept);
  } else if (json::object* object = value.if_object()) {
    for (auto& member : *object)
      if (std::find(kept.begin(), kept.end(), std::string_view(member.key())) == kept.end()) make_doubles(member.value(), kept);
  } else if (kept_number(value)) {
    value = *as_double(value);
  }
}

std::string dump_python(const json::value& value, const JsonDumpOptions& options) {
  std::string_view item_separator = options.item_separator;
  if (options.indent >= 0 && item_separator == ", ") item_separator = ",";
  std::string out;
  dump(out, value, options, item_separator, 0);
  return out;
}

std::string python_float_repr(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto written = std::to_chars(buffer, buffer + sizeof buffer, number, std::chars_format::scientific);
  const std::string_view text(buffer, static_cast<std::size_t>(written.ptr - buffer));
  const std::size_t e = text.find('e');
  int exponent = 0;
  const std::string_view exponent_text = text.substr(e + 1);
  std::from_chars(exponent_text.data() + (exponent_text.front() == '+' ? 1 : 0), exponent_text.data() + exponent_text.size(), exponent);
  std::string sign, digits;
  for (char c : text.substr(0, e)) {
    if (c == '-') sign = "-";
    if (c >= '0' && c <= '9') digits.push_back(c);
  }
  if (exponent < -4 || exponent >= 16) {
    std::string out = sign + digits.substr(0, 1);
    if (digits.size() > 1) out += "." + digits.substr(1);
    const int size = std::abs(exponent);
    return out + (exponent < 0 ? "e-" : "e+") + (size < 10 ? "0" : "") + std::to_string(size);
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  const auto num_integer = static_cast<std::size_t>(exponent + 1);
  if (digits.size() <= num_integer) return sign + digits + std::string(num_integer - digits.size(), '0') + ".0";
  return sign + digits.substr(0, num_integer) + "." + digits.substr(num_integer);
}

void append_json_string(std::string& out, std::string_view text, bool ensure_ascii) {
  constexpr char kHex[] = "0123456789abcdef";
  const auto escape = [&](std::uint32_t unit) {
    out += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out.push_back(kHex[unit >> shift & 15]);
  };
  out.push_back('"');
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t begin = i;
    const char32_t c = next_code_point(text, i);
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\f': out += "\\f"; break;
      case '\b': out += "\\b"; break;
      default:
        if (c < 0x20 || (ensure_ascii && c > 0x7E && c < 0x10000)) {
          escape(c);
        } else if (ensure_ascii && c >= 0x10000) {
          escape(0xD800 + ((c - 0x10000) >> 10));
          escape(0xDC00 + ((c - 0x10000) & 0x3FF));
        } else {
          out.append(text.substr(begin, i - begin));
        }
    }
  }
  out.push_back('"');
}

namespace {

json::value parse_into(const json::storage_ptr& memory, std::string_view text, std::size_t max_depth, LargeNumbers large_numbers) {
  json::parse_options options;
  options.max_depth = max_depth;
  unsigned char stack_bytes[4096];  // of the values that are open, before any is asked of the heap
  json::basic_parser<ExactHandler> parser(options, json::storage_ptr(), stack_bytes, sizeof stack_bytes);
  parser.handler().stack.reset(memory);
  parser.handler().keeps_large = large_numbers != LargeNumbers::kAsDoubles;
  json::error_code error;
  const std::size_t consumed = parser.write_some(false, text.data(), text.size(), error);
  if (!error && consumed < text.size() && text.substr(consumed).find_first_not_of(" \t\r\n") != std::string_view::npos)
    error = json::error::extra_data;
  if (error) {
    parser.handler().stack.reset();
    fail(ErrorCode::kInvalidArgument, "not valid JSON near byte {} of {}: {}", consumed, text.size(), error.message());
  }
  json::value value = parser.handler().stack.release();
  if (large_numbers == LargeNumbers::kKeepInRequest && parser.handler().has_kept) make_request_doubles(value);
  return value;
}

}  // namespace

json::value parse_json(std::string_view text, std::size_t max_depth, LargeNumbers large_numbers) {
  return parse_into(json::storage_ptr(), text, max_depth, large_numbers);
}

json::value parse_json_together(std::string_view text, std::size_t max_depth, LargeNumbers large_numbers) {
  return parse_into(json::make_shared_resource<json::monotonic_resource>(text.size() + 1024), text, max_depth, large_numbers);
}

}  // namespace prl::text
