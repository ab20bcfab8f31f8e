#pragma once

#include <optional>

#include "config/eval_config.hpp"
#include "config/inference_config.hpp"
#include "config/rl_config.hpp"
#include "config/sft_config.hpp"

namespace prl::launch {

/// What a start with this configuration would fail at, for --dry-run: environments are made with their arguments, and models, tokenizers
/// and data that are on this machine are looked at as the start looks at them. What the start would download is named in the log and
/// not fetched. Throws what the start would throw.
void check_dry_run(const config::RlConfig& config);
/// `num_ranks` as in check_start.
void check_dry_run(const config::SftConfig& config, std::optional<int> num_ranks = {});
void check_dry_run(const config::TrainerConfig& config, std::optional<int> num_ranks = {});
void check_dry_run(const config::OrchestratorConfig& config);
void check_dry_run(const config::InferenceConfig& config);
void check_dry_run(const config::EvalConfig& config);
void check_dry_run(const config::EvalsConfig& config);
void check_dry_run(const config::SynthesizeConfig& config);

}  // namespace prl::launch
