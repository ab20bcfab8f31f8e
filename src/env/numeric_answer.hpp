#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/rational.hpp"

namespace prl::env {

/// The final answer that a solution states: the content of its last \boxed{...} (braces balanced), else the rest of the line
/// after its last "####"; nullopt if it has neither. Text up to the last "</think>" does not count.
std::optional<std::string> extract_final_answer(std::string_view text);

/// An answer without the typesetting that carries no meaning: "$", \left, \right, small spaces, \text{} around words, degrees, boxes, a
/// final full stop.
std::string without_typesetting(std::string_view answer);

/// The number that an answer states, exactly: "1,234", "-2.50", "3/4", "\frac{3}{4}", "1\frac{1}{2}", "$12", "50\%" (the sign of
/// per cent is a unit: 50), "x = 7", "12 apples", "5\text{ cm}". nullopt if it is no single number or does not fit 18 digits.
std::optional<Rational> parse_number(std::string_view answer);

}  // namespace prl::env
