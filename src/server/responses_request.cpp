#include "server/responses_request.hpp"

#include <boost/json/serialize.hpp>

#include <string>
#include <string_view>
#include <utility>

#include "net/http_message.hpp"
#include "server/json_fields.hpp"

namespace prl::server {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxItems = 10'000;

std::string to_text(const json::string& text) { return {text.data(), text.size()}; }

/// Text of a content list; `place` is used in errors.
std::string text_of_parts(const json::value& content, const std::string& place) {
  if (content.is_string()) return to_text(content.get_string());
  if (!content.is_array())
    net::fail_param("input", place + ": wanted text or a list of parts, found " + json::serialize(content).substr(0, 60));
  std::string out;
  const json::array& parts = content.get_array();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string name = fmt::format("{}[{}]", place, i);
    const json::object* part = parts[i].if_object();
    if (!part) net::fail_param("input", name + ": wanted an object");
    const JsonFields fields(*part, name + ".");
    const std::string type = fields.string("type").value_or("");
    if (type == "refusal") {
      out += fields.string("refusal").value_or("");
    } else if (type == "input_text" || type == "output_text" || type == "text" || type == "reasoning_text" || type == "summary_text") {
      out += fields.string("text").value_or("");
    } else {
      net::fail_param("input", fmt::format("{}: parts of type '{}' are not built; this server reads text", name, type));
    }
  }
  return out;
}

/// Items to messages. Reasoning and calls belong to one assistant message with the text beside them.
class MessageBuilder {
 public:
  explicit MessageBuilder(json::array messages) : messages_(std::move(messages)) {}

  void add_item(const json::value& item, std::size_t index) {
    const std::string place = fmt::format("input[{}]", index);
    const json::object* object = item.if_object();
    if (!object) net::fail_param("input", place + ": wanted an object");
    const JsonFields fields(*object, place + ".");
    const std::string type = fields.string("type").value_or("message");
    if (type == "message") {
      add_message(fields, place);
    } else if (type == "reasoning") {
      const json::value* content = fields.find("content");
      if (!content) content = fields.find("summary");
      if (content) assistant()["reasoning_content"] = text_of_parts(*content, place + ".content");
    } else if (type == "function_call") {
      add_call(fields);
    } else if (type == "function_call_output") {
      is_open_ = false;
      const json::value* output = fields.find("output");
      messages_.push_back(json::object{{"role", "tool"},
                                       {"tool_call_id", fields.string("call_id").value_or("")},
                                       {"content", output ? text_of_parts(*output, place + ".output") : ""}});
    } else {
      net::fail_param("input", fmt::format("{}: items of type '{}' are not built", place, type));
    }
  }
  void add_text(std::string_view role, const std::string& text) {
    is_open_ = false;
    messages_.push_back(json::object{{"role", json::string(role)}, {"content", text}});
  }
  json::array take() { return std::move(messages_); }

 private:
  void add_message(const JsonFields& fields, const std::string& place) {
    const std::string role = fields.string("role").value_or("user");
    const json::value* content = fields.find("content");
    const std::string text = content ? text_of_parts(*content, place + ".content") : "";
    if (role == "assistant") {
      json::object& message = assistant();
      const bool has_text = message.contains("content") && message.at("content").is_string();
      if (has_text || message.contains("tool_calls")) {
        is_open_ = false;
        assistant()["content"] = text;
      } else {
        message["content"] = text;
      }
    } else if (role == "user" || role == "system" || role == "developer") {
      add_text(role == "developer" ? "system" : role, text);
    } else {
      net::fail_param("input", fmt::format("{}.role: wanted user, assistant, system or developer, found '{}'", place, role));
    }
  }
  void add_call(const JsonFields& fields) {
    json::object& message = assistant();
    json::array& calls = message.contains("tool_calls") ? message.at("tool_calls").as_array() : message["tool_calls"].emplace_array();
    calls.push_back(json::object{{"id", fields.string("call_id").value_or("")},
                                 {"type", "function"},
                                 {"function", json::object{{"name", fields.string("name").value_or("")},
                                                           {"arguments", fields.string("arguments").value_or("{}")}}}});
  }
  /// The assistant message that is being put together.
  json::object& assistant() {
    if (!is_open_) messages_.push_back(json::object{{"role", "assistant"}, {"content", nullptr}});
    is_open_ = true;
    return messages_.back().as_object();
  }

  json::array messages_;
  bool is_open_ = false;
};

json::array tools_of(const json::array& tools) {
  json::array out;
  for (std::size_t i = 0; i < tools.size(); ++i) {
    const json::object* tool = tools[i].if_object();
    const std::string place = fmt::format("tools[{}]", i);
    if (!tool) net::fail_param("tools", place + ": wanted an object");
    const std::string type = JsonFields(*tool, place + ".").string("type").value_or("");
    if (type != "function") net::fail_param("tools", fmt::format("{}: tools of type '{}' are not built; offer functions", place, type));
    json::object function;
    for (const auto& [key, value] : *tool)
      if (key != "type" && !value.is_null()) function[key] = value;
    out.push_back(json::object{{"type", "function"}, {"function", std::move(function)}});
  }
  return out;
}

json::value tool_choice_of(const json::value& choice) {
  const json::object* object = choice.if_object();
  if (!object) return choice;
  const JsonFields fields(*object, "tool_choice.");
  const std::string type = fields.string("type").value_or("");
  if (type != "function") net::fail_param("tool_choice", fmt::format("tool_choice: type '{}' is not built; name a function", type));
  return json::object{{"type", "function"}, {"function", json::object{{"name", fields.string("name").value_or("")}}}};
}

/// text.format as response_format.
json::value format_of(const json::object& format) {
  const JsonFields fields(format, "text.format.");
  const std::string type = fields.string("type").value_or("text");
  if (type != "json_schema") return json::object{{"type", json::string(type)}};
  json::object wrapper;
  for (const auto& [key, value] : format)
    if (key != "type") wrapper[key] = value;
  return json::object{{"type", "json_schema"}, {"json_schema", std::move(wrapper)}};
}

json::array history_of(const ServerContext& context, const JsonFields& fields) {
  const auto id = fields.string("previous_response_id");
  if (!id) return {};
  auto messages = context.responses->get(*id);
  if (!messages)
    throw net::HttpError(404, ErrorCode::kNotFound,
                         fmt::format("previous_response_id: no response '{}' is kept; responses are kept in memory, with a bound, unless "
                                     "store is false; send the items of the conversation as input",
                                     id->substr(0, 100)),
                         "previous_response_id");
  return std::move(*messages);
}

}  // namespace

json::object chat_body_of(const ServerContext& context, const json::object& body, ResponsesRequest& out) {
  const JsonFields fields(body);
  MessageBuilder builder(history_of(context, fields));
  const json::value* input = fields.find("input");
  if (!input) net::fail_param("input", "input: wanted text or a list of items, found nothing");
  if (input->is_string()) {
    builder.add_text("user", to_text(input->get_string()));
  } else if (input->is_array() && !input->get_array().empty() && input->get_array().size() <= kMaxItems) {
    for (std::size_t i = 0; i < input->get_array().size(); ++i) builder.add_item(input->get_array()[i], i);
  } else {
    fields.fail_type("input", fmt::format("text or a list of 1 to {} items", kMaxItems), *input);
  }
  out.messages = builder.take();
  json::object chat;
  for (const char* name : {"model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "parallel_tool_calls",
                           "stream", "chat_template_kwargs", "cache_salt", "priority", "request_id", "kv_transfer_params"})
    if (const json::value* value = fields.find(name)) chat[name] = *value;
  const auto instructions = fields.string("instructions");
  json::array messages;
  if (instructions) messages.push_back(json::object{{"role", "system"}, {"content", *instructions}});
  messages.insert(messages.end(), out.messages.begin(), out.messages.end());
  chat["messages"] = std::move(messages);
  if (const auto limit = fields.integer("max_output_tokens", 1, std::numeric_limits<std::int64_t>::max())) chat["max_tokens"] = *limit;
  if (const json::array* tools = fields.array("tools"); tools && !tools->empty()) chat["tools"] = tools_of(*tools);
  if (const json::value* choice = fields.find("tool_choice"); choice && chat.contains("tools"))
    chat["tool_choice"] = tool_choice_of(*choice);
  const json::object* text = fields.object("text");
  const json::object* format = text ? JsonFields(*text, "text.").object("format") : nullptr;
  if (format) chat["response_format"] = format_of(*format);
  const json::object* reasoning = fields.object("reasoning");
  if (reasoning)
    if (const auto effort = JsonFields(*reasoning, "reasoning.").string("effort")) chat["reasoning_effort"] = *effort;
  if (fields.string("truncation").value_or("disabled") != "disabled")
    net::fail_param("truncation", "truncation: only disabled is built; shorten the input");
  const auto included = fields.strings("include", 32).value_or(std::vector<std::string>{});
  for (const std::string& name : included) out.want_logprobs = out.want_logprobs || name == "message.output_text.logprobs";
  if (out.want_logprobs) {
    chat["logprobs"] = true;
    if (const json::value* top = fields.find("top_logprobs")) chat["top_logprobs"] = *top;
  }
  out.is_stored = fields.boolean("store").value_or(true);

  const auto echo = [&](const char* name, json::value otherwise) {
    const json::value* value = fields.find(name);
    out.echo[name] = value ? *value : std::move(otherwise);
  };
  echo("instructions", nullptr);
  echo("metadata", json::object());
  echo("parallel_tool_calls", true);
  echo("temperature", context.options.sampling_defaults.temperature.value_or(1.0));
  echo("top_p", context.options.sampling_defaults.top_p.value_or(1.0));
  echo("tool_choice", "auto");
  echo("tools", json::array());
  echo("max_output_tokens", nullptr);
  echo("previous_response_id", nullptr);
  out.echo["reasoning"] = reasoning ? json::value(*reasoning) : json::value(json::object{{"effort", nullptr}, {"summary", nullptr}});
  out.echo["store"] = out.is_stored;
  out.echo["text"] = json::object{{"format", format ? json::value(*format) : json::value(json::object{{"type", "text"}})}};
  out.echo["truncation"] = "disabled";
  echo("user", nullptr);
  out.echo["background"] = false;
  return chat;
}

}  // namespace prl::server
