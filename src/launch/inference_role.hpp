#pragma once

#include <stop_token>

#include "config/inference_config.hpp"

namespace prl::launch {

/// What an engine's process says when it takes requests.
inline constexpr const char* kServingMark = "serving";

/// `prl inference`: loads the model, serves until `stop`, drains. Returns the exit status.
int run_inference_role(const config::InferenceConfig& config, std::stop_token stop);

}  // namespace prl::launch
