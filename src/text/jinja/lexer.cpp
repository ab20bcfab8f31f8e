#include "text/jinja/lexer.hpp"

#include <algorithm>
#include <array>
#include <charconv>

#include "base/ascii.hpp"
#include "base/error.hpp"
#include "text/jinja/interpreter.hpp"
#include "text/utf8.hpp"

namespace prl::text::jinja {
namespace {

// Longest first, so that "**" is not read as two "*".
constexpr std::array<std::string_view, 26> kOperators = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
                                                         "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};

bool is_name_start(char32_t c) {
  return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= 0x80 && is_word_character(c));
}

// Only \r\n, \r and \n end lines; one newline at the very end is dropped.
std::string normalize_newlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out.push_back('\n');
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out.push_back(source[i]);
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalize_newlines(source)) {}

  std::vector<Token> run() {
    while (position_ < source_.size()) read_root();
    tokens_.push_back({TokenType::kEnd, "", Value(), line_});
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(source_).substr(position_); }
  bool starts_with(std::string_view text) const { return rest().starts_with(text); }

  void push(TokenType type, std::string text, Value number = {}) { tokens_.push_back({type, std::move(text), std::move(number), line_}); }

  void advance(std::size_t count) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(position_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(position_ + count), '\n'));
    position_ += count;
    if (count > 0) line_starting_ = source_[position_ - 1] == '\n';
  }

  std::size_t skip_space(std::size_t from) const {
    while (from < source_.size()) {
      std::size_t next = from;
      if (!is_python_space(next_code_point(source_, next))) break;
      from = next;
    }
    return from;
  }

  // Text in front of a tag whose opening carries `sign`: "-" strips white space, else lstrip_blocks applies to block tags.
  void push_data(std::string_view text, char sign, bool is_variable) {
    std::string_view kept = text;
    if (sign == '-') {
      while (!kept.empty()) {
        std::size_t begin = kept.size() - 1;
        while (begin > 0 && (static_cast<unsigned char>(kept[begin]) & 0xC0) == 0x80) --begin;
        std::size_t next = begin;
        if (!is_python_space(next_code_point(kept, next))) break;
        kept = kept.substr(0, begin);
      }
    } else if (sign != '+' && !is_variable) {
      const std::size_t newline = text.rfind('\n');
      const std::size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
      if (line_begin > 0 || line_starting_) {
        bool is_blank = line_begin < text.size();
        for (std::size_t i = line_begin; i < text.size() && is_blank;) is_blank = is_python_space(next_code_point(text, i));
        if (is_blank) kept = text.substr(0, line_begin);
      }
    }
    if (!kept.empty()) push(TokenType::kData, std::string(kept));
    advance(text.size());
  }

  void read_root() {
    std::size_t tag = position_;
    while ((tag = source_.find('{', tag)) != std::string::npos) {
      if (tag + 1 < source_.size() && (source_[tag + 1] == '%' || source_[tag + 1] == '{' || source_[tag + 1] == '#')) break;
      ++tag;
    }
    if (tag == std::string::npos) {
      push(TokenType::kData, std::string(rest()));
      advance(rest().size());
      return;
    }
    const char kind = source_[tag + 1];
    char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    if (sign != '-' && sign != '+') sign = '\0';
    push_data(std::string_view(source_).substr(position_, tag - position_), sign, kind == '{');
    const std::size_t opening = sign == '\0' ? 2 : 3;
    if (kind == '#') return read_comment(opening);
    if (kind == '%' && read_raw(opening)) return;
    push(kind == '%' ? TokenType::kBlockBegin : TokenType::kVariableBegin, "");
    advance(opening);
    read_tag(kind == '%');
  }

  void read_comment(std::size_t opening) {
    const int line = line_;
    const std::size_t begin = position_ + opening;
    const std::size_t close = source_.find("#}", begin);
    if (close == std::string::npos) fail_at(line, "Missing end of comment tag");
    const char sign = close > begin ? source_[close - 1] : '\0';
    advance(end_of_close(close + 2, sign) - position_);
  }

  // Where the template goes on behind a closing delimiter: "-" eats white space, "+" nothing, else one newline goes.
  std::size_t end_of_close(std::size_t end, char sign) const {
    if (sign == '-') return skip_space(end);
    if (sign != '+' && end < source_.size() && source_[end] == '\n') return end + 1;
    return end;
  }

  // {% raw %} ... {% endraw %}; false if the tag at hand is another one.
  bool read_raw(std::size_t opening) {
    std::size_t at = skip_space(position_ + opening);
    if (source_.compare(at, 3, "raw") != 0) return false;
    at = skip_space(at + 3);
    if (source_.compare(at, 3, "-%}") == 0)
      at = skip_space(at + 3);
    else if (source_.compare(at, 2, "%}") == 0)
      at += 2;
    else
      return false;
    const int line = line_;
    advance(at - position_);
    for (std::size_t tag = position_; (tag = source_.find("{%", tag)) != std::string::npos; ++tag) {
      std::size_t i = tag + 2;
      char sign = '\0';
      if (i < source_.size() && (source_[i] == '-' || source_[i] == '+')) sign = source_[i++];
      i = skip_space(i);
      if (source_.compare(i, 6, "endraw") != 0) continue;
      i = skip_space(i + 6);
      char close_sign = '\0';
      if (i < source_.size() && (source_[i] == '-' || source_[i] == '+')) close_sign = source_[i++];
      if (source_.compare(i, 2, "%}") != 0) continue;
      push_data(std::string_view(source_).substr(position_, tag - position_), sign, false);
      advance(end_of_close(i + 2, close_sign) - position_);
      return true;
    }
    fail_at(line, "Missing end of raw directive");
  }

  void read_tag(bool is_block) {
    const std::string_view close = is_block ? "%}" : "}}";
    std::string balance;
    while (position_ < source_.size()) {
      const char c = source_[position_];
      if (balance.empty()) {
        const bool has_sign = (c == '-' || (is_block && c == '+')) && rest().substr(1).starts_with(close);
        if (has_sign || starts_with(close)) {
          push(is_block ? TokenType::kBlockEnd : TokenType::kVariableEnd, "");
          const char sign = has_sign ? c : (is_block ? '\0' : '+');
          advance(end_of_close(position_ + (has_sign ? 3 : 2), sign) - position_);
          return;
        }
      }
      std::size_t next = position_;
      const char32_t point = next_code_point(source_, next);
      if (is_python_space(point)) {
        advance(next - position_);
      } else if (is_ascii_digit(c)) {
        read_number();
      } else if (is_name_start(point)) {
        while (next < source_.size()) {
          std::size_t after = next;
          const char32_t follower = next_code_point(source_, after);
          if (!is_name_start(follower) && !(follower < 0x80 && is_ascii_digit(static_cast<char>(follower)))) break;
          next = after;
        }
        push(TokenType::kName, source_.substr(position_, next - position_));
        advance(next - position_);
      } else if (c == '\'' || c == '"') {
        read_string(c);
      } else {
        read_operator(balance);
      }
    }
    // The parser reports the unclosed tag at the end of the template.
  }

  void read_operator(std::string& balance) {
    for (std::string_view op : kOperators) {
      if (!starts_with(op)) continue;
      const char c = op.front();
      if (c == '(' || c == '[' || c == '{') balance.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
      if (c == ')' || c == ']' || c == '}') {
        if (balance.empty()) fail_at(line_, fmt::format("unexpected '{}'", c));
        if (balance.back() != c) fail_at(line_, fmt::format("unexpected '{}', expected '{}'", c, balance.back()));
        balance.pop_back();
      }
      push(TokenType::kOperator, std::string(op));
      advance(op.size());
      return;
    }
    std::size_t next = position_;
    next_code_point(source_, next);
    fail_at(line_, fmt::format("unexpected char '{}'", source_.substr(position_, next - position_)));
  }

  void read_number() {
    std::size_t end = position_;
    const auto digits = [&](std::size_t from) {
      while (from < source_.size() &&
             (is_ascii_digit(source_[from]) || (source_[from] == '_' && from + 1 < source_.size() && is_ascii_digit(source_[from + 1]))))
        ++from;
      return from;
    };
    int base = 10;
    if (source_[end] == '0' && end + 2 < source_.size()) {
      const char prefix = static_cast<char>(source_[end + 1] | 0x20);
      base = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 10;
    }
    bool is_float = false;
    if (base != 10) {
      end += 2;
      while (end < source_.size() && (std::isxdigit(static_cast<unsigned char>(source_[end])) != 0 || source_[end] == '_')) ++end;
    } else {
      end = digits(end);
      // "x.0.1" is two subscripts.
      const bool is_subscript = position_ > 0 && source_[position_ - 1] == '.';
      if (!is_subscript && end + 1 < source_.size() && source_[end] == '.' && is_ascii_digit(source_[end + 1])) {
        is_float = true;
        end = digits(end + 1);
      }
      if (!is_subscript && end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
        std::size_t exponent = end + 1;
        if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) ++exponent;
        if (exponent < source_.size() && is_ascii_digit(source_[exponent])) {
          is_float = true;
          end = digits(exponent);
        }
      }
    }
    if (base == 10 && !is_float && source_[position_] == '0') {  // a number other than 0 does not begin with 0
      end = position_;
      while (end < source_.size() && (source_[end] == '0' || (source_[end] == '_' && end + 1 < source_.size() && source_[end + 1] == '0')))
        ++end;
    }
    std::string text = source_.substr(position_, end - position_);
    std::erase(text, '_');
    if (is_float) {
      push(TokenType::kFloat, text, Value(parse_float(text).value_or(0)));
    } else {
      const std::optional<Int> number = parse_int(text, base);
      if (!number) fail_at(line_, "bad integer '" + text + "', or one of more than 127 bits");
      push(TokenType::kInteger, text, Value(*number));
    }
    advance(end - position_);
  }

  void read_string(char quote) {
    std::size_t end = position_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail_at(line_, fmt::format("unexpected char '{}': the string is not closed", quote));
    push(TokenType::kString, unescape(std::string_view(source_).substr(position_ + 1, end - position_ - 1)));
    advance(end + 1 - position_);
  }

  // Python's unicode-escape.
  std::string unescape(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\' || i + 1 >= text.size()) {
        out.push_back(text[i]);
        continue;
      }
      const char c = text[++i];
      constexpr std::string_view kSimple = "abfnrtv\\'\"", kMeaning = "\a\b\f\n\r\t\v\\'\"";
      if (const std::size_t simple = kSimple.find(c); simple != std::string_view::npos) {
        out.push_back(kMeaning[simple]);
      } else if (c == '\n') {
        continue;
      } else if (c == 'N') {
        fail_at(line_, "characters by name, \\N{...}, are not supported in a string");
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const std::size_t width = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        std::uint32_t code = 0;
        const std::string_view digits = text.substr(i + 1, width);
        const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
        if (digits.size() < width || result.ptr != digits.data() + width || code > 0x10FFFF)
          fail_at(line_, fmt::format("bad \\{} escape in a string", c));
        i += width;
        if (code >= 0xD800 && code < 0xE000) fail_at(line_, "a string holds half a surrogate pair");
        append_code_point(out, code);
      } else if (c >= '0' && c <= '7') {
        std::uint32_t code = 0;
        std::size_t count = 0;
        while (count < 3 && i < text.size() && text[i] >= '0' && text[i] <= '7') {
          code = code * 8 + static_cast<std::uint32_t>(text[i] - '0');
          ++count;
          ++i;
        }
        --i;
        append_code_point(out, code);
      } else {
        out.push_back('\\');
        out.push_back(c);
      }
    }
    return out;
  }

  std::string source_;
  std::size_t position_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

void fail_at(int line, const std::string& message) { fail(ErrorCode::kInvalidArgument, "[chat template] line {}: {}", line, message); }

}  // namespace prl::text::jinja
