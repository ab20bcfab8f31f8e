#include "text/tokenizer_builder.hpp"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "text/chat_template.hpp"
#include "text/detail/byte_alphabet.hpp"
#include "text/detail/pre_tokenizer.hpp"
#include "text/detail/tokenizer_json.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::text {
namespace {

namespace json = boost::json;
using Pair = std::pair<std::int32_t, std::int32_t>;

constexpr int kMaxMerges = 500'000;

json::value pre_tokenizer_config() { return detail::split_then_bytes(detail::kQwenPattern, false); }

struct Word {
  std::vector<std::int32_t> symbols;
  std::int64_t count;
};

std::vector<Word> count_words(const std::string& corpus, const std::vector<std::int32_t>& id_of_byte) {
  const detail::PreTokenizer pre_tokenizer(pre_tokenizer_config(), "tokenizer.json.pre_tokenizer");
  const std::string text = replace_invalid_utf8(corpus);
  std::vector<detail::Piece> pieces;
  detail::PieceStorage storage;
  pre_tokenizer.split(text, {}, false, pieces, storage);
  std::map<std::string_view, std::int64_t> counts;  // ordered, so that the result does not depend on hashing
  for (const detail::Piece& piece : pieces) ++counts[piece.text];
  std::vector<Word> words;
  for (const auto& [piece, count] : counts) {
    Word word{{}, count};
    for (char c : piece) word.symbols.push_back(id_of_byte[static_cast<unsigned char>(c)]);
    words.push_back(std::move(word));
  }
  return words;
}

// Learns merges by taking the most frequent pair again and again; the smaller ids win a tie.
class MergeLearner {
 public:
  explicit MergeLearner(std::vector<Word> words) : words_(std::move(words)) {
    for (std::size_t w = 0; w < words_.size(); ++w) add_pairs(w, +1);
  }

  /// The most frequent pair; nullopt when none occurs twice.
  std::optional<Pair> best_pair() const {
    std::int64_t best_count = 1;
    std::optional<Pair> best;
    for (const auto& [pair, count] : counts_)
      if (count > best_count) {
        best_count = count;
        best = pair;
      }
    return best;
  }

  void merge(const Pair& best, std::int32_t new_id) {
    const std::vector<std::size_t> users = places_[best];
    for (std::size_t w : users) {
      add_pairs(w, -1);
      std::vector<std::int32_t>& symbols = words_[w].symbols;
      std::vector<std::int32_t> merged;
      for (std::size_t i = 0; i < symbols.size(); ++i) {
        const bool joins = i + 1 < symbols.size() && symbols[i] == best.first && symbols[i + 1] == best.second;
        merged.push_back(joins ? new_id : symbols[i]);
        i += joins;
      }
      symbols = std::move(merged);
      add_pairs(w, +1);
    }
    counts_.erase(best);
    places_.erase(best);
  }

 private:
  void add_pairs(std::size_t w, int sign) {
    const Word& word = words_[w];
    for (std::size_t i = 0; i + 1 < word.symbols.size(); ++i) {
      const Pair pair(word.symbols[i], word.symbols[i + 1]);
      counts_[pair] += sign * word.count;
      if (sign < 0) continue;
      std::vector<std::size_t>& users = places_[pair];
      if (users.empty() || users.back() != w) users.push_back(w);
    }
  }

  std::vector<Word> words_;
  std::map<Pair, std::int64_t> counts_;
  std::map<Pair, std::vector<std::size_t>> places_;  // words that held the pair at some time
};

/// The merges that shorten the corpus most, at most options.num_merges; appends each new token's spelling to `spellings`.
json::array learn_merges(const ByteTokenizerOptions& options, const std::vector<std::int32_t>& id_of_byte,
                         std::vector<std::string>& spellings) {
  json::array merges;
  if (options.num_merges == 0 || options.corpus.empty()) return merges;
  MergeLearner learner(count_words(options.corpus, id_of_byte));
  std::unordered_map<std::string, std::int32_t> known;
  for (std::size_t id = 0; id < spellings.size(); ++id) known.emplace(spellings[id], static_cast<std::int32_t>(id));
  while (static_cast<int>(merges.size()) < options.num_merges) {
    const std::optional<Pair> pair = learner.best_pair();
    if (!pair) break;
    const std::string left = spellings[static_cast<std::size_t>(pair->first)], right = spellings[static_cast<std::size_t>(pair->second)];
    // Two ways to the same spelling share its id.
    const auto [entry, is_new] = known.emplace(left + right, static_cast<std::int32_t>(spellings.size()));
    if (is_new) spellings.push_back(left + right);
    learner.merge(*pair, entry->second);
    merges.push_back(json::array{json::string(left), json::string(right)});
  }
  return merges;
}

}  // namespace

ByteTokenizerIds write_byte_level_tokenizer(const std::filesystem::path& folder, const ByteTokenizerOptions& options) {
  if (options.num_merges < 0 || options.num_merges > kMaxMerges)
    fail(ErrorCode::kInvalidArgument, "num_merges must be in [0, {}], got {}", kMaxMerges, options.num_merges);
  // Byte tokens in the order of their stand-in characters, as GPT-2 has them.
  std::vector<std::pair<char32_t, int>> alphabet;
  for (int byte = 0; byte < 256; ++byte) alphabet.emplace_back(detail::byte_to_char(static_cast<unsigned char>(byte)), byte);
  std::sort(alphabet.begin(), alphabet.end());
  std::vector<std::string> spellings;
  std::vector<std::int32_t> id_of_byte(256);
  for (const auto& [character, byte] : alphabet) {
    id_of_byte[static_cast<std::size_t>(byte)] = static_cast<std::int32_t>(spellings.size());
    append_code_point(spellings.emplace_back(), character);
  }
  const json::array merges = learn_merges(options, id_of_byte, spellings);
  json::object vocab;
  for (std::size_t id = 0; id < spellings.size(); ++id) vocab[spellings[id]] = static_cast<std::int64_t>(id);
  ByteTokenizerIds ids;
  ids.endoftext = static_cast<std::int32_t>(spellings.size());
  ids.im_start = ids.endoftext + 1;
  ids.im_end = ids.endoftext + 2;
  ids.vocab_size = ids.endoftext + 3;

  json::array added{detail::added_token(ids.endoftext, "<|endoftext|>", true), detail::added_token(ids.im_start, "<|im_start|>", true),
                    detail::added_token(ids.im_end, "<|im_end|>", true)};
  for (const std::string& name : options.more_special) added.push_back(detail::added_token(ids.vocab_size++, name, true));
  const json::object byte_level = detail::byte_level(false, false, false);
  const json::object model{{"type", "BPE"},
                           {"dropout", nullptr},
                           {"unk_token", nullptr},
                           {"continuing_subword_prefix", nullptr},
                           {"end_of_word_suffix", nullptr},
                           {"fuse_unk", false},
                           {"byte_fallback", false},
                           {"ignore_merges", false},
                           {"vocab", vocab},
                           {"merges", merges}};
  const json::object tokenizer{{"version", "1.0"},
                               {"truncation", nullptr},
                               {"padding", nullptr},
                               {"added_tokens", added},
                               {"normalizer", nullptr},
                               {"pre_tokenizer", pre_tokenizer_config()},
                               {"post_processor", byte_level},
                               {"decoder", byte_level},
                               {"model", model}};
  const std::string chat_template = options.chat_template.empty() ? std::string(chatml_template()) : options.chat_template;
  const json::object config{{"add_prefix_space", false},
                            {"added_tokens_decoder", detail::added_tokens_decoder(added)},
                            {"additional_special_tokens", json::array{"<|im_start|>"}},
                            {"bos_token", nullptr},
                            {"chat_template", json::string(chat_template)},
                            {"clean_up_tokenization_spaces", false},
                            {"eos_token", "<|im_end|>"},
                            {"errors", "replace"},
                            {"model_max_length", options.model_max_length},
                            {"pad_token", "<|endoftext|>"},
                            {"split_special_tokens", false},
                            {"tokenizer_class", "PreTrainedTokenizerFast"},
                            {"unk_token", nullptr}};
  const json::object special{
      {"additional_special_tokens", json::array{"<|im_start|>"}}, {"eos_token", "<|im_end|>"}, {"pad_token", "<|endoftext|>"}};
  const json::object generation{{"eos_token_id", json::array{ids.im_end, ids.endoftext}}, {"pad_token_id", ids.endoftext}};
  const auto write = [&](const char* name, const json::object& content) {
    write_file_atomic(folder / name, dump_python(content, {.indent = 2}) + "\n");
  };
  write("tokenizer.json", tokenizer);
  write("tokenizer_config.json", config);
  write("special_tokens_map.json", special);
  write("generation_config.json", generation);
  return ids;
}

}  // namespace prl::text
