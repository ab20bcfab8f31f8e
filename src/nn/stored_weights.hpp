#pragma once

#include <span>
#include <vector>

#include "base/thread_pool.hpp"
#include "io/safetensors.hpp"
#include "nn/model_config.hpp"
#include "nn/stored_tensor.hpp"
#include "nn/tensor_table.hpp"
#include "tensor/tensor.hpp"

namespace prl::nn {

/// The stored tensors in the order of the table. Error{kCorrupt} names file and tensor if one is missing, has another shape or
/// no float type (or, as `config` says, MXFP4 or FP8 with its scales), or if the folder holds a tensor the model has no place for (rotary
/// buffers, scales of activations and a tied head's copy, bit for bit, excepted, and layers that config.num_skipped_layers says, of which a
/// log line tells).
std::vector<StoredTensor> match_stored_weights(const io::SafetensorsFolder& files, const ModelConfig& config, const TensorTable& table);

/// The same of a head for multi-token prediction, in whose folder there may be anything else. What it shares with its model stays empty.
std::vector<StoredTensor> match_head_weights(const io::SafetensorsFolder& files, const ModelConfig& head, const TensorTable& table);

/// Whether files of FP8 hold it beside a matrix: its scale, or that of its inputs.
bool is_of_fp8(std::string_view name, const ModelConfig& config);

/// The parts of a tensor that TensorSpec::num_parts says is exact.
void read_exact(const StoredTensor& stored, std::span<float> parts);

/// Error{kCorrupt} names file, tensor and element if one of the tensors holds NaN or infinity, or a number that is infinite in `compute`.
void check_finite(std::span<const StoredTensor> tensors, DType compute, ThreadPool& pool);

}  // namespace prl::nn
