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
/// Writes <output_dir>/rollouts/step_N/train_tokens.jsonl: one line per training sample of a shipped rollout, {"row": its line in
/// train_rollouts.jsonl from 0, "sample", "env_name", "token_ids", "loss_mask", "advantages", "inference_logprobs"} and "ref_logprobs"
/// where a teacher gave them; each list has one entry per token, and numbers that are not finite become null. Error{kIo}.
void write_train_tokens(const std::filesystem::path& output_dir, std::int64_t step, const CollectedBatch& batch);
/// Writes <output_dir>/rollouts/step_N/eval_rollouts.jsonl for the policy version N.
void write_eval_rollouts(const std::filesystem::path& output_dir, std::int64_t step, const std::vector<eval::EvalResult>& results);

}  // namespace prl::orchestrator
