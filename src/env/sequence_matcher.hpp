#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace prl::env {

/// A run of equal characters: a[a_begin, a_begin + size) == b[b_begin, b_begin + size).
struct MatchingBlock {
  std::int64_t a_begin = 0;
  std::int64_t b_begin = 0;
  std::int64_t size = 0;
  bool operator==(const MatchingBlock&) const = default;
};

/// What Python's difflib.SequenceMatcher(None, a, b) finds, over code points, with its automatic junk rule: in a `b` of
/// 200 or more characters, those that occur more than len(b) / 100 + 1 times cannot start a match.
/// Blocks ascend, adjacent ones are joined, and the last one is the empty block at both ends.
///
/// Complexity  quadratic in the worst case, about linear for texts of mostly distinct characters.
/// Source      CPython Lib/difflib.py: find_longest_match, get_matching_blocks, __chain_b.
std::vector<MatchingBlock> matching_blocks(const std::vector<char32_t>& a, const std::vector<char32_t>& b);

/// SequenceMatcher(None, a, b).ratio() of two UTF-8 texts: 2 * matches / (len a + len b), 1.0 when both are empty.
/// Not symmetric: the junk rule looks at b only.
double similarity_ratio(std::string_view a, std::string_view b);

}  // namespace prl::env
