#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <stop_token>

#include "config/sft_config.hpp"
#include "monitor/monitor.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"
#include "trainer/sft/row_packer.hpp"
#include "trainer/sft/sample_stream.hpp"

namespace prl::trainer {

/// Cross entropy per target over one pass of a stream, weighted by tokens. Changes nothing.
double validation_loss(Policy& policy, SampleStream& stream, std::int64_t capacity);

struct SftRunOptions {
  GradientStepOptions step;  ///< loss is not used; max_steps ends the run, none: endless
  config::SftData data;
  std::optional<config::SftValConfig> val;
  SftText text;                                 ///< may be empty for fake data
  io::HubSettings hub;                          ///< where data sets of the hub come from
  double peak_flops = 0;                        ///< FLOP/s for perf/mfu, 0 to leave it out
  std::optional<CheckpointOptions> checkpoint;  ///< none: nothing is saved
  std::optional<ResumeOptions> resume;
  bool is_bench = false;  ///< 4 steps, no checkpoint, a table at the end
  std::optional<std::filesystem::path> bench_json;
};

struct SftRunResult {
  std::int64_t last_step = 0;
  double last_loss = 0;
  bool was_stopped = false;
  std::optional<std::int64_t> last_checkpoint;
};

/// Supervised fine-tuning: packs the stream, steps on the exact global token mean, validates, saves and reports until max_steps or
/// `stop` (between two steps, with a checkpoint if those are enabled). batch_size / micro_batch_size rows make one step.
/// Error{kInvalidArgument} naming the key or the row; {kNonFinite} naming the step.
SftRunResult run_sft(const SftRunOptions& options, Policy& policy, monitor::Monitor& monitor, std::stop_token stop);

}  // namespace prl::trainer
