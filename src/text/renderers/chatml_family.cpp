#include <fmt/core.h>

#include <optional>

#include "text/renderers/chatml_base.hpp"
#include "text/renderers/families.hpp"

// ChatML dialects without reasoning rules of their own, and Qwen3, which has them.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kQwenSystem = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";
constexpr std::string_view kSmolSystem = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

// ---- Qwen3. Source: its chat template; with enable_thinking off the empty think block of the generation prompt stays in the
// history too, so that a render later has the tokens that were sampled (as the `renderers` package has it).
class Qwen3 : public ChatMlBase {
 public:
  Qwen3(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
      : ChatMlBase(
            "qwen3", std::move(tokenizer),
            resolve(options.thinking_retention, thinking_is_enabled(options) ? ThinkingRetention::kToolCycle : ThinkingRetention::kAll),
            ParseOptions{}),
        is_thinking_(thinking_is_enabled(options)) {}

 protected:
  bool begin(TokenBuilder& out, const json::array& messages, const json::array& tools) const override {
    const MessageView first(messages, 0);
    const bool has_system = first.is("system");
    const std::string system = has_system ? first.content() : "";
    if (tools.empty()) {
      if (has_system) turn(out, "system", {{system, true}}, 0);
      return has_system;
    }
    const std::string rest = (has_system ? "\n\n" : "") + hermes_tools(tools);
    turn(out, "system", {{system, true}, {rest, false}}, has_system ? 0 : -1);
    return has_system;
  }

  std::string assistant_body(const MessageView& message, const json::array& messages, std::size_t last_query) const override {
    std::string content = message.content();
    const auto given = message.reasoning();
    const std::string reasoning = given ? *given : split_inline_reasoning(content);
    const bool is_last = message.index() + 1 == messages.size();
    const bool in_window = message.index() > last_query && (is_last || !reasoning.empty());
    const std::string calls = hermes_calls(message, !content.empty());
    if (!in_window && (is_thinking_ || !reasoning.empty())) return content + calls;
    return "<think>\n" + std::string(strip_newlines(reasoning)) + "\n</think>\n\n" + std::string(strip_newlines(content, true, false)) +
           calls;
  }

  std::string generation_prefix() const override { return is_thinking_ ? "" : "<think>\n\n</think>\n\n"; }

 private:
  bool is_thinking_;
};

// ---- ChatML as built in, Qwen2.5 and SmolLM2.
struct Dialect {
  std::string_view name;
  std::optional<std::string_view> default_system;
  bool tools_after_default;  // the tools follow the system text after a blank line even when it is the default one
  bool has_tools;
  bool writes_reasoning;
};

constexpr Dialect kDialects[] = {
    {"chatml", std::nullopt, false, true, true},
    {"qwen2.5", kQwenSystem, true, true, false},
    {"smollm2", kSmolSystem, false, false, false},
};

class PlainChatMl : public ChatMlBase {
 public:
  PlainChatMl(const Dialect& dialect, const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
      : ChatMlBase(std::string(dialect.name), std::move(tokenizer), resolve(options.thinking_retention, ThinkingRetention::kAll),
                   ParseOptions{.stop_ids = {},
                                .tools = dialect.has_tools ? ToolSyntax::kHermes : ToolSyntax::kNone,
                                .reads_thinking = dialect.writes_reasoning || options.reasoning_parser == "think"}),
        dialect_(dialect) {}

 protected:
  bool begin(TokenBuilder& out, const json::array& messages, const json::array& tools) const override {
    const MessageView first(messages, 0);
    const bool has_system = first.is("system");
    if (!tools.empty() && !dialect_.has_tools)
      first.refuse(fmt::format("the {} format has no place for tools; describe them in the system text", name()));
    const std::string system = has_system ? first.content() : std::string(dialect_.default_system.value_or(""));
    const int index = has_system ? 0 : -1;
    if (!tools.empty()) {
      const std::string rest = (has_system || dialect_.tools_after_default ? "\n\n" : "") + hermes_tools(tools);
      turn(out, "system", {{system, has_system}, {rest, false}}, index);
    } else if (has_system || dialect_.default_system) {
      turn(out, "system", {{system, has_system}}, index);
    }
    return has_system;
  }

  std::string assistant_body(const MessageView& message, const json::array&, std::size_t) const override {
    if (!dialect_.has_tools && !message.tool_calls().empty())
      message.refuse(fmt::format("the {} format has no tool calls; write them into the content", name()));
    const std::string content = message.content();
    std::string body;
    if (const auto reasoning = message.reasoning(); reasoning && dialect_.writes_reasoning)
      body = "<think>\n" + *reasoning + "\n</think>\n\n";
    return body + content + hermes_calls(message, !content.empty());
  }

  void tool_result(TokenBuilder& out, const MessageView& message, bool opens_group, bool closes_group) const override {
    if (dialect_.has_tools) return ChatMlBase::tool_result(out, message, opens_group, closes_group);
    const std::string content = message.content();
    turn(out, "tool", {{content, true}}, static_cast<int>(message.index()));
  }

 private:
  Dialect dialect_;
};

}  // namespace

std::unique_ptr<Renderer> make_chatml_family(std::string_view name, const RendererOptions& options,
                                             std::shared_ptr<const Tokenizer> tokenizer) {
  if (name == "qwen3") return std::make_unique<Qwen3>(options, std::move(tokenizer));
  for (const Dialect& dialect : kDialects)
    if (dialect.name == name) return std::make_unique<PlainChatMl>(dialect, options, std::move(tokenizer));
  return nullptr;
}

}  // namespace prl::text::renderers
