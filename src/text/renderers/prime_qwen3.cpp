#include <algorithm>

#include "base/error.hpp"
#include "text/jinja/value.hpp"
#include "text/json_python.hpp"
#include "text/renderers/chatml_base.hpp"
#include "text/renderers/families.hpp"

// PrimeIntellect's own Qwen3 fine-tunes: ChatML turns with XML tool definitions and calls. Source: their chat template, by way of
// the `renderers` package (prime-qwen3).
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kToolSystem = "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks.";
constexpr std::string_view kToolsHead = "\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>";
std::string key_of(const json::key_value_pair& member) { return {member.key().data(), member.key().size()}; }

// Members beyond the known ones, each as <key>value</key> on its own line.
std::string other_members(const json::object& object, std::initializer_list<std::string_view> known) {
  std::string out;
  for (const auto& member : object) {
    const std::string key = key_of(member);
    if (std::find(known.begin(), known.end(), key) == known.end())
      out += "\n<" + key + ">" + python_text(member.value()) + "</" + key + ">";
  }
  return out;
}

std::string tool_definition(const json::value& tool) {
  const json::object* function = tool_function(tool);
  if (function == nullptr) return {};
  const auto text = [](const json::object& object, const char* key) {
    const json::value* value = object.if_contains(key);
    return value == nullptr ? std::string() : jinja::from_json(*value).str();  // a list of types is written as Python's str
  };
  std::string out = "\n<function>\n<name>" + text(*function, "name") + "</name>";
  if (function->contains("description")) out += "\n<description>" + strip(text(*function, "description")) + "</description>";
  out += "\n<parameters>";
  if (const json::value* parameters = function->if_contains("parameters"); parameters != nullptr && parameters->is_object()) {
    const json::value* properties = parameters->get_object().if_contains("properties");
    if (properties != nullptr && properties->is_object()) {
      for (const auto& property : properties->get_object()) {
        out += "\n<parameter>\n<name>" + key_of(property) + "</name>";
        if (const json::object* fields = property.value().if_object()) {
          if (fields->contains("type")) out += "\n<type>" + text(*fields, "type") + "</type>";
          if (fields->contains("description")) out += "\n<description>" + strip(text(*fields, "description")) + "</description>";
          out += other_members(*fields, {"name", "type", "description"});
        }
        out += "\n</parameter>";
      }
    }
    out += other_members(parameters->get_object(), {"type", "properties"});
  }
  out += "\n</parameters>" + other_members(*function, {"type", "name", "description", "parameters"});
  return out + "\n</function>";
}

std::string xml_calls(const MessageView& message) {
  std::string out;
  for (const CallView& call : message.tool_calls()) out += (out.empty() ? "" : "\n") + xml_call(call);
  return out;
}

class PrimeQwen3 : public ChatMlBase {
 public:
  PrimeQwen3(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
      : ChatMlBase("prime-qwen3", std::move(tokenizer),
                   options.thinking_retention == ThinkingRetention::kAuto ? ThinkingRetention::kAll : options.thinking_retention,
                   ParseOptions{.stop_ids = {}, .tools = ToolSyntax::kXml, .reads_thinking = true, .keeps_empty_reasoning = true}) {}

 protected:
  bool begin(TokenBuilder& out, const json::array& messages, const json::array& tools) const override {
    const MessageView first(messages, 0);
    const bool has_system = first.is("system");
    if (!has_system && tools.empty()) return false;
    const std::string system = has_system ? first.content() : std::string(kToolSystem);
    std::string definitions;
    if (!tools.empty()) {
      definitions = kToolsHead;
      for (const json::value& tool : tools) definitions += tool_definition(tool);
      definitions.append("\n</tools>\n\n").append(xml_call_instructions());
    }
    turn(out, "system", {{system, has_system}, {definitions, false}}, has_system ? 0 : -1);
    return has_system;
  }

  // A reasoning member, also an empty one, makes a think block; null counts as absent.
  std::string assistant_body(const MessageView& message, const json::array&, std::size_t) const override {
    const std::string content = message.content();
    if (!message.tool_calls().empty()) {
      const std::string text = strip(content);
      return (text.empty() ? "" : text + "\n\n") + xml_calls(message);
    }
    const auto reasoning = message.reasoning();
    if (!reasoning) return content;
    const std::string text = strip(content);
    return "<think>" + strip(*reasoning) + "</think>" + (text.empty() ? "" : "\n" + text);
  }

  void tool_result(TokenBuilder& out, const MessageView& message, bool opens_group, bool closes_group) const override {
    const int index = static_cast<int>(message.index());
    if (opens_group) {
      open_turn(out, index);
      out.scaffold("user\n", index);
    }
    const std::string content = message.content();
    out.text({{"<tool_response>\n", false}, {content, true}, {"\n</tool_response>\n", false}}, index);
    if (closes_group) close_turn_with(out, index);
  }
};

}  // namespace

std::unique_ptr<Renderer> make_prime_qwen3(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer) {
  return std::make_unique<PrimeQwen3>(options, std::move(tokenizer));
}

}  // namespace prl::text::renderers
