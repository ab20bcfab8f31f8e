#include "text/renderers/family_renderer.hpp"

#include <algorithm>

namespace prl::text::renderers {

namespace json = boost::json;

FamilyRenderer::FamilyRenderer(std::string name, std::shared_ptr<const Tokenizer> tokenizer, ThinkingRetention retention,
                               ParseOptions parse, std::int32_t close)
    : name_(std::move(name)), tokenizer_(std::move(tokenizer)), retention_(retention), parse_(std::move(parse)), close_(close) {
  controls_ = parse_.stop_ids;
}

std::int32_t FamilyRenderer::control(std::string_view spelling) {
  const std::int32_t id = require_token(*tokenizer_, spelling, name_);
  controls_.push_back(id);
  return id;
}

ParsedResponse FamilyRenderer::parse_response(std::span<const std::int32_t> completion_ids, const json::array& tools,
                                              std::span<const std::int32_t> prompt_ids) const {
  return parse_tagged(*tokenizer_, completion_ids, prompt_ids, tools, parse_);
}

bool FamilyRenderer::ends_in_thought(std::span<const std::int32_t> prompt, std::span<const std::int32_t> completion) const {
  return parse_.reads_thinking && ends_in_reasoning(*tokenizer_, completion, prompt, parse_);
}

std::optional<RenderedConversation> FamilyRenderer::bridge_to_next_turn(std::span<const std::int32_t> prev_prompt_ids,
                                                                        std::span<const std::int32_t> prev_completion_ids,
                                                                        const json::array& new_messages, const json::array&) const {
  if (prev_prompt_ids.empty() || new_messages.empty() || retention_ == ThinkingRetention::kTemplate) return std::nullopt;
  for (std::size_t i = 0; i < new_messages.size(); ++i) {
    const MessageView message(new_messages, i);
    if (!message.is("user") && !message.is("system") && !message.is("tool")) return std::nullopt;
    if (retention_ == ThinkingRetention::kToolCycle && is_query(message)) return std::nullopt;
  }
  std::vector<std::int32_t> completion(prev_completion_ids.begin(), prev_completion_ids.end());
  if (ends_in_thought(prev_prompt_ids, completion)) {
    const bool was_cut = before_stop(completion, parse_.stop_ids).size() == completion.size();
    // The model ended its turn inside a thought: no template writes that.
    if (!was_cut) return std::nullopt;
    for (std::int32_t id : marker_ids(*tokenizer_, "</think>")) completion.push_back(id);
  }
  auto ids = close_turn(prev_prompt_ids, completion, parse_.stop_ids, close_);
  if (!ids) return std::nullopt;
  TokenBuilder out = builder();
  continue_conversation(out, new_messages, ids->back());
  return behind(std::move(*ids), out.take());
}

ThinkingRetention resolve(ThinkingRetention asked, ThinkingRetention fallback) noexcept {
  return asked == ThinkingRetention::kAuto ? fallback : asked;
}

std::vector<std::int32_t> ascending(std::vector<std::int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

bool thinking_is_enabled(const RendererOptions& options, bool fallback) {
  const json::value* flag = options.template_kwargs.if_contains("enable_thinking");
  return flag != nullptr && flag->is_bool() ? flag->get_bool() : fallback;
}

}  // namespace prl::text::renderers
