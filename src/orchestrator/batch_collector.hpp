#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "env/environment.hpp"
#include "orchestrator/algo/advantage.hpp"
#include "orchestrator/dispatcher.hpp"
#include "orchestrator/rollout_filter.hpp"
#include "orchestrator/trajectories.hpp"
#include "wire/training.hpp"

namespace prl::orchestrator {

/// Batches in a row without anything to train on, after which a run ends (spec 3.5, steps 7 and 8).
constexpr std::int64_t kMaxEmptyBatches = 10;

/// Closed interval.
struct AdvantageRange {
  double min = 0;
  double max = 0;
};

/// A finding of an external filter about a rollout.
struct FilterFinding {
  std::string filter;
  bool enforce = true;  ///< the rollout is dropped
};

struct CollectorOptions {
  std::int64_t batch_size = 128;                 ///< rollouts per step
  std::optional<std::int64_t> token_batch_size;  ///< instead: the shortest prefix of the queue with so many tokens
  std::int64_t max_rollout_tokens = 2048;        ///< expected of a rollout until the first has come
  AdvantageOptions advantage;
  std::map<std::int64_t, AdvantageOptions> env_advantages;  ///< by env_idx, where an environment has its own
  /// By env_idx: a group whose advantages all lie in one of these ranges is not trained on. Source: spec 3.7.
  std::map<std::int64_t, std::vector<AdvantageRange>> gates;
  TrajectoryStrategy strategy = TrajectoryStrategy::kInterleaved;
  SampleLoss loss = SampleLoss::kPolicyGradient;
  bool filter_zero_advantages = true;        ///< do not train on tokens whose advantage is exactly 0
  bool online_difficulty_filtering = false;  ///< groups with mean reward exactly 0 or 1 do not count
  bool skip_verification = false;            ///< all rewards are 0
  std::vector<RolloutFilterOptions> filters;
};

/// A whole group, rollouts in the order of their episodes and then of the seats.
struct FinishedGroup {
  GroupId id;
  TaskRef task;
  std::int64_t step = 0;                 ///< batch in collection when it was opened
  PolicyVersion version;                 ///< of the engines at its opening
  std::vector<env::Episode> episodes;    ///< rollouts, `others` moved out of them
  std::vector<TurnScores> scores;        ///< of each rollout, by a teacher; empty: there is none
  std::vector<float> advantages = {};    ///< of each rollout, by a function of the environment's; empty: those of CollectorOptions
  std::vector<std::int64_t> plays = {};  ///< of each rollout: its episode in the group; empty: one rollout each
  std::vector<std::optional<FilterFinding>> filter_findings = {};  ///< of each rollout; empty: no such filters
  std::vector<EchoMask> echo_masks = {};                           ///< of each rollout; empty: no such filter
};

/// A rollout that waits for its batch, or ships with it. Its episode no longer holds token ids: they are in `samples`.
struct ReadyRollout {
  GroupId group;
  TaskRef task;
  PolicyVersion version_start;
  PolicyVersion version_end;
  env::Episode episode;
  float advantage = 0;
  std::vector<wire::TrainingSample> samples;
  std::vector<std::string> filters_matched;
  std::int64_t num_tokens() const;
};

/// Everything that arrived between two batches, for metrics; the shipped batch itself is CollectedBatch.
struct CollectorWindow {
  struct PerEnv {
    std::int64_t num_rollouts = 0;  ///< arrived
    std::int64_t num_errored = 0;
    std::int64_t num_empty = 0;  ///< without any sampled token
    std::int64_t num_groups = 0;
    std::int64_t num_groups_dropped = 0;               ///< no survivor, or refused by online difficulty filtering or a gate
    std::int64_t num_solve_none = 0;                   ///< groups whose rewards are all 0
    std::int64_t num_solve_all = 0;                    ///< groups whose rewards are all 1
    std::map<std::string, std::int64_t> num_filtered;  ///< by filter
  };
  std::map<std::string, PerEnv> envs;
  std::int64_t num_dropped_stale = 0;  ///< finished rollouts that became too old in the queue
};

struct CollectedBatch {
  std::vector<ReadyRollout> rollouts;         ///< the batch as cut
  std::vector<wire::TrainingSample> samples;  ///< what trains, in rollout order; empty: nothing to train on
  std::int64_t num_trainable = 0;             ///< rollouts with at least one sample in `samples`
  CollectorWindow window;
};

/// From finished groups to training batches: advantages, filters, samples, and the queue of rollouts that wait.
/// Synchronous; the result depends on the groups and their order alone. The queue holds rollouts of older versions before those of
/// newer ones, so that nothing becomes too old while something newer ships; within a version, in the order of arrival.
class BatchCollector {
 public:
  explicit BatchCollector(CollectorOptions options);

  struct Added {
    bool is_admitted = false;  ///< its survivors are in the queue
    double mean_reward = 0;    ///< over survivors; meaningful when has_survivors
    bool has_survivors = false;
    std::int64_t num_queued = 0;  ///< rollouts that joined the queue
  };
  /// Scores the group and queues its survivors: no error, at least one sampled token, no enforced filter.
  /// Error{kUnavailable} after ten batches' worth of rollouts in a row gave nothing, with the last failure's text.
  Added add(FinishedGroup group, const env::Environment& environment);
  /// Removes rollouts whose version_start makes `is_stale` true; answers how many.
  std::int64_t drop_stale(const std::function<bool(PolicyVersion)>& is_stale);

  std::int64_t num_queued() const noexcept { return static_cast<std::int64_t>(queue_.size()); }
  bool is_ready() const noexcept;
  /// The queue as the dispatcher counts it.
  Backlog backlog() const;
  /// Cuts the next batch off the queue (which must be ready) and prunes it. No backfill: it may hold fewer samples than
  /// rollouts, or none.
  CollectedBatch take();

  /// The queue, for checkpoints.
  const std::deque<ReadyRollout>& queue() const noexcept { return queue_; }
  void restore_queue(std::deque<ReadyRollout> queue) { queue_ = std::move(queue); }

 private:
  void count_nothing(std::int64_t num_rollouts);
  std::optional<ReadyRollout> to_rollout(const FinishedGroup& group, std::size_t index, const std::string& env_name,
                                         CollectorWindow::PerEnv& counts);
  std::vector<float> advantages_of(const FinishedGroup& group, const std::vector<ReadyRollout>& survivors,
                                   const std::vector<std::size_t>& places);
  const AdvantageOptions& algorithm_of(std::int64_t env_idx) const;
  bool is_rejected(std::int64_t env_idx, const std::vector<float>& advantages) const;
  void queue_up(ReadyRollout rollout, float advantage);

  CollectorOptions options_;
  std::deque<ReadyRollout> queue_;
  std::map<std::int64_t, std::map<std::string, double>> reward_averages_;  ///< of algorithm rae, by env_idx and seat; not in checkpoints
  CollectorWindow window_;
  std::int64_t num_admitted_ = 0;
  std::int64_t num_admitted_tokens_ = 0;
  std::int64_t num_without_output_ = 0;  ///< rollouts in a row that gave nothing
  std::string last_failure_;
};

}  // namespace prl::orchestrator
