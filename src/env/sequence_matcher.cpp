#include "env/sequence_matcher.hpp"

#include <algorithm>
#include <unordered_map>

#include "text/utf8.hpp"

namespace prl::env {
namespace {

class Matcher {
 public:
  Matcher(const std::vector<char32_t>& a, const std::vector<char32_t>& b) : a_(a), b_(b), lengths_(b.size() + 1), next_(b.size() + 1) {
    for (std::size_t j = 0; j < b_.size(); ++j) positions_[b_[j]].push_back(static_cast<std::int64_t>(j));
    if (b_.size() >= kPopularMinLength) {
      const std::size_t max_occurrences = b_.size() / 100 + 1;
      std::erase_if(positions_, [&](const auto& entry) { return entry.second.size() > max_occurrences; });
    }
  }

  std::vector<MatchingBlock> blocks() {
    struct Range {
      std::int64_t a_begin, a_end, b_begin, b_end;
    };
    std::vector<Range> pending{{0, static_cast<std::int64_t>(a_.size()), 0, static_cast<std::int64_t>(b_.size())}};
    std::vector<MatchingBlock> found;
    while (!pending.empty()) {
      const Range r = pending.back();
      pending.pop_back();
      const MatchingBlock m = longest_match(r.a_begin, r.a_end, r.b_begin, r.b_end);
      if (m.size == 0) continue;
      found.push_back(m);
      if (r.a_begin < m.a_begin && r.b_begin < m.b_begin) pending.push_back({r.a_begin, m.a_begin, r.b_begin, m.b_begin});
      if (m.a_begin + m.size < r.a_end && m.b_begin + m.size < r.b_end)
        pending.push_back({m.a_begin + m.size, r.a_end, m.b_begin + m.size, r.b_end});
    }
    std::sort(found.begin(), found.end(), [](const MatchingBlock& x, const MatchingBlock& y) { return x.a_begin < y.a_begin; });
    std::vector<MatchingBlock> joined;
    for (const MatchingBlock& m : found) {
      if (!joined.empty() && joined.back().a_begin + joined.back().size == m.a_begin &&
          joined.back().b_begin + joined.back().size == m.b_begin)
        joined.back().size += m.size;
      else
        joined.push_back(m);
    }
    joined.push_back({static_cast<std::int64_t>(a_.size()), static_cast<std::int64_t>(b_.size()), 0});
    return joined;
  }

 private:
  static constexpr std::size_t kPopularMinLength = 200;

  // lengths_[j + 1] is the length of the match that ends at a[i - 1], b[j]; touched_ says which entries are not zero.
  MatchingBlock longest_match(std::int64_t a_begin, std::int64_t a_end, std::int64_t b_begin, std::int64_t b_end) {
    MatchingBlock best{a_begin, b_begin, 0};
    touched_.clear();
    for (std::int64_t i = a_begin; i < a_end; ++i) {
      next_touched_.clear();
      const auto it = positions_.find(a_[static_cast<std::size_t>(i)]);
      if (it != positions_.end()) {
        for (const std::int64_t j : it->second) {
          if (j < b_begin) continue;
          if (j >= b_end) break;
          const std::int64_t length = lengths_[static_cast<std::size_t>(j)] + 1;
          next_[static_cast<std::size_t>(j) + 1] = length;
          next_touched_.push_back(static_cast<std::size_t>(j) + 1);
          if (length > best.size) best = {i - length + 1, j - length + 1, length};
        }
      }
      for (const std::size_t j : touched_) lengths_[j] = 0;
      std::swap(lengths_, next_);
      std::swap(touched_, next_touched_);
    }
    for (const std::size_t j : touched_) lengths_[j] = 0;
    // Characters that the junk rule keeps from starting a match may still extend one.
    while (best.a_begin > a_begin && best.b_begin > b_begin && at_a(best.a_begin - 1) == at_b(best.b_begin - 1)) {
      --best.a_begin;
      --best.b_begin;
      ++best.size;
    }
    while (best.a_begin + best.size < a_end && best.b_begin + best.size < b_end &&
           at_a(best.a_begin + best.size) == at_b(best.b_begin + best.size))
      ++best.size;
    return best;
  }

  char32_t at_a(std::int64_t i) const { return a_[static_cast<std::size_t>(i)]; }
  char32_t at_b(std::int64_t j) const { return b_[static_cast<std::size_t>(j)]; }

  const std::vector<char32_t>& a_;
  const std::vector<char32_t>& b_;
  std::unordered_map<char32_t, std::vector<std::int64_t>> positions_;
  std::vector<std::int64_t> lengths_;
  std::vector<std::int64_t> next_;
  std::vector<std::size_t> touched_;
  std::vector<std::size_t> next_touched_;
};

}  // namespace

std::vector<MatchingBlock> matching_blocks(const std::vector<char32_t>& a, const std::vector<char32_t>& b) {
  return Matcher(a, b).blocks();
}

double similarity_ratio(std::string_view a, std::string_view b) {
  const std::vector<char32_t> left = text::to_code_points(text::replace_invalid_utf8(a));
  const std::vector<char32_t> right = text::to_code_points(text::replace_invalid_utf8(b));
  const std::size_t total = left.size() + right.size();
  if (total == 0) return 1.0;
  std::int64_t matches = 0;
  for (const MatchingBlock& block : matching_blocks(left, right)) matches += block.size;
  return 2.0 * static_cast<double>(matches) / static_cast<double>(total);
}

}  // namespace prl::env
