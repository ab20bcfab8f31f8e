#pragma once

#include <complex>
#include <optional>
#include <string_view>

#include "env/rational.hpp"

namespace prl::env {

/// The value of a formula at one choice of its variables.
struct FormulaValue {
  std::complex<double> value;
  std::optional<Rational> exact;  ///< the same where only rational numbers went in and every step fits
  bool has_variables = false;
};

/// Reads a formula in LaTeX or plain notation and evaluates it: sums, products (also without a sign), fractions, powers, roots,
/// factorials, binomials, absolute values, \pi, e, i, \infty, logarithms, exponential and trigonometric functions. Every other letter,
/// with its subscript, is a variable, whose value is a function of its name and of `point` (0 to 3: small, small and negative,
/// large, large and negative). nullopt for what is no formula: words of three letters and more, unknown commands, relations, unbalanced
/// brackets, over 2,000 bytes or 60 levels. \pm is read as plus for `pm` 1 and as minus for -1.
std::optional<FormulaValue> evaluate_formula(std::string_view text, int point, int pm = 1);

inline constexpr int kNumFormulaPoints = 4;

}  // namespace prl::env
