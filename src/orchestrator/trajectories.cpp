#include "orchestrator/trajectories.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::orchestrator {
namespace {

void append(wire::TrainingSample& sample, std::int32_t id, bool sampled, float logprob, float temperature, std::int64_t version = -1) {
  sample.versions.push_back(version);
  sample.token_ids.push_back(id);
  sample.mask.push_back(sampled ? 1 : 0);
  sample.logprobs.push_back(sampled ? logprob : 0.0f);
  sample.temperatures.push_back(temperature);
}

/// What a turn of `num_tokens` tells of the sample's experts, behind what the turns before told.
void append_experts(wire::RoutedExperts& to, const wire::RoutedExperts& of_turn, std::int64_t num_tokens) {
  if (of_turn.empty()) return;
  if (to.row_size() == 0) {
    to.num_layers = of_turn.num_layers;
    to.top_k = of_turn.top_k;
  }
  // Other engines tell it too, and different ones may serve the turns of a rollout.
  if (of_turn.num_layers != to.num_layers || of_turn.top_k != to.top_k || of_turn.start < 0 || of_turn.start > num_tokens)
    fail(ErrorCode::kCorrupt,
         "routed_experts of a turn of {} tokens: {} experts in {} layers from token {} on, after {} in {}: do all servers have one model?",
         num_tokens, of_turn.top_k, of_turn.num_layers, of_turn.start, to.top_k, to.num_layers);
  if (to.num_tokens() < of_turn.start) to.resize(of_turn.start);
  to.append(of_turn);
  // A stop string may have ended the turn before the last tokens that were computed.
  to.resize(std::min(to.num_tokens(), num_tokens));
}

bool begins_with(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& prefix) {
  return prefix.size() <= ids.size() && std::equal(prefix.begin(), prefix.end(), ids.begin());
}

/// Whether the first of `images`, up to `num_tokens`, are `before`: other pictures may have the same placeholders.
bool begins_with(const std::vector<wire::PromptImage>& images, const std::vector<wire::PromptImage>& before, std::size_t num_tokens) {
  const auto is_same = [](const wire::PromptImage& a, const wire::PromptImage& b) {
    return a.first == b.first && a.rows == b.rows && a.cols == b.cols && a.pixels->hash == b.pixels->hash;
  };
  const auto end = std::ranges::find_if(images, [&](const auto& image) { return image.first >= static_cast<std::int64_t>(num_tokens); });
  return std::equal(images.begin(), end, before.begin(), before.end(), is_same);
}

}  // namespace

std::vector<std::vector<std::size_t>> sample_turns(const env::Episode& episode, TrajectoryStrategy strategy) {
  std::vector<std::vector<std::size_t>> samples;
  std::vector<std::vector<std::int32_t>> tokens;  // of each sample so far
  const auto images_of = [&](std::size_t i) -> const auto& { return episode.trajectory[samples[i].back()].tokens.images; };
  for (std::size_t turn = 0; turn < episode.trajectory.size(); ++turn) {
    const env::TrajectoryStep& step = episode.trajectory[turn];
    if (!step.has_tokens || step.tokens.completion_ids.empty()) continue;
    const std::vector<std::int32_t>& prompt = step.tokens.prompt_ids;
    std::size_t target = samples.size();
    if (strategy == TrajectoryStrategy::kInterleaved)
      for (std::size_t i = 0; i < samples.size(); ++i)
        if (begins_with(prompt, tokens[i]) && begins_with(step.tokens.images, images_of(i), tokens[i].size()) &&
            (target == samples.size() || tokens[i].size() > tokens[target].size()))
          target = i;
    if (target == samples.size()) {
      samples.emplace_back();
      tokens.emplace_back();
    }
    samples[target].push_back(turn);
    tokens[target] = prompt;
    tokens[target].insert(tokens[target].end(), step.tokens.completion_ids.begin(), step.tokens.completion_ids.end());
  }
  return samples;
}

std::vector<wire::TrainingSample> to_samples(const env::Episode& episode, TrajectoryStrategy strategy, const TurnScores& scores) {
  PRL_CHECK(scores.empty() || scores.size() == episode.trajectory.size(), "{} turns of {} have {} lists of scores",
            episode.trajectory.size(), episode.env_name, scores.size());
  std::vector<wire::TrainingSample> samples;
  for (const std::vector<std::size_t>& turns : sample_turns(episode, strategy)) {
    wire::TrainingSample& sample = samples.emplace_back();
    sample.env_name = episode.env_name;
    for (const std::size_t turn : turns) {
      const env::TurnTokens& tokens = episode.trajectory[turn].tokens;
      for (std::size_t i = sample.token_ids.size(); i < tokens.prompt_ids.size(); ++i)
        append(sample, tokens.prompt_ids[i], false, 0, episode.temperature);
      if (!scores.empty()) {
        sample.ref_logprobs.resize(sample.token_ids.size(), 0.0f);
        sample.ref_logprobs.insert(sample.ref_logprobs.end(), scores[turn].begin(), scores[turn].end());
      }
      for (std::size_t i = 0; i < tokens.completion_ids.size(); ++i)
        append(sample, tokens.completion_ids[i], true, tokens.logprobs[i], episode.temperature,
               tokens.versions.empty() ? -1 : tokens.versions[i]);
      sample.images = tokens.images;
      append_experts(sample.routed_experts, tokens.routed_experts, static_cast<std::int64_t>(sample.token_ids.size()));
    }
    if (!sample.routed_experts.empty()) sample.routed_experts.resize(static_cast<std::int64_t>(sample.token_ids.size()));
  }
  return samples;
}

namespace {

/// Who wrote each token of a sample that is made of these turns; kNone for what was sampled and what came before the first sampled token.
std::vector<env::PromptRole> writers_of(const env::Episode& episode, const std::vector<std::size_t>& turns) {
  std::vector<env::PromptRole> roles;
  for (const std::size_t turn : turns) {
    const env::TurnTokens& tokens = episode.trajectory[turn].tokens;
    const std::size_t done = roles.size();  // tokens of the turns before
    roles.resize(tokens.prompt_ids.size() + tokens.completion_ids.size(), env::PromptRole::kNone);
    for (std::size_t i = done; done > 0 && i < tokens.prompt_roles.size(); ++i) roles[i] = tokens.prompt_roles[i];
  }
  return roles;
}

boost::json::value name_of(env::PromptRole role) {
  switch (role) {
    case env::PromptRole::kSystem: return "system";
    case env::PromptRole::kUser: return "user";
    case env::PromptRole::kAssistant: return "assistant";
    case env::PromptRole::kTool: return "tool";
    case env::PromptRole::kNone: break;
  }
  return nullptr;
}

}  // namespace

boost::json::array echo_branches(const env::Episode& episode, TrajectoryStrategy strategy) {
  boost::json::array branches;
  const std::vector<wire::TrainingSample> samples = to_samples(episode, strategy);
  const std::vector<std::vector<std::size_t>> turns = sample_turns(episode, strategy);
  for (std::size_t s = 0; s < samples.size(); ++s) {
    boost::json::array sampled, roles;
    for (const std::uint8_t is_sampled : samples[s].mask) sampled.emplace_back(is_sampled != 0);
    for (const env::PromptRole role : writers_of(episode, turns[s])) roles.push_back(name_of(role));
    boost::json::object branch;
    branch["token_ids"] = boost::json::array(samples[s].token_ids.begin(), samples[s].token_ids.end());
    branch["sampled"] = std::move(sampled);
    branch["roles"] = std::move(roles);
    branches.push_back(std::move(branch));
  }
  return branches;
}

void set_echo(std::vector<wire::TrainingSample>& samples, const env::Episode& episode, TrajectoryStrategy strategy,
              const RoleWeights& weights, const EchoMask& keep) {
  const auto weight_of = [&](env::PromptRole role) {
    switch (role) {
      case env::PromptRole::kSystem: return weights.system;
      case env::PromptRole::kUser: return weights.user;
      case env::PromptRole::kAssistant: return weights.assistant;
      case env::PromptRole::kTool: return weights.tool;
      case env::PromptRole::kNone: break;
    }
    return 0.0f;
  };
  const std::vector<std::vector<std::size_t>> turns = sample_turns(episode, strategy);
  PRL_CHECK(turns.size() == samples.size(), "{} samples for an episode that makes {}", samples.size(), turns.size());
  PRL_CHECK(keep.empty() || keep.size() == samples.size(), "{} filters for {} samples", keep.size(), samples.size());
  for (std::size_t s = 0; s < samples.size(); ++s) {
    std::vector<float> ce;
    for (const env::PromptRole role : writers_of(episode, turns[s])) ce.push_back(weight_of(role));
    if (!keep.empty()) {
      PRL_CHECK(keep[s].size() == ce.size(), "a filter of {} tokens for a sample of {}", keep[s].size(), ce.size());
      for (std::size_t i = 0; i < ce.size(); ++i)
        if (keep[s][i] == 0) ce[i] = 0;
    }
    if (std::any_of(ce.begin(), ce.end(), [](float weight) { return weight != 0; })) samples[s].ce_weights = std::move(ce);
  }
}

void set_loss(wire::TrainingSample& sample, SampleLoss loss) {
  const std::size_t n = sample.token_ids.size();
  const std::vector<float> members(sample.mask.begin(), sample.mask.end());
  switch (loss) {
    case SampleLoss::kPolicyGradient: return;
    case SampleLoss::kDistillation:
      if (sample.ref_logprobs.size() != n)
        fail(ErrorCode::kInternal, "a sample of {} with {} tokens has {} reference log-probabilities", sample.env_name, n,
             sample.ref_logprobs.size());
      sample.rl_weights.assign(n, 0.0f);
      sample.ref_kl_weights = members;
      return;
    case SampleLoss::kImitation:
      sample.mask.assign(n, 0);
      sample.ce_weights.resize(n, 0.0f);
      for (std::size_t i = 0; i < n; ++i)
        if (members[i] != 0) sample.ce_weights[i] = 1.0f;
      sample.logprobs.assign(n, 0.0f);
      sample.temperatures.assign(n, 1.0f);
      return;
  }
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
