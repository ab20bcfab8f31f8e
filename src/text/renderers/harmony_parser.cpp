#include "text/renderers/harmony_parser.hpp"

#include <algorithm>

#include "text/renderers/message_view.hpp"
#include "text/renderers/tool_calls.hpp"
#include "text/utf8.hpp"

namespace prl::text::renderers {
namespace {

using Ids = std::span<const std::int32_t>;

constexpr std::string_view kFunctions = "functions.";

// One message: its header, its body, and whether a token ended it.
struct Block {
  std::size_t begin = 0;       // of <|start|>
  std::size_t header_end = 0;  // of <|message|>
  std::size_t body_end = 0;
  bool is_closed = false;
};

std::size_t find(Ids ids, std::int32_t id, std::size_t from) {
  return static_cast<std::size_t>(std::find(ids.begin() + static_cast<std::ptrdiff_t>(from), ids.end(), id) - ids.begin());
}

std::vector<Block> blocks_of(Ids ids, const HarmonyTokens& tokens) {
  std::vector<Block> blocks;
  for (std::size_t i = find(ids, tokens.start, 0); i < ids.size(); i = find(ids, tokens.start, i)) {
    Block block{i, find(ids, tokens.message, i + 1), ids.size(), false};
    if (block.header_end == ids.size()) break;
    const auto ends = [&](std::int32_t id) { return id == tokens.start || id == tokens.end || id == tokens.call; };
    const auto end = std::find_if(ids.begin() + static_cast<std::ptrdiff_t>(block.header_end) + 1, ids.end(), ends);
    block.body_end = static_cast<std::size_t>(end - ids.begin());
    block.is_closed = end != ids.end() && *end != tokens.start;
    blocks.push_back(block);
    i = block.body_end + (block.is_closed ? 1 : 0);
  }
  return blocks;
}

// What of the header the prompt holds, if the completion goes on in or behind it.
Ids opened_message(const HarmonyTokens& tokens, Ids completion, Ids prompt) {
  if (!completion.empty() && completion[0] == tokens.start) return {};
  const auto start = std::find(prompt.rbegin(), prompt.rend(), tokens.start);
  if (start == prompt.rend()) return {};
  const Ids tail = prompt.subspan(static_cast<std::size_t>(prompt.rend() - start) - 1);
  return tail.first(std::min(find(tail, tokens.message, 0) + 1, tail.size()));
}

std::vector<std::int32_t> joined(Ids head, Ids tail) {
  std::vector<std::int32_t> ids(head.begin(), head.end());
  ids.insert(ids.end(), tail.begin(), tail.end());
  return ids;
}

// The characters from `begin` to the first that is white space, or '<' if `ends_at_tags`.
std::string_view word_at(std::string_view text, std::size_t begin, bool ends_at_tags) {
  std::size_t end = begin;
  while (end < text.size()) {
    std::size_t next = end;
    const char32_t c = next_code_point(text, next);
    if (is_python_space(c) || (ends_at_tags && c == U'<')) break;
    end = next;
  }
  return text.substr(begin, end - begin);
}

std::string recipient_of(std::string_view header) {
  constexpr std::string_view kMark = "to=";
  for (std::size_t at = header.find(kMark); at != std::string_view::npos; at = header.find(kMark, at + 1))
    if (const std::string_view word = word_at(header, at + kMark.size(), true); !word.empty()) return std::string(word);
  return {};
}

std::string channel_of(const Tokenizer& tokenizer, const HarmonyTokens& tokens, Ids header) {
  const std::size_t mark = find(header, tokens.channel, 0);
  if (mark == header.size()) return {};
  const std::string text = strip(tokenizer.decode(header.subspan(mark + 1), false));
  return std::string(word_at(text, 0, false));
}

ParsedToolCall call_of(std::string_view recipient, std::string body, bool is_closed) {
  ParsedToolCall call;
  call.raw = std::move(body);
  call.name = std::string(recipient.substr(kFunctions.size()));
  if (!read_json_arguments(call.raw, call))
    call.status = ToolCallStatus::kInvalidJson;
  else if (!is_closed)
    call.status = ToolCallStatus::kUnclosedBlock;
  else if (call.name.empty())
    call.status = ToolCallStatus::kMissingName;
  else
    call.id = new_call_id();
  return call;
}

}  // namespace

std::optional<HarmonyTokens> HarmonyTokens::find(const Tokenizer& tokenizer) {
  HarmonyTokens out;
  const std::pair<std::string_view, std::int32_t*> wanted[] = {{"<|start|>", &out.start},     {"<|message|>", &out.message},
                                                               {"<|channel|>", &out.channel}, {"<|end|>", &out.end},
                                                               {"<|return|>", &out.stop},     {"<|call|>", &out.call}};
  for (const auto& [spelling, id] : wanted) {
    const auto found = tokenizer.id_of(spelling);
    if (!found) return std::nullopt;
    *id = *found;
  }
  return out;
}

ParsedResponse parse_harmony(const Tokenizer& tokenizer, const HarmonyTokens& tokens, Ids completion_ids, Ids prompt_ids) {
  const Ids opened = opened_message(tokens, completion_ids, prompt_ids);
  ParsedResponse out;
  if (opened.empty() && (completion_ids.empty() || completion_ids[0] != tokens.start)) {
    const auto is_stop = [&](std::int32_t id) { return id == tokens.stop || id == tokens.call; };
    const auto end = std::find_if(completion_ids.begin(), completion_ids.end(), is_stop);
    out.content = tokenizer.decode(completion_ids.first(static_cast<std::size_t>(end - completion_ids.begin())), false);
    return out;
  }
  const std::vector<std::int32_t> all = joined(opened, completion_ids);
  const Ids ids = Ids(all).first(find(all, tokens.stop, 0));
  std::string reasoning, content, unusable;
  bool is_thought_open = false;
  for (const Block& block : blocks_of(ids, tokens)) {
    const Ids header = ids.subspan(block.begin + 1, block.header_end - block.begin - 1);
    std::string body = tokenizer.decode(ids.subspan(block.header_end + 1, block.body_end - block.header_end - 1), false);
    const std::string recipient = recipient_of(tokenizer.decode(header, false));
    const std::string channel = channel_of(tokenizer, tokens, header);
    if (recipient.starts_with(kFunctions)) {
      out.tool_calls.push_back(call_of(recipient, std::move(body), block.is_closed));
      if (out.tool_calls.back().status == ToolCallStatus::kOk) continue;
      // Without its own <|start|>, which may be the prompt's.
      unusable +=
          "\n" + tokenizer.decode(ids.subspan(block.begin + 1, block.body_end + (block.is_closed ? 1 : 0) - block.begin - 1), false);
    } else if (channel == "analysis") {
      reasoning += body;
      is_thought_open = block.body_end == ids.size() && !block.is_closed;
    } else if (channel == "final" || channel == "commentary") {
      content += body;
    }
  }
  reasoning = strip(reasoning);
  if (!reasoning.empty() || is_thought_open) out.reasoning_content = std::move(reasoning);
  out.content = strip(content);
  if (!unusable.empty()) out.content += out.content.empty() ? unusable.substr(1) : unusable;
  return out;
}

bool ends_in_analysis(const Tokenizer& tokenizer, const HarmonyTokens& tokens, Ids completion_ids, Ids prompt_ids) {
  const auto is_stop = [&](std::int32_t id) { return id == tokens.stop || id == tokens.call; };
  if (std::none_of(completion_ids.begin(), completion_ids.end(), is_stop)) return false;
  const std::vector<std::int32_t> all =
      joined(opened_message(tokens, completion_ids, prompt_ids), completion_ids.first(find(completion_ids, tokens.stop, 0)));
  for (const Block& block : blocks_of(all, tokens))
    if (!block.is_closed && block.body_end == all.size())
      return channel_of(tokenizer, tokens, Ids(all).subspan(block.begin + 1, block.header_end - block.begin - 1)) == "analysis";
  return false;
}

}  // namespace prl::text::renderers
