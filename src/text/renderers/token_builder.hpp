#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
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

/// Which segment a token belongs to that has bytes of several.
enum class Attribution : std::uint8_t {
  kFirstByte,  ///< that of its first byte
  kAnyByte,    ///< the body, if any of its bytes is the body's
};

/// Puts a conversation together. Special tokens go in by id and text never becomes one, so what users write cannot close a turn.
class TokenBuilder {
 public:
  /// `controls`: ids that text never becomes although the tokenizer does not call them special; role markers of some families.
  explicit TokenBuilder(const Tokenizer& tokenizer, std::span<const std::int32_t> controls = {})
      : tokenizer_(tokenizer), controls_(controls) {}

  void special(std::int32_t id, int message, bool is_sampled = false) { push(id, message, is_sampled, is_sampled); }
  /// A marker that is a token in some tokenizers of a family, special or not, and text in others.
  void mark(std::string_view spelling, int message, bool is_sampled = false);
  /// Encodes `segments` as one text, so that merges across their borders happen as in the template. Scaffold segments are never sampled.
  void text(std::span<const Segment> segments, int message, bool content_is_sampled = false,
            Attribution attribution = Attribution::kFirstByte);
  void text(std::initializer_list<Segment> segments, int message, bool content_is_sampled = false,
            Attribution attribution = Attribution::kFirstByte) {
    text(std::span<const Segment>(segments.begin(), segments.size()), message, content_is_sampled, attribution);
  }
  /// Text that the model writes.
  void sampled(std::string_view body, int message) { text({{body, true}}, message, true); }
  void scaffold(std::string_view scaffold_text, int message) { text({{scaffold_text, false}}, message); }
  RenderedConversation take() { return std::move(out_); }

 private:
  void push(std::int32_t id, int message, bool is_sampled, bool is_content);
  void push_text(std::int32_t id, int message, bool is_sampled, bool is_content);

  const Tokenizer& tokenizer_;
  std::span<const std::int32_t> controls_;
  RenderedConversation out_;
};

/// The token of a marker, or the tokens of its text if there is none.
std::vector<std::int32_t> marker_ids(const Tokenizer& tokenizer, std::string_view spelling);

/// The id of a token a family cannot do without. Error{kInvalidArgument} naming renderer and token.
std::int32_t require_token(const Tokenizer& tokenizer, std::string_view token, std::string_view renderer);

/// prev_prompt + prev_completion, closed: nullopt if the ids go on behind the last close token. A completion without one was
/// cut short and gets `close`.
std::optional<std::vector<std::int32_t>> close_turn(std::span<const std::int32_t> prompt, std::span<const std::int32_t> completion,
                                                    const std::vector<std::int32_t>& stops, std::int32_t close);

/// `tail` behind ids of which nothing is said.
RenderedConversation behind(std::vector<std::int32_t> ids, RenderedConversation tail);

}  // namespace prl::text::renderers
