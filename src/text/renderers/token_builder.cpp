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

// A control that the text spells is written as the text it is: cut in two, it is no token's spelling.
void TokenBuilder::push_text(std::int32_t id, int message, bool is_sampled, bool is_content) {
  if (std::find(controls_.begin(), controls_.end(), id) == controls_.end()) return push(id, message, is_sampled, is_content);
  const std::string_view bytes = tokenizer_.bytes_of(id);
  for (const std::string_view part : {bytes.substr(0, 1), bytes.substr(1)})
    for (const std::int32_t piece : tokenizer_.encode(part, {.allow_special = false, .begins_text = false}))
      push(piece, message, is_sampled, is_content);
}

void TokenBuilder::text(std::span<const Segment> segments, int message, bool content_is_sampled, Attribution attribution) {
  std::string joined;
  for (const Segment& segment : segments) joined += segment.text;
  if (joined.empty()) return;
  const Encoding encoding = tokenizer_.encode_with_offsets(joined, {.allow_special = false, .begins_text = false});
  std::size_t first = 0, end = segments[0].text.size();
  for (std::size_t i = 0; i < encoding.ids.size(); ++i) {
    while (encoding.offsets[i].first >= end && first + 1 < segments.size()) end += segments[++first].text.size();
    bool is_content = segments[first].is_content;
    if (attribution == Attribution::kAnyByte)
      for (std::size_t next = first + 1, begin = end; next < segments.size() && begin < encoding.offsets[i].second; ++next) {
        is_content |= segments[next].is_content && !segments[next].text.empty();
        begin += segments[next].text.size();
      }
    push_text(encoding.ids[i], message, content_is_sampled && is_content, is_content);
  }
}

void TokenBuilder::mark(std::string_view spelling, int message, bool is_sampled) {
  if (const auto id = tokenizer_.id_of(spelling)) return push(*id, message, is_sampled, is_sampled);
  text({{spelling, is_sampled}}, message, is_sampled);
}

std::vector<std::int32_t> marker_ids(const Tokenizer& tokenizer, std::string_view spelling) {
  if (const auto id = tokenizer.id_of(spelling)) return {*id};
  return tokenizer.encode(spelling, {.allow_special = false, .begins_text = false});
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
