#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>

#include "monitor/monitor.hpp"
#include "rollouts/sample_queue.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"
#include "trainer/replay.hpp"
#include "trainer/report.hpp"
#include "trainer/train_run.hpp"
#include "weights/weight_channel.hpp"
#include "weights/weight_server.hpp"

namespace prl::trainer {

/// The RL trainer without its surroundings: batches in, metrics out. Step N consumes batch N and makes policy version N. One thread.
class RlTrainer {
 public:
  /// `peak_flops` in FLOP/s for perf/mfu, 0 to leave it out; no row may be longer than `seq_len`.
  RlTrainer(Policy& policy, GradientStepOptions options, std::int64_t seq_len, double peak_flops);

  /// One optimizer step. Metrics: loss, optim, perf, times of the step itself, entropy, mismatch_kl and those of the loss.
  /// Error{kCorrupt} if a row is unsound or longer than seq_len, Error{kInvalidArgument} if the batch is not of the next step,
  /// Error{kNonFinite}; each names the step and the environment.
  monitor::Metrics step(const rollouts::RankBatch& batch);

  Policy& policy() noexcept { return policy_; }
  GradientStep& gradient_step() noexcept { return gradient_step_; }
  const TrainProgress& progress() const noexcept { return progress_; }
  void restore_progress(const TrainProgress& progress) { progress_ = progress; }

 private:
  void check(const rollouts::RankBatch& batch, std::int64_t step) const;

  Policy& policy_;
  GradientStep gradient_step_;
  std::int64_t seq_len_;
  PeakFlops peak_;
  TrainProgress progress_;
};

struct RlRunOptions : TrainRunOptions {
  std::int64_t seq_len = 2048;
  std::filesystem::path broadcasts;                ///< of a filesystem channel: versions after the start are removed first; may be empty
  std::chrono::milliseconds first_notice{10'000};  ///< a wait for samples says so after this long (base/waiting.hpp)
  std::chrono::milliseconds batch_timeout{2 * 3'600'000};  ///< and ends the run after this long
  /// After a stop the batches that were sent already are still trained on, at most this many, so that trainer and orchestrator
  /// end at the same step and no rollout is lost. The run waits `stop_grace` for each, and for word that there are no more.
  std::int64_t max_steps_after_stop = 0;
  std::chrono::milliseconds stop_grace{5000};
  std::stop_token abort;  ///< another role failed: ends after the step in hand
  /// Ranks that send engines a part of new weights each, the first ones, where all have whole weights; from 2 on each rank has a `sender`.
  int num_senders = 1;
  std::shared_ptr<weights::WeightServer> sender;
  // Both the same at all ranks, of which the first one does the work.
  std::shared_ptr<StepRecorder> recorder;  ///< keeps what each step trained on and made; may be null
  /// The samples are those that another run recorded, whose weights are to be made again; their end is that of the run. May be null.
  std::shared_ptr<Replay> replay;
};

/// Makes the sample source once the first step is known (a resume decides it).
using ReceiverFactory = std::function<std::unique_ptr<rollouts::SampleReceiver>(std::int64_t first_step)>;

/// One of several runs that a caller takes through their steps in turns, each by itself as run_rl_trainer would. One thread. On several
/// ranks all of them make the same calls but for those of rank 0, which is asked for the samples.
class RlRun {
 public:
  /// `policy` and `monitor` are borrowed, and so is `channel`, which may be null.
  RlRun(RlRunOptions options, Policy& policy, ReceiverFactory make_receiver, weights::WeightChannel* channel, monitor::Monitor& monitor);
  ~RlRun();
  /// Resumes, and publishes the version that the run starts with. Once. What run_rl_trainer throws.
  void begin();
  /// At rank 0: true if step() would not wait: its samples are there, or none follow. Error{kDeadline} after batch_timeout without samples.
  bool is_ready();
  /// At rank 0, of one that is ready: whether there is no step to take.
  bool is_at_end() const;
  /// A run that is not stepped on purpose waits for nothing: the batch_timeout begins anew.
  void forgive_waiting();
  bool is_done() const;
  /// One step of a run that is not at its end; false if it has been.
  bool step();
  /// Saves the last step if it is not saved.
  TrainRunResult finish();
  /// After a loss that ends the group: a save in the background waits no more for those ranks.
  void give_up_on(const comm::PeerLost& lost);
  const TrainProgress& progress() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A TrainRun over samples of the queue: publishes the starting version, then every step's, until max_steps, the end of the samples, or
/// `stop` (which ends between two steps, see max_steps_after_stop).
///
/// `channel` may be null (fake data, benchmarks). Errors  Error{kDeadline} if no batch came within batch_timeout, {kUnavailable}
/// if the samples ended before max_steps, and what step, publish and save throw.
TrainRunResult run_rl_trainer(const RlRunOptions& options, Policy& policy, const ReceiverFactory& make_receiver,
                              weights::WeightChannel* channel, monitor::Monitor& monitor, std::stop_token stop);

}  // namespace prl::trainer
