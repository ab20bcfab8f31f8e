#include "server/reply_parts.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"
#include "text/utf8.hpp"

namespace prl::server {
namespace {

void write_bytes(JsonWriter& out, const Generation& generation, std::int32_t id, LogprobMembers members) {
  if (!members.bytes) return;
  out.key("bytes");
  out.begin_array();
  for (const char byte : generation.context().tokenizer->bytes_of(id)) out.integer(static_cast<unsigned char>(byte));
  out.end_array();
}

void write_entries(JsonWriter& out, const Generation& generation, const Choice& choice, std::size_t begin, std::size_t end,
                   LogprobMembers members) {
  const std::size_t num_top = generation.request().num_listed_logprobs();
  out.begin_array();
  for (std::size_t i = begin; i < end; ++i) {
    out.begin_object();
    out.key("token").string(token_text(generation, choice.token_ids[i]));
    if (members.token_id) out.key("token_id").integer(choice.token_ids[i]);
    out.key("logprob").number(choice.logprobs[i]);
    write_bytes(out, generation, choice.token_ids[i], members);
    out.key("top_logprobs").begin_array();
    const auto& top = choice.top_logprobs[i];
    for (std::size_t k = 0; k < std::min(num_top, top.size()); ++k) {
      out.begin_object();
      out.key("token").string(token_text(generation, top[k].id));
      if (members.token_id) out.key("token_id").integer(top[k].id);
      out.key("logprob").number(top[k].logprob);
      write_bytes(out, generation, top[k].id, members);
      out.end_object();
    }
    out.end_array().end_object();
  }
  out.end_array();
}

}  // namespace

std::string token_text(const Generation& generation, std::int32_t id) {
  if (generation.request().tokens_as_ids) return fmt::format("token_id:{}", id);
  return text::replace_invalid_utf8(generation.context().tokenizer->bytes_of(id));
}

void write_envelope(JsonWriter& out, const Generation& generation, std::string_view object) {
  out.key("id").string(generation.request().id);
  out.key("object").string(object);
  out.key("created").integer(generation.created());
  out.key("model").string(generation.request().model);
}

void write_usage(JsonWriter& out, const Generation& generation) {
  const std::int64_t num_prompt = generation.request().num_prompt_tokens();
  const std::int64_t num_output = generation.num_output_tokens();
  out.key("usage").begin_object();
  out.key("prompt_tokens").integer(num_prompt);
  out.key("total_tokens").integer(num_prompt + num_output);
  out.key("completion_tokens").integer(num_output);
  if (const std::int64_t num_cached = generation.num_cached_tokens(); num_cached > 0)
    out.key("prompt_tokens_details").begin_object().key("cached_tokens").integer(num_cached).end_object();
  out.end_object();
}

void write_ids(JsonWriter& out, std::span<const std::int32_t> ids) {
  out.begin_array();
  for (const std::int32_t id : ids) out.integer(id);
  out.end_array();
}

void write_finish_reason(JsonWriter& out, const Choice& choice, bool has_tool_calls) {
  out.key("finish_reason");
  if (!choice.is_finished)
    out.null();
  else if (has_tool_calls && choice.finish_reason == wire::FinishReason::kStop)
    out.string("tool_calls");
  else
    out.string(wire::to_string(choice.finish_reason));
}

void write_stop_reason(JsonWriter& out, const Generation& generation, const Choice& choice) {
  out.key("stop_reason");
  const auto& own = generation.request().own_stop_ids;
  if (!choice.stop_string.empty())
    out.string(choice.stop_string);
  else if (choice.stop_token_id && std::find(own.begin(), own.end(), *choice.stop_token_id) != own.end())
    out.integer(*choice.stop_token_id);
  else
    out.null();
}

void write_chat_logprobs(JsonWriter& out, const Generation& generation, const Choice& choice, std::size_t begin, std::size_t end,
                         LogprobMembers members) {
  out.begin_object().key("content");
  write_entries(out, generation, choice, begin, end, members);
  out.end_object();
}

void write_logprob_list(JsonWriter& out, const Generation& generation, const Choice& choice) {
  write_entries(out, generation, choice, 0, choice.token_ids.size(), {.token_id = false, .bytes = true});
}

void write_prompt_logprobs(JsonWriter& out, const Generation& generation, const Choice& choice) {
  if (choice.prompt_logprobs.empty() || !generation.request().return_prompt_logprobs) {
    out.null();
    return;
  }
  const auto& prompt = generation.request().prompts[choice.prompt_idx];
  const auto write_entry = [&](std::int32_t id, float logprob, std::int64_t rank) {
    out.key(std::to_string(id)).begin_object();
    out.key("logprob").number(logprob);
    out.key("rank").integer(rank);
    out.key("decoded_token").string(text::replace_invalid_utf8(generation.context().tokenizer->bytes_of(id)));
    out.end_object();
  };
  out.begin_array();
  for (std::size_t i = 0; i < choice.prompt_logprobs.size() && i < prompt.size(); ++i) {
    if (i == 0) {
      out.null();
      continue;
    }
    out.begin_object();
    static const std::vector<wire::TopLogprob> kNone;
    const auto& top = i < choice.prompt_top_logprobs.size() ? choice.prompt_top_logprobs[i] : kNone;
    PRL_CHECK(i < choice.prompt_ranks.size(), "{} ranks for {} prompt tokens", choice.prompt_ranks.size(), prompt.size());
    write_entry(prompt[i], choice.prompt_logprobs[i], choice.prompt_ranks[i]);
    for (std::size_t k = 0; k < top.size(); ++k)
      if (top[k].id != prompt[i]) write_entry(top[k].id, top[k].logprob, static_cast<std::int64_t>(k + 1));
    out.end_object();
  }
  out.end_array();
}

void write_policy_version(JsonWriter& out, const Choice& choice) {
  out.key("policy_version").begin_object().key("start").integer(choice.version_start.value);
  out.key("end").integer(choice.version_end.value).end_object();
}

void write_policy_version(JsonWriter& out, const Generation& generation) {
  std::int64_t start = generation.choices().front().version_start.value;
  std::int64_t end = generation.choices().front().version_end.value;
  for (const Choice& choice : generation.choices()) {
    start = std::min(start, choice.version_start.value);
    end = std::max(end, choice.version_end.value);
  }
  out.key("policy_version").begin_object().key("start").integer(start).key("end").integer(end).end_object();
}

}  // namespace prl::server
