#include "env/numeric_answer.hpp"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <utility>

#include "base/ascii.hpp"
#include "env/rubric.hpp"

namespace prl::env {
namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) text.replace(at, from.size(), to);
}

/// End of the group that opens at text[open] == '{', or npos.
std::size_t closing_brace(std::string_view text, std::size_t open) {
  int depth = 0;
  for (std::size_t at = open; at < text.size(); ++at) {
    if (text[at] == '\\') {
      ++at;
      continue;
    }
    if (text[at] == '{') ++depth;
    if (text[at] == '}' && --depth == 0) return at;
  }
  return std::string_view::npos;
}

/// \text{ab} to ab, for the commands that only change how their argument looks.
void unwrap(std::string& text, std::string_view command) {
  for (std::size_t at = text.find(command); at != std::string::npos; at = text.find(command, at)) {
    const std::size_t open = at + command.size() - 1;
    const std::size_t close = closing_brace(text, open);
    if (close == std::string::npos) return;
    text.erase(close, 1);
    text.erase(at, command.size());
  }
}

/// Reads numbers from the front of a text.
class NumberReader {
 public:
  explicit NumberReader(std::string_view text) : text_(text) {}

  /// sign? (fraction | decimal ("/" decimal | fraction)?), the rest being a unit.
  std::optional<Rational> read() {
    skip_spaces();
    bool is_negative = false;
    if (take("-"))
      is_negative = true;
    else
      take("+");
    skip_spaces();
    std::optional<Rational> value = fraction();
    if (!value) {
      value = decimal();
      if (!value) return std::nullopt;
      const std::size_t before = at_;
      skip_spaces();
      if (take("/")) {
        skip_spaces();
        const auto divisor = decimal();
        if (!divisor) return std::nullopt;
        value = divide(*value, *divisor);
      } else if (value->denominator == 1 && text_.substr(at_).starts_with("\\frac")) {
        const auto part = fraction();
        if (!part) return std::nullopt;
        value = add(*value, *part);
      } else {
        at_ = before;
      }
    }
    if (!value || !rest_is_unit()) return std::nullopt;
    if (is_negative) value->numerator = -value->numerator;
    return value;
  }

 private:
  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n')) ++at_;
  }
  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  /// Digits with an optional point; a comma counts as the separator of thousands when exactly three digits follow.
  std::optional<Rational> decimal() {
    std::int64_t numerator = 0;  // at most 18 digits
    std::int64_t denominator = 1;
    int num_digits = 0;
    bool has_point = false;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (is_ascii_digit(c)) {
        if (numerator != 0 || c != '0' || has_point) ++num_digits;
        if (num_digits > 18) return std::nullopt;
        numerator = numerator * 10 + (c - '0');
        if (has_point) denominator *= 10;
        is_read_ = true;
      } else if (c == '.' && !has_point && at_ + 1 < text_.size() && is_ascii_digit(text_[at_ + 1])) {
        has_point = true;
      } else if (!(c == ',' && !has_point && is_read_ && has_three_digits(at_ + 1))) {
        break;
      }
    }
    if (!std::exchange(is_read_, false)) return std::nullopt;
    return make_rational(numerator, denominator);
  }
  bool has_three_digits(std::size_t from) const {
    for (std::size_t i = from; i < from + 3; ++i)
      if (i >= text_.size() || !is_ascii_digit(text_[i])) return false;
    return from + 3 >= text_.size() || !is_ascii_digit(text_[from + 3]);
  }

  /// \frac{a}{b} or \frac12.
  std::optional<Rational> fraction() {
    const std::size_t before = at_;
    if (!take("\\frac")) return std::nullopt;
    const auto top = argument();
    const auto bottom = argument();
    if (top && bottom) return divide(*top, *bottom);
    at_ = before;
    return std::nullopt;
  }
  std::optional<Rational> argument() {
    skip_spaces();
    if (at_ < text_.size() && is_ascii_digit(text_[at_])) return Rational{text_[at_++] - '0', 1};
    if (at_ >= text_.size() || text_[at_] != '{') return std::nullopt;
    const std::size_t close = closing_brace(text_, at_);
    if (close == std::string_view::npos) return std::nullopt;
    const auto inner = NumberReader(text_.substr(at_ + 1, close - at_ - 1)).read();
    at_ = close + 1;
    return inner;
  }

  /// Letters, spaces and the signs of units; nothing that would make it another number or a formula, as the x of "3x" does.
  bool rest_is_unit() const {
    const std::string_view rest = text_.substr(at_);
    if (rest.size() == 1 && std::isalpha(static_cast<unsigned char>(rest[0])) != 0 &&
        std::string_view("mgshLVWNJKCF").find(rest[0]) == std::string_view::npos)
      return false;
    return std::all_of(rest.begin(), rest.end(), [](char c) {
      const auto byte = static_cast<unsigned char>(c);
      return byte >= 0x80 || std::isalpha(byte) != 0 || c == ' ' || c == '%' || c == '.' || c == '\'';
    });
  }

  std::string_view text_;
  std::size_t at_ = 0;
  bool is_read_ = false;
};

}  // namespace

std::string without_typesetting(std::string_view answer) {
  std::string text(answer);
  for (const char* noise :
       {"\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "\\(", "\\)", "\\[", "\\]", "\\$", "$", "**", "^\\circ", "^{\\circ}"})
    replace_all(text, noise, "");
  replace_all(text, "\\%", "%");
  for (const char* fraction : {"\\dfrac", "\\tfrac"}) replace_all(text, fraction, "\\frac");
  for (const char* style : {"\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{", "\\mbox{", "\\boxed{"}) unwrap(text, style);
  replace_all(text, "\xE2\x88\x92", "-");  // U+2212, the minus sign of mathematics
  text = strip(text);
  while (text.ends_with('.') || text.ends_with(',')) text.pop_back();
  return strip(text);
}

std::optional<std::string> extract_final_answer(std::string_view text) {
  constexpr std::string_view kThinkEnd = "</think>";
  if (const std::size_t end = text.rfind(kThinkEnd); end != std::string_view::npos) text.remove_prefix(end + kThinkEnd.size());
  for (std::size_t at = text.rfind("\\boxed"); at != std::string_view::npos;
       at = at == 0 ? std::string_view::npos : text.rfind("\\boxed", at - 1)) {
    std::size_t open = at + 6;
    while (open < text.size() && text[open] == ' ') ++open;
    if (open >= text.size() || text[open] != '{') continue;
    const std::size_t close = closing_brace(text, open);
    if (close != std::string_view::npos) return strip(std::string(text.substr(open + 1, close - open - 1)));
  }
  const std::size_t mark = text.rfind("####");
  if (mark == std::string_view::npos) return std::nullopt;
  const std::string_view rest = text.substr(mark + 4);
  std::string line = strip(std::string(rest.substr(0, rest.find('\n'))));
  if (line.empty()) return std::nullopt;
  return line;
}

std::optional<Rational> parse_number(std::string_view answer) {
  std::string text = without_typesetting(answer);
  // "x = 7": what follows a name and an equals sign.
  if (const std::size_t equals = text.rfind('='); equals != std::string::npos) {
    const bool is_name = std::none_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(equals),
                                      [](char c) { return is_ascii_digit(c) || c == '=' || c == '+' || c == '-' || c == '*' || c == '/'; });
    if (is_name) text.erase(0, equals + 1);
  }
  // "(3/4)": no tuple, since that has a comma.
  if (text.size() > 2 && text.front() == '(' && text.back() == ')') text = strip(text.substr(1, text.size() - 2));
  return NumberReader(text).read();
}

}  // namespace prl::env
