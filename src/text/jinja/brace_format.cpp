#include <algorithm>
#include <cmath>
#include <cstdio>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/markup.hpp"
#include "text/jinja/operators.hpp"
#include "text/jinja/string_ops.hpp"
#include "text/utf8.hpp"

// str.format of Python: fields, conversions and format specifications.
namespace prl::text::jinja {
namespace {

constexpr int kMaxFieldWidth = 10'000;
constexpr int kMaxFieldNesting = 2;

// [[fill]align][sign][z][#][0][width][grouping][.precision][type]
struct FieldSpec {
  std::string fill = " ";
  char align = '\0', sign = '-', grouping = '\0', type = '\0';
  bool alternate = false;
  int width = 0, precision = -1;
};

FieldSpec parse_spec(const Interpreter& interpreter, const std::string& text) {
  FieldSpec spec;
  std::size_t i = 0;
  const auto is_align = [](char c) { return c == '<' || c == '>' || c == '=' || c == '^'; };
  std::size_t after_first = 0;
  if (!text.empty()) next_code_point(text, after_first);
  if (after_first < text.size() && is_align(text[after_first])) {
    spec.fill = text.substr(0, after_first);
    spec.align = text[after_first];
    i = after_first + 1;
  } else if (!text.empty() && is_align(text[0])) {
    spec.align = text[i++];
  }
  const auto at = [&](char c) { return i < text.size() && text[i] == c; };
  const auto number = [&] {
    int n = 0;
    for (; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i) n = std::min(n * 10 + (text[i] - '0'), kMaxFieldWidth);
    return n;
  };
  if (at('+') || at('-') || at(' ')) spec.sign = text[i++];
  if (at('#')) spec.alternate = (++i, true);
  if (at('0')) {
    ++i;
    if (spec.align == '\0') {
      spec.align = '=';
      spec.fill = "0";
    }
  }
  spec.width = number();
  if (at(',') || at('_')) spec.grouping = text[i++];
  if (at('.')) {
    ++i;
    if (i >= text.size() || text[i] < '0' || text[i] > '9') interpreter.fail("Format specifier missing precision");
    spec.precision = number();
  }
  if (i < text.size()) spec.type = text[i++];
  if (i < text.size()) interpreter.fail("Invalid format specifier '" + text + "'");
  return spec;
}

// Digits with a separator after every `every` of them, from the right.
std::string grouped(const std::string& digits, char separator, std::size_t every) {
  if (separator == '\0') return digits;
  std::string out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % every == 0) out.push_back(separator);
    out.push_back(digits[i]);
  }
  return out;
}

std::string lay_out(const FieldSpec& spec, std::string sign, std::string body, char default_align) {
  const char align = spec.align == '\0' ? default_align : spec.align;
  const auto width = static_cast<std::size_t>(spec.width);
  if (align == '=') return sign + pad(body, width - std::min(width, sign.size()), spec.fill, Align::kRight);
  const std::string text = sign + body;
  const std::size_t length = count_code_points(text);
  if (align != '^' || width <= length) return pad(text, width, spec.fill, align == '<' ? Align::kLeft : Align::kRight);
  // The odd one goes to the right, unlike in str.center.
  return pad(pad(text, length + (width - length) / 2, spec.fill, Align::kRight), width, spec.fill, Align::kLeft);
}

std::string sign_of(const FieldSpec& spec, bool is_negative) {
  return is_negative ? "-" : spec.sign == '-' ? "" : std::string(1, spec.sign);
}

// Zeros that fill a grouped number are grouped too. `others`: what the field holds beside the digits.
void fill_with_zeros(const FieldSpec& spec, std::string& digits, std::size_t others, std::size_t every) {
  if (spec.grouping == '\0' || spec.align != '=' || spec.fill != "0") return;
  std::size_t count = digits.size();
  while (others + (count + 1) + count / every <= static_cast<std::size_t>(spec.width)) ++count;
  digits.insert(0, count - digits.size(), '0');
}

std::string format_integer(const Interpreter& interpreter, const FieldSpec& spec, Int value) {
  if (spec.precision >= 0) interpreter.fail("Precision not allowed in integer format specifier");
  if (spec.type == 'c') {
    if (value < 0 || value > 0x10FFFF) interpreter.fail("%c arg not in range(0x110000)");
    if (spec.sign != '-') interpreter.fail("Sign not allowed with integer format specifier 'c'");
    std::string body;
    append_code_point(body, static_cast<char32_t>(value));
    return lay_out(spec, "", body, '<');
  }
  const int base = spec.type == 'x' || spec.type == 'X' ? 16 : spec.type == 'o' ? 8 : spec.type == 'b' ? 2 : 10;
  if (base != 10 && spec.grouping == ',') interpreter.fail(std::string("Cannot specify ',' with '") + spec.type + "'.");
  std::string digits;
  auto rest = value < 0 ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  do {
    digits.push_back((spec.type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef")[static_cast<int>(rest % static_cast<unsigned>(base))]);
    rest /= static_cast<unsigned>(base);
  } while (rest != 0);
  std::reverse(digits.begin(), digits.end());
  std::string sign = sign_of(spec, value < 0);
  if (spec.alternate && base != 10) sign += std::string("0") + spec.type;
  const std::size_t every = base == 10 ? 3 : 4;
  fill_with_zeros(spec, digits, sign.size(), every);
  return lay_out(spec, sign, grouped(digits, spec.grouping, every), '>');
}

// repr() for the type that no specification names, with at least one digit behind the point.
std::string general_digits(double value, const FieldSpec& spec) {
  char buffer[512];
  if (spec.precision < 0) return Value(value).str();
  std::snprintf(buffer, sizeof buffer, spec.alternate ? "%#.*g" : "%.*g", std::clamp(spec.precision, 1, 100), value);
  std::string text = buffer;
  // Without a type, a number that would look like an integer keeps its ".0", and one digit less makes it an exponent.
  if (text.find_first_of(".e") == std::string::npos) {
    const std::size_t digits = text.size();
    if (static_cast<int>(digits) < std::max(spec.precision, 1)) return text + ".0";
    std::snprintf(buffer, sizeof buffer, "%.*e", std::max(spec.precision, 1) - 1, value);
    text = buffer;
    if (const std::size_t e = text.find('e'); e != std::string::npos) {
      std::string mantissa = text.substr(0, e);
      if (mantissa.find('.') != std::string::npos) {
        while (mantissa.back() == '0') mantissa.pop_back();
        if (mantissa.back() == '.') mantissa.pop_back();
      }
      text = mantissa + text.substr(e);
    }
  }
  return text;
}

std::string format_float(const FieldSpec& spec, double value) {
  const bool is_negative = std::signbit(value) && !std::isnan(value);
  double magnitude = std::fabs(value);
  std::string body;
  if (!std::isfinite(value)) {
    body = std::isnan(value) ? "nan" : "inf";
    if (spec.type == 'F' || spec.type == 'E' || spec.type == 'G')
      std::transform(body.begin(), body.end(), body.begin(), [](char c) { return static_cast<char>(c - 32); });
    if (spec.type == '%') body += '%';
    return lay_out(spec, sign_of(spec, is_negative), body, '>');
  }
  if (spec.type == '\0') {
    body = general_digits(magnitude, spec);
  } else {
    if (spec.type == '%') magnitude *= 100;
    const char type = spec.type == '%' ? 'f' : spec.type == 'n' ? 'g' : spec.type;
    const char format[] = {
        '%', spec.alternate ? '#' : '.', spec.alternate ? '.' : '*', spec.alternate ? '*' : type, spec.alternate ? type : '\0', '\0'};
    body.resize(512);
    const int size = std::snprintf(body.data(), body.size(), format, spec.precision < 0 ? 6 : std::min(spec.precision, 100), magnitude);
    body.resize(static_cast<std::size_t>(size));
    if (spec.type == '%') body += '%';
  }
  const std::size_t end = std::min(body.find_first_not_of("0123456789"), body.size());
  const std::string rest = body.substr(end);
  std::string digits = body.substr(0, end);
  const std::string sign = sign_of(spec, is_negative);
  fill_with_zeros(spec, digits, sign.size() + rest.size(), 3);
  return lay_out(spec, sign, grouped(digits, spec.grouping, 3) + rest, '>');
}

std::string format_string(const Interpreter& interpreter, const FieldSpec& spec, std::string text) {
  if (spec.type != '\0' && spec.type != 's')
    interpreter.fail(std::string("Unknown format code '") + spec.type + "' for object of type 'str'");
  if (spec.sign != '-') interpreter.fail("Sign not allowed in string format specifier");
  if (spec.align == '=' && spec.fill != "0") interpreter.fail("'=' alignment not allowed in string format specifier");
  if (spec.grouping != '\0') interpreter.fail(std::string("Cannot specify '") + spec.grouping + "' with 's'.");
  if (spec.precision >= 0) text.resize(byte_of_code_point(text, static_cast<std::size_t>(spec.precision)));
  FieldSpec plain = spec;
  if (plain.align == '=') plain.align = '<';
  return lay_out(plain, "", std::move(text), '<');
}

// format(value, text)
std::string format_value(const Interpreter& interpreter, const Value& value, const std::string& text) {
  if (text.empty()) return value.str();
  if (value.big_integer()) interpreter.fail("format of integers beyond 128 bits is not built, without a specification they are printed");
  if (!value.is_string() && !value.is_number()) {
    if (value.is_undefined()) interpreter.fail(value.undefined_message());
    interpreter.fail("unsupported format string passed to " + value.type_name() + ".__format__");
  }
  const FieldSpec spec = parse_spec(interpreter, text);
  if (value.is_string()) return format_string(interpreter, spec, value.string());
  const std::string_view kInteger = "bcdoxXn", kFloat = "eEfFgG%n";
  if (!value.is_float() && (spec.type == '\0' || kInteger.find(spec.type) != std::string_view::npos)) {
    if (value.is_bool() && spec.type == '\0') {  // bool has int's format, but for the plain one
      const FieldSpec number = spec;
      return format_integer(interpreter, number, value.integer());
    }
    return format_integer(interpreter, spec, value.integer());
  }
  if (spec.type != '\0' && kFloat.find(spec.type) == std::string_view::npos)
    interpreter.fail(std::string("Unknown format code '") + spec.type + "' for object of type '" + value.type_name() + "'");
  return format_float(spec, value.number());
}

class BraceFormatter {
 public:
  BraceFormatter(Interpreter& interpreter, const Args& args, const Value* mapping, bool is_markup)
      : interpreter_(interpreter), args_(args), mapping_(mapping), is_markup_(is_markup) {}

  std::string run(std::string_view text, int depth) {
    if (depth > kMaxFieldNesting) interpreter_.fail("Max string recursion exceeded");
    std::string out;
    for (std::size_t at = 0; at < text.size(); ++at) {
      const char c = text[at];
      if (c != '{' && c != '}') {
        out.push_back(c);
      } else if (at + 1 < text.size() && text[at + 1] == c && depth == 1) {
        out.push_back(c);
        ++at;
      } else {
        if (c == '}') interpreter_.fail("Single '}' encountered in format string");
        const std::size_t close = end_of_field(text, at);
        out += field(text.substr(at + 1, close - at - 1), depth);
        at = close;
      }
    }
    interpreter_.charge_bytes(out.size());
    return out;
  }

 private:
  std::size_t end_of_field(std::string_view text, std::size_t open) const {
    int nesting = 0;
    bool in_brackets = false, in_spec = false;
    for (std::size_t i = open; i < text.size(); ++i) {
      if (!in_spec && i > open && text[i] == '[') in_brackets = true;
      if (text[i] == ']') in_brackets = false;
      if (in_brackets) continue;
      if (text[i] == ':') in_spec = true;
      if (text[i] == '{') ++nesting;
      if (text[i] == '}' && --nesting == 0) return i;
    }
    interpreter_.fail(open + 1 == text.size() ? "Single '{' encountered in format string" : "expected '}' before end of string");
  }

  std::string field(std::string_view text, int depth) {
    std::size_t name_end = 0;
    bool in_brackets = false;
    for (; name_end < text.size(); ++name_end) {
      if (text[name_end] == '[') in_brackets = true;
      if (text[name_end] == ']') in_brackets = false;
      if (!in_brackets && (text[name_end] == '!' || text[name_end] == ':')) break;
    }
    Value value = lookup(text.substr(0, name_end));
    std::string_view rest = text.substr(name_end);
    char conversion = '\0';
    if (rest.starts_with('!')) {
      if (rest.size() < 2) interpreter_.fail("unmatched '{' in format spec");
      conversion = rest[1];
      rest.remove_prefix(2);
      if (!rest.empty() && rest[0] != ':') interpreter_.fail("expected ':' after conversion specifier");
    }
    const std::string spec = rest.empty() ? "" : run(rest.substr(1), depth + 1);
    if (conversion == 'r' || conversion == 'a') {
      Args one{{value}, {}};
      value = percent_format(interpreter_, Value(conversion == 'r' ? "%r" : "%a"), make_tuple({value}));
    } else if (conversion == 's') {
      value = Value(value.str());
    } else if (conversion != '\0') {
      interpreter_.fail(std::string("Unknown conversion specifier '") + conversion + "'");
    }
    if (is_markup_ && value.is_markup()) {
      if (!spec.empty()) interpreter_.fail("Unsupported format specification for Markup.");
      return value.string();
    }
    std::string out = format_value(interpreter_, value, spec);
    interpreter_.charge_bytes(out.size());
    return is_markup_ ? escape_html(out) : out;
  }

  // name or number, then .attribute and [index]
  Value lookup(std::string_view text) {
    const std::size_t end = std::min(text.find_first_of(".["), text.size());
    const std::string_view name = text.substr(0, end);
    Value value;
    if (name.empty() || name.find_first_not_of("0123456789") == std::string_view::npos) {
      if (numbering_ != 0 && (numbering_ == 1) != name.empty())
        interpreter_.fail(name.empty() ? "cannot switch from manual field specification to automatic field numbering"
                                       : "cannot switch from automatic field numbering to manual field specification");
      numbering_ = name.empty() ? 1 : 2;
      const std::size_t index = name.empty() ? next_++ : name.size() > 6 ? args_.positional.size() : std::stoul(std::string(name));
      if (mapping_ != nullptr) interpreter_.fail("Format string contains positional fields");
      if (index >= args_.positional.size())
        interpreter_.fail("Replacement index " + std::to_string(index) + " out of range for positional args tuple");
      value = args_.positional[index];
    } else {
      value = named(std::string(name));
    }
    std::string_view rest = text.substr(end);
    while (!rest.empty()) {
      const bool is_attribute = rest[0] == '.';
      const std::size_t stop = is_attribute ? std::min(rest.find_first_of(".[", 1), rest.size()) : rest.find(']');
      if (stop == std::string_view::npos) interpreter_.fail("Missing ']' in format string");
      const std::string part(rest.substr(1, stop - 1));
      if (part.empty()) interpreter_.fail("Empty attribute in format string");
      const bool is_number = part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
      value = is_attribute ? get_attribute(interpreter_, value, part)
                           : get_item(interpreter_, value, is_number ? Value(static_cast<Int>(std::stol(part))) : Value(part));
      rest.remove_prefix(is_attribute ? stop : stop + 1);
      if (!is_attribute && !rest.empty() && rest[0] != '.' && rest[0] != '[')
        interpreter_.fail("Only '.' or '[' may follow ']' in format field specifier");
    }
    return value;
  }

  Value named(const std::string& name) const {
    if (mapping_ != nullptr) return get_item(interpreter_, *mapping_, Value(name));
    for (const auto& [key, value] : args_.keyword)
      if (key == name) return value;
    interpreter_.fail("str.format has no value for the field '" + name + "'");
  }

  Interpreter& interpreter_;
  const Args& args_;
  const Value* mapping_;
  bool is_markup_;
  std::size_t next_ = 0;
  int numbering_ = 0;  // 1: {}, 2: {0}
};

}  // namespace

Value brace_format(Interpreter& interpreter, const Value& text, const Args& args, const Value* mapping) {
  return make_text(BraceFormatter(interpreter, args, mapping, text.is_markup()).run(text.string(), 1), text.is_markup());
}

}  // namespace prl::text::jinja
