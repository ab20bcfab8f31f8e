#include "env/trace_json.hpp"

#include <fmt/core.h>
#include <openssl/evp.h>

#include <array>
#include <cmath>

#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::env {

namespace json = boost::json;

namespace {

constexpr int kVersion = 1;

std::string sha256_hex(std::string_view bytes) {
  std::array<unsigned char, 32> digest{};
  unsigned int size = 0;
  const int ok = EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr);
  PRL_CHECK(ok == 1 && size == digest.size(), "SHA-256 failed");
  std::string hex;
  for (const unsigned char byte : digest) hex += fmt::format("{:02x}", byte);
  return hex;
}

/// Verifiers' v1 names of the reasons its legacy API has other names for.
std::string stop_name(const std::string& condition) {
  constexpr std::pair<const char*, const char*> kNames[] = {{"max_turns_reached", "max_turns"},
                                                            {"prompt_too_long", "context_length"},
                                                            {"max_total_completion_tokens_reached", "max_output_tokens"},
                                                            {"no_tools_called", "agent_completed"},
                                                            {"has_error", "error"},
                                                            {"timeout_reached", "error"}};
  for (const auto& [legacy, v1] : kNames)
    if (condition == legacy) return v1;
  return condition;
}

json::object span(double start, double seconds) { return json::object{{"start", start}, {"end", start + seconds}}; }

json::array errors_of(const Episode& episode) {
  json::array errors;
  if (episode.error) errors.push_back(json::object{{"type", episode.error->type}, {"message", episode.error->message}});
  return errors;
}

json::object task_of(const Episode& episode) {
  json::object data;
  data["prompt"] = episode.prompt;
  data["answer"] = episode.answer;
  if (!episode.info.empty()) data["info"] = episode.info;
  json::object task;
  const std::string hash = task_hash(data);
  task["type"] = episode.env_name;
  task["data"] = std::move(data);
  task["key"] = hash;
  task["hash"] = hash;
  return task;
}

/// Messages in a line, and the calls that sampled some of them.
void put_conversation(json::object& trace, const Episode& episode, const TraceContext& context) {
  json::array nodes, calls;
  std::size_t turn = 0;
  const auto add = [&](const json::value& message, bool is_sampled) {
    json::object node;
    if (!nodes.empty()) node["parent"] = static_cast<std::int64_t>(nodes.size()) - 1;
    node["message"] = message;
    node["sampled"] = is_sampled;
    nodes.push_back(std::move(node));
  };
  for (const json::value& message : episode.prompt) add(message, false);
  for (const json::value& message : episode.completion) {
    const bool is_sampled = turn < episode.trajectory.size() && message == json::value(episode.trajectory[turn].completion);
    if (is_sampled) {
      const TrajectoryStep& step = episode.trajectory[turn++];
      json::object call;
      call["node"] = static_cast<std::int64_t>(nodes.size());
      call["model"] = context.model;
      if (!step.finish_reason.empty()) call["finish_reason"] = step.finish_reason;
      call["usage"] = json::object{{"prompt_tokens", step.num_prompt_tokens}, {"completion_tokens", step.num_completion_tokens}};
      if (step.has_versions) call["policy"] = json::object{{"start", step.version_start.value}, {"end", step.version_end.value}};
      calls.push_back(std::move(call));
    }
    add(message, is_sampled);
  }
  trace["nodes"] = std::move(nodes);
  trace["calls"] = std::move(calls);
}

}  // namespace

std::string task_hash(const json::object& data) {
  json::object kept;
  for (const auto& member : data)
    if (!member.value().is_null()) kept[member.key()] = member.value();
  return sha256_hex(text::dump_python(kept, {.ensure_ascii = true, .sort_keys = true}));
}

json::object to_trace_json(const Episode& episode, const TraceContext& context) {
  const json::object task = task_of(episode);
  const bool is_ok = !episode.error.has_value();
  json::object trace;
  trace["version"] = kVersion;
  trace["id"] = episode.trajectory_id + "-0";
  trace["task"] = task;
  trace["agent"] = json::object{{"config", json::object{{"model", context.model}}}, {"name", "policy"}, {"trainable", true}};
  trace["tools"] = episode.tool_defs;
  put_conversation(trace, episode, context);
  json::object rewards;
  if (std::isfinite(episode.reward)) rewards["reward"] = json::object{{"score", episode.reward}, {"weight", 1.0}};
  trace["rewards"] = std::move(rewards);
  json::object metrics;
  for (const auto& [name, value] : episode.metrics)
    if (std::isfinite(value)) metrics[name] = value;
  trace["metrics"] = std::move(metrics);
  trace["info"] = json::object();
  trace["is_completed"] = episode.is_completed;
  trace["ok"] = is_ok;
  if (!episode.stop_condition.empty()) trace["stop_condition"] = stop_name(episode.stop_condition);
  trace["errors"] = errors_of(episode);
  json::object agent = span(episode.timing.start_time, episode.timing.generation);
  agent["model"] = json::object{{"duration", episode.timing.model}};
  agent["harness"] = json::object{{"duration", episode.timing.env}};
  json::object timing;
  timing["start"] = episode.timing.start_time;
  timing["agent"] = std::move(agent);
  timing["scoring"] = span(episode.timing.start_time + episode.timing.generation, episode.timing.scoring);
  trace["timing"] = std::move(timing);

  json::object row;
  row["version"] = kVersion;
  row["id"] = episode.trajectory_id;
  row["env"] = json::object{{"id", episode.env_name}, {"name", episode.env_name}};
  row["task"] = task;
  row["group"] = json::object{{"id", fmt::format("{}-{}", context.run_id, episode.example_id)}};
  json::object run{{"type", "eval"}, {"id", context.run_id}};
  if (const auto start = episode.version_start(), end = episode.version_end(); start && end) {
    json::object work{{"type", "eval"}};
    work["policy"] = json::object{{"start", start->value}, {"end", end->value}};
    run["work"] = std::move(work);
  }
  row["run"] = std::move(run);
  row["ok"] = is_ok;
  row["errors"] = errors_of(episode);
  json::array traces;
  traces.push_back(std::move(trace));
  row["traces"] = std::move(traces);
  return row;
}

}  // namespace prl::env
