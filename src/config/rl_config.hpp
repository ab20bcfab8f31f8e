#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/checkpoint_config.hpp"
#include "config/inference_config.hpp"
#include "config/orchestrator_config.hpp"
#include "config/schema.hpp"
#include "config/shared_config.hpp"
#include "config/trainer_config.hpp"

namespace prl::config {

/// Variable that a launcher sets for the roles it starts: the output folder that it has locked and made ready, so that they do not. It
/// has warned of keys without effect too.
inline constexpr const char* kRunFolderVariable = "PRL_RUN_FOLDER";

/// Keys that `rl` passes on to its roles; see resolve_rl for where each one goes.
struct SharedModelConfig {
  std::optional<std::string> name;
  std::optional<VlmConfig> vlm;
  template <class V>
  void visit(V& v) {
    v.field("name", name, "Model of all roles: a Hugging Face folder");
    v.field("vlm", vlm, "Images in training: set it for a model with a vision tower");
  }
};

/// All roles in one process, on one device.
struct ColocatedDeployment {
  static constexpr std::string_view kType = "colocated";
  template <class V>
  void visit(V&) {}
};
/// One process per role, on one machine.
struct SingleNodeDeployment {
  static constexpr std::string_view kType = "single_node";
  int gpus_per_node = 8;
  int num_train_gpus = 1;
  int num_infer_gpus = 1;
  int max_engine_restarts = 3;
  int max_orchestrator_restarts = 3;
  int max_stopped_seconds = 60;
  int max_hung_seconds = 120;
  int max_trainer_restarts = 0;
  template <class V>
  void visit(V& v) {
    v.field("gpus_per_node", gpus_per_node, "GPUs of the machine",
            {.unit = "GPUs", .min = 1, .status = inert("the GPUs that are there are counted")});
    v.field("num_train_gpus", num_train_gpus, "Ranks of the trainer, one per GPU; on CPUs one process each", {.unit = "GPUs", .min = 1});
    v.field("num_infer_gpus", num_infer_gpus, "GPUs of inference, with an engine on each",
            {.unit = "GPUs", .min = 0, .max = 1024, .status = passed_on("inference.parallel.dp")});
    v.field("max_engine_restarts", max_engine_restarts, "Times that an engine which dies is started again; beyond, its death ends the run",
            {.min = 0});
    v.field("max_orchestrator_restarts", max_orchestrator_restarts,
            "Times that an orchestrator which a signal kills is started again and goes on where it was; 0 keeps no state for that",
            {.min = 0});
    v.field("max_stopped_seconds", max_stopped_seconds,
            "An engine or orchestrator that a signal stops (SIGSTOP) for longer is killed and started again; 0: it is waited for",
            {.unit = "seconds", .min = 0, .max = 1'000'000});
    v.field("max_hung_seconds", max_hung_seconds,
            "An engine that has served and does not answer /health for longer is killed and started again; 0: it is waited for",
            {.unit = "seconds", .min = 0, .max = 1'000'000});
    v.field("max_trainer_restarts", max_trainer_restarts,
            "Times that all roles begin again at the last checkpoint, or at the start, after a signal killed the trainer", {.min = 0});
  }
};
/// The roles spread over nodes, each with one `prl launch` of the same command: the first nodes run inference, the next the trainer.
struct MultiNodeDeployment {
  static constexpr std::string_view kType = "multi_node";
  int gpus_per_node = 8;
  int num_train_nodes = 1;
  std::optional<int> num_infer_nodes;
  int num_infer_replicas = 1;
  std::optional<int> nodes_per_fsdp_group;
  bool orchestrator_on_inference = false;
  int max_engine_restarts = 3;
  int max_orchestrator_restarts = 3;
  int max_stopped_seconds = 60;
  int max_hung_seconds = 120;
  template <class V>
  void visit(V& v) {
    v.field("gpus_per_node", gpus_per_node, "GPUs of each node: an engine or a trainer rank on each; on CPUs one process each",
            {.unit = "GPUs", .min = 1, .max = 1024});
    v.field("num_train_nodes", num_train_nodes, "Nodes of the trainer", {.unit = "nodes", .min = 1, .max = 1024});
    v.field("num_infer_nodes", num_infer_nodes, "Nodes of inference; one if not set and there is an [inference] section",
            {.unit = "nodes", .min = 0, .max = 1024});
    v.field("num_infer_replicas", num_infer_replicas, "Independent groups of inference nodes",
            {.min = 1, .status = inert("every engine stands for itself: the orchestrator spreads requests over all")});
    v.field("nodes_per_fsdp_group", nodes_per_fsdp_group,
            "Nodes of the trainer that share one copy of masters and optimizer state; a divisor of their number",
            {.unit = "nodes", .min = 1, .status = passed_on("trainer.model.dp_replicate")});
    v.field("orchestrator_on_inference", orchestrator_on_inference,
            "Run the orchestrator on the last inference node instead of the first trainer node");
    v.field("max_engine_restarts", max_engine_restarts, "Times that an engine which dies is started again; beyond, its death ends the run",
            {.min = 0});
    v.field("max_orchestrator_restarts", max_orchestrator_restarts,
            "Times that an orchestrator which a signal kills is started again and goes on where it was; 0 keeps no state for that",
            {.min = 0});
    v.field("max_stopped_seconds", max_stopped_seconds,
            "An engine or orchestrator that a signal stops (SIGSTOP) for longer is killed and started again; 0: it is waited for",
            {.unit = "seconds", .min = 0, .max = 1'000'000});
    v.field("max_hung_seconds", max_hung_seconds,
            "An engine that has served and does not answer /health for longer is killed and started again; 0: it is waited for",
            {.unit = "seconds", .min = 0, .max = 1'000'000});
  }
};
using RlDeployment = std::variant<ColocatedDeployment, SingleNodeDeployment, MultiNodeDeployment>;

/// `prl rl`: all roles, and keys that are passed on to them. With trainer.max_concurrent_runs above 1 the section `orchestrator` is none
/// of a run: each run has a configuration of its own, in its folder.
///
/// After resolve_rl the sections `trainer`, `orchestrator` and `inference` are complete: the launcher reads those (and
/// `deployment`, `output_dir`, `clean_output_dir`, ...), never the shared keys.
struct RlConfig {
  TrainerConfig trainer;
  OrchestratorConfig orchestrator;
  std::optional<InferenceConfig> inference;
  std::optional<InferenceConfig> teacher_inference;
  std::optional<SharedModelConfig> model;
  std::optional<TokenizerConfig> tokenizer;
  std::optional<std::int64_t> max_steps;
  std::optional<int> seq_len;
  std::optional<int> max_model_len;
  std::optional<int> max_async_level;
  std::optional<SharedCkptConfig> ckpt;
  std::optional<WandbConfig> wandb;
  std::optional<TensorBoardConfig> tensorboard;
  std::optional<MlflowConfig> mlflow;
  std::optional<TrackioConfig> trackio;
  SharedLogConfig log;
  std::optional<DashboardConfig> dashboard = DashboardConfig{};
  std::optional<WeightBroadcast> weight_broadcast;
  std::optional<RolloutTransport> rollout_transport;
  std::optional<RlDeployment> deployment;
  ComputeConfig compute;
  std::int64_t seed = 42;
  bool deterministic = false;
  std::filesystem::path output_dir = "outputs";
  bool clean_output_dir = false;
  std::optional<BenchModeConfig> bench;
  std::vector<std::filesystem::path> runs;
  std::optional<std::vector<int>> inference_gpu_ids;
  std::optional<std::vector<int>> trainer_gpu_ids;
  std::optional<std::vector<int>> teacher_gpu_ids;
  std::map<std::string, std::string> env_vars;
  std::optional<SlurmConfig> slurm;
  bool dry_run = false;
  static constexpr StatusBelow kStatusBelow[] = {
      {"model.vlm", passed_on("trainer.model.vlm orchestrator.student.model.vlm")},
      {"model.name", passed_on("trainer.model.name orchestrator.student.model.name inference.model.name")},
      {"tokenizer.name", passed_on("trainer.tokenizer.name orchestrator.tokenizer.name")},
      {"tokenizer.chat_template",
       passed_on("trainer.tokenizer.chat_template orchestrator.tokenizer.chat_template inference.model.chat_template")},
      {"log.level", passed_on("trainer.log.level orchestrator.log.level inference.log.level")},
      {"log.vf_level", passed_on("orchestrator.log.vf_level")},
      {"log.json_logging", passed_on("trainer.log.json_logging orchestrator.log.json_logging inference.log.json_logging")},
      {"log.interval", passed_on("trainer.log.interval orchestrator.log.interval")},
      {"log.file", passed_on("trainer.log.file orchestrator.log.file inference.log.file")},
      {"ckpt.output_dir", passed_on("trainer.ckpt.output_dir orchestrator.ckpt.output_dir")},
      {"ckpt.interval", passed_on("trainer.ckpt.interval orchestrator.ckpt.interval")},
      {"ckpt.keep_last", passed_on("trainer.ckpt.keep_last orchestrator.ckpt.keep_last")},
      {"ckpt.keep_interval", passed_on("trainer.ckpt.keep_interval orchestrator.ckpt.keep_interval")},
      {"ckpt.resume_step", passed_on("trainer.ckpt.resume_step orchestrator.ckpt.resume_step")},
      {"ckpt.weights_only", passed_on("trainer.ckpt.weights_only")},
      {"ckpt.save_async", passed_on("trainer.ckpt.save_async")},
      {"trainer.deterministic", passed_on("orchestrator.deterministic orchestrator.max_async_level")},
      {"orchestrator.ckpt.keep_last", passed_on("trainer.ckpt.keep_last")},
      {"orchestrator.ckpt.keep_interval", passed_on("trainer.ckpt.keep_interval")},
      {"compute.device", passed_on("trainer.compute.device inference.compute.device")},
      {"compute.dtype", passed_on("trainer.compute.dtype inference.compute.dtype")},
      {"compute.num_threads", passed_on("trainer.compute.num_threads inference.compute.num_threads")},
  };
  template <class V>
  void visit(V& v) {
    v.field("trainer", trainer, "The trainer");
    v.field("orchestrator", orchestrator, "The orchestrator");
    v.field("inference", inference, "The inference server; none is started if not set");
    v.field("teacher_inference", teacher_inference, "A second server, for a teacher");
    v.field("model", model, "Model of all roles");
    v.field("tokenizer", tokenizer, "Tokenizer of all roles");
    v.field("max_steps", max_steps, "Last step of trainer and orchestrator",
            {.unit = "steps", .min = 1, .status = passed_on("trainer.max_steps orchestrator.max_steps")});
    v.field("seq_len", seq_len, "Sample length of orchestrator and trainer",
            {.unit = "tokens", .min = 1, .max = 1 << 24, .status = passed_on("trainer.model.seq_len orchestrator.seq_len")});
    v.field("max_model_len", max_model_len, "Longest prompt plus completion of inference",
            {.unit = "tokens", .min = 1, .status = passed_on("inference.model.max_model_len")});
    v.field("max_async_level", max_async_level, "Steps by which rollouts may be ahead of the weights; 0 is lock-step",
            {.unit = "steps", .min = 0, .max = 64, .status = passed_on("trainer.max_async_level orchestrator.max_async_level")});
    v.field("ckpt", ckpt, "Checkpoints of trainer and orchestrator; off if not set");
    v.field("wandb", wandb, "Weights & Biases for trainer and orchestrator");
    v.field("tensorboard", tensorboard, "Event files for TensorBoard");
    v.field("mlflow", mlflow, "MLflow");
    v.field("trackio", trackio, "trackio");
    v.field("log", log, "Logging of all roles");
    v.field("dashboard", dashboard, "The page that shows the run while it runs; off with --no-dashboard");
    v.field("weight_broadcast", weight_broadcast, "How new weights reach inference; chosen by the deployment if not set");
    v.field("rollout_transport", rollout_transport, "How samples reach the trainer; chosen by the deployment if not set");
    v.field("deployment", deployment, "Processes and devices; colocated if not set and there is one device");
    v.field("compute", compute, "Device and precision of all roles");
    v.field("seed", seed, "Seed of everything random", {.min = 0, .status = passed_on("trainer.seed orchestrator.seed inference.seed")});
    v.field("deterministic", deterministic, "Fixed order everywhere: the same seed gives the same bits",
            {.status = passed_on("orchestrator.max_async_level orchestrator.deterministic")});
    v.field("output_dir", output_dir, "Folder of everything the run writes");
    v.field("clean_output_dir", clean_output_dir, "Empty output_dir first");
    v.field("bench", bench, "Measure 4 steps and print a table");
    v.field("runs", runs, "With trainer.max_concurrent_runs above 1: orchestrators' configurations, each a run named after its file");
    v.field("inference_gpu_ids", inference_gpu_ids, "GPUs of inference, with an engine on each; others than the trainer's make processes",
            {.min = 0});
    v.field("trainer_gpu_ids", trainer_gpu_ids, "GPUs of the trainer, one rank each", {.min = 0});
    v.field("teacher_gpu_ids", teacher_gpu_ids, "GPUs of the teacher's server", {.min = 0});
    v.field("env_vars", env_vars, "Environment variables of all processes");
    v.field("slurm", slurm, "Submit as a batch job instead of running here");
    v.field("dry_run", dry_run, "Check, write the resolved configurations and stop");
  }
};

}  // namespace prl::config
