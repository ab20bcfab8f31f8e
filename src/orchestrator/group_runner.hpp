#pragma once

#include <boost/json/array.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "env/chat_client.hpp"
#include "env/environment.hpp"
#include "env/prompt_scorer.hpp"
#include "env/rollout_attempt.hpp"
#include "env/state_headers.hpp"
#include "net/task_group.hpp"
#include "orchestrator/batch_collector.hpp"
#include "orchestrator/dispatcher.hpp"
#include "orchestrator/env_activity.hpp"
#include "orchestrator/reference_scoring.hpp"

namespace prl::orchestrator {

namespace asio = boost::asio;

/// A number for each of the given rollouts, which are rows of train_rollouts.jsonl of one group.
using GroupFunction = std::function<asio::awaitable<std::vector<float>>(boost::json::array rollouts)>;

/// Which tokens of others each of the rollouts learns; rows as for GroupFunction, with `branches` (echo_branches).
using EchoFilter = std::function<asio::awaitable<std::vector<EchoMask>>(boost::json::array rollouts)>;

/// A filter of rollouts outside this program: anything but 0 finds one.
struct GroupFilter {
  std::string name;
  bool enforce = true;  ///< drop what is found, instead of only counting it
  GroupFunction find;
};

/// One train environment with how it is sampled.
struct TrainEnv {
  env::EnvironmentPtr environment;
  wire::SamplingParams sampling;
  std::chrono::milliseconds rollout_timeout{1'800'000};
  int max_retries = 3;                            ///< more attempts after a model or inference failure, 1, 2, 4, ... x retry_wait apart
  std::int64_t max_total_completion_tokens = -1;  ///< sampled in one rollout; -1: no limit
  bool wants_roles = false;                       ///< what others say in its rollouts is trained on: TurnTokens::prompt_roles is needed
  GroupFunction rewards = {};                     ///< in place of the environment's; empty: those
  std::vector<GroupFilter> filters{};             ///< asked in their order, the first that finds a rollout counts
  GroupFunction advantages = {};                  ///< empty: those of the collector's options
  EchoFilter echo_filter = {};                    ///< empty: all that wants_roles is about
};

/// Where every episode went: started == processed + cancelled + dropped + (in flight at the end).
struct EpisodeCounts {
  std::int64_t num_started = 0;
  std::int64_t num_processed = 0;  ///< handed out with its whole group
  std::int64_t num_cancelled = 0;  ///< still running when its group was dropped, or at the end
  std::int64_t num_dropped = 0;    ///< finished, but its group was dropped or never completed
};

struct GroupRunnerOptions {
  bool ordered = false;     ///< hand groups out in the order of dispatch, not of completion
  std::uint64_t seed = 42;  ///< of environments whose sampling has none
  std::chrono::milliseconds retry_wait{1'000};
  ReferenceScoring scoring;                           ///< with a teacher; its strategy, the collector's, always
  env::StateHeaders headers_from_state = {};          ///< of the requests of rollouts
  env::StateHeaders teacher_headers_from_state = {};  ///< of requests that score them
};

/// Time that teachers took, over the episodes since it was last asked.
struct ScoringTime {
  double seconds = 0;
  std::int64_t num_episodes = 0;
};

/// Plays the episodes that the dispatcher starts and gathers them into whole groups.
///
/// Each episode is a coroutine on the given executor; every started episode ends in exactly one of EpisodeCounts. Each request is
/// sampled with a seed derived from (seed, step, place of the group in the step, task, rollout, number of invalid replies
/// before, turn). With a teacher, an episode
/// ends when its tokens are scored; scoring alone is tried again as a failed episode is, and counts as one if that does not help.
/// One thread: the executor's.
class GroupRunner {
 public:
  GroupRunner(asio::any_io_executor executor, GroupRunnerOptions options, std::vector<TrainEnv> environments,
              std::shared_ptr<env::ChatClientFactory> chat, std::shared_ptr<env::PromptScorer> teacher = nullptr);

  /// Called after each episode that ended in an open group.
  void on_episode_end(std::function<void(GroupId)> callback) { on_episode_end_ = std::move(callback); }
  void start(const EpisodeStart& info);
  /// A whole group, removed; nullopt when none is complete (or, if ordered, the oldest open one is not).
  std::optional<FinishedGroup> take_finished();
  /// Cancels what runs of the group and forgets the rest. No effect if it is not open.
  void drop(GroupId id);
  /// Open groups, oldest first.
  std::vector<GroupId> open_groups() const;
  void drop_all();
  /// Frees dropped groups whose coroutines have ended. Call it periodically.
  void reap();
  ScoringTime take_scoring_time() { return std::exchange(scoring_time_, {}); }
  const EpisodeCounts& counts() const noexcept { return counts_; }
  const std::vector<TrainEnv>& environments() const noexcept { return environments_; }

 private:
  struct OpenGroup {
    EpisodeStart info;
    std::vector<std::optional<env::Episode>> episodes;
    std::vector<std::vector<TurnScores>> scores;                ///< of each episode and its further seats; with a teacher
    std::vector<float> advantages;                              ///< of each rollout, where the environment has its own function for them
    std::vector<std::optional<FilterFinding>> filter_findings;  ///< of each rollout, where the environment has filters
    std::vector<EchoMask> echo_masks;                           ///< of each rollout, where the environment has such a filter
    std::int64_t num_started = 0;
    std::int64_t num_done = 0;
    bool is_scored = false;  ///< all have ended, and the environment has scored them together if it does that
    std::unique_ptr<net::TaskGroup> tasks;
  };
  env::RolloutState state_of(const EpisodeStart& info, std::string_view trajectory_id) const;
  asio::awaitable<env::Episode> play(EpisodeStart info, env::RolloutAttempt attempt);
  asio::awaitable<std::optional<env::Episode>> play_until_done(EpisodeStart info);
  asio::awaitable<std::optional<TurnScores>> score_until_done(EpisodeStart info, env::Episode* episode);
  asio::awaitable<std::optional<std::vector<TurnScores>>> score_seats(EpisodeStart info, env::Episode* episode);
  asio::awaitable<void> wait_to_retry(EpisodeStart info, int attempt, std::string reason);
  asio::awaitable<void> run(EpisodeStart info);
  asio::awaitable<bool> score_group(EpisodeStart info);
  asio::awaitable<bool> finish_group(EpisodeStart info);
  asio::awaitable<bool> ask_rewards(EpisodeStart info);
  asio::awaitable<bool> ask_filters(EpisodeStart info);
  asio::awaitable<bool> ask_advantages(EpisodeStart info);
  asio::awaitable<bool> ask_echo(EpisodeStart info);
  template <class Answer>
  using Ask = std::function<asio::awaitable<std::vector<Answer>>(boost::json::array rollouts)>;
  template <class Answer>
  asio::awaitable<std::optional<std::vector<std::optional<Answer>>>> ask(EpisodeStart info, Ask<Answer> function, std::string error_type,
                                                                         bool with_branches = false);
  bool keep(const EpisodeStart& info, env::Episode episode, std::vector<TurnScores> scores);

  asio::any_io_executor executor_;
  GroupRunnerOptions options_;
  std::vector<TrainEnv> environments_;
  struct Watched {
    std::string lane;  ///< of its rollouts, in traces
    std::shared_ptr<EnvActivity> activity;
    std::shared_ptr<env::ChatClientFactory> chat;  ///< the service, whose calls the activity hears of
  };
  std::vector<Watched> watched_;                ///< one per environment
  std::shared_ptr<env::PromptScorer> teacher_;  ///< null: none
  ScoringTime scoring_time_;
  std::function<void(GroupId)> on_episode_end_;
  std::map<std::int64_t, OpenGroup> groups_;
  std::deque<std::int64_t> finished_;  ///< complete groups in order of completion
  std::map<std::int64_t, std::unique_ptr<net::TaskGroup>> cancelled_;
  EpisodeCounts counts_;
  std::int64_t num_unreported_failures_ = 0;
  net::TimePoint next_report_;
};

}  // namespace prl::orchestrator
