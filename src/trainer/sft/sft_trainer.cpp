#include "trainer/sft/sft_trainer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <numeric>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "trainer/report.hpp"

namespace prl::trainer {

namespace {

using Clock = std::chrono::steady_clock;

/// For reading the data before the first step; some hundred megabytes.
constexpr std::chrono::milliseconds kCheckBudget{10'000};

/// A perplexity beyond this loss says nothing but overflow.
double perplexity(double loss) { return std::exp(std::min(loss, 20.0)); }

struct BatchShape {
  std::int64_t batch_size, seq_len, micro_batch_size;
  std::int64_t capacity() const { return seq_len * micro_batch_size; }
};

BatchShape shape_of(const config::SftData& data) {
  const BatchShape shape = std::visit([](const auto& d) { return BatchShape{d.batch_size, d.seq_len, d.micro_batch_size}; }, data);
  if (shape.batch_size % shape.micro_batch_size != 0)
    fail(ErrorCode::kInvalidArgument, "[data.batch_size] {} is no multiple of data.micro_batch_size {}", shape.batch_size,
         shape.micro_batch_size);
  return shape;
}

/// Before the first step only the start model could be validated, which eval_on_start asks for.
bool is_validation_due(const config::SftValConfig& val, std::int64_t step, std::int64_t start_step) {
  if (step == start_step + 1 && val.eval_on_start) return true;
  return step > 1 && step % val.interval == 0;
}

void put_validation(monitor::Metrics& metrics, std::int64_t step, double loss) {
  metrics["val/loss"] = loss;
  metrics["val/perplexity"] = perplexity(loss);
  log::success("Validation | Step {} | Loss: {:.4f}", step, loss);
}

/// Shares of the parts of a mixture in what this process has trained on.
class PartShares {
 public:
  explicit PartShares(std::vector<std::string> names) : names_(std::move(names)), samples_(names_.size()), tokens_(names_.size()) {}
  void add(const wire::MicroBatch& row) {
    for (std::size_t i = 0; i < row.env_names.size(); ++i) {
      const auto part = static_cast<std::size_t>(std::find(names_.begin(), names_.end(), row.env_names[i]) - names_.begin());
      if (part == names_.size()) continue;
      samples_[part] += 1;
      tokens_[part] += row.sequence_lengths[i];
    }
  }
  void put(monitor::Metrics& metrics) const {
    if (names_.size() < 2) return;
    const double samples = std::accumulate(samples_.begin(), samples_.end(), 0.0),
                 tokens = std::accumulate(tokens_.begin(), tokens_.end(), 0.0);
    for (std::size_t i = 0; i < names_.size() && samples > 0; ++i) {
      metrics[fmt::format("progress/{}/ratio_samples", names_[i])] = samples_[i] / samples;
      metrics[fmt::format("progress/{}/ratio_tokens", names_[i])] = tokens_[i] / tokens;
    }
  }

 private:
  std::vector<std::string> names_;
  std::vector<double> samples_, tokens_;
};

}  // namespace

double validation_loss(Policy& policy, SampleStream& stream, std::int64_t capacity) {
  RowPacker packer(stream, capacity);
  double sum = 0;
  std::int64_t count = 0;
  while (const auto row = packer.next_until(stream.epoch_size())) {
    const std::vector<std::int32_t> targets = make_targets(*row);
    const nn::TokenStats stats = policy.evaluate(*row, targets);
    for (std::size_t i = 0; i < targets.size(); ++i)
      if (targets[i] >= 0) sum -= stats.logp_T[i], ++count;
  }
  if (count == 0) fail(ErrorCode::kInvalidArgument, "[val.data] holds no token to validate on");
  return sum / static_cast<double>(count);
}

SftRunResult run_sft(const SftRunOptions& given, Policy& policy, monitor::Monitor& monitor, std::stop_token stop) {
  SftRunOptions options = given;
  options.step.skip_non_finite_rows = true;
  if (options.is_bench) {
    log::warning("benchmark mode: {} steps, no checkpoints", kBenchSteps);
    options.step.max_steps = kBenchSteps;
    options.checkpoint.reset();
  }
  const std::optional<std::int64_t> max_steps = options.step.max_steps;
  const BatchShape shape = shape_of(options.data);
  const auto stream = make_stream(options.data, options.text, options.hub, policy.config().vocab_size);
  std::unique_ptr<SampleStream> val_stream;
  if (options.val) val_stream = make_stream(options.val->data, options.text, options.hub, policy.config().vocab_size);
  for (SampleStream* one : {stream.get(), val_stream.get()})
    if (one != nullptr) one->check_rows(kCheckBudget);
  RowPacker packer(*stream, shape.capacity());
  PartShares shares(stream->part_names());

  GradientStep gradient_step(policy, options.step);
  std::optional<TrainerCheckpoints> checkpoints;
  if (options.checkpoint) checkpoints.emplace(*options.checkpoint);
  TrainProgress progress;
  if (options.resume && options.checkpoint) {
    if (const auto step = find_resume_step(options.checkpoint->checkpoints, *options.resume)) {
      progress = restore(options.checkpoint->checkpoints, *step, *options.resume, policy, gradient_step);
      packer.seek(progress.data_position);
      log::info("resumed from {}/step_{}", options.checkpoint->checkpoints.string(), *step);
    }
  }

  const std::int64_t start_step = progress.step;
  SftRunResult result;
  result.last_step = start_step;
  ThroughputWindow window;
  PeakFlops peak(options.peak_flops);
  const double device_gib = device_memory_gib(*policy.context().runtime);
  BenchTable bench(device_gib);
  const auto save_last = [&] {
    if (result.last_step > start_step && checkpoints->last_saved() != result.last_step)
      checkpoints->save(result.last_step, progress, policy, gradient_step, [&monitor] { monitor.sync(); });
    checkpoints->finish();
    result.last_checkpoint = checkpoints->last_saved();
  };
  while ((!max_steps || progress.step < *max_steps) && !gradient_step.is_any_rank(stop.stop_requested())) {
    const auto step_start = Clock::now();
    const std::int64_t step = progress.step + 1;
    monitor::Metrics metrics;
    if (options.val && is_validation_due(*options.val, step, start_step))
      put_validation(metrics, step, validation_loss(policy, *val_stream, shape_of(options.val->data).capacity()));

    const auto train_start = Clock::now();  // a validation is not part of the throughput
    std::vector<wire::MicroBatch> rows;
    try {
      for (std::int64_t i = 0; i < shape.batch_size / shape.micro_batch_size; ++i) rows.push_back(packer.next());
    } catch (const Error& error) {
      // Nothing of this step has touched the weights: those of the last one are kept.
      if (!checkpoints || result.last_step == start_step) throw;
      save_last();
      fail(error.code(),
           "{}. Step {} is saved: mend the row and go on with "
           "--ckpt.resume-step -1",
           error.what(), result.last_step);
    }
    GradientStepResult step_result;
    try {
      step_result = gradient_step.run(rows, PolicyVersion{step});
    } catch (const Error& error) {
      throw error.with_context(fmt::format("[sft] step {}", step));
    }
    progress.step = step;
    progress.total_tokens += step_result.num_tokens;
    for (const wire::MicroBatch& row : rows) {
      progress.total_samples += static_cast<std::int64_t>(row.sequence_lengths.size());
      shares.add(row);
    }
    progress.data_position = packer.position();
    window.add(step_result.num_tokens, seconds_since(train_start), step_result.flops);

    put_step_metrics(metrics, step_result, *policy.context().runtime);
    put_throughput(metrics, window.tokens_per_s(), window.flops_per_s(), peak);
    metrics["optim/lr"] = step_result.lr_used;
    metrics["loss/perplexity"] = perplexity(step_result.loss);
    metrics["loss/nan_count"] = static_cast<double>(step_result.num_non_finite_rows);
    metrics["progress/epoch"] = static_cast<double>(progress.data_position) / static_cast<double>(stream->epoch_size());
    metrics["progress/num_samples"] = static_cast<double>(progress.total_samples);
    metrics["progress/num_tokens"] = static_cast<double>(progress.total_tokens);
    shares.put(metrics);
    const auto report = [&] {
      if (options.checkpoint) put_disk_metrics(metrics, options.checkpoint->checkpoints);
      metrics["time/step"] = seconds_since(step_start);
      monitor.log(step, metrics);
    };
    if (checkpoints && checkpoints->is_due(step, max_steps)) {
      const auto save_start = Clock::now();
      checkpoints->save(step, progress, policy, gradient_step, [&] {
        metrics["time/save_ckpt"] = seconds_since(save_start);
        report();
        monitor.sync();
      });
    } else {
      report();
    }
    log::step("{}", sft_step_line(step, metrics, device_gib));
    bench.add(step, metrics);
    result.last_step = step;
    result.last_loss = step_result.loss;
  }
  result.was_stopped = !(max_steps && result.last_step >= *max_steps);

  if (checkpoints) save_last();
  monitor.finish();
  if (options.is_bench && gradient_step.ranks().rank() == 0) {
    std::cout << bench.render() << std::flush;
    if (options.bench_json) write_file_atomic(*options.bench_json, bench.to_json());
  }
  return result;
}

}  // namespace prl::trainer
