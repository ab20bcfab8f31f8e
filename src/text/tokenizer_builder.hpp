#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace prl::text {

struct ByteTokenizerOptions {
  /// Text to learn merges from; empty: none.
  std::string corpus = {};
  /// At most this many merges are learned.
  int num_merges = 0;
  /// Jinja text; empty means chatml_template().
  std::string chat_template = {};
  /// Special tokens behind the three that are always there, such as "<|image_pad|>".
  std::vector<std::string> more_special = {};
  /// Written as model_max_length.
  std::int64_t model_max_length = 32768;
};

/// Ids that write_byte_level_tokenizer gave out.
struct ByteTokenizerIds {
  std::int32_t vocab_size = 0;  ///< ids are [0, vocab_size)
  std::int32_t endoftext = 0;   ///< pad token
  std::int32_t im_start = 0;
  std::int32_t im_end = 0;  ///< eos token
};

/// Writes tokenizer.json (256 byte tokens, Qwen's pre-tokenizer, merges learned from the corpus if any), tokenizer_config.json
/// with the chat template, special_tokens_map.json and generation_config.json into an existing folder. The files load in
/// `transformers` and give the same ids there. Deterministic. Error{kIo}.
ByteTokenizerIds write_byte_level_tokenizer(const std::filesystem::path& folder, const ByteTokenizerOptions& options = {});

}  // namespace prl::text
