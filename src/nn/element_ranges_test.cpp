#include "nn/element_ranges.hpp"

#include <gtest/gtest.h>

namespace prl::nn {
namespace {

TEST(ElementRanges, PlacesFollowOneAnother) {
  const ElementRanges ranges(std::vector<ElementRange>{{2, 5}, {5, 5}, {5, 6}, {10, 10}, {12, 20}});
  ASSERT_EQ(ranges.ranges().size(), 2u) << "ranges that touch are one";
  EXPECT_EQ(ranges.ranges()[0], (ElementRange{2, 6}));
  EXPECT_EQ(ranges.count(), 12);
  EXPECT_EQ(ranges.place_of(2), 0);
  EXPECT_EQ(ranges.place_of(5), 3);
  EXPECT_EQ(ranges.place_of(12), 4);
  EXPECT_EQ(ranges.place_of(19), 11);
  EXPECT_DEATH((void)ranges.place_of(6), "not held");
}

TEST(ElementRanges, PartsOfARange) {
  const ElementRanges ranges(std::vector<ElementRange>{{2, 6}, {12, 20}});
  EXPECT_TRUE(ranges.contains({3, 6}));
  EXPECT_TRUE(ranges.contains({7, 7}));
  EXPECT_FALSE(ranges.contains({3, 7}));
  EXPECT_FALSE(ranges.contains({5, 13}));
  EXPECT_EQ(ranges.within({0, 100}), (std::vector<ElementRange>{{2, 6}, {12, 20}}));
  EXPECT_EQ(ranges.within({5, 13}), (std::vector<ElementRange>{{5, 6}, {12, 13}}));
  EXPECT_TRUE(ranges.within({6, 12}).empty());
  EXPECT_EQ(ranges.part_of({4, 10}), (ElementRange{4, 6}));
  EXPECT_EQ(ranges.part_of({8, 10}), (ElementRange{8, 8}));
  EXPECT_DEATH((void)ranges.part_of({5, 13}), "2 pieces");
  EXPECT_EQ(ElementRanges().count(), 0);
  EXPECT_EQ(ElementRanges(ElementRange{7, 7}), ElementRanges());
}

}  // namespace
}  // namespace prl::nn
