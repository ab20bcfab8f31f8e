#include "orchestrator/rollout_filter.hpp"

#include <cmath>

namespace prl::orchestrator {

std::string to_string(RolloutFilterOptions::Kind kind) {
  return kind == RolloutFilterOptions::Kind::kGibberish ? "gibberish" : "repetition";
}

bool matches(const RolloutFilterOptions& filter, const env::Episode& episode) {
  const double gibberish_below = filter.vocab_size > 0 ? -std::log(static_cast<double>(filter.vocab_size)) - filter.logprob_offset : -1e300;
  const double repetition_above = std::log(filter.prob_threshold);
  for (const env::TrajectoryStep& step : episode.trajectory) {
    std::int64_t run = 0;
    for (std::size_t i = 0; i < step.tokens.completion_ids.size(); ++i) {
      const double logprob = step.tokens.logprobs[i];
      if (filter.kind == RolloutFilterOptions::Kind::kGibberish) {
        if (step.tokens.completion_ids[i] > filter.token_id_threshold && logprob < gibberish_below) return true;
      } else {
        run = logprob > repetition_above ? run + 1 : 0;
        if (run >= filter.window) return true;
      }
    }
  }
  return false;
}

}  // namespace prl::orchestrator
