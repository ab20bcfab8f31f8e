#include "env/message_match.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::env {

namespace json = boost::json;

namespace {

/// The member, unless it is absent or null.
const json::value* member(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

std::string_view text_of(const json::object& object, std::string_view key) {
  const json::value* value = member(object, key);
  return value != nullptr && text::is_text(*value) ? std::string_view(value->get_string()) : std::string_view();
}

std::string_view reasoning_of(const json::object& message) {
  const std::string_view content = text_of(message, "reasoning_content");
  return content.empty() ? text_of(message, "reasoning") : content;
}

const json::array& calls_of(const json::object& message) {
  static const json::array kNone;
  const json::value* calls = member(message, "tool_calls");
  return calls != nullptr && calls->is_array() ? calls->get_array() : kNone;
}

bool is_same_content(const json::object& a, const json::object& b) {
  const json::value* x = member(a, "content");
  const json::value* y = member(b, "content");
  const auto is_text = [](const json::value* v) { return v == nullptr || text::is_text(*v); };
  if (is_text(x) && is_text(y)) return text_of(a, "content") == text_of(b, "content");
  return x != nullptr && y != nullptr && *x == *y;
}

std::optional<json::value> parsed_arguments(std::string_view text) {
  try {
    return text::parse_json(text, text::kJsonDepth, text::LargeNumbers::kKeepText);
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool is_same_arguments(std::string_view a, std::string_view b) {
  if (a == b) return true;
  const auto x = parsed_arguments(a);
  return x && x == parsed_arguments(b);
}

bool is_same_call(const json::value& a, const json::value& b) {
  const json::object* x = a.if_object();
  const json::object* y = b.if_object();
  if (x == nullptr || y == nullptr) return a == b;
  const json::value* f = member(*x, "function");
  const json::value* g = member(*y, "function");
  if (f == nullptr || g == nullptr || !f->is_object() || !g->is_object()) return a == b;
  return text_of(*x, "id") == text_of(*y, "id") && text_of(f->get_object(), "name") == text_of(g->get_object(), "name") &&
         is_same_arguments(text_of(f->get_object(), "arguments"), text_of(g->get_object(), "arguments"));
}

json::object plain_call(const json::value& call) {
  const json::object* object = call.if_object();
  const json::value* function = object != nullptr ? member(*object, "function") : nullptr;
  if (function == nullptr || !function->is_object())
    fail(ErrorCode::kInvalidArgument, "a tool call of a message: wanted {{id, type, function}}");
  json::object named;
  named["name"] = text_of(function->get_object(), "name");
  const json::value* arguments = member(function->get_object(), "arguments");
  named["arguments"] = arguments == nullptr || text::is_text(*arguments) ? json::value(text_of(function->get_object(), "arguments"))
                                                                         : json::value(text::dump_python(*arguments));
  json::object plain;
  plain["id"] = text_of(*object, "id");
  plain["type"] = "function";
  plain["function"] = std::move(named);
  return plain;
}

json::object without_nulls(const json::object& object) {
  json::object out;
  out.reserve(object.size());
  for (const auto& item : object)
    if (!item.value().is_null()) out[item.key()] = item.value();
  return out;
}

}  // namespace

bool is_same_message(const json::value& a, const json::value& b) {
  const json::object* x = a.if_object();
  const json::object* y = b.if_object();
  if (x == nullptr || y == nullptr) return a == b;
  const json::array& calls_x = calls_of(*x);
  const json::array& calls_y = calls_of(*y);
  return text_of(*x, "role") == text_of(*y, "role") && is_same_content(*x, *y) && reasoning_of(*x) == reasoning_of(*y) &&
         text_of(*x, "tool_call_id") == text_of(*y, "tool_call_id") &&
         std::equal(calls_x.begin(), calls_x.end(), calls_y.begin(), calls_y.end(), &is_same_call);
}

bool begins_with(const json::array& messages, const json::array& prefix) {
  return messages.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), messages.begin(), &is_same_message);
}

json::object plain_message(const json::object& message) {
  const std::string_view role = text_of(message, "role");
  if (role.empty()) fail(ErrorCode::kInvalidArgument, "a message: no role");
  json::object plain;
  plain.reserve(message.size());
  plain["role"] = role;
  const json::value* content = member(message, "content");
  if (content != nullptr && !text::is_text(*content) && !content->is_array())
    fail(ErrorCode::kInvalidArgument, "a message of role {}: content is neither text nor a list of parts", role);
  if (content != nullptr)
    plain["content"] = *content;
  else
    plain["content"] = "";
  if (const std::string_view reasoning = reasoning_of(message); !reasoning.empty()) plain["reasoning_content"] = reasoning;
  if (const json::array& calls = calls_of(message); !calls.empty()) {
    json::array out;
    for (const json::value& call : calls) out.push_back(plain_call(call));
    plain["tool_calls"] = std::move(out);
  }
  if (const std::string_view id = text_of(message, "tool_call_id"); !id.empty()) plain["tool_call_id"] = id;
  if (const std::string_view name = text_of(message, "name"); !name.empty()) plain["name"] = name;
  return plain;
}

json::array plain_tools(const json::array& tools) {
  json::array out;
  for (const json::value& tool : tools) {
    if (!tool.is_object()) fail(ErrorCode::kInvalidArgument, "a tool: wanted {{type, function}}");
    json::object plain = without_nulls(tool.get_object());
    if (json::value* function = plain.if_contains("function"); function != nullptr && function->is_object())
      *function = without_nulls(function->get_object());
    out.push_back(std::move(plain));
  }
  return out;
}

}  // namespace prl::env
