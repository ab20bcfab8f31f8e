#include "trainer/train_run.hpp"

#include <chrono>
#include <iostream>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/units.hpp"

namespace prl::trainer {

using Clock = std::chrono::steady_clock;

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
      bench_(device_memory_gib(*policy.context().runtime)) {
  if (options_.checkpoint) checkpoints_.emplace(*options_.checkpoint);
}

void TrainRun::resume() {
  const std::filesystem::path root =
      options_.resume_from.empty() && options_.checkpoint ? options_.checkpoint->checkpoints : options_.resume_from;
  GradientStep& gradient_step = training_.gradient_step();
  // Rank 0 looks for all: another that looks later might find another step.
  double found = -1;
  if (gradient_step.ranks().rank() == 0 && options_.resume && !root.empty())
    if (const auto step = find_resume_step(root, *options_.resume)) found = static_cast<double>(*step);
  found = gradient_step.ranks().gather_number(found, {.what = "the step to resume from"}).front();
  if (found < 0 || !options_.resume) return;
  const auto step = static_cast<std::int64_t>(found);
  progress_ = restore(root, step, *options_.resume, policy_, gradient_step);
  log::info("resumed from {}/step_{}", root.string(), step);
}

TrainRunResult TrainRun::run() {
  try {
    return run_on_ranks();
  } catch (const comm::PeerLost&) {
    throw;
  } catch (const std::exception& error) {
    training_.gradient_step().ranks().abort(error.what());
    throw;
  }
}

TrainRunResult TrainRun::run_on_ranks() {
  resume();
  start_step_ = result_.last_step = progress_.step;
  training_.begin(progress_);
  while (!is_done() && step()) {
  }
  result_.was_stopped = stop_.stop_requested() && !is_done();
  if (checkpoints_) save_last();
  monitor_.finish();
  if (options_.is_bench && training_.gradient_step().ranks().rank() == 0) {
    std::cout << bench_.render() << std::flush;
    if (options_.bench_json) write_file_atomic(*options_.bench_json, bench_.to_json());
  }
  return result_;
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

bool TrainRun::step() {
  const auto start = Clock::now();
  const std::int64_t step = progress_.step + 1;
  monitor::Metrics metrics;
  if (!next(step, metrics)) return false;
  training_.step(progress_, metrics);
  const auto publish_start = Clock::now();
  if (training_.publish()) metrics["time/broadcast_weights"] = seconds_since(publish_start);
  const auto report = [&] {
    if (options_.checkpoint) put_disk_metrics(metrics, options_.checkpoint->checkpoints);
    metrics["time/step"] = seconds_since(start);
    monitor_.log(step, metrics);
  };
  if (checkpoints_ && checkpoints_->is_due(step, max_steps_)) {
    const auto save_start = Clock::now();
    checkpoints_->save(step, progress_, policy_, training_.gradient_step(), [&] {
      metrics["time/save_ckpt"] = seconds_since(save_start);
      report();
      monitor_.sync();
    });
  } else {
    report();
  }
  log::step("{}", training_.line(step, metrics));
  bench_.add(step, metrics);
  result_.last_step = step;
  result_.last_loss = metrics["loss/mean"];
  return true;
}

void TrainRun::save_last() {
  if (result_.last_step > start_step_ && checkpoints_->last_saved() != result_.last_step)
    checkpoints_->save(result_.last_step, progress_, policy_, training_.gradient_step(), [this] { monitor_.sync(); });
  checkpoints_->finish();
  result_.last_checkpoint = checkpoints_->last_saved();
}

}  // namespace prl::trainer
