#include "text/tokenizer.hpp"

#include <boost/json/array.hpp>
#include <boost/json/value.hpp>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "base/files.hpp"
#include "text/detail/added_tokens.hpp"
#include "text/detail/bpe.hpp"
#include "text/detail/byte_alphabet.hpp"
#include "text/detail/json_access.hpp"
#include "text/detail/normalizer.hpp"
#include "text/detail/pre_tokenizer.hpp"
#include "text/detail/rank_file.hpp"
#include "text/detail/token_decoder.hpp"
#include "text/detokenizer.hpp"
#include "text/utf8.hpp"

namespace prl::text {
namespace {

namespace json = boost::json;
using namespace detail;

constexpr std::uint64_t kMaxFileBytes = std::uint64_t{256} << 20;
constexpr std::int64_t kMaxTokenId = (1 << 24) - 1;
constexpr std::array kNamedTokens = {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};

// Members of tokenizer.json that add ids around the text.
struct PostProcessor {
  std::vector<std::int32_t> prefix, suffix;
};

std::string_view type_of(const json::object& object, const std::string& where) {
  return as_string(require(object, "type", where), where + ".type");
}

std::int32_t token_id(const json::value& value, const std::string& where) {
  const std::int64_t id = as_int(value, where);
  if (id < 0 || id > kMaxTokenId) fail(ErrorCode::kCorrupt, "{}: id {} is outside [0, {}]", where, id, kMaxTokenId);
  return static_cast<std::int32_t>(id);
}

void read_post_processor(const json::value& config, const std::string& where, PostProcessor& out, int depth = 0) {
  if (depth > 4) fail(ErrorCode::kCorrupt, "{}: post-processors nested too deeply", where);
  const json::object& object = as_object(config, where);
  const std::string_view type = type_of(object, where);
  if (type == "Sequence") {
    const json::array& list = as_array(require(object, "processors", where), where + ".processors");
    for (std::size_t i = 0; i < list.size(); ++i) read_post_processor(list[i], fmt::format("{}.processors[{}]", where, i), out, depth + 1);
  } else if (type == "TemplateProcessing") {
    const json::object& special = as_object(require(object, "special_tokens", where), where + ".special_tokens");
    const json::array& single = as_array(require(object, "single", where), where + ".single");
    PostProcessor added;
    bool behind_text = false;
    for (std::size_t i = 0; i < single.size(); ++i) {
      const std::string key = fmt::format("{}.single[{}]", where, i);
      const json::object& item = as_object(single[i], key);
      if (find(item, "Sequence") != nullptr) {
        behind_text = true;
        continue;
      }
      const json::object& token = as_object(require(item, "SpecialToken", key), key + ".SpecialToken");
      const std::string_view name = as_string(require(token, "id", key), key + ".SpecialToken.id");
      const std::string entry_key = fmt::format("{}.special_tokens['{}']", where, name);
      const json::object& entry = as_object(require(special, name, where + ".special_tokens"), entry_key);
      for (const json::value& id : as_array(require(entry, "ids", entry_key), entry_key + ".ids"))
        (behind_text ? added.suffix : added.prefix).push_back(token_id(id, entry_key + ".ids"));
    }
    out.prefix.insert(out.prefix.begin(), added.prefix.begin(), added.prefix.end());
    out.suffix.insert(out.suffix.end(), added.suffix.begin(), added.suffix.end());
  } else if (type != "ByteLevel") {  // ByteLevel only trims offsets
    fail(ErrorCode::kNotImplemented, "{}.type: post-processor '{}' is not supported", where, type);
  }
}

void check_byte_decoder(const json::object& root, const std::string& where) {
  const json::value* decoder = find(root, "decoder");
  const std::string key = where + ".decoder";
  if (decoder == nullptr)
    fail(ErrorCode::kNotImplemented, "{}: missing; behind a ByteLevel pre-tokenizer only the ByteLevel decoder is supported", key);
  const json::object& object = as_object(*decoder, key);
  if (type_of(object, key) == "Sequence") {
    for (const json::value& item : as_array(require(object, "decoders", key), key + ".decoders"))
      if (type_of(as_object(item, key), key) != "ByteLevel")
        fail(ErrorCode::kNotImplemented, "{}: decoder '{}' is not supported behind a ByteLevel pre-tokenizer, only ByteLevel is", key,
             type_of(as_object(item, key), key));
  } else if (type_of(object, key) != "ByteLevel") {
    fail(ErrorCode::kNotImplemented, "{}.type: decoder '{}' is not supported behind a ByteLevel pre-tokenizer, only ByteLevel is", key,
         type_of(object, key));
  }
}

PreTokenizer read_pre_tokenizer(const json::object& root, const std::string& where) {
  const json::value* config = find(root, "pre_tokenizer");
  return config == nullptr ? PreTokenizer() : PreTokenizer(*config, where + ".pre_tokenizer");
}

// None where tokens are spelt in the byte alphabet.
std::optional<TokenDecoder> read_decoder(const json::object& root, bool is_byte_level, const std::string& where) {
  if (is_byte_level) {
    check_byte_decoder(root, where);
    return std::nullopt;
  }
  const json::value& decoder = require(root, "decoder", where);
  if (const json::object* object = decoder.if_object())
    if (const json::value* type = find(*object, "type"); type != nullptr && *type == "ByteLevel")
      fail(ErrorCode::kNotImplemented, "{}.pre_tokenizer: has no ByteLevel step, but the decoder is ByteLevel", where);
  return TokenDecoder(decoder, where + ".decoder");
}

// Source: PreTrainedTokenizerBase.clean_up_tokenization of transformers.
std::string clean_up_spaces(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kRules[] = {{" .", "."},     {" ?", "?"},     {" !", "!"},   {" ,", ","},
                                                                      {" ' ", "'"},    {" n't", "n't"}, {" 'm", "'m"}, {" 's", "'s"},
                                                                      {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kRules) {
    std::string out;
    std::size_t position = 0;
    for (std::size_t hit; (hit = text.find(from, position)) != std::string::npos; position = hit + from.size())
      out.append(text, position, hit - position).append(to);
    text = out.append(text, position, std::string::npos);
  }
  return text;
}

}  // namespace

struct Tokenizer::Impl {
  struct Entry {
    std::string spelling;
    std::string bytes;
    bool special = false;
    bool added = false;
  };

  Impl(const json::object& root, const std::string& where)
      : pre_tokenizer(read_pre_tokenizer(root, where)),
        bpe(require(root, "model", where), pre_tokenizer.is_byte_level(), where + ".model"),
        decoder(read_decoder(root, pre_tokenizer.is_byte_level(), where)) {}

  void add_token(AddedToken token);
  void read_added_tokens(const json::object& root, const std::string& where);
  void read_config(const json::object& root, const std::string& where);
  void read_named_tokens(const json::object& root, const std::string& where);
  void read_more_special_tokens(const json::object& root, const std::string& where);
  void want_special(const json::value& value, const std::string& where);
  void register_special_tokens();
  void build_tables();
  void encode(std::string_view text, EncodeOptions options, Encoding& out, bool want_offsets) const;
  void encode_segment(std::string_view text, std::uint32_t base, EncodeOptions options, Encoding& out, bool want_offsets) const;
  std::string bytes_of(const std::string& spelling) const {
    return decoder ? decoder->bytes_of(spelling) : unspell_bytes(spelling).value_or(spelling);
  }
  std::optional<std::int32_t> named_id(const char* name) const;
  const Entry* entry(std::int32_t id) const {
    return id >= 0 && static_cast<std::size_t>(id) < entries.size() ? &entries[static_cast<std::size_t>(id)] : nullptr;
  }

  PreTokenizer pre_tokenizer;
  Bpe bpe;
  std::optional<TokenDecoder> decoder;  // none: byte level
  Normalizer normalizer;
  PostProcessor post_processor;
  std::map<std::int32_t, AddedToken> added;
  StringToId added_ids;
  AddedTokenFinder raw_finder, normalized_finder;
  std::vector<Entry> entries;  // by id; an empty spelling means no such token
  json::object config, special_tokens;
  std::vector<AddedToken> wanted_special;  // tokens that the configuration names as special, without ids, each once
  std::vector<std::int32_t> stops;
  bool clean_up = false;
};

void Tokenizer::Impl::add_token(AddedToken token) {
  if (token.content.empty()) return;
  if (const auto known = bpe.vocab().find(token.content); known != bpe.vocab().end()) token.id = known->second;
  if (const auto known = added_ids.find(token.content); known != added_ids.end()) token.id = known->second;
  added_ids[token.content] = token.id;
  added[token.id] = std::move(token);
}

void Tokenizer::Impl::read_added_tokens(const json::object& root, const std::string& where) {
  const json::value* list = find(root, "added_tokens");
  if (list == nullptr) return;
  const json::array& tokens = as_array(*list, where + ".added_tokens");
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string key = fmt::format("{}.added_tokens[{}]", where, i);
    const json::object& object = as_object(tokens[i], key);
    AddedToken token;
    token.id = token_id(require(object, "id", key), key + ".id");
    token.content = as_string(require(object, "content", key), key + ".content");
    token.special = bool_or(object, "special", false, key);
    token.single_word = bool_or(object, "single_word", false, key);
    token.lstrip = bool_or(object, "lstrip", false, key);
    token.rstrip = bool_or(object, "rstrip", false, key);
    token.normalized = bool_or(object, "normalized", !token.special, key);
    if (const auto other = added.find(token.id); other != added.end() && other->second.content != token.content)
      fail(ErrorCode::kCorrupt, "{}: id {} belongs to '{}' too", key, token.id, other->second.content);
    add_token(std::move(token));
  }
}

// tokenizer_config.json: tokens that tokenizer.json lacks.
void Tokenizer::Impl::read_config(const json::object& root, const std::string& where) {
  config = root;
  clean_up = bool_or(root, "clean_up_tokenization_spaces", false, where) &&
             bool_or(root, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", false, where);
  const json::value* by_id = find(root, "added_tokens_decoder");
  if (by_id == nullptr) return;
  for (const auto& member : as_object(*by_id, where + ".added_tokens_decoder")) {
    const std::string_view id_text(member.key().data(), member.key().size());
    const std::string key = fmt::format("{}.added_tokens_decoder['{}']", where, id_text);
    if (id_text.empty() || id_text.size() > 8 || id_text.find_first_not_of("0123456789") != std::string_view::npos)
      fail(ErrorCode::kCorrupt, "{}: the key must be a token id", key);
    const json::object& object = as_object(member.value(), key);
    AddedToken token;
    token.id = token_id(json::value(std::stoll(std::string(id_text))), key);
    token.content = as_string(require(object, "content", key), key + ".content");
    if (added_ids.contains(token.content)) continue;
    token.special = bool_or(object, "special", false, key);
    token.single_word = bool_or(object, "single_word", false, key);
    token.lstrip = bool_or(object, "lstrip", false, key);
    token.rstrip = bool_or(object, "rstrip", false, key);
    token.normalized = bool_or(object, "normalized", !token.special, key);
    if (added.contains(token.id)) fail(ErrorCode::kCorrupt, "{}: tokenizer.json gives this id to '{}'", key, added.at(token.id).content);
    add_token(std::move(token));
  }
}

// bos_token and its kin, each a string or an object with "content". Members already known win.
void Tokenizer::Impl::read_named_tokens(const json::object& root, const std::string& where) {
  for (const char* name : kNamedTokens) {
    const json::value* value = find(root, name);
    if (value == nullptr || special_tokens.contains(name)) continue;
    const std::string key = fmt::format("{}.{}", where, name);
    const std::string_view text =
        value->is_object() ? as_string(require(value->get_object(), "content", key), key + ".content") : as_string(*value, key);
    special_tokens[name] = json::string_view(text.data(), text.size());
    want_special(*value, key);
  }
}

// Special tokens without a role: a list, or an object that gives each a name of its own.
void Tokenizer::Impl::read_more_special_tokens(const json::object& root, const std::string& where) {
  for (const char* name : {"additional_special_tokens", "extra_special_tokens"}) {
    const json::value* value = find(root, name);
    if (value == nullptr) continue;
    const std::string key = fmt::format("{}.{}", where, name);
    if (const json::object* named = value->if_object()) {
      for (const auto& member : *named) {
        want_special(member.value(), key);
        if (!special_tokens.contains(member.key())) special_tokens[member.key()] = json::string(wanted_special.back().content);
      }
    } else {
      for (const json::value& token : as_array(*value, key)) want_special(token, key);
    }
  }
}

// A string, or an object with "content" and flags.
void Tokenizer::Impl::want_special(const json::value& value, const std::string& where) {
  AddedToken token;
  if (const json::object* object = value.if_object()) {
    token.content = as_string(require(*object, "content", where), where + ".content");
    token.single_word = bool_or(*object, "single_word", false, where);
    token.lstrip = bool_or(*object, "lstrip", false, where);
    token.rstrip = bool_or(*object, "rstrip", false, where);
    token.normalized = bool_or(*object, "normalized", false, where);
  } else {
    token.content = as_string(value, where);
  }
  token.special = true;
  std::erase_if(wanted_special, [&](const AddedToken& other) { return other.content == token.content; });
  wanted_special.push_back(std::move(token));
}

// A token that the configuration calls special is one, whatever tokenizer.json says of it; one that tokenizer.json lacks gets the
// next free id, as transformers gives it.
void Tokenizer::Impl::register_special_tokens() {
  for (const AddedToken& token : wanted_special) {
    if (token.content.empty()) continue;
    if (const auto known = added_ids.find(token.content); known != added_ids.end()) {
      added.at(known->second).special = true;
      continue;
    }
    AddedToken fresh = token;
    fresh.id = std::max(bpe.max_id(), added.empty() ? -1 : added.rbegin()->first) + 1;
    if (fresh.id > kMaxTokenId) fail(ErrorCode::kCorrupt, "[tokenizer] no id is left for the special token '{}'", token.content);
    add_token(std::move(fresh));  // which takes the vocabulary's id if the token is there
  }
}

void Tokenizer::Impl::build_tables() {
  register_special_tokens();
  std::int32_t max_id = bpe.max_id();
  if (!added.empty()) max_id = std::max(max_id, added.rbegin()->first);
  entries.resize(static_cast<std::size_t>(max_id + 1));
  for (const auto& [spelling, id] : bpe.vocab()) {
    Entry& entry = entries[static_cast<std::size_t>(id)];
    entry.spelling = spelling;
    entry.bytes = bytes_of(spelling);
  }
  for (const auto& [id, token] : added) {
    Entry& entry = entries[static_cast<std::size_t>(id)];
    entry.spelling = token.content;
    entry.bytes = bytes_of(token.content);
    entry.special = token.special;
    entry.added = true;
    if (token.normalized)
      normalized_finder.add(token, normalizer.apply(token.content, false).text);
    else
      raw_finder.add(token, token.content);
  }
}

std::optional<std::int32_t> Tokenizer::Impl::named_id(const char* name) const {
  const json::value* value = special_tokens.if_contains(name);
  if (value == nullptr) return std::nullopt;
  const std::string_view text(value->get_string().data(), value->get_string().size());
  if (const auto known = added_ids.find(text); known != added_ids.end()) return known->second;
  if (const auto known = bpe.vocab().find(text); known != bpe.vocab().end()) return known->second;
  return std::nullopt;
}

void Tokenizer::Impl::encode_segment(std::string_view text, std::uint32_t base, EncodeOptions options, Encoding& out,
                                     bool want_offsets) const {
  NormalText normal;
  const bool is_changed = !normalizer.is_identity();
  if (is_changed) normal = normalizer.apply(text, want_offsets || pre_tokenizer.knows_start());
  const std::string_view input = is_changed ? std::string_view(normal.text) : text;
  const auto place = [&](std::int64_t position) {
    const auto at = static_cast<std::size_t>(std::max<std::int64_t>(position, 0));
    return base + (is_changed ? normal.places[std::min(at, normal.places.size() - 1)] : static_cast<std::uint32_t>(at));
  };
  std::vector<TextSpan> spans;
  normalized_finder.split(input, options.allow_special, spans);
  std::vector<Piece> pieces;
  std::vector<PieceToken> tokens;
  PieceStorage storage;
  for (const TextSpan& span : spans) {
    const auto span_begin = static_cast<std::int64_t>(span.begin);
    if (span.id >= 0) {
      out.ids.push_back(span.id);
      if (want_offsets) out.offsets.emplace_back(place(span_begin), place(static_cast<std::int64_t>(span.end)));
      continue;
    }
    storage.clear();
    SegmentPlace segment{options.begins_text && base == 0 && (is_changed || span.begin == 0)};
    if (!normal.places.empty()) segment.places = std::span(normal.places).subspan(span.begin);
    pre_tokenizer.split(input.substr(span.begin, span.end - span.begin), segment, want_offsets, pieces, storage);
    for (const Piece& piece : pieces) {
      tokens.clear();
      bpe.encode(piece.text, tokens);
      std::size_t done = 0;
      for (const PieceToken& token : tokens) {
        out.ids.push_back(token.id);
        if (want_offsets) {
          const std::uint32_t begin = place(std::max(span_begin + piece.place(done), span_begin));
          out.offsets.emplace_back(begin, std::max(begin, place(span_begin + piece.place(done + token.num_bytes))));
        }
        done += token.num_bytes;
      }
    }
  }
}

void Tokenizer::Impl::encode(std::string_view text, EncodeOptions options, Encoding& out, bool want_offsets) const {
  if (text.size() > kMaxTextBytes)
    fail(ErrorCode::kInvalidArgument, "[tokenizer] text has {} bytes, at most {} can be encoded at once", text.size(), kMaxTextBytes);
  std::string repaired;
  if (!is_valid_utf8(text)) {
    repaired = replace_invalid_utf8(text);
    text = repaired;
  }
  out.ids.reserve(text.size() / 4 + 8);
  const auto add_fixed = [&](const std::vector<std::int32_t>& ids, std::size_t at) {
    for (std::int32_t id : ids) {
      out.ids.push_back(id);
      if (want_offsets) out.offsets.emplace_back(static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(at));
    }
  };
  if (options.add_special_tokens) add_fixed(post_processor.prefix, 0);
  std::vector<TextSpan> spans;
  raw_finder.split(text, options.allow_special, spans);
  for (const TextSpan& span : spans) {
    if (span.id >= 0) {
      out.ids.push_back(span.id);
      if (want_offsets) out.offsets.emplace_back(static_cast<std::uint32_t>(span.begin), static_cast<std::uint32_t>(span.end));
    } else {
      encode_segment(text.substr(span.begin, span.end - span.begin), static_cast<std::uint32_t>(span.begin), options, out, want_offsets);
    }
  }
  if (options.add_special_tokens) add_fixed(post_processor.suffix, text.size());
}

bool has_tokenizer(const std::filesystem::path& folder) noexcept {
  std::error_code ignored;
  return std::filesystem::is_regular_file(folder / "tokenizer.json", ignored) ||
         std::filesystem::is_regular_file(folder / "tiktoken.model", ignored);
}

Tokenizer Tokenizer::load(const std::filesystem::path& folder) {
  const auto read_optional = [&](const char* name) {
    return std::filesystem::exists(folder / name) ? read_file(folder / name, kMaxFileBytes) : std::string();
  };
  if (!has_tokenizer(folder))
    fail(ErrorCode::kNotFound, "[tokenizer] {} has no tokenizer.json; a Hugging Face folder with a fast BPE tokenizer is needed",
         folder.string());
  const std::string tokenizer =
      std::filesystem::exists(folder / "tokenizer.json")
          ? read_optional("tokenizer.json")
          : detail::tokenizer_json_of_ranks(read_optional("tiktoken.model"), read_optional("tokenizer_config.json"), folder.string());
  return parse(tokenizer, read_optional("tokenizer_config.json"), read_optional("generation_config.json"),
               read_optional("special_tokens_map.json"), folder.string());
}

Tokenizer Tokenizer::parse(std::string_view tokenizer_json, std::string_view tokenizer_config, std::string_view generation_config,
                           std::string_view special_tokens_map, std::string_view name) {
  const std::string where = fmt::format("{}/tokenizer.json", name);
  const json::value document = parse_document(tokenizer_json, where);
  const json::object& root = as_object(document, where);
  auto impl = std::make_unique<Impl>(root, where);
  if (const json::value* normalizer = find(root, "normalizer")) impl->normalizer = Normalizer(*normalizer, where + ".normalizer");
  if (const json::value* post = find(root, "post_processor")) read_post_processor(*post, where + ".post_processor", impl->post_processor);
  impl->read_added_tokens(root, where);
  if (!tokenizer_config.empty()) {
    const std::string file = fmt::format("{}/tokenizer_config.json", name);
    const json::value config = parse_document(tokenizer_config, file);
    impl->read_config(as_object(config, file), file);
    impl->read_named_tokens(impl->config, file);
    impl->read_more_special_tokens(impl->config, file);
  }
  if (!special_tokens_map.empty()) {
    const std::string file = fmt::format("{}/special_tokens_map.json", name);
    const json::value map = parse_document(special_tokens_map, file);
    impl->read_named_tokens(as_object(map, file), file);
    impl->read_more_special_tokens(as_object(map, file), file);
  }
  impl->build_tables();
  const auto add_stop = [&](std::int32_t id) { impl->stops.push_back(id); };
  if (!generation_config.empty()) {
    const std::string file = fmt::format("{}/generation_config.json", name);
    const json::value config = parse_document(generation_config, file);
    if (const json::value* eos = find(as_object(config, file), "eos_token_id")) {
      if (eos->is_array()) {
        for (const json::value& id : eos->get_array()) add_stop(token_id(id, file + ".eos_token_id"));
      } else {
        add_stop(token_id(*eos, file + ".eos_token_id"));
      }
    }
  }
  if (const auto eos = impl->named_id("eos_token")) add_stop(*eos);
  std::sort(impl->stops.begin(), impl->stops.end());
  impl->stops.erase(std::unique(impl->stops.begin(), impl->stops.end()), impl->stops.end());
  return Tokenizer(std::move(impl));
}

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  Encoding out;
  impl_->encode(text, options, out, false);
  return std::move(out.ids);
}

Encoding Tokenizer::encode_with_offsets(std::string_view text, EncodeOptions options) const {
  Encoding out;
  impl_->encode(text, options, out, true);
  return out;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  IncrementalDetokenizer detokenizer(*this, skip_special);
  std::string text;
  for (std::int32_t id : ids) detokenizer.push(id, text);
  detokenizer.finish(text);
  return impl_->clean_up ? clean_up_spaces(std::move(text)) : text;
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  if (const auto known = impl_->added_ids.find(token); known != impl_->added_ids.end()) return known->second;
  if (const auto known = impl_->bpe.vocab().find(token); known != impl_->bpe.vocab().end()) return known->second;
  return std::nullopt;
}

std::string_view Tokenizer::token_of(std::int32_t id) const {
  const Impl::Entry* entry = impl_->entry(id);
  return entry == nullptr ? std::string_view() : std::string_view(entry->spelling);
}

std::string_view Tokenizer::bytes_of(std::int32_t id) const {
  const Impl::Entry* entry = impl_->entry(id);
  return entry == nullptr ? std::string_view() : std::string_view(entry->bytes);
}

bool Tokenizer::is_special(std::int32_t id) const {
  const Impl::Entry* entry = impl_->entry(id);
  return entry != nullptr && entry->special;
}

bool Tokenizer::is_added(std::int32_t id) const {
  const Impl::Entry* entry = impl_->entry(id);
  return entry != nullptr && entry->added;
}

const detail::TokenDecoder* Tokenizer::token_decoder() const { return impl_->decoder ? &*impl_->decoder : nullptr; }
std::int32_t Tokenizer::vocab_size() const { return static_cast<std::int32_t>(impl_->entries.size()); }
std::optional<std::int32_t> Tokenizer::bos_id() const { return impl_->named_id("bos_token"); }
std::optional<std::int32_t> Tokenizer::eos_id() const { return impl_->named_id("eos_token"); }
std::optional<std::int32_t> Tokenizer::pad_id() const { return impl_->named_id("pad_token"); }
const std::vector<std::int32_t>& Tokenizer::stop_ids() const { return impl_->stops; }
const json::object& Tokenizer::special_tokens() const { return impl_->special_tokens; }
const json::object& Tokenizer::config() const { return impl_->config; }

}  // namespace prl::text
