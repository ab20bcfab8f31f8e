#include <boost/json/serialize.hpp>

#include <algorithm>
#include <optional>

#include "server/message_stream.hpp"
#include "server/reply_format.hpp"
#include "server/reply_parts.hpp"
#include "server/responses_request.hpp"
#include "text/json_python.hpp"

namespace prl::server {
namespace {

namespace json = boost::json;

/// One entry of `output`.
struct OutputItem {
  enum class Kind { kReasoning, kMessage, kCall };
  Kind kind = Kind::kMessage;
  std::string id;
  std::string text;           ///< reasoning, message, or the arguments of a call
  std::string call_id, name;  ///< of a call
  bool is_done = false;
};

std::string_view status_of(const OutputItem& item, bool is_cut) {
  return !item.is_done ? "in_progress" : is_cut ? "incomplete" : "completed";
}

/// /v1/responses: items and, in streams, the typed events of the OpenAI Responses API.
class ResponsesFormat final : public ReplyFormat {
 public:
  explicit ResponsesFormat(const Generation& generation) : stream_(generation.context(), generation.request()) {}

  std::string whole(const Generation& generation) override {
    const Choice& choice = generation.choices().front();
    Message message = read_message(generation, choice);
    if (!message.reasoning.empty()) add(generation, OutputItem::Kind::kReasoning).text = std::move(message.reasoning);
    if (!message.content.empty() || (message.calls.empty() && items_.empty()))
      add(generation, OutputItem::Kind::kMessage).text = std::move(message.content);
    for (const json::value& call : message.calls) {
      OutputItem& item = add(generation, OutputItem::Kind::kCall);
      item.call_id = std::string(call.at("id").as_string());
      item.name = std::string(call.at("function").at("name").as_string());
      item.text = std::string(call.at("function").at("arguments").as_string());
    }
    for (OutputItem& item : items_) item.is_done = true;
    remember(generation);
    JsonWriter out;
    write_response(out, generation, choice);
    return out.take();
  }

  std::vector<std::string> begin(const Generation& generation) override {
    std::vector<std::string> events;
    for (const char* type : {"response.created", "response.in_progress"}) {
      JsonWriter out = event(type);
      out.key("response");
      write_response(out, generation, generation.choices().front());
      events.push_back(out.end_object().take());
    }
    return events;
  }

  std::vector<std::string> news(const Generation& generation, const ChoiceNews& news) override {
    const Choice& choice = generation.choices().front();
    MessageStream::Piece piece = stream_.push(generation, news);
    std::vector<std::string> events;
    if (!piece.reasoning.empty()) add_text(generation, events, OutputItem::Kind::kReasoning, piece.reasoning);
    if (!piece.content.empty()) add_text(generation, events, OutputItem::Kind::kMessage, piece.content);
    for (const CallDelta& delta : piece.calls) add_call(generation, events, delta);
    if (!news.is_finished) return events;
    if (items_.empty()) open(generation, events, OutputItem::Kind::kMessage);
    close(generation, events, choice.finish_reason == wire::FinishReason::kLength);
    remember(generation);
    JsonWriter out = event(is_cut(choice) ? "response.incomplete" : "response.completed");
    out.key("response");
    write_response(out, generation, choice);
    events.push_back(out.end_object().take());
    return events;
  }

  std::string usage(const Generation&) override { return {}; }
  bool ends_with_done() const override { return false; }
  /// The event's type also as the name of the event.
  std::string frame(const std::string& data) const override {
    constexpr std::string_view kHead = "{\"type\":\"";
    const std::size_t end = data.find('"', kHead.size());
    return fmt::format("event: {}\ndata: {}\n\n", std::string_view(data).substr(kHead.size(), end - kHead.size()), data);
  }
  std::string error(const net::HttpResponse& response) override {
    const json::value body = text::parse_json(response.body);
    const json::string& message = body.at("error").at("message").as_string();
    JsonWriter out = event("error");
    out.key("code").string(std::to_string(response.status)).key("message").string({message.data(), message.size()}).key("param").null();
    return out.end_object().take();
  }

 private:
  static bool is_cut(const Choice& choice) { return choice.is_finished && choice.finish_reason == wire::FinishReason::kLength; }

  JsonWriter event(std::string_view type) {
    JsonWriter out;
    out.begin_object().key("type").string(type).key("sequence_number").integer(num_events_++);
    return out;
  }

  OutputItem& add(const Generation& generation, OutputItem::Kind kind) {
    constexpr std::string_view kPrefixes[] = {"rs_", "msg_", "fc_"};
    OutputItem item;
    item.kind = kind;
    // Ids of items follow from the response's, so that they are as unique.
    item.id = fmt::format("{}{}_{}", kPrefixes[static_cast<int>(kind)], generation.request().id.substr(5), items_.size());
    return items_.emplace_back(std::move(item));
  }

  /// Members that say where an event belongs.
  void write_place(JsonWriter& out, bool has_part) const {
    out.key("item_id").string(items_.back().id).key("output_index").integer(static_cast<std::int64_t>(items_.size()) - 1);
    if (has_part) out.key("content_index").integer(0);
  }

  void open(const Generation& generation, std::vector<std::string>& events, OutputItem::Kind kind, const CallDelta* call = nullptr) {
    if (!items_.empty()) close(generation, events, false);
    OutputItem& item = add(generation, kind);
    if (call) {
      item.call_id = call->id;
      item.name = call->name;
    }
    JsonWriter added = event("response.output_item.added");
    added.key("output_index").integer(static_cast<std::int64_t>(items_.size()) - 1).key("item");
    write_item(added, generation, item, false);
    events.push_back(added.end_object().take());
    if (kind == OutputItem::Kind::kCall) return;
    JsonWriter part = event("response.content_part.added");
    write_place(part, true);
    part.key("part");
    write_part(part, generation, item, false);
    events.push_back(part.end_object().take());
  }

  void add_text(const Generation& generation, std::vector<std::string>& events, OutputItem::Kind kind, const std::string& text) {
    if (items_.empty() || items_.back().kind != kind || items_.back().is_done) open(generation, events, kind);
    items_.back().text += text;
    const bool is_message = kind == OutputItem::Kind::kMessage;
    JsonWriter out = event(is_message ? "response.output_text.delta" : "response.reasoning_text.delta");
    write_place(out, true);
    out.key("delta").string(text);
    if (is_message) out.key("logprobs").begin_array().end_array();
    events.push_back(out.end_object().take());
  }

  void add_call(const Generation& generation, std::vector<std::string>& events, const CallDelta& delta) {
    if (!delta.id.empty()) open(generation, events, OutputItem::Kind::kCall, &delta);
    if (delta.arguments.empty()) return;
    items_.back().text += delta.arguments;
    JsonWriter out = event("response.function_call_arguments.delta");
    write_place(out, false);
    out.key("delta").string(delta.arguments);
    events.push_back(out.end_object().take());
  }

  /// Ends the newest item, if it is open.
  void close(const Generation& generation, std::vector<std::string>& events, bool was_cut) {
    OutputItem& item = items_.back();
    if (item.is_done) return;
    item.is_done = true;
    if (item.kind == OutputItem::Kind::kCall) {
      JsonWriter out = event("response.function_call_arguments.done");
      write_place(out, false);
      out.key("name").string(item.name).key("arguments").string(item.text);
      events.push_back(out.end_object().take());
    } else {
      const bool is_message = item.kind == OutputItem::Kind::kMessage;
      JsonWriter text = event(is_message ? "response.output_text.done" : "response.reasoning_text.done");
      write_place(text, true);
      text.key("text").string(item.text);
      if (is_message) text.key("logprobs").begin_array().end_array();
      events.push_back(text.end_object().take());
      JsonWriter part = event("response.content_part.done");
      write_place(part, true);
      part.key("part");
      write_part(part, generation, item, true);
      events.push_back(part.end_object().take());
    }
    JsonWriter out = event("response.output_item.done");
    out.key("output_index").integer(static_cast<std::int64_t>(items_.size()) - 1).key("item");
    write_item(out, generation, item, was_cut);
    events.push_back(out.end_object().take());
  }

  static void write_part(JsonWriter& out, const Generation& generation, const OutputItem& item, bool with_logprobs) {
    const bool is_message = item.kind == OutputItem::Kind::kMessage;
    out.begin_object().key("type").string(is_message ? "output_text" : "reasoning_text").key("text").string(item.text);
    if (is_message) {
      out.key("annotations").begin_array().end_array().key("logprobs");
      if (with_logprobs && generation.request().want_logprobs)
        write_logprob_list(out, generation, generation.choices().front());
      else
        out.begin_array().end_array();
    }
    out.end_object();
  }

  static void write_item(JsonWriter& out, const Generation& generation, const OutputItem& item, bool was_cut) {
    out.begin_object().key("id").string(item.id);
    if (item.kind == OutputItem::Kind::kCall) {
      out.key("type").string("function_call").key("status").string(status_of(item, was_cut)).key("call_id").string(item.call_id);
      out.key("name").string(item.name).key("arguments").string(item.text);
    } else {
      const bool is_message = item.kind == OutputItem::Kind::kMessage;
      out.key("type").string(is_message ? "message" : "reasoning").key("status").string(status_of(item, was_cut));
      if (is_message)
        out.key("role").string("assistant");
      else
        out.key("summary").begin_array().end_array().key("encrypted_content").null();
      out.key("content").begin_array();
      if (item.is_done) write_part(out, generation, item, true);
      out.end_array();
    }
    out.end_object();
  }

  /// Tokens up to the closing tag of the think block.
  std::int64_t num_reasoning_tokens(const Generation& generation, const Choice& choice) const {
    if (items_.empty() || items_.front().kind != OutputItem::Kind::kReasoning) return 0;
    const auto close = generation.context().tokenizer->encode("</think>", {.begins_text = false});
    const auto found = std::search(choice.token_ids.begin(), choice.token_ids.end(), close.begin(), close.end());
    const auto end = found == choice.token_ids.end() ? found : found + static_cast<std::ptrdiff_t>(close.size());
    return end - choice.token_ids.begin();
  }

  void write_response(JsonWriter& out, const Generation& generation, const Choice& choice) const {
    const PreparedRequest& request = generation.request();
    out.begin_object().key("id").string(request.id).key("object").string("response").key("created_at").integer(generation.created());
    out.key("status").string(!choice.is_finished ? "in_progress" : is_cut(choice) ? "incomplete" : "completed").key("error").null();
    out.key("incomplete_details");
    if (is_cut(choice))
      out.begin_object().key("reason").string("max_output_tokens").end_object();
    else
      out.null();
    out.key("model").string(request.model).key("output").begin_array();
    for (std::size_t i = 0; i < items_.size(); ++i) write_item(out, generation, items_[i], is_cut(choice) && i + 1 == items_.size());
    out.end_array();
    for (const auto& [key, value] : request.responses->echo) out.key({key.data(), key.size()}).raw(text::to_json_text(value));
    out.key("usage");
    if (!choice.is_finished) {
      out.null();
    } else {
      const std::int64_t num_prompt = request.num_prompt_tokens(), num_output = generation.num_output_tokens();
      out.begin_object().key("input_tokens").integer(num_prompt);
      out.key("input_tokens_details").begin_object().key("cached_tokens").integer(generation.num_cached_tokens()).end_object();
      out.key("output_tokens").integer(num_output).key("output_tokens_details").begin_object();
      out.key("reasoning_tokens").integer(num_reasoning_tokens(generation, choice)).end_object();
      out.key("total_tokens").integer(num_prompt + num_output).end_object();
      write_policy_version(out, choice);
    }
    out.end_object();
  }

  /// Keeps the conversation for previous_response_id.
  void remember(const Generation& generation) const {
    const PreparedRequest& request = generation.request();
    if (!request.responses->is_stored) return;
    json::object reply{{"role", "assistant"}, {"content", nullptr}};
    json::array calls;
    for (const OutputItem& item : items_) {
      if (item.kind == OutputItem::Kind::kReasoning) reply["reasoning_content"] = item.text;
      if (item.kind == OutputItem::Kind::kMessage) reply["content"] = item.text;
      if (item.kind == OutputItem::Kind::kCall)
        calls.push_back(json::object{
            {"id", item.call_id}, {"type", "function"}, {"function", json::object{{"name", item.name}, {"arguments", item.text}}}});
    }
    if (!calls.empty()) reply["tool_calls"] = std::move(calls);
    json::array messages = request.responses->messages;
    messages.push_back(std::move(reply));
    generation.context().responses->put(request.id, messages);
  }

  MessageStream stream_;
  std::vector<OutputItem> items_;
  std::int64_t num_events_ = 0;
};

}  // namespace

std::unique_ptr<ReplyFormat> make_responses_format(const Generation& generation) { return std::make_unique<ResponsesFormat>(generation); }

}  // namespace prl::server
