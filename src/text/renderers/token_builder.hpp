#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "text/renderer.hpp"

namespace prl::text::renderers {

/// A run of text with its attribution: body of a message, or scaffold around it.
struct Segment {
  std::string_view text;
  bool is_content = false;
};

/// Puts a conversation together. Special tokens go in by id and text never becomes one, so what users write cannot close a turn.
class TokenBuilder {
 public:
  explicit TokenBuilder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void special(std::int32_t id, int message, bool is_sampled = false) { push(id, message, is_sampled, is_sampled); }
  /// Encodes `segments` as one text, so that merges across their borders happen as in the template; each token belongs to the
  /// segment of its first byte. Scaffold segments are never sampled.
  void text(std::initializer_list<Segment> segments, int message, bool content_is_sampled = false);
  void scaffold(std::string_view scaffold_text, int message) { text({{scaffold_text, false}}, message); }
  RenderedConversation take() { return std::move(out_); }

 private:
  void push(std::int32_t id, int message, bool is_sampled, bool is_content);

  const Tokenizer& tokenizer_;
  RenderedConversation out_;
};

/// The id of a token a family cannot do without. Error{kInvalidArgument} naming renderer and token.
std::int32_t require_token(const Tokenizer& tokenizer, std::string_view token, std::string_view renderer);

/// prev_prompt + prev_completion, closed: nullopt if the ids go on behind the last close token. A completion without one was
/// cut short and gets `close`.
std::optional<std::vector<std::int32_t>> close_turn(std::span<const std::int32_t> prompt, std::span<const std::int32_t> completion,
                                                    const std::vector<std::int32_t>& stops, std::int32_t close);

/// `tail` behind ids of which nothing is said.
RenderedConversation behind(std::vector<std::int32_t> ids, RenderedConversation tail);

}  // namespace prl::text::renderers
