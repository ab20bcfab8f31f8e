#pragma once

#include <cstdint>
#include <functional>
#include <map>
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
  /// Opens one more conversation with the same model, for environments with several seats or calls at the same time; `suffix` is put
  /// after the rollout's session id. Empty: `client` is all there is.
  std::function<std::unique_ptr<ChatClient>(const std::string& suffix)> open_conversation = {};
  wire::SamplingParams sampling;
  std::optional<std::uint64_t> seed;  ///< when set, turn k is sampled with mix_seed(seed, k): the rollout is replayable
  std::string trajectory_id;
  std::string group_id;                           ///< rollouts of one task that are scored together, if the environment does that
  net::TimePoint deadline;                        ///< of the whole rollout
  std::int64_t max_total_completion_tokens = -1;  ///< sampled over all turns; -1: no limit
  bool is_training = false;  ///< its tokens will be trained on: the sampling is the trainer's, whatever the environment asks for
};

/// A task set with its rules: makes prompts, answers the model, scores. Immutable while rollouts run; any number of
/// rollouts may run at once. Rows may lie in another process: num_tasks and task may then block for as long as it takes to read them.
class Environment {
 public:
  virtual ~Environment() = default;
  /// The name in configs, metrics and samples; unique in a run.
  virtual const std::string& name() const noexcept = 0;
  virtual std::int64_t num_tasks(Split split) const = 0;
  /// `index` in [0, num_tasks(split)). The same index always gives the same task.
  virtual Task task(Split split, std::int64_t index) const = 0;
  /// The same for coroutines, which must not block.
  virtual asio::awaitable<Task> fetch_task(Split split, std::int64_t index) const { co_return task(split, index); }
  /// Whether tasks can be had: starts what the environment needs and waits for it. Error{kNotFound}, {kInvalidArgument},
  /// {kUnavailable} saying what is missing. Roles call it before they load a model.
  virtual void prepare() const {}
  /// Plays the task and scores it. Failures of the model, a tool or the environment become episode.error; only a
  /// cancellation (Error{kCancelled}) is thrown.
  virtual asio::awaitable<Episode> run(Task task, RolloutContext context) const = 0;
  /// Rollouts that train of one episode: agents that learn. What is not known before an episode is played counts as one.
  virtual std::int64_t num_learners() const { return 1; }
  /// True if score_group must see all episodes of a group before rewards are final.
  virtual bool scores_groups() const noexcept { return false; }
  /// Changes rewards and metrics of the episodes of one task, in rollout order; `group` is valid until it ends. Failed episodes are
  /// among them; one that cannot be scored becomes failed. Only a cancellation is thrown.
  virtual asio::awaitable<void> score_group(std::span<Episode> group) const {
    static_cast<void>(group);
    co_return;
  }
  /// What a checkpoint must keep of the environment besides its tasks; null: nothing. Rollouts may run meanwhile.
  virtual asio::awaitable<boost::json::value> save_state() const { co_return boost::json::value(nullptr); }
  /// Goes on from what save_state gave, before any rollout of the process. May block.
  virtual void load_state(const boost::json::value& state) const { static_cast<void>(state); }
  /// Numbers about what the environment runs on, by name: metrics env/<environment>/<name>.
  virtual std::map<std::string, double> gauges() const { return {}; }
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
