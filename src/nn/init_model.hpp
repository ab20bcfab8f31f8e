#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "nn/model_config.hpp"
#include "nn/parameters.hpp"

namespace prl::nn {

/// Sizes of a model made from nothing. The defaults are a Qwen 3 of about two million parameters plus its vocabulary.
struct InitModelOptions {
  std::string family = "qwen3";  ///< a model_type this build knows
  std::int64_t vocab_size = 512;
  std::int64_t hidden_size = 192;
  std::int64_t intermediate_size = 512;
  std::int64_t num_layers = 4;
  std::int64_t num_heads = 6;
  std::int64_t num_kv_heads = 2;
  std::int64_t head_dim = 32;
  std::int64_t max_position = 2048;
  std::int64_t sliding_window =
      0;  ///< keys that a query sees, in the layers that a family gives windows: of qwen2 and qwen3 all but the
          ///< first, of smollm3 those without rotary positions, of olmo3 three in four, of gpt_oss every other, else all; 0: all keys
  double rope_theta = 10000.0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = true;
  bool attention_bias = false;          ///< llama and qwen3; qwen2 and gpt_oss always have their own
  std::int64_t num_experts = 8;         ///< of families with experts
  std::int64_t num_active_experts = 2;  ///< of a token
  std::int64_t expert_size = 128;       ///< width of an expert's MLP
  float std_dev = 0.02f;
  std::uint64_t seed = 0;
  DType dtype = DType::kBF16;  ///< of the saved weights
  std::int32_t bos_id = -1, eos_id = -1, pad_id = -1;
};

/// Checks sizes and fills in the family's switches. Error{kInvalidArgument} names the option.
ModelConfig make_model_config(const InitModelOptions& options);
/// Writes config.json and model.safetensors with random weights into `folder`, which must be new or empty. The tokenizer is
/// another module's to add.
void init_model(const InitModelOptions& options, const std::filesystem::path& folder);

}  // namespace prl::nn
