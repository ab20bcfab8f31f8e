#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/model_config.hpp"
#include "nn/tensor_table.hpp"
#include "nn/weight_files.hpp"

// Where files do not have the tensors of the table one by one, row after row.
//
// Experts: files of ExpertNames::kStacked have one tensor where the table has one for each expert, of a layer's matrices [N, K] one
// [E, K, N]; those of kStackedRows have [E, N, K], with an expert's gate and up in one, [E, 2F, H].
//
// Linear attention: files of LinearAttention::fuses_projections have the rows of one key head and its value heads together, and in memory
// all heads' queries come before all keys, and so on.

namespace prl::nn {

/// The name of the tensor that holds all experts' matrices of this one's kind; empty unless files have such.
std::string stack_name(const TensorSpec& spec, ExpertNames names);

/// The rows of a tensor of this slot in the order of files, which is that of the rows of an adapter's B, too; empty: as in memory.
std::vector<RowRun> stored_rows(const ModelConfig& config, Slot slot);
/// `source` of a matrix with its rows in that order; as it is where `runs` is empty.
WeightSource reordered_source(WeightSource source, std::vector<RowRun> runs);

/// `sources` of all tensors of a model's table as files have them: rows in their order, and in place of experts' matrices one source of
/// all, which keeps one expert in memory while it is read. Of models with a vision tower names are those of the whole model;
/// other_sources() follow. Most models' sources stay as they are.
std::vector<WeightSource> stored_sources(const ModelConfig& config, std::vector<WeightSource> sources);
/// What the folder that the model is from has beside the table's tensors and goes on as it is: those of its vision tower and of its head
/// for multi-token prediction.
std::vector<WeightSource> other_sources(const ModelConfig& config);

}  // namespace prl::nn
