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
  std::int64_t num_state_snapshots = 0;
  std::int64_t num_draft_tokens = 0;
  int num_devices = 1;  ///< that share the layers
};

/// Tokens that one step draws at most. With drafts a sequence may draw several, but a batch that is large without them has none: its
/// products have no row to spare.
std::int64_t most_drawn_rows(std::int64_t max_num_seqs, std::int64_t num_draft_tokens) noexcept;

/// States that sequences have, of models with linear attention: with drafts one more for each, to go back to.
std::int64_t num_state_slots(std::int64_t max_num_seqs, std::int64_t num_draft_tokens) noexcept;

/// EngineOptions::num_state_snapshots where nothing else is said: as many as sequences that run, if prefixes are kept at all.
std::int64_t default_state_snapshots(const nn::ModelConfig& model, std::int64_t max_num_seqs, bool enable_prefix_caching) noexcept;

/// Bytes that follow from sizes alone, on a GPU, as other devices get no plan.
struct EngineBytes {
  std::size_t passes = 0;  ///< activations and logits of the largest step, and states of sequences
  std::size_t block = 0;   ///< one block of the KV cache
  std::int64_t blocks_per_sequence = 0;
};
EngineBytes engine_bytes(const EngineSizes& sizes, const nn::ModelConfig& model, DType compute);

}  // namespace prl::engine
