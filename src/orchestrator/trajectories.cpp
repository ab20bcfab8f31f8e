#include "orchestrator/trajectories.hpp"

#include <algorithm>

namespace prl::orchestrator {
namespace {

void append(wire::TrainingSample& sample, std::int32_t id, bool sampled, float logprob, float temperature) {
  sample.token_ids.push_back(id);
  sample.mask.push_back(sampled ? 1 : 0);
  sample.logprobs.push_back(sampled ? logprob : 0.0f);
  sample.temperatures.push_back(temperature);
}

bool begins_with(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& prefix) {
  return prefix.size() <= ids.size() && std::equal(prefix.begin(), prefix.end(), ids.begin());
}

}  // namespace

std::vector<wire::TrainingSample> to_samples(const env::Episode& episode, TrajectoryStrategy strategy) {
  std::vector<wire::TrainingSample> samples;
  for (const env::TrajectoryStep& step : episode.trajectory) {
    if (!step.has_tokens || step.tokens.completion_ids.empty()) continue;
    const std::vector<std::int32_t>& prompt = step.tokens.prompt_ids;
    wire::TrainingSample* target = nullptr;
    if (strategy == TrajectoryStrategy::kInterleaved)
      for (wire::TrainingSample& sample : samples)
        if (begins_with(prompt, sample.token_ids) && (target == nullptr || sample.token_ids.size() > target->token_ids.size()))
          target = &sample;
    if (target == nullptr) {
      target = &samples.emplace_back();
      target->env_name = episode.env_name;
    }
    for (std::size_t i = target->token_ids.size(); i < prompt.size(); ++i) append(*target, prompt[i], false, 0, episode.temperature);
    for (std::size_t i = 0; i < step.tokens.completion_ids.size(); ++i)
      append(*target, step.tokens.completion_ids[i], true, step.tokens.logprobs[i], episode.temperature);
  }
  return samples;
}

void set_advantage(wire::TrainingSample& sample, float advantage) {
  sample.advantages.assign(sample.token_ids.size(), 0.0f);
  for (std::size_t i = 0; i < sample.mask.size(); ++i)
    if (sample.mask[i] != 0) sample.advantages[i] = advantage;
}

bool prune_zero_advantages(wire::TrainingSample& sample) {
  const auto weight = [](const std::vector<float>& weights, std::size_t i) { return i < weights.size() ? weights[i] : 0.0f; };
  bool is_member = false;
  for (std::size_t i = 0; i < sample.mask.size(); ++i) {
    if (sample.mask[i] != 0 && (i >= sample.advantages.size() || sample.advantages[i] == 0.0f)) {
      if (sample.rl_weights.empty()) sample.rl_weights.assign(sample.mask.size(), 1.0f);
      sample.rl_weights[i] = 0.0f;
    }
    const bool in_rl = sample.mask[i] != 0 && (sample.rl_weights.empty() || sample.rl_weights[i] != 0.0f);
    is_member = is_member || in_rl || weight(sample.ce_weights, i) != 0.0f || weight(sample.ref_kl_weights, i) != 0.0f;
  }
  return is_member;
}

}  // namespace prl::orchestrator
