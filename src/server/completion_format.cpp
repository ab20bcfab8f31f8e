#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/reply_format.hpp"
#include "server/reply_parts.hpp"
#include "text/utf8.hpp"

namespace prl::server {
namespace {

/// /v1/completions.
class CompletionFormat final : public ReplyFormat {
 public:
  explicit CompletionFormat(const Generation& generation) : text_offsets_(generation.choices().size(), 0) {}

  std::string whole(const Generation& generation) override {
    JsonWriter out;
    out.begin_object();
    write_envelope(out, generation, "text_completion");
    out.key("choices").begin_array();
    for (std::size_t i = 0; i < generation.choices().size(); ++i) {
      const Choice& choice = generation.choices()[i];
      write_choice(out, generation, i, echo_text(generation, choice) + choice.text, 0, true, true);
    }
    out.end_array();
    write_usage(out, generation);
    write_policy_version(out, generation);
    return out.end_object().take();
  }

  std::vector<std::string> begin(const Generation& generation) override {
    if (!generation.request().echo) return {};
    std::vector<std::string> events;
    for (std::size_t i = 0; i < generation.choices().size(); ++i)
      events.push_back(
          chunk(generation, i, echo_text(generation, generation.choices()[i]), generation.choices()[i].token_ids.size(), i == 0));
    return events;
  }

  std::vector<std::string> news(const Generation& generation, const ChoiceNews& news) override {
    const PreparedRequest& request = generation.request();
    const bool has_tokens = generation.choices()[news.choice_idx].token_ids.size() > news.token_begin;
    const bool must_tell_tokens = has_tokens && (request.want_logprobs || request.return_token_ids);
    if (news.text.empty() && !must_tell_tokens && !news.is_finished) return {};
    return {chunk(generation, news.choice_idx, news.text, news.token_begin, news.token_begin == 0 && !request.echo)};
  }

  std::string usage(const Generation& generation) override {
    JsonWriter out;
    out.begin_object();
    write_envelope(out, generation, "text_completion");
    out.key("choices").begin_array().end_array();
    write_usage(out, generation);
    write_policy_version(out, generation);
    return out.end_object().take();
  }

 private:
  static std::string echo_text(const Generation& generation, const Choice& choice) {
    if (!generation.request().echo) return {};
    return generation.context().tokenizer->decode(generation.request().prompts[choice.prompt_idx], true);
  }

  std::string chunk(const Generation& generation, std::size_t i, const std::string& text, std::size_t token_begin, bool with_prompt_ids) {
    JsonWriter out;
    out.begin_object();
    write_envelope(out, generation, "text_completion");
    out.key("choices").begin_array();
    write_choice(out, generation, i, text, token_begin, with_prompt_ids, false);
    out.end_array();
    if (generation.request().continuous_usage) write_usage(out, generation);
    if (generation.choices()[i].is_finished) write_policy_version(out, generation.choices()[i]);
    return out.end_object().take();
  }

  void write_choice(JsonWriter& out, const Generation& generation, std::size_t i, const std::string& text, std::size_t token_begin,
                    bool with_prompt_ids, bool is_whole) {
    const PreparedRequest& request = generation.request();
    const Choice& choice = generation.choices()[i];
    out.begin_object();
    out.key("index").integer(static_cast<std::int64_t>(i));
    out.key("text").string(text);
    out.key("logprobs");
    if (request.want_logprobs && (request.echo || token_begin < choice.token_ids.size()))
      write_logprobs(out, generation, i, token_begin);
    else
      out.null();
    write_finish_reason(out, choice, false);
    write_stop_reason(out, generation, choice);
    if (is_whole) {
      out.key("prompt_logprobs");
      write_prompt_logprobs(out, generation, choice);
    }
    if (request.return_token_ids) {
      if (with_prompt_ids) {
        out.key("prompt_token_ids");
        write_ids(out, request.prompts[choice.prompt_idx]);
      }
      out.key("token_ids");
      write_ids(out, std::span(choice.token_ids).subspan(token_begin));
    }
    out.end_object();
  }

  /// One token as the lists show it.
  struct Entry {
    std::int32_t id = 0;
    std::optional<float> logprob;  ///< none: the first token of a prompt
    std::span<const wire::TopLogprob> top;
  };

  /// Entries of the prompt, for echo. The engine scores a prompt once, with its first choice.
  static void append_prompt(std::vector<Entry>& entries, const Generation& generation, std::size_t prompt_idx) {
    const auto n = static_cast<std::size_t>(generation.request().sampling.n);
    const Choice& scored = generation.choices()[prompt_idx * n];
    const auto& prompt = generation.request().prompts[prompt_idx];
    for (std::size_t t = 0; t < prompt.size() && t < scored.prompt_logprobs.size(); ++t) {
      Entry& entry = entries.emplace_back(Entry{prompt[t], {}, {}});
      if (t > 0) entry.logprob = scored.prompt_logprobs[t];
      if (t >= scored.prompt_top_logprobs.size()) continue;
      const std::span<const wire::TopLogprob> top = scored.prompt_top_logprobs[t];
      entry.top = top.first(std::min(top.size(), static_cast<std::size_t>(generation.request().num_top_logprobs)));
    }
  }

  /// The legacy shape: parallel lists.
  void write_logprobs(JsonWriter& out, const Generation& generation, std::size_t i, std::size_t begin) {
    const Choice& choice = generation.choices()[i];
    std::vector<Entry> entries;
    if (generation.request().echo) append_prompt(entries, generation, choice.prompt_idx);
    for (std::size_t t = begin; t < choice.token_ids.size(); ++t)
      entries.push_back(
          {choice.token_ids[t], choice.logprobs[t],
           std::span(choice.top_logprobs[t]).first(std::min(choice.top_logprobs[t].size(), generation.request().num_listed_logprobs()))});
    out.begin_object();
    out.key("text_offset").begin_array();
    for (const Entry& entry : entries) {
      out.integer(static_cast<std::int64_t>(text_offsets_[i]));
      text_offsets_[i] += text::count_code_points(token_text(generation, entry.id));
    }
    out.end_array().key("token_logprobs").begin_array();
    for (const Entry& entry : entries) {
      if (entry.logprob)
        out.number(*entry.logprob);
      else
        out.null();
    }
    out.end_array().key("tokens").begin_array();
    for (const Entry& entry : entries) out.string(token_text(generation, entry.id));
    out.end_array().key("top_logprobs").begin_array();
    for (const Entry& entry : entries) write_top(out, generation, entry);
    out.end_array().end_object();
  }

  static void write_top(JsonWriter& out, const Generation& generation, const Entry& entry) {
    if (!entry.logprob) {
      out.null();
      return;
    }
    // Two ids may spell alike; the first, more likely one is kept. The token itself is always told, as OpenAI does.
    std::set<std::string> told;
    out.begin_object();
    const auto write_one = [&](std::int32_t id, float logprob) {
      std::string spelling = token_text(generation, id);
      if (told.insert(spelling).second) out.key(spelling).number(logprob);
    };
    for (const wire::TopLogprob& other : entry.top) write_one(other.id, other.logprob);
    write_one(entry.id, *entry.logprob);
    out.end_object();
  }

  std::vector<std::size_t> text_offsets_;  // per choice, in code points
};

}  // namespace

std::unique_ptr<ReplyFormat> make_completion_format(const Generation& generation) { return std::make_unique<CompletionFormat>(generation); }

}  // namespace prl::server
