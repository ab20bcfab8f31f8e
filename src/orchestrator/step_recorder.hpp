#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "io/checkpoint_dir.hpp"
#include "monitor/monitor.hpp"
#include "net/off_thread.hpp"
#include "orchestrator/batch_collector.hpp"
#include "orchestrator/metrics.hpp"
#include "orchestrator/progress.hpp"
#include "orchestrator/run_control.hpp"

namespace prl::orchestrator {

namespace asio = boost::asio;

struct OrchestratorCheckpoints {
  std::filesystem::path folder;          ///< <output_dir>/checkpoints
  std::optional<std::int64_t> interval;  ///< none: only after the last step
  io::CheckpointRetention retention{};   ///< over steps that both roles have completed; the trainer applies the same
};

/// Records each shipped step: totals, the console line, metrics, rollouts as files, checkpoints. The main coroutine only.
class StepRecorder {
 public:
  struct Options {
    std::filesystem::path output_dir{};  ///< of rollouts/step_N/train_rollouts.jsonl; empty: none are written
    bool log_tokens = false;             ///< also rollouts/step_N/train_tokens.jsonl
    std::optional<OrchestratorCheckpoints> checkpoints{};
    std::optional<std::int64_t> max_steps{};
    std::int64_t resume_step = 0;
    bool is_lock_step = false;
    std::optional<std::filesystem::path> recovery{};  ///< keeps the state before each batch is sent; none: it is not kept
    bool is_recovered = false;                        ///< the state of resume_step is the one kept there, not a checkpoint's
    std::int64_t recorded_step = -1;                  ///< last step whose row the metrics hold already
  };
  /// The state of the batch in collection; the recorder fills in its progress.
  using StateOf = std::function<OrchestratorState()>;
  /// `monitor` is borrowed and may be null; `files` is borrowed.
  StepRecorder(Options options, std::vector<env::EnvironmentPtr> environments, monitor::Monitor* monitor, net::OffThread& files,
               StateOf state_of);

  /// Counts on from the step that the run resumes after. With `with_state`, also reads what was saved there; errors of load_state.
  std::optional<OrchestratorState> resume(bool with_state);
  /// Keeps the state for a process that goes on in this one's place. Call it when the batch in collection is about to be cut.
  asio::awaitable<void> keep_recovery();
  /// Counts the batch into the totals, with its step.
  void count(const CollectedBatch& batch, std::int64_t step);
  /// Logs, writes and saves after batch `facts.step` has shipped and the next one is in collection. `pools` are metrics beside the step's.
  asio::awaitable<void> record(std::shared_ptr<const CollectedBatch> batch, StepFacts facts, monitor::Metrics pools);
  /// The checkpoint at the end of a run, unless the last step has one. In lock-step a stop in the middle of a batch forgets that batch, so
  /// that the resumed run draws it again from its start.
  asio::awaitable<void> save_last();

  bool has_checkpoints() const noexcept { return options_.checkpoints.has_value(); }
  /// A checkpoint is due after this step, whatever the interval.
  void save_after(std::int64_t step) noexcept { save_after_ = step; }

  const Progress& progress() const noexcept { return progress_; }
  bool is_done() const noexcept { return options_.max_steps && progress_.step >= *options_.max_steps; }

 private:
  using StatePtr = std::shared_ptr<const OrchestratorState>;
  asio::awaitable<StatePtr> current_state();
  bool is_checkpoint_due() const;
  asio::awaitable<void> save(StatePtr state, std::function<void()> before_commit);

  Options options_;
  std::vector<env::EnvironmentPtr> environments_;
  monitor::Monitor* monitor_;
  net::OffThread& files_;
  StateOf state_of_;
  Progress progress_;
  StatePtr state_at_ship_;
  std::int64_t saved_step_ = -1, save_after_ = -1;
};

}  // namespace prl::orchestrator
