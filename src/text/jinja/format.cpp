#include <algorithm>
#include <cmath>
#include <cstdio>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/markup.hpp"
#include "text/jinja/string_ops.hpp"
#include "text/utf8.hpp"

// printf-style formatting of Python strings.
namespace prl::text::jinja {
namespace {

constexpr int kMaxWidth = 10'000;

struct Spec {
  bool left = false, plus = false, space = false, zero = false, alternate = false;
  int width = 0, precision = -1;
};

std::string in_base(Int value, int base, bool upper) {
  const char* digits = upper ? "0123456789ABCDEF" : "0123456789abcdef";
  auto rest = value < 0 ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  std::string out;
  do {
    out.push_back(digits[static_cast<int>(rest % static_cast<unsigned>(base))]);
    rest /= static_cast<unsigned>(base);
  } while (rest != 0);
  std::reverse(out.begin(), out.end());
  return out;
}

std::string float_text(double value, char conversion, const Spec& spec) {
  const char format[] = {'%', '.', '*', conversion, '\0'};
  std::string out(512, '\0');
  const int size = std::snprintf(out.data(), out.size(), format, spec.precision < 0 ? 6 : std::min(spec.precision, 100), std::fabs(value));
  out.resize(static_cast<std::size_t>(size));
  return out;
}

// ascii(): everything else as an escape.
std::string ascii_only(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const auto c = static_cast<std::uint32_t>(next_code_point(text, i));
    char escape[16];
    if (c < 0x80) {
      out.push_back(static_cast<char>(c));
      continue;
    }
    std::snprintf(escape, sizeof escape, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
    out += escape;
  }
  return out;
}

/// One formatting of `source % values`.
class PercentFormat {
 public:
  PercentFormat(Interpreter& interpreter, const Value& source, const Value& values)
      : interpreter_(interpreter),
        source_(source),
        values_(values),
        text_(source.string()),
        is_tuple_(values.is_list() && values.list().flavor == ListFlavor::kTuple) {}

  Value run() {
    std::string out;
    while (at_ < text_.size())
      if (text_[at_] == '%')
        append_conversion(out);
      else
        out.push_back(text_[at_++]);
    check_all_taken();
    interpreter_.charge_bytes(out.size());
    return make_text(std::move(out), source_.is_markup());
  }

 private:
  [[noreturn]] void fail(const std::string& message) const { interpreter_.fail(message); }
  char current() const {
    if (at_ >= text_.size()) fail("incomplete format");
    return text_[at_];
  }
  const Value& take() {
    if (is_tuple_ ? next_ >= values_.list().items.size() : next_ > 0) fail("not enough arguments for format string");
    ++next_;
    return is_tuple_ ? values_.list().items[next_ - 1] : values_;
  }
  void check_all_taken() const {
    const bool is_single_left = next_ == 0 && !used_mapping_ && !values_.is_dict() && !values_.is_list() && !values_.is_undefined();
    if (is_tuple_ ? next_ < values_.list().items.size() : is_single_left) fail("not all arguments converted during string formatting");
  }

  /// The value of %(key), or null where there is no key.
  const Value* read_mapped() {
    if (text_[at_] != '(') return nullptr;
    const std::size_t close = text_.find(')', at_);
    if (!values_.is_dict()) fail("format requires a mapping");
    if (close == std::string::npos) fail("incomplete format key");
    const std::string key = text_.substr(at_ + 1, close - at_ - 1);
    const Value* value = values_.dict().get(key);
    if (value == nullptr) fail("the format key '" + key + "' is missing");
    used_mapping_ = true;
    at_ = close + 1;
    return value;
  }
  /// A width or precision: digits, or * for the next argument.
  int read_number(Spec& spec) {
    int n = 0;
    if (at_ < text_.size() && text_[at_] == '*') {
      ++at_;
      const Value& given = take();
      if (!given.is_int() && !given.is_bool()) fail("* wants int");
      n = static_cast<int>(std::clamp<Int>(given.integer(), -kMaxWidth, kMaxWidth));
      if (n < 0) spec.left = true;
      return std::abs(n);
    }
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) n = std::min(n * 10 + (text_[at_] - '0'), kMaxWidth);
    return n;
  }
  Spec read_spec() {
    Spec spec;
    for (; at_ < text_.size() && std::string_view("-+ 0#").find(text_[at_]) != std::string_view::npos; ++at_) {
      spec.left |= text_[at_] == '-';
      spec.plus |= text_[at_] == '+';
      spec.space |= text_[at_] == ' ';
      spec.zero |= text_[at_] == '0';
      spec.alternate |= text_[at_] == '#';
    }
    spec.width = read_number(spec);
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      spec.precision = read_number(spec);
    }
    return spec;
  }

  void append_conversion(std::string& out) {
    ++at_;
    current();
    const Value* value = read_mapped();
    Spec spec = read_spec();
    const char conversion = current();
    ++at_;
    if (conversion == '%') {
      out.push_back('%');
      return;
    }
    if (value == nullptr) value = &take();
    if (value->is_undefined() && conversion != 's' && conversion != 'r') fail(value->undefined_message());
    Converted converted = convert(*value, conversion, spec);
    if (converted.sign.empty() && spec.plus) converted.sign = "+";
    if (converted.sign.empty() && spec.space) converted.sign = " ";
    const auto width = static_cast<std::size_t>(spec.width);
    interpreter_.charge_bytes(width + converted.body.size());
    if (spec.zero && !spec.left)
      out += converted.sign + pad(converted.body, width - std::min(width, converted.sign.size()), "0", Align::kRight);
    else
      out += pad(converted.sign + converted.body, width, " ", spec.left ? Align::kLeft : Align::kRight);
  }

  struct Converted {
    std::string body, sign;
  };
  Converted convert(const Value& value, char conversion, Spec& spec) const {
    switch (conversion) {
      case 's':
      case 'r':
      case 'a': return {text_of(value, conversion, spec), ""};
      case 'c': return {character(value), ""};
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o': return integer(value, conversion, spec);
      case 'f':
      case 'F':
      case 'e':
      case 'E':
      case 'g':
      case 'G':
        if (!value.is_number()) fail("must be real number, not " + value.type_name());
        return {float_text(value.number(), conversion, spec), std::signbit(value.number()) ? "-" : ""};
      default: fail(std::string("unsupported format character '") + conversion + "'");
    }
  }
  std::string escaped(std::string part, bool is_markup) const { return source_.is_markup() && !is_markup ? escape_html(part) : part; }
  std::string text_of(const Value& value, char conversion, Spec& spec) const {
    std::string body = conversion == 's' ? escaped(value.str(), value.is_markup()) : escaped(repr(value), false);
    if (conversion == 'a') body = ascii_only(body);
    if (spec.precision >= 0) body.resize(byte_of_code_point(body, static_cast<std::size_t>(spec.precision)));
    spec.zero = spec.plus = spec.space = false;
    return body;
  }
  std::string character(const Value& value) const {
    if (value.is_string() && count_code_points(value.string()) == 1) return value.string();
    if (!value.is_int() && !value.is_bool()) fail("%c requires int or char");
    if (value.integer() < 0 || value.integer() > 0x10FFFF) fail("%c arg not in range(0x110000)");
    std::string body;
    append_code_point(body, static_cast<char32_t>(value.integer()));
    return body;
  }
  Converted integer(const Value& value, char conversion, const Spec& spec) const {
    if (value.big_integer()) {
      if (conversion != 'd' && conversion != 'i' && conversion != 'u')
        fail(std::string("%") + conversion + " format of integers beyond 128 bits is not built");
      const bool is_negative = value.big_integer()->text.front() == '-';
      return {value.big_integer()->text.substr(is_negative ? 1 : 0), is_negative ? "-" : ""};
    }
    if (!value.is_number() || (value.is_float() && conversion != 'd' && conversion != 'i' && conversion != 'u'))
      fail(std::string("%") + conversion + " format: a number is required, not " + value.type_name());
    if (value.is_float() && !(std::fabs(value.number()) < 1e37)) fail("cannot convert this float to an integer");
    const Int integer = value.is_float() ? static_cast<Int>(value.number()) : value.integer();
    const int base = conversion == 'x' || conversion == 'X' ? 16 : conversion == 'o' ? 8 : 10;
    std::string body = in_base(integer, base, conversion == 'X');
    if (spec.alternate && base != 10) body = std::string("0") + conversion + body;
    return {std::move(body), integer < 0 ? "-" : ""};
  }

  Interpreter& interpreter_;
  const Value& source_;
  const Value& values_;
  const std::string& text_;
  bool is_tuple_ = false;
  bool used_mapping_ = false;
  std::size_t at_ = 0;    ///< byte of text_
  std::size_t next_ = 0;  ///< argument
};

}  // namespace

Value percent_format(Interpreter& interpreter, const Value& source, const Value& values) {
  return PercentFormat(interpreter, source, values).run();
}

}  // namespace prl::text::jinja
