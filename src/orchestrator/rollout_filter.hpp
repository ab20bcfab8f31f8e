#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "env/episode.hpp"

namespace prl::orchestrator {

/// Finds rollouts that went wrong in a way the reward does not see (spec 3.6).
struct RolloutFilterOptions {
  enum class Kind {
    kGibberish,   ///< a sampled token with a rare id (above token_id_threshold) and logprob < -ln(vocab) - logprob_offset
    kRepetition,  ///< `window` sampled tokens in a row with probability above prob_threshold
  };
  Kind kind = Kind::kGibberish;
  bool enforce = false;  ///< drop what is found, instead of only counting it
  std::int64_t token_id_threshold = 100'000;
  double logprob_offset = 2.0;
  std::int64_t vocab_size = 0;  ///< 0: unknown, gibberish is then never found
  std::int64_t window = 3000;
  double prob_threshold = 0.99;
};

/// "gibberish", "repetition".
std::string to_string(RolloutFilterOptions::Kind kind);
bool matches(const RolloutFilterOptions& filter, const env::Episode& episode);

}  // namespace prl::orchestrator
