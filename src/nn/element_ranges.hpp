#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nn/tensor_table.hpp"

namespace prl::nn {

/// Elements that lie in several ranges of an array, and their places when those are put one after the other. Immutable.
class ElementRanges {
 public:
  ElementRanges() = default;
  ElementRanges(ElementRange range) : ElementRanges(std::vector<ElementRange>{range}) {}
  /// PRL_CHECK: ascending, and none overlaps another. Those that touch become one, empty ones none.
  explicit ElementRanges(const std::vector<ElementRange>& ranges);

  std::span<const ElementRange> ranges() const noexcept { return ranges_; }
  std::int64_t count() const noexcept { return count_; }
  /// All of `range`, in one piece. An empty one is everywhere.
  bool contains(ElementRange range) const noexcept { return range.count() == 0 || find(range.begin, range.end) < ranges_.size(); }
  /// Where element `at` of the array is. PRL_CHECK: it is there.
  std::int64_t place_of(std::int64_t at) const;
  /// What there is of `range`, in order.
  std::vector<ElementRange> within(ElementRange range) const;
  /// The same where it is at most one piece (PRL_CHECK); empty, at the begin of `range`, if there is nothing.
  ElementRange part_of(ElementRange range) const;
  bool operator==(const ElementRanges&) const = default;

 private:
  std::size_t find(std::int64_t begin, std::int64_t end) const noexcept;

  std::vector<ElementRange> ranges_;
  std::vector<std::int64_t> places_;  ///< of the first element of each
  std::int64_t count_ = 0;
};

}  // namespace prl::nn
