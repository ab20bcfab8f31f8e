#include <fmt/core.h>

#include <array>
#include <utility>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/families.hpp"
#include "text/renderers/family_renderer.hpp"

// GLM-4.5. Turns have no end token: the role token of the next turn is what the model samples to end its own. Source: the chat
// template of GLM-4.5-Air by way of the `renderers` package (glm-4.5).
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kNoThink = "/nothink";
constexpr std::string_view kGlmToolsHead =
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within "
    "<tools></tools> XML tags:\n<tools>\n";
constexpr std::string_view kGlmToolsTail =
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>";

ParseOptions glm_parse_options(const Tokenizer& tokenizer) {
  ParseOptions parse;
  for (const char* stop : {"<|endoftext|>", "<|user|>", "<|observation|>"})
    parse.stop_ids.push_back(require_token(tokenizer, stop, "glm-4.5"));
  parse.stop_ids = ascending(std::move(parse.stop_ids));
  parse.tools = ToolSyntax::kGlm;
  parse.assistant_header = "<|assistant|>";
  return parse;
}

// A completion in its three channels, which may alternate: a call returns to content, and a think block may open again.
struct Channels {
  std::string reasoning, content;
  std::vector<ToolBlock> blocks;
  bool is_open = false;  // ends inside its reasoning
};

class ChannelReader {
 public:
  ChannelReader(const TokenText& text, const json::array& tools, bool reads_thinking)
      : text_(text), tools_(tools), reads_thinking_(reads_thinking) {}

  Channels read() {
    bool in_reasoning = reads_thinking_;  // the model opens its block itself, behind a newline
    std::size_t at = 0;
    while (at < text_.size()) {
      const auto [mark, place] = next_mark(at);
      (in_reasoning ? out_.reasoning : out_.content) += text_.text(at, place);
      if (place == kNowhere) break;
      at = place + mark.size();
      if (mark == kOpen) in_reasoning = true;
      if (mark == kClose) in_reasoning = false;
      if (mark != kCall) continue;
      in_reasoning = false;
      at = read_call(place);
    }
    out_.is_open = in_reasoning;
    return std::move(out_);
  }

 private:
  static constexpr std::string_view kOpen = "<think>", kClose = "</think>", kCall = "<tool_call>", kCallEnd = "</tool_call>";

  struct Mark {
    std::string_view spelling;
    std::size_t next = 0;  // the first at `at` or later, once looked for
    bool is_known = false;
  };

  // The first mark at `at` or later; each is looked for anew only once it was passed, so that a reply is read in linear time.
  std::pair<std::string_view, std::size_t> next_mark(std::size_t at) {
    std::pair<std::string_view, std::size_t> best{kCall, kNowhere};
    for (Mark& mark : marks_) {
      if (!reads_thinking_ && mark.spelling != kCall) continue;
      if (!mark.is_known || mark.next < at) mark = {mark.spelling, text_.find(mark.spelling, at), true};
      if (mark.next < best.second) best = {mark.spelling, mark.next};
    }
    return best;
  }

  std::size_t read_call(std::size_t at) {
    const std::size_t inside = at + kCall.size();
    const std::size_t close = text_.find(kCallEnd, inside);
    if (close != kNowhere) {
      out_.blocks.push_back({at, close + kCallEnd.size(), {read_glm_call(text_, inside, close, tools_)}});
      return close + kCallEnd.size();
    }
    ParsedToolCall call;
    call.raw = text_.text(inside, text_.size());
    call.status = ToolCallStatus::kUnclosedBlock;
    out_.blocks.push_back({at, text_.size(), {std::move(call)}});
    return text_.size();
  }

  const TokenText& text_;
  const json::array& tools_;
  bool reads_thinking_;
  std::array<Mark, 3> marks_{Mark{kCall}, Mark{kOpen}, Mark{kClose}};
  Channels out_;
};

class Glm45 : public FamilyRenderer {
 public:
  Glm45(const RendererOptions& options, const std::shared_ptr<const Tokenizer>& tokenizer)
      : FamilyRenderer(
            "glm-4.5", tokenizer,
            resolve(options.thinking_retention, thinking_is_enabled(options) ? ThinkingRetention::kToolCycle : ThinkingRetention::kAll),
            glm_parse_options(*tokenizer), require_token(*tokenizer, "<|endoftext|>", "glm-4.5")),
        is_thinking_(thinking_is_enabled(options)),
        mask_(control("[gMASK]")),
        begin_(control("<sop>")),
        system_(control("<|system|>")),
        user_(control("<|user|>")),
        assistant_(control("<|assistant|>")),
        observation_(control("<|observation|>")) {}

  RenderedConversation render(const json::array& messages, const json::array& tools, bool add_generation_prompt) const override {
    if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: at least one is needed");
    TokenBuilder out = builder();
    out.special(mask_, -1);
    out.special(begin_, -1);
    if (!tools.empty()) {
      std::string text(kGlmToolsHead);
      for (const json::value& tool : tools) text += dump_python(tool) + "\n";
      text += kGlmToolsTail;
      out.special(system_, -1);
      out.scaffold(text, -1);
    }
    std::size_t num_until_query = 0;
    for (std::size_t i = 0; i < messages.size(); ++i)
      if (MessageView(messages, i).is("user")) num_until_query = i + 1;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const MessageView message(messages, i);
      if (message.is("assistant"))
        assistant_turn(out, message, i >= num_until_query);
      else
        // The role token that closes an assistant turn is the model's.
        other_turn(out, messages, i, i > 0 && MessageView(messages, i - 1).is("assistant"), -1);
    }
    if (add_generation_prompt) generation_prompt(out);
    return out.take();
  }

  ParsedResponse parse_response(std::span<const std::int32_t> completion_ids, const json::array& tools,
                                std::span<const std::int32_t>) const override {
    const TokenText text(tokenizer(), before_stop(completion_ids, stops()));
    Channels channels = ChannelReader(text, tools, is_thinking_).read();
    ParsedResponse out;
    out.content = channels.blocks.empty() ? std::move(channels.content) : strip(channels.content);
    channels.reasoning = strip("|" + channels.reasoning).substr(1);  // at its end only
    if (channels.is_open || !channels.reasoning.empty()) out.reasoning_content = std::move(channels.reasoning);
    add_tool_blocks(out, text, std::move(channels.blocks));
    return out;
  }

 protected:
  bool ends_in_thought(std::span<const std::int32_t>, std::span<const std::int32_t> completion) const override {
    const TokenText text(tokenizer(), before_stop(completion, stops()));
    return ChannelReader(text, {}, is_thinking_).read().is_open;
  }

  void continue_conversation(TokenBuilder& out, const json::array& new_messages, std::int32_t last_id) const override {
    for (std::size_t i = 0; i < new_messages.size(); ++i) other_turn(out, new_messages, i, false, i == 0 ? last_id : -1);
    generation_prompt(out);
  }

 private:
  // A system, user or tool message. `open_id`: the role token that stands there already.
  void other_turn(TokenBuilder& out, const json::array& messages, std::size_t i, bool follows_assistant, std::int32_t open_id) const {
    const MessageView message(messages, i);
    const int index = static_cast<int>(i);
    const std::string content = message.content();
    const auto open = [&](std::int32_t role) {
      if (open_id != role) out.special(role, follows_assistant ? index - 1 : index, follows_assistant);
    };
    if (message.is("user")) {
      open(user_);
      const bool adds = !is_thinking_ && !content.ends_with(kNoThink);
      const auto token = adds ? tokenizer().id_of(kNoThink) : std::nullopt;
      out.text({{"\n", false}, {content, true}, {adds && !token ? kNoThink : "", false}}, index);
      if (token) out.special(*token, index);
    } else if (message.is("tool")) {
      if (i == 0 || !MessageView(messages, i - 1).is("tool")) open(observation_);
      out.text({{"\n<tool_response>\n", false}, {content, true}, {"\n</tool_response>", false}}, index);
    } else if (message.is("system")) {
      out.special(system_, index);
      out.text({{"\n", false}, {content, true}}, index);
    } else {
      message.refuse(fmt::format("role '{}' is not one of system, user, assistant, tool", message.role()));
    }
  }

  void assistant_turn(TokenBuilder& out, const MessageView& message, bool keeps_reasoning) const {
    const int index = static_cast<int>(message.index());
    std::string content = message.content();
    const auto given = message.reasoning();
    const std::string reasoning = given ? *given : split_inline_reasoning(content);
    content = strip(content);
    out.special(assistant_, index);
    out.scaffold("\n", index);
    out.mark("<think>", index, true);
    if (keeps_reasoning) out.sampled(strip(reasoning), index);
    out.mark("</think>", index, true);
    const std::vector<CallView> calls = message.tool_calls();
    if (!content.empty()) out.sampled("\n" + content + (calls.empty() ? "" : "\n"), index);
    for (const CallView& call : calls) {
      if (content.empty()) out.sampled("\n", index);
      out.mark("<tool_call>", index, true);
      out.sampled(call.name + "\n", index);
      const json::value arguments = call.arguments_object();
      if (const json::object* object = arguments.if_object())
        for (const auto& argument : *object) argument_pair(out, argument, index);
      out.mark("</tool_call>", index, true);
    }
  }

  static void argument_pair(TokenBuilder& out, const json::key_value_pair& argument, int index) {
    out.mark("<arg_key>", index, true);
    out.sampled({argument.key().data(), argument.key().size()}, index);
    out.mark("</arg_key>", index, true);
    out.sampled("\n", index);
    out.mark("<arg_value>", index, true);
    out.sampled(json_unless_text(argument.value()), index);
    out.mark("</arg_value>", index, true);
    out.sampled("\n", index);
  }

  void generation_prompt(TokenBuilder& out) const {
    out.special(assistant_, -1);
    if (is_thinking_) return;
    out.scaffold("\n", -1);
    out.mark("<think>", -1);
    out.mark("</think>", -1);
  }

  bool is_thinking_;
  std::int32_t mask_, begin_, system_, user_, assistant_, observation_;
};

}  // namespace

std::unique_ptr<Renderer> make_glm45(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer) {
  return std::make_unique<Glm45>(options, tokenizer);
}

}  // namespace prl::text::renderers
