#include "trainer/sft/mixture.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "base/rng.hpp"

namespace prl::trainer {
namespace {

constexpr std::uint64_t kStream = 0x313;
/// A probability so small that its part would need more draws than this is a mistake.
constexpr std::size_t kMaxRows = std::size_t{1} << 31;

void check_probabilities(std::span<const std::size_t> sizes, const std::vector<double>& probabilities, config::StoppingStrategy strategy) {
  if (probabilities.size() != sizes.size())
    fail(ErrorCode::kInvalidArgument, "[data.probabilities] {} probabilities for {} parts", probabilities.size(), sizes.size());
  double sum = 0;
  for (const double p : probabilities) {
    if (!(p >= 0)) fail(ErrorCode::kInvalidArgument, "[data.probabilities] {} is negative or no number", p);
    if (p == 0 && strategy == config::StoppingStrategy::kAllExhausted)
      fail(ErrorCode::kInvalidArgument,
           "[data.probabilities] a part with probability 0 is never used up: leave it out, or set "
           "data.stopping_strategy = \"first_exhausted\"");
    sum += p;
  }
  if (std::abs(sum - 1) > 1e-6) fail(ErrorCode::kInvalidArgument, "[data.probabilities] they sum to {}, wanted 1", sum);
}

}  // namespace

std::vector<MixedRow> mix_rows(std::span<const std::size_t> sizes, const std::optional<std::vector<double>>& probabilities,
                               config::StoppingStrategy strategy, std::uint64_t seed) {
  for (std::size_t part = 0; part < sizes.size(); ++part)
    if (sizes[part] == 0 || sizes[part] > std::numeric_limits<std::uint32_t>::max())
      fail(ErrorCode::kInvalidArgument, "[data] part {} has {} rows", part + 1, sizes[part]);
  if (probabilities) check_probabilities(sizes, *probabilities, strategy);
  std::vector<MixedRow> rows;
  if (sizes.empty()) return rows;
  const bool until_all = strategy == config::StoppingStrategy::kAllExhausted;
  if (sizes.size() == 1 || !probabilities) {
    const std::size_t turns = until_all ? *std::max_element(sizes.begin(), sizes.end()) : *std::min_element(sizes.begin(), sizes.end());
    for (std::size_t turn = 0; turn < turns; ++turn)
      for (std::size_t part = 0; part < sizes.size(); ++part)
        rows.push_back({static_cast<std::uint32_t>(part), static_cast<std::uint32_t>(turn % sizes[part])});
    return rows;
  }
  std::vector<double> ends;
  for (const double p : *probabilities) ends.push_back((ends.empty() ? 0 : ends.back()) + p);
  std::size_t last = sizes.size() - 1;  // takes what rounding leaves beyond the last end
  while ((*probabilities)[last] == 0) --last;
  std::vector<std::size_t> next(sizes.size(), 0);
  std::vector<char> is_exhausted(sizes.size(), 0);
  std::size_t num_left = until_all ? sizes.size() : 1;
  Rng rng(seed, kStream);
  while (num_left > 0) {
    const double draw = rng.next_double();
    const auto found = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), draw) - ends.begin());
    const std::size_t part = std::min(found, last);
    rows.push_back({static_cast<std::uint32_t>(part), static_cast<std::uint32_t>(next[part])});
    if (rows.size() > kMaxRows)
      fail(ErrorCode::kInvalidArgument, "[data.probabilities] more than {} rows until all parts are used up", kMaxRows);
    if (++next[part] < sizes[part]) continue;
    next[part] = 0;
    if (is_exhausted[part] == 0) --num_left;
    is_exhausted[part] = 1;
  }
  return rows;
}

}  // namespace prl::trainer
