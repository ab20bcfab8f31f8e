#pragma once

#include <cstdint>

#include "grammar/schema_view.hpp"

namespace prl::grammar {

/// digits * 10^exponent.
struct Decimal {
  std::int64_t digits = 0;  ///< at most 19
  int exponent = 0;
};
/// The shortest decimal that reads back as the number; integers exactly, up to what an int64 holds.
Decimal decimal_of(const boost::json::value& value);

/// minimum, maximum and their exclusive forms of one schema as whole units: of 1 for integers, else of the last digit that may be
/// written. Computed in decimal from the numbers as the schema writes them, so no bound is rounded to the wrong side.
class NumberBounds {
 public:
  /// Error{kInvalidArgument} naming the place if no number that can be written is within them.
  NumberBounds(const SchemaView& view, bool is_integer);
  /// The same with that many digits after the point, whatever the bounds are.
  NumberBounds(const SchemaView& view, int num_digits);
  bool has_any() const { return has_any_; }
  std::int64_t low() const { return low_; }
  std::int64_t high() const { return high_; }
  /// Digits after the point: six, or more where bounds near zero need them and leave room.
  int num_digits() const { return num_digits_; }

 private:
  void choose_digits(const SchemaView& view);
  void read(const SchemaView& view, std::int64_t limit);

  bool has_any_ = false;
  int num_digits_ = 0;
  std::int64_t low_ = 0, high_ = 0;
};

}  // namespace prl::grammar
