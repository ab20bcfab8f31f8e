#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace prl::text {
namespace detail {
class TokenDecoder;
}

/// Tokens with the bytes they cover: offsets[i] is [begin, end) in the text that was encoded, after invalid UTF-8 was replaced.
/// Tokens added by the post-processor (a BOS, say) have an empty range.
struct Encoding {
  std::vector<std::int32_t> ids;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> offsets;
};

struct EncodeOptions {
  bool add_special_tokens = false;  ///< run the post-processor of tokenizer.json (BOS of Llama 3); templates write their own
  bool allow_special = true;        ///< false: text that spells a special token stays ordinary text
  bool begins_text = true;          ///< false: other text stands before it, so Metaspace puts nothing in front of the first word
};

/// BPE from a Hugging Face folder, token for token what `tokenizers` gives: over bytes as in GPT-2, Qwen 2/2.5/3, Llama 3 and
/// SmolLM 2, or over characters with bytes for the others, made from SentencePiece, as in Llama 2, Mistral 7B, Phi-3 and Gemma.
///
/// Reads tokenizer.json (required), tokenizer_config.json, special_tokens_map.json and generation_config.json (optional).
/// Threads  immutable after load: any number of threads may call the const methods at once. Share it as
///          std::shared_ptr<const Tokenizer>.
/// Errors   load throws Error{kNotFound, kCorrupt, kNotImplemented} naming the file and the key.
/// Source   github.com/huggingface/tokenizers: AddedVocabulary, BPE, pre_tokenizers.
class Tokenizer {
 public:
  /// Longest text one call encodes; more is Error{kInvalidArgument}.
  static constexpr std::size_t kMaxTextBytes = std::size_t{256} << 20;

  static Tokenizer load(const std::filesystem::path& folder);
  /// From the texts of the files; an empty text means the file is absent. `name` is used in errors.
  static Tokenizer parse(std::string_view tokenizer_json, std::string_view tokenizer_config = {}, std::string_view generation_config = {},
                         std::string_view special_tokens_map = {}, std::string_view name = "tokenizer");
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Invalid UTF-8 is first replaced by U+FFFD. Time grows as n log n in the worst case (one unbroken run of n bytes).
  std::vector<std::int32_t> encode(std::string_view text, EncodeOptions options = {}) const;
  Encoding encode_with_offsets(std::string_view text, EncodeOptions options = {}) const;
  /// The tokens as one whole text, ill-formed UTF-8 replaced as upstream replaces it: each maximal piece by one U+FFFD, but where
  /// characters fell back to bytes, each byte of a row of such tokens. Ids outside the vocabulary (padded model vocabularies have
  /// them) give nothing. Applies clean_up_tokenization_spaces if the config asks for it.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special = true) const;

  /// The id of a token by its spelling in tokenizer.json ("<|im_end|>", "Ġthe").
  std::optional<std::int32_t> id_of(std::string_view token) const;
  /// The spelling in tokenizer.json; empty for ids that no token has.
  std::string_view token_of(std::int32_t id) const;
  /// The bytes the token stands for inside a text; possibly a part of a UTF-8 character. " the" for "▁the": that decode() takes
  /// the space from the beginning of a text is not the token's.
  std::string_view bytes_of(std::int32_t id) const;
  bool is_special(std::int32_t id) const;
  /// True for entries of added_tokens, special or not.
  bool is_added(std::int32_t id) const;
  /// Largest id plus one. A model's embedding may have more rows.
  std::int32_t vocab_size() const;
  /// For text/ itself: null where the bytes of tokens, joined, are the text.
  const detail::TokenDecoder* token_decoder() const;

  std::optional<std::int32_t> bos_id() const;
  std::optional<std::int32_t> eos_id() const;
  std::optional<std::int32_t> pad_id() const;
  /// eos_token_id of generation_config.json (number or list) and the tokenizer's own eos, ascending, no repeats.
  const std::vector<std::int32_t>& stop_ids() const;
  /// Spellings of the named special tokens (bos_token, eos_token, ...): what a chat template sees under these names.
  const boost::json::object& special_tokens() const;
  /// tokenizer_config.json as read; empty when absent.
  const boost::json::object& config() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

/// Whether a folder holds a file that Tokenizer::load() reads one from.
bool has_tokenizer(const std::filesystem::path& folder) noexcept;

}  // namespace prl::text
