#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/advantage_config.hpp"
#include "config/checkpoint_config.hpp"
#include "config/env_config.hpp"
#include "config/loss_config.hpp"
#include "config/model_config.hpp"
#include "config/optim_config.hpp"
#include "config/schema.hpp"
#include "config/shared_config.hpp"
#include "config/transport_config.hpp"

namespace prl::config {

enum class TrainingMode { kRl, kOpd, kOpsd, kSft };
std::span<const EnumEntry> enum_entries(TrainingMode);
enum class TrajectoryStrategy { kInterleaved, kBranching };
std::span<const EnumEntry> enum_entries(TrajectoryStrategy);

struct AdapterRef {
  std::optional<std::string> name;
  std::optional<int> rank;
  std::optional<double> alpha;
  template <class V>
  void visit(V& v) {
    v.field("name", name, "Name under which servers hold the adapter beside others; unset, it is part of the policy they serve");
    v.field("rank", rank, "Rank of the adapter; that of trainer.model.lora if unset. Only a run of max_concurrent_runs may differ",
            {.min = 1, .max = 512});
    v.field("alpha", alpha, "Scale of the adapter; that of trainer.model.lora if unset. Only a run of max_concurrent_runs may differ",
            {.min = 0, .is_open_min = true});
  }
};

/// What a trainer of several runs (trainer.max_concurrent_runs) does for this one; what is not set is as in the trainer's configuration.
struct SharedTrainerConfig {
  std::optional<OptimConfig> optim;
  std::optional<SchedulerConfig> scheduler;
  std::optional<LossConfig> loss;
  double weight = 1.0;
  std::int64_t max_tokens_in_flight = 0;
  template <class V>
  void visit(V& v) {
    v.field("optim", optim, "Optimizer of this run; the trainer's if not set");
    v.field("scheduler", scheduler, "Learning-rate schedule of this run; the trainer's if not set");
    v.field("loss", loss, "Policy loss of this run; the trainer's if not set");
    v.field("weight", weight, "Share of the trainer and of the engines, relative to other runs that want them too",
            {.min = 0.001, .max = 1000});
    v.field("max_tokens_in_flight", max_tokens_in_flight,
            "Tokens of the run's requests that an engine runs at once, prompts and all they may write; 0: no limit", {.min = 0});
  }
};

struct PolicyModelConfig {
  std::string name = "Qwen/Qwen3-0.6B";
  bool trust_remote_code = false;
  std::optional<VlmConfig> vlm;
  std::optional<AdapterRef> lora;
  template <class V>
  void visit(V& v) {
    v.field("name", name, "Name that the server serves; its tokenizer is read from this folder");
    v.field("trust_remote_code", trust_remote_code, "Run Python code of the model folder",
            {.status = inert("no code of a model folder is ever run")});
    v.field("vlm", vlm, "Conversations may have images, which are read as the model's preprocessor_config.json says");
    v.field("lora", lora, "Adapter that is trained");
  }
};

/// A model and the server it answers from.
struct ModelEndpointConfig {
  PolicyModelConfig model;
  ClientConfig client;
  template <class V>
  void visit(V& v) {
    v.field("model", model, "The model");
    v.field("client", client, "Its server");
  }
};

struct TrainEnvsConfig {
  std::vector<EnvConfig> env = {EnvConfig{}};
  TrainSamplingConfig sampling;
  IntOrWord num_workers{};
  int max_retries = 3;
  bool filter_zero_advantages = true;
  template <class V>
  void visit(V& v) {
    v.field("env", env, "Training environments");
    v.field("sampling", sampling, "Sampling of rollouts");
    v.field("num_workers", num_workers, "Worker processes per environment",
            {.min = 1, .words = "auto", .status = passed_on("env[].num_workers")});
    v.field("max_retries", max_retries, "Attempts after a failed episode", {.min = 0, .status = passed_on("env[].max_retries")});
    v.field("filter_zero_advantages", filter_zero_advantages, "Do not train on tokens whose advantage is 0");
  }
};

/// Evaluations while training.
struct OnlineEvalConfig {
  std::vector<EvalEnvConfig> env = {EvalEnvConfig{}};
  EvalSamplingConfig sampling;
  int num_examples = -1;
  int group_size = 1;
  int interval = 100;
  bool eval_base_model = true;
  bool skip_eval_on_resume = true;
  bool cancel_inflight_rollouts_on_eval = false;
  template <class V>
  void visit(V& v) {
    v.field("env", env, "Evaluation environments");
    v.field("sampling", sampling, "Sampling of evaluations");
    v.field("num_examples", num_examples, "Tasks per environment, -1 for all", {.min = -1});
    v.field("group_size", group_size, "Rollouts per task", {.unit = "rollouts", .min = 1});
    v.field("interval", interval, "Steps between two evaluations", {.unit = "steps", .min = 1});
    v.field("eval_base_model", eval_base_model, "Evaluate before the first step");
    v.field("skip_eval_on_resume", skip_eval_on_resume, "Do not evaluate at the step that a run resumes from");
    v.field("cancel_inflight_rollouts_on_eval", cancel_inflight_rollouts_on_eval, "Drop rollouts in flight when an evaluation starts");
  }
};

struct ValConfig {
  int num_examples = 16;
  int group_size = 1;
  int interval = 10;
  template <class V>
  void visit(V& v) {
    v.field("num_examples", num_examples, "Tasks per validation", {.min = 1});
    v.field("group_size", group_size, "Rollouts per task", {.unit = "rollouts", .min = 1});
    v.field("interval", interval, "Steps between two validations", {.unit = "steps", .min = 1});
  }
};

struct ConcurrencyConfig {
  std::optional<int> initial_inflight;
  int min_inflight = 1;
  int max_inflight = 1024;
  template <class V>
  void visit(V& v) {
    v.field("initial_inflight", initial_inflight,
            "Rollouts in flight at the start; set, the number then follows what the engines have room for", {.unit = "rollouts", .min = 1});
    v.field("min_inflight", min_inflight, "Fewest rollouts in flight, where their number follows the engines",
            {.unit = "rollouts", .min = 1});
    v.field("max_inflight", max_inflight, "Most rollouts in flight",
            {.unit = "rollouts", .min = 1, .status = passed_on("max_inflight_rollouts")});
  }
};

/// What the policy is shown when it is its own teacher.
struct DemonstrationConfig {
  std::string demo_key = "demonstration";
  std::string prompt_template = "<demonstration>\n{demonstration}\n</demonstration>";
  template <class V>
  void visit(V& v) {
    v.field("demo_key", demo_key, "Field of a rollout's info, or of its task's, that holds the demonstration");
    v.field("template", prompt_template, "System message in front of the rollout; {demonstration} is replaced");
  }
};

/// `prl orchestrator`, and the section [orchestrator] of `prl rl`.
struct OrchestratorConfig {
  TrainingMode training_mode = TrainingMode::kRl;
  ModelEndpointConfig student;
  RoutingConfig router;
  PrefillConfig prefill;
  std::optional<ModelEndpointConfig> teacher;
  DemonstrationConfig opsd;
  std::optional<SharedTrainerConfig> run;
  TrainEnvsConfig train;
  std::optional<OnlineEvalConfig> eval;
  std::optional<ValConfig> val;
  AdvantageConfig advantage;
  BufferConfig buffer;
  std::vector<RolloutFilter> filters = {GibberishFilter{}, RepetitionFilter{}, ZeroAdvantageFilter{}};
  std::optional<int> batch_size;
  std::optional<std::int64_t> token_batch_size;
  int group_size = 1;
  double oversampling_factor = 1.0;
  std::optional<int> max_inflight_rollouts;
  ConcurrencyConfig concurrency;
  int seq_len = 2048;
  int max_off_policy_steps = 8;
  int max_async_level = 1;
  bool strict_async_level = false;
  TrajectoryStrategy trajectory_strategy = TrajectoryStrategy::kInterleaved;
  bool mask_env_responses = true;
  std::optional<double> tasks_per_minute;
  int num_train_workers = 1;
  int pad_to_multiple_of = 1;
  RolloutTransport rollout_transport = FilesystemRollouts{};
  WeightBroadcast weight_broadcast;
  TokenizerConfig tokenizer;
  OrchestratorRendererConfig renderer;
  std::optional<OrchestratorCkptConfig> ckpt;
  std::filesystem::path output_dir = "outputs";
  bool log_tokens = false;
  std::optional<std::int64_t> max_steps;
  std::int64_t seed = 42;
  bool deterministic = false;
  LogConfig log;
  std::optional<WandbConfig> wandb;
  FileMonitorConfig file_monitor;
  std::optional<PrimeMonitorConfig> prime_monitor;
  std::optional<HeartbeatConfig> heartbeat;
  std::optional<BenchModeConfig> bench;
  bool collect_inference_metrics = true;
  int env_server_base_port = 5000;
  bool env_install_prerelease = false;
  std::map<std::string, std::string> env_vars;
  static constexpr std::string_view kTeacherAdapter = "a teacher is asked by its model's name";
  static constexpr StatusBelow kStatusBelow[] = {{"teacher.model.lora.name", inert(kTeacherAdapter)},
                                                 {"teacher.model.lora.rank", inert(kTeacherAdapter)},
                                                 {"teacher.model.lora.alpha", inert(kTeacherAdapter)},
                                                 {"teacher.model.vlm", not_built("teachers of conversations with images")}};
  template <class V>
  void visit(V& v) {
    v.field("training_mode", training_mode,
            "rl, opd (on-policy distillation), opsd (the same, by the policy with a demonstration) or sft (train on a teacher's rollouts)");
    v.field("student", student, "The policy and its server");
    v.field("router", router, "How requests are spread over engines; inference.router in `prl rl`");
    v.field("prefill", prefill, "Engines that compute prompts for the others");
    v.field("teacher", teacher, "The teacher of opd and sft, and its server");
    v.field("opsd", opsd, "What the policy is shown when it is its own teacher");
    v.field("run", run, "How a trainer of several runs treats this one");
    v.field("train", train, "Training environments and their sampling");
    v.field("eval", eval, "Evaluations while training; none if not set");
    v.field("val", val, "Rewards on tasks held out from training; none if not set");
    v.field("advantage", advantage, "From rewards of a group to advantages; None is type reward");
    v.field("buffer", buffer, "Choice of tasks");
    v.field("filters", filters, "Rollouts to count or to drop");
    v.field("batch_size", batch_size, "Rollouts per training step; 128 if neither this nor token_batch_size is set",
            {.unit = "rollouts", .min = 1});
    v.field("token_batch_size", token_batch_size, "Tokens per training step, instead of batch_size", {.unit = "tokens", .min = 1});
    v.field("group_size", group_size, "Rollouts per task; divides batch_size", {.unit = "rollouts", .min = 1});
    v.field("oversampling_factor", oversampling_factor,
            "Rollouts in flight, relative to batch_size; above 1 a batch waits for no slow group, which may become too old and is dropped",
            {.min = 1, .status = passed_on("max_inflight_rollouts")});
    v.field("max_inflight_rollouts", max_inflight_rollouts, "Most rollouts in flight, instead of oversampling_factor",
            {.unit = "rollouts", .min = 1});
    v.field("concurrency", concurrency, "Limits of the number of rollouts in flight");
    v.field("seq_len", seq_len, "Samples are cut to this length and packed into it", {.unit = "tokens", .min = 1, .max = 1 << 24});
    v.field("max_off_policy_steps", max_off_policy_steps,
            "Steps by which a rollout's first policy may be behind its batch; the smaller of this and max_async_level holds",
            {.unit = "steps", .min = 0});
    v.field("max_async_level", max_async_level, "Steps by which rollouts may be ahead of the weights; 0 is lock-step",
            {.unit = "steps", .min = 0, .max = 64});
    v.field("strict_async_level", strict_async_level,
            "Always lag by exactly max_async_level: batch n is sampled by weights n - 1 - max_async_level, though newer ones are there");
    v.field("trajectory_strategy", trajectory_strategy,
            "interleaved merges turns that extend each other, branching keeps one sample per turn");
    v.field("mask_env_responses", mask_env_responses,
            "Do not train on what the environment said; false learns it by cross entropy, each token with weight 1");
    v.field("tasks_per_minute", tasks_per_minute, "Most tasks started per minute", {.min = 0, .is_open_min = true});
    v.field("num_train_workers", num_train_workers, "Data-parallel ranks of the trainer",
            {.min = 1, .status = inert("rank 0 of the trainer takes whole batches and shares them out")});
    v.field("pad_to_multiple_of", pad_to_multiple_of, "Micro batches are padded to a multiple of this", {.unit = "tokens", .min = 1});
    v.field("rollout_transport", rollout_transport, "How samples leave");
    v.field("weight_broadcast", weight_broadcast, "How new weights reach inference");
    v.field("tokenizer", tokenizer, "Tokenizer of the policy");
    v.field("renderer", renderer, "How messages become tokens");
    v.field("ckpt", ckpt, "Checkpoints; off if not set");
    v.field("output_dir", output_dir, "Folder of everything the run writes");
    v.field("log_tokens", log_tokens, "Keep the tokens of each trained rollout with their numbers, for the page; about 30 bytes per token");
    v.field("max_steps", max_steps, "Last step, counted from the start of the run and not from a resume; endless if not set",
            {.unit = "steps", .min = 1});
    v.field("seed", seed, "Seed of everything random", {.min = 0});
    v.field("deterministic", deterministic, "Fixed order everywhere: the same seed gives the same bits");
    v.field("log", log, "Logging");
    v.field("wandb", wandb, "Weights & Biases");
    v.field("file_monitor", file_monitor, "Metrics as JSONL");
    v.field("prime_monitor", prime_monitor, "Prime Intellect platform");
    v.field("heartbeat", heartbeat, "Tell an address about each step");
    v.field("bench", bench, "Measure 4 steps and print a table");
    v.field("collect_inference_metrics", collect_inference_metrics, "Read the servers' metrics",
            {.status = inert("the engine's metrics are always read")});
    v.field("env_server_base_port", env_server_base_port, "First port of environment servers",
            {.min = 1, .max = 65535, .status = inert("Python environments need no ports here; env.address names `prl env-server`s")});
    v.field("env_install_prerelease", env_install_prerelease, "Allow pre-releases when environments are installed",
            {.status = inert("a run installs no environments; `prl env install` does")});
    v.field("env_vars", env_vars, "Environment variables of the process");
  }
};

}  // namespace prl::config
