#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>

#include "base/run_orders.hpp"
#include "monitor/monitor.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/peer_snapshot.hpp"
#include "trainer/policy.hpp"
#include "trainer/report.hpp"
#include "trainer/step_watch.hpp"

namespace prl::trainer {

/// What the run of any kind of training can be told.
struct TrainRunOptions {
  GradientStepOptions step;                     ///< its max_steps ends the run; none: as long as there are rows
  double peak_flops = 0;                        ///< FLOP/s for perf/mfu, 0 to leave it out
  std::optional<CheckpointOptions> checkpoint;  ///< none: nothing is saved
  std::optional<ResumeOptions> resume;
  std::filesystem::path resume_from;          ///< checkpoints folder; empty: checkpoint->checkpoints
  std::chrono::milliseconds log_interval{0};  ///< between two lines about a step that takes long; 0: none
  RunOrders orders = {};                      ///< pauses and checkpoints that somebody asks for; of rank 0
  bool chooses_checkpoints = false;           ///< no other role has a part in them: the step under way is the one
  std::filesystem::path memory_snapshots;     ///< gets step_N/rank_R.json: the device's memory after each step; empty: none
  bool outlives_errors = false;               ///< an error of one rank ends this run at all of them alike, and they go on with other runs
  std::optional<int> max_losses;    ///< of ranks, which the others survive by copies of each other's state; none: a loss ends the run
  std::function<void()> take_over;  ///< called at a rank that has become rank 0: it opens what rank 0 writes; may be empty
  bool is_newcomer = false;         ///< this rank joins a run that goes on: its state comes from the others
  std::size_t copy_piece_bytes = PeerSnapshots::kPieceBytes;  ///< of the copies that losses are survived with
  bool is_bench = false;                                      ///< kBenchSteps steps, no checkpoints, a table at the end
  std::optional<std::filesystem::path> bench_json;

  /// With is_bench: the options of a benchmark. Call it before anything is made of `step`.
  void apply_bench();
};

struct TrainRunResult {
  std::int64_t last_step = 0;
  std::optional<double> last_loss;  ///< none if nothing was left to train
  bool was_stopped = false;         ///< by the stop token, before max_steps
  std::optional<std::int64_t> last_checkpoint;
};

/// One kind of training as TrainRun drives it: where the rows of a step come from, and who takes the new weights. One thread.
class Training {
 public:
  virtual ~Training() = default;
  virtual GradientStep& gradient_step() = 0;
  /// Called once: training goes on after `progress.step`, whose weights the policy holds.
  virtual void begin(const TrainProgress& progress) = 0;
  /// Waits for the rows of `step`, and adds metrics of its own. False: none follow, or the run was stopped.
  virtual bool next(std::int64_t step, monitor::Metrics& metrics) = 0;
  /// What a user can do about an error of next(). The last step is saved before the run ends, unless this is empty.
  virtual std::string remedy() const { return {}; }
  /// Trains on those rows, and counts. Masters and optimizer are as they were if it throws.
  virtual void step(TrainProgress& progress, monitor::Metrics& metrics) = 0;
  /// After other ranks were lost: training goes on after `progress.step`, to which masters, optimizer and counters went back. Rows of
  /// the next step that this rank has are kept for it.
  virtual void recover(const TrainProgress& progress) = 0;
  /// Whether next() waits by itself while the run is paused, so that other roles which wait for this one see it alive.
  virtual bool waits_while_paused() const { return false; }
  /// Publishes the new weights; false if this training has no receiver for them.
  virtual bool publish() { return false; }
  /// The console line of a step.
  virtual std::string line(std::int64_t step, const monitor::Metrics& metrics) const = 0;
};

/// The whole life of a training run, RL and SFT alike: resume, then wait for rows, train, publish, save and report until max_steps, the
/// end of the rows or a stop. However it ends without an error, the last step is saved if checkpoints are enabled.
class TrainRun {
 public:
  /// All borrowed. `stop` is what a Training looks at; here it only tells how the run ended.
  TrainRun(const TrainRunOptions& options, Policy& policy, Training& training, monitor::Monitor& monitor, std::stop_token stop);
  /// Call once. Errors of the training's members and of saving, which are told to the other ranks; PeerLost of one of theirs.
  TrainRunResult run();
  /// After a loss that ends the run: see TrainerCheckpoints::give_up_on.
  void give_up_on(const comm::PeerLost& lost);

  // The parts of run() of one rank without healing, for a caller that takes several runs through their steps in turns.
  /// Resumes, and publishes the version that the run starts with. Once.
  void begin();
  bool is_done() const { return max_steps_ && progress_.step >= *max_steps_; }
  /// One step; false at the end of the rows.
  bool step();
  /// Saves the last step if it is not saved. Once, after the last step.
  void finish();
  const TrainProgress& progress() const noexcept { return progress_; }
  const TrainRunResult& result() const noexcept { return result_; }

 private:
  TrainRunResult run_on_ranks();
  void begin_as_newcomer();
  /// Admits a restarted rank between two steps.
  void admit_newcomer();
  /// In a new group, which has or has not lost a rank of the old one: takes the state that all of its ranks have. False if one has none
  /// yet.
  bool take_state(bool has_lost);
  /// Called while the exception of a lost rank is handled, which it throws on if the run cannot go on without it.
  void recover(const comm::PeerLost& lost);
  /// One attempt: the ranks that are left go on from the newest step that they all have. False if one more was lost meanwhile;
  /// `also_lost` are then those of the group there was that it does not know to be lost.
  bool regroup(std::chrono::milliseconds grace, std::vector<int>& also_lost);
  void commit_copies();
  /// Does what this rank alone may fail at, with no calls of the group; see TrainRunOptions::outlives_errors.
  void alone(const std::function<void()>& work);
  void resume();
  bool next(std::int64_t step, monitor::Metrics& metrics);
  /// Blocks between two steps while the run is paused.
  void wait_while_paused();
  bool is_checkpoint_due(std::int64_t step);
  void publish(std::int64_t step, monitor::Metrics& metrics);
  void save_last();

  const TrainRunOptions& options_;
  Policy& policy_;
  Training& training_;
  monitor::Monitor& monitor_;
  std::stop_token stop_;
  std::optional<std::int64_t> max_steps_;
  std::optional<TrainerCheckpoints> checkpoints_;
  TrainProgress progress_;
  std::int64_t start_step_ = 0;
  std::optional<PeerSnapshots> copies_;  ///< if losses are survived
  bool has_begun_ = false;
  int num_losses_ = 0;
  std::int64_t generation_ = 0;  ///< of the newest group that was tried
  double recover_seconds_ = 0;
  TrainRunResult result_;
  BenchTable bench_;
  StepWatch watch_;
};

}  // namespace prl::trainer
