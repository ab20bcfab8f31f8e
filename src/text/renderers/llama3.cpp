#include <algorithm>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/families.hpp"
#include "text/renderers/message_view.hpp"
#include "text/renderers/response_parser.hpp"
#include "text/renderers/token_builder.hpp"

// Llama 3.1, 3.2 and 3.3 Instruct. Source: their chat template; the date is fixed unless date_string says otherwise.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kCallFormat =
    "Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name and its value}.Do not use variables.\n\n";
constexpr std::string_view kToolsInSystem =
    "You have access to the following functions. To call a function, please respond with JSON for a function call.";
constexpr std::string_view kToolsInUser =
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers the given "
    "prompt.\n\n";

std::string tool_list(const json::array& tools) {
  std::string out;
  for (const json::value& tool : tools) out += dump_python(tool, {.indent = 4}) + "\n\n";
  return out;
}

class Llama3 : public Renderer {
 public:
  Llama3(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
      : tokenizer_(std::move(tokenizer)),
        begin_(token("<|begin_of_text|>")),
        start_header_(token("<|start_header_id|>")),
        end_header_(token("<|end_header_id|>")),
        eot_(token("<|eot_id|>")) {
    stops_ = {eot_, token("<|end_of_text|>")};
    if (const auto eom = tokenizer_->id_of("<|eom_id|>")) stops_.push_back(*eom);
    std::sort(stops_.begin(), stops_.end());
    if (const json::value* date = options.template_kwargs.if_contains("date_string"); date != nullptr && is_text(*date))
      date_.assign(date->get_string().data(), date->get_string().size());
    if (const json::value* flag = options.template_kwargs.if_contains("tools_in_user_message"); flag != nullptr && flag->is_bool())
      tools_in_user_message_ = flag->get_bool();
    drops_thinking_ = options.thinking_retention == ThinkingRetention::kTemplate;
  }

  std::string_view name() const noexcept override { return "llama-3"; }
  std::vector<std::int32_t> stop_token_ids() const override { return stops_; }

  RenderedConversation render(const json::array& messages, const json::array& tools, bool add_generation_prompt) const override {
    if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: at least one is needed");
    TokenBuilder out(*tokenizer_);
    out.special(begin_, -1);
    const MessageView first(messages, 0);
    const bool has_system = first.is("system");
    const int system_index = has_system ? 0 : -1;
    std::string preamble = "\n\n";
    if (!tools.empty()) preamble += "Environment: ipython\n";
    preamble += "Cutting Knowledge Date: December 2023\nToday Date: " + date_ + "\n\n";
    if (!tools.empty() && !tools_in_user_message_) preamble.append(kToolsInSystem).append(kCallFormat).append(tool_list(tools));
    const std::string system = has_system ? strip(first.content()) : "";
    header(out, "system", system_index);
    out.text({{preamble, false}, {system, true}}, system_index);
    out.special(eot_, system_index);

    std::size_t i = has_system ? 1 : 0;
    if (!tools.empty() && tools_in_user_message_) {
      if (i >= messages.size() || !MessageView(messages, i).is("user"))
        fail(ErrorCode::kInvalidArgument, "messages[{}]: with tools, the first message that is not system must be the user's", i);
      const std::string lead = "\n\n" + std::string(kToolsInUser) + std::string(kCallFormat) + tool_list(tools);
      const std::string content = strip(MessageView(messages, i).content());
      header(out, "user", static_cast<int>(i));
      out.text({{lead, false}, {content, true}}, static_cast<int>(i));
      out.special(eot_, static_cast<int>(i));
      ++i;
    }
    for (; i < messages.size(); ++i) message_turn(out, MessageView(messages, i));
    if (add_generation_prompt) generation_prompt(out);
    return out.take();
  }

  std::optional<RenderedConversation> bridge_to_next_turn(std::span<const std::int32_t> prev_prompt_ids,
                                                          std::span<const std::int32_t> prev_completion_ids,
                                                          const json::array& new_messages, const json::array&) const override {
    if (prev_prompt_ids.empty() || new_messages.empty() || drops_thinking_) return std::nullopt;
    TokenBuilder out(*tokenizer_);
    for (std::size_t i = 0; i < new_messages.size(); ++i) {
      const MessageView message(new_messages, i);
      if (!message.is("user") && !message.is("system") && !is_tool(message)) return std::nullopt;
      message_turn(out, message);
    }
    generation_prompt(out);
    auto ids = close_turn(prev_prompt_ids, prev_completion_ids, stops_, eot_);
    if (!ids) return std::nullopt;
    return behind(std::move(*ids), out.take());
  }

  // The call is bare JSON, so only a body that is exactly that counts.
  ParsedResponse parse_response(std::span<const std::int32_t> completion_ids, const json::array&,
                                std::span<const std::int32_t>) const override {
    const auto is_stop = [&](std::int32_t id) { return std::find(stops_.begin(), stops_.end(), id) != stops_.end(); };
    auto body = completion_ids.first(
        static_cast<std::size_t>(std::find_if(completion_ids.begin(), completion_ids.end(), is_stop) - completion_ids.begin()));
    const auto header_end = std::find(body.rbegin(), body.rend(), end_header_);
    body = body.subspan(static_cast<std::size_t>(body.rend() - header_end));
    ParsedResponse out;
    out.content = strip(tokenizer_->decode(body, false));
    if (!out.content.starts_with('{') || !out.content.ends_with('}')) return out;
    const auto members = scan_json_object(out.content);
    if (!members) return out;
    ParsedToolCall call;
    read_call_members(*members, {"arguments", "parameters"}, call);
    if (call.name.empty()) return out;
    call.raw = std::exchange(out.content, {});
    call.id = new_call_id();
    out.tool_calls.push_back(std::move(call));
    return out;
  }

 private:
  std::int32_t token(std::string_view spelling) const { return require_token(*tokenizer_, spelling, "llama-3"); }
  static bool is_tool(const MessageView& message) { return message.is("tool") || message.is("ipython"); }

  void header(TokenBuilder& out, std::string_view role, int index) const {
    out.special(start_header_, index);
    out.scaffold(role, index);
    out.special(end_header_, index);
  }
  void generation_prompt(TokenBuilder& out) const {
    header(out, "assistant", -1);
    out.scaffold("\n\n", -1);
  }

  void message_turn(TokenBuilder& out, const MessageView& message) const {
    const int index = static_cast<int>(message.index());
    if (is_tool(message)) {
      // The template's test for mappings and iterables takes text too, so results appear as JSON strings.
      const json::value* raw = message.raw_content();
      const std::string body = raw == nullptr                                            ? ""
                               : raw->is_object() || raw->is_array() || raw->is_string() ? dump_python(*raw)
                                                                                         : python_text(*raw);
      header(out, "ipython", index);
      out.text({{"\n\n", false}, {body, true}}, index);
      out.special(eot_, index);
    } else if (message.is("assistant")) {
      const std::vector<CallView> calls = message.tool_calls();
      if (calls.size() > 1) message.refuse("the llama-3 format has one tool call per assistant message");
      const std::string body = calls.empty() ? strip(message.content())
                                             : "{\"name\": \"" + calls[0].name + "\", \"parameters\": " + calls[0].arguments_text() + "}";
      header(out, "assistant", index);
      out.scaffold("\n\n", index);
      out.text({{body, true}}, index, true);
      out.special(eot_, index, true);
    } else if (message.is("user") || message.is("system")) {
      const std::string content = strip(message.content());
      header(out, message.role(), index);
      out.text({{"\n\n", false}, {content, true}}, index);
      out.special(eot_, index);
    } else {
      message.refuse(fmt::format("role '{}' is not one of system, user, assistant, tool, ipython", message.role()));
    }
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
  std::int32_t begin_, start_header_, end_header_, eot_;
  std::vector<std::int32_t> stops_;
  std::string date_ = "26 Jul 2024";
  bool tools_in_user_message_ = true;
  bool drops_thinking_ = false;
};

}  // namespace

std::unique_ptr<Renderer> make_llama3(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer) {
  return std::make_unique<Llama3>(options, std::move(tokenizer));
}

}  // namespace prl::text::renderers
