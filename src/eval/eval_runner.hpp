#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/chat_client.hpp"
#include "env/environment.hpp"

namespace prl::eval {

namespace asio = boost::asio;

/// Failed rollouts are tried again with exponential waits: min(wait_max, wait_multiplier * 2^attempt), at least wait_min.
struct RetryOptions {
  int max_attempts = 10;
  std::chrono::milliseconds wait_multiplier{1'000};
  std::chrono::milliseconds wait_min{1'000};
  std::chrono::milliseconds wait_max{60'000};
  bool reraise = false;  ///< a rollout that keeps failing ends the evaluation of its environment
};

/// One environment to evaluate.
struct EvalTask {
  env::EnvironmentPtr environment;
  std::int64_t num_examples = -1;  ///< -1: all
  std::int64_t rollouts_per_example = 1;
  std::int64_t skip_first = 0;
  wire::SamplingParams sampling;
  std::optional<std::uint64_t> seed;  ///< with it, rollout r of example e always gets the same sampling seed
  std::chrono::milliseconds rollout_timeout{3'600'000};
  std::int64_t max_concurrent = 64;  ///< rollouts at once
  RetryOptions retry;
  std::string label;                   ///< of the model, in session ids: "v12"
  std::filesystem::path results_file;  ///< empty: none; every rollout is appended as soon as it is done
  bool resume = false;                 ///< rows of results_file count and are not run again
};

/// Means over all rollouts of one environment.
struct EvalResult {
  std::string env_name;
  std::int64_t num_examples = 0;
  std::int64_t rollouts_per_example = 1;
  double avg_reward = 0;                     ///< avg@k with k = rollouts_per_example
  std::map<std::int64_t, double> pass_at_k;  ///< k = 1, 2, 4, ...; empty unless every reward is exactly 0 or 1
  std::map<std::string, double> avg_metrics;
  double completion_len_mean = 0, completion_len_std = 0, completion_len_min = 0, completion_len_max = 0;
  double truncated_mean = 0;
  double error_mean = 0;  ///< rollouts that failed for good; they count reward 0
  double num_turns_mean = 0;
  double seconds = 0;
  std::int64_t policy_version_min = -1;  ///< -1: not known
  std::int64_t policy_version_max = -1;
  std::vector<env::Episode> episodes;  ///< by example, then rollout; without token ids; resumed rows are not in it
};

/// Plays every rollout and scores it. The eval split, or the train split with a warning if there is none.
/// The order of episodes and all means do not depend on which rollout finished first.
/// Error{kInvalidArgument} when there is nothing to evaluate; the last failure if retry.reraise.
asio::awaitable<EvalResult> run_eval(EvalTask task, std::shared_ptr<env::ChatClientFactory> chat);

/// 1 - C(n - c, k) / C(n, k): the chance that k of n rollouts, c of them right, hold a right one.
double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k);
/// "Evaluated reverse-text in 12.34s (Avg@4=0.1234, Pass@1: 0.5000, Completion Length: ..., Truncated: 1.0%)" (spec 6.2).
std::string console_line(const EvalResult& result);

}  // namespace prl::eval
