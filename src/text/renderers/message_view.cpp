#include "text/renderers/message_view.hpp"

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::text::renderers {
namespace {

namespace json = boost::json;

std::string to_std(const json::string& text) { return {text.data(), text.size()}; }
std::string_view to_view(const json::string& text) noexcept { return {text.data(), text.size()}; }

}  // namespace

std::string CallView::arguments_text() const {
  if (arguments == nullptr) return "{}";
  return is_text(*arguments) ? to_std(arguments->get_string()) : dump_python(*arguments);
}

json::value CallView::arguments_object() const {
  constexpr std::size_t kMaxDepth = 200;
  if (arguments == nullptr) return nullptr;
  if (!is_text(*arguments)) return arguments->is_object() ? *arguments : json::value();
  try {
    json::value read = parse_json(to_view(arguments->get_string()), kMaxDepth, LargeNumbers::kKeepText);
    return read.is_object() ? read : json::value();
  } catch (const Error&) {  // malformed arguments degrade to none
    return nullptr;
  }
}

MessageView::MessageView(const json::array& messages, std::size_t index) : object_(messages[index].if_object()), index_(index) {
  if (object_ == nullptr) fail(ErrorCode::kInvalidArgument, "messages[{}]: expected an object", index);
  const json::value* role = find("role");
  if (role == nullptr || !is_text(*role)) fail(ErrorCode::kInvalidArgument, "messages[{}].role: expected a string", index);
  role_ = to_view(role->get_string());
}

const json::value* MessageView::find(std::string_view key) const noexcept {
  const json::value* value = object_->if_contains({key.data(), key.size()});
  return value == nullptr || value->is_null() ? nullptr : value;
}

void MessageView::refuse(std::string_view why) const { fail(ErrorCode::kInvalidArgument, "messages[{}]: {}", index_, why); }

std::string MessageView::content() const {
  std::string out;
  for (const ContentPart& part : parts()) {
    if (part.is_image) refuse("content has a part that is not text; only text is supported");
    out += part.text;
  }
  return out;
}

std::vector<ContentPart> MessageView::parts() const {
  const json::value* content = find("content");
  if (content == nullptr) return {};
  if (is_text(*content)) return {{replace_invalid_utf8(to_view(content->get_string())), false}};
  if (!content->is_array()) refuse("content must be a string, null or a list of text parts");
  std::vector<ContentPart> out;
  for (const json::value& part : content->get_array()) {
    const json::object* object = part.if_object();
    const json::value* type = object != nullptr ? object->if_contains("type") : nullptr;
    if (type != nullptr && is_text(*type) && (type->get_string() == "image_url" || type->get_string() == "image")) {
      out.push_back({{}, true});
      continue;
    }
    const json::value* text = object != nullptr ? object->if_contains("text") : &part;
    if (text == nullptr || !is_text(*text)) refuse("content has a part that is not text; only text is supported");
    if (out.empty() || out.back().is_image) out.push_back({});
    out.back().text += to_view(text->get_string());
  }
  for (ContentPart& part : out) part.text = replace_invalid_utf8(part.text);
  return out;
}

std::optional<std::string> MessageView::reasoning() const {
  for (const char* key : {"reasoning_content", "reasoning", "thinking"})
    if (const json::value* value = find(key); value != nullptr && is_text(*value)) return to_std(value->get_string());
  return std::nullopt;
}

std::vector<CallView> MessageView::tool_calls() const {
  std::vector<CallView> calls;
  const json::value* list = find("tool_calls");
  if (list == nullptr) return calls;
  if (!list->is_array()) refuse("tool_calls must be a list");
  for (const json::value& item : list->get_array()) {
    const json::object* function = tool_function(item);
    if (function == nullptr) refuse("tool_calls must hold objects with a function");
    CallView call;
    if (const json::value* id = item.get_object().if_contains("id"); id != nullptr && is_text(*id)) call.id = to_std(id->get_string());
    if (const json::value* name = function->if_contains("name"); name != nullptr && is_text(*name)) call.name = to_std(name->get_string());
    call.arguments = function->if_contains("arguments");
    if (call.arguments != nullptr && call.arguments->is_null()) call.arguments = nullptr;
    calls.push_back(std::move(call));
  }
  return calls;
}

std::string MessageView::text_member(std::string_view key) const {
  const json::value* value = find(key);
  return value != nullptr && is_text(*value) ? to_std(value->get_string()) : std::string();
}

bool is_user_query(const MessageView& message) {
  if (!message.is("user")) return false;
  std::string joined;
  for (const ContentPart& part : message.parts()) joined += part.text;
  const std::string content = strip(joined);
  return !(content.starts_with("<tool_response>") && content.ends_with("</tool_response>"));
}

const json::object* tool_function(const json::value& tool) noexcept {
  const json::object* object = tool.if_object();
  if (object == nullptr) return nullptr;
  const json::value* function = object->if_contains("function");
  return function != nullptr && function->is_object() ? &function->get_object() : object;
}

std::string python_text(const json::value& value) {
  if (const auto number = kept_number(value)) return std::string(*number);
  if (value.is_string()) return to_std(value.get_string());
  if (value.is_null()) return "None";
  if (value.is_bool()) return value.get_bool() ? "True" : "False";
  return dump_python(value);
}

std::string json_unless_text(const json::value& value) { return is_text(value) ? to_std(value.get_string()) : dump_python(value); }

std::string split_inline_reasoning(std::string& content) {
  constexpr std::string_view kOpen = "<think>", kClose = "</think>";
  const std::size_t close = content.find(kClose);
  if (close == std::string::npos) return {};
  const std::string before = content.substr(0, close);
  const std::size_t open = before.rfind(kOpen);
  content = strip_newlines(std::string_view(content).substr(close + kClose.size()), true, false);
  return std::string(strip_newlines(open == std::string::npos ? before : std::string_view(before).substr(open + kOpen.size())));
}

std::string strip(std::string_view text) {
  std::size_t begin = 0, end = text.size();
  while (begin < end) {
    std::size_t next = begin;
    if (!is_python_space(next_code_point(text, next))) break;
    begin = next;
  }
  while (end > begin) {
    std::size_t last = end - 1;
    while (last > begin && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    std::size_t next = last;
    if (!is_python_space(next_code_point(text, next))) break;
    end = last;
  }
  return std::string(text.substr(begin, end - begin));
}

std::string_view strip_newlines(std::string_view text, bool left, bool right) noexcept {
  while (left && text.starts_with('\n')) text.remove_prefix(1);
  while (right && text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

}  // namespace prl::text::renderers
