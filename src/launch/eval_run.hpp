#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "config/eval_config.hpp"
#include "eval/eval_runner.hpp"
#include "launch/model_subject.hpp"

namespace prl::launch {

/// "gsm8k--Qwen--Qwen3-0.6B": the folder of an environment's results for a model.
std::string results_folder_name(const std::string& environment, const std::string& model);
/// Eight hexadecimal digits that differ from run to run.
std::string new_run_id(const std::string& about);

/// Waits until the model answers; false if `stop` was requested before. Error{kDeadline}, {kNotFound} as check_health.
bool wait_until_ready(net::IoRuntime& io, ModelSubject& subject, const config::EvalSamplingConfig& sampling,
                      std::chrono::milliseconds patience, std::stop_token stop);

/// One evaluation of a round, prepared.
struct PlannedEval {
  eval::EvalTask task;
  std::shared_ptr<env::ChatClientFactory> chat;
};
/// Its outcome: a result, or the error that ended it.
struct FinishedEval {
  std::optional<eval::EvalResult> result;
  std::string error;
};

/// Runs all of them at the same time on `io`, to their ends; a failed one does not stop the others. `on_done` is called on the
/// I/O thread for each. When `stop` is requested all are cancelled: what they have written stays, and their `error` says so.
std::vector<FinishedEval> run_together(net::IoRuntime& io, std::vector<PlannedEval> plans, std::stop_token stop,
                                       std::function<void(std::size_t, const FinishedEval&)> on_done);

}  // namespace prl::launch
