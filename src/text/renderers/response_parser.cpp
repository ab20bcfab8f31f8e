#include "text/renderers/response_parser.hpp"

#include <algorithm>

#include "text/renderers/message_view.hpp"

namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kThinkOpen = "<think>", kThinkClose = "</think>";

struct Reasoning {
  bool is_present = false;
  bool is_open = false;
  std::string text;
  std::size_t content_begin = 0;
};

// A completion that still carries its assistant header is read as if it did not.
std::size_t skip_header(const TokenText& text, std::string_view header) {
  if (!text.bytes().starts_with(header)) return 0;
  std::size_t begin = header.size();
  while (begin < text.size() && text.bytes()[begin] == '\n') ++begin;
  return begin;
}

std::string without(std::string text, std::string_view piece) {
  for (std::size_t at; (at = text.find(piece)) != kNowhere;) text.erase(at, piece.size());
  return text;
}

// `tool_mark`: what closes a block that has no closing tag; empty for nothing.
Reasoning scan_reasoning(const TokenText& text, std::size_t begin, bool is_prefilled, std::string_view tool_mark) {
  Reasoning out;
  out.content_begin = begin;
  const std::size_t open = text.find(kThinkOpen, begin);
  const bool is_explicit = open != kNowhere && strip(text.text(begin, open)).empty();
  if (!is_explicit && !is_prefilled) return out;
  out.is_present = true;
  const std::size_t start = is_explicit ? open + kThinkOpen.size() : begin;
  std::size_t close = text.find(kThinkClose, start);
  out.content_begin = close == kNowhere ? kNowhere : close + kThinkClose.size();
  if (close == kNowhere && !tool_mark.empty()) out.content_begin = close = text.find(tool_mark, start);
  out.is_open = close == kNowhere;
  out.text = without(text.text(start, close), kThinkOpen);
  return out;
}

// Does the assistant turn that the prompt opened begin inside a think block?
bool prompt_opens_reasoning(const Tokenizer& tokenizer, std::span<const std::int32_t> prompt, const ParseOptions& options) {
  const std::vector<std::int32_t>& stops = options.stop_ids;
  std::size_t begin = prompt.size();
  while (begin > 0 && std::find(stops.begin(), stops.end(), prompt[begin - 1]) == stops.end()) --begin;
  const TokenText tail(tokenizer, prompt.subspan(begin));
  const std::size_t header = tail.bytes().rfind(options.assistant_header);
  return scan_reasoning(tail, header == kNowhere ? 0 : header + options.assistant_header.size(), false, {}).is_open;
}

std::string_view closing_tool_mark(const ParseOptions& options) {
  return options.tool_closes_reasoning ? tool_open_mark(options.tools) : std::string_view();
}

}  // namespace

std::span<const std::int32_t> before_stop(std::span<const std::int32_t> ids, const std::vector<std::int32_t>& stops) {
  const auto is_stop = [&](std::int32_t id) { return std::find(stops.begin(), stops.end(), id) != stops.end(); };
  return ids.first(static_cast<std::size_t>(std::find_if(ids.begin(), ids.end(), is_stop) - ids.begin()));
}

bool ends_in_reasoning(const Tokenizer& tokenizer, std::span<const std::int32_t> completion_ids, std::span<const std::int32_t> prompt_ids,
                       const ParseOptions& options) {
  const TokenText text(tokenizer, before_stop(completion_ids, options.stop_ids));
  const bool is_prefilled = prompt_opens_reasoning(tokenizer, prompt_ids, options);
  return scan_reasoning(text, skip_header(text, options.assistant_header), is_prefilled, closing_tool_mark(options)).is_open;
}

void add_tool_blocks(ParsedResponse& out, const TokenText& text, std::vector<ToolBlock> blocks) {
  for (ToolBlock& block : blocks) {
    bool is_usable = true;
    for (ParsedToolCall& call : block.calls) {
      is_usable &= call.status == ToolCallStatus::kOk;
      if (call.status == ToolCallStatus::kOk && call.id.empty()) call.id = new_call_id();
      out.tool_calls.push_back(std::move(call));
    }
    if (is_usable) continue;
    if (!out.content.empty()) out.content += "\n";
    out.content += text.text(block.begin, block.end);
  }
}

ParsedResponse parse_tagged(const Tokenizer& tokenizer, std::span<const std::int32_t> completion_ids,
                            std::span<const std::int32_t> prompt_ids, const json::array& tools, const ParseOptions& options) {
  const TokenText text(tokenizer, before_stop(completion_ids, options.stop_ids));
  ParsedResponse out;
  std::size_t begin = skip_header(text, options.assistant_header);
  if (options.reads_thinking) {
    bool is_prefilled = prompt_opens_reasoning(tokenizer, prompt_ids, options);
    // Without the prompt nothing says where reasoning began; a closing tag says that it did.
    if (prompt_ids.empty()) is_prefilled |= text.find(kThinkClose, begin) != kNowhere;
    const Reasoning reasoning = scan_reasoning(text, begin, is_prefilled, closing_tool_mark(options));
    if (reasoning.is_open) {
      out.reasoning_content = reasoning.text;
      return out;
    }
    if (reasoning.is_present) {
      std::string stripped = strip(reasoning.text);
      if (!stripped.empty() || options.keeps_empty_reasoning) out.reasoning_content = std::move(stripped);
    }
    begin = reasoning.content_begin;
  }
  const std::string_view mark = tool_open_mark(options.tools);
  const std::size_t first = mark.empty() ? kNowhere : text.find(mark, begin);
  out.content = strip(text.text(begin, first));
  if (first != kNowhere) add_tool_blocks(out, text, read_tool_blocks(text, first, tools, options.tools));
  return out;
}

}  // namespace prl::text::renderers
