#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wire/prompt_image.hpp"
#include "wire/routed_experts.hpp"

namespace prl::wire {

/// One flat token sequence for the trainer (spec 3.10). All arrays have the length of token_ids, or are empty where noted.
struct TrainingSample {
  std::vector<std::int32_t> token_ids;
  std::vector<std::uint8_t> mask;  ///< 1: sampled by the policy, takes part in the rl loss
  std::vector<float> logprobs;     ///< of the sampler; 0 where mask is 0
  std::vector<float> temperatures;
  std::string env_name;
  std::vector<float> advantages;
  std::vector<float> ref_logprobs;       ///< empty: none
  std::vector<float> rl_weights;         ///< empty: 1
  std::vector<float> ce_weights;         ///< empty: 0
  std::vector<float> ref_kl_weights;     ///< empty: 0
  RoutedExperts routed_experts = {};     ///< of all tokens, from the first on; empty: not known
  std::vector<PromptImage> images = {};  ///< ascending
  /// Policy version behind each sampled token, -1 of others; for logs alone, never sent. Empty: not known.
  std::vector<std::int64_t> versions = {};
};

/// One packed row [1, <= seq_len] that a rank runs in one forward pass.
struct MicroBatch {
  std::vector<std::int32_t> input_ids;
  std::vector<std::uint8_t> loss_mask;
  std::vector<float> advantages;
  std::vector<float> inference_logprobs;
  std::vector<std::int32_t> position_ids;      ///< restart at 0 per sample
  std::vector<std::int32_t> sequence_lengths;  ///< of the samples, in order; sum is input_ids.size()
  std::vector<float> temperatures;
  std::vector<std::string> env_names;    ///< per sample
  std::vector<float> ref_logprobs;       ///< empty: none
  std::vector<float> rl_weights;         ///< empty: 1
  std::vector<float> ce_weights;         ///< empty: 0
  std::vector<float> ref_kl_weights;     ///< empty: 0
  RoutedExperts routed_experts = {};     ///< of all tokens; empty: not known
  std::vector<PromptImage> images = {};  ///< ascending, each within one sample; `first` counts the row's tokens
};

/// What the orchestrator ships for one optimizer step: for each data-parallel rank, its micro-batches.
struct TrainingBatch {
  std::int64_t step = 0;  ///< 1-based: the step that consumes it
  std::vector<std::vector<MicroBatch>> ranks;
};

/// MessagePack arrays, positional, trailing defaults omitted (spec 3.10): [step, ranks], and behind them the pictures of all rows, each
/// once: [height, width, bytes, mean, deviation]. Rows name pictures by number: field 11 is [[picture, first, rows, cols], ...]. decode
/// throws Error{kCorrupt} naming the field.
std::string encode(const TrainingBatch& batch);
TrainingBatch decode_training_batch(std::string_view bytes);

}  // namespace prl::wire
