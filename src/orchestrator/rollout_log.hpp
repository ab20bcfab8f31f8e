#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "eval/eval_runner.hpp"
#include "orchestrator/batch_collector.hpp"

namespace prl::orchestrator {

/// Writes <output_dir>/rollouts/step_N/train_rollouts.jsonl: one line per shipped rollout (env::to_json plus advantage,
/// group_id, policy, filters). Error{kIo}.
void write_train_rollouts(const std::filesystem::path& output_dir, std::int64_t step, const CollectedBatch& batch);
/// Writes <output_dir>/rollouts/step_N/eval_rollouts.jsonl for the policy version N.
void write_eval_rollouts(const std::filesystem::path& output_dir, std::int64_t step, const std::vector<eval::EvalResult>& results);

}  // namespace prl::orchestrator
