#include "text/bpe_files.hpp"

#include <fmt/format.h>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <algorithm>
#include <unordered_map>

#include "base/error.hpp"
#include "base/files.hpp"
#include "text/detail/tokenizer_json.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::text {
namespace {

namespace json = boost::json;
using detail::byte_level;

/// What a pre-tokenizer's name stands for in tokenizer.json.
struct Style {
  json::value normalizer;
  json::value pre_tokenizer;
  json::value post_processor;  ///< before a BOS is added
  bool ignore_merges = false;  ///< a word of the vocabulary is taken whole
};

Style style_of(std::string_view name) {
  if (name == "gpt-2") return {nullptr, byte_level(false, true, true), byte_level(true, false, true)};
  if (name == "smollm") {
    const json::object digits{{"type", "Digits"}, {"individual_digits", true}};
    return {nullptr, json::object{{"type", "Sequence"}, {"pretokenizers", json::array{digits, byte_level(false, true, true)}}}, nullptr};
  }
  if (name == "qwen2")
    return {json::object{{"type", "NFC"}}, detail::split_then_bytes(detail::kQwenPattern, true), byte_level(true, false, true)};
  return {nullptr, detail::split_then_bytes(detail::kLlama3Pattern, true), byte_level(true, true, true), true};
}

struct Alias {
  std::string_view name, style;
};
// Source: the list of pre-tokenizers in llama.cpp's src/llama-vocab.cpp; only names whose splits equal the style's.
constexpr Alias kAliases[] = {
    {"gpt-2", "gpt-2"},         {"phi-2", "gpt-2"},      {"smollm", "smollm"},     {"qwen2", "qwen2"}, {"deepseek-r1-qwen", "qwen2"},
    {"llama-bpe", "llama-bpe"}, {"llama3", "llama-bpe"}, {"llama-v3", "llama-bpe"}};

json::string_view view(std::string_view text) { return {text.data(), text.size()}; }

/// Writes the files of one vocabulary; every method checks what it uses.
class Writer {
 public:
  Writer(const BpeVocabulary& vocabulary, std::string_view name) : v_(vocabulary), name_(name) {
    if (v_.tokens.size() != v_.kinds.size())
      fail(ErrorCode::kCorrupt, "{}: {} tokens, but kinds of {}", name_, v_.tokens.size(), v_.kinds.size());
    for (std::size_t id = 0; id < v_.tokens.size(); ++id) {
      if (v_.kinds[id] == TokenKind::kUnused) continue;
      if (replace_invalid_utf8(v_.tokens[id]) != v_.tokens[id]) fail(ErrorCode::kCorrupt, "{}: token {} is not valid UTF-8", name_, id);
      if (v_.tokens[id].empty()) fail(ErrorCode::kCorrupt, "{}: token {} is empty", name_, id);
      const auto [at, is_new] = ids_.emplace(v_.tokens[id], id);
      if (!is_new) fail(ErrorCode::kCorrupt, "{}: tokens {} and {} are both '{}'", name_, at->second, id, v_.tokens[id]);
      if (v_.kinds[id] == TokenKind::kNormal) end_of_normal_ = id + 1;
    }
  }

  json::object tokenizer(const Style& style) const {
    json::object vocab;
    json::array added;
    for (std::size_t id = 0; id < v_.tokens.size(); ++id) {
      const TokenKind kind = v_.kinds[id];
      if (kind == TokenKind::kUnused) continue;
      // Special tokens behind all others stay out of the model's own vocabulary, as authors publish it.
      if (id < end_of_normal_) vocab[v_.tokens[id]] = static_cast<std::int64_t>(id);
      if (kind != TokenKind::kNormal)
        added.push_back(detail::added_token(static_cast<std::int32_t>(id), v_.tokens[id], kind == TokenKind::kSpecial));
    }
    json::array merges;
    for (std::size_t i = 0; i < v_.merges.size(); ++i) merges.push_back(merge(i));
    json::object model{{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", style.ignore_merges}};
    model["vocab"] = std::move(vocab);
    model["merges"] = std::move(merges);
    json::object result{{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}};
    result["added_tokens"] = std::move(added);
    result["normalizer"] = style.normalizer;
    result["pre_tokenizer"] = style.pre_tokenizer;
    result["post_processor"] = v_.add_bos ? with_bos(style.post_processor) : style.post_processor;
    result["decoder"] = byte_level(true, true, true);
    result["model"] = std::move(model);
    return result;
  }

  /// null where there is no such token.
  json::value token(const char* what, const std::optional<std::int32_t>& id) const {
    if (!id) return nullptr;
    if (*id < 0 || static_cast<std::size_t>(*id) >= v_.tokens.size())
      fail(ErrorCode::kCorrupt, "{}: the {} token is {}, the vocabulary has {} entries", name_, what, *id, v_.tokens.size());
    return json::value(view(v_.tokens[static_cast<std::size_t>(*id)]));
  }

 private:
  json::array merge(std::size_t i) const {
    const std::string_view text = v_.merges[i];
    const std::size_t space = text.find(' ');
    if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos)
      fail(ErrorCode::kCorrupt, "{}: merge {} is '{}', wanted two tokens and a space", name_, i, text.substr(0, 100));
    const std::string left(text.substr(0, space)), right(text.substr(space + 1));
    for (const std::string& part : {left, right, left + right})
      if (!ids_.contains(part))
        fail(ErrorCode::kCorrupt, "{}: merge {} is '{}', but '{}' is no token", name_, i, text.substr(0, 100), part.substr(0, 100));
    return json::array{json::string(left), json::string(right)};
  }

  json::value with_bos(const json::value& inner) const {
    const json::value bos = token("bos", v_.bos_id);
    if (bos.is_null()) fail(ErrorCode::kCorrupt, "{}: a bos is to be added, but there is no bos token", name_);
    const auto part = [](const char* kind, const json::value& id, int type) {
      return json::object{{kind, json::object{{"id", id}, {"type_id", type}}}};
    };
    const json::object special = part("SpecialToken", bos, 0), first = part("Sequence", "A", 0);
    const json::object entry{{"id", bos}, {"ids", json::array{*v_.bos_id}}, {"tokens", json::array{bos}}};
    json::object specials;
    specials[bos.get_string()] = entry;
    const json::object bos_template{{"type", "TemplateProcessing"},
                                    {"single", json::array{special, first}},
                                    {"pair", json::array{special, first, part("SpecialToken", bos, 1), part("Sequence", "B", 1)}},
                                    {"special_tokens", specials}};
    if (inner.is_null()) return bos_template;
    return json::object{{"type", "Sequence"}, {"processors", json::array{inner, bos_template}}};
  }

  const BpeVocabulary& v_;
  std::string name_;
  std::unordered_map<std::string, std::size_t> ids_;
  std::size_t end_of_normal_ = 0;
};

}  // namespace

std::vector<std::string_view> bpe_pre_tokenizer_names() {
  std::vector<std::string_view> names;
  for (const Alias& alias : kAliases) names.push_back(alias.name);
  return names;
}

void write_bpe_tokenizer(const std::filesystem::path& folder, const BpeVocabulary& vocabulary, std::string_view name) {
  const auto alias =
      std::find_if(std::begin(kAliases), std::end(kAliases), [&](const Alias& a) { return a.name == vocabulary.pre_tokenizer; });
  if (alias == std::end(kAliases))
    fail(ErrorCode::kNotImplemented, "{}: the pre-tokenizer is '{}'; this build knows {}", name, vocabulary.pre_tokenizer,
         fmt::join(bpe_pre_tokenizer_names(), ", "));
  const Writer writer(vocabulary, name);
  const json::object tokenizer = writer.tokenizer(style_of(alias->style));

  json::array additional;
  for (const json::value& token : tokenizer.at("added_tokens").as_array()) {
    const json::object& entry = token.as_object();
    if (!entry.at("special").as_bool()) continue;
    const std::int64_t id = entry.at("id").as_int64();
    if (id != vocabulary.bos_id && id != vocabulary.eos_id && id != vocabulary.pad_id && id != vocabulary.unk_id)
      additional.push_back(entry.at("content"));
  }
  json::object config{{"add_prefix_space", false},
                      {"added_tokens_decoder", detail::added_tokens_decoder(tokenizer.at("added_tokens").as_array())}};
  config["additional_special_tokens"] = additional;
  config["bos_token"] = writer.token("bos", vocabulary.bos_id);
  if (!vocabulary.chat_template.empty()) config["chat_template"] = vocabulary.chat_template;
  config["clean_up_tokenization_spaces"] = false;
  config["eos_token"] = writer.token("eos", vocabulary.eos_id);
  config["model_max_length"] = vocabulary.model_max_length;
  config["pad_token"] = writer.token("pad", vocabulary.pad_id);
  config["tokenizer_class"] = "PreTrainedTokenizerFast";
  config["unk_token"] = writer.token("unk", vocabulary.unk_id);

  json::object special;
  if (!additional.empty()) special["additional_special_tokens"] = additional;
  for (const char* key : {"bos_token", "eos_token", "pad_token", "unk_token"})
    if (!config.at(key).is_null()) special[key] = config.at(key);

  json::object generation;
  if (vocabulary.bos_id) generation["bos_token_id"] = *vocabulary.bos_id;
  for (const std::int32_t id : vocabulary.stop_ids) static_cast<void>(writer.token("stop", id));
  if (vocabulary.stop_ids.size() == 1) generation["eos_token_id"] = vocabulary.stop_ids.front();
  if (vocabulary.stop_ids.size() > 1) generation["eos_token_id"] = json::array(vocabulary.stop_ids.begin(), vocabulary.stop_ids.end());
  if (vocabulary.pad_id) generation["pad_token_id"] = *vocabulary.pad_id;

  const auto write = [&](const char* file, const json::object& content) {
    write_file_atomic(folder / file, dump_python(content, {.indent = 2}) + "\n");
  };
  write("tokenizer.json", tokenizer);
  write("tokenizer_config.json", config);
  write("special_tokens_map.json", special);
  write("generation_config.json", generation);
}

}  // namespace prl::text
