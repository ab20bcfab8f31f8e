#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "text/renderer.hpp"

namespace prl::text::renderers {

/// The tokens that structure harmony conversations: <|start|>HEADER<|message|>BODY and one of <|end|>, <|return|>, <|call|>. A header is
/// the role, " to=RECIPIENT" if there is one, and <|channel|> with the channel's name.
struct HarmonyTokens {
  std::int32_t start = 0, message = 0, channel = 0, end = 0, stop = 0, call = 0;  ///< stop: <|return|>
  /// nullopt if the tokenizer lacks one of them.
  static std::optional<HarmonyTokens> find(const Tokenizer& tokenizer);
};

/// A completion taken apart: the analysis channel is reasoning, the final channel and commentary without a recipient are content, messages
/// to "functions.NAME" are calls. It ends at <|return|>. A completion whose prompt ends inside a header or behind one goes on there;
/// without a prompt one that does not begin with <|start|> is content as it stands, up to its stop token. Never throws on model output.
ParsedResponse parse_harmony(const Tokenizer& tokenizer, const HarmonyTokens& tokens, std::span<const std::int32_t> completion_ids,
                             std::span<const std::int32_t> prompt_ids);
/// True if the completion was ended, by <|return|>, inside the analysis channel.
bool ends_in_analysis(const Tokenizer& tokenizer, const HarmonyTokens& tokens, std::span<const std::int32_t> completion_ids,
                      std::span<const std::int32_t> prompt_ids);

}  // namespace prl::text::renderers
