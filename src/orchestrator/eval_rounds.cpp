#include "orchestrator/eval_rounds.hpp"

#include <utility>

#include "base/log.hpp"
#include "orchestrator/metrics.hpp"
#include "orchestrator/rollout_log.hpp"

namespace prl::orchestrator {

EvalRounds::EvalRounds(EvalRoundOptions options, Services services, PolicyFollower& policy, RunControl& control)
    : options_(std::move(options)), services_(std::move(services)), policy_(policy), control_(control) {
  if (options_.validation) validation_tasks(*options_.validation, services_.environments, PolicyVersion{0});
}

void EvalRounds::begin(PolicyVersion version, bool is_resumed) {
  last_eval_round_.clear();
  const bool skip = is_resumed ? options_.skip_eval_on_resume : !options_.eval_base_model;
  for (const OnlineEval& online : options_.evals) last_eval_round_.push_back(version.value / online.interval - (skip ? 0 : 1));
  if (options_.validation && is_resumed) last_validation_round_ = version.value / options_.validation->interval;
}

void EvalRounds::begin_again(std::int64_t evaluated_step, std::int64_t validated_step) {
  last_eval_round_.clear();
  for (const OnlineEval& online : options_.evals)
    last_eval_round_.push_back(evaluated_step >= 0 ? evaluated_step / online.interval : options_.eval_base_model ? -1 : 0);
  if (options_.validation && validated_step >= 0) last_validation_round_ = validated_step / options_.validation->interval;
}

bool EvalRounds::is_due() const {
  for (std::size_t i = 0; i < options_.evals.size(); ++i)
    if (is_eval_due(i)) return true;
  return is_validation_due();
}

asio::awaitable<void> EvalRounds::run_due() {
  if (!is_due()) co_return;
  auto playing = play(/*all=*/false);
  co_await std::move(playing);
}

asio::awaitable<void> EvalRounds::run_last(PolicyVersion last) {
  if (options_.evals.empty() && !options_.validation) co_return;
  auto waiting = policy_.wait_for(last);
  co_await std::move(waiting);
  if (control_.is_stopped()) co_return;
  auto playing = play(/*all=*/true);
  co_await std::move(playing);
}

asio::awaitable<void> EvalRounds::play(bool all) {
  auto pausing = policy_.pause();
  co_await std::move(pausing);
  if (is_validation_due()) {
    auto validating = validate();
    co_await std::move(validating);
  }
  std::vector<std::size_t> due;
  for (std::size_t i = 0; i < options_.evals.size(); ++i)
    if (all || is_eval_due(i)) due.push_back(i);
  if (!due.empty()) {
    auto evaluating = evaluate(std::move(due));
    co_await std::move(evaluating);
  }
  policy_.resume();
}

/// nullopt when the run was stopped meanwhile.
asio::awaitable<std::optional<eval::EvalResult>> EvalRounds::play_task(eval::EvalTask task) {
  task.log_interval = options_.log_interval;
  task.headers_from_state = options_.headers_from_state;
  try {
    auto evaluating = eval::run_eval(std::move(task), services_.chat);
    auto stoppable = control_.until_ended<eval::EvalResult>(std::move(evaluating));
    co_return co_await std::move(stoppable);
  } catch (const Error& error) {
    if (!control_.is_stopped() || error.code() != ErrorCode::kCancelled) throw;
  }
  co_return std::nullopt;
}

asio::awaitable<void> EvalRounds::validate() {
  const PolicyVersion version = policy_.version();
  last_validation_round_ = round_of(options_.validation->interval);
  std::vector<eval::EvalResult> results;
  std::vector<eval::EvalTask> tasks = validation_tasks(*options_.validation, services_.environments, version);
  for (eval::EvalTask& task : tasks) {
    auto playing = play_task(std::move(task));
    std::optional<eval::EvalResult> done = co_await std::move(playing);
    if (!done) co_return;
    results.push_back(std::move(*done));
  }
  log::success("{}, policy v{}", validation_line(results), version.value);
  monitor::Metrics metrics;
  put_validation_metrics(metrics, results);
  if (services_.monitor != nullptr) services_.monitor->log(version.value, metrics, kValidationRows);
}

asio::awaitable<void> EvalRounds::evaluate(std::vector<std::size_t> due) {
  if (services_.before_evals) services_.before_evals();
  const PolicyVersion version = policy_.version();
  results_.clear();
  monitor::Metrics metrics;
  for (const std::size_t i : due) {
    last_eval_round_[i] = round_of(options_.evals[i].interval);
    eval::EvalTask task = options_.evals[i].task;
    task.label = fmt::format("v{}", version.value);
    auto playing = play_task(std::move(task));
    std::optional<eval::EvalResult> done = co_await std::move(playing);
    if (!done) co_return;
    if (done->policy_version_min < 0) done->policy_version_min = version.value;
    log::success("{}, policy v{}", eval::console_line(*done), version.value);
    put_eval_metrics(metrics, *done, version.value);
    results_.push_back(std::move(*done));
  }
  auto writing = write_rollouts(version);
  co_await std::move(writing);
  if (services_.monitor != nullptr) services_.monitor->log(version.value, metrics, kOnlineEvalRows);
}

asio::awaitable<void> EvalRounds::write_rollouts(PolicyVersion version) {
  if (options_.output_dir.empty()) co_return;
  std::function<bool()> work = [results = results_, folder = options_.output_dir, step = version.value] {
    write_eval_rollouts(folder, step, results);
    return true;
  };
  auto writing = services_.files->run<bool>(std::move(work), net::Clock::now() + kFileDeadline, "the evaluation log");
  co_await std::move(writing);
}

}  // namespace prl::orchestrator
