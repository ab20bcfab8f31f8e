#include <boost/json/serialize.hpp>

#include "server/message_stream.hpp"
#include "server/reply_format.hpp"
#include "server/reply_parts.hpp"

namespace prl::server {
namespace {

/// /v1/chat/completions and /v1/chat/completions/tokens.
class ChatFormat final : public ReplyFormat {
 public:
  explicit ChatFormat(const Generation& generation)
      : streams_(generation.choices().size(), MessageStream(generation.context(), generation.request())) {}

  std::string whole(const Generation& generation) override {
    const PreparedRequest& request = generation.request();
    JsonWriter out;
    out.begin_object();
    write_envelope(out, generation, "chat.completion");
    out.key("choices").begin_array();
    for (std::size_t i = 0; i < generation.choices().size(); ++i) {
      const Choice& choice = generation.choices()[i];
      out.begin_object().key("index").integer(static_cast<std::int64_t>(i));
      const bool has_calls = write_message(out, generation, choice);
      out.key("logprobs");
      if (request.want_logprobs)
        write_chat_logprobs(out, generation, choice, 0, choice.token_ids.size(), {.token_id = request.tokens_as_ids, .bytes = true});
      else
        out.null();
      write_finish_reason(out, choice, has_calls);
      write_stop_reason(out, generation, choice);
      if (request.return_token_ids) {
        out.key("token_ids");
        write_ids(out, choice.token_ids);
      }
      out.end_object();
    }
    out.end_array();
    write_usage(out, generation);
    out.key("prompt_logprobs");
    write_prompt_logprobs(out, generation, generation.choices().front());
    if (request.return_token_ids) {
      out.key("prompt_token_ids");
      write_ids(out, request.prompts.front());
    }
    write_policy_version(out, generation);
    out.end_object();
    return out.take();
  }

  std::vector<std::string> begin(const Generation& generation) override {
    std::vector<std::string> events;
    for (std::size_t i = 0; i < generation.choices().size(); ++i) {
      JsonWriter out;
      out.begin_object();
      write_envelope(out, generation, "chat.completion.chunk");
      out.key("choices").begin_array().begin_object().key("index").integer(static_cast<std::int64_t>(i));
      out.key("delta").begin_object().key("role").string("assistant").key("content").string(generation.request().echoed_text);
      out.end_object();
      out.key("logprobs").null().key("finish_reason").null().end_object().end_array();
      if (i == 0 && generation.request().return_token_ids) {
        out.key("prompt_token_ids");
        write_ids(out, generation.request().prompts.front());
      }
      if (generation.request().continuous_usage) write_usage(out, generation);
      events.push_back(out.end_object().take());
    }
    return events;
  }

  std::vector<std::string> news(const Generation& generation, const ChoiceNews& news) override {
    const PreparedRequest& request = generation.request();
    const Choice& choice = generation.choices()[news.choice_idx];
    MessageStream& stream = streams_[news.choice_idx];
    const MessageStream::Piece piece = stream.push(generation, news);
    const bool has_tokens = choice.token_ids.size() > news.token_begin;
    const bool must_tell_tokens = has_tokens && (request.want_logprobs || request.return_token_ids);
    if (piece.content.empty() && piece.reasoning.empty() && piece.calls.empty() && !must_tell_tokens && !news.is_finished) return {};

    JsonWriter out;
    out.begin_object();
    write_envelope(out, generation, "chat.completion.chunk");
    out.key("choices").begin_array().begin_object().key("index").integer(static_cast<std::int64_t>(news.choice_idx));
    out.key("delta").begin_object();
    if (!piece.reasoning.empty()) out.key("reasoning_content").string(piece.reasoning).key("reasoning").string(piece.reasoning);
    if (!piece.content.empty() || (piece.reasoning.empty() && !news.is_finished)) out.key("content").string(piece.content);
    if (!piece.calls.empty()) write_call_deltas(out, piece.calls);
    out.end_object();
    out.key("logprobs");
    if (request.want_logprobs && has_tokens)
      write_chat_logprobs(out, generation, choice, news.token_begin, choice.token_ids.size(),
                          {.token_id = request.tokens_as_ids, .bytes = true});
    else
      out.null();
    write_finish_reason(out, choice, stream.has_calls());
    if (news.is_finished) write_stop_reason(out, generation, choice);
    if (request.return_token_ids) {
      out.key("token_ids");
      write_ids(out, std::span(choice.token_ids).subspan(news.token_begin));
    }
    out.end_object().end_array();
    if (request.continuous_usage) write_usage(out, generation);
    if (news.is_finished) write_policy_version(out, choice);
    return {out.end_object().take()};
  }

  std::string usage(const Generation& generation) override {
    JsonWriter out;
    out.begin_object();
    write_envelope(out, generation, "chat.completion.chunk");
    out.key("choices").begin_array().end_array();
    write_usage(out, generation);
    write_policy_version(out, generation);
    return out.end_object().take();
  }

 private:
  static void write_call_deltas(JsonWriter& out, const std::vector<CallDelta>& deltas) {
    out.key("tool_calls").begin_array();
    for (const CallDelta& delta : deltas) {
      out.begin_object().key("index").integer(static_cast<std::int64_t>(delta.index));
      if (!delta.id.empty()) out.key("id").string(delta.id).key("type").string("function");
      out.key("function").begin_object();
      if (!delta.id.empty()) out.key("name").string(delta.name);
      out.key("arguments").string(delta.arguments).end_object().end_object();
    }
    out.end_array();
  }

  /// The "message" member; true if it holds tool calls.
  static bool write_message(JsonWriter& out, const Generation& generation, const Choice& choice) {
    const Message message = read_message(generation, choice);
    out.key("message").begin_object().key("role").string("assistant");
    out.key("content");
    if (message.content.empty() && (!message.calls.empty() || !message.reasoning.empty()))
      out.null();
    else
      out.string(message.content);
    if (!message.reasoning.empty()) out.key("reasoning_content").string(message.reasoning).key("reasoning").string(message.reasoning);
    out.key("tool_calls").raw(boost::json::serialize(message.calls));
    out.end_object();
    return !message.calls.empty();
  }

  std::vector<MessageStream> streams_;  // one per choice
};

}  // namespace

std::unique_ptr<ReplyFormat> make_chat_format(const Generation& generation) { return std::make_unique<ChatFormat>(generation); }

}  // namespace prl::server
