#include "server/request_fields.hpp"

#include <algorithm>

#include "base/ascii.hpp"
#include "config/problem.hpp"
#include "net/http_message.hpp"

namespace prl::server {
namespace {

using Fate = RequestField::Fate;

constexpr std::string_view kNoBeams = "beam search is not built; draw several choices with n";
constexpr std::string_view kNoAudio = "audio is not built; this server reads and writes text";
constexpr std::string_view kNoCode = "code of a request is never run here";
constexpr std::string_view kNoMedia = "how images are read follows from the model; audio and video are not built";
constexpr std::string_view kOldCalls = "the older form of tools; use tools and tool_choice";

/// What read_sampling, structured output and the envelope read, on every route.
constexpr RequestField kShared[] = {
    {"temperature"},
    {"top_p"},
    {"top_k"},
    {"min_p"},
    {"repetition_penalty"},
    {"presence_penalty"},
    {"frequency_penalty"},
    {"seed"},
    {"max_tokens"},
    {"min_tokens"},
    {"stop"},
    {"stop_token_ids"},
    {"ignore_eos"},
    {"include_stop_str_in_output"},
    {"skip_special_tokens"},
    {"detokenize"},
    {"n"},
    {"logprobs"},
    {"prompt_logprobs"},
    {"logit_bias"},
    {"allowed_token_ids"},
    {"bad_words"},
    {"thinking_token_budget"},
    {"response_format"},
    {"structured_outputs"},
    {"guided_json"},
    {"guided_regex"},
    {"guided_choice"},
    {"guided_grammar"},
    {"guided_json_object"},
    {"guided_structural_tag"},
    {"cache_salt"},
    {"logprob_token_ids"},
    {"use_beam_search", Fate::kRefused, kNoBeams},
    {"logits_processors", Fate::kRefused, kNoCode},
    {"repetition_detection", Fate::kRefused, "ending a text that repeats itself is not built; use repetition_penalty or a limit"},
    {"spaces_between_special_tokens", Fate::kInert},
    {"guided_decoding_backend", Fate::kInert},
    {"guided_whitespace_pattern", Fate::kRefused, "white space in structured output is fixed; write it into a regex or a grammar"},
};

constexpr RequestField kEnvelope[] = {
    {"model"},
    {"stream"},
    {"stream_options"},
    {"truncate_prompt_tokens"},
    {"priority"},
    {"request_id"},
    {"return_token_ids"},
    {"return_tokens_as_token_ids"},
    {"extra_body"},
    {"kv_transfer_params"},
    {"vllm_xargs", Fate::kRefused, kNoCode},
    {"user", Fate::kInert},
    {"metadata", Fate::kInert},
};

constexpr RequestField kChat[] = {
    {"messages"},
    {"tokens"},
    {"tools"},
    {"tool_choice"},
    {"parallel_tool_calls"},
    {"top_logprobs"},
    {"max_completion_tokens"},
    {"add_generation_prompt"},
    {"continue_final_message"},
    {"add_special_tokens"},
    {"chat_template_kwargs"},
    {"documents"},
    {"reasoning_effort"},
    {"include_reasoning"},
    {"echo"},
    {"modalities"},
    {"chat_template", Fate::kRefused, "a request may not have a template of its own"},
    {"audio", Fate::kRefused, kNoAudio},
    {"functions", Fate::kRefused, kOldCalls},
    {"function_call", Fate::kRefused, kOldCalls},
    {"web_search_options", Fate::kRefused, "searching the web is not built; offer a tool"},
    {"mm_processor_kwargs", Fate::kRefused, kNoMedia},
    {"media_io_kwargs", Fate::kRefused, kNoMedia},
    {"best_of", Fate::kRefused, "best_of is not supported in chat; use n"},
    {"store", Fate::kInert},
    {"service_tier", Fate::kInert},
    {"safety_identifier", Fate::kInert},
    {"prediction", Fate::kInert},
    {"prompt_cache_key", Fate::kInert},
    {"prompt_cache_retention", Fate::kInert},
};

constexpr RequestField kCompletion[] = {
    {"prompt"},
    {"max_completion_tokens"},
    {"echo"},
    {"best_of"},
    {"suffix"},
    {"add_special_tokens"},
    {"prompt_embeds", Fate::kRefused, "prompts as embeddings are not built; send text or token ids"},
};

constexpr RequestField kGenerate[] = {
    {"model"},    {"token_ids"},        {"sampling_params"}, {"request_id"},    {"stream"},     {"stream_options"},     {"cache_salt"},
    {"priority"}, {"return_token_ids"}, {"features"},        {"content_parts"}, {"extra_body"}, {"kv_transfer_params"},
};

/// Members of vLLM's own class that clients send along with their defaults.
constexpr RequestField kSamplingParams[] = {
    {"flat_logprobs"},
    {"output_kind", Fate::kInert},
    {"skip_clone", Fate::kInert},
    {"routed_experts_prompt_start"},
    {"truncate_prompt_tokens", Fate::kRefused, "the prompt is token ids; cut them before they are sent"},
    {"extra_args", Fate::kRefused, kNoCode},
};

constexpr RequestField kResponses[] = {
    {"model"},
    {"input"},
    {"instructions"},
    {"max_output_tokens"},
    {"temperature"},
    {"top_p"},
    {"top_k"},
    {"min_p"},
    {"repetition_penalty"},
    {"seed"},
    {"stop"},
    {"tools"},
    {"tool_choice"},
    {"parallel_tool_calls"},
    {"text"},
    {"reasoning"},
    {"stream"},
    {"store"},
    {"previous_response_id"},
    {"truncation"},
    {"top_logprobs"},
    {"include"},
    {"chat_template_kwargs"},
    {"extra_body"},
    {"cache_salt"},
    {"priority"},
    {"request_id"},
    {"kv_transfer_params"},
    {"metadata"},
    {"user", Fate::kInert},
    {"service_tier", Fate::kInert},
    {"safety_identifier", Fate::kInert},
    {"prompt_cache_key", Fate::kInert},
    {"prompt_cache_retention", Fate::kInert},
    {"stream_options", Fate::kInert},
    {"background", Fate::kRefused, "responses that are made in the background are not built"},
    {"conversation", Fate::kRefused, "conversations are not kept; send the items, or previous_response_id"},
    {"prompt", Fate::kRefused, "stored prompts are not built; send instructions and input"},
    {"max_tool_calls", Fate::kRefused, "tools that the server itself runs are not built"},
    {"context_management", Fate::kRefused, "shortening of conversations is not built; shorten the input"},
};

template <std::size_t... sizes>
std::vector<RequestField> join(const RequestField (&... lists)[sizes]) {
  std::vector<RequestField> out;
  (out.insert(out.end(), std::begin(lists), std::end(lists)), ...);
  return out;
}

/// Values that ask for nothing, as clients send for members they do not use.
bool asks_for_nothing(const boost::json::value& value) {
  if (value.is_null()) return true;
  if (value.is_bool()) return !value.get_bool();
  if (value.is_number()) return value.to_number<double>() == 0;
  if (value.is_string()) return value.get_string().empty();
  if (value.is_array()) return value.get_array().empty();
  return value.get_object().empty();
}

std::string suggestion(std::string_view name, std::span<const RequestField> fields) {
  constexpr std::size_t kMaxLength = 64;
  if (name.size() > kMaxLength) return {};
  std::vector<std::string> names;
  for (const RequestField& field : fields)
    if (field.fate != Fate::kRefused) names.emplace_back(field.name);
  const std::vector<std::string> nearest = config::nearest_names(name, names, 1);
  return nearest.empty() ? "" : fmt::format(" (did you mean {}?)", nearest.front());
}

}  // namespace

std::span<const RequestField> request_fields(BodyKind kind) {
  static const std::vector<RequestField> kOfChat = join(kShared, kEnvelope, kChat);
  static const std::vector<RequestField> kOfCompletion = join(kShared, kEnvelope, kCompletion);
  static const std::vector<RequestField> kOfSampling = join(kShared, kSamplingParams);
  switch (kind) {
    case BodyKind::kChat: return kOfChat;
    case BodyKind::kCompletion: return kOfCompletion;
    case BodyKind::kGenerate: return kGenerate;
    case BodyKind::kSamplingParams: return kOfSampling;
    case BodyKind::kResponses: return kResponses;
  }
  return {};
}

std::vector<std::string> check_members(const boost::json::object& body, BodyKind kind, bool is_strict, const std::string& prefix) {
  const std::span<const RequestField> fields = request_fields(kind);
  std::vector<std::string> ignored;
  for (const auto& [key, value] : body) {
    const std::string_view name(key.data(), key.size());
    const auto field = std::find_if(fields.begin(), fields.end(), [&](const RequestField& known) { return known.name == name; });
    const std::string full = prefix + std::string(name);
    if (field == fields.end()) {
      if (is_strict)
        net::fail_param(full, fmt::format("{}: this request has no such member{}; server.strict refuses what would be ignored", full,
                                          suggestion(name, fields)));
      ignored.push_back(full);
    } else if (field->fate == Fate::kRefused && !asks_for_nothing(value)) {
      net::fail_param(full, fmt::format("{}: {}", full, field->reason));
    }
  }
  return ignored;
}

std::string ignored_header(const std::vector<std::string>& names) {
  constexpr std::size_t kMaxNames = 20, kMaxLength = 64;
  std::string out;
  for (std::size_t i = 0; i < std::min(names.size(), kMaxNames); ++i) {
    if (i > 0) out += ", ";
    for (const char c : std::string_view(names[i]).substr(0, kMaxLength)) {
      const bool is_plain = is_ascii_alnum(c) || c == '_' || c == '-' || c == '.';
      out.push_back(is_plain ? c : '?');
    }
  }
  if (names.size() > kMaxNames) out += fmt::format(", and {} more", names.size() - kMaxNames);
  return out;
}

}  // namespace prl::server
