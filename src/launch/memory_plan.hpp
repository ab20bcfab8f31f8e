#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/inference_config.hpp"
#include "config/optim_config.hpp"
#include "device/device.hpp"
#include "nn/model_config.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"

namespace prl::launch {

/// How a GPU's memory is divided, decided before anything large is allocated. The trainer's activations are estimated from sizes and then
/// measured by a step over random tokens; the other parts follow from sizes; the KV cache gets the rest, up to what it asks for. There are
/// plans for a training run, for trainer and engine in one process, and for an engine alone.
struct MemoryPlan {
  std::vector<std::pair<std::string, std::size_t>> parts;  ///< bytes
  std::vector<std::pair<std::string, std::size_t>> host;   ///< what lies in host memory instead
  std::size_t available = 0;                               ///< that the run may take, bytes
  std::size_t foretold_activations = 0;                    ///< set once they have been measured
  std::int64_t num_kv_blocks = 0;                          ///< where there is an engine
  std::int64_t num_kept_logits = 0;                        ///< trainer::PolicyOptions::num_kept_logits; activations count them

  std::size_t total() const noexcept;
  /// Whether it does, with a reserve for what no part names.
  bool fits() const noexcept;
  std::size_t part(std::string_view name) const noexcept;  ///< 0 if there is none
  /// "masters 2.2 GiB, gradients 2.2 GiB, ...; 12.1 of 139.3 GiB; in host memory: optimizer 4.4 GiB"
  std::string to_string() const;
  /// Compares the plan with the measured peak: "memory: 43.32 GiB planned, 43.09 GiB at the peak of trainer and engine".
  /// {"process", "available", "total", "parts": [{"name", "bytes", "foretold"?}, ...], "host": [{"name", "bytes"}, ...], "num_kv_blocks"},
  /// what the page shows.
  std::string to_json(std::string_view process) const;
  void log_peak(std::size_t peak_bytes, std::string_view of) const;
};

/// Writes it to <run_folder>/memory/<process>.json, `role` being the process's name unless its launcher gave it another; an empty folder is
/// that of the launcher's run, if one started this process. A folder that cannot be written is a warning.
void keep_plan(const MemoryPlan& plan, const std::string& role, std::filesystem::path run_folder);

/// What of a training run determines its memory.
struct TrainingShape {
  const nn::ModelConfig& model;
  const trainer::PolicyOptions& policy;
  const trainer::GradientStepOptions& step;
  std::int64_t seq_len = 0;         ///< tokens of a micro-batch
  std::size_t bytes_of_others = 0;  ///< that logits must leave to whoever shares the device
  /// Versions of all weights that are kept on the device for engines, beside those that are computed with: one former version where they
  /// are sent whole; twice an Nth where each of N ranks sends a part, of which it keeps a copy.
  double kept_for_engines = 0;
};
/// Of `num_tokens` tokens of a pass in `compute`, how many may save their logits for the backward pass: they get at most a sixth of
/// `bytes_left`, the memory beyond what is needed, so that a KV cache loses no more than that.
std::int64_t affordable_logits(const nn::ModelConfig& model, DType compute, std::int64_t num_tokens, std::size_t bytes_left);

/// Share of a device's memory that a plan leaves to the driver's context, libraries and what no part names.
inline constexpr double kMemoryReserve = 0.02;

/// What such a run takes of a device with `available` bytes, which need not be there; see MemoryPlan::fits().
MemoryPlan foretell_training(std::size_t available, const TrainingShape& shape, bool may_keep_logits = true);

/// Masters, gradients, optimizer, packed weights and activations. Error{kOutOfMemory} with the parts if they cannot fit; a warning if the
/// host's part takes nearly all that is free there.
MemoryPlan plan_training(const DeviceRuntime& runtime, const TrainingShape& shape);

/// Measures the activations of a micro-batch of `seq_len` tokens, which `policy` then has memory for. Error{kOutOfMemory} as above.
void measure_activations(MemoryPlan& plan, trainer::Policy& policy, std::int64_t seq_len);

/// The policy of a training run, on a GPU by a plan and with its activations measured.
struct PlannedPolicy {
  std::optional<MemoryPlan> plan;
  std::unique_ptr<trainer::Policy> policy;
};
PlannedPolicy make_policy(const std::shared_ptr<DeviceRuntime>& runtime, trainer::PolicyOptions options,
                          const trainer::GradientStepOptions& step, std::int64_t seq_len, std::size_t bytes_of_others = 0,
                          double kept_for_engines = 0);

/// What each further version of a trainer's weights takes: all of them, or what is trained beside a base that all versions share.
std::size_t version_bytes(const trainer::PolicyOptions& policy, const nn::ModelConfig& model);
/// Minimum memory of an engine beside a trainer, whose versions take `of_version`: its KV cache holds one sequence of full length.
std::size_t least_engine_bytes(const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute,
                               std::size_t of_version);
/// Adds what an engine beside the trainer needs and sets num_kv_blocks. Error{kOutOfMemory} if not one sequence of full length fits.
void add_engine(MemoryPlan& plan, const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute,
                std::size_t of_version);

/// What an engine without a trainer may take: what is free, and at most inference.gpu_memory_utilization of the device.
std::size_t engine_share(const DeviceRuntime& runtime, const config::InferenceConfig& inference);
/// A part of the plan of an engine on several devices: the weights of a whole model as they come from a trainer's memory, on the first
/// device.
inline constexpr std::string_view kReceivedWeights = "received weights";
/// The plan of such an engine, for each of its devices; kReceivedWeights if they take up to half of it with all other weights.
/// `num_versions`: weights that can exist at once, the served ones among them. Error{kOutOfMemory} if not one sequence of full length fits.
MemoryPlan plan_engine(std::size_t available, const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute,
                       int num_versions);

/// Whether this device gets a plan: GPUs do; host memory has swap and is shared with other processes.
inline bool is_planned(const DeviceRuntime& runtime) { return runtime.device().kind == DeviceKind::kCuda; }

}  // namespace prl::launch
