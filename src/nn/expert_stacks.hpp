#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/model_config.hpp"
#include "nn/tensor_table.hpp"
#include "nn/weight_files.hpp"

// Files of ExpertNames::kStacked have one tensor where the table has one for each expert: of a layer's matrices [N, K] one [E, K, N].

namespace prl::nn {

/// The name of the tensor that holds all experts' matrices of this one's kind; empty unless files have such.
std::string stack_name(const TensorSpec& spec);

/// `sources` of all tensors of a model's table as files have them: sources of experts' matrices give way to one of all, which keeps one
/// expert in memory while it is read. Other models' sources stay as they are.
std::vector<WeightSource> stack_experts(const ModelConfig& config, std::vector<WeightSource> sources);

}  // namespace prl::nn
