#pragma once

#include <optional>

#include "config/orchestrator_config.hpp"
#include "config/rl_config.hpp"
#include "config/sft_config.hpp"

namespace prl::launch {

/// What a start can fail at without having touched anything: models, tokenizers, chat templates, data and environments exist and can be
/// read, and so does the device where this process computes. Called before an output folder is made ready, so that a start that fails
/// leaves every byte of it as it was. Models and data from the hub are downloaded here. Throws what the roles would throw.
void check_start(const config::RlConfig& config);
/// `num_ranks` of the trainer, where the caller knows better than the environment and the configuration.
void check_start(const config::SftConfig& config, std::optional<int> num_ranks = {});
void check_start(const config::TrainerConfig& config, std::optional<int> num_ranks = {});
void check_start(const config::OrchestratorConfig& config);

/// A part of check_start that looks at no file: model.cp and model.dp_replicate divide the ranks that this machine is to have.
/// Error{kInvalidArgument} naming the key.
void check_ranks(const config::TrainerConfig& config, std::optional<int> num_ranks = {});
void check_ranks(const config::SftConfig& config, std::optional<int> num_ranks = {});

/// A part of check_start for a model that another machine is to train: if it is a folder here, its heads can be divided as model.cp says.
void check_heads_here(const config::TrainerModelConfig& model);

}  // namespace prl::launch
