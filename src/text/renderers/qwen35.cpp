#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/chatml_base.hpp"
#include "text/renderers/families.hpp"

// Qwen3.5, text only: ChatML turns with tool calls in XML and think blocks that the generation prompt opens. Source: its chat template
// by way of the `renderers` package (qwen3.5). With enable_thinking off the empty think block of the generation prompt stays in the
// history too, so that a render later has the tokens that were sampled.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kNoThought = "<think>\n\n</think>\n\n";

// Does the model think unless it is told otherwise? Its template says so; the two smallest models of the family do not.
bool thinks_by_default(const RendererOptions& options, const ChatTemplate* chat_template) {
  if (chat_template == nullptr) return options.model_name != "Qwen/Qwen3.5-0.8B" && options.model_name != "Qwen/Qwen3.5-2B";
  try {
    const json::array question{json::object{{"role", "user"}, {"content", "?"}}};
    return !chat_template->render(question, {.add_generation_prompt = true}).ends_with(kNoThought);
  } catch (const Error&) {  // of another family, or broken: what most models do
    return true;
  }
}

class Qwen35 : public ChatMlBase {
 public:
  Qwen35(bool is_thinking, const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
      : ChatMlBase("qwen3.5", std::move(tokenizer),
                   resolve(options.thinking_retention, is_thinking ? ThinkingRetention::kToolCycle : ThinkingRetention::kAll),
                   ParseOptions{.stop_ids = {}, .tools = ToolSyntax::kXml, .reads_thinking = true, .keeps_empty_reasoning = true}),
        is_thinking_(is_thinking) {}

 protected:
  bool begin(TokenBuilder& out, const json::array& messages, const json::array& tools) const override {
    const MessageView first(messages, 0);
    const bool has_system = first.is("system");
    for (std::size_t i = 1; i < messages.size(); ++i)
      if (const MessageView message(messages, i); message.is("system"))
        message.refuse("the qwen3.5 format has a system message only in front");
    const std::string system = has_system ? plain_text(first) : "";
    if (tools.empty()) {
      if (has_system) turn(out, "system", {{system, true}}, 0);
      return has_system;
    }
    std::string definitions = "# Tools\n\nYou have access to the following functions:\n\n<tools>";
    for (const json::value& tool : tools) definitions += "\n" + dump_python(tool);
    definitions.append("\n</tools>\n\n").append(xml_call_instructions());
    if (!system.empty()) definitions += "\n\n";
    turn(out, "system", {{definitions, false}, {system, true}}, has_system ? 0 : -1);
    return has_system;
  }

  std::string assistant_body(const MessageView& message, const json::array&, std::size_t last_query) const override {
    std::string content = strip(message.content());
    const auto given = message.reasoning();
    const std::string reasoning = strip(given ? *given : split_inline_reasoning(content));
    std::string body;
    if (message.index() > last_query || (!is_thinking_ && reasoning.empty())) body = "<think>\n" + reasoning + "\n</think>\n\n";
    body += content;
    bool is_first = true;
    for (const CallView& call : message.tool_calls()) {
      if (!is_first) body += "\n";
      if (is_first && !strip(content).empty()) body += "\n\n";
      is_first = false;
      body += xml_call(call);
    }
    return body;
  }

  std::string plain_text(const MessageView& message) const override { return strip(message.content()); }
  std::string tool_text(const MessageView& message) const override { return strip(message.content()); }
  std::string generation_prefix() const override { return is_thinking_ ? "<think>\n" : std::string(kNoThought); }

 private:
  bool is_thinking_;
};

}  // namespace

std::unique_ptr<Renderer> make_qwen35(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                                      const ChatTemplate* chat_template) {
  const bool is_thinking = thinking_is_enabled(options, thinks_by_default(options, chat_template));
  return std::make_unique<Qwen35>(is_thinking, options, std::move(tokenizer));
}

}  // namespace prl::text::renderers
