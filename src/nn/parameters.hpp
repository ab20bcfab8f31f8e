#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nn/masters.hpp"
#include "nn/model_config.hpp"
#include "nn/tensor_table.hpp"
#include "nn/weight_files.hpp"
#include "tensor/tensor.hpp"

namespace prl::nn {

/// A part of a model whose gradients are complete at one moment of a backward pass: first the head, then the layers, the last one first,
/// then everything else (vectors and the embedding).
struct GradSection {
  std::int64_t layer = kRest;
  ElementRange range;      ///< of the array of masters
  bool is_second = false;  ///< an earlier section has the same range, and both are added
  static constexpr std::int64_t kRest = -1, kHead = -2, kEmbedding = -3, kAdapters = -4;
};
/// In the order in which a backward pass completes them; one for the whole table if it cannot be divided: layers whose matrices do not lie
/// together, as those of adapters do not. With `splits_tied`, a matrix that is head and embedding has a section as
/// each; beside it all that follows in a table of adapters is a section.
/// `experts_apart`: without the experts of layers, which expert_sections() has.
std::vector<GradSection> grad_sections(const TensorTable& table, bool splits_tied = false, bool experts_apart = false);

/// The matrices of a layer's experts, which lie together behind the layer's others.
struct ExpertSection {
  std::int64_t layer = 0;
  std::vector<std::int64_t> begin_of;  ///< elements of the array of masters: of each expert, and the end
  ElementRange range() const noexcept { return {begin_of.front(), begin_of.back()}; }
  /// Of experts [first, first + count).
  ElementRange part(std::int64_t first, std::int64_t count) const {
    return {begin_of[static_cast<std::size_t>(first)], begin_of[static_cast<std::size_t>(first + count)]};
  }
};
/// Of layers that have experts, ascending.
std::vector<ExpertSection> expert_sections(const TensorTable& table);

/// What lies outside of layers, or everything if the table cannot be divided. Ascending.
std::vector<ElementRange> stepwise_ranges(const TensorTable& table);

/// Of vectors that are exact (TensorSpec::num_parts). Ascending.
std::vector<ElementRange> exact_ranges(const TensorTable& table);

/// Masters with their gradients: a step starts them, backward passes add to them, section by section where memory is short, and the
/// optimizer reads them.
class Parameters : public Masters {
 public:
  using Masters::Masters;
  /// All masters, on the device.
  Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, TensorTablePtr table)
      : Masters(std::move(runtime), config, table, ElementRange{0, table->num_master_elements()}) {}
  Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config)
      : Parameters(std::move(runtime), config, make_tensor_table(config)) {}
  /// [n] fp32, the memory behind all gradients, in the masters' order; undefined until ensure_grads(). PRL_CHECK: not divided.
  const Tensor& all_grads() const;
  /// The gradient of the block of a kind; undefined if the model has none, and until ensure_grads().
  const Tensor& grad(Block block, std::int64_t layer = -1, std::int64_t expert = -1) const {
    return block == Block::kLmHead && tied_head_grad_.defined() ? tied_head_grad_ : find(grads_of_blocks_, block, layer, expert);
  }
  /// The sections of the gradients, and their memory. All layers' gradients lie in the same memory after divide_grads(): those of a section
  /// are there when the hook is called, and until the pass goes on.
  std::span<const GradSection> sections() const noexcept { return sections_; }
  const Tensor& section_grads(std::size_t section) const { return section_grads_[section]; }
  /// From now on gradients are of one row, section by section; or whole again. Gradients there were are lost.
  /// `splits_tied`: see grad_sections().
  /// Layers take turns in `num_places` memories, so that a section is there until so many more layers have completed theirs.
  /// `experts_apart`: experts have no gradients until lend_expert_grads().
  void divide_grads(bool by_section, bool splits_tied = false, int num_places = 1, bool experts_apart = false);
  bool has_experts_apart() const noexcept { return experts_apart_; }
  /// Gradients of the experts in `range` from now on, [count] fp32, to which backward passes add unless they are told to overwrite them
  /// (autograd::ExpertRanks); undefined: none.
  void lend_expert_grads(ElementRange range, const Tensor& memory);
  bool divides_grads() const noexcept { return sections_.size() > 1; }
  /// Called by a backward pass with the index of a section that it has completed; may be empty.
  void on_section(std::function<void(std::size_t)> hook) { hook_ = std::move(hook); }
  void section_is_done(std::int64_t layer) const;
  /// Allocates them, zero, if they are not there yet.
  void ensure_grads();
  void zero_grads();
  /// The start of a step: gradients are zero from now on, but most of them are not written, as the next backward pass of a TrainableModel
  /// overwrites them. Call settle_grads() before reading gradients without a backward pass in between.
  void start_grads();
  /// The same of elements in stepwise_grads() alone, for the next row of a step: its backward pass adds to the others what one product
  /// gives, so that sums are those of gradients that were formed apart, bit for bit.
  void start_next_row();
  /// Elements to whose gradients a backward pass adds more than once (vectors, embedding, head), and all if the table cannot be divided.
  const std::vector<ElementRange>& stepwise_grads() const noexcept { return stepwise_grads_; }
  /// Writes the zeros that start_grads() left out, unless a backward pass has overwritten them.
  void settle_grads();
  /// True between start_grads() and the end of the backward pass that overwrites.
  bool grads_are_fresh() const noexcept { return grads_are_fresh_; }
  /// The same for matrices of layers, to which the next row of a step adds.
  bool layer_grads_are_fresh() const noexcept { return grads_are_fresh_ && !keeps_layers_; }
  /// All blocks of this kind get no gradient, and no optimizer changes them, by weight decay either.
  void freeze(Block kind);
  bool is_frozen(Block kind) const noexcept { return frozen_kinds_[static_cast<std::size_t>(kind)]; }
  /// Elements of all masters, ascending: of frozen kinds, and of vectors that nothing trains.
  const std::vector<ElementRange>& frozen() const noexcept { return frozen_; }
  /// All matrices' gradients have been written.
  void grads_were_written() noexcept { grads_are_fresh_ = false; }

 private:
  std::vector<GradSection> sections_{{GradSection::kRest, {0, table()->num_master_elements()}}};
  std::vector<Tensor> section_grads_, grads_of_blocks_;
  int num_places_ = 1;  ///< memories in which layers take turns
  bool experts_apart_ = false;
  Tensor tied_head_grad_;  ///< of a matrix that is the embedding too, if that has a section of its own
  std::function<void(std::size_t)> hook_;
  bool grads_are_fresh_ = false, keeps_layers_ = false;
  std::array<bool, kNumBlockKinds> frozen_kinds_{};
  std::vector<ElementRange> frozen_ = exact_ranges(*table());
  std::vector<ElementRange> stepwise_grads_ = stepwise_ranges(*table());
};

/// Reads model.safetensors or model.safetensors.index.json + shards (F32, BF16, F16; experts in MXFP4 and matrices in FP8 become what they
/// stand for). Every parameter must be there with its shape, once; unknown tensors are an error except rotary buffers and a tied head's
/// copy. Those of adapters are left alone. Of the data what is held is read and looked at, in pieces.
/// Error{kCorrupt} names file and tensor.
void load_parameters(Parameters& parameters, const std::filesystem::path& folder);
/// Writes model.safetensors (or shards of at most `max_shard_bytes` with an index) in `dtype`, config.json (raw_json kept) and
/// copies the `companions`. The folder is written whole or not at all. `head`: of multi-token prediction, in place of the one in the folder
/// that the model is from.
void save_pretrained(const Parameters& parameters, const std::filesystem::path& folder, DType dtype, const Companions& companions = {},
                     std::uint64_t max_shard_bytes = 5'000'000'000ULL, const Parameters* head = nullptr);
/// What a folder of `config` holds beside its weights: config.json and the companions. Error{kNotFound} if theirs is not there.
void write_model_extras(const ModelConfig& config, const std::filesystem::path& folder, DType dtype, const Companions& companions);
/// The same of tensors from anywhere.
void save_model_folder(const ModelConfig& config, std::span<const WeightSource> sources, const std::filesystem::path& folder, DType dtype,
                       const Companions& companions, std::uint64_t max_shard_bytes);

}  // namespace prl::nn
