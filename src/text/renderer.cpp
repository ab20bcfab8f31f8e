#include "text/renderer.hpp"

#include <algorithm>
#include <boost/json/serialize.hpp>

#include "base/error.hpp"

namespace prl::text {
namespace {

/// The model's own chat template, whatever it is. Content is not attributed; a bridge is promised only when rendering the whole
/// conversation happens to begin with the earlier ids, which the caller checks by rendering anew.
class DefaultRenderer final : public Renderer {
 public:
  DefaultRenderer(RendererOptions options, std::shared_ptr<const Tokenizer> tokenizer, std::shared_ptr<const ChatTemplate> chat_template)
      : options_(std::move(options)), tokenizer_(std::move(tokenizer)), template_(std::move(chat_template)) {}

  std::string_view name() const noexcept override { return "default"; }

  RenderedConversation render(const boost::json::array& messages, const boost::json::array& tools, bool add_generation_prompt) const override {
    RenderOptions render_options;
    render_options.add_generation_prompt = add_generation_prompt;
    render_options.tools = tools;
    render_options.kwargs = options_.template_kwargs;
    RenderedConversation out;
    out.ids = tokenizer_->encode(template_->render(messages, render_options));
    out.message_indices.assign(out.ids.size(), -1);
    out.sampled_mask.assign(out.ids.size(), 0);
    out.is_content.assign(out.ids.size(), 0);
    return out;
  }

  std::optional<std::vector<std::int32_t>> bridge_to_next_turn(std::span<const std::int32_t>, std::span<const std::int32_t>, const boost::json::array&,
                                                               const boost::json::array&) const override {
    return std::nullopt;
  }

  std::vector<std::int32_t> stop_token_ids() const override { return tokenizer_->stop_ids(); }

  ParsedResponse parse_response(std::span<const std::int32_t> completion_ids, const boost::json::array&, std::span<const std::int32_t>) const override {
    const auto stops = tokenizer_->stop_ids();
    if (!completion_ids.empty() && std::find(stops.begin(), stops.end(), completion_ids.back()) != stops.end())
      completion_ids = completion_ids.first(completion_ids.size() - 1);
    ParsedResponse out;
    out.content = tokenizer_->decode(completion_ids);
    return out;
  }

 private:
  RendererOptions options_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::shared_ptr<const ChatTemplate> template_;
};

}  // namespace

std::string_view to_string(ToolCallStatus status) noexcept {
  switch (status) {
    case ToolCallStatus::kOk: return "ok";
    case ToolCallStatus::kInvalidJson: return "invalid_json";
    case ToolCallStatus::kUnclosedBlock: return "unclosed_block";
    case ToolCallStatus::kMissingName: return "missing_name";
    case ToolCallStatus::kMalformed: return "malformed_structure";
    case ToolCallStatus::kUnknownTool: return "unknown_tool";
  }
  return "";
}

boost::json::array ParsedResponse::openai_tool_calls() const {
  boost::json::array calls;
  for (const ParsedToolCall& call : tool_calls)
    if (call.status == ToolCallStatus::kOk)
      calls.push_back(boost::json::object{{"id", call.id}, {"type", "function"}, {"function", boost::json::object{{"name", call.name}, {"arguments", boost::json::serialize(call.arguments)}}}});
  return calls;
}

const std::vector<std::string>& renderer_names() {
  static const std::vector<std::string> names{"default"};
  return names;
}

std::unique_ptr<Renderer> make_renderer(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer, std::shared_ptr<const ChatTemplate> chat_template) {
  if (options.name != "default") fail(ErrorCode::kNotImplemented, "renderer {} is not built", options.name);
  if (!chat_template) fail(ErrorCode::kInvalidArgument, "renderer default needs a chat template");
  return std::make_unique<DefaultRenderer>(options, std::move(tokenizer), std::move(chat_template));
}

MaskedSample incremental_loss_mask(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const boost::json::array& messages, const boost::json::array& tools,
                                   const LossMaskRoles& roles, const boost::json::object& template_kwargs) {
  auto role_of = [&](std::size_t i) { return std::string(messages[i].as_object().at("role").as_string()); };
  auto is_trained = [&](const std::string& role) {
    return role == "assistant" ? roles.assistant : role == "user" ? roles.user : role == "tool" ? roles.tool : role == "system" && roles.system;
  };
  MaskedSample sample;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string role = role_of(i);
    if (role == "tool" && i + 1 < messages.size() && role_of(i + 1) == "tool") continue;
    RenderOptions options;
    options.tools = tools;
    options.kwargs = template_kwargs;
    options.add_generation_prompt = role != "assistant" && i + 1 < messages.size() && role_of(i + 1) == "assistant";
    const boost::json::array prefix(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    std::vector<std::int32_t> ids = tokenizer.encode(chat_template.render(prefix, options));
    if (ids.size() < sample.ids.size() || !std::equal(sample.ids.begin(), sample.ids.end(), ids.begin()))
      fail(ErrorCode::kInvalidArgument,
           "message {} ({}): rendering it changes the tokens of the messages before it, so a loss mask cannot be made; use a chat template that keeps "
           "earlier turns as they were",
           i, role);
    sample.mask.resize(ids.size(), is_trained(role) ? 1 : 0);
    sample.ids = std::move(ids);
  }
  if (const auto eos = tokenizer.eos_id(); eos && std::find(sample.ids.begin(), sample.ids.end(), *eos) == sample.ids.end()) {
    sample.ids.push_back(*eos);
    sample.mask.push_back(1);
    sample.eos_appended = true;
  }
  return sample;
}

}  // namespace prl::text
