#include "text/detail/token_decoder.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "text/detail/json_access.hpp"
#include "text/utf8.hpp"

namespace prl::text::detail {
namespace {

namespace json = boost::json;

constexpr int kMaxDecoders = 8;
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

int hex_digit(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// "<0xE4>"; "<0x+4>" is a byte too, because upstream reads the digits as Rust reads a number.
std::optional<char> byte_of(std::string_view token) noexcept {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  const int high = token[3] == '+' ? 0 : hex_digit(token[3]), low = hex_digit(token[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<char>(static_cast<unsigned char>(high * 16 + low));
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  std::size_t done = 0;
  for (std::size_t hit; (hit = text.find(from, done)) != std::string_view::npos; done = hit + from.size())
    out.append(text, done, hit - done).append(to);
  return out.append(text, done);
}

std::string spaces_for(const Metaspace& metaspace, std::string_view token, bool is_first) {
  return replace_all(token, metaspace.replacement, is_first && metaspace.scheme != PrependScheme::kNever ? "" : " ");
}

std::size_t count_at_start(std::string_view text, std::string_view content, std::size_t most) noexcept {
  std::size_t n = 0;
  while (n < most && text.substr(n * content.size()).starts_with(content)) ++n;
  return n;
}

std::size_t count_at_end(std::string_view text, std::string_view content, std::size_t most) noexcept {
  std::size_t n = 0;
  while (n < most && text.substr(0, text.size() - n * content.size()).ends_with(content)) ++n;
  return n;
}

std::size_t count_of(const json::object& object, const char* key, const std::string& where) {
  const std::string name = where + "." + key;
  const std::int64_t count = as_int(require(object, key, where), name);
  if (count < 0) fail(ErrorCode::kCorrupt, "{}: expected a count, found {}", name, count);
  return static_cast<std::size_t>(count);
}

}  // namespace

TokenDecoder::TokenDecoder(const json::value& config, const std::string& where) { add(config, where, 0); }

void TokenDecoder::add(const json::value& config, const std::string& where, int depth) {
  if (depth > kMaxDecoders) fail(ErrorCode::kCorrupt, "{}: decoders nested deeper than {}", where, kMaxDecoders);
  const json::object& object = as_object(config, where);
  const std::string_view type = as_string(require(object, "type", where), where + ".type");
  if (type == "Sequence") {
    const json::array& list = as_array(require(object, "decoders", where), where + ".decoders");
    for (std::size_t i = 0; i < list.size(); ++i) add(list[i], fmt::format("{}.decoders[{}]", where, i), depth + 1);
    return;
  }
  const auto has = [&]<typename T>(std::type_identity<T>) {
    return std::any_of(steps_.begin(), steps_.end(), [](const Step& step) { return std::holds_alternative<T>(step); });
  };
  const bool is_fused = has(std::type_identity<Fuse>{});
  if (type == "Strip") {
    Strip strip{std::string(as_string(require(object, "content", where), where + ".content")), count_of(object, "start", where),
                count_of(object, "stop", where)};
    if (count_code_points(strip.content) != 1)
      fail(ErrorCode::kCorrupt, "{}.content: expected one character, found '{}'", where, strip.content);
    steps_.emplace_back(std::move(strip));
  } else if (type == "Fuse") {
    if (!is_fused) steps_.emplace_back(Fuse{});
  } else if (type != "Replace" && type != "Metaspace" && type != "ByteFallback") {
    fail(ErrorCode::kNotImplemented,
         "{}.type: decoder '{}' is not supported without a ByteLevel pre-tokenizer; supported: Sequence, Replace, ByteFallback, Metaspace, "
         "Fuse and Strip",
         where, type);
  } else if (is_fused) {
    fail(ErrorCode::kNotImplemented, "{}.type: decoder '{}' is not supported behind Fuse, only Strip is", where, type);
  } else if (type == "Replace") {
    steps_.emplace_back(Replacer(object, where));
  } else if (type == "Metaspace") {
    if (has(std::type_identity<Metaspace>{})) fail(ErrorCode::kNotImplemented, "{}.type: a second Metaspace is not supported", where);
    steps_.emplace_back(read_metaspace(object, where));
  } else {
    if (has(std::type_identity<ByteFallback>{})) fail(ErrorCode::kNotImplemented, "{}.type: a second ByteFallback is not supported", where);
    steps_.emplace_back(ByteFallback{});
  }
}

std::string TokenDecoder::bytes_of(std::string_view token) const {
  std::string out(token);
  for (const Step& step : steps_) {
    if (std::holds_alternative<Fuse>(step)) break;
    if (const auto* replacer = std::get_if<Replacer>(&step)) {
      out = replacer->apply(out);
    } else if (const auto* metaspace = std::get_if<Metaspace>(&step)) {
      out = spaces_for(*metaspace, out, false);
    } else if (const auto* strip = std::get_if<Strip>(&step)) {
      out.erase(0, count_at_start(out, strip->content, strip->num_start) * strip->content.size());
      out.resize(out.size() - count_at_end(out, strip->content, strip->num_stop) * strip->content.size());
    } else if (const auto byte = byte_of(out)) {
      out.assign(1, *byte);
      if (static_cast<unsigned char>(*byte) >= 0x80) break;  // a part of a character, of which later steps know nothing
    }
  }
  return out;
}

DecodeStream::DecodeStream(const TokenDecoder& decoder, bool begins_text) : decoder_(&decoder), is_first_(begins_text) {
  for (const TokenDecoder::Step& step : decoder.steps_) {
    const auto* strip = std::get_if<TokenDecoder::Strip>(&step);
    strippings_.push_back({strip != nullptr && begins_text ? strip->num_start : 0});
  }
}

void DecodeStream::feed(std::size_t step, std::string token, std::string& out) {
  for (; step < decoder_->steps_.size(); ++step) {
    const TokenDecoder::Step& what = decoder_->steps_[step];
    if (std::holds_alternative<TokenDecoder::Fuse>(what)) return strip(step + 1, token, out);
    if (const auto* replacer = std::get_if<Replacer>(&what)) {
      token = replacer->apply(token);
    } else if (const auto* metaspace = std::get_if<Metaspace>(&what)) {
      token = spaces_for(*metaspace, token, std::exchange(is_first_, false));
    } else if (const auto* strip = std::get_if<TokenDecoder::Strip>(&what)) {
      token.erase(0, count_at_start(token, strip->content, strip->num_start) * strip->content.size());
      token.resize(token.size() - count_at_end(token, strip->content, strip->num_stop) * strip->content.size());
    } else if (const auto byte = byte_of(token)) {
      bytes_.push_back(*byte);
      return;
    } else {
      end_bytes(step + 1, out);
    }
  }
  out += token;
}

void DecodeStream::end_bytes(std::size_t step, std::string& out) {
  const std::string bytes = std::exchange(bytes_, {});
  if (bytes.empty()) return;
  if (is_valid_utf8(bytes)) return feed(step, bytes, out);
  for (std::size_t i = 0; i < bytes.size(); ++i) feed(step, std::string(kReplacement), out);
}

// Behind Fuse all is one text, of which this is the next part.
void DecodeStream::strip(std::size_t step, std::string_view text, std::string& out) {
  if (step == decoder_->steps_.size()) {
    out += text;
    return;
  }
  const auto& what = std::get<TokenDecoder::Strip>(decoder_->steps_[step]);
  Stripping& state = strippings_[step];
  const std::size_t num_gone = count_at_start(text, what.content, state.num_start_left);
  text.remove_prefix(num_gone * what.content.size());
  state.num_start_left = text.empty() ? state.num_start_left - num_gone : 0;
  if (text.empty()) return;
  std::string joined;
  for (; state.num_held > 0; --state.num_held) joined += what.content;
  joined += text;
  state.num_held = count_at_end(joined, what.content, what.num_stop);
  joined.resize(joined.size() - state.num_held * what.content.size());
  if (!joined.empty()) strip(step + 1, joined, out);
}

void DecodeStream::finish(std::string& out) {
  for (std::size_t step = 0; step < decoder_->steps_.size(); ++step)
    if (std::holds_alternative<TokenDecoder::ByteFallback>(decoder_->steps_[step])) end_bytes(step + 1, out);
}

}  // namespace prl::text::detail
