#include "trainer/train_run.hpp"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/spans.hpp"
#include "base/units.hpp"
#include "comm/admission.hpp"
#include "comm/store.hpp"
#include "trainer/agreement.hpp"

namespace prl::trainer {

using Clock = std::chrono::steady_clock;

namespace {

/// For ranks that have noticed a loss to say so.
constexpr std::chrono::milliseconds kRegroupGrace{5000};
/// Groups with one rank more than the one before count on by one, those with fewer by this much. So ranks of a group mean the same by its
/// next attempt to regroup even if some of them have tried to let a newcomer in meanwhile, and no two groups share a generation.
constexpr std::int64_t kEpoch = 1000;

/// How often a paused run looks whether it goes on.
constexpr std::chrono::milliseconds kPausePoll{100};

/// The watch stands still when the step is over, however it ends.
class WatchedStep {
 public:
  explicit WatchedStep(StepWatch& watch) : watch_(watch) {}
  WatchedStep(const WatchedStep&) = delete;
  WatchedStep& operator=(const WatchedStep&) = delete;
  ~WatchedStep() { watch_.end(); }

 private:
  StepWatch& watch_;
};

}  // namespace

void TrainRunOptions::apply_bench() {
  if (!is_bench) return;
  log::warning("benchmark mode: {} steps, no checkpoints", kBenchSteps);
  step.max_steps = kBenchSteps;
  checkpoint.reset();
}

TrainRun::TrainRun(const TrainRunOptions& options, Policy& policy, Training& training, monitor::Monitor& monitor, std::stop_token stop)
    : options_(options),
      policy_(policy),
      training_(training),
      monitor_(monitor),
      stop_(std::move(stop)),
      max_steps_(options.step.max_steps),
      bench_(device_memory_gib(*policy.context().runtime)),
      watch_(options.log_interval) {
  if (options_.checkpoint) checkpoints_.emplace(*options_.checkpoint);
  training_.gradient_step().on_row([this](std::int64_t done, std::int64_t total) { watch_.set_rows(done, total); });
}

void TrainRun::alone(const std::function<void()>& work) {
  if (options_.outlives_errors)
    agree(training_.gradient_step().ranks(), work);
  else
    work();
}

void TrainRun::resume() {
  const std::filesystem::path root =
      options_.resume_from.empty() && options_.checkpoint ? options_.checkpoint->checkpoints : options_.resume_from;
  GradientStep& gradient_step = training_.gradient_step();
  // Rank 0 looks for all: another that looks later might find another step.
  double found = -1;
  alone([&] {
    if (gradient_step.ranks().rank() == 0 && options_.resume && !root.empty())
      if (const auto step = find_resume_step(root, *options_.resume)) found = static_cast<double>(*step);
  });
  found = gradient_step.ranks().gather_number(found, {.what = "the step to resume from"}).front();
  if (found < 0 || !options_.resume) return;
  const auto step = static_cast<std::int64_t>(found);
  progress_ = restore(root, step, *options_.resume, policy_, gradient_step);
  log::info("resumed from {}/step_{}", root.string(), step);
}

namespace {

constexpr const char* kOver = "trainer/over";
/// For a rank that is through the last vote to say so, when another's loss ended this rank's.
constexpr std::chrono::milliseconds kOverPatience{500};

void say_that_it_is_over(comm::Store* store) noexcept {
  try {
    if (store != nullptr) store->set(kOver, "1");
  } catch (const std::exception&) {
    // Who keeps the store has left already, as it may.
  }
}

bool is_over_elsewhere(comm::Store* store) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + kOverPatience;
  try {
    while (store != nullptr) {
      if (store->get(kOver)) return true;
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  } catch (const std::exception&) {
    // Nobody says it.
  }
  return false;
}

}  // namespace

TrainRunResult TrainRun::run() {
  try {
    return run_on_ranks();
  } catch (const comm::PeerLost& lost) {
    give_up_on(lost);
    throw;
  } catch (const std::exception& error) {
    training_.gradient_step().abort(error.what());
    throw;
  }
}

void TrainRun::give_up_on(const comm::PeerLost& lost) {
  if (checkpoints_) checkpoints_->give_up_on(lost);
}

TrainRunResult TrainRun::run_on_ranks() {
  const comm::Communicator& ranks = training_.gradient_step().ranks();
  if (options_.max_losses && ranks.size() > 1) copies_.emplace(policy_, options_.is_newcomer, options_.copy_piece_bytes);
  generation_ = ranks.generation();
  for (;;) {
    try {
      if (!has_begun_) options_.is_newcomer ? begin_as_newcomer() : begin();
      while (!is_done() && step()) admit_newcomer();
      finish();
      return result_;
    } catch (const comm::PeerLost& lost) {
      recover(lost);
    }
  }
}

void TrainRun::begin() {
  progress_ = {};
  training_.gradient_step().check_ranks();
  if (num_losses_ > 0) {  // this rank holds other masters than at first
    policy_.load_initial();
    if (policy_.layered() != nullptr) training_.gradient_step().refresh_weights(PolicyVersion{0});
  }
  resume();
  start_step_ = result_.last_step = progress_.step;
  alone([this] { training_.begin(progress_); });
  commit_copies();
  has_begun_ = true;
}

void TrainRun::begin_as_newcomer() {
  PRL_CHECK(copies_.has_value(), "a newcomer to a run without copies");
  if (!take_state(false)) fail(ErrorCode::kUnavailable, "[healing] the run has not begun yet, there is nothing to join");
  start_step_ = progress_.step;
  log::info("joined as rank {} of {} after step {}", training_.gradient_step().ranks().rank(), training_.gradient_step().ranks().size(),
            progress_.step);
}

bool TrainRun::take_state(bool has_lost) {
  training_.gradient_step().check_ranks();
  const std::optional<TrainProgress> found = copies_->restore(training_.gradient_step());
  if (checkpoints_) checkpoints_->regroup(training_.gradient_step().ranks(), has_lost);
  has_begun_ = found.has_value();
  if (!found) return false;
  progress_ = *found;
  result_.last_step = progress_.step;
  training_.recover(progress_);
  commit_copies();
  return true;
}

void TrainRun::admit_newcomer() {
  GradientStep& gradient_step = training_.gradient_step();
  if (!copies_ || is_done() || gradient_step.ranks().options().store == nullptr) return;
  std::optional<comm::CommOptions> options = comm::admit(gradient_step.ranks(), generation_ + 1);
  if (!options) return;
  generation_ = options->generation;
  std::unique_ptr<comm::Communicator> grown;
  try {
    grown = comm::make_communicator(*options);
  } catch (const comm::PeerLost& lost) {
    log::warning("{}; the others go on without the newcomer", lost.what());
    return;
  }
  gradient_step.move_to(std::move(grown));
  if (!take_state(false)) fail(ErrorCode::kInternal, "[healing] a group without copies lets a newcomer in");
  log::warning("a rank was let in: {} of {} goes on after step {}", gradient_step.ranks().rank(), gradient_step.ranks().size(),
               progress_.step);
}

void TrainRun::finish() {
  result_.was_stopped = stop_.stop_requested() && !is_done();
  (void)policy_.weights();  // while those who send them are there
  if (checkpoints_) save_last();
  const comm::CommOptions& options = training_.gradient_step().ranks().options();
  try {
    alone([this] { monitor_.finish(); });
    if (options.size > 1) say_that_it_is_over(options.store.get());
  } catch (const comm::PeerLost& lost) {
    // Whoever is through that vote knows that all had done their part, and has left: there is nothing to regroup for.
    if (lost.gave_up() || !is_over_elsewhere(options.store.get())) throw;
    log::warning("{}; all ranks had done their part of the run", lost.what());
  }
  if (options_.is_bench && training_.gradient_step().ranks().rank() == 0) {
    std::cout << bench_.render() << std::flush;
    if (options_.bench_json) write_file_atomic(*options_.bench_json, bench_.to_json());
  }
}

void TrainRun::commit_copies() {
  if (copies_) copies_->commit(progress_, training_.gradient_step());
}

void TrainRun::recover(const comm::PeerLost& first) {
  const auto start = Clock::now();
  if (!copies_ || first.gave_up() || ++num_losses_ > *options_.max_losses) throw;
  log::warning("{}; the others go on without it", first.what());
  // Those that compute notice the loss at their next exchange; who has tried to regroup has noticed.
  std::chrono::milliseconds grace = training_.gradient_step().ranks().options().timeout + kRegroupGrace;
  std::vector<int> also_lost;
  generation_ = training_.gradient_step().ranks().generation();
  try {
    while (!regroup(grace, also_lost)) {
      if (++num_losses_ > *options_.max_losses) throw;
      grace = kRegroupGrace;
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    fail(ErrorCode::kOutOfMemory,
         "[healing] what the lost rank owned finds no room with the remaining ones ({}); resume from the last checkpoint with all of them: "
         "{}",
         training_.gradient_step().ranks().size(), error.what());
  }
  recover_seconds_ = seconds_since(start);
  const comm::Communicator& ranks = training_.gradient_step().ranks();
  log::warning("rank {} of {} now: goes on after step {}, {:.2f} s after the loss was noticed; {} of {} losses", ranks.rank(), ranks.size(),
               progress_.step, recover_seconds_, num_losses_, *options_.max_losses);
}

bool TrainRun::regroup(std::chrono::milliseconds grace, std::vector<int>& also_lost) {
  GradientStep& gradient_step = training_.gradient_step();
  comm::Communicator& old = gradient_step.ranks();
  const bool was_first = old.rank() == 0;
  const std::int64_t old_generation = old.generation();
  const std::int64_t generation = generation_ = (generation_ / kEpoch + 1) * kEpoch;
  std::vector<int> survivors;
  try {
    survivors = comm::find_survivors(old, generation, grace, also_lost);
  } catch (const comm::PeerLost& error) {  // it is this rank that the others take for lost
    fail(ErrorCode::kPeerLost, "{}", error.what());
  }
  try {
    gradient_step.move_to(old.subgroup(survivors, old.options().group, generation));
  } catch (const comm::PeerLost& lost) {
    if (lost.gave_up()) throw;
    log::warning("{}; another one while the others regroup", lost.what());
    if (gradient_step.ranks().generation() != old_generation)
      also_lost.clear();  // of the new group, which the next attempt starts from
    else
      for (const int rank : lost.ranks()) also_lost.push_back(survivors[static_cast<std::size_t>(rank)]);
    return false;
  }
  also_lost.clear();
  if (gradient_step.ranks().rank() == 0 && !was_first && options_.take_over) options_.take_over();
  try {
    if (!take_state(true)) return true;  // before the first step: all begin anew
    // The checkpoint that was under way when the rank was lost.
    if (!checkpoints_ || progress_.step <= start_step_ || !checkpoints_->is_due(progress_.step, max_steps_)) return true;
    if (!gradient_step.is_any_rank(checkpoints_->last_saved() != progress_.step)) return true;
    checkpoints_->save(progress_.step, progress_, policy_, gradient_step, [this] { monitor_.sync(); });
    return true;
  } catch (const comm::PeerLost& lost) {
    if (lost.gave_up()) throw;
    log::warning("{}; another one while the others regroup", lost.what());
    return false;
  }
}

bool TrainRun::next(std::int64_t step, monitor::Metrics& metrics) {
  try {
    return training_.next(step, metrics);
  } catch (const comm::PeerLost&) {
    throw;
  } catch (const Error& error) {
    // Nothing of this step has touched the weights: those of the last one are kept.
    if (training_.remedy().empty() || !checkpoints_ || result_.last_step == start_step_) throw;
    save_last();
    fail(error.code(), "{}. Step {} is saved: {}", error.what(), result_.last_step, training_.remedy());
  }
}

void TrainRun::wait_while_paused() {
  if (!options_.orders.is_taken() || training_.waits_while_paused()) return;
  const GradientStep& gradient_step = training_.gradient_step();
  bool was_paused = false;
  // Rank 0 alone sees the order in time: what it sees is everybody's.
  while (!gradient_step.is_any_rank(stop_.stop_requested()) &&
         gradient_step.is_any_rank(gradient_step.ranks().rank() == 0 && options_.orders.is_paused())) {
    if (!std::exchange(was_paused, true)) log::warning("paused after step {}", progress_.step);
    std::this_thread::sleep_for(kPausePoll);
  }
  if (was_paused) log::warning("goes on after step {}", progress_.step);
}

bool TrainRun::is_checkpoint_due(std::int64_t step) {
  if (!checkpoints_) return false;
  if (checkpoints_->is_due(step, max_steps_)) return true;
  if (!options_.orders.is_taken()) return false;
  const GradientStep& gradient_step = training_.gradient_step();
  const bool is_first = gradient_step.ranks().rank() == 0;
  if (is_first && options_.chooses_checkpoints && options_.orders.wants_checkpoint()) options_.orders.set_checkpoint_step(step);
  return gradient_step.is_any_rank(is_first && options_.orders.checkpoint_step() == step);
}

bool TrainRun::step() {
  wait_while_paused();
  const auto start = Clock::now();
  const std::int64_t step = progress_.step + 1;
  monitor::Metrics metrics;
  watch_.begin(step);
  watch_.set_phase("waiting for its rows");
  const WatchedStep watched(watch_);
  if (!next(step, metrics)) return false;
  watch_.set_phase("");
  training_.step(progress_, metrics);
  if (!options_.memory_snapshots.empty())
    write_memory_snapshot(options_.memory_snapshots, step, training_.gradient_step().ranks().rank(), *policy_.context().runtime);
  commit_copies();
  result_.last_step = step;
  if (copies_) {
    metrics["healing/losses"] = num_losses_;
    metrics["healing/recover_seconds"] = std::exchange(recover_seconds_, 0.0);
  }
  const auto report = [&] {
    if (options_.checkpoint) put_disk_metrics(metrics, options_.checkpoint->checkpoints);
    metrics["time/step"] = seconds_since(start);
    monitor_.log(step, metrics);
  };
  const bool saves = is_checkpoint_due(step);
  alone([&] {
    publish(step, metrics);
    if (!saves) report();
  });
  if (saves) {
    watch_.set_phase("saving");
    const auto save_start = Clock::now();
    const spans::Scope span(spans::Detail::kCoarse, "trainer", "saves", step);
    checkpoints_->save(step, progress_, policy_, training_.gradient_step(), [&] {
      metrics["time/save_ckpt"] = seconds_since(save_start);
      report();
      monitor_.sync();
    });
  }
  log::step("{}", training_.line(step, metrics));
  bench_.add(step, metrics);
  result_.last_loss = metrics["loss/mean"];
  return true;
}

void TrainRun::publish(std::int64_t step, monitor::Metrics& metrics) {
  watch_.set_phase("publishing weights");
  const auto start = Clock::now();
  if (!training_.publish()) return;
  metrics["time/broadcast_weights"] = seconds_since(start);
  spans::add(spans::Detail::kCoarse, {.lane = "trainer", .name = "publishes weights", .begin = start, .end = Clock::now(), .step = step});
}

void TrainRun::save_last() {
  if (result_.last_step > start_step_ && checkpoints_->last_saved() != result_.last_step)
    checkpoints_->save(result_.last_step, progress_, policy_, training_.gradient_step(), [this] { monitor_.sync(); });
  checkpoints_->finish(training_.gradient_step().ranks());
  result_.last_checkpoint = checkpoints_->last_saved();
}

}  // namespace prl::trainer
