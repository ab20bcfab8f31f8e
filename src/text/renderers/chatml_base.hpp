#pragma once

#include <memory>
#include <string>
#include <vector>

#include "text/renderers/family_renderer.hpp"

namespace prl::text::renderers {

/// What the families with <|im_start|>role ... <|im_end|> turns share: turns, the generation prompt, stops, bridge and parser.
/// A subclass says how the first system turn, assistant turns and tool results look.
class ChatMlBase : public FamilyRenderer {
 public:
  RenderedConversation render(const boost::json::array& messages, const boost::json::array& tools,
                              bool add_generation_prompt) const override;

 protected:
  /// The stop ids of `parse` are set here.
  ChatMlBase(std::string name, std::shared_ptr<const Tokenizer> tokenizer, ThinkingRetention retention, ParseOptions parse);

  bool is_query(const MessageView& message) const override { return is_user_query(message); }
  void continue_conversation(TokenBuilder& out, const boost::json::array& new_messages, std::int32_t last_id) const override;

  /// System text and tools, in front of the other messages. Returns true if it used up messages[0].
  virtual bool begin(TokenBuilder& out, const boost::json::array& messages, const boost::json::array& tools) const = 0;
  /// The sampled part of an assistant turn, without the end token.
  virtual std::string assistant_body(const MessageView& message, const boost::json::array& messages, std::size_t last_query) const = 0;
  virtual void tool_result(TokenBuilder& out, const MessageView& message, bool opens_group, bool closes_group) const;
  /// The text of a user or system message as the family writes it.
  virtual std::string plain_text(const MessageView& message) const { return message.content(); }
  virtual std::string tool_text(const MessageView& message) const { return message.content(); }
  /// The content of a user, system or tool message between `before` and `after`, all one text.
  virtual void content(TokenBuilder& out, std::string_view before, const MessageView& message, std::string_view after) const;
  /// What follows the assistant header in the generation prompt.
  virtual std::string generation_prefix() const { return {}; }

  void turn(TokenBuilder& out, std::string_view role, std::initializer_list<Segment> body, int message) const;
  void message_turn(TokenBuilder& out, const boost::json::array& messages, std::size_t index, std::size_t last_query) const;
  void generation_prompt(TokenBuilder& out) const;
  void open_turn(TokenBuilder& out, int message) const { out.special(im_start_, message); }
  /// The end token and the newline behind it.
  void close_turn_with(TokenBuilder& out, int message, bool is_sampled = false) const;

 private:
  std::int32_t im_start_, im_end_;
};

/// Tools as hermes-style text: preamble, one JSON per line, instruction.
std::string hermes_tools(const boost::json::array& tools);
/// <tool_call> blocks as hermes JSON; `follows_text`: a newline goes before the first.
std::string hermes_calls(const MessageView& message, bool follows_text);

/// How calls are to be written as XML, for the model to read behind the list of tools.
std::string_view xml_call_instructions() noexcept;
enum class ArgumentSpelling : std::uint8_t {
  kPython,  ///< as str() writes them, lists and objects as JSON
  kJson,    ///< as JSON, but for texts
};
/// <tool_call> with a <parameter> per argument.
std::string xml_call(const CallView& call, ArgumentSpelling spelling = ArgumentSpelling::kPython);

}  // namespace prl::text::renderers
