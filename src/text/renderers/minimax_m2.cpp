#include <fmt/core.h>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/families.hpp"
#include "text/renderers/family_renderer.hpp"

// MiniMax M2 and M2.5. Source: their chat template by way of the `renderers` package (minimax-m2). That template has a system message
// only in front; one that comes later, which it leaves out, is a turn of its own here.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kMiniMaxIdentity = "You are a helpful assistant. Your name is MiniMax-M2.5 and is built by MiniMax.";
constexpr std::string_view kMiniMaxToolsHead =
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\nHere are the tools available in JSONSchema format:\n\n"
    "<tools>\n";
constexpr std::string_view kMiniMaxToolsTail =
    "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n<minimax:tool_call>\n"
    "<invoke name=\"tool-name-1\">\n<parameter name=\"param-key-1\">param-value-1</parameter>\n"
    "<parameter name=\"param-key-2\">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>";

ParseOptions minimax_parse_options(const Tokenizer& tokenizer) {
  ParseOptions parse;
  parse.stop_ids = {require_token(tokenizer, "[e~[", "minimax-m2")};
  parse.tools = ToolSyntax::kMiniMax;
  parse.assistant_header = "]~b]ai\n";
  return parse;
}

class MiniMaxM2 : public FamilyRenderer {
 public:
  MiniMaxM2(const RendererOptions& options, const std::shared_ptr<const Tokenizer>& tokenizer)
      : FamilyRenderer("minimax-m2", tokenizer, resolve(options.thinking_retention, ThinkingRetention::kToolCycle),
                       minimax_parse_options(*tokenizer), require_token(*tokenizer, "[e~[", "minimax-m2")),
        begin_(control("]~!b[")),
        role_(control("]~b]")),
        end_(control("[e~[")) {
    if (const json::value* identity = options.template_kwargs.if_contains("model_identity"); identity != nullptr && is_text(*identity))
      identity_.assign(identity->get_string().data(), identity->get_string().size());
  }

  RenderedConversation render(const json::array& messages, const json::array& tools, bool add_generation_prompt) const override {
    if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: at least one is needed");
    TokenBuilder out = builder();
    const bool has_system = MessageView(messages, 0).is("system");
    system_turn(out, has_system ? MessageView(messages, 0).content() : "", has_system ? 0 : -1, tools);
    std::size_t num_until_query = 0;
    for (std::size_t i = 0; i < messages.size(); ++i)
      if (MessageView(messages, i).is("user")) num_until_query = i + 1;
    for (std::size_t i = has_system ? 1 : 0; i < messages.size(); ++i) {
      const MessageView message(messages, i);
      if (message.is("assistant"))
        assistant_turn(out, message, i >= num_until_query);
      else
        other_turn(out, messages, i);
    }
    if (add_generation_prompt) generation_prompt(out);
    return out.take();
  }

 protected:
  void continue_conversation(TokenBuilder& out, const json::array& new_messages, std::int32_t) const override {
    out.scaffold("\n", -1);
    for (std::size_t i = 0; i < new_messages.size(); ++i) other_turn(out, new_messages, i);
    generation_prompt(out);
  }

 private:
  void close(TokenBuilder& out, int index, bool is_sampled = false) const {
    out.special(end_, index, is_sampled);
    out.scaffold("\n", index);
  }

  void system_turn(TokenBuilder& out, const std::string& content, int index, const json::array& tools) const {
    std::string rest;
    if (!tools.empty()) {
      rest = kMiniMaxToolsHead;
      for (const json::value& tool : tools) {
        const json::object* function = tool_function(tool);
        rest += "<tool>" + (function != nullptr ? dump_python(*function) : dump_python(tool)) + "</tool>\n";
      }
      rest += kMiniMaxToolsTail;
    }
    out.special(begin_, index);
    out.special(role_, index);
    const bool is_own = !content.empty();
    out.text({{"system\n", false}, {is_own ? content : identity_, is_own}, {rest, false}}, index);
    close(out, index);
  }

  void assistant_turn(TokenBuilder& out, const MessageView& message, bool keeps_reasoning) const {
    const int index = static_cast<int>(message.index());
    std::string content = message.content();
    const auto given = message.reasoning();
    std::string reasoning;
    if (given) {
      reasoning = *given;
    } else if (content.find("</think>") != std::string::npos) {
      reasoning = split_inline_reasoning(content);
      content = strip_newlines(content);
    }
    const std::vector<CallView> calls = message.tool_calls();
    const bool thinks = keeps_reasoning && !reasoning.empty();
    out.special(role_, index);
    // The newline of a call that opens the turn is one token with that of the header, so it is nothing the model samples.
    const bool joins_header = !thinks && content.empty() && !calls.empty();
    out.scaffold(joins_header ? "ai\n\n" : "ai\n", index);
    if (thinks) {
      out.mark("<think>", index, true);
      out.sampled("\n" + reasoning + "\n", index);
      out.mark("</think>", index, true);
      content.insert(0, "\n\n");
    }
    if (!calls.empty() && !joins_header) content += "\n";
    out.sampled(content, index);
    if (!calls.empty()) {
      out.mark("<minimax:tool_call>", index, true);
      out.sampled(invocations(calls), index);
      out.mark("</minimax:tool_call>", index, true);
    }
    close(out, index, true);
  }

  static std::string invocations(const std::vector<CallView>& calls) {
    std::string text = "\n";
    for (const CallView& call : calls) {
      text += "<invoke name=\"" + call.name + "\">\n";
      const json::value arguments = call.arguments_object();
      if (const json::object* object = arguments.if_object())
        for (const auto& argument : *object)
          text += "<parameter name=\"" + std::string(argument.key().data(), argument.key().size()) + "\">" +
                  json_unless_text(argument.value()) + "</parameter>\n";
      text += "</invoke>\n";
    }
    return text;
  }

  // A user, system or tool message.
  void other_turn(TokenBuilder& out, const json::array& messages, std::size_t i) const {
    const MessageView message(messages, i);
    const int index = static_cast<int>(i);
    const std::string content = message.content();
    if (message.is("tool")) {
      const bool opens = i == 0 || !MessageView(messages, i - 1).is("tool");
      const bool closes = i + 1 == messages.size() || !MessageView(messages, i + 1).is("tool");
      if (opens) {
        out.special(role_, index);
        out.scaffold("tool", index);
      }
      // Nothing stands between the tag and the result, so a token may have bytes of both.
      out.text({{opens ? "\n<response>" : "<response>", false}, {content, true}, {closes ? "</response>" : "</response>\n", false}}, index,
               false, Attribution::kAnyByte);
      if (closes) close(out, index);
    } else if (message.is("user") || message.is("system")) {
      const std::string header = std::string(message.role()) + "\n";
      out.special(role_, index);
      out.text({{header, false}, {content, true}}, index);
      close(out, index);
    } else {
      message.refuse(fmt::format("role '{}' is not one of system, user, assistant, tool", message.role()));
    }
  }

  void generation_prompt(TokenBuilder& out) const {
    out.special(role_, -1);
    out.scaffold("ai\n", -1);
    out.mark("<think>", -1);
    out.scaffold("\n", -1);
  }

  std::int32_t begin_, role_, end_;
  std::string identity_ = std::string(kMiniMaxIdentity);
};

}  // namespace

std::unique_ptr<Renderer> make_minimax_m2(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer) {
  return std::make_unique<MiniMaxM2>(options, tokenizer);
}

}  // namespace prl::text::renderers
