#include "text/renderers/token_builder.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::text::renderers {

void TokenBuilder::push(std::int32_t id, int message, bool is_sampled, bool is_content) {
  out_.ids.push_back(id);
  out_.message_indices.push_back(message);
  out_.sampled_mask.push_back(is_sampled);
  out_.is_content.push_back(is_content);
}

void TokenBuilder::text(std::initializer_list<Segment> segments, int message, bool content_is_sampled) {
  std::string joined;
  for (const Segment& segment : segments) joined += segment.text;
  if (joined.empty()) return;
  const Encoding encoding = tokenizer_.encode_with_offsets(joined, {.allow_special = false, .begins_text = false});
  const Segment* segment = segments.begin();
  std::size_t end = segment->text.size();
  for (std::size_t i = 0; i < encoding.ids.size(); ++i) {
    while (encoding.offsets[i].first >= end && segment + 1 != segments.end()) end += (++segment)->text.size();
    push(encoding.ids[i], message, content_is_sampled && segment->is_content, segment->is_content);
  }
}

std::int32_t require_token(const Tokenizer& tokenizer, std::string_view token, std::string_view renderer) {
  const auto id = tokenizer.id_of(token);
  if (!id)
    fail(ErrorCode::kInvalidArgument,
         "[renderer] '{}' needs the token '{}', which the tokenizer lacks; is the renderer's name right for this model?", renderer, token);
  return *id;
}

std::optional<std::vector<std::int32_t>> close_turn(std::span<const std::int32_t> prompt, std::span<const std::int32_t> completion,
                                                    const std::vector<std::int32_t>& stops, std::int32_t close) {
  std::vector<std::int32_t> ids(prompt.begin(), prompt.end());
  ids.insert(ids.end(), completion.begin(), completion.end());
  const auto is_stop = [&](std::int32_t id) { return std::find(stops.begin(), stops.end(), id) != stops.end(); };
  const auto last = std::find_if(completion.rbegin(), completion.rend(), is_stop);
  if (last == completion.rend())
    ids.push_back(close);
  else if (last != completion.rbegin())
    return std::nullopt;
  return ids;
}

RenderedConversation behind(std::vector<std::int32_t> ids, RenderedConversation tail) {
  const std::size_t n = ids.size();
  tail.ids.insert(tail.ids.begin(), ids.begin(), ids.end());
  tail.message_indices.insert(tail.message_indices.begin(), n, -1);
  tail.sampled_mask.insert(tail.sampled_mask.begin(), n, 0);
  tail.is_content.insert(tail.is_content.begin(), n, 0);
  return tail;
}

}  // namespace prl::text::renderers
