#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/automaton.hpp"

namespace prl::grammar {

/// The pieces of JSON as rules of one automaton, made when first used. Each emitter starts at a node and returns the node
/// after the text.
///
/// Space: none, one blank, or a line break with at most kMaxIndent blanks or tabs, where JSON allows it except before a comma
/// or a colon, so that a model cannot fill its output with blanks. Numbers are bounded so that every one of them is a finite
/// double: integers have at most 18 digits, others at most 15 before the point, 16 after it and 2 in the exponent.
class JsonText {
 public:
  static constexpr int kMaxIndent = 40;
  static constexpr std::int64_t kMaxInteger = 999'999'999'999'999'999;
  /// Numbers with bounds have at most this many digits, before and after the point together: different ones are different doubles.
  static constexpr int kMaxBoundedDigits = 15;

  explicit JsonText(AutomatonBuilder& builder) : builder_(builder) {}

  NodeId emit_space(NodeId from);
  NodeId emit_string(NodeId from);
  /// min_length to max_length characters (none: no bound), escapes counted as what they stand for.
  NodeId emit_string(NodeId from, std::int64_t min_length, std::optional<std::int64_t> max_length);
  /// Any string but these.
  NodeId emit_string_except(NodeId from, const std::vector<std::string>& excluded);
  NodeId emit_integer(NodeId from, std::int64_t low = -kMaxInteger, std::int64_t high = kMaxInteger);
  /// Numbers with at most `num_digits` (0 to kMaxDivisorDigits) digits after the point, between low and high units of the last of them,
  /// both included, whose units `divisor` (1 to kMaxDivisor) divides. No exponents; zeros at the end of a fraction may be left out.
  NodeId emit_multiple(NodeId from, std::int64_t low, std::int64_t high, std::int64_t divisor, int num_digits = 0);
  static constexpr std::int64_t kMaxDivisor = 1'000'000'000'000'000;
  static constexpr int kMaxDivisorDigits = 6;
  /// About how many nodes emit_multiple adds: remainders that must be told apart, by place. Factors 2 and 5 of the divisor cost little, and
  /// so do bounds of few digits.
  static std::int64_t count_multiple_states(std::int64_t low, std::int64_t high, std::int64_t divisor);
  static constexpr std::int64_t kMaxMultipleStates = 50'000;
  NodeId emit_number(NodeId from);
  /// Numbers with at most `num_digits` (1 to kMaxBoundedDigits) digits after the point, between low and high units of the last of them,
  /// both included.
  NodeId emit_number(NodeId from, std::int64_t low_units, std::int64_t high_units, int num_digits);
  NodeId emit_value(NodeId from) { return builder_.emit_call(from, value_rule()); }
  NodeId emit_object(NodeId from) { return builder_.emit_call(from, object_rule()); }
  NodeId emit_array(NodeId from) { return builder_.emit_call(from, array_rule()); }
  /// The rest of a member's name and its quote: any text, from inside the quotes on.
  NodeId emit_string_tail(NodeId from);

 private:
  RuleId value_rule();
  RuleId object_rule();
  RuleId array_rule();
  RuleId char_rule();
  void add_string_char(NodeId from, NodeId to);
  NodeId emit_digits(NodeId from, std::string_view low, std::string_view high);
  NodeId emit_natural(NodeId from, std::int64_t low, std::int64_t high);
  NodeId emit_fraction(NodeId from, std::int64_t low, std::int64_t high, int num_digits);
  NodeId emit_natural_number(NodeId from, std::int64_t low_units, std::int64_t high_units, int num_digits);

  AutomatonBuilder& builder_;
  std::optional<RuleId> space_, string_, char_, number_, integer_, value_, object_, array_;
};

}  // namespace prl::grammar
