#include "text/detail/rank_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "text/detail/byte_alphabet.hpp"
#include "text/detail/tokenizer_json.hpp"

namespace prl::text::detail {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxRanks = std::size_t{1} << 20, kMaxRankedBytes = 1024;
constexpr std::int64_t kReserved = 256;

/// Moonshot's splitting pattern. The original takes Han out of classes by an intersection, which not every engine has: here a look ahead
/// does.
constexpr std::string_view kMoonshotPattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])*(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])+(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

json::object read_config(std::string_view config, std::string_view name) {
  json::error_code error;
  json::value parsed = json::parse(config, error);
  if (config.empty() || error.failed() || !parsed.is_object())
    fail(ErrorCode::kCorrupt, "{}/tokenizer_config.json: wanted a JSON object beside tiktoken.model, which says how text is split", name);
  const json::value* found = parsed.get_object().if_contains("tokenizer_class");
  const std::string class_name = found != nullptr && found->is_string() ? std::string(found->get_string()) : "none";
  if (class_name != "TikTokenTokenizer")
    fail(ErrorCode::kNotImplemented,
         "{}/tokenizer_config.json: tokenizer_class is '{}'; of tiktoken.model this build knows 'TikTokenTokenizer' (Moonlight, Kimi K2). "
         "Put a tokenizer.json into the folder",
         name, class_name);
  return std::move(parsed.get_object());
}

/// The tokens' bytes by rank.
std::vector<std::string> read_ranks(std::string_view ranks, std::string_view name) {
  std::vector<std::string> tokens;
  std::size_t number = 0;
  for (std::size_t at = 0; at < ranks.size(); ++number) {
    const std::size_t end = std::min(ranks.find('\n', at), ranks.size());
    std::string_view line = ranks.substr(at, end - at);
    at = end + 1;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.remove_suffix(1);
    if (line.empty()) continue;
    const auto bad = [&](std::string_view wanted) {
      fail(ErrorCode::kCorrupt, "{}/tiktoken.model, line {}: '{}': wanted {}", name, number + 1, line.substr(0, 100), wanted);
    };
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos) bad("a token in base64, a space and its rank");
    const std::string_view digits = line.substr(space + 1);
    std::size_t rank = 0;
    const auto [rest, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    if (error != std::errc() || rest != digits.data() + digits.size() || rank != tokens.size() || rank >= kMaxRanks)
      bad(fmt::format("rank {}, as ranks rise by one from 0, below {}", tokens.size(), kMaxRanks));
    std::string token;
    try {
      token = from_base64(line.substr(0, space));
    } catch (const Error& error_of_base64) {
      bad(error_of_base64.what());
    }
    if (token.empty() || token.size() > kMaxRankedBytes) bad(fmt::format("a token of 1 to {} bytes", kMaxRankedBytes));
    tokens.push_back(std::move(token));
  }
  return tokens;
}

void append_quoted(std::string& out, std::string_view spelling) {
  out.push_back('"');
  for (const char c : spelling) {
    if (c == '"' || c == '\\') out.push_back('\\');
    out.push_back(c);  // the byte alphabet has no control characters
  }
  out.push_back('"');
}

json::array reserved_tokens(const json::object& config, std::size_t num_tokens) {
  const json::value* named = config.if_contains("added_tokens_decoder");
  json::array added;
  for (std::int64_t i = 0; i < kReserved; ++i) {
    const std::int64_t id = static_cast<std::int64_t>(num_tokens) + i;
    if (named == nullptr || !named->is_object() || !named->get_object().contains(std::to_string(id)))
      added.push_back(added_token(static_cast<std::int32_t>(id), fmt::format("<|reserved_token_{}|>", id), true));
  }
  return added;
}

}  // namespace

std::string tokenizer_json_of_ranks(std::string_view ranks, std::string_view config, std::string_view name) {
  const json::object settings = read_config(config, name);
  const std::vector<std::string> tokens = read_ranks(ranks, name);
  std::unordered_map<std::string_view, std::size_t> ids;
  ids.reserve(tokens.size());
  std::vector<std::string> spellings;
  for (const std::string& token : tokens) {
    if (!ids.emplace(token, spellings.size()).second)
      fail(ErrorCode::kCorrupt, "{}/tiktoken.model: tokens {} and {} are the same", name, ids.at(token), spellings.size());
    spellings.push_back(spell_bytes(token));
  }
  for (int byte = 0; byte < 256; ++byte)
    if (const char c = static_cast<char>(byte); !ids.contains(std::string_view(&c, 1)))
      fail(ErrorCode::kCorrupt, "{}/tiktoken.model: there is no token of the single byte {}", name, byte);

  std::string vocab, merges;
  for (std::size_t id = 0; id < spellings.size(); ++id) {
    vocab += id > 0 ? "," : "";
    append_quoted(vocab, spellings[id]);
    vocab += fmt::format(":{}", id);
    // Two neighbours are merged if they make a token, those of the lowest rank first: each way to cut a token in two is a merge.
    const std::string_view token = tokens[id];
    std::vector<std::pair<std::size_t, std::size_t>> cuts;
    for (std::size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = ids.find(token.substr(0, cut)), right = ids.find(token.substr(cut));
      if (left != ids.end() && right != ids.end()) cuts.emplace_back(left->second, right->second);
    }
    std::ranges::sort(cuts);
    for (const auto& [left, right] : cuts) {
      merges += merges.empty() ? "" : ",";
      append_quoted(merges, spellings[left] + " " + spellings[right]);
    }
  }
  return fmt::format(
      R"({{"version":"1.0","truncation":null,"padding":null,"added_tokens":{},"normalizer":null,"pre_tokenizer":{},"post_processor":null,)"
      R"("decoder":{},"model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,)"
      R"("fuse_unk":false,"byte_fallback":false,"ignore_merges":true,"vocab":{{{}}},"merges":[{}]}}}})",
      json::serialize(reserved_tokens(settings, tokens.size())), json::serialize(split_then_bytes(kMoonshotPattern, true)),
      json::serialize(byte_level(true, true, true)), vocab, merges);
}

}  // namespace prl::text::detail
