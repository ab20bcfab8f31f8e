#include "orchestrator/reference_scoring.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "net/errors.hpp"
#include "text/json_python.hpp"

namespace prl::orchestrator {
namespace {

/// Scores of `ids`, of all but the last one if only that does not fit.
asio::awaitable<std::vector<float>> score_tokens(std::vector<std::int32_t> ids, env::PromptScorer* teacher, net::TimePoint deadline,
                                                 net::Fields headers) {
  std::exception_ptr failure;
  try {
    auto scoring = teacher->score(ids, deadline, headers);
    co_return co_await std::move(scoring);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  // Servers want room for one token of their own, so a rollout that filled a context of the same length is one too long.
  if (net::to_error(failure).code() != ErrorCode::kOverlong || ids.size() < 3) std::rethrow_exception(failure);
  ids.pop_back();
  auto scoring = teacher->score(std::move(ids), deadline, std::move(headers));
  co_return co_await std::move(scoring);
}

/// The tokens in front of the rollout.
std::vector<std::int32_t> prefix_of(const env::Episode& episode, const ReferenceScoring& options) {
  const Demonstrations& shown = options.demonstrations;
  if (!shown.prefix_of) return {};
  const boost::json::value* demonstration = episode.info.if_contains(shown.key);
  if (demonstration == nullptr || demonstration->is_null())
    fail(ErrorCode::kInvalidArgument,
         "{}: task {} has no \"{}\" to show the policy as its own teacher: set opsd.demo_key to a field of the task's info, or answer",
         episode.env_name, episode.example_id, shown.key);
  return shown.prefix_of(text::is_text(*demonstration) ? std::string(demonstration->get_string()) : text::to_json_text(*demonstration));
}

}  // namespace

asio::awaitable<TurnScores> score_episode(const env::Episode* episode, env::PromptScorer* teacher, ReferenceScoring options,
                                          net::TimePoint deadline) {
  TurnScores out;
  for (const env::TrajectoryStep& step : episode->trajectory) out.push_back(step.tokens.logprobs);
  const std::vector<wire::TrainingSample> samples = to_samples(*episode, options.strategy);
  const std::vector<std::vector<std::size_t>> turns = sample_turns(*episode, options.strategy);
  const std::vector<std::int32_t> prefix = prefix_of(*episode, options);
  for (std::size_t s = 0; s < samples.size(); ++s) {
    if (!samples[s].images.empty())
      fail(ErrorCode::kNotImplemented, "{}: a rollout has images, and teachers that score such are not built", episode->env_name);
    std::vector<std::int32_t> ids = samples[s].token_ids;
    ids.resize(std::min(ids.size(), static_cast<std::size_t>(options.max_tokens)));
    ids.insert(ids.begin(), prefix.begin(), prefix.end());
    auto scoring = score_tokens(std::move(ids), teacher, deadline, options.headers);
    const std::vector<float> scores = co_await std::move(scoring);
    for (const std::size_t turn : turns[s]) {
      // Within its sample a turn's completion begins behind its prompt, whichever turns came before.
      const std::size_t begin = prefix.size() + episode->trajectory[turn].tokens.prompt_ids.size();
      for (std::size_t i = 0; i < out[turn].size() && begin + i < scores.size(); ++i) out[turn][i] = scores[begin + i];
    }
  }
  co_return out;
}

}  // namespace prl::orchestrator
