#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "base/run_orders.hpp"
#include "env/chat_client.hpp"
#include "env/environment.hpp"
#include "env/prompt_scorer.hpp"
#include "monitor/monitor.hpp"
#include "orchestrator/batch_collector.hpp"
#include "orchestrator/concurrency.hpp"
#include "orchestrator/dispatcher.hpp"
#include "orchestrator/eval_rounds.hpp"
#include "orchestrator/group_runner.hpp"
#include "orchestrator/policy_source.hpp"
#include "orchestrator/progress.hpp"
#include "orchestrator/step_recorder.hpp"
#include "orchestrator/task_sampler.hpp"
#include "rollouts/sample_queue.hpp"
#include "wire/packing.hpp"

namespace prl::orchestrator {

struct OrchestratorOptions {
  DispatcherOptions dispatch;
  CollectorOptions collect;
  TaskSamplerOptions sampler;
  wire::PackOptions pack;
  std::uint64_t seed = 42;
  /// Every request gets a sampling seed derived from (seed, step, place of its group in the step, rollout, turn), and groups are
  /// taken in the order of dispatch. With lock-step the same seed then gives the same batches, bit for bit.
  bool deterministic = false;
  /// Lets the number of rollouts in flight follow the engines' pressure, between `min` and dispatch.max_inflight. Not with `deterministic`:
  /// it would depend on timing.
  std::optional<ConcurrencyController::Options> concurrency;
  std::vector<OnlineEval> evals;
  bool eval_base_model = true;  ///< evaluate before the first step
  bool skip_eval_on_resume = true;
  bool cancel_inflight_on_eval = false;
  std::optional<ValidationOptions> validation;  ///< none: no validation
  std::filesystem::path output_dir;             ///< of rollouts/step_N/*.jsonl; empty: none are written
  bool log_tokens = false;                      ///< also rollouts/step_N/train_tokens.jsonl
  std::optional<OrchestratorCheckpoints> checkpoints;
  std::int64_t resume_step = 0;  ///< > 0: load the state saved after this step and go on with the next
  /// Goes on in the place of a process that was killed in the same run: the trainer and the engines are where that one left them.
  struct Recovery {
    std::filesystem::path folder;   ///< keeps the state before each batch is sent
    bool is_recovered = false;      ///< resume_step is the newest state there, or the start of the run if there is none
    bool has_state = false;         ///< there is one
    std::int64_t num_restarts = 0;  ///< of this role, for the metrics
    std::int64_t recorded_step = -1, evaluated_step = -1, validated_step = -1;  ///< last rows that the metrics hold; -1: none
  };
  std::optional<Recovery> recovery;  ///< none: a killed orchestrator ends its run
  bool skip_progress = false;        ///< on resume: do not load the state, only count on from resume_step
  bool skip_buffer = false;          ///< on resume: totals go on, pools of tasks and rollouts that waited are forgotten
  std::chrono::milliseconds retry_wait{1'000};
  env::StateHeaders headers_from_state = {};          ///< of requests of train rollouts
  env::StateHeaders teacher_headers_from_state = {};  ///< of requests that score their tokens
  env::StateHeaders eval_headers_from_state = {};     ///< of requests of evaluations and validations
  RunOrders orders = {};                              ///< pauses and checkpoints that somebody asks for
  std::chrono::milliseconds status_interval{10'000};  ///< time between two lines about the batch in collection
  // Deadlines of the waits for others. On expiry the run ends and says who waited for whom.
  std::chrono::milliseconds inference_timeout{1'800'000};  ///< for the inference service to come up
  std::chrono::milliseconds teacher_timeout{1'800'000};    ///< for the teacher's service to come up
  std::chrono::milliseconds policy_timeout{3'600'000};     ///< for the next policy version, and for the first one
  std::chrono::milliseconds update_timeout{720'000};       ///< for one weight update
  std::chrono::milliseconds ship_timeout{3'600'000};       ///< for room in the sample queue
};

struct OrchestratorServices {
  std::vector<TrainEnv> environments;
  std::shared_ptr<env::ChatClientFactory> chat;       ///< train rollouts: must give token ids
  std::shared_ptr<env::ChatClientFactory> eval_chat;  ///< the policy, where another model plays the train rollouts; null: chat
  std::shared_ptr<env::PromptScorer> teacher;         ///< scores the tokens of train rollouts; null: none
  Demonstrations demonstrations;                      ///< that the teacher is shown; usually none
  std::shared_ptr<rollouts::SampleSender> samples;
  std::shared_ptr<PolicySource> policy;
  std::shared_ptr<PressureSource> pressure;               ///< of the engines; null: not known
  std::shared_ptr<PressureSource> load;                   ///< the same for metrics, another one as each has one caller; null: not known
  std::function<void(monitor::Metrics&)> engine_metrics;  ///< adds what is known of the engines to the row of a step; may be empty
  monitor::Monitor* monitor = nullptr;                    ///< borrowed, may be null
};

struct OrchestratorReport {
  Progress progress;
  EpisodeCounts episodes;
  std::int64_t num_dropped_queued = 0;        ///< processed rollouts that became too old while they waited
  std::int64_t max_staleness = 0;             ///< largest (step - 1) - start version of any shipped rollout
  bool was_stopped = false;                   ///< by the stop token
  std::vector<eval::EvalResult> final_evals;  ///< of the last evaluation round
};

/// Drives environments against the inference service, turns groups into training batches and relays weights to the engines.
///
/// One thread (the caller of run) drives all coroutines; files and the sample queue are served by a helper thread.
/// Per-wait deadlines are in the options; no wait is without one.
class Orchestrator {
 public:
  /// Error{kInvalidArgument} naming the key for options that contradict each other.
  Orchestrator(OrchestratorOptions options, OrchestratorServices services);
  ~Orchestrator();
  Orchestrator(const Orchestrator&) = delete;
  Orchestrator& operator=(const Orchestrator&) = delete;

  /// Runs until dispatch.max_steps have shipped or `stop` is requested; call once. A clean stop saves a checkpoint (if they
  /// are on) and closes the sample queue.
  /// Throws the first failure: kOutOfSync, kDeadline (who waits for whom), kUnavailable (ten empty batches), ...
  OrchestratorReport run(std::stop_token stop);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prl::orchestrator
