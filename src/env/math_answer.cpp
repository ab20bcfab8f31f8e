#include "env/math_answer.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <complex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "env/formula.hpp"
#include "env/numeric_answer.hpp"
#include "env/rubric.hpp"
#include "text/utf8.hpp"

namespace prl::env {
namespace {

constexpr std::size_t kMaxItems = 200;
constexpr int kMaxNesting = 20;
constexpr double kTolerance = 1e-11;  // relative; the values come from a few dozen operations in double
constexpr double kSixPlaces = 1e6;

/// What an answer says.
struct Answer {
  enum class Kind { kText, kFormula, kTuple, kSet, kInterval, kUnion, kRelation, kMatrix };
  Kind kind = Kind::kText;
  std::string text = {};           ///< of a formula
  std::vector<Answer> items = {};  ///< elements, ends, sides, rows
  std::vector<char> signs = {};    ///< of a relation, between its sides: '<', '{' for at most, '=', '!'
  bool is_left_closed = false;
  bool is_right_closed = false;
};
using Kind = Answer::Kind;

bool opens(char c) { return c == '(' || c == '[' || c == '{'; }
bool closes(char c) { return c == ')' || c == ']' || c == '}'; }

/// Places outside of all brackets at which one of `words` begins, and their lengths. Of words that begin at one place the first counts.
std::vector<std::pair<std::size_t, std::size_t>> find_outside(std::string_view text, std::initializer_list<std::string_view> words) {
  std::vector<std::pair<std::size_t, std::size_t>> found;
  int depth = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (depth == 0) {
      const auto word = std::find_if(words.begin(), words.end(), [&](std::string_view w) { return text.substr(at).starts_with(w); });
      if (word != words.end()) {
        found.emplace_back(at, word->size());
        at += word->size() - 1;
        continue;
      }
    }
    if (opens(text[at])) ++depth;
    if (closes(text[at])) --depth;
  }
  return found;
}

std::vector<std::string> split_at(std::string_view text, const std::vector<std::pair<std::size_t, std::size_t>>& places) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (const auto& [at, size] : places) {
    parts.push_back(strip(std::string(text.substr(begin, at - begin))));
    begin = at + size;
  }
  parts.push_back(strip(std::string(text.substr(begin))));
  return parts;
}

std::optional<Answer> read(const std::string& text, int depth);

std::optional<std::vector<Answer>> read_all(const std::vector<std::string>& texts, int depth) {
  if (texts.size() > kMaxItems) return std::nullopt;
  std::vector<Answer> items;
  for (const std::string& text : texts) {
    auto item = read(text, depth + 1);
    if (!item) return std::nullopt;
    items.push_back(std::move(*item));
  }
  return items;
}

std::optional<Answer> read_matrix(const std::string& text, int depth) {
  for (const char* kind : {"pmatrix", "bmatrix", "vmatrix", "matrix"}) {
    const std::string begin = std::string("\\begin{") + kind + "}", end = std::string("\\end{") + kind + "}";
    if (!text.starts_with(begin) || !text.ends_with(end)) continue;
    const std::string inner = text.substr(begin.size(), text.size() - begin.size() - end.size());
    Answer matrix{.kind = Kind::kMatrix};
    for (const std::string& line : split_at(inner, find_outside(inner, {"\\\\"}))) {
      if (line.empty()) continue;
      auto cells = read_all(split_at(line, find_outside(line, {"&"})), depth);
      if (!cells) return std::nullopt;
      matrix.items.push_back({.kind = Kind::kTuple, .items = std::move(*cells)});
    }
    return matrix;
  }
  return std::nullopt;
}

/// The value of a formula without variables that is real, infinity included.
std::optional<double> real_value(const Answer& answer) {
  if (answer.kind != Kind::kFormula) return std::nullopt;
  if (const auto number = parse_number(answer.text))
    return static_cast<double>(number->numerator) / static_cast<double>(number->denominator);
  const auto value = evaluate_formula(answer.text, 0);
  // -1 times infinity has an imaginary part that is no number.
  if (value && std::isinf(value->value.real())) return value->value.real();
  if (!value || value->has_variables || std::abs(value->value.imag()) > kTolerance) return std::nullopt;
  return value->value.real();
}

/// (a, b), [a, b), \{a, b\}: a text that is one pair of brackets with something in it.
std::optional<Answer> read_brackets(const std::string& text, int depth) {
  const bool is_set = text.starts_with("\\{") && text.ends_with("\\}");
  if (!is_set && (text.size() < 2 || !(text.front() == '(' || text.front() == '[') || !(text.back() == ')' || text.back() == ']')))
    return std::nullopt;
  const std::size_t skip = is_set ? 2 : 1;
  const std::string inner = text.substr(skip, text.size() - 2 * skip);
  // "(1) + (2)" is no pair of brackets.
  int open = 0;
  for (const char c : inner) {
    if (opens(c)) ++open;
    if (closes(c) && --open < 0) return std::nullopt;
  }
  if (is_set && strip(inner).empty()) return Answer{.kind = Kind::kSet};
  auto items = read_all(split_at(inner, find_outside(inner, {",", ";"})), depth);
  if (!items || (items->size() == 1 && !is_set)) return std::nullopt;
  if (is_set) return items->size() == 1 ? std::move(items->front()) : Answer{.kind = Kind::kSet, .items = std::move(*items)};
  Answer out{.kind = Kind::kTuple, .items = std::move(*items)};
  const bool is_left_closed = text.front() == '[', is_right_closed = text.back() == ']';
  if (out.items.size() == 2 && (is_left_closed || is_right_closed)) {
    const auto from = real_value(out.items[0]), to = real_value(out.items[1]);
    if ((from && to && *from < *to) || is_left_closed != is_right_closed) {
      out.kind = Kind::kInterval;
      out.is_left_closed = is_left_closed;
      out.is_right_closed = is_right_closed;
    }
  }
  return out;
}

/// a < b, x = 3, 1 \le x < 4. An inequality is written with the signs < and at most.
std::optional<Answer> read_relation(const std::string& text, int depth) {
  const auto places =
      find_outside(text, {"\\leq", "\\geq", "\\neq", "\\le", "\\ge", "\\ne", "\\lt", "\\gt", "<=", ">=", "!=", "<", ">", "="});
  std::vector<std::pair<std::size_t, std::size_t>> real;
  for (const auto& place : places)
    if (!std::string_view(text).substr(place.first).starts_with("\\left")) real.push_back(place);
  if (real.empty() || real.size() > 4) return std::nullopt;
  Answer out{.kind = Kind::kRelation};
  auto sides = read_all(split_at(text, real), depth);
  if (!sides) return std::nullopt;
  out.items = std::move(*sides);
  int num_greater = 0;
  for (const auto& [at, size] : real) {
    const std::string word = text.substr(at, size);
    const bool has_equals =
        word.find('=') != std::string::npos || word.find("le") != std::string::npos || word.find("ge") != std::string::npos;
    if (word == "=") {
      out.signs.push_back('=');
    } else if (word.find('n') != std::string::npos || word == "!=") {
      out.signs.push_back('!');
    } else {
      num_greater += word.find('g') != std::string::npos || word.front() == '>' ? 1 : 0;
      out.signs.push_back(has_equals ? '{' : '<');
    }
  }
  if (num_greater > 0 && num_greater < static_cast<int>(real.size())) return std::nullopt;
  if (num_greater > 0) {
    std::reverse(out.items.begin(), out.items.end());
    std::reverse(out.signs.begin(), out.signs.end());
  }
  return out;
}

/// nullopt for what has no structure that is known.
std::optional<Answer> read(const std::string& text, int depth) {
  if (text.empty() || depth > kMaxNesting) return std::nullopt;
  if (const std::size_t in = text.find("\\in "); in != std::string::npos && in <= 3) return read(strip(text.substr(in + 4)), depth + 1);
  if (text == "\\mathbb{R}") return read("(-\\infty, \\infty)", depth + 1);
  if (text == "\\emptyset" || text == "\\varnothing") return Answer{.kind = Kind::kSet};
  if (text.front() != '(' && text.find('=') == std::string::npos && parse_number(text)) return Answer{.kind = Kind::kFormula, .text = text};
  if (text.starts_with("\\begin{")) return read_matrix(text, depth);
  if (const auto places = find_outside(text, {"\\cup"}); !places.empty()) {
    auto items = read_all(split_at(text, places), depth);
    return items ? std::optional(Answer{.kind = Kind::kUnion, .items = std::move(*items)}) : std::nullopt;
  }
  if (auto brackets = read_brackets(text, depth)) return brackets;
  if (const auto places = find_outside(text, {",", ";", " and ", " or "}); !places.empty()) {
    auto items = read_all(split_at(text, places), depth);
    return items ? std::optional(Answer{.kind = Kind::kSet, .items = std::move(*items)}) : std::nullopt;
  }
  if (auto relation = read_relation(text, depth)) return relation;
  if (!evaluate_formula(text, 0)) return std::nullopt;
  Answer formula{.kind = Kind::kFormula, .text = text};
  if (text.find("\\pm") == std::string::npos && text.find("\\mp") == std::string::npos) return formula;
  // Both signs are two answers.
  Answer both{.kind = Kind::kSet};
  for (const auto& [plus, minus] : {std::pair("+", "-"), std::pair("-", "+")}) {
    std::string one = text;
    for (const auto& [sign, by] : {std::pair("\\pm", plus), std::pair("\\mp", minus)})
      for (std::size_t at = one.find(sign); at != std::string::npos; at = one.find(sign, at)) one.replace(at, 3, by);
    both.items.push_back({.kind = Kind::kFormula, .text = std::move(one)});
  }
  return both;
}

bool are_close(std::complex<double> a, std::complex<double> b) {
  return std::abs(a - b) <= kTolerance * std::max({1e-3, std::abs(a), std::abs(b)});
}

bool is_decimal(const std::string& text) { return text.find('.') != std::string::npos; }

bool are_same_formulas(const Answer& a, const Answer& b) {
  const auto left = parse_number(a.text), right = parse_number(b.text);
  if (left && right && *left == *right) return true;
  const auto is_whole = [](const std::optional<Rational>& number) { return number && number->denominator == 1; };
  if ((is_decimal(a.text) || is_decimal(b.text)) && !is_whole(left) && !is_whole(right)) {
    const auto x = real_value(a), y = real_value(b);
    if (x && y && std::abs(*x) < 1e9 && std::nearbyint(*x * kSixPlaces) == std::nearbyint(*y * kSixPlaces)) return true;
  }
  if (left && right) return false;
  int num_compared = 0;
  for (int point = 0; point < kNumFormulaPoints; ++point) {
    const auto x = evaluate_formula(a.text, point), y = evaluate_formula(b.text, point);
    if (!x || !y) return false;
    if (x->exact && y->exact) return *x->exact == *y->exact;
    const bool is_finite = std::isfinite(std::abs(x->value)) && std::isfinite(std::abs(y->value));
    if (!is_finite && !x->has_variables && !y->has_variables) {
      const auto from = real_value(a), to = real_value(b);
      return from && to && *from == *to && a.text.find("\\infty") != std::string::npos && b.text.find("\\infty") != std::string::npos;
    }
    if (!is_finite) continue;
    if (!are_close(x->value, y->value)) return false;
    ++num_compared;
  }
  return num_compared >= 2;
}

/// The side of an equation that names what the other side is: one variable, or f(x).
bool is_name(const Answer& side) {
  const std::string& text = side.text;
  if (side.kind != Kind::kFormula || text.empty() || std::isalpha(static_cast<unsigned char>(text.front())) == 0) return false;
  if (text.size() == 1 || text[1] == '_') return true;
  return text.size() <= 4 && text[1] == '(' && text.back() == ')';
}

/// Whether two equations or inequalities have the same solutions: one difference of their sides is a multiple of the other.
bool are_same_relations(const Answer& a, const Answer& b) {
  if (a.signs != b.signs) return false;
  if (a.signs.size() > 1 || !std::all_of(a.items.begin(), a.items.end(), [](const Answer& side) { return side.kind == Kind::kFormula; }))
    return false;
  std::optional<std::complex<double>> ratio;
  int num_compared = 0;
  for (int point = 0; point < kNumFormulaPoints; ++point) {
    std::array<std::complex<double>, 2> differences;
    for (std::size_t i = 0; i < 2; ++i) {
      const Answer& relation = i == 0 ? a : b;
      const auto left = evaluate_formula(relation.items[0].text, point), right = evaluate_formula(relation.items[1].text, point);
      if (!left || !right) return false;
      differences[i] = left->value - right->value;
    }
    if (!std::isfinite(std::abs(differences[0])) || !std::isfinite(std::abs(differences[1]))) continue;
    if (std::abs(differences[0]) < kTolerance || std::abs(differences[1]) < kTolerance) return false;
    const std::complex<double> now = differences[0] / differences[1];
    if (ratio && !are_close(*ratio, now)) return false;
    ratio = now;
    ++num_compared;
  }
  if (num_compared < 2) return false;
  const bool is_ordered = a.signs[0] == '<' || a.signs[0] == '{';
  return !is_ordered || (ratio->real() > 0 && std::abs(ratio->imag()) < kTolerance);
}

/// The interval of 1 < x \le 4, x > 1: what of a relation can be compared with one.
std::optional<Answer> interval_of(const Answer& relation) {
  const Answer infinity{.kind = Kind::kFormula, .text = "\\infty"}, minus_infinity{.kind = Kind::kFormula, .text = "-\\infty"};
  const auto make = [](Answer from, Answer to, bool is_left_closed, bool is_right_closed) {
    Answer out{.kind = is_left_closed || is_right_closed ? Kind::kInterval : Kind::kTuple};
    out.items = {std::move(from), std::move(to)};
    out.is_left_closed = is_left_closed;
    out.is_right_closed = is_right_closed;
    return out;
  };
  for (const char sign : relation.signs)
    if (sign != '<' && sign != '{') return std::nullopt;
  if (relation.items.size() == 3 && is_name(relation.items[1]))
    return make(relation.items[0], relation.items[2], relation.signs[0] == '{', relation.signs[1] == '{');
  if (relation.items.size() != 2) return std::nullopt;
  if (is_name(relation.items[0])) return make(minus_infinity, relation.items[1], false, relation.signs[0] == '{');
  if (is_name(relation.items[1])) return make(relation.items[0], infinity, relation.signs[0] == '{', false);
  return std::nullopt;
}

bool are_same(const Answer& given, const Answer& wanted);

bool are_same_in_order(const std::vector<Answer>& given, const std::vector<Answer>& wanted) {
  return std::equal(given.begin(), given.end(), wanted.begin(), wanted.end(), are_same);
}

bool are_same_in_any_order(const std::vector<Answer>& given, const std::vector<Answer>& wanted) {
  const auto has = [](const std::vector<Answer>& all, const Answer& one, bool is_wanted) {
    return std::any_of(all.begin(), all.end(),
                       [&](const Answer& other) { return is_wanted ? are_same(other, one) : are_same(one, other); });
  };
  return given.empty() == wanted.empty() &&
         std::all_of(wanted.begin(), wanted.end(), [&](const Answer& one) { return has(given, one, true); }) &&
         std::all_of(given.begin(), given.end(), [&](const Answer& one) { return has(wanted, one, false); });
}

/// A value that an equation gives a name to, or the answer itself.
const Answer& value_of(const Answer& answer) {
  const bool is_definition = answer.kind == Kind::kRelation && answer.signs == std::vector<char>{'='} && is_name(answer.items.front());
  return is_definition ? answer.items.back() : answer;
}

bool are_same(const Answer& given, const Answer& wanted) {
  if (given.kind == Kind::kRelation && wanted.kind == Kind::kRelation) {
    if (are_same_relations(given, wanted)) return true;
    if (given.signs != wanted.signs) return false;
    const bool is_named = given.signs == std::vector<char>{'='} && is_name(given.items[0]) && is_name(wanted.items[0]);
    if (is_named) return given.items[0].text == wanted.items[0].text && are_same(given.items[1], wanted.items[1]);
    return given.signs.size() > 1 && are_same_in_order(given.items, wanted.items);
  }
  if (given.kind == Kind::kRelation || wanted.kind == Kind::kRelation) {
    const Answer &left = value_of(given), &right = value_of(wanted);
    if (left.kind != Kind::kRelation && right.kind != Kind::kRelation) return are_same(left, right);
    const auto interval = wanted.kind == Kind::kRelation ? interval_of(wanted) : std::nullopt;
    return interval && are_same(given, *interval);
  }
  if (given.kind == Kind::kFormula && wanted.kind == Kind::kFormula) return are_same_formulas(given, wanted);
  const auto is_collection = [](const Answer& answer) { return answer.kind == Kind::kTuple || answer.kind == Kind::kSet; };
  if (given.kind != wanted.kind) {
    // A set and a tuple: the order is not known.
    return is_collection(given) && is_collection(wanted) && given.items.size() == wanted.items.size() &&
           are_same_in_any_order(given.items, wanted.items);
  }
  if (given.kind == Kind::kSet || given.kind == Kind::kUnion) return are_same_in_any_order(given.items, wanted.items);
  return given.is_left_closed == wanted.is_left_closed && given.is_right_closed == wanted.is_right_closed &&
         are_same_in_order(given.items, wanted.items);
}

/// "50\%" and "0.5".
bool are_same_but_for_percent(const std::string& a, const std::string& b) {
  if (a.ends_with('%') == b.ends_with('%')) return false;
  auto part = parse_number(a.ends_with('%') ? a : b), other = parse_number(a.ends_with('%') ? b : a);
  if (part) part = divide(*part, {100, 1});
  return part && other && *part == *other;
}

}  // namespace

std::optional<bool> compare_answers(std::string_view given, std::string_view wanted) {
  const std::string left = without_typesetting(given), right = without_typesetting(wanted);
  const auto canonical = [](const std::string& answer) {
    std::string text = text::to_lower(text::replace_invalid_utf8(answer));
    std::erase_if(text, [](char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; });
    return text;
  };
  const std::string text = canonical(left);
  if (!text.empty() && text == canonical(right) && !parse_number(left)) return true;
  if (are_same_but_for_percent(left, right)) return true;
  const auto a = read(left, 0), b = read(right, 0);
  if (!a || !b) return std::nullopt;
  return are_same(*a, *b);
}

bool is_same_answer(std::string_view given, std::string_view wanted) { return compare_answers(given, wanted).value_or(false); }

}  // namespace prl::env
