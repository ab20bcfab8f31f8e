#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "nn/model_config.hpp"
#include "tensor/dtype.hpp"

namespace prl::tools {

struct ConvertOptions {
  std::filesystem::path input;  ///< a GGUF file, or a Hugging Face folder with safetensors (a checkpoint's weights are one)
  std::filesystem::path output_dir;
  bool has_eight_bits = false;  ///< matrices of layers are stored in 8 bits (nn/eight_bit_files.hpp); `dtype` is that of the others
  std::optional<DType> dtype;   ///< none: what most of the input is stored in; bfloat16 for quantised files
  std::uint64_t max_shard_bytes = 5'000'000'000ULL;
  bool overwrite = false;                        ///< replace an existing model folder
  std::optional<std::filesystem::path> adapter;  ///< in PEFT's format: merged into the weights of a folder, which is its base
  bool takes_any_base = false;                   ///< also of another base model than the one the adapter was trained on
  std::optional<std::string> pre_tokenizer;      ///< for GGUF files that do not name theirs, see text/bpe_files.hpp
};

struct ConvertResult {
  nn::ModelConfig config;
  DType dtype = DType::kBF16;
  bool has_chat_template = false;
};

/// Writes a Hugging Face folder (config.json, safetensors, tokenizer, chat template, generation_config.json), whole or not at
/// all, and logs its progress. Errors name file, key, tensor and byte of the input.
ConvertResult convert_model(const ConvertOptions& options);

}  // namespace prl::tools
