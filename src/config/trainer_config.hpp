#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "config/checkpoint_config.hpp"
#include "config/loss_config.hpp"
#include "config/model_config.hpp"
#include "config/optim_config.hpp"
#include "config/schema.hpp"
#include "config/shared_config.hpp"
#include "config/transport_config.hpp"

namespace prl::config {

enum class MatmulPrecision { kHighest, kHigh, kMedium };
std::span<const EnumEntry> enum_entries(MatmulPrecision);

/// Random samples instead of an orchestrator.
struct FakeRolloutsConfig {
  int batch_size = 2;
  bool generate_samples = false;
  template <class V>
  void visit(V& v) {
    v.field("batch_size", batch_size, "Micro batches per step", {.unit = "sequences", .min = 1});
    v.field("generate_samples", generate_samples, "Several documents of random length per sequence instead of one");
  }
};

/// The steps that another run recorded (TrainerConfig::record) instead of an orchestrator.
struct RecordedStepsConfig {
  std::filesystem::path run;
  std::int64_t from_step = 0;
  std::optional<std::int64_t> last_step;
  bool require_same = true;
  template <class V>
  void visit(V& v) {
    v.field("run", run, "Output folder of the run that recorded its steps");
    v.field("from_step", from_step, "Begin with that run's checkpoint of this step; 0 is the model", {.unit = "steps", .min = 0});
    v.field("last_step", last_step, "End after this step; the last recorded one if not set", {.unit = "steps", .min = 1});
    v.field("require_same", require_same, "Other weights than the recorded run's are an error; without it they are logged");
  }
};

struct TrainerDataConfig {
  std::optional<FakeRolloutsConfig> fake;
  std::optional<RecordedStepsConfig> recorded;
  /// Samples come from an orchestrator.
  bool is_sent() const noexcept { return !fake && !recorded; }
  template <class V>
  void visit(V& v) {
    v.field("fake", fake, "Random data, so that no orchestrator is needed");
    v.field("recorded", recorded, "Train again on the steps that a run recorded; see `prl replay`");
  }
};

struct GcConfig {
  int interval = 50;
  template <class V>
  void visit(V& v) {
    v.field("interval", interval, "Steps between two collections", {.unit = "steps", .min = 1});
  }
};

/// `prl trainer`, and the section [trainer] of `prl rl`.
struct TrainerConfig {
  TrainerModelConfig model;
  TokenizerConfig tokenizer;
  TrainerDataConfig data;
  LossConfig loss;
  OptimConfig optim;
  SchedulerConfig scheduler;
  std::optional<TrainerCkptConfig> ckpt;
  std::optional<HealingConfig> healing;
  WeightBroadcast weight_broadcast;
  RolloutTransport rollout_transport = FilesystemRollouts{};
  ComputeConfig compute;
  std::filesystem::path output_dir = "outputs";
  std::optional<std::int64_t> max_steps;
  int max_async_level = 1;
  std::int64_t seed = 42;
  bool deterministic = false;
  LogConfig log;
  std::optional<WandbConfig> wandb;
  FileMonitorConfig file_monitor;
  std::optional<BenchModeConfig> bench;
  std::map<std::string, std::string> env_vars;
  MatmulPrecision matmul_precision = MatmulPrecision::kHigh;
  bool enable_router_replay = false;
  bool enable_token_export = false;
  bool record = false;
  int max_concurrent_runs = 1;
  int dist_timeout_seconds = 600;
  std::optional<GcConfig> gc;
  std::optional<std::filesystem::path> memory_profiler_path;
  std::optional<std::filesystem::path> trace_path;
  std::optional<HeartbeatConfig> heartbeat;
  std::optional<MetricsServerConfig> metrics_server;
  static constexpr StatusBelow kStatusBelow[] = {{"log.vf_level", inert("no environment runs here")}};
  template <class V>
  void visit(V& v) {
    v.field("model", model, "The trained model");
    v.field("tokenizer", tokenizer, "Tokenizer saved with the weights");
    v.field("data", data, "Source of samples");
    v.field("loss", loss, "Policy loss");
    v.field("optim", optim, "Optimizer");
    v.field("scheduler", scheduler, "Learning-rate schedule");
    v.field("ckpt", ckpt, "Checkpoints; off if not set");
    v.field("healing", healing, "Go on when a rank is lost; off if not set, then it ends the run");
    v.field("weight_broadcast", weight_broadcast, "How new weights reach inference");
    v.field("rollout_transport", rollout_transport, "How samples arrive");
    v.field("compute", compute, "Device and precision");
    v.field("output_dir", output_dir, "Folder of everything the run writes");
    v.field("max_steps", max_steps, "Last step, counted from the start of the run and not from a resume; endless if not set",
            {.unit = "steps", .min = 1});
    v.field("max_async_level", max_async_level, "Steps by which rollouts may be ahead of the weights; 0 is lock-step",
            {.unit = "steps", .min = 0, .max = 64});
    v.field("seed", seed, "Seed of everything random", {.min = 0});
    v.field("deterministic", deterministic, "Fixed order everywhere: the same seed gives the same bits",
            {.status = inert("the same seed gives the same bits with and without it: sums have a fixed order")});
    v.field("log", log, "Logging");
    v.field("wandb", wandb, "Weights & Biases");
    v.field("file_monitor", file_monitor, "Metrics as JSONL");
    v.field("bench", bench, "Measure 4 steps and print a table");
    v.field("env_vars", env_vars, "Environment variables of the process");
    v.field("matmul_precision", matmul_precision, "Precision of float32 products on GPUs",
            {.status = inert("float32 products are always exact")});
    v.field("enable_router_replay", enable_router_replay, "Of mixtures of experts: train each token with the experts it was sampled with");
    v.field("enable_token_export", enable_token_export, "Write what the trainer found of each token to token_exports");
    v.field("record", record, "Keep what each step trained on and made, in rollouts/step_N, for `prl replay`");
    v.field("max_concurrent_runs", max_concurrent_runs,
            "Above 1: serve the runs of folders run_* below output_dir, so many at once, an adapter each", {.min = 1, .max = 1024});
    v.field("dist_timeout_seconds", dist_timeout_seconds, "Longest wait for another rank", {.unit = "seconds", .min = 1});
    v.field("gc", gc, "Garbage collection of the Python process", {.status = inert("there is no garbage collector")});
    v.field("memory_profiler_path", memory_profiler_path, "Folder that gets step_N/rank_R.json: the device's memory after each step");
    v.field("trace_path", trace_path, "Folder that gets trace.json, what all roles and devices did, for Perfetto; needs max_steps < 10");
    v.field("heartbeat", heartbeat, "Tell an address about each step");
    v.field("metrics_server", metrics_server, "Prometheus metrics of the trainer on /metrics, and /health");
  }
};

}  // namespace prl::config
