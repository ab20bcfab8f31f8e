#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "env/chat_client.hpp"

namespace prl::env {

/// Why an episode failed: `type` is the class of the failure ("ModelError", "ToolError", ...), see spec 3.1 of verifiers.
struct EpisodeError {
  std::string type;
  std::string message;
  bool is_transient = true;  ///< the same attempt may succeed later: a lost connection, a busy server, a broken reply
  bool refuses_all = false;  ///< the model's service would refuse every other request too: a wrong key, no such model
  /// What the model sampled was not valid: with the same seed it would come again. A lost connection says nothing about the reply, so
  /// a retry after it keeps the seed, and the run stays replayable.
  bool is_invalid_reply() const { return type == "InvalidModelResponseError"; }
};

/// Wall-clock seconds. `start_time` is Unix time; the rest are durations.
struct EpisodeTiming {
  double start_time = 0;
  double generation = 0;  ///< the whole rollout, environment included
  double model = 0;       ///< waiting for the model
  double env = 0;         ///< inside the environment: generation - model
  double scoring = 0;
  double total = 0;
};

/// One model call within an episode.
struct TrajectoryStep {
  boost::json::array prompt;       ///< the whole conversation before the call
  boost::json::object completion;  ///< the assistant message
  TurnTokens tokens;               ///< empty when has_tokens is false
  bool has_tokens = false;
  std::string finish_reason;
  bool is_truncated = false;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_completion_tokens = 0;
  bool has_versions = false;  ///< whether the server told which policy sampled
  PolicyVersion version_start;
  PolicyVersion version_end;
};

/// One attempt at a task, finished. Errors are data here: a failed episode has `error` and what happened until then.
struct Episode {
  std::string trajectory_id;
  std::int64_t example_id = 0;
  std::string env_name;
  boost::json::array prompt;
  boost::json::array completion;  ///< everything after the prompt: replies, tool results, environment messages
  std::string answer;
  boost::json::object info;
  /// Of the largest rewards, whose differences' squares single precision still holds.
  static constexpr double kMaxReward = 1e18;
  double reward = 0;
  std::map<std::string, double> metrics;  ///< every reward function's score and every metric, by name
  std::string stop_condition;             ///< "max_turns_reached", "prompt_too_long", "no_tools_called", "has_error", ...
  bool is_completed = false;
  bool is_truncated = false;
  std::optional<EpisodeError> error;
  EpisodeTiming timing;
  std::vector<TrajectoryStep> trajectory;
  boost::json::array tool_defs;
  float temperature = 1.0f;        ///< the rollout was sampled with
  std::string seat;                ///< whose rollout it is, where several agents play one episode; else empty
  std::optional<float> advantage;  ///< given by the environment; then no algorithm computes one
  /// Rollouts of further seats that learn, in training: the same task and error, each with trajectory, reward and session of its own.
  std::vector<Episode> others;

  std::int64_t num_turns() const { return static_cast<std::int64_t>(trajectory.size()); }
  std::int64_t num_prompt_tokens() const;      ///< of the first turn
  std::int64_t num_input_tokens() const;       ///< read by the model: the prompts of all turns, with what they repeat
  std::int64_t num_completion_tokens() const;  ///< sampled, in all turns
  std::int64_t num_final_tokens() const;       ///< of the last context: prompt and completion of the last turn
  /// Versions of the first and the last sampled token; nullopt when there is none or they are not known.
  std::optional<PolicyVersion> version_start() const;
  std::optional<PolicyVersion> version_end() const;
};

/// One line of train_rollouts.jsonl, eval_rollouts.jsonl and results.jsonl, in the field names of verifiers. Metrics are
/// repeated at the top level where no field has their name; numbers that are not finite become null. Tools are flat there
/// ({name, description, parameters}). token_usage: input_tokens and output_tokens add up over the calls; final_output_tokens are the
/// sampled tokens in the last context, final_input_tokens the rest of it. `seat` is there where the episode has several. `others` are rows
/// of their own.
boost::json::object to_json(const Episode& episode);

}  // namespace prl::env
