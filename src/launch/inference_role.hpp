#pragma once

#include <stop_token>

#include "config/inference_config.hpp"

namespace prl::launch {

/// What an engine's process says when it takes requests.
inline constexpr const char* kServingMark = "serving";
/// Variable of a process that is one engine of deployment.type = "disaggregated": "prefill" or "decode".
inline constexpr const char* kEngineKindVariable = "PRL_ENGINE_KIND";
/// Variable in which a launcher hands its engines the key that they show each other, if it made one up.
inline constexpr const char* kKvKeyVariable = "PRL_KV_KEY";

/// `prl inference`: loads the model, serves until `stop`, drains. Returns the exit status.
int run_inference_role(const config::InferenceConfig& config, std::stop_token stop);

}  // namespace prl::launch
