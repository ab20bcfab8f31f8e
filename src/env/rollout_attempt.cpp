#include "env/rollout_attempt.hpp"

#include "base/rng.hpp"

namespace prl::env {

bool RolloutAttempt::try_again(const Episode& episode, int max_retries) {
  if (!episode.error || !episode.error->is_transient || number >= max_retries) return false;
  ++number;
  if (episode.error->is_invalid_reply()) ++num_invalid;
  return true;
}

std::uint64_t RolloutAttempt::seed_from(std::uint64_t seed) const {
  return num_invalid > 0 ? mix_seed(seed, static_cast<std::uint64_t>(num_invalid)) : seed;
}

}  // namespace prl::env
