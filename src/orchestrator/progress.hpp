#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "env/environment.hpp"
#include "orchestrator/batch_collector.hpp"
#include "orchestrator/task_sampler.hpp"

namespace prl::orchestrator {

/// Totals since the start of the run, the shipped step included.
struct Progress {
  std::int64_t step = 0;            ///< last step shipped
  std::int64_t total_tokens = 0;    ///< in shipped rollouts, prompts included
  std::int64_t total_samples = 0;   ///< shipped rollouts
  std::int64_t total_problems = 0;  ///< groups that shipped rollouts came from
};

/// What the orchestrator owns and a resumed run needs: progress, random state and pools, tasks in flight, and rollouts that
/// are finished but not yet shipped. In lock-step a run resumed from it continues bit for bit.
struct OrchestratorState {
  Progress progress;
  boost::json::object sampler;
  std::vector<TaskRef> unfinished_tasks;
  std::deque<ReadyRollout> queue;
  boost::json::object env_states;  ///< what environments keep besides their tasks, by name
};

/// Subfolder of the output folder with the state from which a restarted orchestrator continues the same run after a kill. A state is
/// written before its batch is sent, and its queue begins with that batch, so that the restarted process sends it again.
inline constexpr const char* kRecoveryFolder = "recovery";
/// The newest whole state there, as the step it was saved after; nullopt if there is none.
std::optional<std::int64_t> newest_recovery(const std::filesystem::path& folder);
/// Saves `state` as the only one there. Error{kIo}.
void keep_recovery(const std::filesystem::path& folder, const OrchestratorState& state,
                   const std::vector<env::EnvironmentPtr>& environments);
/// Removes the states there, and the folder if nothing else is in it.
void drop_recovery(const std::filesystem::path& folder);

/// The orchestrator's part of a checkpoint.
inline constexpr const char* kCheckpointUnit = "orchestrator";
/// Writes state.json as that unit of the checkpoint of progress.step (io/checkpoint_dir.hpp). An older one of the same
/// step is replaced. Error{kIo}.
/// `before_commit` is called before the part counts.
void save_state(const std::filesystem::path& checkpoints, const OrchestratorState& state,
                const std::vector<env::EnvironmentPtr>& environments, const std::function<void()>& before_commit = {});
/// Error{kNotFound} naming the folder; Error{kCorrupt} naming file and reason; Error{kInvalidArgument} when a saved rollout
/// belongs to an environment that the run does not have.
OrchestratorState load_state(const std::filesystem::path& checkpoints, std::int64_t step,
                             const std::vector<env::EnvironmentPtr>& environments);

}  // namespace prl::orchestrator
