#pragma once

#include <cstddef>
#include <cstdint>

#include "nn/model_config.hpp"
#include "tensor/dtype.hpp"

namespace prl::engine {

/// What decides how much memory an engine needs beside its weights. Tokens, but for the number of sequences.
struct EngineSizes {
  std::int64_t max_model_len = 0;
  std::int64_t block_size = 16;
  std::int64_t max_num_seqs = 1;
  std::int64_t max_num_batched_tokens = 2048;
};

/// Bytes that follow from sizes alone.
struct EngineBytes {
  std::size_t passes = 0;  ///< activations and logits of the largest step
  std::size_t block = 0;   ///< one block of the KV cache
  std::int64_t blocks_per_sequence = 0;
};
EngineBytes engine_bytes(const EngineSizes& sizes, const nn::ModelConfig& model, DType compute);

}  // namespace prl::engine
