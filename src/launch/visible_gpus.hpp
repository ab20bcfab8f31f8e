#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/inference_config.hpp"

namespace prl::launch {

/// The GPUs of this process by CUDA_VISIBLE_DEVICES, as it names them (numbers or UUIDs); nullopt if the variable is not set, which means
/// all of the machine. The driver is not touched: it reads the variable once, and a later change would have no effect.
std::optional<std::vector<std::string>> listed_gpus();

/// How many GPUs this process may use: those listed, else those of the machine; 0 for a build without CUDA.
int num_visible_gpus();

/// What CUDA_VISIBLE_DEVICES of a child has to be for it to see the GPUs `ids` of this process, counted from 0 in the list above.
/// If this process sees no GPU, children see none either.
/// Error{kInvalidArgument} naming the numbers that the list does not have.
std::string visible_devices_of(std::span<const int> ids);

/// The GPUs of engine `number` of those that share this process's GPUs, counted as above.
std::vector<int> gpus_of_engine(const config::InferenceConfig& config, int number);

}  // namespace prl::launch
