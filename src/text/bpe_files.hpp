#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::text {

/// What a vocabulary entry is.
enum class TokenKind : std::uint8_t {
  kNormal,
  kSpecial,  ///< controls the model; skipped when text is decoded
  kAdded,    ///< matched whole in any text, but plain otherwise ("<think>" of some models)
  kUnused,   ///< a row of the embedding without a token
};

/// A byte-level BPE tokenizer as other formats hold it: lists and the name of its pre-tokenizer.
struct BpeVocabulary {
  std::string pre_tokenizer;        ///< one of bpe_pre_tokenizer_names()
  std::vector<std::string> tokens;  ///< by id; spelt as in tokenizer.json ("Ġthe"), special and added ones as their text
  std::vector<TokenKind> kinds;     ///< as many
  std::vector<std::string> merges;  ///< "left right", best first
  std::optional<std::int32_t> bos_id, eos_id, unk_id, pad_id;
  std::vector<std::int32_t> stop_ids;  ///< ids that end a reply; usually eos_id
  bool add_bos = false;                ///< encoding with special tokens begins with bos
  std::string chat_template;           ///< Jinja text; empty: none
  std::int64_t model_max_length = 32768;
};

/// Names that converters of llama.cpp give to pre-tokenizers, those this build knows: "gpt-2", "llama-bpe", "qwen2", "smollm"
/// and others that mean the same.
std::vector<std::string_view> bpe_pre_tokenizer_names();

/// Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json into an existing folder,
/// as the model's authors publish them: normalizer, pre-tokenizer, post-processor and flags follow from the pre-tokenizer's name.
/// `name` is what errors call the source. Error{kCorrupt} names the id or merge: repeated tokens, merges of unknown tokens, ids
/// out of range; Error{kNotImplemented} for an unknown pre-tokenizer; Error{kIo}.
void write_bpe_tokenizer(const std::filesystem::path& folder, const BpeVocabulary& vocabulary, std::string_view name);

}  // namespace prl::text
