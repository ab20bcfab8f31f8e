#include "env/rational.hpp"

namespace prl::env {
namespace {

__extension__ using Wide = __int128;

std::optional<Rational> lowest(Wide numerator, Wide denominator) {
  if (denominator == 0) return std::nullopt;
  if (denominator < 0) {
    numerator = -numerator;
    denominator = -denominator;
  }
  Wide a = numerator < 0 ? -numerator : numerator;
  Wide b = denominator;
  while (b != 0) {
    const Wide rest = a % b;
    a = b;
    b = rest;
  }
  if (a > 1) {
    numerator /= a;
    denominator /= a;
  }
  constexpr Wide kMax = INT64_MAX;
  if (numerator > kMax || numerator < -kMax || denominator > kMax) return std::nullopt;
  return Rational{static_cast<std::int64_t>(numerator), static_cast<std::int64_t>(denominator)};
}

}  // namespace

std::optional<Rational> make_rational(std::int64_t numerator, std::int64_t denominator) { return lowest(numerator, denominator); }

std::optional<Rational> add(const Rational& a, const Rational& b) {
  return lowest(static_cast<Wide>(a.numerator) * b.denominator + static_cast<Wide>(b.numerator) * a.denominator,
                static_cast<Wide>(a.denominator) * b.denominator);
}

std::optional<Rational> multiply(const Rational& a, const Rational& b) {
  return lowest(static_cast<Wide>(a.numerator) * b.numerator, static_cast<Wide>(a.denominator) * b.denominator);
}

std::optional<Rational> divide(const Rational& a, const Rational& b) {
  return lowest(static_cast<Wide>(a.numerator) * b.denominator, static_cast<Wide>(a.denominator) * b.numerator);
}

}  // namespace prl::env
