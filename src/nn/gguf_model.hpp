#pragma once

#include <memory>
#include <vector>

#include "io/gguf.hpp"
#include "nn/model_config.hpp"
#include "nn/weight_files.hpp"

namespace prl::nn {

/// The decoder that a GGUF file describes, as config.json would: sizes, rotary base, Llama 3 frequency scaling (recovered from
/// the file's table of factors), tied or separate head, biases, special token ids. Architectures llama, qwen2, qwen3.
///
/// Errors    Error{kNotImplemented} names what this build has no place for (architecture, experts, sliding windows, other
///           rotary scalings); Error{kCorrupt} names file and key or tensor if sizes are missing or disagree.
ModelConfig gguf_model_config(const io::GgufFile& file);

/// The file's tensors under their Hugging Face names and in their order: quantised values become fp32, and the row order that
/// exporters give to q and k of llama models is undone. Error{kCorrupt} names a tensor that is missing, has another shape than
/// `config` needs, or has no place in the model. The sources keep `file` alive.
std::vector<WeightSource> gguf_weight_sources(const std::shared_ptr<const io::GgufFile>& file, const ModelConfig& config);

/// What most elements of the file are stored as: kF32, kF16 or kBF16; kBF16 for quantised files.
DType gguf_natural_dtype(const io::GgufFile& file);

}  // namespace prl::nn
