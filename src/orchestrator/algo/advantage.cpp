#include "orchestrator/algo/advantage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"

namespace prl::orchestrator {
namespace {

using Values = std::vector<double>;
using Group = std::span<const RolloutStats>;

double mean(const Values& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

Values rewards_of(Group group) {
  Values rewards;
  for (const RolloutStats& rollout : group) rewards.push_back(rollout.reward);
  return rewards;
}

Values centred(Values rewards) {
  // A group of equal rewards has advantage exactly 0, also where the mean of equal numbers would round.
  const auto [low, high] = std::minmax_element(rewards.begin(), rewards.end());
  if (rewards.empty() || *low == *high) return Values(rewards.size(), 0.0);
  const double baseline = mean(rewards);
  for (double& reward : rewards) reward -= baseline;
  return rewards;
}

Values grpo(Group group) { return centred(rewards_of(group)); }

Values rloo(Group group) {
  Values values = centred(rewards_of(group));
  const double count = static_cast<double>(values.size());
  if (values.size() > 1)
    for (double& value : values) value *= count / (count - 1);
  return values;
}

Values opo(Group group) {
  Values values = rewards_of(group);
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  if (values.empty() || *low == *high) return Values(values.size(), 0.0);
  double weighted = 0;
  double length = 0;
  for (const RolloutStats& rollout : group) {
    weighted += rollout.reward * static_cast<double>(rollout.num_output_tokens);
    length += static_cast<double>(rollout.num_output_tokens);
  }
  const double baseline = length > 0 ? weighted / length : mean(values);
  for (double& value : values) value -= baseline;
  return values;
}

Values max_rl(Group group) {
  Values values = rewards_of(group);
  const double baseline = mean(values);
  if (baseline <= 0) return Values(values.size(), 0.0);
  values = centred(std::move(values));
  for (double& value : values) value /= baseline;
  return values;
}

Values reward(Group group) { return rewards_of(group); }

/// R minus the mean over the rollouts with the same key.
template <class KeyOf>
Values centred_by(Group group, KeyOf key_of) {
  std::map<std::string, std::vector<std::size_t>> peers;
  for (std::size_t i = 0; i < group.size(); ++i) peers[key_of(group[i])].push_back(i);
  Values values(group.size());
  for (const auto& [key, places] : peers) {
    Values rewards;
    for (const std::size_t place : places) rewards.push_back(group[place].reward);
    rewards = centred(std::move(rewards));
    for (std::size_t i = 0; i < places.size(); ++i) values[places[i]] = rewards[i];
  }
  return values;
}

/// Agents that are named compare with the others named in their own episode; every other agent with its namesakes of the whole group. Who
/// has no peer has advantage 0.
Values hierarchical(Group group, const std::vector<std::string>& episode_agents) {
  return centred_by(group, [&](const RolloutStats& rollout) {
    const bool is_named = std::find(episode_agents.begin(), episode_agents.end(), rollout.seat) != episode_agents.end();
    return is_named ? fmt::format("play {}", rollout.play) : "seat " + rollout.seat;
  });
}

struct Algorithm {
  std::string_view name;
  Values (*compute)(Group);
};
// The one table of algorithms that need nothing but rewards and lengths of a group.
constexpr std::array kAlgorithms{Algorithm{"grpo", &grpo}, Algorithm{"drgrpo", &grpo},   Algorithm{"rloo", &rloo},
                                 Algorithm{"opo", &opo},   Algorithm{"max_rl", &max_rl}, Algorithm{"reward", &reward}};
constexpr auto kNames = [] {
  std::array<std::string_view, kAlgorithms.size()> names{};
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kAlgorithms[i].name;
  return names;
}();

Values penalised(Group group, const LinearLengthPenalty& penalty) {
  std::int64_t max_out = 1;
  std::int64_t max_in = 1;
  std::int64_t max_turns = 1;
  for (const RolloutStats& rollout : group) {
    max_out = std::max(max_out, rollout.num_output_tokens);
    max_in = std::max(max_in, rollout.num_input_tokens);
    max_turns = std::max(max_turns, rollout.num_turns);
  }
  Values values = rewards_of(group);
  const double baseline = mean(values);
  for (std::size_t i = 0; i < group.size(); ++i) {
    const double fraction =
        penalty.num_output_tokens_weight * static_cast<double>(group[i].num_output_tokens) / static_cast<double>(max_out) +
        penalty.num_input_tokens_weight * static_cast<double>(group[i].num_input_tokens) / static_cast<double>(max_in) +
        penalty.num_turns_weight * static_cast<double>(group[i].num_turns) / static_cast<double>(max_turns);
    values[i] -= baseline * fraction;
  }
  return values;
}

Values penalised(Group group, const CorrectLengthPenalty& penalty) {
  Values values = rewards_of(group);
  if (values.empty()) return values;
  const double best = *std::max_element(values.begin(), values.end());
  const auto cost = [&](const RolloutStats& rollout) {
    if (penalty.count_turns) return static_cast<double>(rollout.num_turns);
    return penalty.completion_weight * static_cast<double>(rollout.num_output_tokens) +
           penalty.tool_response_weight * static_cast<double>(rollout.num_response_tokens);
  };
  Values costs;
  for (std::size_t i = 0; i < group.size(); ++i)
    if (values[i] >= best) costs.push_back(cost(group[i]));
  const double mean_cost = mean(costs);
  if (best <= 0 || mean_cost <= 0) return values;
  for (std::size_t i = 0; i < group.size(); ++i)
    if (values[i] >= best) values[i] *= 1 + std::clamp(1 - cost(group[i]) / mean_cost, 0.0, 1.0);
  return values;
}

}  // namespace

std::span<const std::string_view> advantage_algorithms() noexcept { return kNames; }

std::vector<float> subtract_running_average(Group group, double decay, std::map<std::string, double>& averages) {
  std::vector<float> advantages;
  for (const RolloutStats& rollout : group) {
    double& average = averages[rollout.seat];
    advantages.push_back(static_cast<float>(rollout.reward - average));
    average = decay * average + (1 - decay) * rollout.reward;
  }
  return advantages;
}

std::vector<float> compute_advantages(const AdvantageOptions& options, Group group) {
  if (options.algorithm == kHierarchical) {
    const Values values = hierarchical(group, options.episode_agents);
    return std::vector<float>(values.begin(), values.end());
  }
  const auto found = std::find_if(kAlgorithms.begin(), kAlgorithms.end(), [&](const Algorithm& a) { return a.name == options.algorithm; });
  if (found == kAlgorithms.end())
    fail(ErrorCode::kInvalidArgument, "advantage.type = {}: not known; there are {}", options.algorithm, fmt::join(kNames, ", "));
  Values values;
  if (const auto* linear = std::get_if<LinearLengthPenalty>(&options.length_penalty))
    values = centred(penalised(group, *linear));
  else if (const auto* correct = std::get_if<CorrectLengthPenalty>(&options.length_penalty))
    values = centred(penalised(group, *correct));
  else
    values = found->compute(group);
  return std::vector<float>(values.begin(), values.end());
}

}  // namespace prl::orchestrator
