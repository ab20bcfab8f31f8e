#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "config/schema.hpp"

/// Checkpoints: off unless the section is there; an empty section saves only at the end of training.
namespace prl::config {

struct WeightCkptConfig {
  bool save_sharded = true;
  std::string save_format = "safetensors";
  bool save_adapter_separately = false;
  template <class V>
  void visit(V& v) {
    v.field("save_sharded", save_sharded, "Split Hugging Face weights into files of at most 5 GB with an index",
            {.status = inert("weights of more than 5 GB are always split")});
    v.field("save_format", save_format, "Format of the weights: safetensors", {.status = inert("safetensors is the only format")});
    v.field("save_adapter_separately", save_adapter_separately,
            "Also write the LoRA adapter by itself, in PEFT's format: weights/step_N/lora_adapters");
  }
};

/// What `rl` passes on to trainer and orchestrator.
struct SharedCkptConfig {
  std::optional<std::filesystem::path> output_dir;
  std::optional<int> interval;
  std::optional<int> keep_last;
  std::optional<int> keep_interval;
  std::optional<int> resume_step;
  std::optional<bool> weights_only;
  std::optional<bool> save_async;
  std::optional<WeightCkptConfig> weights;
  template <class V>
  void visit(V& v) {
    v.field("output_dir", output_dir, "Folder of the checkpoints and weights instead of output_dir");
    v.field("interval", interval, "Steps between two checkpoints; only the final one if not set", {.unit = "steps", .min = 1});
    v.field("keep_last", keep_last, "Keep only this many newest checkpoints", {.min = 1});
    v.field("keep_interval", keep_interval, "Keep every checkpoint of this many steps for good", {.unit = "steps", .min = 1});
    v.field("resume_step", resume_step, "Step to resume from, -1 for the latest", {.min = -1});
    v.field("weights_only", weights_only, "Write only the Hugging Face weights, no optimizer state");
    v.field("save_async", save_async, "Save in the background while training goes on");
    v.field("weights", weights, "Hugging Face weights written with each checkpoint");
  }
};

/// Checkpoints of a trainer, under <output_dir>/checkpoints/step_N/trainer and <output_dir>/weights/step_N.
struct TrainerCkptConfig {
  std::optional<std::filesystem::path> output_dir;
  std::optional<int> interval;
  std::optional<int> keep_last;
  std::optional<int> keep_interval;
  std::optional<int> resume_step;
  bool weights_only = false;
  bool save_async = false;
  std::optional<WeightCkptConfig> weights = WeightCkptConfig{};
  bool skip_progress = false;
  bool skip_scheduler = false;
  bool skip_dataloader = false;
  bool skip_optimizer = false;
  template <class V>
  void visit(V& v) {
    v.field("output_dir", output_dir, "Folder of the checkpoints instead of output_dir");
    v.field("interval", interval, "Steps between two checkpoints; only the final one if not set", {.unit = "steps", .min = 1});
    v.field("keep_last", keep_last, "Keep only this many newest checkpoints", {.min = 1});
    v.field("keep_interval", keep_interval, "Keep every checkpoint of this many steps for good", {.unit = "steps", .min = 1});
    v.field("resume_step", resume_step, "Step to resume from, -1 for the latest", {.min = -1});
    v.field("weights_only", weights_only, "Write only the Hugging Face weights, no optimizer state");
    v.field("save_async", save_async, "Save in the background while training goes on");
    v.field("weights", weights, "Hugging Face weights written with each checkpoint; None for none");
    v.field("skip_progress", skip_progress, "Do not restore step and token counts");
    v.field("skip_scheduler", skip_scheduler, "Do not restore the learning-rate schedule");
    v.field("skip_dataloader", skip_dataloader, "Do not restore the position in the data");
    v.field("skip_optimizer", skip_optimizer, "Do not restore the optimizer state");
  }
};

/// Checkpoints of the orchestrator, under <output_dir>/checkpoints/step_N/orchestrator, beside the trainer's.
struct OrchestratorCkptConfig {
  std::optional<std::filesystem::path> output_dir;
  std::optional<int> interval;
  std::optional<int> keep_last;
  std::optional<int> keep_interval;
  std::optional<int> resume_step;
  std::optional<double> wait_for_weights_timeout;
  bool skip_progress = false;
  bool skip_buffer = false;
  template <class V>
  void visit(V& v) {
    v.field("output_dir", output_dir, "Folder of the checkpoints instead of output_dir; the trainer's too");
    v.field("interval", interval, "Steps between two checkpoints; only the final one if not set", {.unit = "steps", .min = 1});
    v.field("keep_last", keep_last, "Keep only this many newest checkpoints",
            {.min = 1, .status = inert("the trainer removes old checkpoints; set trainer.ckpt.keep_last")});
    v.field("keep_interval", keep_interval, "Keep every checkpoint of this many steps for good",
            {.unit = "steps", .min = 1, .status = inert("the trainer removes old checkpoints; set trainer.ckpt.keep_interval")});
    v.field("resume_step", resume_step, "Step to resume from, -1 for the latest", {.min = -1});
    v.field("wait_for_weights_timeout", wait_for_weights_timeout, "How long to wait for the weights of the resumed step",
            {.unit = "seconds", .min = 0});
    v.field("skip_progress", skip_progress, "Do not restore step and sample counts");
    v.field("skip_buffer", skip_buffer, "Do not restore the buffer of tasks and unconsumed rollouts");
  }
};

/// What becomes of a run of several ranks that loses one.
struct HealingConfig {
  int max_restarts = 3;
  double backoff_seconds = 1;
  template <class V>
  void visit(V& v) {
    v.field("max_restarts", max_restarts, "Losses that the run survives; the others go on from a neighbour's copy of the lost state",
            {.min = 1, .max = 1000});
    v.field("backoff_seconds", backoff_seconds, "Pause before a lost rank is started again, twice as long each time",
            {.unit = "seconds", .min = 0, .max = 3600});
  }
};

}  // namespace prl::config
