#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "dashboard/rollout_index.hpp"

namespace prl::text {
class Tokenizer;
}

namespace prl::dashboard {

/// Numbers per token of one training sample of a rollout, by name: "inference_logprobs", "trainer_logprobs", "advantages", "entropy", ...
/// Each list is as long as token_ids; what a file has as null is NaN.
struct TokenSample {
  std::int64_t sample = 0;
  std::vector<std::int64_t> token_ids;
  std::vector<std::pair<std::string, std::vector<double>>> streams;
  std::vector<std::string> files;  ///< where they come from, relative to the run
};

/// Looks for the tokens of a rollout in rollouts/step_N/train_tokens.jsonl, which names the rollout's line, and adds what
/// token_exports/step_N/rank_R.jsonl hold of the same token ids. Empty where a run kept none. Reads a bounded part of the files.
std::vector<TokenSample> load_tokens(const std::filesystem::path& run, const RolloutEntry& entry);

/// [{"sample", "num_tokens", "token_ids", "pieces", "streams": {name: [...]}}, ...]: `count` tokens of each from `first`. `tokenizer` may
/// be null: then there are no pieces.
std::string tokens_json(const std::vector<TokenSample>& samples, const text::Tokenizer* tokenizer, std::size_t first, std::size_t count);

/// A folder with the tokenizer of a run: of its newest weights, else of the model its configuration names. Empty if there is none.
std::filesystem::path tokenizer_folder(const std::filesystem::path& run);

}  // namespace prl::dashboard
