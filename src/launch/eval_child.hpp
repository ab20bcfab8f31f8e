#pragma once

#include <optional>
#include <string>

#include "config/sft_config.hpp"
#include "launch/supervisor.hpp"

namespace prl::launch {

/// What CUDA_VISIBLE_DEVICES is for the process that evaluates a run of `prl sft` on one node: the GPU after those of the ranks, or an
/// empty text for the CPU. nullopt where evaluations take what the process finds, which has no GPU.
/// `num_gpus`: that this process sees. Error{kInvalidArgument} naming the key if there is none left for them.
std::optional<std::string> eval_devices(const config::SftConfig& config, bool trains_on_gpus, int num_gpus);

/// The process that evaluates such a run: `prl evals @ <output_dir>/configs/evals.json`. The run goes on without it, but for a signal
/// that kills it, after which it is started again and evaluates what is left.
ChildSpec eval_child(const config::SftConfig& config);

}  // namespace prl::launch
