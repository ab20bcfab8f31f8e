#pragma once

#include <memory>
#include <string>
#include <vector>

#include "text/renderers/message_view.hpp"
#include "text/renderers/response_parser.hpp"
#include "text/renderers/token_builder.hpp"

namespace prl::text::renderers {

/// What families with reasoning share: stops, the parser and the rules of the bridge. A subclass says what follows a closed turn.
class FamilyRenderer : public Renderer {
 public:
  std::string_view name() const noexcept override { return name_; }
  std::vector<std::int32_t> stop_token_ids() const override { return parse_.stop_ids; }
  std::string_view tool_call_mark() const noexcept override { return tool_open_mark(parse_.tools); }
  ParsedResponse parse_response(std::span<const std::int32_t> completion_ids, const boost::json::array& tools,
                                std::span<const std::int32_t> prompt_ids) const override;
  std::optional<RenderedConversation> bridge_to_next_turn(std::span<const std::int32_t> prev_prompt_ids,
                                                          std::span<const std::int32_t> prev_completion_ids,
                                                          const boost::json::array& new_messages,
                                                          const boost::json::array& tools) const override;

 protected:
  /// `close` ends a turn that was cut short. parse.stop_ids must be set.
  FamilyRenderer(std::string name, std::shared_ptr<const Tokenizer> tokenizer, ThinkingRetention retention, ParseOptions parse,
                 std::int32_t close);

  /// A message that begins a new user turn, before which reasoning is dropped.
  virtual bool is_query(const MessageView& message) const { return message.is("user"); }
  virtual bool ends_in_thought(std::span<const std::int32_t> prompt, std::span<const std::int32_t> completion) const;
  /// New messages (of the roles user, system and tool) and the generation prompt behind a turn that ended with `last_id`.
  virtual void continue_conversation(TokenBuilder& out, const boost::json::array& new_messages, std::int32_t last_id) const = 0;

  const Tokenizer& tokenizer() const noexcept { return *tokenizer_; }
  const std::vector<std::int32_t>& stops() const noexcept { return parse_.stop_ids; }
  TokenBuilder builder() const { return TokenBuilder(*tokenizer_, controls_); }
  /// The id of a token that structures conversations, which text never becomes. Error{kInvalidArgument} if there is none. For constructors.
  std::int32_t control(std::string_view spelling);

 private:
  std::string name_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  ThinkingRetention retention_;
  ParseOptions parse_;
  std::int32_t close_;
  std::vector<std::int32_t> controls_;
};

/// `asked`, or `fallback` for kAuto.
ThinkingRetention resolve(ThinkingRetention asked, ThinkingRetention fallback) noexcept;
/// The ids in the order that ParseOptions wants.
std::vector<std::int32_t> ascending(std::vector<std::int32_t> ids);
/// enable_thinking of the template kwargs; `fallback` unless it is true or false.
bool thinking_is_enabled(const RendererOptions& options, bool fallback = true);

}  // namespace prl::text::renderers
