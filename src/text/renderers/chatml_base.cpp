#include "text/renderers/chatml_base.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::text::renderers {

namespace json = boost::json;

namespace {

ParseOptions with_stops(ParseOptions parse, const Tokenizer& tokenizer, std::string_view name) {
  parse.stop_ids = {require_token(tokenizer, "<|im_end|>", name)};
  if (const auto end = tokenizer.id_of("<|endoftext|>")) parse.stop_ids.push_back(*end);
  std::sort(parse.stop_ids.begin(), parse.stop_ids.end());
  return parse;
}

}  // namespace

ChatMlBase::ChatMlBase(std::string name, std::shared_ptr<const Tokenizer> tokenizer, ThinkingRetention retention, ParseOptions parse)
    : FamilyRenderer(name, tokenizer, retention, with_stops(std::move(parse), *tokenizer, name),
                     require_token(*tokenizer, "<|im_end|>", name)),
      im_start_(control("<|im_start|>")),
      im_end_(control("<|im_end|>")) {}

void ChatMlBase::close_turn_with(TokenBuilder& out, int message, bool is_sampled) const {
  out.special(im_end_, message, is_sampled);
  out.scaffold("\n", message);
}

void ChatMlBase::turn(TokenBuilder& out, std::string_view role, std::initializer_list<Segment> body, int message) const {
  open_turn(out, message);
  const std::string header = std::string(role) + "\n";
  std::vector<Segment> segments{{header, false}};
  segments.insert(segments.end(), body.begin(), body.end());
  out.text(std::span<const Segment>(segments), message);
  close_turn_with(out, message);
}

void ChatMlBase::content(TokenBuilder& out, std::string_view before, const MessageView& message, std::string_view after) const {
  const std::string text = message.is("tool") ? tool_text(message) : plain_text(message);
  out.text({{before, false}, {text, true}, {after, false}}, static_cast<int>(message.index()));
}

void ChatMlBase::tool_result(TokenBuilder& out, const MessageView& message, bool opens_group, bool closes_group) const {
  const int index = static_cast<int>(message.index());
  if (opens_group) {
    open_turn(out, index);
    out.scaffold("user", index);
  }
  content(out, "\n<tool_response>\n", message, "\n</tool_response>");
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
    open_turn(out, index);
    content(out, std::string(message.role()) + "\n", message, "");
    close_turn_with(out, index);
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
  TokenBuilder out = builder();
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

void ChatMlBase::continue_conversation(TokenBuilder& out, const json::array& new_messages, std::int32_t) const {
  out.scaffold("\n", -1);
  for (std::size_t i = 0; i < new_messages.size(); ++i) message_turn(out, new_messages, i, 0);
  generation_prompt(out);
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

std::string_view xml_call_instructions() noexcept {
  return "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
         "<tool_call>\n<function=example_function_name>\n"
         "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
         "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n"
         "</function>\n</tool_call>\n\n"
         "<IMPORTANT>\nReminder:\n"
         "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
         "<tool_call></tool_call> XML tags\n"
         "- Required parameters MUST be specified\n"
         "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after\n"
         "- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user "
         "about function calls\n"
         "</IMPORTANT>";
}

std::string xml_call(const CallView& call, ArgumentSpelling spelling) {
  std::string text = "<tool_call>\n<function=" + call.name + ">\n";
  const json::value arguments = call.arguments_object();
  if (const json::object* object = arguments.if_object())
    for (const auto& argument : *object)
      text += "<parameter=" + std::string(argument.key().data(), argument.key().size()) + ">\n" +
              (spelling == ArgumentSpelling::kJson ? json_unless_text(argument.value()) : python_text(argument.value())) +
              "\n</parameter>\n";
  return text + "</function>\n</tool_call>";
}

}  // namespace prl::text::renderers
