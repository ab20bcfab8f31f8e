#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "env/chat_client.hpp"
#include "env/episode.hpp"
#include "env/task.hpp"

namespace prl::env {

/// What one rollout runs with.
struct RolloutContext {
  ChatClient* client = nullptr;  ///< borrowed for the rollout, never null
  wire::SamplingParams sampling;
  std::optional<std::uint64_t> seed;  ///< when set, turn k is sampled with mix_seed(seed, k): the rollout is replayable
  std::string trajectory_id;
  net::TimePoint deadline;  ///< of the whole rollout
};

/// A task set with its rules: makes prompts, answers the model, scores. Immutable while rollouts run; any number of
/// rollouts may run at once on one thread.
class Environment {
 public:
  virtual ~Environment() = default;
  /// The name in configs, metrics and samples; unique in a run.
  virtual const std::string& name() const noexcept = 0;
  virtual std::int64_t num_tasks(Split split) const = 0;
  /// `index` in [0, num_tasks(split)). The same index always gives the same task.
  virtual Task task(Split split, std::int64_t index) const = 0;
  /// Plays the task and scores it. Failures of the model, a tool or the environment become episode.error; only a
  /// cancellation (Error{kCancelled}) is thrown.
  virtual asio::awaitable<Episode> run(Task task, RolloutContext context) const = 0;
  /// True if score_group must see all episodes of a group before rewards are final.
  virtual bool scores_groups() const noexcept { return false; }
  /// Changes rewards and metrics of the episodes of one task, in rollout order. Failed episodes are among them.
  virtual void score_group(std::span<Episode> group) const { static_cast<void>(group); }
  /// Tools that the model is offered for this task, as OpenAI function envelopes.
  virtual boost::json::array tools(const Task& task) const {
    static_cast<void>(task);
    return {};
  }
  /// A good completion (messages after the prompt), for supervised warm-up; nullopt when the environment knows none.
  virtual std::optional<boost::json::array> demonstration(const Task& task) const {
    static_cast<void>(task);
    return std::nullopt;
  }
};

using EnvironmentPtr = std::shared_ptr<const Environment>;

}  // namespace prl::env
