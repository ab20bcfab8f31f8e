#include <fmt/core.h>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/families.hpp"
#include "text/renderers/family_renderer.hpp"

// Kimi K2. Source: its chat template by way of the `renderers` package (kimi-k2). Calls carry their name in their id, so the ids that
// the model wrote must come back with the messages.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kKimiSystem = "You are Kimi, an AI assistant created by Moonshot AI.";

ParseOptions kimi_parse_options(const Tokenizer& tokenizer) {
  ParseOptions parse;
  parse.stop_ids = {require_token(tokenizer, "<|im_end|>", "kimi-k2")};
  parse.tools = ToolSyntax::kKimi;
  parse.assistant_header = "<|im_assistant|>assistant<|im_middle|>";
  return parse;
}

class KimiK2 : public FamilyRenderer {
 public:
  KimiK2(const RendererOptions& options, const std::shared_ptr<const Tokenizer>& tokenizer)
      : FamilyRenderer("kimi-k2", tokenizer, resolve(options.thinking_retention, ThinkingRetention::kAll), kimi_parse_options(*tokenizer),
                       require_token(*tokenizer, "<|im_end|>", "kimi-k2")),
        user_(control("<|im_user|>")),
        assistant_(control("<|im_assistant|>")),
        system_(control("<|im_system|>")),
        middle_(control("<|im_middle|>")),
        end_(control("<|im_end|>")),
        section_begin_(control("<|tool_calls_section_begin|>")),
        section_end_(control("<|tool_calls_section_end|>")),
        call_begin_(control("<|tool_call_begin|>")),
        argument_begin_(control("<|tool_call_argument_begin|>")),
        call_end_(control("<|tool_call_end|>")) {}

  RenderedConversation render(const json::array& messages, const json::array& tools, bool add_generation_prompt) const override {
    if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: at least one is needed");
    TokenBuilder out = builder();
    if (!tools.empty()) {
      open(out, system_, "tool_declare", -1);
      out.scaffold(dump_python(tools, {.sort_keys = true, .item_separator = ",", .key_separator = ":"}), -1);
      out.special(end_, -1);
    }
    if (!MessageView(messages, 0).is("system")) {
      open(out, system_, "system", -1);
      out.scaffold(kKimiSystem, -1);
      out.special(end_, -1);
      out.scaffold("\n", -1);
    }
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const MessageView message(messages, i);
      if (message.is("assistant"))
        assistant_turn(out, message);
      else
        other_turn(out, message);
    }
    if (add_generation_prompt) open(out, assistant_, "assistant", -1);
    return out.take();
  }

 protected:
  void continue_conversation(TokenBuilder& out, const json::array& new_messages, std::int32_t) const override {
    for (std::size_t i = 0; i < new_messages.size(); ++i) other_turn(out, MessageView(new_messages, i));
    open(out, assistant_, "assistant", -1);
  }

 private:
  void open(TokenBuilder& out, std::int32_t role, std::string_view name, int index) const {
    out.special(role, index);
    out.scaffold(name, index);
    out.special(middle_, index);
  }

  void assistant_turn(TokenBuilder& out, const MessageView& message) const {
    const int index = static_cast<int>(message.index());
    open(out, assistant_, "assistant", index);
    out.sampled(message.content(), index);
    const std::vector<CallView> calls = message.tool_calls();
    if (!calls.empty()) {
      out.special(section_begin_, index, true);
      for (const CallView& call : calls) {
        out.special(call_begin_, index, true);
        out.sampled(call.id, index);
        out.special(argument_begin_, index, true);
        out.sampled(call.arguments_text(), index);
        out.special(call_end_, index, true);
      }
      out.special(section_end_, index, true);
    }
    out.special(end_, index, true);
  }

  void other_turn(TokenBuilder& out, const MessageView& message) const {
    const int index = static_cast<int>(message.index());
    const std::string content = message.content();
    if (message.is("tool")) {
      const std::string name = message.text_member("name");
      open(out, system_, name.empty() ? "tool" : name, index);
      out.scaffold("## Return of " + message.text_member("tool_call_id") + "\n", index);
    } else if (message.is("user") || message.is("system")) {
      open(out, message.is("user") ? user_ : system_, message.role(), index);
    } else {
      message.refuse(fmt::format("role '{}' is not one of system, user, assistant, tool", message.role()));
    }
    out.text({{content, true}}, index);
    out.special(end_, index);
  }

  std::int32_t user_, assistant_, system_, middle_, end_;
  std::int32_t section_begin_, section_end_, call_begin_, argument_begin_, call_end_;
};

}  // namespace

std::unique_ptr<Renderer> make_kimi_k2(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer) {
  return std::make_unique<KimiK2>(options, tokenizer);
}

}  // namespace prl::text::renderers
