#include "grammar/number_bounds.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "base/error.hpp"
#include "grammar/json_text.hpp"
#include "text/json_python.hpp"

namespace prl::grammar {
namespace {

constexpr int kUsualDigits = 6;
constexpr std::int64_t kMaxUnits = 999'999'999'999'999;  // 15 digits

struct Given {
  const char* keyword;
  bool is_low, is_open;
};
constexpr Given kGiven[] = {
    {"minimum", true, false}, {"exclusiveMinimum", true, true}, {"maximum", false, false}, {"exclusiveMaximum", false, true}};

}  // namespace

Decimal decimal_of(const boost::json::value& value) {
  if (value.is_int64()) return {value.get_int64(), 0};
  if (value.is_uint64()) return {value.get_uint64() > INT64_MAX ? INT64_MAX : static_cast<std::int64_t>(value.get_uint64()), 0};
  const double number = text::as_double(value).value();
  if (std::isinf(number)) return {number < 0 ? -1 : 1, 400};
  char buffer[64];
  const auto written = std::to_chars(buffer, buffer + sizeof(buffer), number, std::chars_format::scientific);
  const std::string_view text(buffer, static_cast<std::size_t>(written.ptr - buffer));
  const std::size_t e = text.find('e');
  Decimal out;
  int num_fraction = 0;
  bool is_fraction = false;
  for (const char c : text.substr(0, e)) {
    if (c == '.') is_fraction = true;
    if (c < '0' || c > '9') continue;
    out.digits = out.digits * 10 + (c - '0');
    if (is_fraction) ++num_fraction;
  }
  if (text.front() == '-') out.digits = -out.digits;
  std::string_view exponent = text.substr(e + 1);
  if (exponent.front() == '+') exponent.remove_prefix(1);
  std::from_chars(exponent.data(), exponent.data() + exponent.size(), out.exponent);
  out.exponent -= num_fraction;
  return out;
}

namespace {

/// value * 10^shift, rounded down or up; far beyond int64 it is clamped to +-4e18.
std::int64_t scaled(Decimal value, int shift, bool rounds_up, bool& is_exact) {
  constexpr std::int64_t kFar = 4'000'000'000'000'000'000;
  is_exact = true;
  int exponent = value.exponent + shift;
  __extension__ using Wide = __int128;
  Wide number = value.digits;
  for (; exponent > 0 && number != 0; --exponent) {
    number *= 10;
    if (number > kFar || number < -kFar) return number > 0 ? kFar : -kFar;
  }
  Wide divisor = 1;
  for (; exponent < 0 && divisor < Wide{1} << 100; ++exponent) divisor *= 10;  // more than any number of 19 digits
  Wide quotient = number / divisor;
  const Wide rest = number % divisor;
  is_exact = rest == 0;
  if (rest > 0 && rounds_up) ++quotient;
  if (rest < 0 && !rounds_up) --quotient;
  return static_cast<std::int64_t>(std::clamp<Wide>(quotient, -kFar, kFar));
}

}  // namespace

NumberBounds::NumberBounds(const SchemaView& view, bool is_integer) {
  if (!is_integer) choose_digits(view);
  read(view, is_integer ? JsonText::kMaxInteger : kMaxUnits);
}

NumberBounds::NumberBounds(const SchemaView& view, int num_digits) {
  choose_digits(view);
  num_digits_ = num_digits;
  read(view, kMaxUnits);
}

void NumberBounds::choose_digits(const SchemaView& view) {
  double largest = 0, smallest = HUGE_VAL;
  bool has_low = false, has_high = false;
  for (const Given& given : kGiven) {
    const auto bound = view.number(given.keyword);
    if (!bound) continue;
    (given.is_low ? has_low : has_high) = true;
    largest = std::max(largest, std::abs(*bound));
    if (*bound != 0) smallest = std::min(smallest, std::abs(*bound));
    constexpr std::int64_t kMaxNumber = kMaxUnits / 1'000'000;
    if (std::abs(*bound) > static_cast<double>(kMaxNumber))
      view.refuse(given.keyword, fmt::format("bounds of numbers beyond {} are not supported", kMaxNumber));
  }
  num_digits_ = kUsualDigits;
  // Bounds near zero on both sides leave digits of the whole part for the fraction.
  const int needed = std::isfinite(smallest) ? static_cast<int>(std::ceil(-std::log10(smallest))) + 2 : 0;
  const int room = JsonText::kMaxBoundedDigits - (largest < 1 ? 0 : static_cast<int>(std::floor(std::log10(largest))) + 1);
  if (has_low && has_high) num_digits_ = std::clamp(needed, kUsualDigits, std::max(kUsualDigits, room));
}

void NumberBounds::read(const SchemaView& view, std::int64_t limit) {
  low_ = -limit;
  high_ = limit;
  for (const Given& given : kGiven) {
    if (!view.number(given.keyword)) continue;
    has_any_ = true;
    bool is_exact = true;
    const std::int64_t units = scaled(decimal_of(*view.find(given.keyword)), num_digits_, given.is_low, is_exact);
    const std::int64_t step = given.is_open && is_exact ? 1 : 0;
    if (given.is_low)
      low_ = std::max(low_, units + step);
    else
      high_ = std::min(high_, units - step);
  }
  if (low_ > high_)
    fail(ErrorCode::kInvalidArgument, "{}: no number is within the bounds{}", view.place(),
         num_digits_ == 0 ? "" : fmt::format(" with at most {} digits after the point", num_digits_));
}

}  // namespace prl::grammar
