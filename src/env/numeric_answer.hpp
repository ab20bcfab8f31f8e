#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace prl::env {

/// The final answer that a solution states: the content of its last \boxed{...} (braces balanced), else the rest of the line
/// after its last "####"; nullopt if it has neither. Text up to the last "</think>" does not count.
std::optional<std::string> extract_final_answer(std::string_view text);

/// A rational number in lowest terms; denominator > 0.
struct Rational {
  std::int64_t numerator = 0;
  std::int64_t denominator = 1;
  friend bool operator==(const Rational&, const Rational&) = default;
};

/// The number that an answer states, exactly: "1,234", "-2.50", "3/4", "\frac{3}{4}", "1\frac{1}{2}", "$12", "50\%" (the sign of
/// per cent is a unit: 50), "x = 7", "12 apples", "5\text{ cm}". nullopt if it is no single number or does not fit 18 digits.
std::optional<Rational> parse_number(std::string_view answer);

/// True if both are the same number, or, where one is no number, the same text but for white space, case, "$", \left, \right,
/// \text{} and a final full stop. This compares values, it does no algebra: "x+1" and "1+x" differ.
bool is_same_answer(std::string_view given, std::string_view wanted);

}  // namespace prl::env
