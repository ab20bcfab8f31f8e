#pragma once

#include <span>
#include <string>
#include <vector>

#include "nn/model_config.hpp"
#include "nn/weight_files.hpp"

// Model folders whose matrices of layers are stored in 8 bits, as ops/eight_bit.hpp rounds them: in the format "float-quantized" of
// compressed-tensors, which vLLM reads too, with a scale for each output row, a power of two, and activations that stay as they are. What a
// model with EightBits::kWeights multiplies with is stored without a loss.

namespace prl::nn {

/// Sets WeightSource::is_eight_bit of `sources` of a model's tensor table. Error{kNotImplemented} for models whose files have the experts
/// of a layer in one tensor, for which the format has no scales.
void mark_eight_bit(const ModelConfig& config, std::span<WeightSource> sources);

/// `sources` as they are to be written: those that are marked as codes, each with its scales [N, 1] behind it.
std::vector<WeightSource> eight_bit_sources(std::vector<WeightSource> sources);

/// config.json with the `quantization_config` of such sources.
std::string eight_bit_config_json(const std::string& config_json, std::span<const WeightSource> sources);

}  // namespace prl::nn
