#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_pool.hpp"
#include "nn/adapter.hpp"
#include "nn/weight_files.hpp"
#include "nn/weights.hpp"

namespace prl::nn {

// Adapters as PEFT stores them: a folder of adapter_config.json and adapter_model.safetensors, whose tensors are named
// "base_model.model.<module>.lora_A.weight" [rank, inputs] and ".lora_B.weight" [outputs, rank]. The same two files can be an image in
// memory, in which an adapter goes from one process to another.

inline constexpr const char* kPeftConfig = "adapter_config.json";
inline constexpr const char* kPeftTensors = "adapter_model.safetensors";
inline constexpr const char* kPeftPrefix = "base_model.model.";
inline constexpr const char* kBaseKey = "prl_base";  ///< of the metadata: BaseIdentity

/// Where an adapter is.
struct PeftSource {
  std::filesystem::path folder;  ///< or, of an image, what names it in errors
  Tensor image = {};             ///< peft_image(), in host memory; undefined: the folder has the files
  PeftSource(std::filesystem::path where) : folder(std::move(where)) {}  // NOLINT(google-explicit-constructor): a folder is a source
  PeftSource(std::filesystem::path name, Tensor bytes) : folder(std::move(name)), image(std::move(bytes)) {}
};

/// Which weights an adapter belongs to: the checksum of a base model in one dtype. Adapters that are written here say it in the metadata of
/// adapter_model.safetensors; those of others do not.
struct BaseIdentity {
  DType dtype = DType::kF32;
  std::uint64_t checksum = 0;
  bool operator==(const BaseIdentity&) const = default;
};

struct PeftLimits {
  std::int64_t max_rank = ops::kMaxLoraRank;
  /// Otherwise an adapter with modules_to_save is refused: they would replace tensors of the base model.
  bool may_replace_modules = false;
  /// Of the model that the adapter is to change, asked if the adapter says which it was trained on, and in which dtype; empty: not
  /// compared. An answer in another dtype cannot be compared either.
  std::function<BaseIdentity(DType dtype)> base = {};
  std::string base_name = "the one here";  ///< of that model, for errors
  std::string remedy = {};                 ///< what to do about another base, for the error
};

/// Reads the configuration alone. Error{kNotFound|kCorrupt} names the file and the key; {kNotImplemented} what this build has not: DoRA,
/// biases, other kinds of adapters.
AdapterConfig load_peft_config(const std::filesystem::path& folder);

/// An adapter in host memory, checked; adapters for a device are made of it. Immutable.
struct StoredAdapter {
  AdapterConfig config;
  TensorTablePtr table;
  std::vector<std::vector<float>> blocks;  ///< as table->blocks()
  DType compute = DType::kF32;             ///< that it is to be packed in
  std::optional<BaseIdentity> base;        ///< that it was trained on, if its file says so
  std::size_t num_bytes() const noexcept;
};
using StoredAdapterPtr = std::shared_ptr<const StoredAdapter>;

/// Reads an adapter of a model of `config` that is to be packed in `compute`: the dtype of the model's products, or kF32.
///
/// Errors  those of load_peft_config(); {kCorrupt} names file and tensor: truncated, not finite, an A without its B, a tensor that is no
///         part of an adapter; {kInvalidArgument}: made for a model of other shapes or other weights, a rank above the limit,
///         modules_to_save.
StoredAdapterPtr read_peft_adapter(const ModelConfig& config, const PeftSource& source, DType compute, ThreadPool& pool,
                                   const PeftLimits& limits = {});
/// Packs it, or the part of `shard`, for the device of `ctx`. `with_backward` for a trainer.
AdapterPtr pack_adapter(ops::OpContext& ctx, const ModelConfig& config, const StoredAdapter& stored, bool with_backward = false,
                        Shard shard = {});
/// The parts of devices that share the layers, one context for each: that of the first, which holds the others.
AdapterPtr pack_adapter(std::span<ops::OpContext* const> devices, const ModelConfig& config, const StoredAdapter& stored);
AdapterPtr join_parts(std::span<const AdapterPtr> parts);
/// Both.
AdapterPtr load_peft_adapter(ops::OpContext& ctx, const ModelConfig& config, const PeftSource& source, DType dtype,
                             const PeftLimits& limits = {}, bool with_backward = false);

/// Writes the adapter of `weights`, and the modules that were trained whole, into an existing folder, in the dtype it computes in.
void save_peft_adapter(const Weights& weights, const TensorTable& trained, const std::filesystem::path& folder);
/// What save_peft_adapter() writes, as an array of bytes (kU8) in host memory: the length of the configuration (u64, little-endian), the
/// configuration, the tensors' file.
Tensor peft_image(const Weights& weights, const TensorTable& trained);
/// The most bytes that an image of an adapter of a model of `config` may have.
std::int64_t max_peft_image_bytes(const ModelConfig& config);

/// Writes an adapter of those tensors, A and B under PEFT's names, into an existing folder. `config.target_modules` are written as they
/// are.
void save_peft_files(const AdapterConfig& config, std::span<const WeightSource> sources, DType dtype, const std::filesystem::path& folder,
                     const std::optional<BaseIdentity>& base = {});

/// A tensor of the base model, read by `base`, with what the adapter adds to it, in fp32; `base` itself where it adds nothing.
WeightSource merged_source(WeightSource base, const StoredAdapterPtr& adapter);
/// Of a model whose tensors `sources` are, in the order of its make_tensor_table(); one of them is in memory at a time.
BaseIdentity identity_of(ops::OpContext& ctx, std::span<const WeightSource> sources, DType dtype);
/// What speaks against `folder`, a model of `model` named `name`, as the base of an adapter that says no checksum: the name of its base is
/// another, or a model is there of other shapes. Empty if nothing does.
std::string doubt_of_base(const AdapterConfig& adapter, const ModelConfig& model, const std::filesystem::path& folder,
                          const std::string& name);
/// The tensors of `weights` with the adapter added: W + scale * B A in fp32, for a writer that rounds them. They refer to `weights`.
std::vector<WeightSource> merged_sources(const WeightsPtr& weights);
/// The same where the base is `base`, the sources of all tensors in the order of the table: of weights of which not all layers are there.
std::vector<WeightSource> merged_sources(const WeightsPtr& weights, std::vector<WeightSource> base);
/// Writes them as a model folder, as save_pretrained() does.
void save_merged(const WeightsPtr& weights, const std::filesystem::path& folder, DType dtype, const Companions& companions = {},
                 std::uint64_t max_shard_bytes = 5'000'000'000ULL);

}  // namespace prl::nn
