#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "nn/parameters.hpp"
#include "ops/linear.hpp"
#include "ops/pointwise.hpp"

namespace prl::nn {

/// Weights ready to compute with: rounded to the compute dtype and packed for the device. Immutable; one object serves the
/// trainer's forward pass and the engine under the same policy version, which is the in-process weight update.
struct Weights {
  struct Layer {
    Tensor input_norm, post_norm, q_norm, k_norm;  ///< fp32 holding values of the compute dtype, as are biases
    ops::LinearWeightPtr qkv, o, gate_up, down;
    Tensor qkv_bias, o_bias;  ///< fp32 copies of the packed biases, for checksums; undefined if none
  };
  ModelConfig config;
  PolicyVersion version;
  DType compute = DType::kF32;
  Tensor embedding_VH;  ///< compute dtype
  std::vector<Layer> layers;
  Tensor final_norm;  ///< fp32
  ops::LinearWeightPtr lm_head;
  ops::RopeTable rope;  ///< shared between versions
};
using WeightsPtr = std::shared_ptr<const Weights>;

/// Packs masters. `previous` (may be null) lends its rope table. `with_backward` for the trainer. `rounded`, if defined, holds
/// parameters.all_values() in the compute dtype already and becomes the memory of the weights: where ops::shares_weights says so.
WeightsPtr make_weights(ops::OpContext& ctx, const Parameters& parameters, DType compute, PolicyVersion version, bool with_backward,
                        const WeightsPtr& previous, const Tensor& rounded = {});
/// The same from a Hugging Face folder, without gradients, for servers; checks names and shapes against `config`.
WeightsPtr load_weights(ops::OpContext& ctx, const ModelConfig& config, const std::filesystem::path& folder, DType compute,
                        PolicyVersion version, const WeightsPtr& previous);

/// ops::hash_rows of each tensor's values in compute dtype under its Hugging Face name; independent of packing, device and of how
/// the weights arrived. `combined` hashes all (name, hash) in order.
struct WeightsChecksum {
  std::uint64_t combined = 0;
  std::vector<std::pair<std::string, std::uint64_t>> tensors;
};
/// Where the weights lie; waits for the device once.
WeightsChecksum checksum(ops::OpContext& ctx, const Weights& weights);
/// With a session of its own, for callers that have none.
WeightsChecksum checksum(const Weights& weights);

/// cos and sin of position * inverse frequency for all positions of the model, frequencies scaled as config.json asks.
ops::RopeTable make_rope_table(const std::shared_ptr<DeviceRuntime>& runtime, const ModelConfig& config);

}  // namespace prl::nn
