#pragma once

#include <cstdint>
#include <optional>

namespace prl::env {

/// A rational number in lowest terms; denominator > 0.
struct Rational {
  std::int64_t numerator = 0;
  std::int64_t denominator = 1;
  friend bool operator==(const Rational&, const Rational&) = default;
};

/// nullopt for a denominator of 0, and from all four where numerator or denominator do not fit 63 bits.
std::optional<Rational> make_rational(std::int64_t numerator, std::int64_t denominator);
std::optional<Rational> add(const Rational& a, const Rational& b);
std::optional<Rational> multiply(const Rational& a, const Rational& b);
std::optional<Rational> divide(const Rational& a, const Rational& b);

}  // namespace prl::env
