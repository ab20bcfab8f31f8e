#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nn/model_config.hpp"
#include "nn/tensor_table.hpp"
#include "nn/weight_files.hpp"
#include "tensor/tensor.hpp"

namespace prl::nn {

/// A trainable tensor of the table with its memory.
struct NamedParameter : TensorSpec {
  Tensor value;  ///< fp32 master; undefined unless all of it is held
  Tensor grad;   ///< fp32, same shape; undefined until ensure_grads()
};

/// A part of a model whose gradients are complete at one moment of a backward pass: first the head, then the layers, the last one first,
/// then everything else (vectors and the embedding).
struct GradSection {
  std::int64_t layer = kRest;
  ElementRange range;  ///< of the array of masters
  static constexpr std::int64_t kRest = -1, kHead = -2;
};
/// In the order in which a backward pass completes them; one for the whole table if it cannot be divided: layers that differ, or whose
/// matrices do not lie together.
std::vector<GradSection> grad_sections(const TensorTable& table);

/// fp32 masters and gradients of the trainable tensors of a table, each in one array laid out as TensorTable says. Ranks that train
/// together hold a range of the masters each.
class Parameters {
 public:
  /// All zero. `config` is what the table was made from.
  Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, TensorTablePtr table);
  /// Holds the masters of `held` alone, in memory that `allocate` gives for that many elements; empty: on the device.
  using Allocate = std::function<Tensor(std::int64_t)>;
  Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, TensorTablePtr table, ElementRange held,
             Allocate allocate = {});
  Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config)
      : Parameters(std::move(runtime), config, make_tensor_table(config)) {}
  const ModelConfig& config() const noexcept { return config_; }
  const TensorTablePtr& table() const noexcept { return table_; }
  /// In the table's order.
  std::span<NamedParameter> named() noexcept { return named_; }
  std::span<const NamedParameter> named() const noexcept { return named_; }
  NamedParameter& at(const std::string& name);
  /// Which masters there are here, and whether those are all.
  ElementRange held() const noexcept { return held_; }
  bool holds_all() const noexcept { return held_.count() == table_->num_master_elements(); }
  /// Another range from now on: masters of both keep their values, new ones are zero.
  void hold(ElementRange range);
  /// [held().count()] fp32, and a range of them.
  const Tensor& held_values() const noexcept { return values_; }
  Tensor values_in(ElementRange range) const;
  /// Those of elements [begin, begin + values.size()) that are held become `values`, which lie in host memory.
  void write_held(std::int64_t begin, std::span<const float> values);
  /// [n] fp32, the memory behind all values (PRL_CHECK: all are held), and behind all gradients in the same order (PRL_CHECK: not divided).
  const Tensor& all_values() const;
  const Tensor& all_grads() const;
  /// The fp32 block of a kind, and its gradient; undefined if the model has none. A value that is held in part is undefined too.
  const Tensor& value(Block block, std::int64_t layer = -1) const { return find(values_of_blocks_, block, layer); }
  const Tensor& grad(Block block, std::int64_t layer = -1) const { return find(grads_of_blocks_, block, layer); }
  /// The sections of the gradients, and their memory. All layers' gradients lie in the same memory after divide_grads(): those of a section
  /// are there when the hook is called, and until the pass goes on.
  std::span<const GradSection> sections() const noexcept { return sections_; }
  const Tensor& section_grads(std::size_t section) const { return section_grads_[section]; }
  /// From now on gradients are of one row, section by section; or whole again. Gradients there were are lost.
  void divide_grads(bool by_section);
  bool divides_grads() const noexcept { return sections_.size() > 1; }
  /// Called by a backward pass with the index of a section that it has completed; may be empty.
  void on_section(std::function<void(std::size_t)> hook) { hook_ = std::move(hook); }
  void section_is_done(std::int64_t layer) const;
  void ensure_grads();
  void zero_grads();
  /// The start of a step: gradients are zero from now on, but most of them are not written, as the next backward pass of a TrainableModel
  /// overwrites them. Call settle_grads() before reading gradients without a backward pass in between.
  void start_grads();
  /// Writes the zeros that start_grads() left out, unless a backward pass has overwritten them.
  void settle_grads();
  /// True between start_grads() and the end of the backward pass that overwrites.
  bool grads_are_fresh() const noexcept { return grads_are_fresh_; }
  /// All matrices' gradients have been written.
  void grads_were_written() noexcept { grads_are_fresh_ = false; }
  /// Normal(0, std) for matrices, ones for norms, zeros for biases; a pure function of (config, seed).
  void init_random(std::uint64_t seed, float std_dev = 0.02f);

 private:
  /// One tensor per block of the table, parts of `array`, which lies behind the elements of `range`.
  std::vector<Tensor> cut(const Tensor& array, ElementRange range) const;
  void cut_values();
  const Tensor& find(const std::vector<Tensor>& blocks, Block block, std::int64_t layer) const;

  ModelConfig config_;
  TensorTablePtr table_;
  std::shared_ptr<DeviceRuntime> runtime_;
  std::vector<NamedParameter> named_;
  ElementRange held_;
  Allocate allocate_;
  Tensor values_;
  std::vector<GradSection> sections_;
  std::vector<Tensor> section_grads_;
  std::function<void(std::size_t)> hook_;
  std::vector<Tensor> values_of_blocks_, grads_of_blocks_;
  bool grads_are_fresh_ = false;
};

/// Reads model.safetensors or model.safetensors.index.json + shards (F32, BF16, F16). Every parameter must be there with its
/// shape, once; unknown tensors are an error except rotary buffers and a tied head's copy. Those of adapters are left alone.
/// Error{kCorrupt} names file and tensor.
void load_parameters(Parameters& parameters, const std::filesystem::path& folder);
/// Writes model.safetensors (or shards of at most `max_shard_bytes` with an index) in `dtype`, config.json (raw_json kept) and
/// copies the `companions`. The folder is written whole or not at all.
void save_pretrained(const Parameters& parameters, const std::filesystem::path& folder, DType dtype, const Companions& companions = {},
                     std::uint64_t max_shard_bytes = 5'000'000'000ULL);
/// What a folder of `config` holds beside its weights: config.json and the companions. Error{kNotFound} if theirs is not there.
void write_model_extras(const ModelConfig& config, const std::filesystem::path& folder, DType dtype, const Companions& companions);
/// The same of tensors from anywhere.
void save_model_folder(const ModelConfig& config, std::span<const WeightSource> sources, const std::filesystem::path& folder, DType dtype,
                       const Companions& companions, std::uint64_t max_shard_bytes);

}  // namespace prl::nn
