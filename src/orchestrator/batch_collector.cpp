#include "orchestrator/batch_collector.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::orchestrator {
namespace {

RolloutStats stats_of(const env::Episode& episode) {
  RolloutStats stats;
  stats.reward = episode.reward;
  stats.num_output_tokens = episode.num_completion_tokens();
  stats.num_input_tokens = std::max<std::int64_t>(0, episode.num_final_tokens() - stats.num_output_tokens);
  stats.num_response_tokens = std::max<std::int64_t>(0, stats.num_input_tokens - episode.num_prompt_tokens());
  stats.num_turns = episode.num_turns();
  stats.seat = episode.seat;
  return stats;
}

void drop_token_ids(env::Episode& episode) {
  for (env::TrajectoryStep& step : episode.trajectory) step.tokens = {};
}

bool all_equal_to(const std::vector<double>& rewards, double value) {
  return std::all_of(rewards.begin(), rewards.end(), [&](double reward) { return reward == value; });
}

}  // namespace

std::int64_t ReadyRollout::num_tokens() const {
  std::int64_t sum = 0;
  for (const wire::TrainingSample& sample : samples) sum += static_cast<std::int64_t>(sample.token_ids.size());
  return sum;
}

BatchCollector::BatchCollector(CollectorOptions options) : options_(std::move(options)) {}

void BatchCollector::count_nothing(std::int64_t num_rollouts) {
  const std::int64_t before = num_without_output_ / options_.batch_size;
  num_without_output_ += num_rollouts;
  const std::int64_t now = num_without_output_ / options_.batch_size;
  if (now == before) return;
  log::warning("{} rollouts in a row gave nothing to train on; last reason: {}", num_without_output_, last_failure_);
  if (now >= kMaxEmptyBatches)
    fail(ErrorCode::kUnavailable,
         "{} rollouts in a row ({} batches' worth) gave nothing to train on; last reason: {}. Check the environment, the "
         "inference server and the difficulty filters",
         num_without_output_, now, last_failure_);
}

/// Its samples, unless it has none or a filter drops it.
std::optional<ReadyRollout> BatchCollector::to_rollout(const FinishedGroup& group, std::size_t index, const std::string& env_name,
                                                       CollectorWindow::PerEnv& counts) {
  const env::Episode& episode = group.episodes[index];
  ReadyRollout rollout;
  rollout.group = group.id;
  rollout.task = group.task;
  rollout.version_start = group.version;
  rollout.version_end = episode.version_end().value_or(group.version);
  rollout.samples = to_samples(episode, options_.strategy, group.scores.empty() ? TurnScores{} : group.scores[index]);
  if (rollout.samples.empty()) {
    ++counts.num_empty;
    last_failure_ =
        episode.stop_condition == "prompt_too_long"
            ? fmt::format("a prompt of {} leaves no room for an answer; raise inference.model.max_model_len and seq_len", env_name)
            : fmt::format("a rollout of {} has no sampled token", env_name);
    return std::nullopt;
  }
  if (const RoleWeights& echo = algorithm_of(group.task.env_idx).echo; echo.is_any())
    set_echo(rollout.samples, episode, options_.strategy, echo, group.echo_masks.empty() ? EchoMask{} : group.echo_masks[index]);
  bool is_dropped = false;
  for (const RolloutFilterOptions& filter : options_.filters) {
    // They judge the policy by its log-probabilities, which another model's tokens do not have.
    if (options_.loss == SampleLoss::kImitation || !matches(filter, episode)) continue;
    ++counts.num_filtered[to_string(filter.kind)];
    rollout.filters_matched.push_back(to_string(filter.kind));
    is_dropped = filter.enforce;
    break;
  }
  if (rollout.filters_matched.empty() && !group.filter_findings.empty() && group.filter_findings[index]) {
    const FilterFinding& found = *group.filter_findings[index];
    ++counts.num_filtered[found.filter];
    rollout.filters_matched.push_back(found.filter);
    is_dropped = found.enforce;
  }
  if (is_dropped) {
    last_failure_ = fmt::format("a rollout of {} was filtered: {}", env_name, rollout.filters_matched.back());
    return std::nullopt;
  }
  return rollout;
}

std::vector<float> BatchCollector::advantages_of(const FinishedGroup& group, const std::vector<ReadyRollout>& survivors,
                                                 const std::vector<std::size_t>& places) {
  if (!group.advantages.empty()) {
    std::vector<float> advantages;
    for (const std::size_t place : places) advantages.push_back(group.advantages.at(place));
    return advantages;
  }
  std::vector<RolloutStats> stats;
  std::vector<float> given;  // by the environment
  for (std::size_t i = 0; i < survivors.size(); ++i) {
    stats.push_back(stats_of(survivors[i].episode));
    stats.back().play = group.plays.empty() ? static_cast<std::int64_t>(places[i]) : group.plays[places[i]];
    if (survivors[i].episode.advantage) given.push_back(*survivors[i].episode.advantage);
  }
  if (given.size() == survivors.size()) return given;
  const AdvantageOptions& options = algorithm_of(group.task.env_idx);
  if (options.algorithm == kRunningAverage) return subtract_running_average(stats, options.decay, reward_averages_[group.task.env_idx]);
  return compute_advantages(options, stats);
}

const AdvantageOptions& BatchCollector::algorithm_of(std::int64_t env_idx) const {
  const auto own = options_.env_advantages.find(env_idx);
  return own != options_.env_advantages.end() ? own->second : options_.advantage;
}

bool BatchCollector::is_rejected(std::int64_t env_idx, const std::vector<float>& advantages) const {
  const auto gates = options_.gates.find(env_idx);
  if (gates == options_.gates.end() || options_.loss != SampleLoss::kPolicyGradient) return false;
  return std::ranges::any_of(gates->second, [&](const AdvantageRange& range) {
    return std::ranges::all_of(advantages, [&](float advantage) { return advantage >= range.min && advantage <= range.max; });
  });
}

/// Ready to train, behind all that is as old or older.
void BatchCollector::queue_up(ReadyRollout rollout, float advantage) {
  rollout.advantage = advantage;
  for (wire::TrainingSample& sample : rollout.samples) {
    set_advantage(sample, advantage);
    set_loss(sample, options_.loss);
  }
  drop_token_ids(rollout.episode);
  ++num_admitted_;
  num_admitted_tokens_ += rollout.num_tokens();
  const auto place = std::upper_bound(queue_.begin(), queue_.end(), rollout.version_start,
                                      [](PolicyVersion version, const ReadyRollout& other) { return version < other.version_start; });
  queue_.insert(place, std::move(rollout));
}

BatchCollector::Added BatchCollector::add(FinishedGroup group, const env::Environment& environment) {
  CollectorWindow::PerEnv& counts = window_.envs[environment.name()];
  ++counts.num_groups;
  std::vector<ReadyRollout> survivors;
  std::vector<std::size_t> places;  // of the survivors in the group
  std::vector<double> rewards;
  const auto num_rollouts = static_cast<std::int64_t>(group.episodes.size());
  for (std::size_t i = 0; i < group.episodes.size(); ++i) {
    env::Episode& episode = group.episodes[i];
    ++counts.num_rollouts;
    if (options_.skip_verification) episode.reward = 0;
    if (episode.error) {
      ++counts.num_errored;
      last_failure_ = fmt::format("{} in {}: {}", episode.error->type, environment.name(), episode.error->message);
      continue;
    }
    std::optional<ReadyRollout> rollout = to_rollout(group, i, environment.name(), counts);
    if (!rollout) continue;
    rewards.push_back(episode.reward);
    rollout->episode = std::move(episode);
    survivors.push_back(std::move(*rollout));
    places.push_back(i);
  }

  Added added;
  added.has_survivors = !survivors.empty();
  if (!added.has_survivors) {
    ++counts.num_groups_dropped;
    count_nothing(num_rollouts);
    return added;
  }
  for (const double reward : rewards) added.mean_reward += reward;
  added.mean_reward /= static_cast<double>(rewards.size());
  const bool solves_none = all_equal_to(rewards, 0.0);
  const bool solves_all = all_equal_to(rewards, 1.0);
  if (solves_none) ++counts.num_solve_none;
  if (solves_all) ++counts.num_solve_all;
  if (options_.online_difficulty_filtering && (solves_none || solves_all)) {
    ++counts.num_groups_dropped;
    last_failure_ =
        fmt::format("online_difficulty_filtering dropped a group of {} whose rewards are all {}", environment.name(), solves_all ? 1 : 0);
    count_nothing(num_rollouts);
    return added;
  }
  const std::vector<float> advantages = advantages_of(group, survivors, places);
  if (is_rejected(group.task.env_idx, advantages)) {
    ++counts.num_groups_dropped;
    last_failure_ = fmt::format(
        "a gate of {}'s curriculum rejected a group: all its advantages lie in the range of reject_min and reject_max", environment.name());
    count_nothing(num_rollouts);
    return added;
  }
  for (std::size_t i = 0; i < survivors.size(); ++i) queue_up(std::move(survivors[i]), advantages[i]);
  added.is_admitted = true;
  added.num_queued = static_cast<std::int64_t>(survivors.size());
  num_without_output_ = 0;
  return added;
}

std::int64_t BatchCollector::drop_stale(const std::function<bool(PolicyVersion)>& is_stale) {
  const auto before = queue_.size();
  std::erase_if(queue_, [&](const ReadyRollout& rollout) { return is_stale(rollout.version_start); });
  const auto num_dropped = static_cast<std::int64_t>(before - queue_.size());
  window_.num_dropped_stale += num_dropped;
  return num_dropped;
}

bool BatchCollector::is_ready() const noexcept {
  if (!options_.token_batch_size) return num_queued() >= options_.batch_size;
  std::int64_t num_tokens = 0;
  for (const ReadyRollout& rollout : queue_) num_tokens += rollout.num_tokens();
  return num_tokens >= *options_.token_batch_size;
}

Backlog BatchCollector::backlog() const {
  Backlog backlog;
  backlog.batch_units = options_.token_batch_size.value_or(options_.batch_size);
  for (const ReadyRollout& rollout : queue_) backlog.units[rollout.version_start] += options_.token_batch_size ? rollout.num_tokens() : 1;
  if (options_.token_batch_size)
    backlog.rollout_units = num_admitted_ > 0 ? (num_admitted_tokens_ + num_admitted_ - 1) / num_admitted_ : options_.max_rollout_tokens;
  return backlog;
}

CollectedBatch BatchCollector::take() {
  PRL_CHECK(is_ready(), "a batch was cut before it was full: {} of {} rollouts", num_queued(), options_.batch_size);
  CollectedBatch batch;
  std::int64_t num_tokens = 0;
  while (options_.token_batch_size ? num_tokens < *options_.token_batch_size
                                   : static_cast<std::int64_t>(batch.rollouts.size()) < options_.batch_size) {
    num_tokens += queue_.front().num_tokens();
    batch.rollouts.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  for (ReadyRollout& rollout : batch.rollouts) {
    bool is_trainable = false;
    for (wire::TrainingSample& sample : rollout.samples) {
      if (options_.filter_zero_advantages && !prune_zero_advantages(sample)) continue;
      is_trainable = true;
      batch.samples.push_back(sample);
    }
    if (is_trainable) ++batch.num_trainable;
  }
  batch.window = std::exchange(window_, {});
  return batch;
}

}  // namespace prl::orchestrator
