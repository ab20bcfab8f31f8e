#pragma once

#include <cstdint>

#include "env/episode.hpp"
#include "env/prompt_scorer.hpp"
#include "orchestrator/trajectories.hpp"

namespace prl::orchestrator {

namespace asio = boost::asio;

struct ReferenceScoring {
  TrajectoryStrategy strategy = TrajectoryStrategy::kInterleaved;
  std::int64_t max_tokens = 2048;  ///< what lies beyond is cut before training, and is not scored
};

/// Asks `teacher` for the log-probability of every sampled token of the episode: one request per training sample, so that each
/// token is scored behind exactly the tokens it is trained behind.
///
/// Tokens that the teacher has no room for (beyond max_tokens, or the last one when its context ends there) get the policy's own
/// log-probability: they pull in no direction. Throws what the teacher's score throws. `episode` and `teacher` outlive the call.
asio::awaitable<TurnScores> score_episode(const env::Episode* episode, env::PromptScorer* teacher, ReferenceScoring options,
                                          net::TimePoint deadline);

}  // namespace prl::orchestrator
