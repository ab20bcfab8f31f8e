#include "text/renderers/chatml_base.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::text::renderers {

namespace json = boost::json;

ChatMlBase::ChatMlBase(std::string name, std::shared_ptr<const Tokenizer> tokenizer, ThinkingRetention retention, ParseOptions parse)
    : name_(std::move(name)),
      tokenizer_(std::move(tokenizer)),
      retention_(retention),
      parse_(std::move(parse)),
      im_start_(require_token(*tokenizer_, "<|im_start|>", name_)),
      im_end_(require_token(*tokenizer_, "<|im_end|>", name_)) {
  stops_.push_back(im_end_);
  if (const auto end = tokenizer_->id_of("<|endoftext|>")) stops_.push_back(*end);
  std::sort(stops_.begin(), stops_.end());
  parse_.stop_ids = stops_;
}

void ChatMlBase::close_turn_with(TokenBuilder& out, int message, bool is_sampled) const {
  out.special(im_end_, message, is_sampled);
  out.scaffold("\n", message);
}

void ChatMlBase::turn(TokenBuilder& out, std::string_view role, std::initializer_list<Segment> body, int message) const {
  open_turn(out, message);
  const std::string header = std::string(role) + "\n";
  std::vector<Segment> segments{{header, false}};
  segments.insert(segments.end(), body.begin(), body.end());
  switch (segments.size()) {
    case 2: out.text({segments[0], segments[1]}, message); break;
    case 3: out.text({segments[0], segments[1], segments[2]}, message); break;
    default: PRL_CHECK(false, "a turn has one or two segments, not {}", body.size());
  }
  close_turn_with(out, message);
}

void ChatMlBase::tool_result(TokenBuilder& out, const MessageView& message, bool opens_group, bool closes_group) const {
  const int index = static_cast<int>(message.index());
  if (opens_group) {
    open_turn(out, index);
    out.scaffold("user", index);
  }
  const std::string content = message.content();
  out.text({{"\n<tool_response>\n", false}, {content, true}, {"\n</tool_response>", false}}, index);
  if (closes_group) close_turn_with(out, index);
}

void ChatMlBase::message_turn(TokenBuilder& out, const json::array& messages, std::size_t i, std::size_t last_query) const {
  const MessageView message(messages, i);
  const int index = static_cast<int>(i);
  if (message.is("assistant")) {
    open_turn(out, index);
    out.scaffold("assistant\n", index);
    const std::string body = assistant_body(message, messages, last_query);
    out.text({{body, true}}, index, true);
    close_turn_with(out, index, true);
  } else if (message.is("tool")) {
    const bool opens = i == 0 || !MessageView(messages, i - 1).is("tool");
    const bool closes = i + 1 == messages.size() || !MessageView(messages, i + 1).is("tool");
    tool_result(out, message, opens, closes);
  } else if (message.is("user") || message.is("system")) {
    const std::string content = message.content();
    turn(out, message.role(), {{content, true}}, index);
  } else {
    message.refuse(fmt::format("role '{}' is not one of system, user, assistant, tool", message.role()));
  }
}

void ChatMlBase::generation_prompt(TokenBuilder& out) const {
  open_turn(out, -1);
  out.scaffold("assistant\n", -1);
  out.scaffold(generation_prefix(), -1);
}

RenderedConversation ChatMlBase::render(const json::array& messages, const json::array& tools, bool add_generation_prompt) const {
  if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: at least one is needed");
  TokenBuilder out(*tokenizer_);
  const bool used_first = begin(out, messages, tools);
  std::size_t last_query = messages.size() - 1;
  for (std::size_t i = messages.size(); i-- > 0;) {
    if (!is_user_query(MessageView(messages, i))) continue;
    last_query = i;
    break;
  }
  for (std::size_t i = used_first ? 1 : 0; i < messages.size(); ++i) message_turn(out, messages, i, last_query);
  if (add_generation_prompt) generation_prompt(out);
  return out.take();
}

std::optional<RenderedConversation> ChatMlBase::bridge_to_next_turn(std::span<const std::int32_t> prev_prompt_ids,
                                                                    std::span<const std::int32_t> prev_completion_ids,
                                                                    const json::array& new_messages, const json::array&) const {
  if (prev_prompt_ids.empty() || new_messages.empty() || retention_ == ThinkingRetention::kTemplate) return std::nullopt;
  for (std::size_t i = 0; i < new_messages.size(); ++i) {
    const MessageView message(new_messages, i);
    if (!message.is("user") && !message.is("system") && !message.is("tool")) return std::nullopt;
    if (retention_ == ThinkingRetention::kToolCycle && is_user_query(message)) return std::nullopt;
  }
  std::vector<std::int32_t> completion(prev_completion_ids.begin(), prev_completion_ids.end());
  if (parse_.reads_thinking && ends_in_reasoning(*tokenizer_, completion, prev_prompt_ids, stops_)) {
    const bool was_cut = std::none_of(completion.begin(), completion.end(),
                                      [&](std::int32_t id) { return std::find(stops_.begin(), stops_.end(), id) != stops_.end(); });
    // The model ended its turn inside a thought: no template writes that.
    if (!was_cut) return std::nullopt;
    for (std::int32_t id : tokenizer_->encode("</think>", {.allow_special = false, .begins_text = false})) completion.push_back(id);
  }
  auto ids = close_turn(prev_prompt_ids, completion, stops_, im_end_);
  if (!ids) return std::nullopt;
  TokenBuilder out(*tokenizer_);
  out.scaffold("\n", -1);
  for (std::size_t i = 0; i < new_messages.size(); ++i) message_turn(out, new_messages, i, 0);
  generation_prompt(out);
  return behind(std::move(*ids), out.take());
}

ParsedResponse ChatMlBase::parse_response(std::span<const std::int32_t> completion_ids, const json::array& tools,
                                          std::span<const std::int32_t> prompt_ids) const {
  return parse_tagged(*tokenizer_, completion_ids, prompt_ids, tools, parse_);
}

std::string hermes_tools(const json::array& tools) {
  std::string out =
      "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within "
      "<tools></tools> XML tags:\n<tools>";
  for (const json::value& tool : tools) out += "\n" + dump_python(tool);
  return out +
         "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
         "tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";
}

std::string hermes_calls(const MessageView& message, bool follows_text) {
  std::string out;
  for (const CallView& call : message.tool_calls()) {
    if (follows_text) out += "\n";
    follows_text = true;
    out += "<tool_call>\n{\"name\": \"" + call.name + "\", \"arguments\": " + call.arguments_text() + "}\n</tool_call>";
  }
  return out;
}

bool thinking_is_enabled(const RendererOptions& options) {
  const json::value* flag = options.template_kwargs.if_contains("enable_thinking");
  return flag == nullptr || !flag->is_bool() || flag->get_bool();
}

}  // namespace prl::text::renderers
