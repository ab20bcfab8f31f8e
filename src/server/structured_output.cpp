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

/// One call of `tool` in the form that Qwen, SmolLM2 and others share (Hermes).
NodeId emit_call(AutomatonBuilder& builder, NodeId from, const json::object& function, const Vocabulary& vocabulary, std::size_t index) {
  std::string name;
  text::append_json_string(name, JsonFields(function).string("name").value_or(""), false);
  NodeId node = builder.emit_literal(from, vocabulary.marker("<tool_call>"));
  node = builder.emit_literal(node, "\n{\"name\": " + name + ", \"arguments\": ");
  const json::value* parameters = function.if_contains("parameters");
  const bool has_schema = parameters && !parameters->is_null();
  node = has_schema ? grammar::emit_json_object_schema(builder, node, *parameters, fmt::format("tools[{}].function.parameters", index))
                    : grammar::JsonText(builder).emit_object(node);
  node = builder.emit_literal(node, "}\n");
  return builder.emit_literal(node, vocabulary.marker("</tool_call>"));
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

bool reads_tagged_calls(const text::Tokenizer& tokenizer, const text::Renderer& renderer) {
  const auto parsed = renderer.parse_response(tokenizer.encode("<tool_call>\n{\"name\": \"probe\", \"arguments\": {}}\n</tool_call>"));
  return parsed.tool_calls.size() == 1 && parsed.tool_calls.front().name == "probe";
}

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
  if (!context.reads_tagged_calls)
    throw net::HttpError(501, ErrorCode::kNotImplemented,
                         "tool_choice: a call can only be enforced for models whose calls are read in the <tool_call> JSON form; start the "
                         "server with such a tool parser",
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
  return StructuredOutput{
      "tool_choice", std::move(key),
      [functions = std::move(functions), may_repeat](AutomatonBuilder& builder, NodeId from, const Vocabulary& vocabulary) {
        const NodeId begin = builder.add_node(), end = builder.add_node();
        builder.add_empty(from, begin);
        for (std::size_t i = 0; i < functions.size(); ++i)
          builder.add_empty(emit_call(builder, begin, functions[i].as_object(), vocabulary, i), end);
        if (may_repeat) builder.add_empty(builder.emit_literal(end, "\n"), begin);
        return end;
      }};
}

std::shared_ptr<const wire::TokenRule> find_token_rule(const ServerContext& context, const StructuredOutput& output, Thinking thinking) {
  return context.rules->find(rule_key(output, thinking));
}

std::shared_ptr<const wire::TokenRule> make_token_rule(const ServerContext& context, const StructuredOutput& output, Thinking thinking) {
  const auto emit = [&](AutomatonBuilder& builder, NodeId from, const Vocabulary& vocabulary) {
    if (thinking == Thinking::kNone) return output.emit(builder, from, vocabulary);
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
