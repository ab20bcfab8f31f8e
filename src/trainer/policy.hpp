#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "device/host_link.hpp"
#include "nn/adapter.hpp"
#include "nn/decoder.hpp"
#include "nn/late_weights.hpp"
#include "nn/layered_weights.hpp"
#include "ops/context.hpp"
#include "trainer/context_group.hpp"
#include "trainer/mtp_training.hpp"
#include "trainer/row_images.hpp"
#include "trainer/shard_plan.hpp"
#include "weights/manifest.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

/// Which masters a rank holds: its elements of the ShardPlan.
struct MasterShare {
  int rank = 0, num_ranks = 1;
  bool keeps_blocks = false;
  bool divides_grads = false;    ///< gradients lie in memory section by section
  bool splits_tied = false;      ///< nn::grad_sections()
  int grad_places = 1;           ///< memories in which layers' gradients take turns
  bool divides_experts = false;  ///< each rank has some experts of each layer, whole; with PolicyOptions::gathers_layers
};
/// The plan by which masters are divided among `num_ranks`.
ShardPlan shard_plan(const nn::TensorTable& table, int num_ranks, const MasterShare& share);

struct PolicyOptions {
  std::filesystem::path model;                ///< Hugging Face folder
  DType compute = DType::kF32;                ///< of matrix products; masters are always fp32
  int num_threads = 0;                        ///< 0: one per available core
  nn::ActivationOffload offload;              ///< where activations that are kept wait for the backward pass
  nn::ActivationCheckpointing checkpointing;  ///< what is computed again in the backward pass instead of kept
  std::int64_t num_kept_logits = 0;           ///< tokens whose logits wait for the backward pass, where the device can
  bool random_init = false;                   ///< do not load weights
  std::optional<std::int64_t> num_layers;     ///< keep only the first layers (with random_init)
  std::uint64_t seed = 0;                     ///< of random_init
  std::optional<nn::ModelConfig> shape{};     ///< with random_init: of this shape, and no folder is read
  std::optional<nn::AdapterConfig> lora{};    ///< train this adapter (and its modules_to_save) instead of all weights
  std::optional<DType> adapter_dtype{};       ///< that the adapter computes in: kF32, or `compute`, as without it
  MasterShare share{};                        ///< so that masters are never whole; a GradientStep with other ranks changes it
  bool gathers_layers = false;  ///< nn::LayeredWeights: a GradientStep brings layers from the ranks; with lora those of the base
  nn::EightBits eight_bits = nn::EightBits::kNone;
  bool attends_to_latents = false;           ///< nn::ConfigOverrides'
  bool freezes_routers = false;              ///< routers of experts are not trained, as they never are with lora
  bool replays_routes = false;               ///< tokens of rows take the experts that the rows say (MicroBatch::routed_experts)
  bool balances_routes = false;              ///< token t of a row takes experts t * K to t * K + K - 1, modulo their number, in every layer
  std::optional<MtpTrainingOptions> mtp{};   ///< a head for multi-token prediction is trained beside the policy
  bool takes_images = false;                 ///< the vision tower is loaded, frozen, and rows may have images
  std::shared_ptr<HostLink> masters_host{};  ///< masters live in host memory and visit the device when they are stepped
};
/// Of the model that a policy of these options trains. Error{kInvalidArgument} naming the key; errors of reading the folder.
nn::ModelConfig model_config(const PolicyOptions& options);
/// What such a policy trains. Error{kInvalidArgument} naming a pattern of `lora`.
nn::TensorTablePtr trained_tensors(const PolicyOptions& options, const nn::ModelConfig& model);

/// A model on a device whose weights the adapters of several policies share. Those policies work on one thread, in turns.
struct BaseModel {
  std::shared_ptr<DeviceRuntime> runtime;
  std::shared_ptr<ops::OpSession> session;
  nn::WeightsPtr weights;    ///< with base_checksum
  nn::VisionTowerPtr tower;  ///< if policies take images
};
/// Reads the model of `options`. Errors of reading the folder.
BaseModel load_base_model(std::shared_ptr<DeviceRuntime> runtime, const PolicyOptions& options);

/// The model being trained: masters, gradients, the packed weights of the current version, and forward and backward over
/// packed rows. With `lora` masters and gradients are those of the adapter, and all versions share the base's packed weights. One thread.
class Policy {
 public:
  /// Error{kNotFound|kCorrupt|...} from reading the folder.
  Policy(std::shared_ptr<DeviceRuntime> runtime, PolicyOptions options);
  /// An adapter of a base that others share: `options` have lora, and say the same of the model as those the base was loaded with.
  Policy(const BaseModel& base, PolicyOptions options);
  ~Policy();
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  ops::OpContext& context() noexcept { return session_->context(); }
  nn::Parameters& parameters() noexcept { return parameters_; }
  const nn::ModelConfig& config() const noexcept { return parameters_.config(); }
  const PolicyOptions& options() const noexcept { return options_; }
  /// Those that are late are waited for. Errors of who sends them.
  const nn::WeightsPtr& weights() const;

  /// Packs the masters anew as `version`: after a step, and after a checkpoint was loaded. `rounded`, if defined, holds all of them in the
  /// compute dtype; it is needed where a part of the masters is held. If it is late, forward() and evaluate() wait for it layer by layer;
  /// not with `lora`.
  void refresh(PolicyVersion version, nn::LateValues rounded = {});
  /// Memory for the next weights, which the optimizer may fill as part of its step (Optimizer::step); undefined where the device packs
  /// weights from the masters, all of which are held.
  Tensor room_for_weights();
  /// Writes masters that are held, in the compute dtype, to `to` [count].
  void round(nn::ElementRange masters, const Tensor& to);
  /// Where layers are brought, writes this rank's values of a part of one, in the compute dtype, to `to` [count]: of masters that are held,
  /// or with `lora` of the base as it is on disk.
  void write_layer(nn::ElementRange of_model, const Tensor& to);
  /// With `lora`, all who bring layers call it once they do: the base knows its checksum from then on. `any` is whether one of them says
  /// so.
  void know_base(const std::function<bool(bool says)>& any);
  /// Where layers are brought when they are computed with; nullptr: all weights are here. All who share them then make the same calls of
  /// forward(), backward(), evaluate() and manifest(), with pass() in place of the first two on a rank without a row.
  nn::LayeredWeights* layered() noexcept { return layered_.get(); }
  /// Where ranks divide the experts, which have those of the others' rows, pass() is a row of one token that counts nowhere; pass(false)
  /// may follow a forward() of a row then.
  void pass(bool is_forward);
  /// Of weights whose experts are divided, of which this rank has another share from now on: experts are zero until they are set, what lies
  /// outside of layers stays.
  void share_experts(nn::ExpertShare share);
  /// Where layers are brought, and not with `lora`: all who share them call it, and those that ask have the values for save_for_engines()
  /// and flat_values() until the weights change.
  void gather_values(bool asks);
  /// Restores the initial masters and weights, version 0: read from the model folder or initialised again.
  void load_initial();
  /// Writes the current weights as a model folder: the masters rounded to the compute dtype, or base and adapter merged.
  void save(const std::filesystem::path& folder, const nn::Companions& companions, std::uint64_t max_shard_bytes) const;
  /// Writes what an engine needs that holds the base model: the adapter alone with `lora`, else all weights.
  void save_for_engines(const std::filesystem::path& folder, const nn::Companions& companions, std::uint64_t max_shard_bytes) const;
  /// All values in the compute dtype (nn::flat_values), which stay as they are: those of the present weights where these are one array on a
  /// device, else in host memory. Not with `lora`.
  Tensor flat_values();
  /// Forward with a tape over one row, predicting targets_T (-1: nothing), then backward once.
  nn::TokenStats forward(const wire::MicroBatch& row, std::span<const std::int32_t> targets_T);
  void backward(std::span<const float> dlogp_T);
  /// What trains the head beside the policy, which backward() adds its row to; nullptr: none is trained.
  MtpTraining* head() noexcept { return head_.get(); }
  /// How rows are cut from now on, and who shares them: forward() then gives the values of the whole row at each rank that does, and
  /// backward() takes them. `group` is borrowed; nullptr: this rank has whole rows. Error{kInvalidArgument} (check_row_cut).
  void share_rows(const RowCut& cut, ContextGroup* group);
  /// Forward only.
  nn::TokenStats evaluate(const wire::MicroBatch& row, std::span<const std::int32_t> targets_T);
  /// Runs forward and backward over random tokens, as many as a micro-batch may have, and discards the result: this allocates activations
  /// and scratch memory and autotunes kernels. Returns the bytes that it allocated.
  std::size_t reserve(std::int64_t num_tokens);
  /// Checksum and probe log-probabilities of the current weights, what an engine must match.
  weights::WeightManifest manifest();

 private:
  /// `base` may be null: it is loaded if it is needed.
  Policy(std::shared_ptr<DeviceRuntime> runtime, std::shared_ptr<ops::OpSession> session, nn::WeightsPtr base, nn::VisionTowerPtr tower,
         PolicyOptions options);
  nn::WeightsPtr initial_weights();

  PolicyOptions options_;
  std::shared_ptr<DeviceRuntime> runtime_;
  std::shared_ptr<ops::OpSession> session_;
  nn::Parameters parameters_;
  std::unique_ptr<nn::TrainableModel> model_;
  std::unique_ptr<nn::InferenceModel> probe_model_;
  RowCut cut_;
  ContextGroup* group_ = nullptr;
  std::int64_t num_row_tokens_ = 0;  ///< of the last forward(), without what it was filled up with
  nn::WeightsPtr base_;              ///< with `lora`: what the adapter adapts
  bool shares_base_ = false;
  nn::WeightsPtr weights_;
  std::unique_ptr<RowImages> images_;
  std::unique_ptr<MtpTraining> head_;
  std::unique_ptr<nn::LateWeights> late_;  ///< if those are late, or were
  std::unique_ptr<nn::LayeredWeights> layered_;
  Tensor gathered_;  ///< gather_values()
};

}  // namespace prl::trainer
