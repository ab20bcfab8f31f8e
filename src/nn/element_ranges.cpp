#include "nn/element_ranges.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::nn {

ElementRanges::ElementRanges(const std::vector<ElementRange>& ranges) {
  for (const ElementRange& range : ranges) {
    if (range.count() == 0) continue;
    PRL_CHECK(range.count() > 0 && (ranges_.empty() || range.begin >= ranges_.back().end), "elements [{}, {}) out of their order",
              range.begin, range.end);
    if (!ranges_.empty() && ranges_.back().end == range.begin) {
      ranges_.back().end = range.end;
    } else {
      places_.push_back(count_);
      ranges_.push_back(range);
    }
    count_ += range.count();
  }
}

std::size_t ElementRanges::find(std::int64_t begin, std::int64_t end) const noexcept {
  const auto after = std::ranges::upper_bound(ranges_, begin, {}, &ElementRange::begin);
  if (after == ranges_.begin()) return ranges_.size();
  const auto found = std::prev(after);
  return found->contains({begin, end}) ? static_cast<std::size_t>(found - ranges_.begin()) : ranges_.size();
}

std::int64_t ElementRanges::place_of(std::int64_t at) const {
  const std::size_t i = find(at, at + 1);
  PRL_CHECK(i < ranges_.size(), "element {} is not held", at);
  return places_[i] + at - ranges_[i].begin;
}

std::vector<ElementRange> ElementRanges::within(ElementRange range) const {
  std::vector<ElementRange> parts;
  for (auto it = std::ranges::upper_bound(ranges_, range.begin, {}, &ElementRange::end); it != ranges_.end() && it->begin < range.end; ++it)
    if (const ElementRange part = intersection(*it, range); part.count() > 0) parts.push_back(part);
  return parts;
}

ElementRange ElementRanges::part_of(ElementRange range) const {
  const std::vector<ElementRange> parts = within(range);
  PRL_CHECK(parts.size() <= 1, "{} pieces of elements [{}, {})", parts.size(), range.begin, range.end);
  return parts.empty() ? ElementRange{range.begin, range.begin} : parts.front();
}

}  // namespace prl::nn
