#include "env/formula.hpp"

#include <array>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>
#include <utility>

#include "base/ascii.hpp"
#include "base/rng.hpp"
#include "env/numeric_answer.hpp"

namespace prl::env {
namespace {

using Complex = std::complex<double>;

constexpr std::size_t kMaxBytes = 2000;
constexpr int kMaxDepth = 60;

struct Function {
  std::string_view name;
  Complex (*apply)(Complex);
};

// Longest names first: a name is taken as soon as the text begins with it.
constexpr std::array kFunctions{
    Function{"arcsin", [](Complex z) { return std::asin(z); }},   Function{"arccos", [](Complex z) { return std::acos(z); }},
    Function{"arctan", [](Complex z) { return std::atan(z); }},   Function{"sinh", [](Complex z) { return std::sinh(z); }},
    Function{"cosh", [](Complex z) { return std::cosh(z); }},     Function{"tanh", [](Complex z) { return std::tanh(z); }},
    Function{"sin", [](Complex z) { return std::sin(z); }},       Function{"cos", [](Complex z) { return std::cos(z); }},
    Function{"tan", [](Complex z) { return std::tan(z); }},       Function{"cot", [](Complex z) { return 1.0 / std::tan(z); }},
    Function{"sec", [](Complex z) { return 1.0 / std::cos(z); }}, Function{"csc", [](Complex z) { return 1.0 / std::sin(z); }},
    Function{"log", [](Complex z) { return std::log(z); }},       Function{"exp", [](Complex z) { return std::exp(z); }},
    Function{"ln", [](Complex z) { return std::log(z); }},        Function{"lg", [](Complex z) { return std::log10(z); }},
};

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

double to_double(const Rational& number) { return static_cast<double>(number.numerator) / static_cast<double>(number.denominator); }

FormulaValue from(const Rational& number) { return {to_double(number), number, false}; }
FormulaValue from(Complex value) { return {value, std::nullopt, false}; }

template <class Exact>
FormulaValue combine(const FormulaValue& a, const FormulaValue& b, Complex value, Exact exact) {
  FormulaValue out{value, std::nullopt, a.has_variables || b.has_variables};
  if (a.exact && b.exact) out.exact = exact(*a.exact, *b.exact);
  if (out.exact) out.value = to_double(*out.exact);
  return out;
}
FormulaValue plus(const FormulaValue& a, const FormulaValue& b) { return combine(a, b, a.value + b.value, add); }
FormulaValue times(const FormulaValue& a, const FormulaValue& b) { return combine(a, b, a.value * b.value, multiply); }
FormulaValue over(const FormulaValue& a, const FormulaValue& b) { return combine(a, b, a.value / b.value, divide); }
FormulaValue negative(const FormulaValue& a) { return times(from(Rational{-1, 1}), a); }

std::optional<Rational> exact_power(const Rational& base, const Rational& exponent) {
  if (exponent.denominator != 1 || exponent.numerator > 200 || exponent.numerator < -200) return std::nullopt;
  Rational result{1, 1};
  for (std::int64_t i = 0; i < std::abs(exponent.numerator); ++i) {
    const auto next = multiply(result, base);
    if (!next) return std::nullopt;
    result = *next;
  }
  return exponent.numerator < 0 ? divide({1, 1}, result) : result;
}

FormulaValue power(const FormulaValue& a, const FormulaValue& b) { return combine(a, b, std::pow(a.value, b.value), exact_power); }

/// `count` factors from `top` downwards, for factorials and binomials.
std::optional<FormulaValue> falling(std::int64_t top, std::int64_t count) {
  if (top < 0 || count < 0 || count > 170) return std::nullopt;
  FormulaValue result = from(Rational{1, 1});
  for (std::int64_t i = 0; i < count; ++i) result = times(result, from(Rational{top - i, 1}));
  return result;
}

/// One reading of one text.
class Reader {
 public:
  Reader(std::string_view text, int point, int pm) : text_(text), point_(point), pm_(pm) {}

  std::optional<FormulaValue> read() {
    auto value = sum();
    skip();
    if (!value || at_ != text_.size()) return std::nullopt;
    return value;
  }

 private:
  using Maybe = std::optional<FormulaValue>;

  void skip() {
    for (;;) {
      if (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '~'))
        ++at_;
      else if (!take_raw("\\quad") && !take_raw("\\displaystyle"))
        return;
    }
  }
  bool take_raw(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  bool take(std::string_view word) {
    skip();
    return take_raw(word);
  }
  char next() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  Maybe sum() {
    if (++depth_ > kMaxDepth) return std::nullopt;
    Maybe total = product();
    while (total) {
      bool is_minus = false;
      if (take("\\pm"))
        is_minus = pm_ < 0;
      else if (take("\\mp"))
        is_minus = pm_ > 0;
      else if (take("-"))
        is_minus = true;
      else if (!take("+"))
        break;
      Maybe part = product();
      if (!part) return std::nullopt;
      total = plus(*total, is_minus ? negative(*part) : *part);
    }
    --depth_;
    return total;
  }

  Maybe product() {
    Maybe total = factor();
    while (total) {
      bool is_division = false;
      if (take("\\cdot") || take("\\times") || take("*")) {
      } else if (take("\\div") || take("/")) {
        is_division = true;
      } else if (!begins_factor()) {
        break;
      }
      Maybe part = factor();
      if (!part) return std::nullopt;
      total = is_division ? over(*total, *part) : times(*total, *part);
    }
    return total;
  }

  /// Whether what follows is multiplied without a sign.
  bool begins_factor() {
    const char c = next();
    if (c == '|') return num_open_bars_ == 0;
    if (c == '\\') {
      for (const std::string_view other : {"\\pm", "\\mp", "\\}", "\\cup", "\\le", "\\ge", "\\ne", "\\in", "\\rvert", "\\mid"})
        if (text_.substr(at_).starts_with(other) && !text_.substr(at_).starts_with("\\infty")) return false;
      return true;
    }
    return c == '(' || c == '[' || c == '{' || is_letter(c) || is_ascii_digit(c) || c == '.';
  }

  Maybe factor() {
    if (take("-")) {
      const Maybe value = factor();
      return value ? Maybe(negative(*value)) : std::nullopt;
    }
    if (take("+")) return factor();
    if (take("\\pm") || take("\\mp")) {
      const bool is_minus = text_[at_ - 2] == 'p' ? pm_ < 0 : pm_ > 0;
      const Maybe value = factor();
      return value ? Maybe(is_minus ? negative(*value) : *value) : std::nullopt;
    }
    Maybe base = atom();
    if (!base) return std::nullopt;
    for (;;) {
      if (take("!")) {
        if (!base->exact || base->exact->denominator != 1) return std::nullopt;
        base = falling(base->exact->numerator, base->exact->numerator);
        if (!base) return std::nullopt;
      } else if (take("^")) {
        const Maybe exponent = argument();
        if (!exponent) return std::nullopt;
        base = power(*base, *exponent);
      } else {
        return base;
      }
    }
  }

  /// {...}, one digit, one letter or one command, as behind \frac and ^; a sign may stand before it.
  Maybe argument() {
    if (++depth_ > kMaxDepth) return std::nullopt;
    Maybe value;
    const char c = next();
    if (c == '-') {
      ++at_;
      value = argument();
      if (value) value = negative(*value);
    } else if (is_ascii_digit(c)) {
      value = from(Rational{text_[at_++] - '0', 1});
    } else {
      value = atom();
    }
    --depth_;
    return value;
  }

  Maybe group(std::string_view close) {
    const int bars = std::exchange(num_open_bars_, 0);
    Maybe value = sum();
    num_open_bars_ = bars;
    return value && take(close) ? value : std::nullopt;
  }

  Maybe atom() {
    const char c = next();
    if (is_ascii_digit(c) || c == '.') return number();
    if (take("(")) return group(")");
    if (take("[")) return group("]");
    if (take("{")) return group("}");
    if (take("|") || take("\\lvert")) return absolute();
    if (c == '\\') return command();
    if (!is_letter(c)) return std::nullopt;
    return name();
  }

  Maybe absolute() {
    ++num_open_bars_;
    Maybe value = sum();
    --num_open_bars_;
    if (!value || !(take("|") || take("\\rvert"))) return std::nullopt;
    FormulaValue out{std::abs(value->value), value->exact, value->has_variables};
    if (out.exact) out.exact->numerator = std::abs(out.exact->numerator);
    return out;
  }

  /// Digits with a point and separators of thousands; a fraction behind a whole number is added to it.
  Maybe number() {
    const std::size_t begin = at_;
    while (at_ < text_.size() && (is_ascii_digit(text_[at_]) || text_[at_] == '.')) ++at_;
    const auto value = parse_number(text_.substr(begin, at_ - begin));
    if (!value) return std::nullopt;
    if (value->denominator == 1 && text_.substr(at_).starts_with("\\frac")) {
      const std::size_t before = at_;
      const Maybe part = command();
      if (part && part->exact && part->exact->numerator >= 0 && part->exact->denominator > part->exact->numerator &&
          text_.substr(before, at_ - before).find_first_of("+-*/^") == std::string_view::npos)
        return plus(from(*value), *part);
      at_ = before;
    }
    return from(*value);
  }

  Maybe command() {
    if (take_raw("\\frac")) {
      const Maybe top = argument();
      const Maybe bottom = top ? argument() : std::nullopt;
      return bottom ? Maybe(over(*top, *bottom)) : std::nullopt;
    }
    if (take_raw("\\sqrt")) return root();
    if (take_raw("\\binom") || take_raw("\\dbinom")) {
      const Maybe n = argument();
      const Maybe k = n ? argument() : std::nullopt;
      if (!k || !n->exact || !k->exact || n->exact->denominator != 1 || k->exact->denominator != 1) return std::nullopt;
      const Maybe top = falling(n->exact->numerator, k->exact->numerator), bottom = falling(k->exact->numerator, k->exact->numerator);
      return top && bottom ? Maybe(over(*top, *bottom)) : std::nullopt;
    }
    if (take_raw("\\pi")) return from(Complex(std::numbers::pi));
    if (take_raw("\\infty")) return from(Complex(std::numeric_limits<double>::infinity()));
    if (take_raw("\\{")) return group("\\}");
    ++at_;  // the backslash
    if (const Maybe value = function()) return value;
    // A Greek letter, or whatever else has a name of its own.
    const std::size_t begin = at_;
    while (at_ < text_.size() && is_letter(text_[at_])) ++at_;
    for (const std::string_view letter : {"alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "nu", "rho", "sigma",
                                          "tau", "phi", "varphi", "omega", "Omega", "Delta", "ell"})
      if (text_.substr(begin, at_ - begin) == letter) return variable(letter);
    return std::nullopt;
  }

  Maybe root() {
    FormulaValue degree = from(Rational{2, 1});
    if (take("[")) {
      const Maybe given = group("]");
      if (!given) return std::nullopt;
      degree = *given;
    }
    const Maybe of = argument();
    if (!of) return std::nullopt;
    if (degree.exact == Rational{2, 1}) return FormulaValue{std::sqrt(of->value), std::nullopt, of->has_variables};
    // The real root of a negative number where there is one.
    if (degree.exact && degree.exact->denominator == 1 && degree.exact->numerator % 2 != 0 && of->value.imag() == 0 && of->value.real() < 0)
      return FormulaValue{-std::pow(-of->value.real(), 1.0 / degree.value.real()), std::nullopt, of->has_variables};
    return FormulaValue{std::pow(of->value, 1.0 / degree.value), std::nullopt, of->has_variables || degree.has_variables};
  }

  /// sin, \sin^2 x, \log_2 8, ln(x); nullopt, and nothing read, if no function begins here.
  Maybe function() {
    for (const Function& known : kFunctions) {
      if (!text_.substr(at_).starts_with(known.name)) continue;
      at_ += known.name.size();
      std::optional<FormulaValue> base, exponent;
      if (take("_")) {
        base = argument();
        if (!base) return std::nullopt;
      }
      if (take("^")) {
        exponent = argument();
        if (!exponent) return std::nullopt;
      }
      const Maybe of = function_argument();
      if (!of) return std::nullopt;
      Complex value = known.apply(of->value);
      if (base) value /= std::log(base->value);
      if (exponent) value = std::pow(value, exponent->value);
      return FormulaValue{value, std::nullopt, of->has_variables};
    }
    return std::nullopt;
  }

  /// A bracket, or factors up to the next sign or function.
  Maybe function_argument() {
    if (++depth_ > kMaxDepth) return std::nullopt;
    const char c = next();
    Maybe total = factor();
    if (c != '(' && c != '{')
      while (total && begins_factor() && !begins_function()) {
        const Maybe part = factor();
        total = part ? Maybe(times(*total, *part)) : std::nullopt;
      }
    --depth_;
    return total;
  }
  bool begins_function() {
    skip();
    const std::string_view rest = text_.substr(std::min(text_.size(), at_ + (next() == '\\' ? 1 : 0)));
    for (const Function& known : kFunctions)
      if (rest.starts_with(known.name)) return true;
    return false;
  }

  /// A run of letters: a function's name, pi, or variables, each letter one.
  Maybe name() {
    std::size_t end = at_;
    while (end < text_.size() && is_letter(text_[end])) ++end;
    const std::string_view run = text_.substr(at_, end - at_);
    if (const Maybe value = function()) return value;
    if (run == "sqrt") {
      at_ = end;
      return root();
    }
    if (run == "pi") {
      at_ = end;
      return from(Complex(std::numbers::pi));
    }
    if (run.size() > 2 && !is_inside_run()) return std::nullopt;  // a word
    const char letter = text_[at_++];
    if (letter == 'i') return from(Complex(0, 1));
    if (letter == 'e') return from(Complex(std::numbers::e));
    return variable(std::string(1, letter));
  }
  bool is_inside_run() const { return at_ > 0 && is_letter(text_[at_ - 1]); }

  Maybe variable(std::string_view letter) {
    std::string full(letter);
    if (at_ < text_.size() && text_[at_] == '_') {
      const std::size_t begin = at_++;
      if (at_ < text_.size() && text_[at_] == '{') {
        while (at_ < text_.size() && text_[at_] != '}') ++at_;
        if (at_ == text_.size()) return std::nullopt;
      }
      if (at_ == text_.size()) return std::nullopt;
      ++at_;
      for (const char c : text_.substr(begin, at_ - begin))
        if (c != '{' && c != '}') full += c;
    }
    std::uint64_t hash = 14695981039346656037ULL;
    for (const char c : full) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
    Rng rng(hash, static_cast<std::uint64_t>(point_));
    const double size = 0.3 + rng.next_double();
    Complex value = size;
    if (point_ == 1) value = -size;
    if (point_ == 2) value = 1.5 + size;
    if (point_ == 3) value = -1.5 - size;
    return FormulaValue{value, std::nullopt, true};
  }

  std::string_view text_;
  int point_;
  int pm_;
  std::size_t at_ = 0;
  int depth_ = 0;
  int num_open_bars_ = 0;
};

}  // namespace

std::optional<FormulaValue> evaluate_formula(std::string_view text, int point, int pm) {
  if (text.size() > kMaxBytes) return std::nullopt;
  return Reader(text, point, pm).read();
}

}  // namespace prl::env
