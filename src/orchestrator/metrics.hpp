#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "eval/eval_runner.hpp"
#include "monitor/metric_set.hpp"
#include "orchestrator/batch_collector.hpp"
#include "orchestrator/progress.hpp"
#include "wire/packing.hpp"

namespace prl::orchestrator {

/// Every metric of this module: name, unit, meaning (spec 8.5, profile M).
std::span<const monitor::MetricInfo> metric_infos() noexcept;

/// Roles of rows beside the orchestrator's own: of evaluations while training, and of validation.
inline constexpr const char* kOnlineEvalRows = "online_eval";
inline constexpr const char* kValidationRows = "validation";

/// Tokens of a rollout, counted alike for a step and for the run: what was sampled in all turns, and what its last turn read besides.
struct RolloutTokens {
  std::int64_t prefill = 0, decode = 0;
  std::int64_t total() const noexcept { return prefill + decode; }
};
RolloutTokens count_tokens(const env::Episode& episode);

/// What the runner knows about one step besides the batch.
struct StepFacts {
  std::int64_t step = 0;
  double seconds_step = 0;             ///< since the last ship
  double seconds_wait_for_policy = 0;  ///< with the gate closed
  double seconds_wait_for_oldest = 0;  ///< with a full batch that older rollouts in flight hold back
  double seconds_generate = 0;         ///< until the batch was full
  double seconds_pack = 0;
  double seconds_push = 0;                ///< waiting for room in the sample queue
  double seconds_update_weights = 0;      ///< of the last update
  std::optional<double> seconds_teacher;  ///< waiting for the teacher, mean over the rollouts scored since the last ship
  std::int64_t policy_version = 0;
  std::int64_t num_inflight = 0;
  std::int64_t max_inflight = 0;
  std::int64_t num_cancelled = 0;      ///< episodes of dropped groups, since the last ship
  std::int64_t num_dropped_stale = 0;  ///< finished episodes that became too old, since the last ship
  wire::PackLosses losses = {};        ///< of samples longer than a row of training
};

monitor::Metrics step_metrics(const CollectedBatch& batch, const StepFacts& facts, const Progress& progress);
void put_eval_metrics(monitor::Metrics& metrics, const eval::EvalResult& result, std::int64_t step);

/// "Step 3 | Time: 1.23s | Reward: 0.1234 | Throughput: 123.4 tokens/s | Seq. Length: 12.3 tokens/sample | Async Level: 1 |
/// Max. Off-Policy Level: 1" (spec 8.3).
std::string step_line(const CollectedBatch& batch, const StepFacts& facts);

}  // namespace prl::orchestrator
