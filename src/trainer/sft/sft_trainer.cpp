#include "trainer/sft/sft_trainer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.hpp"
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
  config::PackFunction pack_function;
  std::int64_t capacity() const { return seq_len * micro_batch_size; }
};

BatchShape shape_of(const config::SftData& data) {
  const BatchShape shape = std::visit(
      [](const auto& d) {
        return BatchShape{d.batch_size, d.seq_len, d.micro_batch_size, d.pack_function};
      },
      data);
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

bool EvaluatedWeights::are_due_at(std::int64_t step, const std::optional<std::int64_t>& last_step) const {
  return step == last_step || std::ranges::any_of(intervals, [&](std::int64_t interval) { return step % interval == 0; });
}

double validation_loss(Policy& policy, SampleStream& stream, std::int64_t capacity, config::PackFunction pack_function) {
  const std::unique_ptr<Packer> packer = make_packer(pack_function, stream, capacity);
  double sum = 0;
  std::int64_t count = 0;
  while (const auto row = packer->next_until(stream.epoch_size())) {
    const std::vector<std::int32_t> targets = make_targets(*row);
    const nn::TokenStats stats = policy.evaluate(*row, targets);
    for (std::size_t i = 0; i < targets.size(); ++i)
      if (targets[i] >= 0) sum -= stats.logp_T[i], ++count;
  }
  if (count == 0) fail(ErrorCode::kInvalidArgument, "[val.data] holds no token to validate on");
  return sum / static_cast<double>(count);
}

namespace {

/// Fine-tuning as a TrainRun drives it.
class SftTraining final : public Training {
 public:
  SftTraining(const SftRunOptions& options, Policy& policy, std::stop_token stop)
      : options_(options),
        policy_(policy),
        stop_(std::move(stop)),
        shape_(shape_of(options.data)),
        stream_(make_stream(options.data, options.text, options.hub, policy.config().vocab_size)),
        val_stream_(options.val ? make_stream(options.val->data, options.text, options.hub, policy.config().vocab_size) : nullptr),
        packer_(make_packer(shape_.pack_function, checked(*stream_, val_stream_.get()), shape_.capacity())),
        shares_(stream_->part_names()),
        gradient_step_(policy, options.step),
        peak_(options.peak_flops),
        estimate_(options.step.max_steps) {}

  GradientStep& gradient_step() override { return gradient_step_; }

  void begin(const TrainProgress& progress) override {
    start_step_ = step_ = progress.step;
    packer_->seek({.position = progress.data_position, .pending = progress.data_pending});
    if (options_.evaluated && options_.evaluated->publishes_start && step_ > 0) publish();
  }

  void recover(const TrainProgress& progress) override {
    packer_->seek({.position = progress.data_position, .pending = progress.data_pending});
    step_ = progress.step;
    if (step_ > start_step_) publish();  // the rank that is gone may not have come to it
  }

  bool next(std::int64_t step, monitor::Metrics& metrics) override {
    if (gradient_step_.is_any_rank(stop_.stop_requested())) return false;
    if (options_.val && is_validation_due(*options_.val, step, start_step_)) {
      const BatchShape shape = shape_of(options_.val->data);
      put_validation(metrics, step, validation_loss(policy_, *val_stream_, shape.capacity(), shape.pack_function));
    }
    train_start_ = Clock::now();  // a validation is not part of the throughput
    rows_.clear();
    for (std::int64_t i = 0; i < shape_.batch_size / shape_.micro_batch_size; ++i) rows_.push_back(packer_->next());
    return true;
  }

  std::string remedy() const override { return "mend the row and go on with --ckpt.resume-step -1"; }

  void step(TrainProgress& progress, monitor::Metrics& metrics) override {
    GradientStepResult result;
    try {
      result = gradient_step_.run(rows_, PolicyVersion{progress.step + 1});
    } catch (const comm::PeerLost&) {
      throw;  // whoever goes on without the lost rank needs to know which it is
    } catch (const Error& error) {
      throw error.with_context(fmt::format("[sft] step {}", progress.step + 1));
    }
    step_ = ++progress.step;
    progress.total_tokens += result.num_tokens;
    for (const wire::MicroBatch& row : rows_) {
      progress.total_samples += std::ranges::count_if(row.env_names, [](const std::string& part) { return !part.empty(); });
      shares_.add(row);
    }
    PackerState packed = packer_->state();
    progress.data_position = packed.position;
    progress.data_pending = std::move(packed.pending);
    window_.add(result.num_tokens, seconds_since(train_start_), result.flops);

    put_step_metrics(metrics, result, *policy_.context().runtime);
    put_throughput(metrics, window_.tokens_per_s(), window_.flops_per_s(), peak_, gradient_step_.ranks().size());
    metrics["optim/lr"] = result.lr_used;
    metrics["loss/perplexity"] = perplexity(result.loss);
    metrics["loss/nan_count"] = static_cast<double>(result.num_non_finite_rows);
    metrics["progress/epoch"] = static_cast<double>(progress.data_position) / static_cast<double>(stream_->epoch_size());
    metrics["progress/num_samples"] = static_cast<double>(progress.total_samples);
    metrics["progress/num_tokens"] = static_cast<double>(progress.total_tokens);
    shares_.put(metrics);
    estimate_.add(seconds_since(train_start_));
  }

  bool publish() override {
    if (!options_.evaluated || !options_.evaluated->are_due_at(step_, options_.step.max_steps)) return false;
    const bool publishes = gradient_step_.ranks().rank() == 0;
    // All ranks have a part in the weights where layers are brought.
    const bool brings_layers = policy_.layered() != nullptr;
    if (!publishes && !brings_layers) return false;
    if (brings_layers) policy_.gather_values(publishes);
    weights::Publication publication;
    publication.manifest = policy_.manifest();
    if (!publishes) return false;
    publication.save = [this](const std::filesystem::path& folder) {
      policy_.save_for_engines(folder, options_.evaluated->companions, CheckpointOptions{}.max_shard_bytes);
    };
    options_.evaluated->channel->publish(std::move(publication));
    return true;
  }

  std::string line(std::int64_t step, const monitor::Metrics& metrics) const override {
    return sft_step_line(step, metrics, device_memory_gib(*policy_.context().runtime), estimate_);
  }

 private:
  static SampleStream& checked(SampleStream& stream, SampleStream* val) {
    for (SampleStream* one : {&stream, val})
      if (one != nullptr) one->check_rows(kCheckBudget);
    return stream;
  }

  const SftRunOptions& options_;
  Policy& policy_;
  std::stop_token stop_;
  BatchShape shape_;
  std::unique_ptr<SampleStream> stream_, val_stream_;
  std::unique_ptr<Packer> packer_;
  PartShares shares_;
  GradientStep gradient_step_;
  ThroughputWindow window_;
  PeakFlops peak_;
  StepEstimate estimate_;
  std::int64_t start_step_ = 0, step_ = 0;
  Clock::time_point train_start_;
  std::vector<wire::MicroBatch> rows_;
};

}  // namespace

TrainRunResult run_sft(const SftRunOptions& given, Policy& policy, monitor::Monitor& monitor, std::stop_token stop) {
  SftRunOptions options = given;
  options.step.skip_non_finite_rows = true;
  options.apply_bench();
  SftTraining training(options, policy, stop);
  return TrainRun(options, policy, training, monitor, stop).run();
}

}  // namespace prl::trainer
