#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "config/sft_config.hpp"
#include "monitor/monitor.hpp"
#include "trainer/policy.hpp"
#include "trainer/sft/row_packer.hpp"
#include "trainer/sft/sample_stream.hpp"
#include "trainer/train_run.hpp"
#include "weights/weight_channel.hpp"

namespace prl::trainer {

/// Cross entropy per target over one pass of a stream, weighted by tokens. Changes nothing.
double validation_loss(Policy& policy, SampleStream& stream, std::int64_t capacity,
                       config::PackFunction pack_function = config::PackFunction::kCat);

/// Weights that evaluations beside the run read.
struct EvaluatedWeights {
  std::shared_ptr<weights::WeightChannel> channel;  ///< of files
  std::vector<std::int64_t> intervals;              ///< of the environments: steps that one of them divides are published, and the last
  nn::Companions companions;
  bool publishes_start = false;  ///< also the step that the run resumes from, if it is one of them

  /// The channel keeps so many steps that have not been evaluated.
  static constexpr std::int64_t kKept = 4;
  bool are_due_at(std::int64_t step, const std::optional<std::int64_t>& last_step) const;
};

/// The loss of `step` is not used.
struct SftRunOptions : TrainRunOptions {
  config::SftData data;
  std::optional<config::SftValConfig> val;
  std::optional<EvaluatedWeights> evaluated;
  SftText text;         ///< may be empty for fake data
  io::HubSettings hub;  ///< where data sets of the hub come from
};

/// Supervised fine-tuning, a TrainRun: packs the stream, steps on the exact global token mean, validates, saves and reports until max_steps
/// or `stop` (between two steps, with a checkpoint if those are enabled). batch_size / micro_batch_size rows make one step.
/// Error{kInvalidArgument} naming the key or the row; {kNonFinite} naming the step.
TrainRunResult run_sft(const SftRunOptions& options, Policy& policy, monitor::Monitor& monitor, std::stop_token stop);

}  // namespace prl::trainer
