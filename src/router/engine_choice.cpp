#include "router/engine_choice.hpp"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace prl::router {
namespace {

using Candidates = std::vector<EngineChoice::Candidate>;

/// The first of those with the least `rank`.
template <typename Rank>
std::int64_t least_by(const Candidates& candidates, Rank rank) {
  return std::ranges::min_element(candidates, {}, rank)->id;
}

}  // namespace

bool EngineChoice::is_imbalanced(const Candidates& ready) const {
  std::int64_t least = std::numeric_limits<std::int64_t>::max(), most = 0;
  for (const Candidate& engine : ready) {
    least = std::min(least, engine.load->num_requests);
    most = std::max(most, engine.load->num_requests);
  }
  return most - least > prefixes_.max_difference && static_cast<double>(most) > prefixes_.max_ratio * static_cast<double>(least);
}

std::optional<std::int64_t> EngineChoice::with_prefix(const Candidates& candidates, const PrefixHashes& prompt,
                                                      std::optional<std::int64_t> home) const {
  const double wanted = prefixes_.threshold * static_cast<double>(prompt.size());
  std::optional<std::int64_t> found;
  std::tuple<std::size_t, bool, std::int64_t> best;
  for (const Candidate& engine : candidates) {
    const std::size_t num_parts = engine.sent->longest(prompt);
    const bool is_home = home == engine.id;
    const std::tuple rank(static_cast<double>(num_parts) > wanted ? num_parts : 0, is_home, -engine.load->num_requests);
    if ((std::get<0>(rank) == 0 && !is_home) || (found && rank <= best)) continue;
    found = engine.id;
    best = rank;
  }
  return found;
}

std::int64_t EngineChoice::draw(const Candidates& candidates) {
  const auto below = [this](std::size_t count) { return static_cast<std::size_t>(((random_() >> 32) * count) >> 32); };
  const std::size_t first = below(candidates.size());
  if (spread_ == Spread::kRandom || candidates.size() == 1) return candidates[first].id;
  std::size_t second = below(candidates.size() - 1);
  if (second >= first) ++second;
  const auto load_of = [](const Candidate& engine) { return std::pair(engine.load->num_requests, engine.load->num_tokens); };
  return (load_of(candidates[second]) < load_of(candidates[first]) ? candidates[second] : candidates[first]).id;
}

std::int64_t EngineChoice::choose(const Candidates& candidates, const Candidates& ready, const PrefixHashes& prompt,
                                  std::optional<std::int64_t> home) {
  switch (spread_) {
    case Spread::kSessions:
      return least_by(candidates, [](const Candidate& e) { return std::pair(e.load->num_tokens, e.load->num_requests); });
    case Spread::kTurns: return least_by(candidates, [this](const Candidate& e) { return std::pair(e.id <= last_turn_, e.id); });
    case Spread::kRandom:
    case Spread::kTwoChoices: return draw(candidates);
    case Spread::kPrefixes: break;
  }
  if (is_imbalanced(ready))
    return least_by(candidates, [](const Candidate& e) { return std::pair(e.load->num_requests, e.load->num_tokens); });
  if (const auto found = with_prefix(candidates, prompt, home)) return *found;
  return least_by(candidates, [](const Candidate& e) { return std::tuple(e.sent->num_bytes(), e.load->num_requests, e.load->num_tokens); });
}

}  // namespace prl::router
