#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/message_view.hpp"
#include "text/renderers/tool_calls.hpp"

// Calls that write each argument by itself, as text: what a value is, the tool's schema decides.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

std::string_view text_of(const json::string& text) { return {text.data(), text.size()}; }

const json::object* function_named(const json::array& tools, std::string_view name) {
  for (const json::value& item : tools) {
    const json::object* function = tool_function(item);
    const json::value* own = function != nullptr ? function->if_contains("name") : nullptr;
    if (own != nullptr && own->is_string() && text_of(own->get_string()) == name) return function;
  }
  return nullptr;
}

const json::object* parameter_schema(const json::object* function, std::string_view parameter) {
  const json::value* parameters = function != nullptr ? function->if_contains("parameters") : nullptr;
  const json::value* properties =
      parameters != nullptr && parameters->is_object() ? parameters->get_object().if_contains("properties") : nullptr;
  const json::value* schema = properties != nullptr && properties->is_object()
                                  ? properties->get_object().if_contains({parameter.data(), parameter.size()})
                                  : nullptr;
  return schema != nullptr ? schema->if_object() : nullptr;
}

bool names_string(const json::value* type) {
  if (type == nullptr) return false;
  if (type->is_array() && type->get_array().size() == 1) type = &type->get_array()[0];
  return type->is_string() && type->get_string() == "string";
}

// A declared string stays as written; everything else is JSON if it reads as JSON, which `is_json` tells. False: it should have been JSON
// and was not.
bool coerce(std::string_view text, const json::object* schema, json::value& out, bool& is_json) {
  is_json = false;
  const json::string_view raw(text.data(), text.size());
  bool string_is_allowed = false;
  if (schema != nullptr) {
    if (names_string(schema->if_contains("type"))) return out = raw, true;
    for (const char* key : {"anyOf", "oneOf"})
      if (const json::value* branches = schema->if_contains(key); branches != nullptr && branches->is_array())
        for (const json::value& branch : branches->get_array())
          string_is_allowed |= branch.is_object() && names_string(branch.get_object().if_contains("type"));
  }
  try {
    out = parse_json(replace_lone_surrogates(text));
    is_json = true;
    return true;
  } catch (const Error&) {
    out = raw;
    return string_is_allowed;
  }
}

// Collects the arguments of one call as values and as JSON text.
class Arguments {
 public:
  Arguments(const json::array& tools, std::string_view function) : function_(function_named(tools, function)) {}

  void add(const std::string& key, const std::string& text) {
    json::value value;
    bool is_json = false;
    if (!coerce(text, parameter_schema(function_, key), value, is_json)) has_fallback_ = true;
    std::erase_if(texts_, [&](const auto& entry) { return entry.first == key; });
    texts_.emplace_back(key, is_json ? text : dump_python(value));
    values_[key] = std::move(value);
  }
  /// Puts them into the call.
  void finish(ParsedToolCall& call) {
    if (has_fallback_) call.status = ToolCallStatus::kInvalidJson;
    call.arguments = std::move(values_);
    call.arguments_text = "{";
    for (const auto& [key, text] : texts_) {
      if (call.arguments_text.size() > 1) call.arguments_text += ", ";
      append_json_string(call.arguments_text, key, false);
      call.arguments_text += ": " + text;
    }
    call.arguments_text += "}";
  }

 private:
  const json::object* function_;
  json::object values_;
  std::vector<std::pair<std::string, std::string>> texts_;  // by key, as JSON
  bool has_fallback_ = false;
};

struct Element {
  std::string_view name, body;
};

// The next <TAG name="NAME">BODY</TAG> at `at` or later, which moves behind it; the opening is given up to the quote.
std::optional<Element> next_element(std::string_view text, std::size_t& at, std::string_view opening, std::string_view closing) {
  for (std::size_t begin = text.find(opening, at); begin != kNowhere; begin = text.find(opening, begin + 1)) {
    const std::size_t name = begin + opening.size();
    const std::size_t quote = text.find('"', name);
    if (quote == kNowhere || quote == name || !text.substr(quote).starts_with("\">")) continue;
    const std::size_t body = quote + 2;
    const std::size_t end = text.find(closing, body);
    if (end == kNowhere) return std::nullopt;
    at = end + closing.size();
    return Element{text.substr(name, quote - name), text.substr(body, end - body)};
  }
  return std::nullopt;
}

}  // namespace

ParsedToolCall read_xml_call(const TokenText& text, std::size_t begin, std::size_t end, const json::array& tools) {
  ParsedToolCall call;
  call.raw = text.text(begin, end);
  const std::string& block = call.raw;
  constexpr std::string_view kFunction = "<function=", kParameter = "<parameter=", kParameterEnd = "</parameter>";
  const std::size_t function = block.find(kFunction);
  const std::size_t function_end = function == kNowhere ? kNowhere : block.find('>', function);
  if (function_end == kNowhere || function_end == function + kFunction.size()) {
    call.status = ToolCallStatus::kMalformed;
    return call;
  }
  call.name = block.substr(function + kFunction.size(), function_end - function - kFunction.size());
  Arguments arguments(tools, call.name);
  for (std::size_t at = 0; (at = block.find(kParameter, at)) != kNowhere;) {
    const std::size_t key_end = block.find('>', at);
    const std::size_t value_end = key_end == kNowhere ? kNowhere : block.find(kParameterEnd, key_end);
    if (value_end == kNowhere) break;
    const std::string key = block.substr(at + kParameter.size(), key_end - at - kParameter.size());
    arguments.add(key, strip(std::string_view(block).substr(key_end + 1, value_end - key_end - 1)));
    at = value_end + kParameterEnd.size();
  }
  arguments.finish(call);
  return call;
}

ParsedToolCall read_glm_call(const TokenText& text, std::size_t begin, std::size_t end, const json::array& tools) {
  constexpr std::string_view kKey = "<arg_key>", kKeyEnd = "</arg_key>", kValue = "<arg_value>", kValueEnd = "</arg_value>";
  ParsedToolCall call;
  call.raw = text.text(begin, end);
  std::size_t key = text.find(kKey, begin, end);
  call.name = strip(text.text(begin, std::min(key, end)));
  Arguments arguments(tools, call.name);
  bool is_broken = false;
  while (key != kNowhere && !is_broken) {
    const std::size_t key_begin = key + kKey.size();
    const std::size_t key_end = text.find(kKeyEnd, key_begin, end);
    const std::size_t value = key_end == kNowhere ? kNowhere : text.find(kValue, key_end + kKeyEnd.size(), end);
    const std::size_t value_end = value == kNowhere ? kNowhere : text.find(kValueEnd, value + kValue.size(), end);
    is_broken = value_end == kNowhere;
    if (is_broken) break;
    arguments.add(strip(text.text(key_begin, key_end)), strip(text.text(value + kValue.size(), value_end)));
    key = text.find(kKey, value_end + kValueEnd.size(), end);
  }
  arguments.finish(call);
  if (call.name.empty())
    call.status = ToolCallStatus::kMissingName;
  else if (!tools.empty() && function_named(tools, call.name) == nullptr)
    call.status = ToolCallStatus::kUnknownTool;
  else if (is_broken)
    call.status = ToolCallStatus::kMalformed;
  return call;
}

std::vector<ParsedToolCall> read_minimax_calls(const TokenText& text, std::size_t begin, std::size_t end, const json::array& tools) {
  // Every call of a block has all of it as its raw text, but in large blocks those behind the first have their own part only: a model
  // that repeats itself may make thousands of calls.
  constexpr std::size_t kMaxSharedRaw = 4096;
  const std::string block = text.text(begin, end);
  std::vector<ParsedToolCall> calls;
  std::size_t at = 0;
  while (const auto invoke = next_element(block, at, "<invoke name=\"", "</invoke>")) {
    ParsedToolCall call;
    call.raw = calls.empty() || block.size() <= kMaxSharedRaw ? block : std::string(invoke->body);
    call.name = std::string(invoke->name);
    Arguments arguments(tools, call.name);
    std::size_t place = 0;
    while (const auto parameter = next_element(invoke->body, place, "<parameter name=\"", "</parameter>"))
      arguments.add(std::string(parameter->name), strip(parameter->body));
    arguments.finish(call);
    calls.push_back(std::move(call));
  }
  if (calls.empty()) {
    calls.emplace_back();
    calls.back().raw = block;
    calls.back().status = ToolCallStatus::kMalformed;
  }
  return calls;
}

}  // namespace prl::text::renderers
