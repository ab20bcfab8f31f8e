#include <fmt/core.h>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/families.hpp"
#include "text/renderers/family_renderer.hpp"

// DeepSeek V3, which does not think, and R1, which always does. Source: their chat templates by way of the `renderers` package
// (deepseek-v3, deepseek-r1). Neither template writes the list of tools: who wants calls describes the tools in the system text.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

ParseOptions deepseek_parse_options(const Tokenizer& tokenizer, std::string_view name) {
  ParseOptions parse;
  parse.stop_ids = {require_token(tokenizer, "<｜end▁of▁sentence｜>", name)};
  parse.tools = ToolSyntax::kDeepSeek;
  parse.tool_closes_reasoning = false;
  parse.assistant_header = "<｜Assistant｜>";
  return parse;
}

class DeepSeek : public FamilyRenderer {
 public:
  DeepSeek(std::string_view name, bool thinks, const RendererOptions& options, const std::shared_ptr<const Tokenizer>& tokenizer)
      : FamilyRenderer(std::string(name), tokenizer,
                       resolve(options.thinking_retention, thinks ? ThinkingRetention::kTemplate : ThinkingRetention::kAll),
                       deepseek_parse_options(*tokenizer, name), require_token(*tokenizer, "<｜end▁of▁sentence｜>", name)),
        thinks_(thinks),
        begin_(control("<｜begin▁of▁sentence｜>")),
        end_(control("<｜end▁of▁sentence｜>")),
        user_(control("<｜User｜>")),
        assistant_(control("<｜Assistant｜>")),
        calls_begin_(control("<｜tool▁calls▁begin｜>")),
        calls_end_(control("<｜tool▁calls▁end｜>")),
        call_begin_(control("<｜tool▁call▁begin｜>")),
        call_end_(control("<｜tool▁call▁end｜>")),
        separator_(control("<｜tool▁sep｜>")),
        outputs_begin_(control("<｜tool▁outputs▁begin｜>")),
        outputs_end_(control("<｜tool▁outputs▁end｜>")),
        output_begin_(control("<｜tool▁output▁begin｜>")),
        output_end_(control("<｜tool▁output▁end｜>")) {}

  RenderedConversation render(const json::array& messages, const json::array&, bool add_generation_prompt) const override {
    if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: at least one is needed");
    TokenBuilder out = builder();
    out.special(begin_, -1);
    std::size_t i = 0;
    std::string system;
    for (; i < messages.size() && MessageView(messages, i).is("system"); ++i)
      system += (i > 0 ? "\n\n" : "") + MessageView(messages, i).content();
    out.text({{system, true}}, 0);
    for (; i < messages.size(); ++i) {
      const MessageView message(messages, i);
      if (message.is("assistant"))
        assistant_turn(out, message, i > 0 && MessageView(messages, i - 1).is("tool"));
      else
        other_turn(out, messages, i);
    }
    if (add_generation_prompt) generation_prompt(out, messages);
    return out.take();
  }

 protected:
  void continue_conversation(TokenBuilder& out, const json::array& new_messages, std::int32_t) const override {
    for (std::size_t i = 0; i < new_messages.size(); ++i) other_turn(out, new_messages, i);
    generation_prompt(out, new_messages);
  }

 private:
  // The answer to tool results follows them without a header.
  void assistant_turn(TokenBuilder& out, const MessageView& message, bool follows_tool) const {
    const int index = static_cast<int>(message.index());
    std::string content = message.content();
    constexpr std::string_view kThinkClose = "</think>";
    if (const std::size_t close = content.rfind(kThinkClose); thinks_ && close != std::string::npos)
      content.erase(0, close + kThinkClose.size());
    if (!follows_tool) out.special(assistant_, index);
    out.sampled(content, index);
    const std::vector<CallView> calls = message.tool_calls();
    if (!calls.empty()) {
      out.special(calls_begin_, index, true);
      for (const CallView& call : calls) {
        out.special(call_begin_, index, true);
        out.sampled("function", index);
        out.special(separator_, index, true);
        out.sampled(call.name + "\n```json\n" + call.arguments_text() + "\n```", index);
        out.special(call_end_, index, true);
      }
      out.special(calls_end_, index, true);
    }
    out.special(end_, index, true);
  }

  // A user or tool message, or a system message that is not in front, which counts as the user's.
  void other_turn(TokenBuilder& out, const json::array& messages, std::size_t i) const {
    const MessageView message(messages, i);
    const int index = static_cast<int>(i);
    const std::string content = message.content();
    if (message.is("tool")) {
      if (i == 0 || !MessageView(messages, i - 1).is("tool")) out.special(outputs_begin_, index);
      out.special(output_begin_, index);
      out.text({{content, true}}, index);
      out.special(output_end_, index);
      if (i + 1 == messages.size() || !MessageView(messages, i + 1).is("tool")) out.special(outputs_end_, index);
    } else if (message.is("user") || message.is("system")) {
      out.special(user_, index);
      out.text({{content, true}}, index);
    } else {
      message.refuse(fmt::format("role '{}' is not one of system, user, assistant, tool", message.role()));
    }
  }

  void generation_prompt(TokenBuilder& out, const json::array& messages) const {
    if (!MessageView(messages, messages.size() - 1).is("tool")) out.special(assistant_, -1);
    if (!thinks_) return;
    if (const auto think = tokenizer().id_of("<think>")) {
      out.special(*think, -1);
      out.scaffold("\n", -1);
    } else {
      out.scaffold("<think>\n", -1);
    }
  }

  bool thinks_;
  std::int32_t begin_, end_, user_, assistant_;
  std::int32_t calls_begin_, calls_end_, call_begin_, call_end_, separator_;
  std::int32_t outputs_begin_, outputs_end_, output_begin_, output_end_;
};

}  // namespace

std::unique_ptr<Renderer> make_deepseek(std::string_view name, const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer) {
  return std::make_unique<DeepSeek>(name, name == "deepseek-r1", options, tokenizer);
}

}  // namespace prl::text::renderers
