#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "env/chat_client.hpp"
#include "eval/eval_runner.hpp"
#include "monitor/monitor.hpp"
#include "net/off_thread.hpp"
#include "orchestrator/policy_follower.hpp"
#include "orchestrator/run_control.hpp"
#include "orchestrator/validation.hpp"

namespace prl::orchestrator {

/// One environment evaluated while training.
struct OnlineEval {
  eval::EvalTask task;
  std::int64_t interval = 100;  ///< optimizer steps between two evaluations
};

struct EvalRoundOptions {
  std::vector<OnlineEval> evals{};
  bool eval_base_model = true;  ///< evaluate before the first step
  bool skip_eval_on_resume = true;
  std::optional<ValidationOptions> validation{};  ///< none: no validation
  std::filesystem::path output_dir{};             ///< of rollouts/step_N/eval_rollouts.jsonl; empty: none are written
  std::chrono::milliseconds log_interval{0};      ///< between two lines about how far a round is; 0: none
  env::StateHeaders headers_from_state{};         ///< of requests
};

/// Plays the validation and the online evaluations when their policy version has come. Weights stay as they are during a round, and
/// training waits for it. The main coroutine only.
class EvalRounds {
 public:
  struct Services {
    std::vector<TrainEnv> environments;  ///< whose eval splits the validation plays
    std::shared_ptr<env::ChatClientFactory> chat;
    monitor::Monitor* monitor = nullptr;   ///< borrowed, may be null
    net::OffThread* files = nullptr;       ///< borrowed: writes the rollouts
    std::function<void()> before_evals{};  ///< called before online evaluations; may be empty
  };
  /// Error{kInvalidArgument} if no environment has tasks to validate on.
  EvalRounds(EvalRoundOptions options, Services services, PolicyFollower& policy, RunControl& control);

  /// Training begins with `version`: what was due before it counts as done.
  void begin(PolicyVersion version, bool is_resumed);
  /// Training goes on in the place of a killed process, which had recorded evaluation and validation of these versions; -1: none.
  void begin_again(std::int64_t evaluated_step, std::int64_t validated_step);
  /// Whether run_due would play anything for the version that the engines hold.
  bool is_due() const;
  /// Plays what is due. Ends early after a stop: what was cut off does not count.
  asio::awaitable<void> run_due();
  /// Waits for the policy of the last step, then plays the validation that is due and every evaluation.
  asio::awaitable<void> run_last(PolicyVersion last);
  /// Of the last round of evaluations.
  const std::vector<eval::EvalResult>& results() const noexcept { return results_; }

 private:
  bool is_eval_due(std::size_t i) const { return round_of(options_.evals[i].interval) > last_eval_round_[i]; }
  bool is_validation_due() const { return options_.validation && round_of(options_.validation->interval) > last_validation_round_; }
  std::int64_t round_of(std::int64_t interval) const { return policy_.version().value / interval; }
  asio::awaitable<void> play(bool all);
  asio::awaitable<void> validate();
  asio::awaitable<void> evaluate(std::vector<std::size_t> due);
  asio::awaitable<void> write_rollouts(PolicyVersion version);
  asio::awaitable<std::optional<eval::EvalResult>> play_task(eval::EvalTask task);

  EvalRoundOptions options_;
  Services services_;
  PolicyFollower& policy_;
  RunControl& control_;
  std::vector<std::int64_t> last_eval_round_;
  std::int64_t last_validation_round_ = -1;
  std::vector<eval::EvalResult> results_;
};

}  // namespace prl::orchestrator
