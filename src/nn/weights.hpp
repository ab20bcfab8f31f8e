#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "nn/adapter.hpp"
#include "nn/parameters.hpp"
#include "ops/linear.hpp"
#include "ops/pointwise.hpp"

namespace prl::autograd {
class ExpertRanks;
}

namespace prl::nn {

class VisionTower;

/// Brings the matrices of layers where not all of them are there at once (LayeredWeights).
class LayerSource {
 public:
  virtual ~LayerSource() = default;
  /// Work that is queued from now on finds the matrices of `layer` in the weights, until the layer after the next is entered. `next` is
  /// wanted after it and may begin to come; -1: none is.
  virtual void enter(std::int64_t layer, std::int64_t next) = 0;
};

/// Weights ready to compute with: rounded to the compute dtype and packed for the device. Immutable; one object serves the
/// trainer's forward pass and the engine under the same policy version, which is the in-process weight update.
struct Weights;
using WeightsPtr = std::shared_ptr<const Weights>;
struct Weights {
  /// A block of the table. Vectors are fp32 and hold values of the compute dtype; matrices are packed; the embedding is a plain matrix in
  /// the compute dtype, and packed too if it is the head.
  struct PackedBlock {
    Tensor plain;
    ops::LinearWeightPtr packed;
    Tensor plus_one;  ///< 1 + plain, of norms where ModelConfig::norms_add_one says so
  };
  ModelConfig config;
  TensorTablePtr table;
  PolicyVersion version;
  DType compute = DType::kF32;
  std::vector<PackedBlock> blocks;  ///< as table->blocks()
  Tensor flat;                      ///< what the blocks are parts of, where ops::shares_weights(): all masters in `compute`
  ops::RopeTable rope;              ///< shared between versions
  ops::RopeTable window_rope;       ///< of layers with ModelConfig::window_rope_theta; undefined where there are none
  ops::RopeTable no_rope;           ///< of angles 0, for layers whose heads are not rotated; undefined where there are none
  AdapterPtr adapter;               ///< of rows that name no other; nullptr for none
  /// Of models for text and images; nullptr: none. Frozen: no part of the table and of checksums, and what has none leaves the one there.
  std::shared_ptr<const VisionTower> vision;
  /// A head for multi-token prediction (mtp_head.hpp); nullptr: none. No part of the table and of checksums, and what has none leaves the
  /// one there.
  WeightsPtr mtp;
  /// Of `blocks`, which all versions of an adapter share; nullptr: formed whenever it is asked for.
  std::shared_ptr<const struct WeightsChecksum> base_checksum;
  Shard shard = {};                ///< which part of each layer `blocks` has
  std::vector<WeightsPtr> others;  ///< the parts of the other devices, from rank 1 on; empty in these, and where one device has all
  LayerSource* layers = nullptr;   ///< borrowed; nullptr: all of `blocks` are there. Else the object changes with each version
  /// Of each layer's experts `blocks` has those of this share, and the others are ranks', whom `expert_ranks` asks; borrowed, and nullptr
  /// while nobody is there.
  ExpertShare experts = {};
  autograd::ExpertRanks* expert_ranks = nullptr;

  /// A norm or bias; undefined if the model has none.
  const Tensor& vector(Block block, std::int64_t layer = -1) const;
  /// What a norm multiplies by; undefined if the model has none.
  const Tensor& norm_scale(Block block, std::int64_t layer = -1) const;
  const ops::LinearWeight& matrix(Block block, std::int64_t layer = -1, std::int64_t expert = -1) const;
  const ops::RopeTable& rope_of(std::int64_t layer) const {
    if (!config.is_rotated(layer)) return no_rope;
    return config.window_rope_theta && config.is_windowed(layer) ? window_rope : rope;
  }
  const Tensor& embedding_VH() const { return vector(Block::kEmbedding); }
  /// The one that a layer's input, normed, is multiplied with.
  const ops::LinearWeight& first_matrix(std::int64_t layer) const {
    if (config.has_attention(layer)) return matrix(Block::kQkv, layer);
    return matrix(config.is_sparse(layer) ? Block::kRouter : Block::kGateUp, layer);
  }
  const ops::LinearWeight& lm_head() const { return matrix(Block::kLmHead); }
};

/// Packs masters. The rope table of `previous` (may be null) is shared. `with_backward` for the trainer. `rounded`, if defined, holds all
/// masters in the compute dtype, so that `parameters` may hold a part of them; it becomes the memory of the weights where
/// ops::shares_weights().
WeightsPtr make_weights(ops::OpContext& ctx, const Parameters& parameters, DType compute, PolicyVersion version, bool with_backward,
                        const WeightsPtr& previous, const Tensor& rounded = {});
/// Whether loaded weights keep codes of 8 bits in place of the values of matrices: where EightBits::kProducts is computed with such codes.
bool holds_codes_alone(ops::OpContext& ctx, const ModelConfig& config, DType compute);
/// The same of this machine's GPUs, for plans; on a machine without one, of an H100.
bool gpus_hold_codes_alone(const ModelConfig& config, DType compute);
/// The same from a Hugging Face folder; checks names and shapes against `config`. Without `with_backward` for servers, which get the
/// vision tower too if `config` has one: that of the folder, or of `previous` if the folder has none. `keeps_values`: beside codes, for a
/// trainer whose next weights have them.
WeightsPtr load_weights(ops::OpContext& ctx, const ModelConfig& config, const std::filesystem::path& folder, DType compute,
                        PolicyVersion version, const WeightsPtr& previous, bool with_backward = false, bool keeps_values = false);
/// Without gradients, for devices that share the layers, one context for each (see check_shards()): weights of the first, which hold those
/// of the others. As load_weights() for one.
WeightsPtr load_shared_weights(std::span<ops::OpContext* const> devices, const ModelConfig& config, const std::filesystem::path& folder,
                               DType compute, PolicyVersion version, const WeightsPtr& previous);
/// `base` as `version` with what `parameters` train (of make_adapter_table()): an adapter packed in `adapter_dtype`, and the modules that
/// are trained whole in place of the base's. Everything else is shared with `base`: the cost is that of what is trained. `rounded` as in
/// make_weights(), of a base in `adapter_dtype`.
WeightsPtr adapt_weights(ops::OpContext& ctx, const Parameters& parameters, const AdapterConfig& config, DType adapter_dtype,
                         const WeightsPtr& base, PolicyVersion version, const Tensor& rounded = {});

/// What a GPU keeps beside the values of weights of 8 bits, at most.
std::size_t eight_bit_code_bytes(const TensorTable& table, DType compute);
/// Of weights that hold codes alone, all of them, and of the values of the largest matrix or layer of experts, which a backward pass makes
/// from codes.
struct CodesAloneBytes {
  std::size_t weights = 0, widened = 0;
};
CodesAloneBytes codes_alone_bytes(const TensorTable& table, DType compute);

/// All masters rounded to `compute`, in one array in host memory: what load_flat_weights() makes weights from. [num_master_elements]
Tensor flat_values(ops::OpContext& ctx, const Parameters& parameters, DType compute);
/// The same from weights without an adapter: their own array where they have one, on their device; else in host memory, row by row.
Tensor flat_values(const WeightsPtr& weights);
/// Weights without gradients from flat_values() of a model of the same `config`; bit for bit those that make_weights() makes. `values` in
/// host memory or on the context's device, where they become the memory of the weights if ops::shares_weights(), unless those hold codes
/// alone; what is enqueued to fill them comes before. Error{kShape} if `values` has another length; {kCorrupt} naming the tensor that holds
/// NaN or infinity.
WeightsPtr load_flat_weights(ops::OpContext& ctx, const ModelConfig& config, const Tensor& values, PolicyVersion version,
                             const WeightsPtr& previous);
/// The same for devices that share the layers; `values` in host memory or on the first of them, where all of it has been written.
WeightsPtr load_shared_weights(std::span<ops::OpContext* const> devices, const ModelConfig& config, const Tensor& values,
                               PolicyVersion version, const WeightsPtr& previous);

/// ops::hash_rows of each tensor's values in compute dtype under its Hugging Face name, those of the adapter last and in its own dtype;
/// independent of packing, device, how many devices share the layers, and of how the weights arrived. `combined` hashes all (name, hash) in
/// order.
struct WeightsChecksum {
  std::uint64_t combined = 0;
  std::vector<std::pair<std::string, std::uint64_t>> tensors;
};
/// Where the weights lie; waits for the device once.
WeightsChecksum checksum(ops::OpContext& ctx, const Weights& weights);
/// With a session of its own, for callers that have none.
WeightsChecksum checksum(const Weights& weights);

/// Sets the rotary tables that `weights.config` asks for: those of `previous` (may be null) where its model has the same.
void set_rope_tables(Weights& weights, const std::shared_ptr<DeviceRuntime>& runtime, const WeightsPtr& previous);

}  // namespace prl::nn
