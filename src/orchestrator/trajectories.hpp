#pragma once

#include <boost/json/array.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "env/episode.hpp"
#include "orchestrator/algo/advantage.hpp"
#include "wire/training.hpp"

namespace prl::orchestrator {

enum class TrajectoryStrategy {
  kInterleaved,  ///< turns whose prompt continues an earlier sample join it; any other turn opens a new sample
  kBranching,    ///< one sample per turn
};

/// What a reference model thinks of an episode: for each turn the log-probabilities of its completion's tokens, as many as
/// there are. Empty: none was asked.
using TurnScores = std::vector<std::vector<float>>;

/// The turns (indices into episode.trajectory) that make up each training sample of an episode, in order.
///
/// A turn joins the open sample whose complete tokens begin the turn's prompt (the longest such one), so a conversation whose
/// template rewrites history splits instead of training on tokens the policy never saw. Turns without token ids are in none.
std::vector<std::vector<std::size_t>> sample_turns(const env::Episode& episode, TrajectoryStrategy strategy);

/// The training samples of an episode, one per entry of sample_turns, without advantages (spec 3.9).
///
/// In a sample, tokens the policy sampled have mask 1 and their log-probability; all others mask 0 and log-probability 0. Each
/// sampled token is in one sample. ref_logprobs are there if `scores` are, 0 at tokens that were not sampled.
std::vector<wire::TrainingSample> to_samples(const env::Episode& episode, TrajectoryStrategy strategy, const TurnScores& scores = {});

/// Sets the advantage of every sampled token of `sample`; 0 elsewhere.
void set_advantage(wire::TrainingSample& sample, float advantage);

/// For each sample of an episode and each of its tokens: whether it may take part in the cross entropy of set_echo. Empty: all may.
using EchoMask = std::vector<std::vector<std::uint8_t>>;
/// The samples of an episode as a filter of the echo algorithm sees them: for each {token_ids, sampled (booleans), roles (null, "system",
/// "user", "assistant" or "tool": who wrote a token that set_echo would weigh)}, all as long as the sample.
boost::json::array echo_branches(const env::Episode& episode, TrajectoryStrategy strategy);

/// Gives tokens that the policy did not sample, after the first that it did, the cross-entropy weight of the role that wrote
/// them (TurnTokens::prompt_roles), where `keep` has them. `samples` are those of to_samples with the same strategy. Source: spec 3.8,
/// echo.
void set_echo(std::vector<wire::TrainingSample>& samples, const env::Episode& episode, TrajectoryStrategy strategy,
              const RoleWeights& weights, const EchoMask& keep = {});

/// What the sampled tokens of a rollout are trained with.
enum class SampleLoss {
  kPolicyGradient,  ///< the rl component, on advantages
  kDistillation,    ///< the ref_kl component: towards the log-probabilities of a teacher; advantages choose the side of its mask
  kImitation,       ///< the ce component: another model wrote the tokens
};
/// Makes the sampled tokens of `sample` take part in that component alone. kDistillation needs ref_logprobs
/// (Error{kInternal}). Under kImitation the tokens are no longer marked as sampled, and are trained at temperature 1. Weights of set_echo
/// stay.
void set_loss(wire::TrainingSample& sample, SampleLoss loss);

/// Takes tokens whose advantage is exactly 0 out of the rl loss (weight 0). False if the sample then takes part in no loss
/// and can be dropped.
bool prune_zero_advantages(wire::TrainingSample& sample);

}  // namespace prl::orchestrator
