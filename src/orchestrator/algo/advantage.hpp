#pragma once

#include <cstdint>
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

struct AdvantageOptions {
  /// grpo (also drgrpo): R - mean; rloo: (R - mean) G / (G - 1); opo: R - length-weighted mean;
  /// max_rl: (R - mean) / mean, 0 unless mean > 0; reward: R.
  std::string algorithm = "grpo";
  double decay = 0.95;           ///< of rae
  LengthPenalty length_penalty;  ///< with grpo
};

/// The algorithm whose baseline is not the group's: see subtract_running_average.
inline constexpr std::string_view kRunningAverage = "rae";

/// Rewards minus a running average of them, rollout after rollout: A = R - average, then average = decay * average + (1 - decay) * R.
/// The average starts at 0 and outlives the group. Source: spec 3.8.
std::vector<float> subtract_running_average(std::span<const RolloutStats> group, double decay, double& average);

/// Names that compute_advantages takes.
std::span<const std::string_view> advantage_algorithms() noexcept;

/// One advantage per rollout of one group, never divided by a standard deviation. Sums run in the given order.
/// A group of one has advantage 0 (reward: R). Error{kInvalidArgument} for an unknown algorithm, listing the known ones.
/// Source: spec 3.8.
std::vector<float> compute_advantages(const AdvantageOptions& options, std::span<const RolloutStats> group);

}  // namespace prl::orchestrator
