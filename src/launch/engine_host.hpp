#pragma once

#include <filesystem>
#include <memory>

#include "config/inference_config.hpp"
#include "engine/engine.hpp"
#include "launch/model_setup.hpp"
#include "ops/context.hpp"

namespace prl::launch {

/// Tokens per block of keys and values where nothing is said: a GPU's copy engine wants longer runs of rows than a CPU.
std::int64_t default_block_size(DeviceKind device);
/// `is_colocated`: a trainer shares the device.
engine::EngineOptions engine_options(const config::InferenceConfig& config, const nn::ModelConfig& model, const DeviceRuntime& runtime,
                                     bool is_colocated);

/// An engine and what it stands on: device, text, and a loader for weights from folders.
class EngineHost {
 public:
  /// Loads the model of `config`, or takes `weights` that are there already (the trainer's, in the same process).
  EngineHost(const config::InferenceConfig& config, std::shared_ptr<DeviceRuntime> runtime, nn::WeightsPtr weights);
  engine::Engine& engine() noexcept { return *engine_; }
  const TextSetup& text() const noexcept { return text_; }
  const std::filesystem::path& folder() const noexcept { return folder_; }
  /// Reads a Hugging Face folder into weights for this engine. Any one thread at a time.
  nn::WeightsPtr load(const std::filesystem::path& folder, PolicyVersion version, const nn::WeightsPtr& previous);

 private:
  std::shared_ptr<DeviceRuntime> runtime_;
  std::filesystem::path folder_;
  TextSetup text_;
  DType dtype_;
  nn::ModelConfig model_;
  std::unique_ptr<ops::OpSession> load_session_;
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace prl::launch
