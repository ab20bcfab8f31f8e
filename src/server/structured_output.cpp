#include "server/structured_output.hpp"

#include <utility>
#include <vector>

#include "grammar/grammar_text.hpp"
#include "grammar/json_schema.hpp"
#include "grammar/json_text.hpp"
#include "grammar/regex.hpp"
#include "net/http_message.hpp"
#include "server/prepared_request.hpp"
#include "server/server_context.hpp"
#include "text/json_python.hpp"

namespace prl::server {
namespace {

namespace json = boost::json;
using grammar::AutomatonBuilder;
using grammar::NodeId;
using grammar::Vocabulary;

constexpr std::size_t kMaxChoices = 10'000;
StructuredOutput any_json_object(std::string param) {
  return {std::move(param), "json_object",
          [](AutomatonBuilder& builder, NodeId from, const Vocabulary&) { return grammar::JsonText(builder).emit_object(from); }};
}

StructuredOutput of_schema(std::string param, json::value schema) {
  std::string text = text::to_json_text(schema);
  if (text.size() > grammar::kMaxSchemaBytes)
    net::fail_param(param,
                    fmt::format("{}: the schema has {} bytes, at most {} are allowed", param, text.size(), grammar::kMaxSchemaBytes));
  auto shared = std::make_shared<const json::value>(std::move(schema));
  return {param, "schema " + std::move(text), [shared, param](AutomatonBuilder& builder, NodeId from, const Vocabulary&) {
            return emit_json_schema(builder, from, *shared, param);
          }};
}

/// A schema as an object, or as JSON text.
StructuredOutput of_schema_field(const JsonFields& fields, std::string_view name) {
  const json::value& schema = *fields.find(name);
  if (!text::is_text(schema)) return of_schema(fields.full_name(name), schema);
  try {
    return of_schema(fields.full_name(name), text::parse_json(*fields.string(name), text::kJsonDepth, text::LargeNumbers::kKeepText));
  } catch (const Error& error) {
    net::fail_param(fields.full_name(name), fields.full_name(name) + ": not a schema: " + error.what());
  }
}

StructuredOutput of_regex(std::string param, std::string pattern) {
  std::string key = "regex " + pattern;
  return {param, std::move(key), [pattern = std::move(pattern), param](AutomatonBuilder& builder, NodeId from, const Vocabulary&) {
            return emit_regex(builder, from, grammar::parse_regex(pattern), grammar::Spelling::kPlain, grammar::Anchoring::kFull);
          }};
}

StructuredOutput of_grammar(std::string param, std::string source) {
  std::string key = "grammar " + source;
  return {param, std::move(key), [source = std::move(source)](AutomatonBuilder& builder, NodeId from, const Vocabulary&) {
            return grammar::emit_grammar(builder, from, source);
          }};
}

StructuredOutput of_choice(const JsonFields& fields, std::string_view name) {
  const std::string param = fields.full_name(name);
  const json::array& list = *fields.array(name);
  if (list.empty() || list.size() > kMaxChoices)
    net::fail_param(param, fmt::format("{}: wanted 1 to {} strings, found {}", param, kMaxChoices, list.size()));
  std::vector<std::string> choices;
  for (const json::value& choice : list) {
    if (!text::is_text(choice) || choice.get_string().empty()) fields.fail_type(name, "strings that are not empty", choice);
    choices.emplace_back(choice.get_string().data(), choice.get_string().size());
  }
  return {param, "choice " + text::to_json_text(list),
          [choices = std::move(choices)](AutomatonBuilder& builder, NodeId from, const Vocabulary&) {
            const NodeId end = builder.add_node();
            for (const std::string& choice : choices) builder.add_empty(builder.emit_literal(from, choice), end);
            return end;
          }};
}

std::optional<StructuredOutput> of_response_format(const JsonFields& fields) {
  const json::object* format = fields.object("response_format");
  if (!format) return std::nullopt;
  const JsonFields members(*format, fields.full_name("response_format."));
  const std::string type = members.string("type").value_or("text");
  if (type == "text") return std::nullopt;
  if (type == "json_object") return any_json_object("response_format");
  if (type != "json_schema")
    net::fail_param("response_format", "response_format.type: wanted text, json_object or json_schema, found '" + type + "'");
  const json::object* wrapper = members.object("json_schema");
  if (!wrapper || !wrapper->if_contains("schema"))
    net::fail_param("response_format", "response_format.json_schema.schema: wanted a schema, found nothing");
  return of_schema_field(JsonFields(*wrapper, members.full_name("json_schema.")), "schema");
}

NodeId emit_arguments(AutomatonBuilder& builder, NodeId from, const json::object& function, std::size_t index) {
  const json::value* parameters = function.if_contains("parameters");
  const bool has_schema = parameters && !parameters->is_null();
  return has_schema ? grammar::emit_json_object_schema(builder, from, *parameters, fmt::format("tools[{}].function.parameters", index))
                    : grammar::JsonText(builder).emit_object(from);
}

/// What stands around the calls of a reply and between them.
struct CallFrame {
  std::string begin, separator, end;
  bool may_repeat = true;
};

CallFrame frame_of(CallForm form, const Vocabulary& vocabulary) {
  switch (form) {
    case CallForm::kTagged: return {"", "\n", ""};
    case CallForm::kHarmony: return {"", "", "", false};  // a reply ends with its call
    case CallForm::kKimi: return {vocabulary.marker("<|tool_calls_section_begin|>"), "", vocabulary.marker("<|tool_calls_section_end|>")};
    case CallForm::kDeepSeek:
    case CallForm::kDeepSeek31: return {vocabulary.marker("<｜tool▁calls▁begin｜>"), "\n", vocabulary.marker("<｜tool▁calls▁end｜>")};
  }
  return {};
}

/// The text before the arguments of a call.
NodeId emit_call_head(AutomatonBuilder& builder, NodeId from, CallForm form, const std::string& name, const Vocabulary& vocabulary) {
  const auto mark = [&](std::string_view text) { return vocabulary.marker(text); };
  switch (form) {
    case CallForm::kTagged: {
      std::string quoted;
      text::append_json_string(quoted, name, false);
      return builder.emit_literal(from, mark("<tool_call>") + "\n{\"name\": " + quoted + ", \"arguments\": ");
    }
    case CallForm::kHarmony:
      return builder.emit_literal(
          from, mark("<|channel|>") + "commentary to=functions." + name + " " + mark("<|constrain|>") + "json" + mark("<|message|>"));
    case CallForm::kKimi: {
      static const grammar::Regex kIndex = grammar::parse_regex("0|[1-9][0-9]{0,3}");
      const NodeId id = builder.emit_literal(from, mark("<|tool_call_begin|>") + "functions." + name + ":");
      return builder.emit_literal(emit_regex(builder, id, kIndex, grammar::Spelling::kPlain, grammar::Anchoring::kFull),
                                  mark("<|tool_call_argument_begin|>"));
    }
    case CallForm::kDeepSeek:
      return builder.emit_literal(from, mark("<｜tool▁call▁begin｜>") + "function" + mark("<｜tool▁sep｜>") + name + "\n```json\n");
    case CallForm::kDeepSeek31: return builder.emit_literal(from, mark("<｜tool▁call▁begin｜>") + name + mark("<｜tool▁sep｜>"));
  }
  return from;
}

std::string call_tail(CallForm form, const Vocabulary& vocabulary) {
  switch (form) {
    case CallForm::kTagged: return "}\n" + vocabulary.marker("</tool_call>");
    case CallForm::kHarmony: return {};
    case CallForm::kKimi: return vocabulary.marker("<|tool_call_end|>");
    case CallForm::kDeepSeek: return "\n```" + vocabulary.marker("<｜tool▁call▁end｜>");
    case CallForm::kDeepSeek31: return vocabulary.marker("<｜tool▁call▁end｜>");
  }
  return {};
}

/// Calls of the functions, one or as many as `may_repeat` says.
NodeId emit_calls(AutomatonBuilder& builder, NodeId from, CallForm form, const json::array& functions, bool may_repeat,
                  const Vocabulary& vocabulary) {
  const CallFrame frame = frame_of(form, vocabulary);
  const NodeId begin = builder.add_node(), end = builder.add_node();
  builder.add_empty(builder.emit_literal(from, frame.begin), begin);
  for (std::size_t i = 0; i < functions.size(); ++i) {
    const json::object& function = functions[i].as_object();
    NodeId node = emit_call_head(builder, begin, form, JsonFields(function).string("name").value_or(""), vocabulary);
    node = emit_arguments(builder, node, function, i);
    builder.add_empty(builder.emit_literal(node, call_tail(form, vocabulary)), end);
  }
  if (may_repeat && frame.may_repeat) builder.add_empty(builder.emit_literal(end, frame.separator), begin);
  return builder.emit_literal(end, frame.end);
}

/// Text up to the marker `end`, without other markers: a model that could write the head of a message there would leave the form.
NodeId emit_text_until(AutomatonBuilder& builder, NodeId from, const std::string& end) {
  constexpr std::uint8_t kLastUtf8Byte = 0xF4;
  const NodeId text = builder.add_node();
  builder.add_empty(from, text);
  builder.add_bytes(text, 0, kLastUtf8Byte, text);
  return builder.emit_literal(text, end);
}

/// The place of the text, or of a call, behind the analysis channel of gpt-oss, which may be left out. The prompt ends behind the role of
/// a message, or (kOpen) inside the channel.
NodeId emit_analysis(AutomatonBuilder& builder, NodeId from, Thinking thinking, bool is_call, const Vocabulary& vocabulary) {
  const auto mark = [&](std::string_view text) { return vocabulary.marker(text); };
  const NodeId header = builder.add_node();
  const NodeId open =
      thinking == Thinking::kOpen ? from : builder.emit_literal(from, mark("<|channel|>") + "analysis" + mark("<|message|>"));
  const NodeId closed = emit_text_until(builder, open, mark("<|end|>"));
  builder.add_empty(builder.emit_literal(closed, mark("<|start|>") + "assistant"), header);
  if (thinking == Thinking::kMaybe) builder.add_empty(from, header);
  return is_call ? header : builder.emit_literal(header, mark("<|channel|>") + "final" + mark("<|message|>"));
}

const json::object& function_of(const json::value& tool, std::size_t index) {
  const json::object* wrapper = tool.if_object();
  const json::value* function = wrapper ? wrapper->if_contains("function") : nullptr;
  const json::object* object = function ? function->if_object() : nullptr;
  if (!object || !JsonFields(*object).string("name"))
    net::fail_param("tools", fmt::format("tools[{}]: wanted a function with a name, found {}", index, text::to_json_text(tool)));
  return *object;
}

std::string rule_key(const StructuredOutput& output, Thinking thinking) {
  return fmt::format("{} {}", static_cast<int>(thinking), output.key);
}

}  // namespace

std::optional<StructuredOutput> read_structured_output(const JsonFields& fields) {
  std::vector<StructuredOutput> found;
  if (auto format = of_response_format(fields)) found.push_back(std::move(*format));
  const auto refuse = [](const std::string& name) {
    throw net::HttpError(501, ErrorCode::kNotImplemented, name + ": structural tags are not built; use json, regex, choice or grammar",
                         name);
  };
  const auto read = [&](const JsonFields& from, const std::string& prefix) {
    if (from.has(prefix + "json")) found.push_back(of_schema_field(from, prefix + "json"));
    if (from.boolean(prefix + "json_object").value_or(false)) found.push_back(any_json_object(from.full_name(prefix + "json_object")));
    if (auto pattern = from.string(prefix + "regex")) found.push_back(of_regex(from.full_name(prefix + "regex"), std::move(*pattern)));
    if (from.array(prefix + "choice")) found.push_back(of_choice(from, prefix + "choice"));
    if (auto source = from.string(prefix + "grammar")) found.push_back(of_grammar(from.full_name(prefix + "grammar"), std::move(*source)));
    if (from.has(prefix + "structural_tag")) refuse(from.full_name(prefix + "structural_tag"));
  };
  read(fields, "guided_");
  if (const json::object* outputs = fields.object("structured_outputs"))
    read(JsonFields(*outputs, fields.full_name("structured_outputs.")), "");
  if (found.empty()) return std::nullopt;
  if (found.size() > 1)
    net::fail_param(found[1].param, found[1].param + ": " + found[0].param + " already says what the text must look like");
  return std::move(found.front());
}

std::optional<StructuredOutput> read_tool_choice(const JsonFields& fields, const ServerContext& context, PreparedRequest& request) {
  const json::value* choice = fields.find("tool_choice");
  if (!choice) return std::nullopt;
  const std::string word = choice->is_string() ? std::string(choice->get_string().data(), choice->get_string().size()) : "";
  if (word == "none") request.parse_tools = false;
  if (word == "none" || word == "auto") return std::nullopt;
  std::string name;
  if (choice->is_object()) name = JsonFields(function_of(*choice, 0)).string("name").value_or("");
  if (word != "required" && name.empty()) fields.fail_type("tool_choice", "auto, none, required or a function", *choice);
  if (request.tools.empty()) net::fail_param("tool_choice", "tool_choice: a call is asked for, but there are no tools");
  if (!context.call_form)
    throw net::HttpError(
        501, ErrorCode::kNotImplemented,
        "tool_choice: a call can only be enforced for models whose calls have JSON arguments; start the server with such a "
        "tool parser: hermes, openai, kimi_k2, deepseek_v3, deepseek_v31",
        "tool_choice");
  json::array functions;
  for (std::size_t i = 0; i < request.tools.size(); ++i) {
    const json::object& function = function_of(request.tools[i], i);
    if (name.empty() || *JsonFields(function).string("name") == name) functions.push_back(function);
  }
  if (functions.empty()) net::fail_param("tool_choice", "tool_choice: no tool is called '" + name + "'");
  request.parse_tools = true;  // also on servers that do not look for calls unasked
  const bool may_repeat = name.empty() && fields.boolean("parallel_tool_calls").value_or(true);
  std::string key = fmt::format("calls {} {}", may_repeat, text::to_json_text(functions));
  return StructuredOutput{"tool_choice", std::move(key),
                          [form = *context.call_form, functions = std::move(functions), may_repeat](AutomatonBuilder& builder, NodeId from,
                                                                                                    const Vocabulary& vocabulary) {
                            return emit_calls(builder, from, form, functions, may_repeat, vocabulary);
                          },
                          true};
}

std::shared_ptr<const wire::TokenRule> find_token_rule(const ServerContext& context, const StructuredOutput& output, Thinking thinking) {
  return context.rules->find(rule_key(output, thinking));
}

std::shared_ptr<const wire::TokenRule> make_token_rule(const ServerContext& context, const StructuredOutput& output, Thinking thinking) {
  const auto emit = [&](AutomatonBuilder& builder, NodeId from, const Vocabulary& vocabulary) {
    if (thinking == Thinking::kNone) return output.emit(builder, from, vocabulary);
    if (context.call_form == CallForm::kHarmony)
      return output.emit(builder, emit_analysis(builder, from, thinking, output.is_call, vocabulary), vocabulary);
    static const grammar::Regex kSpace = grammar::parse_regex("[ \\t\\n]{0,4}");
    const NodeId text = builder.add_node();
    const NodeId open = thinking == Thinking::kOpen ? from : builder.emit_literal(from, vocabulary.marker("<think>"));
    const NodeId closed = builder.emit_until(open, vocabulary.marker("</think>"));
    builder.add_empty(emit_regex(builder, closed, kSpace, grammar::Spelling::kPlain, grammar::Anchoring::kFull), text);
    if (thinking == Thinking::kMaybe) builder.add_empty(from, text);
    return output.emit(builder, text, vocabulary);
  };
  try {
    return context.rules->get(rule_key(output, thinking), emit);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    net::fail_param(output.param, error.what());
  }
}

}  // namespace prl::server
