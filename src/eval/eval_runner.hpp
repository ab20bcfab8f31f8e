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
#include "env/state_headers.hpp"
#include "eval/limiter.hpp"
#include "eval/outcome.hpp"

namespace prl::eval {

namespace asio = boost::asio;

/// Rollouts that failed for a reason that may pass are tried again with exponential waits: min(wait_max, wait_multiplier *
/// 2^attempt), at least wait_min.
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
  std::vector<std::int64_t> examples;  ///< these tasks of the split, ascending, instead of num_examples after skip_first; not with resume
  std::optional<env::Split> split;     ///< nullopt: the eval split, or with a warning the train split if there is none
  wire::SamplingParams sampling;
  std::optional<std::uint64_t>
      seed;  ///< with it, rollout r of example e always gets the same sampling seed, another after each invalid reply
  std::chrono::milliseconds rollout_timeout{3'600'000};
  std::int64_t max_concurrent = 64;  ///< rollouts at once
  std::shared_ptr<Limiter> limiter;  ///< shared with other evaluations that run at the same time; null: none
  RetryOptions retry;
  bool per_rollout = false;         ///< write each rollout when it is done, not with its group; not for environments that score groups
  bool drop_failed_groups = false;  ///< an example with a failed rollout leaves no rows and does not count (synthetic data)
  bool keep_episodes = true;        ///< EvalResult::episodes holds them
  std::string label;                ///< of the model, in session ids: "v12"
  std::string model;                ///< name of the model, in traces
  /// Header of each request to the field of the rollout's state that gives its value: trajectory_id, example_id, rollout_idx,
  /// task.
  env::StateHeaders headers_from_state;
  std::filesystem::path results_file;         ///< empty: none; rollouts are appended as soon as they are done
  std::filesystem::path traces_file;          ///< the same in the form of verifiers' v1 traces
  bool is_synthetic = false;                  ///< rows are training data and are always appended to results_file
  std::string synthesis_key;                  ///< of such rows: those of results_file that have it count and are not played again
  bool resume = false;                        ///< rows of results_file count and are not run again
  std::chrono::milliseconds log_interval{0};  ///< time between two lines of progress; 0: none
  /// How long finished rollouts wait for a disk that is full; then the evaluation ends with the error and can be resumed.
  std::chrono::milliseconds write_patience{600'000};
  std::chrono::milliseconds write_pause{500};  ///< between two attempts
};

/// Plays every rollout and scores it.
/// The order of episodes and all means do not depend on which rollout finished first.
/// Error{kInvalidArgument} when there is nothing to evaluate; the last failure if retry.reraise; {kUnavailable} at once if the model's
/// service refuses every request (a wrong key).
asio::awaitable<EvalResult> run_eval(EvalTask task, std::shared_ptr<env::ChatClientFactory> chat);

}  // namespace prl::eval
