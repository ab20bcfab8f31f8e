#include "grammar/json_text.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "grammar/char_class.hpp"
#include "grammar/regex.hpp"
#include "text/utf8.hpp"

namespace prl::grammar {
namespace {

void emit_rule_pattern(AutomatonBuilder& builder, RuleId rule, std::string_view pattern) {
  const NodeId end = emit_regex(builder, builder.rule_start(rule), parse_regex(pattern), Spelling::kPlain, Anchoring::kFull);
  builder.add_empty(end, builder.rule_accept(rule));
}

std::int64_t power_of_ten(int exponent) {
  std::int64_t out = 1;
  for (; exponent > 0; --exponent) out *= 10;
  return out;
}

}  // namespace

NodeId JsonText::emit_space(NodeId from) {
  if (!space_) {
    space_ = builder_.add_rule();
    emit_rule_pattern(builder_, *space_, fmt::format("( |\\n[ \\t]{{0,{}}})?", kMaxIndent));
  }
  return builder_.emit_call(from, *space_);
}

void JsonText::add_string_char(NodeId from, NodeId to) {
  CharClass plain(0x20, CharClass::kLast);
  plain = plain.intersect(CharClass('"', '"').complement()).intersect(CharClass('\\', '\\').complement());
  add_char(builder_, from, plain, Spelling::kPlain, to);
  // \uXXXX: any but half a surrogate pair, or both halves in their order.
  static const Regex kEscape = parse_regex(
      R"(\\(["\\/bfnrt]|u([0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))");
  builder_.add_empty(emit_regex(builder_, from, kEscape, Spelling::kPlain, Anchoring::kFull), to);
}

NodeId JsonText::emit_string_tail(NodeId from) {
  const NodeId loop = builder_.add_node();
  builder_.add_empty(from, loop);
  add_string_char(loop, loop);
  return builder_.emit_literal(loop, "\"");
}

NodeId JsonText::emit_string(NodeId from) {
  if (!string_) {
    string_ = builder_.add_rule();
    const NodeId end = emit_string_tail(builder_.emit_literal(builder_.rule_start(*string_), "\""));
    builder_.add_empty(end, builder_.rule_accept(*string_));
  }
  return builder_.emit_call(from, *string_);
}

/// Follows the trie of the excluded texts and leaves it by a character that none of them has there. Until it has left, no escapes, so
/// that no excluded text can be spelt another way.
NodeId JsonText::emit_string_except(NodeId from, const std::vector<std::string>& excluded) {
  std::vector<std::vector<char32_t>> names;
  for (const std::string& text : excluded) names.push_back(text::to_code_points(text));
  const NodeId end = builder_.add_node();
  const NodeId outside = builder_.add_node();
  builder_.add_empty(emit_string_tail(outside), end);
  CharClass plain = CharClass(0x20, CharClass::kLast).intersect(CharClass('"', '"').complement());
  plain = plain.intersect(CharClass('\\', '\\').complement());
  const std::function<void(NodeId, std::size_t, std::vector<std::size_t>)> walk = [&](NodeId node, std::size_t length,
                                                                                      std::vector<std::size_t> alive) {
    std::map<char32_t, std::vector<std::size_t>> next;
    bool is_name = false;
    for (const std::size_t i : alive) {
      if (names[i].size() == length)
        is_name = true;
      else
        next[names[i][length]].push_back(i);
    }
    CharClass others = plain;
    for (const auto& [c, longer] : next) {
      others = others.intersect(CharClass(c, c).complement());
      if (!plain.contains(c)) continue;
      const NodeId child = builder_.add_node();
      add_char(builder_, node, CharClass(c, c), Spelling::kPlain, child);
      walk(child, length + 1, longer);
    }
    add_char(builder_, node, others, Spelling::kPlain, outside);
    if (!is_name) {
      const NodeId quote = builder_.emit_literal(node, "\"");
      builder_.add_empty(quote, end);
    }
  };
  std::vector<std::size_t> all(names.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  walk(builder_.emit_literal(from, "\""), 0, std::move(all));
  return end;
}

RuleId JsonText::char_rule() {
  if (!char_) {
    char_ = builder_.add_rule();
    add_string_char(builder_.rule_start(*char_), builder_.rule_accept(*char_));
  }
  return *char_;
}

NodeId JsonText::emit_string(NodeId from, std::int64_t min_length, std::optional<std::int64_t> max_length) {
  NodeId node = builder_.emit_literal(from, "\"");
  for (std::int64_t i = 0; i < min_length; ++i) node = builder_.emit_call(node, char_rule());
  if (!max_length) return emit_string_tail(node);
  const NodeId end = builder_.add_node();
  builder_.add_empty(node, end);
  for (std::int64_t i = min_length; i < *max_length; ++i) {
    node = builder_.emit_call(node, char_rule());
    builder_.add_empty(node, end);
  }
  return builder_.emit_literal(end, "\"");
}

/// Numbers of exactly low.size() digits from low to high.
NodeId JsonText::emit_digits(NodeId from, std::string_view low, std::string_view high) {
  const NodeId end = builder_.add_node();
  const auto add = [&](NodeId node, char first, char last) {
    const NodeId next = builder_.add_node();
    builder_.add_bytes(node, static_cast<std::uint8_t>(first), static_cast<std::uint8_t>(last), next);
    return next;
  };
  const auto add_free = [&](NodeId node, std::size_t count) {
    for (; count > 0; --count) node = add(node, '0', '9');
    builder_.add_empty(node, end);
  };
  // Up to the first digit that differs there is one way; behind it the lower and the upper bound go separate ways.
  std::size_t i = 0;
  NodeId node = from;
  for (; i < low.size() && low[i] == high[i]; ++i) node = add(node, low[i], low[i]);
  if (i == low.size()) {
    builder_.add_empty(node, end);
    return end;
  }
  if (low[i] + 1 < high[i]) add_free(add(node, static_cast<char>(low[i] + 1), static_cast<char>(high[i] - 1)), low.size() - i - 1);
  const auto follow = [&](std::string_view bound, bool is_lower) {
    NodeId tight = add(node, bound[i], bound[i]);
    for (std::size_t k = i + 1; k < bound.size(); ++k) {
      if (is_lower && bound[k] < '9') add_free(add(tight, static_cast<char>(bound[k] + 1), '9'), bound.size() - k - 1);
      if (!is_lower && bound[k] > '0') add_free(add(tight, '0', static_cast<char>(bound[k] - 1)), bound.size() - k - 1);
      tight = add(tight, bound[k], bound[k]);
    }
    builder_.add_empty(tight, end);
  };
  follow(low, true);
  follow(high, false);
  return end;
}

/// low and high are not negative.
NodeId JsonText::emit_natural(NodeId from, std::int64_t low, std::int64_t high) {
  const NodeId end = builder_.add_node();
  for (std::int64_t first = 0, last = 9;; first = last + 1, last = last * 10 + 9) {
    const std::int64_t a = std::max(first, low), b = std::min(last, high);
    if (a <= b) {
      // A node of its own: digits of several lengths must not meet.
      const NodeId start = builder_.add_node();
      builder_.add_empty(from, start);
      builder_.add_empty(emit_digits(start, std::to_string(a), std::to_string(b)), end);
    }
    if (last >= high) break;
  }
  return end;
}

NodeId JsonText::emit_integer(NodeId from, std::int64_t low, std::int64_t high) {
  low = std::max(low, -kMaxInteger);
  high = std::min(high, kMaxInteger);
  const bool is_any = low == -kMaxInteger && high == kMaxInteger;
  if (is_any && integer_) return builder_.emit_call(from, *integer_);
  const RuleId rule = builder_.add_rule();
  if (is_any) integer_ = rule;
  const NodeId accept = builder_.rule_accept(rule), start = builder_.rule_start(rule);
  if (high >= 0) builder_.add_empty(emit_natural(start, std::max<std::int64_t>(low, 0), high), accept);
  if (low < 0) builder_.add_empty(emit_natural(builder_.emit_literal(start, "-"), std::max<std::int64_t>(1, -high), -low), accept);
  return builder_.emit_call(from, rule);
}

NodeId JsonText::emit_number(NodeId from) {
  if (!number_) {
    number_ = builder_.add_rule();
    emit_rule_pattern(builder_, *number_, R"(-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?)");
  }
  return builder_.emit_call(from, *number_);
}

namespace {

__extension__ using WideInt = __int128;

/// With `num_left` digits to come, remainders that differ by a multiple of this lead to the same texts.
std::int64_t modulus(std::int64_t divisor, std::size_t num_left) {
  std::int64_t out = divisor;
  for (std::size_t i = 0; i < num_left; ++i) out /= std::gcd(out, std::int64_t{10});
  return out;
}

/// Numbers whose units a divisor divides, digit by digit: the remainder of the number so far decides, and how many digits follow. The unit
/// is that of the last of num_digits digits after the point; a fraction may end earlier, as if zeros followed. Remainders that no digits
/// mend have no node, so a number of L digits has at most 10^k nodes k digits from either end.
class MultipleEmitter {
 public:
  MultipleEmitter(AutomatonBuilder& builder, std::int64_t divisor, int num_digits, NodeId end)
      : builder_(builder), divisor_(divisor), num_digits_(static_cast<std::size_t>(num_digits)), end_(end) {
    for (std::size_t i = 0; i <= kMaxDigits; ++i) {
      powers_.push_back(power_of_ten(static_cast<int>(i)));
      moduli_.push_back(modulus(divisor, i));
    }
  }

  /// From low to high units, neither negative.
  void emit(NodeId from, std::int64_t low, std::int64_t high) {
    std::size_t length = num_digits_ + 1;
    for (std::int64_t first = 0, last = power_of_ten(static_cast<int>(num_digits_) + 1) - 1;;
         first = last + 1, last = last * 10 + 9, ++length) {
      const std::int64_t a = std::max(first, low), b = std::min(last, high);
      if (a <= b) {
        const NodeId start = builder_.add_node();
        builder_.add_empty(from, start);
        walk(start, fmt::format("{:0{}}", a, length), fmt::format("{:0{}}", b, length), 0, true, true, 0);
      }
      if (last >= high) break;
    }
  }

 private:
  /// Whether zeros alone may follow, and may be left out.
  bool may_end(std::size_t num_left, std::int64_t rest) const { return num_left <= num_digits_ && missing(num_left, rest) == 0; }
  /// What the digits to come must make, modulo the divisor.
  std::int64_t missing(std::size_t num_left, std::int64_t rest) const {
    const auto value = static_cast<std::int64_t>(WideInt{rest} * powers_[num_left] % divisor_);
    return value == 0 ? 0 : divisor_ - value;
  }
  /// The node that the next digit starts from.
  NodeId pass_point(NodeId node, std::size_t num_left) {
    return num_left > 0 && num_left == num_digits_ ? builder_.emit_literal(node, ".") : node;
  }
  /// What follows once neither bound decides any more; kNone where no digits make a multiple.
  NodeId free_node(std::size_t num_left, std::int64_t rest) {
    if (missing(num_left, rest) >= powers_[num_left]) return kNone;
    if (num_left == 0) return end_;
    rest %= moduli_[num_left];
    const auto [found, is_new] = free_.try_emplace({num_left, rest}, kNone);
    if (!is_new) return found->second;
    const NodeId node = found->second = builder_.add_node();
    if (may_end(num_left, rest)) builder_.add_empty(node, end_);
    const NodeId from = pass_point(node, num_left);
    for (int digit = 0; digit <= 9; ++digit) add(from, digit, free_node(num_left - 1, (rest * 10 + digit) % divisor_));
    return node;
  }
  void add(NodeId from, int digit, NodeId to) {
    if (to != kNone) builder_.add_bytes(from, static_cast<std::uint8_t>('0' + digit), static_cast<std::uint8_t>('0' + digit), to);
  }
  void walk(NodeId node, const std::string& low, const std::string& high, std::size_t place, bool on_low, bool on_high, std::int64_t rest) {
    const std::size_t num_left = low.size() - place;
    const bool is_low_reached = !on_low || low.find_first_not_of('0', place) == std::string::npos;
    if (is_low_reached && may_end(num_left, rest)) builder_.add_empty(node, end_);
    if (num_left == 0) return;
    node = pass_point(node, num_left);
    const int first = on_low ? low[place] - '0' : 0, last = on_high ? high[place] - '0' : 9;
    for (int digit = first; digit <= last; ++digit) {
      const bool stays_low = on_low && digit == first, stays_high = on_high && digit == last;
      const std::int64_t next_rest = (rest * 10 + digit) % divisor_;
      if (!stays_low && !stays_high) {
        add(node, digit, free_node(num_left - 1, next_rest));
        continue;
      }
      const NodeId next = builder_.add_node();
      add(node, digit, next);
      walk(next, low, high, place + 1, stays_low, stays_high, next_rest);
    }
  }

  static constexpr NodeId kNone = -1;
  static constexpr std::size_t kMaxDigits = 18;

  AutomatonBuilder& builder_;
  std::int64_t divisor_;
  std::size_t num_digits_;
  NodeId end_;
  std::vector<std::int64_t> powers_;  // of ten
  std::vector<std::int64_t> moduli_;  // by digits to come
  std::map<std::pair<std::size_t, std::int64_t>, NodeId> free_;
};

}  // namespace

std::int64_t JsonText::count_multiple_states(std::int64_t low, std::int64_t high, std::int64_t divisor) {
  const std::int64_t furthest = std::max(high, -low);
  std::size_t num_digits = 1;
  while (num_digits < 18 && power_of_ten(static_cast<int>(num_digits)) <= furthest) ++num_digits;
  std::int64_t states = 0;
  for (std::size_t left = 0; left < num_digits; ++left) {
    // What is missing is a multiple of `common`, and below 10^left where digits can make it.
    const std::int64_t told_apart = modulus(divisor, left), common = divisor / told_apart;
    const std::int64_t makeable = (power_of_ten(static_cast<int>(left)) + common - 1) / common;
    states += std::min({told_apart, makeable, power_of_ten(static_cast<int>(num_digits - left))});
  }
  return states;
}

NodeId JsonText::emit_multiple(NodeId from, std::int64_t low, std::int64_t high, std::int64_t divisor, int num_digits) {
  const NodeId end = builder_.add_node();
  MultipleEmitter emitter(builder_, divisor, num_digits, end);
  if (high >= 0) emitter.emit(from, std::max<std::int64_t>(low, 0), high);
  if (low < 0) emitter.emit(builder_.emit_literal(from, "-"), std::max<std::int64_t>(1, -high), -low);
  return end;
}

/// Digits behind the point that stand for low to high units of the last, trailing zeros left out or not.
NodeId JsonText::emit_fraction(NodeId from, std::int64_t low, std::int64_t high, int num_digits) {
  const NodeId end = builder_.add_node();
  std::int64_t step = power_of_ten(num_digits);
  for (int digits = 1; digits <= num_digits; ++digits) {
    step /= 10;
    const std::int64_t first = (low + step - 1) / step, last = high / step;
    if (first > last) continue;
    const NodeId start = builder_.add_node();
    builder_.add_empty(from, start);
    builder_.add_empty(emit_digits(start, fmt::format("{:0{}}", first, digits), fmt::format("{:0{}}", last, digits)), end);
  }
  return end;
}

NodeId JsonText::emit_natural_number(NodeId from, std::int64_t low_units, std::int64_t high_units, int num_digits) {
  const std::int64_t unit = power_of_ten(num_digits);
  const NodeId end = builder_.add_node();
  const auto add = [&](std::int64_t low, std::int64_t high, std::int64_t fraction_low, std::int64_t fraction_high) {
    if (low > high) return;
    const NodeId start = builder_.add_node();
    builder_.add_empty(from, start);
    const NodeId whole = emit_natural(start, low, high);
    if (fraction_low == 0) builder_.add_empty(whole, end);
    builder_.add_empty(emit_fraction(builder_.emit_literal(whole, "."), fraction_low, fraction_high, num_digits), end);
  };
  const std::int64_t low = low_units / unit, high = high_units / unit;
  const std::int64_t low_rest = low_units % unit, high_rest = high_units % unit;
  if (low == high) {
    add(low, low, low_rest, high_rest);
    return end;
  }
  add(low, low, low_rest, unit - 1);
  add(low + 1, high - 1, 0, unit - 1);
  add(high, high, 0, high_rest);
  return end;
}

NodeId JsonText::emit_number(NodeId from, std::int64_t low_units, std::int64_t high_units, int num_digits) {
  const NodeId end = builder_.add_node();
  if (high_units >= 0) builder_.add_empty(emit_natural_number(from, std::max<std::int64_t>(0, low_units), high_units, num_digits), end);
  if (low_units < 0)
    builder_.add_empty(
        emit_natural_number(builder_.emit_literal(from, "-"), std::max<std::int64_t>(1, -high_units), -low_units, num_digits), end);
  return end;
}

RuleId JsonText::value_rule() {
  if (!value_) {
    value_ = builder_.add_rule();
    const NodeId start = builder_.rule_start(*value_), accept = builder_.rule_accept(*value_);
    for (const char* word : {"null", "true", "false"}) builder_.add_empty(builder_.emit_literal(start, word), accept);
    builder_.add_empty(emit_string(start), accept);
    builder_.add_empty(emit_number(start), accept);
    builder_.add_empty(emit_object(start), accept);
    builder_.add_empty(emit_array(start), accept);
  }
  return *value_;
}

RuleId JsonText::object_rule() {
  if (!object_) {
    object_ = builder_.add_rule();
    const NodeId open = emit_space(builder_.emit_literal(builder_.rule_start(*object_), "{"));
    const NodeId loop = builder_.add_node();
    builder_.add_empty(open, loop);
    const NodeId colon = builder_.emit_literal(emit_string(loop), ":");
    const NodeId member = emit_value(emit_space(colon));
    builder_.add_empty(emit_space(builder_.emit_literal(member, ",")), loop);
    const NodeId close = builder_.add_node();
    builder_.add_empty(open, close);
    builder_.add_empty(emit_space(member), close);
    builder_.add_empty(builder_.emit_literal(close, "}"), builder_.rule_accept(*object_));
  }
  return *object_;
}

RuleId JsonText::array_rule() {
  if (!array_) {
    array_ = builder_.add_rule();
    const NodeId open = emit_space(builder_.emit_literal(builder_.rule_start(*array_), "["));
    const NodeId loop = builder_.add_node();
    builder_.add_empty(open, loop);
    const NodeId item = emit_value(loop);
    builder_.add_empty(emit_space(builder_.emit_literal(item, ",")), loop);
    const NodeId close = builder_.add_node();
    builder_.add_empty(open, close);
    builder_.add_empty(emit_space(item), close);
    builder_.add_empty(builder_.emit_literal(close, "]"), builder_.rule_accept(*array_));
  }
  return *array_;
}

}  // namespace prl::grammar
