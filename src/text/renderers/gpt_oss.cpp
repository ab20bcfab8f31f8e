#include <fmt/core.h>

#include <algorithm>
#include <ctime>

#include "base/error.hpp"
#include "base/log.hpp"
#include "text/renderers/families.hpp"
#include "text/renderers/family_renderer.hpp"
#include "text/renderers/harmony_parser.hpp"
#include "text/renderers/harmony_tools.hpp"

// gpt-oss: conversations in the harmony format. Source: the `renderers` package (gpt-oss) over openai-harmony 0.0.8. The first system
// message stands in front as the developer's, with the tools; of an answer's message only bodies and ends count as sampled.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kName = "gpt-oss";

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  return fmt::format("{:04}-{:02}-{:02}", local.tm_year + 1900, local.tm_mon + 1, local.tm_mday);
}

struct Preamble {
  std::string identity = "You are ChatGPT, a large language model trained by OpenAI.";
  std::string knowledge_cutoff = "2024-06";
  std::string date;
  std::string reasoning_effort = "medium";
  bool is_written = true;
  bool drops_analysis = true;
};

Preamble read_preamble(json::object kwargs) {
  pin_template_kwargs(kName, kwargs);
  const auto wrong = [](std::string_view key, std::string_view wanted) {
    fail(ErrorCode::kInvalidArgument, "[renderer] '{}': {} must be {}", kName, key, wanted);
  };
  const auto value_of = [&](const char* key) -> const json::value* {
    const json::value* value = kwargs.if_contains(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  };
  const auto read_text = [&](const char* key, std::string& out) {
    const json::value* value = value_of(key);
    if (value == nullptr) return;
    if (!value->is_string()) wrong(key, "a string");
    out.assign(value->get_string().data(), value->get_string().size());
  };
  const auto read_flag = [&](const char* key, bool& out) {
    const json::value* value = value_of(key);
    if (value == nullptr) return;
    if (!value->is_bool()) wrong(key, "true or false");
    out = value->get_bool();
  };
  Preamble out;
  read_text("model_identity", out.identity);
  read_text("knowledge_cutoff", out.knowledge_cutoff);
  read_text("conversation_start_date", out.date);
  read_text("reasoning_effort", out.reasoning_effort);
  read_flag("use_system_prompt", out.is_written);
  read_flag("auto_drop_analysis", out.drops_analysis);
  const std::string_view effort = out.reasoning_effort;
  if (effort != "low" && effort != "medium" && effort != "high") wrong("reasoning_effort", "low, medium or high");
  return out;
}

std::string functions_name(std::string_view name) {
  return name.starts_with("functions.") ? std::string(name) : "functions." + std::string(name);
}

class GptOss : public Renderer {
 public:
  GptOss(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
      : tokenizer_(std::move(tokenizer)),
        preamble_(read_preamble(options.template_kwargs)),
        retention_(
            resolve(options.thinking_retention, preamble_.drops_analysis ? ThinkingRetention::kToolCycle : ThinkingRetention::kAll)) {
    for (const char* token : {"<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"})
      controls_.push_back(require_token(*tokenizer_, token, kName));
    tokens_ = *HarmonyTokens::find(*tokenizer_);
    stops_ = ascending({tokens_.stop, tokens_.call});
  }

  std::string_view name() const noexcept override { return kName; }
  std::vector<std::int32_t> stop_token_ids() const override { return stops_; }
  bool wants_tool_names() const noexcept override { return true; }

  RenderedConversation render(const json::array& messages, const json::array& tools, bool add_generation_prompt) const override {
    if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: at least one is needed");
    std::size_t system = 0;
    while (system < messages.size() && !MessageView(messages, system).is("system")) ++system;
    const bool has_system = system < messages.size();
    const std::string instructions = has_system ? MessageView(messages, system).content() : "";
    RenderedConversation out = head(instructions, has_system ? static_cast<int>(system) : -1, tools);
    // What differs from the same head without instructions is their text, with the title above them.
    if (!instructions.empty()) mark_body(out, head("", 0, tools).ids);
    TokenBuilder body(*tokenizer_, controls_);
    for (std::size_t i = 0; i < messages.size(); ++i)
      if (i != system) message_turn(body, messages, i);
    const MessageView last(messages, messages.size() - 1);
    const bool is_final = !add_generation_prompt && last.is("assistant") && last.tool_calls().empty();
    if (add_generation_prompt) generation_prompt(body);
    append(out, body.take());
    if (is_final && out.ids.back() == tokens_.end) out.ids.back() = tokens_.stop;
    return out;
  }

  ParsedResponse parse_response(std::span<const std::int32_t> completion_ids, const json::array&,
                                std::span<const std::int32_t> prompt_ids) const override {
    return parse_harmony(*tokenizer_, tokens_, completion_ids, prompt_ids);
  }

  std::optional<RenderedConversation> bridge_to_next_turn(std::span<const std::int32_t> prev_prompt_ids,
                                                          std::span<const std::int32_t> prev_completion_ids,
                                                          const json::array& new_messages, const json::array&) const override {
    if (prev_prompt_ids.empty() || new_messages.empty() || retention_ == ThinkingRetention::kTemplate) return std::nullopt;
    for (std::size_t i = 0; i < new_messages.size(); ++i) {
      const MessageView message(new_messages, i);
      if (!message.is("user") && !message.is("system") && !message.is("developer") && !message.is("tool")) return std::nullopt;
      if (message.is("user") && retention_ == ThinkingRetention::kToolCycle) return std::nullopt;
    }
    // The model ended its turn inside a thought: no render writes that.
    if (ends_in_analysis(*tokenizer_, tokens_, prev_completion_ids, prev_prompt_ids)) return std::nullopt;
    auto ids = close_turn(prev_prompt_ids, prev_completion_ids, stops_, tokens_.end);
    if (!ids) return std::nullopt;
    TokenBuilder out(*tokenizer_, controls_);
    for (std::size_t i = 0; i < new_messages.size(); ++i) message_turn(out, new_messages, i);
    generation_prompt(out);
    return behind(std::move(*ids), out.take());
  }

 private:
  struct Header {
    std::string_view role;
    std::string recipient = {};
    std::string_view channel = {};
  };

  void turn(TokenBuilder& out, const Header& header, std::string_view body, int index, bool is_sampled = false) const {
    out.special(tokens_.start, index);
    out.scaffold(header.role, index);
    if (!header.recipient.empty()) out.scaffold(" to=" + header.recipient, index);
    if (!header.channel.empty()) {
      out.special(tokens_.channel, index);
      out.scaffold(header.channel, index);
    }
    out.special(tokens_.message, index);
    out.text({{body, true}}, index, is_sampled);
    out.special(is_sampled && !header.recipient.empty() ? tokens_.call : tokens_.end, index, is_sampled);
  }

  /// The system message and the developer's, which is written for a system message (`index`) or tools.
  RenderedConversation head(std::string_view instructions, int index, const json::array& tools) const {
    TokenBuilder out(*tokenizer_, controls_);
    const auto scaffold_turn = [&](std::string_view role, std::string_view text) {
      out.special(tokens_.start, index);
      out.scaffold(role, index);
      out.special(tokens_.message, index);
      out.scaffold(text, index);
      out.special(tokens_.end, index);
    };
    if (preamble_.is_written)
      scaffold_turn("system",
                    fmt::format("{}\nKnowledge cutoff: {}\nCurrent date: {}\n\nReasoning: {}\n\n# Valid channels: analysis, commentary, "
                                "final. Channel must be included for every message.{}",
                                preamble_.identity, preamble_.knowledge_cutoff, preamble_.date, preamble_.reasoning_effort,
                                tools.empty() ? "" : "\nCalls to these tools must go to the commentary channel: 'functions'."));
    if (index < 0 && tools.empty()) return out.take();
    std::string text;
    if (!instructions.empty()) text = "# Instructions\n\n" + std::string(instructions);
    if (!tools.empty()) text += (text.empty() ? "" : "\n\n") + harmony_tools(tools);
    scaffold_turn("developer", text);
    return out.take();
  }

  /// Marks as content what `rendered` has between the tokens that it begins and ends with like `bare`.
  static void mark_body(RenderedConversation& rendered, const std::vector<std::int32_t>& bare) {
    const auto& ids = rendered.ids;
    const std::size_t most = std::min(ids.size(), bare.size());
    std::size_t begin = 0, num_behind = 0;
    while (begin < most && ids[begin] == bare[begin]) ++begin;
    while (begin + num_behind < most && ids[ids.size() - 1 - num_behind] == bare[bare.size() - 1 - num_behind]) ++num_behind;
    std::fill(rendered.is_content.begin() + static_cast<std::ptrdiff_t>(begin),
              rendered.is_content.end() - static_cast<std::ptrdiff_t>(num_behind), 1);
  }

  static void append(RenderedConversation& out, const RenderedConversation& tail) {
    out.ids.insert(out.ids.end(), tail.ids.begin(), tail.ids.end());
    out.message_indices.insert(out.message_indices.end(), tail.message_indices.begin(), tail.message_indices.end());
    out.sampled_mask.insert(out.sampled_mask.end(), tail.sampled_mask.begin(), tail.sampled_mask.end());
    out.is_content.insert(out.is_content.end(), tail.is_content.begin(), tail.is_content.end());
  }

  void message_turn(TokenBuilder& out, const json::array& messages, std::size_t i) const {
    const MessageView message(messages, i);
    const int index = static_cast<int>(i);
    if (message.is("assistant")) {
      assistant_turn(out, message, keeps_analysis(messages, message));
    } else if (message.is("tool")) {
      const std::string name = message.text_member("name");
      const std::string author = functions_name(name.empty() ? "unknown" : name);
      turn(out, {.role = author, .recipient = "assistant", .channel = "commentary"}, message.content(), index);
    } else if (message.is("user")) {
      turn(out, {.role = "user"}, message.content(), index);
    } else if (message.is("system") || message.is("developer")) {
      turn(out, {.role = "developer"}, "# Instructions\n\n" + message.content(), index);
    } else {
      message.refuse(fmt::format("role '{}' is not one of system, developer, user, assistant, tool", message.role()));
    }
  }

  /// Reasoning stays with calls until an answer follows them.
  bool keeps_analysis(const json::array& messages, const MessageView& message) const {
    if (!preamble_.drops_analysis) return true;
    if (message.tool_calls().empty()) return false;
    for (std::size_t i = message.index() + 1; i < messages.size(); ++i) {
      const MessageView later(messages, i);
      if (later.is("assistant") && later.tool_calls().empty() && !later.content().empty()) return false;
    }
    return true;
  }

  void assistant_turn(TokenBuilder& out, const MessageView& message, bool keeps_reasoning) const {
    const int index = static_cast<int>(message.index());
    const std::string reasoning = keeps_reasoning ? message.reasoning().value_or("") : "";
    const std::string content = message.content();
    const std::vector<CallView> calls = message.tool_calls();
    if (!reasoning.empty()) turn(out, {.role = "assistant", .channel = "analysis"}, reasoning, index, true);
    if (!content.empty() || (reasoning.empty() && calls.empty()))
      turn(out, {.role = "assistant", .channel = "final"}, content, index, true);
    for (const CallView& call : calls)
      turn(out, {.role = "assistant", .recipient = functions_name(call.name), .channel = "commentary"}, call.arguments_text(), index, true);
  }

  void generation_prompt(TokenBuilder& out) const {
    out.special(tokens_.start, -1);
    out.scaffold("assistant", -1);
    out.special(tokens_.channel, -1);
    out.scaffold("analysis", -1);
    out.special(tokens_.message, -1);
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
  Preamble preamble_;
  ThinkingRetention retention_;
  HarmonyTokens tokens_;
  std::vector<std::int32_t> stops_, controls_;
};

}  // namespace

std::unique_ptr<Renderer> make_gpt_oss(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer) {
  return std::make_unique<GptOss>(options, std::move(tokenizer));
}

}  // namespace prl::text::renderers

namespace prl::text {

void pin_template_kwargs(std::string_view renderer, boost::json::object& kwargs) {
  constexpr const char* kDate = "conversation_start_date";
  if (renderer != renderers::kName) return;
  const boost::json::value* written = kwargs.if_contains("use_system_prompt");
  if (written != nullptr && written->is_bool() && !written->get_bool()) return;
  const boost::json::value* date = kwargs.if_contains(kDate);
  if (date != nullptr && !date->is_null() && !(date->is_string() && date->get_string().empty())) return;
  const std::string today = renderers::today();
  kwargs[kDate] = today;
  log::warning(
      "renderer gpt-oss: prompts say \"Current date: {}\", which is today; set renderer.chat_template_kwargs.{} to have the same "
      "prompts on another day",
      today, kDate);
}

}  // namespace prl::text
