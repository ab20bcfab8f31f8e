#include "weights/share.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::weights {
namespace {

ValueRanges::const_iterator holder_of(const ValueRanges& ranges, const ValueRange& range) noexcept {
  return std::ranges::find_if(ranges, [&](const ValueRange& outer) { return outer.begin <= range.begin && range.end <= outer.end; });
}

}  // namespace

std::int64_t num_values(const ValueRanges& ranges) noexcept {
  std::int64_t count = 0;
  for (const ValueRange& range : ranges) count += range.count();
  return count;
}

bool contains(const ValueRanges& outer, const ValueRanges& inner) noexcept {
  return std::ranges::all_of(inner, [&](const ValueRange& range) { return holder_of(outer, range) != outer.end(); });
}

ValueRanges without(std::int64_t num_all, const std::vector<Share>& taken) {
  ValueRanges sorted, rest;
  for (const Share& share : taken) sorted.insert(sorted.end(), share.ranges.begin(), share.ranges.end());
  std::ranges::sort(sorted, {}, &ValueRange::begin);
  std::int64_t begin = 0;
  for (const ValueRange& range : sorted) {
    if (begin < range.begin) rest.push_back({begin, range.begin});
    begin = std::max(begin, range.end);
  }
  if (begin < num_all) rest.push_back({begin, num_all});
  return rest;
}

std::int64_t place_of(const ValueRanges& ranges, const ValueRange& range) {
  const auto holder = holder_of(ranges, range);
  PRL_CHECK(holder != ranges.end(), "values [{}, {}) that are not held", range.begin, range.end);
  return num_values(ValueRanges(ranges.begin(), holder)) + range.begin - holder->begin;
}

ValueRange part_of(std::int64_t num_all, int num_parts, int part, std::int64_t unit) {
  const std::int64_t num_units = (num_all + unit - 1) / unit;
  const auto cut = [&](std::int64_t i) { return std::min(num_all, num_units * i / num_parts * unit); };
  return {cut(part), cut(part + 1)};
}

}  // namespace prl::weights
