#pragma once

#include <cstdint>

#include "env/episode.hpp"

namespace prl::env {

/// One attempt at a rollout, and whether another follows: the rule of training, validation, evaluation and synthetic data alike.
struct RolloutAttempt {
  int number = 0;       ///< from 0
  int num_invalid = 0;  ///< attempts before it whose reply was not valid

  /// True, and this becomes the next attempt, if `episode` failed for a reason that may pass and there were fewer than `max_retries`
  /// attempts after the first.
  [[nodiscard]] bool try_again(const Episode& episode, int max_retries);
  /// The sampling seed of this attempt, where the first has `seed`. Only an invalid reply changes it (EpisodeError::is_invalid_reply).
  std::uint64_t seed_from(std::uint64_t seed) const;
};

}  // namespace prl::env
