#include "orchestrator/metrics.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

namespace prl::orchestrator {
namespace {

// Names hold an environment's name or "all" at the first "*", and mean, max or min at the last.
constexpr std::array kInfos{
    monitor::MetricInfo{"reward/**", "1", "reward of the shipped rollouts"},
    monitor::MetricInfo{"seq_len/**", "tokens", "prompt and completion of the last turn"},
    monitor::MetricInfo{"prefill_len/**", "tokens", "tokens of a rollout that were not sampled"},
    monitor::MetricInfo{"decode_len/**", "tokens", "sampled tokens of a rollout"},
    monitor::MetricInfo{"is_truncated/**", "1", "share of rollouts cut by a length limit"},
    monitor::MetricInfo{"samples_per_rollout/**", "1", "training samples of a rollout"},
    monitor::MetricInfo{"num_turns/**", "turns", "model turns of a rollout"},
    monitor::MetricInfo{"timing/**", "seconds", "total, generation, model, env and scoring time of a rollout"},
    monitor::MetricInfo{"solve_none/**", "1", "share of groups whose rewards are all 0"},
    monitor::MetricInfo{"solve_all/**", "1", "share of groups whose rewards are all 1"},
    monitor::MetricInfo{"effective_batch_size/**", "1", "share of the batch's rollouts that train"},
    monitor::MetricInfo{"stop_condition/**", "1", "share of rollouts that ended so"},
    monitor::MetricInfo{"filters/**", "1", "share of arrived rollouts that a filter found"},
    monitor::MetricInfo{"metrics/**", "1", "mean of an environment's own metric"},
    monitor::MetricInfo{"empty_rollouts/**", "1", "share of arrived rollouts without a sampled token"},
    monitor::MetricInfo{"errored_rollouts/**", "1", "share of arrived rollouts that failed"},
    monitor::MetricInfo{"dropped_groups/**", "1", "share of arrived groups that gave nothing"},
    monitor::MetricInfo{"off_policy_level/**", "steps", "steps between a rollout's first policy and its batch"},
    monitor::MetricInfo{"batch/**", "1", "share of the batch's rollouts by environment"},
    monitor::MetricInfo{"scheduler/async_level", "steps", "steps by which the batch was ahead of the weights"},
    monitor::MetricInfo{"scheduler/inflight_rollouts", "rollouts", "in flight when the batch shipped"},
    monitor::MetricInfo{"concurrency/max_inflight", "rollouts", "most that may be in flight"},
    monitor::MetricInfo{"concurrency/turnover", "rollouts/s", "that ended since the last step"},
    monitor::MetricInfo{"concurrency/capacity", "rollouts", "of full length that the engines' caches hold; 0: not known"},
    monitor::MetricInfo{"concurrency/signal", "1", "pressure of the engines: 0 clear, 1 soft, 2 hard"},
    monitor::MetricInfo{"scheduler/cancelled_rollouts", "rollouts", "dropped in flight since the last step"},
    monitor::MetricInfo{"scheduler/dropped_rollouts", "rollouts", "finished, but too old, since the last step"},
    monitor::MetricInfo{"packing/cut_samples", "samples", "longer than a row of training, and cut to it"},
    monitor::MetricInfo{"packing/lost_samples", "samples", "that begin with an image longer than a row, of which nothing is trained on"},
    monitor::MetricInfo{"packing/cut_tokens", "tokens", "of both"},
    monitor::MetricInfo{"scheduler/policy_version", "steps", "version the engines ran when the batch shipped"},
    monitor::MetricInfo{"healing/orchestrator_restarts", "1", "times that this role was started again in this run"},
    monitor::MetricInfo{"engines/ready", "engines", "that took requests when the batch shipped"},
    monitor::MetricInfo{"engines/lost", "1", "engines lost since this role was started"},
    monitor::MetricInfo{"engines/replayed_requests", "requests", "begun anew on another engine since this role was started"},
    monitor::MetricInfo{"pool/*/easy", "tasks", "tasks in the easy pool"},
    monitor::MetricInfo{"pool/*/normal", "tasks", "tasks that may be drawn"},
    monitor::MetricInfo{"pool/*/hard", "tasks", "tasks in the hard pool"},
    monitor::MetricInfo{"curriculum/**", "tasks", "tasks in a pool of the environment's curriculum, by last mean reward"},
    monitor::MetricInfo{"env/*/rss_mb", "MiB", "memory of an environment's worker processes; what they share is counted for each"},
    monitor::MetricInfo{"env/*/pss_mb", "MiB", "the same, what they share with other processes counted in parts"},
    monitor::MetricInfo{"env/*/loop_lag_ms", "ms", "longest time that a worker's event loop was blocked lately"},
    monitor::MetricInfo{"env/*/workers", "processes", "workers that are up"},
    monitor::MetricInfo{"env/*/worker_deaths", "processes", "workers that died since the start"},
    monitor::MetricInfo{"env/*/queued_rollouts", "rollouts", "waiting for a worker"},
    monitor::MetricInfo{"time/step", "seconds", "since the step before shipped"},
    monitor::MetricInfo{"time/wait_for_ckpt", "seconds", "waiting for new weights"},
    monitor::MetricInfo{"time/wait_for_oldest", "seconds",
                        "with a full batch, for rollouts in flight that the next batch would find too old"},
    monitor::MetricInfo{"time/update_weights", "seconds", "the last weight update, proof included"},
    monitor::MetricInfo{"time/generate_completions", "seconds", "until the batch was full"},
    monitor::MetricInfo{"time/teacher_logprobs", "seconds", "waiting for the teacher's log-probabilities, mean over the scored rollouts"},
    monitor::MetricInfo{"time/parallel_preprocess", "seconds", "packing"},
    monitor::MetricInfo{"time/push", "seconds", "waiting for room in the sample queue"},
    monitor::MetricInfo{"time/save_ckpt", "seconds", "writing the checkpoint"},
    monitor::MetricInfo{"inference/all/num_requests_running/*", "requests", "that the engines compute, mean and max of the step"},
    monitor::MetricInfo{"inference/all/num_requests_waiting/*", "requests", "that no engine has room for yet"},
    monitor::MetricInfo{"inference/all/kv_cache_usage/*", "1", "part of the key-value cache in use, of the fullest engine"},
    monitor::MetricInfo{"inference/all/prefix_cache_hit_rate", "1", "share of looked-up prompt tokens that a cache had"},
    monitor::MetricInfo{"inference/all/draft_acceptance_rate", "1", "share of the draft tokens that were drawn; without drafts not there"},
    monitor::MetricInfo{"inference/all/num_preemptions", "requests", "that lost their place in the cache since the step before"},
    monitor::MetricInfo{"inference/all/generation_tokens:rate", "tokens/s", "that the engines sampled"},
    monitor::MetricInfo{"perf/throughput", "tokens/s", "tokens of shipped rollouts per second"},
    monitor::MetricInfo{"progress/tokens", "tokens", "of the shipped rollouts"},
    monitor::MetricInfo{"progress/prefill_tokens", "tokens", "not sampled"},
    monitor::MetricInfo{"progress/decode_tokens", "tokens", "sampled"},
    monitor::MetricInfo{"progress/samples", "rollouts", "shipped in this step"},
    monitor::MetricInfo{"progress/problems", "groups", "shipped in this step"},
    monitor::MetricInfo{"progress/total_tokens", "tokens", "since the start of the run"},
    monitor::MetricInfo{"progress/total_samples", "rollouts", "since the start of the run"},
    monitor::MetricInfo{"progress/total_problems", "groups", "since the start of the run"},
    monitor::MetricInfo{"progress/ckpt_step", "steps", "policy version that was evaluated"},
    monitor::MetricInfo{"val_reward/**", "1", "reward of a validation on tasks held out from training"},
    monitor::MetricInfo{"eval/**", "1", "avg@k, pass@k, completion_len, is_truncated, errors, time and metrics of an evaluation"},
};

using ScopedValues = std::map<std::string, std::map<std::string, std::vector<double>>>;  // metric -> scope -> values

void put_mean_max_min(monitor::Metrics& metrics, const std::string& name, const std::vector<double>& values) {
  if (values.empty()) return;
  double sum = 0;
  for (const double value : values) sum += value;
  metrics[name + "/mean"] = sum / static_cast<double>(values.size());
  metrics[name + "/max"] = *std::max_element(values.begin(), values.end());
  metrics[name + "/min"] = *std::min_element(values.begin(), values.end());
}

void put_mean(monitor::Metrics& metrics, const std::string& name, double sum, std::int64_t count) {
  if (count > 0) metrics[name] = sum / static_cast<double>(count);
}

std::int64_t off_policy_level(const ReadyRollout& rollout, std::int64_t step) { return (step - 1) - rollout.version_start.value; }

void put_window(monitor::Metrics& metrics, const std::string& scope, const CollectorWindow::PerEnv& counts) {
  const auto share = [&](const std::string& name, std::int64_t count, std::int64_t total) {
    put_mean(metrics, name + "/" + scope, static_cast<double>(count), total);
  };
  share("errored_rollouts", counts.num_errored, counts.num_rollouts);
  share("empty_rollouts", counts.num_empty, counts.num_rollouts);
  share("dropped_groups", counts.num_groups_dropped, counts.num_groups);
  share("solve_none", counts.num_solve_none, counts.num_groups);
  share("solve_all", counts.num_solve_all, counts.num_groups);
  for (const auto& [filter, count] : counts.num_filtered)
    put_mean(metrics, "filters/" + scope + "/" + filter, static_cast<double>(count), counts.num_rollouts);
}

/// Of each environment and of all together.
void put_windows(monitor::Metrics& metrics, const CollectorWindow& window) {
  CollectorWindow::PerEnv all;
  for (const auto& [env_name, counts] : window.envs) {
    put_window(metrics, env_name, counts);
    all.num_rollouts += counts.num_rollouts;
    all.num_errored += counts.num_errored;
    all.num_empty += counts.num_empty;
    all.num_groups += counts.num_groups;
    all.num_groups_dropped += counts.num_groups_dropped;
    all.num_solve_none += counts.num_solve_none;
    all.num_solve_all += counts.num_solve_all;
    for (const auto& [filter, count] : counts.num_filtered) all.num_filtered[filter] += count;
  }
  put_window(metrics, "all", all);
}

void put_facts(monitor::Metrics& metrics, const StepFacts& facts) {
  metrics["scheduler/async_level"] = static_cast<double>((facts.step - 1) - facts.policy_version);
  metrics["scheduler/inflight_rollouts"] = static_cast<double>(facts.num_inflight);
  metrics["concurrency/max_inflight"] = static_cast<double>(facts.max_inflight);
  metrics["scheduler/cancelled_rollouts"] = static_cast<double>(facts.num_cancelled);
  metrics["scheduler/dropped_rollouts"] = static_cast<double>(facts.num_dropped_stale);
  metrics["packing/cut_samples"] = static_cast<double>(facts.losses.num_cut);
  metrics["packing/lost_samples"] = static_cast<double>(facts.losses.num_lost);
  metrics["packing/cut_tokens"] = static_cast<double>(facts.losses.num_cut_tokens);
  metrics["scheduler/policy_version"] = static_cast<double>(facts.policy_version);
  metrics["time/step"] = facts.seconds_step;
  metrics["time/wait_for_ckpt"] = facts.seconds_wait_for_policy;
  metrics["time/wait_for_oldest"] = facts.seconds_wait_for_oldest;
  metrics["time/generate_completions"] = facts.seconds_generate;
  metrics["time/parallel_preprocess"] = facts.seconds_pack;
  metrics["time/push"] = facts.seconds_push;
  metrics["time/update_weights"] = facts.seconds_update_weights;
  if (facts.seconds_teacher) metrics["time/teacher_logprobs"] = *facts.seconds_teacher;
}

}  // namespace

std::span<const monitor::MetricInfo> metric_infos() noexcept { return kInfos; }

RolloutTokens count_tokens(const env::Episode& episode) {
  const std::int64_t decode = episode.num_completion_tokens();
  return {.prefill = std::max<std::int64_t>(0, episode.num_final_tokens() - decode), .decode = decode};
}

monitor::Metrics step_metrics(const CollectedBatch& batch, const StepFacts& facts, const Progress& progress) {
  monitor::Metrics metrics;
  ScopedValues values;
  std::map<std::string, std::map<std::string, double>> stops;
  std::map<std::string, std::int64_t> num_by_env;
  std::map<std::string, std::map<std::string, std::vector<double>>> env_metrics;
  std::map<std::int64_t, int> groups;
  double num_prefill = 0;
  double num_decode = 0;
  for (const ReadyRollout& rollout : batch.rollouts) {
    const env::Episode& episode = rollout.episode;
    const RolloutTokens tokens = count_tokens(episode);
    const auto decode = static_cast<double>(tokens.decode), prefill = static_cast<double>(tokens.prefill);
    const auto total = static_cast<double>(episode.num_final_tokens());
    num_prefill += prefill;
    num_decode += decode;
    ++num_by_env[episode.env_name];
    ++groups[rollout.group.value];
    for (const std::string& scope : {std::string("all"), episode.env_name}) {
      values["reward"][scope].push_back(episode.reward);
      values["seq_len"][scope].push_back(total);
      values["prefill_len"][scope].push_back(prefill);
      values["decode_len"][scope].push_back(decode);
      values["is_truncated"][scope].push_back(episode.is_truncated ? 1 : 0);
      values["samples_per_rollout"][scope].push_back(static_cast<double>(rollout.samples.size()));
      values["num_turns"][scope].push_back(static_cast<double>(episode.num_turns()));
      values["off_policy_level"][scope].push_back(static_cast<double>(off_policy_level(rollout, facts.step)));
      values["timing"][scope + "/total"].push_back(episode.timing.total);
      values["timing"][scope + "/generation"].push_back(episode.timing.generation);
      values["timing"][scope + "/model"].push_back(episode.timing.model);
      values["timing"][scope + "/env"].push_back(episode.timing.env);
      values["timing"][scope + "/scoring"].push_back(episode.timing.scoring);
      stops[scope][episode.stop_condition.empty() ? "none" : episode.stop_condition] += 1;
    }
    for (const auto& [name, value] : episode.metrics) env_metrics[episode.env_name][name].push_back(value);
  }
  for (const auto& [name, scopes] : values)
    for (const auto& [scope, items] : scopes) put_mean_max_min(metrics, name + "/" + scope, items);
  const auto num_rollouts = static_cast<std::int64_t>(batch.rollouts.size());
  for (const auto& [scope, conditions] : stops)
    for (const auto& [condition, count] : conditions)
      put_mean(metrics, "stop_condition/" + scope + "/" + condition, count, scope == "all" ? num_rollouts : num_by_env[scope]);
  for (const auto& [env_name, count] : num_by_env) put_mean(metrics, "batch/" + env_name, static_cast<double>(count), num_rollouts);
  for (const auto& [env_name, names] : env_metrics)
    for (const auto& [name, items] : names) {
      double sum = 0;
      for (const double item : items) sum += item;
      put_mean(metrics, "metrics/" + env_name + "/" + name, sum, static_cast<std::int64_t>(items.size()));
    }
  put_mean(metrics, "effective_batch_size/all", static_cast<double>(batch.num_trainable), num_rollouts);

  put_windows(metrics, batch.window);
  put_facts(metrics, facts);
  metrics["perf/throughput"] = facts.seconds_step > 0 ? (num_prefill + num_decode) / facts.seconds_step : 0;
  metrics["progress/tokens"] = num_prefill + num_decode;
  metrics["progress/prefill_tokens"] = num_prefill;
  metrics["progress/decode_tokens"] = num_decode;
  metrics["progress/samples"] = static_cast<double>(num_rollouts);
  metrics["progress/problems"] = static_cast<double>(groups.size());
  metrics["progress/total_tokens"] = static_cast<double>(progress.total_tokens);
  metrics["progress/total_samples"] = static_cast<double>(progress.total_samples);
  metrics["progress/total_problems"] = static_cast<double>(progress.total_problems);
  return metrics;
}

void put_eval_metrics(monitor::Metrics& metrics, const eval::EvalResult& result, std::int64_t step) {
  const std::string prefix = "eval/" + result.env_name + "/";
  metrics[prefix + fmt::format("avg@{}", result.rollouts_per_example)] = result.avg_reward;
  for (const auto& [k, value] : result.pass_at_k) metrics[prefix + fmt::format("pass@{}", k)] = value;
  metrics[prefix + "completion_len/avg"] = result.completion_len_mean;
  metrics[prefix + "completion_len/max"] = result.completion_len_max;
  metrics[prefix + "completion_len/min"] = result.completion_len_min;
  metrics[prefix + "is_truncated/mean"] = result.truncated_mean;
  metrics[prefix + "has_error/mean"] = result.error_mean;
  metrics[prefix + "num_turns/mean"] = result.num_turns_mean;
  metrics[prefix + "time"] = result.seconds;
  for (const auto& [name, value] : result.avg_metrics) metrics[prefix + "metrics/" + name] = value;
  if (result.policy_version_min >= 0) metrics[prefix + "policy_version"] = static_cast<double>(result.policy_version_min);
  metrics["progress/ckpt_step"] = static_cast<double>(result.policy_version_min >= 0 ? result.policy_version_min : step);
}

std::string step_line(const CollectedBatch& batch, const StepFacts& facts) {
  double reward = 0;
  double num_tokens = 0;
  std::int64_t max_off_policy = 0;
  for (const ReadyRollout& rollout : batch.rollouts) {
    reward += rollout.episode.reward;
    num_tokens += static_cast<double>(count_tokens(rollout.episode).total());
    max_off_policy = std::max(max_off_policy, off_policy_level(rollout, facts.step));
  }
  const double count = std::max<double>(1, static_cast<double>(batch.rollouts.size()));
  return fmt::format(
      "Step {} | Time: {:.2f}s | Reward: {:.4f} | Throughput: {:.1f} tokens/s | Seq. Length: {:.1f} tokens/sample | Async Level: {} | "
      "Max. Off-Policy Level: {}",
      facts.step, facts.seconds_step, reward / count, facts.seconds_step > 0 ? num_tokens / facts.seconds_step : 0.0, num_tokens / count,
      (facts.step - 1) - facts.policy_version, max_off_policy);
}

}  // namespace prl::orchestrator
