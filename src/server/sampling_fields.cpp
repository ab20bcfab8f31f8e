#include "server/sampling_fields.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>

#include "engine/resolve_request.hpp"
#include "net/http_message.hpp"

namespace prl::server {
namespace {

// Each choice of a request has its own copy of these.
constexpr std::size_t kMaxStopStrings = 64;
constexpr std::size_t kMaxStopBytes = 16 << 10;  // of all stop strings together
constexpr std::size_t kMaxLogitBiases = 4096;
constexpr std::size_t kMaxBadWords = 256;
constexpr std::size_t kMaxBadWordBytes = 1024;
using engine::kMaxNamedLogprobs;

template <typename T, typename U>
void set_if(T& target, const std::optional<U>& value) {
  if (value) target = static_cast<T>(*value);
}

std::map<std::int32_t, float> read_logit_bias(const JsonFields& fields, std::int64_t vocab_size) {
  std::map<std::int32_t, float> out;
  const boost::json::object* biases = fields.object("logit_bias");
  if (!biases) return out;
  const std::string name = fields.full_name("logit_bias");
  if (biases->size() > kMaxLogitBiases)
    net::fail_param(name, fmt::format("{}: wanted at most {} tokens, found {}", name, kMaxLogitBiases, biases->size()));
  for (const auto& [key, value] : *biases) {
    std::int64_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() || id < 0 || id >= vocab_size)
      net::fail_param(name, fmt::format("{}: '{}' is not a token id in [0, {})", name, std::string_view(key), vocab_size));
    const JsonFields one(*biases, name + ".");
    out[static_cast<std::int32_t>(id)] = static_cast<float>(*one.number(key, -100, 100));
  }
  return out;
}

/// Each id once, in the order of the request.
std::vector<std::int32_t> read_logprob_token_ids(const JsonFields& fields, std::int64_t vocab_size) {
  std::vector<std::int32_t> out;
  const auto ids = fields.token_ids("logprob_token_ids", vocab_size);
  if (!ids) return out;
  for (const std::int32_t id : *ids)
    if (std::find(out.begin(), out.end(), id) == out.end() && out.size() <= kMaxNamedLogprobs) out.push_back(id);
  const std::string name = fields.full_name("logprob_token_ids");
  if (out.size() > kMaxNamedLogprobs)
    net::fail_param(name, fmt::format("{}: wanted at most {} tokens, found more", name, kMaxNamedLogprobs));
  return out;
}

/// vLLM's reading of bad_words: each word as it stands and, where that changes its first token alone, behind a blank.
std::vector<std::vector<std::int32_t>> read_bad_words(const JsonFields& fields, const ServerContext& context) {
  std::vector<std::vector<std::int32_t>> out;
  const auto words = fields.strings("bad_words", kMaxBadWords);
  if (!words) return out;
  text::EncodeOptions encode;
  encode.add_special_tokens = false;
  for (const std::string& word : *words) {
    const std::size_t begin = word.find_first_not_of(" \n\t\r\f\v");
    if (begin == std::string::npos || word.size() > kMaxBadWordBytes)
      net::fail_param(fields.full_name("bad_words"), fmt::format("{}: wanted words of 1 to {} bytes, found one of {}",
                                                                 fields.full_name("bad_words"), kMaxBadWordBytes, word.size()));
    out.push_back(context.tokenizer->encode(word.substr(begin), encode));
    auto behind_blank = context.tokenizer->encode(" " + word.substr(begin), encode);
    if (behind_blank.size() == out.back().size() && behind_blank.front() != out.back().front()) out.push_back(std::move(behind_blank));
  }
  return out;
}

}  // namespace

wire::SamplingParams read_sampling(const JsonFields& fields, const ServerContext& context, const SamplingDefaults& defaults) {
  wire::SamplingParams out;
  set_if(out.temperature, defaults.temperature);
  set_if(out.top_p, defaults.top_p);
  set_if(out.top_k, defaults.top_k);
  set_if(out.min_p, defaults.min_p);
  set_if(out.repetition_penalty, defaults.repetition_penalty);
  set_if(out.temperature, fields.number("temperature", 0, 2));
  set_if(out.top_p, fields.number("top_p", 0, 1));
  if (out.top_p == 0)
    net::fail_param(fields.full_name("top_p"), fields.full_name("top_p") + ": wanted a number above 0 and at most 1, found 0");
  set_if(out.top_k, fields.integer("top_k", -1, std::numeric_limits<std::int32_t>::max()));
  set_if(out.min_p, fields.number("min_p", 0, 1));
  set_if(out.repetition_penalty, fields.number("repetition_penalty", 1e-6, 1e6));
  set_if(out.presence_penalty, fields.number("presence_penalty", -2, 2));
  set_if(out.frequency_penalty, fields.number("frequency_penalty", -2, 2));
  if (const auto seed = fields.integer("seed", std::numeric_limits<std::int64_t>::min(), kAnyInt))
    out.seed = static_cast<std::uint64_t>(*seed);
  const std::int64_t max_len = context.backend->max_model_len();
  set_if(out.min_tokens, fields.integer("min_tokens", 0, max_len));
  if (auto stops = fields.strings("stop", kMaxStopStrings)) out.stop = std::move(*stops);
  std::erase(out.stop, std::string());
  std::size_t num_stop_bytes = 0;
  for (const std::string& stop : out.stop) num_stop_bytes += stop.size();
  if (num_stop_bytes > kMaxStopBytes)
    net::fail_param(fields.full_name("stop"), fmt::format("{}: the strings have {} bytes together, at most {} are allowed",
                                                          fields.full_name("stop"), num_stop_bytes, kMaxStopBytes));
  if (auto ids = fields.token_ids("stop_token_ids", context.backend->vocab_size())) out.stop_token_ids = std::move(*ids);
  set_if(out.ignore_eos, fields.boolean("ignore_eos"));
  set_if(out.include_stop_str_in_output, fields.boolean("include_stop_str_in_output"));
  set_if(out.skip_special_tokens, fields.boolean("skip_special_tokens"));
  set_if(out.n, fields.integer("n", 1, context.options.max_n));
  if (const auto k = fields.integer("prompt_logprobs", 0, context.options.max_logprobs))
    out.prompt_logprobs = static_cast<std::int32_t>(*k);
  out.logprob_token_ids = read_logprob_token_ids(fields, context.backend->vocab_size());
  out.logit_bias = read_logit_bias(fields, context.backend->vocab_size());
  out.bad_sequences = read_bad_words(fields, context);
  if (auto ids = fields.token_ids("allowed_token_ids", context.backend->vocab_size())) {
    if (ids->empty()) net::fail_param(fields.full_name("allowed_token_ids"), fields.full_name("allowed_token_ids") + ": the list is empty");
    out.allowed_token_ids = std::move(*ids);
  }
  return out;
}

}  // namespace prl::server
