#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "env/environment.hpp"

namespace prl::tools {

struct BenchEnvOptions {
  env::EnvironmentPtr environment;
  std::int64_t num_rollouts = 1000;  ///< measured, after `num_warm` that are not
  std::int64_t num_warm = 20;
  std::int64_t num_at_once = 128;
  std::int64_t reply_chars = 500;        ///< of each reply of the model
  std::chrono::milliseconds latency{0};  ///< of each reply
  std::chrono::milliseconds limit{3'600'000};
};

/// What an environment costs besides the model: plays its tasks, again and again, against a model that answers after `latency` with a text
/// of `reply_chars`, or first calls the first tool it is offered. One JSON object: rollouts_per_s; cpu_ms_per_rollout of this process, of
/// what stands in for the model within it, and of its workers; memory_mb of the workers; calls_per_rollout; failed; the last failure.
/// Blocks. Error{kInvalidArgument} without tasks.
std::string bench_environment(const BenchEnvOptions& options);

}  // namespace prl::tools
