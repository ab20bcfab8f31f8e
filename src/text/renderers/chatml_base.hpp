#pragma once

#include <memory>
#include <string>
#include <vector>

#include "text/renderers/message_view.hpp"
#include "text/renderers/response_parser.hpp"
#include "text/renderers/token_builder.hpp"

namespace prl::text::renderers {

/// What the families with <|im_start|>role ... <|im_end|> turns share: turns, the generation prompt, stops, bridge and parser.
/// A subclass says how the first system turn, assistant turns and tool results look.
class ChatMlBase : public Renderer {
 public:
  RenderedConversation render(const boost::json::array& messages, const boost::json::array& tools,
                              bool add_generation_prompt) const override;
  std::optional<RenderedConversation> bridge_to_next_turn(std::span<const std::int32_t> prev_prompt_ids,
                                                          std::span<const std::int32_t> prev_completion_ids,
                                                          const boost::json::array& new_messages,
                                                          const boost::json::array& tools) const override;
  std::vector<std::int32_t> stop_token_ids() const override { return stops_; }
  ParsedResponse parse_response(std::span<const std::int32_t> completion_ids, const boost::json::array& tools,
                                std::span<const std::int32_t> prompt_ids) const override;
  std::string_view name() const noexcept override { return name_; }

 protected:
  ChatMlBase(std::string name, std::shared_ptr<const Tokenizer> tokenizer, ThinkingRetention retention, ParseOptions parse);

  /// System text and tools, in front of the other messages. Returns true if it used up messages[0].
  virtual bool begin(TokenBuilder& out, const boost::json::array& messages, const boost::json::array& tools) const = 0;
  /// The sampled part of an assistant turn, without the end token.
  virtual std::string assistant_body(const MessageView& message, const boost::json::array& messages, std::size_t last_query) const = 0;
  virtual void tool_result(TokenBuilder& out, const MessageView& message, bool opens_group, bool closes_group) const;
  /// What follows the assistant header in the generation prompt.
  virtual std::string generation_prefix() const { return {}; }

  void turn(TokenBuilder& out, std::string_view role, std::initializer_list<Segment> body, int message) const;
  void message_turn(TokenBuilder& out, const boost::json::array& messages, std::size_t index, std::size_t last_query) const;
  void generation_prompt(TokenBuilder& out) const;
  void open_turn(TokenBuilder& out, int message) const { out.special(im_start_, message); }
  /// The end token and the newline behind it.
  void close_turn_with(TokenBuilder& out, int message, bool is_sampled = false) const;
  const Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  std::string name_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  ThinkingRetention retention_;
  ParseOptions parse_;
  std::int32_t im_start_, im_end_;
  std::vector<std::int32_t> stops_;
};

/// Tools as hermes-style text: preamble, one JSON per line, instruction.
std::string hermes_tools(const boost::json::array& tools);
/// <tool_call> blocks as hermes JSON; `follows_text`: a newline goes before the first.
std::string hermes_calls(const MessageView& message, bool follows_text);
/// enable_thinking of the template kwargs, true unless it is false.
bool thinking_is_enabled(const RendererOptions& options);

}  // namespace prl::text::renderers
