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

#include "config/checkpoint_config.hpp"
#include "config/inference_config.hpp"
#include "config/model_config.hpp"
#include "config/optim_config.hpp"
#include "config/orchestrator_config.hpp"
#include "config/schema.hpp"
#include "config/shared_config.hpp"
#include "config/trainer_config.hpp"

namespace prl::config {

enum class PackFunction { kCat, kStack };
std::span<const EnumEntry> enum_entries(PackFunction);
inline constexpr std::string_view kPackHelp =
    "cat joins samples to rows; stack fills them up to a few lengths and stacks those of one, for rows of equally many tokens";
/// What the lengths of stacked samples, and with them the tokens of a row, are multiples of.
inline constexpr std::int64_t kStackUnit = 256;
enum class StoppingStrategy { kAllExhausted, kFirstExhausted };
std::span<const EnumEntry> enum_entries(StoppingStrategy);
enum class FakeLength { kFixed, kVariable };
std::span<const EnumEntry> enum_entries(FakeLength);
enum class FakeInputIds { kIncreasing, kRandom };
std::span<const EnumEntry> enum_entries(FakeInputIds);
enum class SftLossImpl { kTorch, kLiger, kLigerFused, kQuackFused };
std::span<const EnumEntry> enum_entries(SftLossImpl);

/// Which roles' tokens are trained.
struct LossMaskConfig {
  bool system = false;
  bool user = false;
  bool assistant = true;
  bool tool = false;
  template <class V>
  void visit(V& v) {
    v.field("system", system, "Train on system messages");
    v.field("user", user, "Train on user messages");
    v.field("assistant", assistant, "Train on assistant messages");
    v.field("tool", tool, "Train on replies of tools");
  }
};

/// Conversations in `messages` or `prompt`/`completion` form.
struct SftDataConfig {
  static constexpr std::string_view kType = "sft";
  std::string name = "PrimeIntellect/Reverse-Text-SFT";
  std::optional<std::vector<std::string>> subsets;
  std::optional<std::vector<std::string>> splits;
  std::optional<std::vector<double>> probabilities;
  StoppingStrategy stopping_strategy = StoppingStrategy::kAllExhausted;
  int batch_size = 128;
  int seq_len = 128;
  int micro_batch_size = 1;
  int num_workers = 1;
  PackFunction pack_function = PackFunction::kCat;
  bool shuffle = true;
  std::int64_t seed = 0;
  LossMaskConfig loss_mask;
  template <class V>
  void visit(V& v) {
    v.field("name", name, "Data file (.jsonl, .json, .csv, .parquet), folder of them, or id of a data set on the hub");
    v.field("subsets", subsets, "Subsets to mix, each with its split train unless splits names one");
    v.field("splits", splits, "Splits to mix, perhaps with a range of rows: train[:1000]");
    v.field("probabilities", probabilities, "Probabilities of the mixed parts; rows take turns if not set", {.min = 0, .max = 1});
    v.field("stopping_strategy", stopping_strategy, "An epoch ends when all parts are exhausted, or the first");
    v.field("batch_size", batch_size, "Packed sequences per step", {.unit = "sequences", .min = 1});
    v.field("seq_len", seq_len, "Length of a packed sequence", {.unit = "tokens", .min = 1, .max = 1 << 24});
    v.field("micro_batch_size", micro_batch_size, "Packed sequences per forward pass; divides batch_size", {.unit = "sequences", .min = 1});
    v.field("num_workers", num_workers, "Threads that read and tokenize",
            {.min = 0, .status = inert("samples are made while the model trains")});
    v.field("pack_function", pack_function, kPackHelp);
    v.field("shuffle", shuffle, "New order in every epoch");
    v.field("seed", seed, "Seed of the order", {.min = 0});
    v.field("loss_mask", loss_mask, "Roles whose tokens are trained");
  }
};

struct FakeDataConfig {
  static constexpr std::string_view kType = "fake";
  int batch_size = 128;
  int seq_len = 128;
  int micro_batch_size = 1;
  int num_workers = 1;
  PackFunction pack_function = PackFunction::kCat;
  FakeLength length = FakeLength::kFixed;
  FakeInputIds input_ids = FakeInputIds::kIncreasing;
  std::int64_t seed = 0;
  template <class V>
  void visit(V& v) {
    v.field("batch_size", batch_size, "Packed sequences per step", {.unit = "sequences", .min = 1});
    v.field("seq_len", seq_len, "Length of a packed sequence", {.unit = "tokens", .min = 1, .max = 1 << 24});
    v.field("micro_batch_size", micro_batch_size, "Packed sequences per forward pass; divides batch_size", {.unit = "sequences", .min = 1});
    v.field("num_workers", num_workers, "Threads that make data", {.min = 0, .status = inert("samples are made while the model trains")});
    v.field("pack_function", pack_function, kPackHelp);
    v.field("length", length, "All samples of seq_len tokens, or of random lengths");
    v.field("input_ids", input_ids, "Tokens that count the samples, or random ones");
    v.field("seed", seed, "Seed of the data", {.min = 0});
  }
};

using SftData = std::variant<SftDataConfig, FakeDataConfig>;

struct SftValConfig {
  int interval = 50;
  bool eval_on_start = false;
  SftData data;
  template <class V>
  void visit(V& v) {
    v.field("interval", interval, "Steps between two validations", {.unit = "steps", .min = 1});
    v.field("eval_on_start", eval_on_start, "Also validate before the first step");
    v.field("data", data, "Validation data");
  }
};

struct SftSingleNode {
  static constexpr std::string_view kType = "single_node";
  int num_gpus = 1;
  int num_infer_gpus = 1;
  template <class V>
  void visit(V& v) {
    v.field("num_gpus", num_gpus, "Ranks, one per GPU; on CPUs one process each", {.unit = "GPUs", .min = 1});
    v.field("num_infer_gpus", num_infer_gpus, "GPUs of the evaluations, after those of the ranks; 0 evaluates on the CPU",
            {.unit = "GPUs", .min = 0});
  }
};
struct SftMultiNode {
  static constexpr std::string_view kType = "multi_node";
  int num_nodes = 2;
  int num_infer_nodes = 0;
  int gpus_per_node = 8;
  std::optional<int> nodes_per_fsdp_group;
  template <class V>
  void visit(V& v) {
    v.field("num_nodes", num_nodes, "Nodes, each with one `prl launch sft`", {.unit = "nodes", .min = 1, .max = 4096});
    v.field("num_infer_nodes", num_infer_nodes, "Nodes of online evaluations",
            {.unit = "nodes",
             .min = 0,
             .status = inert("`prl evals @ OUT/configs/evals.json` evaluates the run on any machine that sees its folder")});
    v.field("gpus_per_node", gpus_per_node, "GPUs of each node, a rank on each; on CPUs one process each",
            {.unit = "GPUs", .min = 1, .max = 1024});
    v.field("nodes_per_fsdp_group", nodes_per_fsdp_group,
            "Nodes of the trainer that share one copy of masters and optimizer state; a divisor of their number",
            {.unit = "nodes", .min = 1, .status = passed_on("model.dp_replicate")});
  }
};
using SftDeployment = std::variant<SftSingleNode, SftMultiNode>;

/// `prl sft`.
struct SftConfig {
  TrainerModelConfig model;
  TokenizerConfig tokenizer;
  RendererConfig renderer;
  SftData data;
  std::optional<SftValConfig> val;
  std::optional<OnlineEvalConfig> eval;
  std::optional<EvalEngineConfig> inference;
  OptimConfig optim;
  SchedulerConfig scheduler;
  std::optional<TrainerCkptConfig> ckpt;
  std::optional<HealingConfig> healing;
  ComputeConfig compute;
  std::optional<std::int64_t> max_steps;
  std::int64_t seed = 42;
  bool deterministic = false;
  std::filesystem::path output_dir = "outputs";
  bool clean_output_dir = false;
  LogConfig log;
  std::optional<DashboardConfig> dashboard = DashboardConfig{};
  std::optional<WandbConfig> wandb;
  std::optional<TensorBoardConfig> tensorboard;
  std::optional<MlflowConfig> mlflow;
  std::optional<TrackioConfig> trackio;
  FileMonitorConfig file_monitor;
  std::optional<BenchModeConfig> bench;
  SftLossImpl loss_impl = SftLossImpl::kTorch;
  SftDeployment deployment;
  MatmulPrecision matmul_precision = MatmulPrecision::kHigh;
  int dist_timeout_seconds = 600;
  std::optional<GcConfig> gc;
  std::optional<std::filesystem::path> memory_profiler_path;
  std::optional<std::filesystem::path> trace_path;
  std::optional<HeartbeatConfig> heartbeat;
  std::map<std::string, std::string> env_vars;
  std::optional<SlurmConfig> slurm;
  bool dry_run = false;
  static constexpr StatusBelow kStatusBelow[] = {
      {"model.seq_len", inert("rows hold data.seq_len tokens")},
      {"eval.cancel_inflight_rollouts_on_eval", inert("no rollouts of training are played here")}};
  template <class V>
  void visit(V& v) {
    v.field("model", model, "The trained model");
    v.field("tokenizer", tokenizer, "Tokenizer and chat template");
    v.field("renderer", renderer, "How messages become tokens");
    v.field("data", data, "Training data");
    v.field("val", val, "Validation; none if not set");
    v.field("eval", eval, "Evaluations while training, in a process of their own; none if not set");
    v.field("inference", inference, "Engine of these evaluations; defaults if not set");
    v.field("optim", optim, "Optimizer");
    v.field("scheduler", scheduler, "Learning-rate schedule");
    v.field("ckpt", ckpt, "Checkpoints; off if not set");
    v.field("healing", healing, "Go on when a rank is lost; off if not set, then it ends the run");
    v.field("compute", compute, "Device and precision");
    v.field("max_steps", max_steps, "Last step, counted from the start of the run and not from a resume; endless if not set",
            {.unit = "steps", .min = 1});
    v.field("seed", seed, "Seed of everything random but the data's order", {.min = 0});
    v.field("deterministic", deterministic, "Fixed order everywhere: the same seed gives the same bits",
            {.status = inert("the same seed gives the same bits with and without it: sums have a fixed order")});
    v.field("output_dir", output_dir, "Folder of everything the run writes");
    v.field("clean_output_dir", clean_output_dir, "Empty output_dir first");
    v.field("log", log, "Logging");
    v.field("dashboard", dashboard, "The page that shows the run while it runs; off with --no-dashboard");
    v.field("wandb", wandb, "Weights & Biases");
    v.field("tensorboard", tensorboard, "Event files for TensorBoard");
    v.field("mlflow", mlflow, "MLflow");
    v.field("trackio", trackio, "trackio");
    v.field("file_monitor", file_monitor, "Metrics as JSONL");
    v.field("bench", bench, "Measure 4 steps and print a table");
    v.field("loss_impl", loss_impl, "Implementation of the cross-entropy", {.status = inert("there is one cross-entropy kernel")});
    v.field("deployment", deployment, "Devices");
    v.field("matmul_precision", matmul_precision, "Precision of float32 products on GPUs",
            {.status = inert("float32 products are always exact")});
    v.field("dist_timeout_seconds", dist_timeout_seconds, "Longest wait for another rank", {.unit = "seconds", .min = 1});
    v.field("gc", gc, "Garbage collection of the Python process", {.status = inert("there is no garbage collector")});
    v.field("memory_profiler_path", memory_profiler_path, "Folder that gets step_N/rank_R.json: the device's memory after each step");
    v.field("trace_path", trace_path, "Folder that gets trace.json, what all roles and devices did, for Perfetto; needs max_steps < 10");
    v.field("heartbeat", heartbeat, "Tell an address about each step");
    v.field("env_vars", env_vars, "Environment variables of the process");
    v.field("slurm", slurm, "Submit as a batch job instead of running here");
    v.field("dry_run", dry_run, "Check, write the resolved configuration and stop");
  }
};

}  // namespace prl::config
