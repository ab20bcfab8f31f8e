#include "eval/eval_runner.hpp"

#include <boost/asio/this_coro.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <cmath>
#include <exception>
#include <fstream>
#include <map>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "env/jsonl.hpp"
#include "net/deadline.hpp"
#include "net/task_group.hpp"

namespace prl::eval {

namespace json = boost::json;

namespace {

/// What the means are made of; also what a resumed row gives back.
struct Outcome {
  double reward = 0;
  std::map<std::string, double> metrics;
  double completion_len = 0;
  double num_turns = 0;
  bool is_truncated = false;
  bool has_error = false;
  std::int64_t version_start = -1;
  std::int64_t version_end = -1;
};

Outcome outcome_of(const env::Episode& episode) {
  Outcome outcome;
  outcome.reward = episode.reward;
  outcome.metrics = episode.metrics;
  outcome.completion_len = static_cast<double>(episode.num_completion_tokens());
  outcome.num_turns = static_cast<double>(episode.num_turns());
  outcome.is_truncated = episode.is_truncated;
  outcome.has_error = episode.error.has_value();
  if (const auto version = episode.version_start()) outcome.version_start = version->value;
  if (const auto version = episode.version_end()) outcome.version_end = version->value;
  return outcome;
}

double number_or(const json::object& row, const char* key, double fallback) {
  const json::value* value = row.if_contains(key);
  return value != nullptr && value->is_number() ? value->to_number<double>() : fallback;
}

Outcome outcome_of_row(const json::object& row) {
  Outcome outcome;
  outcome.reward = number_or(row, "reward", 0);
  outcome.completion_len = number_or(row, "completion_len", 0);
  outcome.num_turns = number_or(row, "num_turns", 0);
  if (const json::value* value = row.if_contains("is_truncated")) outcome.is_truncated = value->is_bool() && value->get_bool();
  if (const json::value* value = row.if_contains("error")) outcome.has_error = !value->is_null();
  if (const json::value* value = row.if_contains("metrics"); value != nullptr && value->is_object())
    for (const auto& metric : value->get_object())
      if (metric.value().is_number()) outcome.metrics[std::string(metric.key())] = metric.value().to_number<double>();
  return outcome;
}

/// The evaluation of one environment while it runs. Lives in run_eval's frame; all members on one thread.
struct Run {
  EvalTask task;
  std::shared_ptr<env::ChatClientFactory> chat;
  env::Split split = env::Split::kEval;
  std::int64_t num_examples = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> todo;  ///< (example, rollout)
  std::size_t next = 0;
  std::map<std::pair<std::int64_t, std::int64_t>, Outcome> outcomes;
  std::map<std::pair<std::int64_t, std::int64_t>, env::Episode> episodes;
  std::ofstream results;
  std::exception_ptr failure;
};

void append_row(Run& run, const env::Episode& episode, std::int64_t rollout_idx) {
  if (!run.results.is_open()) return;
  json::object row = env::to_json(episode);
  row["rollout_idx"] = rollout_idx;
  row["generation_ms"] = episode.timing.generation * 1000;
  row["scoring_ms"] = episode.timing.scoring * 1000;
  row["total_ms"] = episode.timing.total * 1000;
  row["oai_tools"] = json::serialize(episode.tool_defs);
  run.results << json::serialize(row) << '\n' << std::flush;
  if (!run.results) fail(ErrorCode::kIo, "{}: could not be written; is the disk full?", run.task.results_file.string());
}

asio::awaitable<env::Episode> play(Run* run, std::int64_t example, std::int64_t rollout_idx, int attempt) {
  env::ConversationOptions conversation;
  conversation.session_id =
      fmt::format("eval-{}-{}-{}-{}-{}", run->task.label, run->task.environment->name(), example, rollout_idx, attempt);
  const std::unique_ptr<env::ChatClient> client = run->chat->open(std::move(conversation));
  env::RolloutContext context;
  context.client = client.get();
  context.sampling = run->task.sampling;
  if (run->task.seed)
    context.seed = mix_seed(*run->task.seed, static_cast<std::uint64_t>(example), static_cast<std::uint64_t>(rollout_idx));
  context.trajectory_id = fmt::format("{}-{}", example, rollout_idx);
  context.deadline = net::Clock::now() + run->task.rollout_timeout;
  env::Task task = run->task.environment->task(run->split, example);
  const net::TimePoint deadline = context.deadline;
  auto rollout = run->task.environment->run(std::move(task), std::move(context));
  auto guarded = net::with_deadline(std::move(rollout), deadline + std::chrono::seconds(5),
                                    fmt::format("rollout {} of example {} of {}", rollout_idx, example, run->task.environment->name()));
  co_return co_await std::move(guarded);
}

asio::awaitable<env::Episode> play_with_retries(Run* run, std::int64_t example, std::int64_t rollout_idx) {
  const RetryOptions& retry = run->task.retry;
  for (int attempt = 0;; ++attempt) {
    auto playing = play(run, example, rollout_idx, attempt);
    env::Episode episode = co_await std::move(playing);
    if (!episode.error || attempt + 1 >= std::max(1, retry.max_attempts)) {
      if (episode.error && retry.reraise)
        fail(ErrorCode::kUnavailable, "{}: rollout {} of example {} failed {} times, at last with {}: {}", run->task.environment->name(),
             rollout_idx, example, attempt + 1, episode.error->type, episode.error->message);
      co_return episode;
    }
    const double factor = std::pow(2.0, std::min(attempt, 20));
    const auto wait =
        std::clamp(std::chrono::milliseconds(static_cast<std::int64_t>(static_cast<double>(retry.wait_multiplier.count()) * factor)),
                   retry.wait_min, std::max(retry.wait_min, retry.wait_max));
    log::warning("{}: rollout {} of example {} failed ({}: {}); attempt {} of {} in {} ms", run->task.environment->name(), rollout_idx,
                 example, episode.error->type, episode.error->message, attempt + 2, retry.max_attempts, wait.count());
    co_await net::sleep_for(wait);
  }
}

asio::awaitable<void> work(Run* run) {
  while (run->next < run->todo.size() && !run->failure) {
    const auto [example, rollout_idx] = run->todo[run->next++];
    try {
      auto playing = play_with_retries(run, example, rollout_idx);
      env::Episode episode = co_await std::move(playing);
      append_row(*run, episode, rollout_idx);
      for (env::TrajectoryStep& step : episode.trajectory) step.tokens = {};
      run->outcomes[{example, rollout_idx}] = outcome_of(episode);
      run->episodes[{example, rollout_idx}] = std::move(episode);
    } catch (const std::exception&) {
      if (!run->failure) run->failure = std::current_exception();
    }
  }
}

void plan(Run& run) {
  const env::Environment& environment = *run.task.environment;
  if (environment.num_tasks(env::Split::kEval) == 0) {
    log::warning("{} has no eval split: its train split is evaluated", environment.name());
    run.split = env::Split::kTrain;
  }
  const std::int64_t first = run.task.skip_first;
  std::int64_t end = environment.num_tasks(run.split);
  if (run.task.num_examples >= 0) end = std::min(end, first + run.task.num_examples);
  if (first >= end || run.task.rollouts_per_example < 1)
    fail(ErrorCode::kInvalidArgument, "{}: nothing to evaluate: {} tasks, skip_first {}, num_examples {}, rollouts_per_example {}",
         environment.name(), environment.num_tasks(run.split), first, run.task.num_examples, run.task.rollouts_per_example);
  run.num_examples = end - first;
  if (run.task.resume && std::filesystem::exists(run.task.results_file)) {
    for (const json::object& row : env::read_jsonl(run.task.results_file)) {
      const auto example = static_cast<std::int64_t>(number_or(row, "example_id", -1));
      const auto rollout_idx = static_cast<std::int64_t>(number_or(row, "rollout_idx", -1));
      if (example >= first && example < end && rollout_idx >= 0 && rollout_idx < run.task.rollouts_per_example)
        run.outcomes[{example, rollout_idx}] = outcome_of_row(row);
    }
  }
  for (std::int64_t example = first; example < end; ++example)
    for (std::int64_t r = 0; r < run.task.rollouts_per_example; ++r)
      if (!run.outcomes.contains({example, r})) run.todo.emplace_back(example, r);
  if (!run.task.results_file.empty()) {
    std::error_code ec;
    std::filesystem::create_directories(run.task.results_file.parent_path(), ec);
    run.results.open(run.task.results_file, run.task.resume ? std::ios::app : std::ios::trunc);
    if (!run.results) fail(ErrorCode::kIo, "{}: could not be opened for writing", run.task.results_file.string());
  }
}

void add_pass_at_k(const Run& run, EvalResult& result) {
  const std::int64_t n = run.task.rollouts_per_example;
  std::map<std::int64_t, std::int64_t> num_right;
  for (const auto& [id, outcome] : run.outcomes) {
    if (outcome.reward != 0.0 && outcome.reward != 1.0) return;
    num_right[id.first] += outcome.reward == 1.0 ? 1 : 0;
  }
  for (std::int64_t k = 1; k <= n; k *= 2) {
    double sum = 0;
    for (const auto& [example, c] : num_right) sum += pass_at_k(n, c, k);
    result.pass_at_k[k] = sum / static_cast<double>(num_right.size());
  }
}

EvalResult summarize(Run& run) {
  EvalResult result;
  result.env_name = run.task.environment->name();
  result.num_examples = run.num_examples;
  result.rollouts_per_example = run.task.rollouts_per_example;
  const double count = static_cast<double>(run.outcomes.size());
  double squares = 0;
  std::map<std::string, std::int64_t> num_values;
  result.completion_len_min = run.outcomes.begin()->second.completion_len;
  for (const auto& [id, outcome] : run.outcomes) {
    result.avg_reward += outcome.reward / count;
    result.completion_len_mean += outcome.completion_len / count;
    result.completion_len_min = std::min(result.completion_len_min, outcome.completion_len);
    result.completion_len_max = std::max(result.completion_len_max, outcome.completion_len);
    result.truncated_mean += (outcome.is_truncated ? 1.0 : 0.0) / count;
    result.error_mean += (outcome.has_error ? 1.0 : 0.0) / count;
    result.num_turns_mean += outcome.num_turns / count;
    for (const auto& [name, value] : outcome.metrics) {
      result.avg_metrics[name] += value;
      ++num_values[name];
    }
    if (outcome.version_start >= 0)
      result.policy_version_min =
          result.policy_version_min < 0 ? outcome.version_start : std::min(result.policy_version_min, outcome.version_start);
    result.policy_version_max = std::max(result.policy_version_max, outcome.version_end);
  }
  for (const auto& [id, outcome] : run.outcomes) squares += std::pow(outcome.completion_len - result.completion_len_mean, 2);
  result.completion_len_std = run.outcomes.size() > 1 ? std::sqrt(squares / (count - 1)) : 0.0;
  for (auto& [name, value] : result.avg_metrics) value /= static_cast<double>(num_values[name]);
  add_pass_at_k(run, result);
  for (auto& [id, episode] : run.episodes) result.episodes.push_back(std::move(episode));
  return result;
}

}  // namespace

double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k) {
  if (n - c < k) return 1.0;
  double all_wrong = 1.0;
  for (std::int64_t i = n - c + 1; i <= n; ++i) all_wrong *= 1.0 - static_cast<double>(k) / static_cast<double>(i);
  return 1.0 - all_wrong;
}

asio::awaitable<EvalResult> run_eval(EvalTask task, std::shared_ptr<env::ChatClientFactory> chat) {
  const net::TimePoint begin = net::Clock::now();
  Run run;
  run.task = std::move(task);
  run.chat = std::move(chat);
  plan(run);
  const auto executor = co_await asio::this_coro::executor;
  {
    // The workers use `run` of this frame, so this coroutine only leaves the block when all of them have ended.
    const std::int64_t num_workers =
        std::min<std::int64_t>(std::max<std::int64_t>(1, run.task.max_concurrent), static_cast<std::int64_t>(run.todo.size()));
    net::TaskGroup group(executor, "eval " + run.task.environment->name());
    for (std::int64_t i = 0; i < num_workers; ++i) group.spawn(fmt::format("eval worker {}", i), work(&run));
    const std::int64_t num_rounds = static_cast<std::int64_t>(run.todo.size()) / std::max<std::int64_t>(1, num_workers) + 1;
    const auto limit = run.task.rollout_timeout * num_rounds * std::max(1, run.task.retry.max_attempts) + std::chrono::minutes(10);
    bool is_done = false;
    std::exception_ptr interrupted;
    try {
      is_done = co_await group.join(net::Clock::now() + limit);
    } catch (const std::exception&) {
      interrupted = std::current_exception();
    }
    if (!is_done) {
      group.cancel();
      co_await asio::this_coro::reset_cancellation_state();
      const bool has_ended = co_await group.join(net::Clock::now() + std::chrono::seconds(30));
      PRL_CHECK(has_ended, "eval workers of {} did not end 30 s after their cancellation", run.task.environment->name());
      if (interrupted) std::rethrow_exception(interrupted);
      fail(ErrorCode::kDeadline, "the evaluation of {} waited too long for {}", run.task.environment->name(), run.chat->describe());
    }
  }
  if (run.failure) std::rethrow_exception(run.failure);
  EvalResult result = summarize(run);
  result.seconds = std::chrono::duration<double>(net::Clock::now() - begin).count();
  co_return result;
}

std::string console_line(const EvalResult& r) {
  std::string passes;
  for (const auto& [k, value] : r.pass_at_k) passes += fmt::format(", Pass@{}: {:.4f}", k, value);
  return fmt::format(
      "Evaluated {} in {:.2f}s (Avg@{}={:.4f}{}, Completion Length: {:.2f} (±{:.2f}, ∈[{:.2f}, {:.2f}]), Truncated: {:.1f}%)", r.env_name,
      r.seconds, r.rollouts_per_example, r.avg_reward, passes, r.completion_len_mean, r.completion_len_std, r.completion_len_min,
      r.completion_len_max, r.truncated_mean * 100);
}

}  // namespace prl::eval
