#include "env/multi_turn_env.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <utility>

#include "base/failure.hpp"
#include "base/rng.hpp"
#include "base/units.hpp"
#include "net/errors.hpp"

namespace prl::env {

namespace json = boost::json;

namespace {

/// The class names that verifiers gives its errors.
std::string error_type(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOverlong: return "OverlongPromptError";
    case ErrorCode::kCorrupt:
    case ErrorCode::kNonFinite: return "InvalidModelResponseError";
    case ErrorCode::kDeadline: return "TimeoutError";
    case ErrorCode::kUnavailable:
    case ErrorCode::kOverloaded:
    case ErrorCode::kInternal:
    case ErrorCode::kOutOfSync:
    case ErrorCode::kUnauthorized: return "ModelError";
    default: return "Error";
  }
}

}  // namespace

MultiTurnEnv::MultiTurnEnv(std::string name, Limits limits, Rubric rubric)
    : name_(std::move(name)), limits_(limits), rubric_(std::move(rubric)) {}

std::string MultiTurnEnv::limit_reached(const Episode& episode, std::int64_t max_total_completion_tokens) const {
  if (limits_.max_turns > 0 && episode.num_turns() >= limits_.max_turns) return "max_turns_reached";
  for (const std::int64_t limit : {limits_.max_total_completion_tokens, max_total_completion_tokens})
    if (limit >= 0 && episode.num_completion_tokens() >= limit) return "max_total_completion_tokens_reached";
  return {};
}

asio::awaitable<void> MultiTurnEnv::play(Rollout* rollout, RolloutContext context) const {
  Episode& episode = rollout->episode;
  start(*rollout);
  for (std::uint64_t turn_idx = 0;; ++turn_idx) {
    ChatRequest request;
    request.messages = rollout->messages;
    request.tools = episode.tool_defs;
    request.sampling = context.sampling;
    if (context.max_total_completion_tokens >= 0) {
      const std::int64_t room = std::max<std::int64_t>(1, context.max_total_completion_tokens - episode.num_completion_tokens());
      request.sampling.max_tokens =
          static_cast<std::int32_t>(std::min<std::int64_t>(request.sampling.max_tokens.value_or(INT32_MAX), room));
    }
    // 63 bits: the seed is the same number in process and through JSON.
    if (context.seed) request.sampling.seed = mix_seed(*context.seed, turn_idx) >> 1;
    request.deadline = context.deadline;
    rollout->is_asking = true;
    ChatTurn turn = co_await context.client->complete(request);
    rollout->is_asking = false;

    TrajectoryStep step;
    step.prompt = std::move(request.messages);
    step.completion = turn.message;
    step.tokens = std::move(turn.tokens);
    step.has_tokens = turn.has_tokens;
    step.finish_reason = turn.finish_reason;
    step.is_truncated = turn.is_truncated();
    step.num_prompt_tokens = turn.num_prompt_tokens;
    step.num_completion_tokens = turn.num_completion_tokens;
    step.has_versions = turn.has_versions;
    step.version_start = turn.version_start;
    step.version_end = turn.version_end;
    episode.timing.model += turn.seconds;
    episode.is_truncated = episode.is_truncated || step.is_truncated;
    episode.trajectory.push_back(std::move(step));
    rollout->messages.push_back(turn.message);
    episode.completion.push_back(std::move(turn.message));

    episode.stop_condition = stop_condition(*rollout);
    if (episode.stop_condition.empty()) episode.stop_condition = limit_reached(episode, context.max_total_completion_tokens);
    if (!episode.stop_condition.empty()) co_return;
    json::array answer = co_await respond(rollout);
    for (json::value& message : answer) {
      rollout->messages.push_back(message);
      episode.completion.push_back(std::move(message));
    }
  }
}

asio::awaitable<Episode> MultiTurnEnv::run(Task task, RolloutContext context) const {
  PRL_CHECK(context.client != nullptr, "{}: a rollout needs a chat client", name_);
  Episode episode;
  episode.trajectory_id = context.trajectory_id;
  episode.example_id = task.example_id;
  episode.env_name = name_;
  episode.prompt = task.prompt;
  episode.answer = task.answer;
  episode.info = task.info;
  episode.tool_defs = tools(task);
  episode.temperature = context.sampling.temperature;
  episode.timing.start_time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const net::TimePoint begin = net::Clock::now();
  const net::TimePoint deadline = context.deadline;
  Rollout rollout{task, episode, task.prompt, {}};
  std::exception_ptr failure;
  try {
    auto playing = play(&rollout, std::move(context));
    co_await std::move(playing);
    auto judging = judge(&rollout, deadline);
    co_await std::move(judging);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  if (failure) {
    const Error error = net::to_error(failure);
    if (error.code() == ErrorCode::kCancelled) throw error;
    if (error.code() == ErrorCode::kOverlong) {
      // The context is full: the rollout ends here, is scored as it stands, and trains.
      episode.stop_condition = "prompt_too_long";
      episode.is_truncated = true;
    } else {
      episode.stop_condition = error.code() == ErrorCode::kDeadline ? "timeout_reached" : "has_error";
      // A request that took too long may do better; a rollout whose own time is up has had it.
      const bool is_out_of_time = error.code() == ErrorCode::kDeadline && net::Clock::now() >= deadline;
      episode.error = EpisodeError{error_type(error.code()), error.what(), is_transient(error.code()) && !is_out_of_time,
                                   rollout.is_asking && refuses_all(error.code())};
    }
  }
  episode.is_completed = !episode.error.has_value();
  episode.timing.generation = seconds_since(begin);
  episode.timing.env = std::max(0.0, episode.timing.generation - episode.timing.model);
  finish(rollout);
  const net::TimePoint scoring = net::Clock::now();
  rubric_.score(task, episode);
  if (episode.error) episode.reward = 0;
  episode.metrics["num_turns"] = static_cast<double>(episode.num_turns());
  episode.timing.scoring = seconds_since(scoring);
  episode.timing.total = seconds_since(begin);
  co_return episode;
}

asio::awaitable<void> MultiTurnEnv::judge(Rollout*, net::TimePoint) const { co_return; }

asio::awaitable<json::array> SingleTurnEnv::respond(Rollout*) const { co_return json::array(); }

}  // namespace prl::env
