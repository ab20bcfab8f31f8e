#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace prl::weights {

/// A run [begin, end) of the array of all values of a model.
struct ValueRange {
  std::int64_t begin = 0, end = 0;
  std::int64_t count() const noexcept { return end - begin; }
  bool operator==(const ValueRange&) const = default;
};
/// In ascending order, none empty, none overlapping another.
using ValueRanges = std::vector<ValueRange>;

/// What one rank of a trainer sends to engines of each version.
struct Share {
  std::string address;  ///< "tcp://host:port" of its WeightServer
  ValueRanges ranges;
  std::string to_text() const;
  /// Error{kCorrupt} quoting what is none.
  static Share parse(const std::string& text);
  bool operator==(const Share&) const = default;
};

std::int64_t num_values(const ValueRanges& ranges) noexcept;
/// Whether each of `inner` lies within one of `outer`.
bool contains(const ValueRanges& outer, const ValueRanges& inner) noexcept;
/// What of [0, num_all) none of `taken` has.
ValueRanges without(std::int64_t num_all, const std::vector<Share>& taken);
/// Where `range`, which lies within one of `ranges`, begins in an array that holds those, one after the other.
std::int64_t place_of(const ValueRanges& ranges, const ValueRange& range);
/// [0, num_all) in `num_parts` parts of about the same size, cut at multiples of `unit`; some may be empty.
ValueRange part_of(std::int64_t num_all, int num_parts, int part, std::int64_t unit);

}  // namespace prl::weights
