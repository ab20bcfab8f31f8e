#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/orchestrator_config.hpp"
#include "orchestrator/orchestrator.hpp"

namespace prl::launch {

/// Options of the orchestrator; `vocab_size` is the policy tokenizer's, for the filters.
orchestrator::OrchestratorOptions orchestrator_options(const config::OrchestratorConfig& config, std::int64_t vocab_size,
                                                       std::int64_t resume_step);
/// Environments that `config` names, with their sampling.
std::vector<orchestrator::TrainEnv> train_environments(const config::OrchestratorConfig& config);
/// <folder>/checkpoints of a run, where both roles save their parts.
std::filesystem::path checkpoints_folder(const config::OrchestratorConfig& config);
/// The step to resume from, found in the checkpoints of both roles; 0 for a fresh start.
std::int64_t orchestrator_resume_step(const config::OrchestratorConfig& config);

}  // namespace prl::launch
