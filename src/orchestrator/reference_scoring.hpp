#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "env/episode.hpp"
#include "env/prompt_scorer.hpp"
#include "orchestrator/trajectories.hpp"

namespace prl::orchestrator {

namespace asio = boost::asio;

/// Tokens that a teacher reads in front of a rollout, made of the rollout's demonstration; they are not scored.
struct Demonstrations {
  std::string key;  ///< field of the rollout's or the task's info, or "answer"
  std::function<std::vector<std::int32_t>(const std::string& demonstration)> prefix_of;  ///< empty: there are none
};

struct ReferenceScoring {
  TrajectoryStrategy strategy = TrajectoryStrategy::kInterleaved;
  Demonstrations demonstrations = {};
  std::int64_t max_tokens = 2048;  ///< what lies beyond is cut before training, and is not scored
  net::Fields headers = {};        ///< of the teacher's requests, where they go over HTTP
};

/// Asks `teacher` for the log-probability of every sampled token of the episode: one request per training sample, so that each
/// token is scored behind exactly the tokens it is trained behind.
///
/// With demonstrations, a rollout without a demonstration is Error{kInvalidArgument}.
/// Tokens that exceed the teacher's context (beyond max_tokens, or the last one when its context ends there) get the policy's own
/// log-probability, so their gradient is zero. Throws what the teacher's score throws. `episode` and `teacher` outlive the call.
asio::awaitable<TurnScores> score_episode(const env::Episode* episode, env::PromptScorer* teacher, ReferenceScoring options,
                                          net::TimePoint deadline);

}  // namespace prl::orchestrator
