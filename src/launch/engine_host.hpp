#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "config/inference_config.hpp"
#include "engine/adapter_set.hpp"
#include "engine/engine.hpp"
#include "launch/memory_plan.hpp"
#include "launch/model_setup.hpp"
#include "nn/peft.hpp"
#include "ops/context.hpp"
#include "weights/weight_receiver.hpp"

namespace prl::launch {

/// Default number of tokens per KV block: larger on a GPU, which copies longer contiguous runs efficiently.
std::int64_t default_block_size(DeviceKind device);
/// What the configuration puts in place of keys of the model's config.json.
nn::ConfigOverrides config_overrides(const config::InferenceConfig& config);
/// Longest prompt plus completion. Error{kInvalidArgument} if the model has fewer positions.
std::int64_t context_length(const config::InferenceConfig& config, const nn::ModelConfig& model);
/// Largest adapter rank that is served: vLLM's default, rounded up to the next of its supported sizes.
std::int64_t largest_lora_rank(const config::InferenceConfig& config);
/// Of the model that draws the drafts; nullopt if none does.
std::optional<nn::ModelConfig> draft_model_config(const config::InferenceConfig& config);
/// Of the model's own head for multi-token prediction, if that draws them. Error{kInvalidArgument} if there is none.
std::optional<nn::ModelConfig> draft_head_config(const config::InferenceConfig& config, const nn::ModelConfig& model);
/// Host memory that an engine has for key-value blocks of all its devices, in bytes: of kv_cache_offload, or for blocks on their way to
/// and from other engines, whichever is more. 0: none.
std::int64_t kv_offload_bytes(const config::InferenceConfig& config);
/// Error{kInvalidArgument} naming the key if kv_offload_bytes() is less than a block. Where kv.num_blocks is not set, the cache takes an
/// eighth of the free memory at most; on a GPU a memory plan has set it.
engine::EngineOptions engine_options(const config::InferenceConfig& config, const nn::ModelConfig& model, const DeviceRuntime& runtime);

/// `first` and those that follow it, `num` in all, to share the layers of an engine. Error{kUnavailable} if there are not so many.
std::vector<std::shared_ptr<DeviceRuntime>> devices_beside(const std::shared_ptr<DeviceRuntime>& first, int num);

/// How a server of the engine reads and writes text.
TextOptions engine_text_options(const config::InferenceConfig& config);

/// An engine with its device, tokenizer and templates, and a loader for weights from folders.
class EngineHost {
 public:
  /// Loads the model of `config`, on parallel.tp devices from that of `runtime` on. On a GPU it makes and prints a memory plan first, in
  /// which `num_versions` weights can exist at once: those that are served and those that are being loaded, and what else the caller holds.
  /// Error{kOutOfMemory} if that cannot fit.
  EngineHost(const config::InferenceConfig& config, std::shared_ptr<DeviceRuntime> runtime, int num_versions = 2);
  /// Uses weights that are already loaded: those of a trainer in the same process, whose plan sets kv.num_blocks.
  EngineHost(const config::InferenceConfig& config, std::shared_ptr<DeviceRuntime> runtime, nn::WeightsPtr weights);
  EngineHost(const config::InferenceConfig& config, std::shared_ptr<DeviceRuntime> runtime, std::nullptr_t) = delete;
  engine::Engine& engine() noexcept { return *engine_; }
  const TextSetup& text() const noexcept { return text_; }
  const std::filesystem::path& folder() const noexcept { return folder_; }
  /// Reads a Hugging Face folder into weights for this engine; with `previous`, they must be of the same model. Any one thread at a time.
  /// Errors of nn::load_weights and nn::check_same_model. model.rope_scaling holds for them as for the first.
  nn::WeightsPtr load(const std::filesystem::path& folder, PolicyVersion version, const nn::WeightsPtr& previous);
  /// Reads an adapter of PEFT's format for this engine. Any thread. Errors of nn::read_peft_adapter.
  engine::AdapterWeights load_adapter(const nn::PeftSource& source, std::int64_t max_rank);
  /// The same of one in the memory of the trainer whose store is at `store`, which trains it for engines to hold as `name`. Errors of
  /// weights::WeightReceiver::receive too.
  engine::AdapterWeights receive_adapter(const std::string& store, const std::string& name, PolicyVersion version, std::int64_t max_rank,
                                         std::chrono::milliseconds timeout);
  /// Weights from the memory of the trainer whose store is at `store`: a model's, or an adapter's, of the base in `previous`. Errors of
  /// weights::WeightReceiver::receive and nn::read_peft_adapter.
  nn::WeightsPtr receive(const std::string& store, PolicyVersion version, const nn::WeightsPtr& previous,
                         std::chrono::milliseconds timeout);
  /// Logs planned and peak memory, if there is a plan.
  void log_memory() const;

 private:
  void start(const config::InferenceConfig& config, nn::WeightsPtr weights);
  /// nullptr if no model draws drafts. Error{kInvalidArgument} if it has another vocabulary.
  nn::WeightsPtr load_draft_model(const config::InferenceConfig& config);
  weights::Received take(const std::string& store, PolicyVersion version, const std::string& adapter, std::chrono::milliseconds timeout);
  /// The base model of `previous` with an adapter. With loading_ held.
  nn::WeightsPtr with_adapter(const nn::PeftSource& source, PolicyVersion version, const nn::WeightsPtr& previous);
  /// With loading_ held.
  nn::BaseIdentity identity_of(const nn::WeightsPtr& weights);
  /// Of an adapter that has no checksum of its base, only a name.
  void warn_of_other_base(const nn::StoredAdapter& adapter, const nn::PeftSource& source) const;

  /// A context for each of the engine's devices.
  std::vector<ops::OpContext*> contexts() const;

  std::shared_ptr<DeviceRuntime> runtime_;
  std::vector<std::shared_ptr<DeviceRuntime>> devices_;  ///< it, and those that share the layers with it
  std::string name_;
  std::filesystem::path folder_;
  TextSetup text_;
  DType dtype_;
  DType adapter_dtype_;
  nn::ConfigOverrides overrides_;
  nn::ModelConfig model_;
  bool wants_head_ = false;  ///< for multi-token prediction
  std::optional<MemoryPlan> plan_;
  int port_;           ///< tells this engine from others on the machine
  bool gives_blocks_;  ///< to other engines, which must know whether their adapters are the same
  std::once_flag receives_;
  std::unique_ptr<weights::WeightReceiver> receiver_;  ///< once weights were received
  std::unique_ptr<ops::OpSession> load_session_;
  std::vector<std::unique_ptr<ops::OpSession>> other_sessions_;
  std::mutex loading_;  ///< guards load_session_ and what follows of it
  std::weak_ptr<const nn::Weights> identified_;
  nn::BaseIdentity identity_;  ///< of identified_
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace prl::launch
