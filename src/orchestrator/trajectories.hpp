#pragma once

#include <vector>

#include "env/episode.hpp"
#include "wire/training.hpp"

namespace prl::orchestrator {

enum class TrajectoryStrategy {
  kInterleaved,  ///< turns whose prompt continues an earlier sample join it; any other turn opens a new sample
  kBranching,    ///< one sample per turn
};

/// The training samples of an episode, without advantages (spec 3.9).
///
/// In a sample, tokens the policy sampled have mask 1 and their log-probability; all others mask 0 and log-probability 0.
/// A turn joins the open sample whose complete tokens begin the turn's prompt (the longest such one), so a conversation whose
/// template rewrites history splits instead of training on tokens the policy never saw. Each sampled token is in one sample.
/// Turns without token ids give nothing.
std::vector<wire::TrainingSample> to_samples(const env::Episode& episode, TrajectoryStrategy strategy);

/// Sets the advantage of every sampled token of `sample`; 0 elsewhere.
void set_advantage(wire::TrainingSample& sample, float advantage);

/// Takes tokens whose advantage is exactly 0 out of the rl loss (weight 0). False if the sample then takes part in no loss
/// and can be dropped.
bool prune_zero_advantages(wire::TrainingSample& sample);

}  // namespace prl::orchestrator
