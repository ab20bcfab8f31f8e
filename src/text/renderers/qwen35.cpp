#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/chatml_base.hpp"
#include "text/renderers/families.hpp"

// Qwen3.5, 3.6 and 3.8: ChatML turns with images, with tool calls in XML and think blocks that the generation prompt opens. Source: their
// chat templates by way of the `renderers` package (qwen3.5, qwen3.6, qwen3.8). With enable_thinking off the empty think block of the
// generation prompt stays in the history too, so that a render later has the tokens that were sampled.
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

// What the three have in different ways.
struct Variant {
  std::string name;
  bool is_thinking = true;
  bool keeps_thinking = false;  // of turns before the last query too
  ArgumentSpelling arguments = ArgumentSpelling::kPython;
  bool is_38 = false;                  // no think blocks in the text, no empty system message, no conversation without a query
  std::string_view instructions = {};  // on how much to think, in front of the system text
};

constexpr std::string_view kThinkMuch =
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider plausible alternatives, "
    "and prioritize correctness, consistency, and clarity in the final answer.";
constexpr std::string_view kThinkLittle =
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion without unnecessary "
    "elaboration.";

std::string_view instructions_of(const json::object& kwargs) {
  const json::value* given = kwargs.if_contains("reasoning_effort");
  if (given == nullptr || given->is_null() || *given == "xhigh") return kThinkMuch;
  if (*given == "low") return kThinkLittle;
  if (*given != "medium") fail(ErrorCode::kInvalidArgument, "[renderer] 'qwen3.8': reasoning_effort must be xhigh, medium or low");
  return {};
}

Variant variant_of(std::string_view name, const RendererOptions& options, const ChatTemplate* chat_template) {
  Variant out{.name = std::string(name), .is_thinking = thinking_is_enabled(options, thinks_by_default(options, chat_template))};
  if (name == "qwen3.5") return out;
  out.arguments = ArgumentSpelling::kJson;
  out.is_38 = name == "qwen3.8";
  const json::value* keeps = options.template_kwargs.if_contains("preserve_thinking");
  out.keeps_thinking = keeps != nullptr && keeps->is_bool() ? keeps->get_bool() : out.is_38;
  if (out.is_38 && out.is_thinking) out.instructions = instructions_of(options.template_kwargs);
  return out;
}

/// Without white space at one end.
std::string strip_end(const std::string& text, bool left) {
  const std::string stripped = strip(text);
  if (stripped.empty()) return {};
  const std::size_t begin = text.find(stripped);
  return left ? text.substr(begin) : text.substr(0, begin + stripped.size());
}

class Qwen35 : public ChatMlBase {
 public:
  Qwen35(Variant variant, const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
      : ChatMlBase(variant.name, std::move(tokenizer),
                   resolve(options.thinking_retention,
                           variant.is_thinking && !variant.keeps_thinking ? ThinkingRetention::kToolCycle : ThinkingRetention::kAll),
                   ParseOptions{.stop_ids = {}, .tools = ToolSyntax::kXml, .reads_thinking = true, .keeps_empty_reasoning = true}),
        variant_(std::move(variant)) {}

 protected:
  bool begin(TokenBuilder& out, const json::array& messages, const json::array& tools) const override {
    const MessageView first(messages, 0);
    const bool has_system = first.is("system");
    for (std::size_t i = 1; i < messages.size(); ++i)
      if (const MessageView message(messages, i); message.is("system"))
        message.refuse(fmt::format("the {} format has a system message only in front", name()));
    if (variant_.is_38) require_query(messages);
    const std::string system = has_system ? plain_text(first) : "";
    std::string instructions(variant_.instructions);
    if (tools.empty()) {
      if (!instructions.empty() && !system.empty()) instructions += "\n\n";
      const bool is_written = variant_.is_38 ? !instructions.empty() || !system.empty() : has_system;
      if (is_written) turn(out, "system", {{instructions, false}, {system, true}}, has_system ? 0 : -1);
      return has_system;
    }
    if (!instructions.empty()) instructions += "\n\n";
    std::string definitions = instructions + "# Tools\n\nYou have access to the following functions:\n\n<tools>";
    for (const json::value& tool : tools) definitions += "\n" + dump_python(tool);
    definitions.append("\n</tools>\n\n").append(xml_call_instructions());
    if (!system.empty()) definitions += "\n\n";
    turn(out, "system", {{definitions, false}, {system, true}}, has_system ? 0 : -1);
    return has_system;
  }

  std::string assistant_body(const MessageView& message, const json::array&, std::size_t last_query) const override {
    std::string content = strip(message.content());
    const auto given = message.reasoning();
    const std::string reasoning = strip(given ? *given : variant_.is_38 ? "" : split_inline_reasoning(content));
    std::string body;
    if (message.index() > last_query || variant_.keeps_thinking || (!variant_.is_thinking && reasoning.empty()))
      body = "<think>\n" + reasoning + "\n</think>\n\n";
    body += content;
    bool is_first = true;
    for (const CallView& call : message.tool_calls()) {
      if (!is_first) body += "\n";
      if (is_first && !strip(content).empty()) body += "\n\n";
      is_first = false;
      body += xml_call(call, variant_.arguments);
    }
    return body;
  }

  /// Images stand between marks, where the tokenizer has them. What lies around is stripped as a whole.
  void content(TokenBuilder& out, std::string_view before, const MessageView& message, std::string_view after) const override {
    std::vector<ContentPart> parts = message.parts();
    const auto is_image = [](const ContentPart& part) { return part.is_image; };
    if (std::ranges::none_of(parts, is_image)) return ChatMlBase::content(out, before, message, after);
    if (message.is("system")) message.refuse("a system message cannot have images");
    if (!parts.front().is_image) parts.front().text = strip_end(parts.front().text, /*left=*/true);
    if (!parts.back().is_image) parts.back().text = strip_end(parts.back().text, /*left=*/false);
    const auto index = static_cast<int>(message.index());
    std::string_view scaffold = before, text;  // what is not written yet
    const auto flush = [&](std::string_view end) {
      out.text({{scaffold, false}, {text, true}, {end, false}}, index);
      scaffold = text = {};
    };
    for (const ContentPart& part : parts) {
      if (!part.is_image) {
        text = part.text;
        continue;
      }
      flush({});
      for (const char* mark : {"<|vision_start|>", "<|image_pad|>", "<|vision_end|>"})
        out.special(require_token(tokenizer(), mark, name()), index);
    }
    flush(after);
  }

  std::string plain_text(const MessageView& message) const override { return strip(message.content()); }
  std::string tool_text(const MessageView& message) const override { return strip(message.content()); }
  std::string generation_prefix() const override { return variant_.is_thinking ? "<think>\n" : std::string(kNoThought); }

 private:
  void require_query(const json::array& messages) const {
    for (std::size_t i = 0; i < messages.size(); ++i)
      if (is_user_query(MessageView(messages, i))) return;
    fail(ErrorCode::kInvalidArgument, "messages: the {} format needs a message of the user", name());
  }

  Variant variant_;
};

}  // namespace

std::unique_ptr<Renderer> make_qwen35(std::string_view name, const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                                      const ChatTemplate* chat_template) {
  return std::make_unique<Qwen35>(variant_of(name, options, chat_template), options, std::move(tokenizer));
}

}  // namespace prl::text::renderers
