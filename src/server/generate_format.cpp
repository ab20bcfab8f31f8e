#include "base/base64.hpp"
#include "server/reply_format.hpp"
#include "server/reply_parts.hpp"

namespace prl::server {
namespace {

/// /inference/v1/generate: tokens in, tokens out. Text does not appear.
class GenerateFormat final : public ReplyFormat {
 public:
  std::string whole(const Generation& generation) override {
    JsonWriter out;
    out.begin_object();
    out.key("request_id").string(generation.request().id);
    out.key("model").string(generation.request().model);
    out.key("choices").begin_array();
    for (std::size_t i = 0; i < generation.choices().size(); ++i) write_choice(out, generation, i, 0);
    out.end_array();
    out.key("prompt_logprobs");
    write_prompt_logprobs(out, generation, generation.choices().front());
    if (generation.request().return_token_ids) {
      out.key("prompt_token_ids");
      write_ids(out, generation.request().prompts.front());
    }
    write_usage(out, generation);
    write_policy_version(out, generation);
    return out.end_object().take();
  }

  std::vector<std::string> begin(const Generation&) override { return {}; }

  std::vector<std::string> news(const Generation& generation, const ChoiceNews& news) override {
    if (generation.choices()[news.choice_idx].token_ids.size() == news.token_begin && !news.is_finished) return {};
    JsonWriter out;
    out.begin_object();
    out.key("request_id").string(generation.request().id);
    out.key("choices").begin_array();
    write_choice(out, generation, news.choice_idx, news.token_begin);
    out.end_array();
    if (news.is_finished) write_policy_version(out, generation.choices()[news.choice_idx]);
    return {out.end_object().take()};
  }

  std::string usage(const Generation& generation) override {
    JsonWriter out;
    out.begin_object();
    out.key("request_id").string(generation.request().id);
    out.key("choices").begin_array().end_array();
    write_usage(out, generation);
    write_policy_version(out, generation);
    return out.end_object().take();
  }

 private:
  static void write_choice(JsonWriter& out, const Generation& generation, std::size_t i, std::size_t token_begin) {
    const Choice& choice = generation.choices()[i];
    out.begin_object();
    out.key("index").integer(static_cast<std::int64_t>(i));
    out.key("token_ids");
    write_ids(out, std::span(choice.token_ids).subspan(token_begin));
    out.key("logprobs");
    write_chat_logprobs(out, generation, choice, token_begin, choice.token_ids.size(), {.token_id = true, .bytes = false});
    write_finish_reason(out, choice, false);
    write_stop_reason(out, generation, choice);
    out.key("policy_versions").begin_array();
    for (std::size_t t = token_begin; t < choice.versions.size(); ++t) out.integer(choice.versions[t]);
    out.end_array();
    if (const wire::RoutedExperts& experts = choice.routed_experts; !experts.empty()) {
      const wire::ExpertBytes bytes = wire::encode(experts);
      // Clients look for these bytes, in this order.
      out.key("routed_experts").begin_object().key("data").string(to_base64(bytes.data));
      out.key("shape").begin_array();
      for (const std::int64_t size : {experts.num_tokens(), experts.num_layers, experts.top_k}) out.integer(size);
      out.end_array().key("start").integer(experts.start).key("dtype").string(bytes.dtype).end_object();
    }
    out.end_object();
  }
};

}  // namespace

std::unique_ptr<ReplyFormat> make_generate_format(const Generation&) { return std::make_unique<GenerateFormat>(); }

}  // namespace prl::server
