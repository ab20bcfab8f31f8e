#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace prl::orchestrator {

/// What an algorithm sees of one rollout.
struct RolloutStats {
  double reward = 0;
  std::int64_t num_output_tokens = 0;    ///< sampled
  std::int64_t num_input_tokens = 0;     ///< everything else in the final context
  std::int64_t num_response_tokens = 0;  ///< of num_input_tokens: what the environment added after the first prompt
  std::int64_t num_turns = 0;
  std::string seat = {};  ///< the agent, where several play one episode
  std::int64_t play = 0;  ///< which episode of the group it is of
};

/// Among the rollouts with the best reward, those that cost less than their mean earn up to twice the reward. The cost is
/// weighted tokens, or turns.
struct CorrectLengthPenalty {
  bool count_turns = false;
  double completion_weight = 1.0;
  double tool_response_weight = 1.0;
};
/// Rewards shrink with relative length: R - mean(R) * (w_o out / max out + w_i in / max in + w_t turns / max turns).
struct LinearLengthPenalty {
  double num_output_tokens_weight = 0.25;
  double num_input_tokens_weight = 0.1;
  double num_turns_weight = 0.1;
};
using LengthPenalty = std::variant<std::monostate, CorrectLengthPenalty, LinearLengthPenalty>;

/// Weight in the cross entropy of a token that the policy did not write, by who did; 0 leaves it out.
struct RoleWeights {
  float system = 0;
  float user = 0;
  float assistant = 0;
  float tool = 0;
  bool is_any() const noexcept { return system != 0 || user != 0 || assistant != 0 || tool != 0; }
};

struct AdvantageOptions {
  /// grpo (also drgrpo): R - mean; rloo: (R - mean) G / (G - 1); opo: R - length-weighted mean;
  /// max_rl: (R - mean) / mean, 0 unless mean > 0; reward: R; and kRunningAverage, kHierarchical.
  std::string algorithm = "grpo";
  std::vector<std::string> episode_agents;  ///< of hierarchical_grpo
  double decay = 0.95;                      ///< of rae
  LengthPenalty length_penalty;             ///< with grpo
  RoleWeights echo;                         ///< what is learnt of others' words, besides
};

/// The algorithm whose baseline is not the group's: see subtract_running_average.
inline constexpr std::string_view kRunningAverage = "rae";
/// Agents of episode_agents are compared with each other within their episode, others with their namesakes of the whole group; who has no
/// peer has advantage 0. Source: spec 3.8.
inline constexpr std::string_view kHierarchical = "hierarchical_grpo";

/// Rewards minus a running average of those of the same seat, rollout after rollout: A = R - average, then average = decay * average +
/// (1 - decay) * R. The averages start at 0 and outlive the group. Source: spec 3.8.
std::vector<float> subtract_running_average(std::span<const RolloutStats> group, double decay, std::map<std::string, double>& averages);

/// Names that compute_advantages takes.
std::span<const std::string_view> advantage_algorithms() noexcept;

/// One advantage per rollout of one group, never divided by a standard deviation. Sums run in the given order.
/// A group of one has advantage 0 (reward: R). Error{kInvalidArgument} for an unknown algorithm, listing the known ones.
/// Source: spec 3.8.
std::vector<float> compute_advantages(const AdvantageOptions& options, std::span<const RolloutStats> group);

}  // namespace prl::orchestrator
