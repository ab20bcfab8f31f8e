#include "env/episode.hpp"

#include <algorithm>
#include <cmath>

namespace prl::env {

namespace json = boost::json;

std::int64_t Episode::num_prompt_tokens() const { return trajectory.empty() ? 0 : trajectory.front().num_prompt_tokens; }

std::int64_t Episode::num_input_tokens() const {
  std::int64_t sum = 0;
  for (const TrajectoryStep& step : trajectory) sum += step.num_prompt_tokens;
  return sum;
}

std::int64_t Episode::num_completion_tokens() const {
  std::int64_t sum = 0;
  for (const TrajectoryStep& step : trajectory) sum += step.num_completion_tokens;
  return sum;
}

std::int64_t Episode::num_final_tokens() const {
  return trajectory.empty() ? 0 : trajectory.back().num_prompt_tokens + trajectory.back().num_completion_tokens;
}

std::optional<PolicyVersion> Episode::version_start() const {
  if (trajectory.empty() || !trajectory.front().has_versions) return std::nullopt;
  return trajectory.front().version_start;
}

std::optional<PolicyVersion> Episode::version_end() const {
  if (trajectory.empty() || !trajectory.back().has_versions) return std::nullopt;
  return trajectory.back().version_end;
}

namespace {

/// [{"type": "function", "function": {name, ...}}] to [{name, ...}].
json::array flat_tools(const json::array& tools) {
  json::array flat;
  for (const json::value& tool : tools) {
    const json::object* envelope = tool.if_object();
    const json::value* function = envelope != nullptr ? envelope->if_contains("function") : nullptr;
    flat.push_back(function != nullptr ? *function : tool);
  }
  return flat;
}

json::value number(double value) { return std::isfinite(value) ? json::value(value) : json::value(nullptr); }

}  // namespace

json::object to_json(const Episode& episode) {
  json::object row;
  row["example_id"] = episode.example_id;
  row["task"] = episode.env_name;
  row["prompt"] = episode.prompt;
  row["completion"] = episode.completion;
  row["answer"] = episode.answer;
  row["info"] = episode.info;
  row["reward"] = number(episode.reward);
  if (episode.error) {
    json::object error;
    error["error"] = episode.error->type;
    error["message"] = episode.error->message;
    row["error"] = std::move(error);
  } else {
    row["error"] = nullptr;
  }
  json::object timing;
  timing["start_time"] = number(episode.timing.start_time);
  timing["generation"] = number(episode.timing.generation);
  timing["model"] = number(episode.timing.model);
  timing["env"] = number(episode.timing.env);
  timing["scoring"] = number(episode.timing.scoring);
  timing["total"] = number(episode.timing.total);
  row["timing"] = std::move(timing);
  row["is_completed"] = episode.is_completed;
  row["is_truncated"] = episode.is_truncated;
  row["stop_condition"] = episode.stop_condition.empty() ? json::value(nullptr) : json::value(episode.stop_condition);
  json::object metrics;
  for (const auto& [name, value] : episode.metrics) metrics[name] = number(value);
  row["metrics"] = std::move(metrics);
  row["tool_defs"] = flat_tools(episode.tool_defs);
  json::object usage;
  // A later prompt may leave out earlier replies or their reasoning; more was sampled then than the last context holds.
  const std::int64_t final_output = std::min(episode.num_completion_tokens(), episode.num_final_tokens());
  usage["input_tokens"] = episode.num_input_tokens();
  usage["output_tokens"] = episode.num_completion_tokens();
  usage["final_input_tokens"] = episode.num_final_tokens() - final_output;
  usage["final_output_tokens"] = final_output;
  row["token_usage"] = std::move(usage);
  row["completion_len"] = episode.num_completion_tokens();
  row["num_turns"] = episode.num_turns();
  row["trajectory_id"] = episode.trajectory_id;
  json::object policy;
  const auto start = episode.version_start();
  const auto end = episode.version_end();
  policy["start"] = start ? json::value(start->value) : json::value(nullptr);
  policy["end"] = end ? json::value(end->value) : json::value(nullptr);
  row["policy"] = std::move(policy);
  if (!episode.seat.empty()) row["seat"] = episode.seat;
  for (const auto& [name, value] : episode.metrics)
    if (!row.contains(name)) row[name] = number(value);
  return row;
}

}  // namespace prl::env
