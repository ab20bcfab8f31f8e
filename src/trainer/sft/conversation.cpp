#include "trainer/sft/conversation.hpp"

#include <fmt/format.h>
#include <boost/json.hpp>

#include "base/error.hpp"
#include "text/chat_template.hpp"
#include "text/json_python.hpp"
#include "vision/prompt.hpp"

namespace prl::trainer {

namespace json = boost::json;

namespace {

/// Deepest nesting of a row; tool schemas are a dozen levels at most.
constexpr std::size_t kMaxDepth = 128;

json::value parse(std::string_view json, std::string_view what) {
  try {
    return text::parse_json(json, kMaxDepth, text::LargeNumbers::kKeepText);
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidArgument, "{} is no JSON: {}", what, error.what());
  }
}

const json::value* non_null(const json::object& row, const char* key) {
  const json::value* value = row.if_contains(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

/// A list of messages, one message, or a text in the given role.
void append_messages(json::array& messages, const json::value& value, const char* key, const char* role) {
  if (text::is_text(value)) {
    messages.push_back(json::object{{"role", role}, {"content", value.get_string()}});
  } else if (value.is_object()) {
    messages.push_back(value);
  } else if (value.is_array()) {
    for (const json::value& message : value.get_array()) messages.push_back(message);
  } else {
    fail(ErrorCode::kInvalidArgument, "key '{}' is {}: wanted a list of messages, a message or a text", key,
         json::to_string(value.kind()).data());
  }
}

json::array list_or_text(const json::value& value, const char* key) {
  const json::value parsed = text::is_text(value) ? parse(std::string_view(value.get_string()), key) : value;
  if (!parsed.is_array())
    fail(ErrorCode::kInvalidArgument, "key '{}' is {}: wanted a list of tools", key, json::to_string(parsed.kind()).data());
  return parsed.get_array();
}

json::array tools_of(const json::object& row) {
  if (const json::value* tools = non_null(row, "tools")) return list_or_text(*tools, "tools");
  const json::value* defs = non_null(row, "tool_defs");
  if (defs == nullptr) return {};
  json::array tools;
  for (const json::value& def : list_or_text(*defs, "tool_defs")) {
    if (!def.is_object() || non_null(def.get_object(), "name") == nullptr)
      fail(ErrorCode::kInvalidArgument, "key 'tool_defs' holds an entry without a name");
    json::object function;
    for (const char* member : {"name", "description", "parameters", "strict"})
      if (const json::value* value = non_null(def.get_object(), member)) function[member] = *value;
    tools.push_back(json::object{{"type", "function"}, {"function", std::move(function)}});
  }
  return tools;
}

RowImage image_of(const json::value& value, const char* key) {
  if (text::is_text(value)) {
    std::string text(value.get_string());
    const bool is_uri = text.starts_with("data:") || text.find("://") != std::string::npos;
    return {is_uri ? RowImage::Kind::kUri : RowImage::Kind::kPath, std::move(text)};
  }
  if (const json::object* object = value.if_object()) {
    if (const json::value* url = non_null(*object, "url")) return image_of(*url, key);
    if (const json::value* bytes = non_null(*object, "bytes"); bytes != nullptr && text::is_text(*bytes))
      return {RowImage::Kind::kBytes, std::string(bytes->get_string())};
    if (const json::value* path = non_null(*object, "path"); path != nullptr && text::is_text(*path))
      return {RowImage::Kind::kPath, std::string(path->get_string())};
  }
  fail(ErrorCode::kInvalidArgument, "key '{}' has a picture that is no data: URI, no path and no object with bytes or path", key);
}

std::vector<RowImage> column_images(const json::object& row) {
  std::vector<RowImage> out;
  if (const json::value* images = non_null(row, "images")) {
    if (!images->is_array())
      fail(ErrorCode::kInvalidArgument, "key 'images' is {}: wanted a list of pictures", json::to_string(images->kind()).data());
    for (const json::value& image : images->get_array()) out.push_back(image_of(image, "images"));
  } else if (const json::value* image = non_null(row, "image")) {
    out.push_back(image_of(*image, "image"));
  }
  return out;
}

/// Puts the images at the head of the first message of the user, as TRL does for messages of text.
void prepend_parts(json::array& messages, std::size_t count) {
  for (json::value& message : messages) {
    json::object* object = message.if_object();
    const json::value* role = object != nullptr ? object->if_contains("role") : nullptr;
    if (role == nullptr || *role != "user") continue;
    json::array parts(count, json::object{{"type", "image"}});
    json::value& content = (*object)["content"];
    if (content.is_array())
      parts.insert(parts.end(), content.get_array().begin(), content.get_array().end());
    else if (text::is_text(content))
      parts.push_back(json::object{{"type", "text"}, {"text", content.get_string()}});
    content = std::move(parts);
    return;
  }
  fail(ErrorCode::kInvalidArgument, "the row has {} images and no message of the user to put them in", count);
}

std::vector<RowImage> images_of(const json::object& row, json::array& messages) {
  std::vector<RowImage> column = column_images(row), out;
  std::size_t num_parts = 0, used = 0;
  vision::for_each_image(messages, [&](const json::object&, const std::string&) { ++num_parts; });
  if (num_parts == 0 && !column.empty()) prepend_parts(messages, column.size());
  vision::for_each_image(messages, [&](const json::object& part, const std::string&) {
    const json::value* own = non_null(part, "image_url");
    if (own == nullptr) own = non_null(part, "image");
    if (own != nullptr) {
      out.push_back(image_of(*own, "messages"));
    } else if (used < column.size()) {
      out.push_back(std::move(column[used++]));
    } else {
      fail(ErrorCode::kInvalidArgument, "the messages have more image parts than key 'images' has pictures, {}", column.size());
    }
  });
  if (used != column.size())
    fail(ErrorCode::kInvalidArgument, "key 'images' has {} pictures, and {} image parts of the messages take one", column.size(), used);
  return out;
}

}  // namespace

Conversation parse_conversation(std::string_view json_line) {
  const json::value root = parse(json_line, "the row");
  if (!root.is_object())
    fail(ErrorCode::kInvalidArgument, "the row is {}: wanted an object with 'messages', or 'prompt' and 'completion'",
         json::to_string(root.kind()).data());
  const json::object& row = root.get_object();
  json::array messages;
  std::size_t num_prompt_messages = 0;
  if (const json::value* given = non_null(row, "messages")) {
    // Formats without lists hold them as JSON text.
    const bool is_text = text::is_text(*given) && given->get_string().starts_with('[');
    const json::value list = is_text ? parse(std::string_view(given->get_string()), "messages") : *given;
    append_messages(messages, list, "messages", "user");
  } else {
    const json::value *prompt = non_null(row, "prompt"), *completion = non_null(row, "completion");
    if (prompt == nullptr || completion == nullptr) {
      std::string keys;
      for (const auto& member : row)
        keys += fmt::format("{}{}{}", keys.empty() ? "" : ", ", std::string_view(member.key()), member.value().is_null() ? " (null)" : "");
      fail(ErrorCode::kInvalidArgument, "the row has the keys [{}]: wanted 'messages', or 'prompt' and 'completion'", keys);
    }
    append_messages(messages, *prompt, "prompt", "user");
    num_prompt_messages = messages.size();
    append_messages(messages, *completion, "completion", "assistant");
  }
  if (messages.empty()) fail(ErrorCode::kInvalidArgument, "the row has no messages");
  Conversation conversation;
  conversation.images = images_of(row, messages);
  conversation.messages = text::normalize_messages(messages, /*keeps_images=*/true);
  conversation.num_prompt_messages = num_prompt_messages;
  conversation.tools = tools_of(row);
  if (const json::value* kwargs = non_null(row, "chat_template_kwargs")) {
    const json::value parsed = text::is_text(*kwargs) ? parse(std::string_view(kwargs->get_string()), "chat_template_kwargs") : *kwargs;
    if (!parsed.is_object()) fail(ErrorCode::kInvalidArgument, "key 'chat_template_kwargs' must be an object");
    conversation.template_kwargs = parsed.get_object();
  }
  return conversation;
}

}  // namespace prl::trainer
