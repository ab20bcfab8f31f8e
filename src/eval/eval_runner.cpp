#include "eval/eval_runner.hpp"

#include <boost/asio/this_coro.hpp>

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/log_progress.hpp"
#include "base/rng.hpp"
#include "base/waiting.hpp"
#include "env/rollout_attempt.hpp"
#include "env/state_headers.hpp"
#include "eval/results_file.hpp"
#include "net/deadline.hpp"
#include "net/task_group.hpp"

namespace prl::eval {
namespace {

/// Rollouts of one example that are written together: all of them, or one.
struct Unit {
  std::int64_t example = 0;
  std::vector<std::int64_t> rollouts;
  std::vector<std::optional<env::Episode>> episodes;  ///< as they finish
  std::size_t num_left = 0;
};

/// The evaluation of one environment while it runs. Lives in run_eval's frame; all members on one thread.
struct Run {
  EvalTask task;
  std::shared_ptr<env::ChatClientFactory> chat;
  env::Split split = env::Split::kEval;
  std::int64_t num_examples = 0;
  std::vector<Unit> units;
  std::vector<std::pair<std::size_t, std::size_t>> todo;  ///< (unit, its rollout) in order
  std::size_t next = 0;
  Outcomes outcomes;
  std::map<std::pair<std::int64_t, std::int64_t>, env::Episode> episodes;
  std::int64_t num_dropped_groups = 0;
  std::int64_t num_resumed = 0;
  ResultsWriter writer;
  net::TimePoint last_log;
  bool is_short_of_room = false;  ///< and that was said, for all groups that wait
  std::exception_ptr failure;
  /// Begins anew with every rollout that ends. Long ones are normal, so that it speaks later than other waits.
  Waiting idle{{.who = "the evaluation",
                .what = "a rollout to end",
                .detail = [this] { return fmt::format("{}, {} of {} started, asked of {}", name(), next, todo.size(), chat->describe()); },
                .first = std::chrono::minutes(1)}};

  const std::string& name() const { return task.environment->name(); }
};

net::Fields headers_of(const Run& run, std::int64_t example, std::int64_t rollout_idx) {
  const std::string trajectory_id = fmt::format("{}-{}-{}-{}", run.task.label, run.name(), example, rollout_idx);
  return env::state_headers(run.task.headers_from_state,
                            {.trajectory_id = trajectory_id, .example_id = example, .rollout_idx = rollout_idx, .task = run.name()});
}

asio::awaitable<env::Episode> play(Run* run, std::int64_t example, std::int64_t rollout_idx, env::RolloutAttempt attempt) {
  const net::TimePoint patience = net::Clock::now() + std::chrono::hours(24 * 7);
  Limiter::Permit permit;
  if (run->task.limiter) {
    auto acquiring = Limiter::acquire(run->task.limiter, patience);
    permit = co_await std::move(acquiring);
  }
  env::ConversationOptions conversation;
  conversation.session_id =
      fmt::format("eval-{}-{}-{}-{}-{}", run->task.label, run->task.environment->name(), example, rollout_idx, attempt.number);
  conversation.headers = headers_of(*run, example, rollout_idx);
  const std::unique_ptr<env::ChatClient> client = run->chat->open(conversation);
  env::RolloutContext context;
  context.client = client.get();
  context.open_conversation = env::conversation_opener(run->chat, std::move(conversation));
  context.sampling = run->task.sampling;
  if (run->task.seed)
    context.seed = mix_seed(*run->task.seed, static_cast<std::uint64_t>(example), static_cast<std::uint64_t>(rollout_idx));
  if (context.seed) context.seed = attempt.seed_from(*context.seed);
  context.trajectory_id = fmt::format("{}-{}", example, rollout_idx);
  context.group_id = fmt::format("eval-{}-{}-{}", run->task.label, example, static_cast<int>(run->split));
  context.deadline = net::Clock::now() + run->task.rollout_timeout;
  auto fetching = run->task.environment->fetch_task(run->split, example);
  env::Task task = co_await std::move(fetching);
  const net::TimePoint deadline = context.deadline;
  auto rollout = run->task.environment->run(std::move(task), std::move(context));
  auto guarded = net::with_deadline(std::move(rollout), deadline + std::chrono::seconds(5),
                                    fmt::format("rollout {} of example {} of {}", rollout_idx, example, run->task.environment->name()));
  std::string late;
  try {
    co_return co_await std::move(guarded);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDeadline) throw;
    late = error.what();
  }
  // An environment that does not keep its own deadline costs its rollout, not the evaluation.
  env::Episode episode;
  episode.trajectory_id = fmt::format("{}-{}", example, rollout_idx);
  episode.example_id = example;
  episode.env_name = run->task.environment->name();
  episode.stop_condition = "timeout_reached";
  episode.error = env::EpisodeError{"TimeoutError", late, false};
  co_return episode;
}

asio::awaitable<env::Episode> play_with_retries(Run* run, std::int64_t example, std::int64_t rollout_idx) {
  const RetryOptions& retry = run->task.retry;
  for (env::RolloutAttempt attempt;;) {
    auto playing = play(run, example, rollout_idx, attempt);
    env::Episode episode = co_await std::move(playing);
    if (episode.error && episode.error->refuses_all)
      fail(ErrorCode::kUnavailable, "{}: every request would be refused as this one was: {}", run->name(), episode.error->message);
    if (!attempt.try_again(episode, retry.max_attempts - 1)) {
      if (episode.error && retry.reraise)
        fail(ErrorCode::kUnavailable, "{}: rollout {} of example {} failed {} times, at last with {}: {}", run->task.environment->name(),
             rollout_idx, example, attempt.number + 1, episode.error->type, episode.error->message);
      co_return episode;
    }
    const double factor = std::pow(2.0, std::min(attempt.number - 1, 20));
    const auto wait =
        std::clamp(std::chrono::milliseconds(static_cast<std::int64_t>(static_cast<double>(retry.wait_multiplier.count()) * factor)),
                   retry.wait_min, std::max(retry.wait_min, retry.wait_max));
    log::warning("{}: rollout {} of example {} failed ({}: {}); attempt {} of {} in {} ms", run->task.environment->name(), rollout_idx,
                 example, episode.error->type, episode.error->message, attempt.number + 1, retry.max_attempts, wait.count());
    co_await net::sleep_for(wait);
  }
}

/// Waits, for a time, while the disk is full: rollouts that were played must not be lost for it.
asio::awaitable<void> write_group(Run* run, const std::vector<env::Episode>* group, const std::vector<std::int64_t>* rollouts) {
  std::string problem;
  Waiting waiting({.who = fmt::format("the evaluation of {}", run->name()),
                   .what = "room for its results",
                   .limit = run->task.write_patience,
                   .detail = [&problem] { return problem; }});
  for (;;) {
    try {
      run->writer.write(*group, *rollouts);
      run->is_short_of_room = false;
      co_return;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kIo || waiting.is_expired() || run->failure) throw;
      if (!std::exchange(run->is_short_of_room, true)) log::warning("{}: {}; waiting for room", run->name(), error.what());
      problem = error.what();
    }
    waiting.check();
    co_await net::sleep_for(run->task.write_pause);
  }
}

/// Scores, counts and writes a unit whose last rollout is done.
asio::awaitable<void> finish_unit(Run* running, Unit* finished) {
  Run& run = *running;
  Unit& unit = *finished;
  std::vector<env::Episode> group;
  for (std::optional<env::Episode>& episode : unit.episodes) group.push_back(std::move(*episode));
  unit.episodes.clear();
  if (run.task.drop_failed_groups) {
    const auto failed = std::find_if(group.begin(), group.end(), [](const env::Episode& e) { return e.error.has_value(); });
    if (failed != group.end()) {
      log::error("{}: example {} is dropped: {}: {}", run.name(), unit.example, failed->error->type, failed->error->message);
      ++run.num_dropped_groups;
      co_return;
    }
  }
  try {
    if (run.task.environment->scores_groups()) {
      auto scoring = run.task.environment->score_group(group);
      co_await std::move(scoring);
    }
  } catch (const Error& error) {
    if (!run.task.drop_failed_groups) throw;
    log::error("{}: example {} is dropped: {}", run.name(), unit.example, error.what());
    ++run.num_dropped_groups;
    co_return;
  }
  auto writing = write_group(running, &group, &unit.rollouts);
  co_await std::move(writing);
  for (std::size_t i = 0; i < group.size(); ++i) {
    const std::pair id{unit.example, unit.rollouts[i]};
    run.outcomes[id] = outcome_of(group[i]);
    if (!run.task.keep_episodes) continue;
    for (env::TrajectoryStep& step : group[i].trajectory) step.tokens = {};
    run.episodes[id] = std::move(group[i]);
  }
}

void log_progress(Run& run) {
  const net::TimePoint now = net::Clock::now();
  if (run.task.log_interval.count() == 0 || now - run.last_log < run.task.log_interval) return;
  run.last_log = now;
  double reward = 0;
  for (const auto& [id, outcome] : run.outcomes) reward += outcome.reward;
  log::progress("evaluating {}: {} of {} rollouts{}", run.name(), run.outcomes.size(), run.num_examples * run.task.rollouts_per_example,
                run.outcomes.empty() ? "" : fmt::format(", reward {:.4f}", reward / static_cast<double>(run.outcomes.size())));
}

asio::awaitable<void> work(Run* run) {
  while (run->next < run->todo.size() && !run->failure) {
    const auto [unit_idx, member] = run->todo[run->next++];
    Unit& unit = run->units[unit_idx];
    try {
      auto playing = play_with_retries(run, unit.example, unit.rollouts[member]);
      env::Episode episode = co_await std::move(playing);
      run->idle.restart();
      unit.episodes[member] = std::move(episode);
      if (--unit.num_left == 0) {
        auto finishing = finish_unit(run, &unit);
        co_await std::move(finishing);
      }
      log_progress(*run);
    } catch (const std::exception&) {
      if (!run->failure) run->failure = std::current_exception();
    }
  }
}

/// The tasks to play, ascending.
std::vector<std::int64_t> choose_examples(Run& run) {
  const env::Environment& environment = *run.task.environment;
  run.split = run.task.split.value_or(env::Split::kEval);
  if (environment.num_tasks(run.split) == 0) {
    const bool is_eval = run.split == env::Split::kEval;
    log::warning("{} has no {} split: its {} split is used", environment.name(), is_eval ? "eval" : "train", is_eval ? "train" : "eval");
    run.split = is_eval ? env::Split::kTrain : env::Split::kEval;
  }
  if (!run.task.examples.empty()) {
    if (run.task.examples.back() >= environment.num_tasks(run.split))
      fail(ErrorCode::kInvalidArgument, "{}: task {} of {} was asked for", environment.name(), run.task.examples.back(),
           environment.num_tasks(run.split));
    run.num_examples = static_cast<std::int64_t>(run.task.examples.size());
    return run.task.examples;
  }
  const std::int64_t first = run.task.skip_first;
  std::int64_t end = environment.num_tasks(run.split);
  if (run.task.num_examples >= 0) end = std::min(end, first + run.task.num_examples);
  if (first >= end || run.task.rollouts_per_example < 1)
    fail(ErrorCode::kInvalidArgument, "{}: nothing to evaluate: {} tasks, skip_first {}, num_examples {}, rollouts_per_example {}",
         environment.name(), environment.num_tasks(run.split), first, run.task.num_examples, run.task.rollouts_per_example);
  run.num_examples = end - first;
  std::vector<std::int64_t> examples(static_cast<std::size_t>(end - first));
  std::iota(examples.begin(), examples.end(), first);
  return examples;
}

void plan(Run& run) {
  const std::vector<std::int64_t> examples = choose_examples(run);
  const EvalTask& task = run.task;
  if (task.per_rollout && task.environment->scores_groups())
    fail(ErrorCode::kInvalidArgument, "{}: per_rollout: this environment scores all rollouts of a task together; turn per_rollout off",
         run.name());
  // Rollouts that neither are scored nor fall together are written one by one, so that an interruption loses none.
  const bool whole_groups = !task.per_rollout && (task.environment->scores_groups() || task.drop_failed_groups);
  if (!task.synthesis_key.empty())
    run.outcomes = find_synthesized(task.results_file, task.synthesis_key, examples.front(), examples.back() + 1, task.rollouts_per_example,
                                    task.environment->scores_groups());
  else if (task.resume)
    run.outcomes = take_over_results(task.results_file, task.traces_file, examples.front(), examples.back() + 1, task.rollouts_per_example,
                                     whole_groups);
  run.num_resumed = static_cast<std::int64_t>(run.outcomes.size());
  for (const std::int64_t example : examples) {
    if (whole_groups) run.units.push_back({example, {}, {}, 0});
    for (std::int64_t r = 0; r < task.rollouts_per_example; ++r) {
      if (run.outcomes.contains({example, r})) continue;
      if (!whole_groups) run.units.push_back({example, {}, {}, 0});
      Unit& unit = run.units.back();
      run.todo.emplace_back(run.units.size() - 1, unit.rollouts.size());
      unit.rollouts.push_back(r);
      unit.episodes.emplace_back();
      ++unit.num_left;
    }
  }
  run.writer = ResultsWriter({.results_file = task.results_file,
                              .traces_file = task.traces_file,
                              .append = task.resume || task.is_synthetic,
                              .is_synthetic = task.is_synthetic,
                              .synthesis_key = task.synthesis_key,
                              .run_id = task.label,
                              .model = task.model});
  run.last_log = net::Clock::now();
}

}  // namespace

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
      const net::TimePoint deadline = net::Clock::now() + limit;
      while (!is_done && net::Clock::now() < deadline) {
        run.idle.check();
        log_progress(run);
        is_done = co_await group.join(std::min(deadline, net::Clock::now() + std::chrono::seconds(1)));
      }
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
  EvalResult result = summarize(run.outcomes, run.task.rollouts_per_example);
  result.env_name = run.name();
  if (!run.task.drop_failed_groups) result.num_examples = run.num_examples;
  result.num_dropped_groups = run.num_dropped_groups;
  result.num_wanted_examples = run.num_examples;
  result.num_resumed_rollouts = run.num_resumed;
  for (auto& [id, episode] : run.episodes) result.episodes.push_back(std::move(episode));
  result.seconds = std::chrono::duration<double>(net::Clock::now() - begin).count();
  co_return result;
}

}  // namespace prl::eval
